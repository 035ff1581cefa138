"""Failover in the middle of traffic: a primary behind Sentinels, and a node of a Cluster. Real servers, threads and tasks.

Replication is asynchronous, so the new primary may not know the last writes of the old one: at most what was admitted while they
were under way is admitted again, and in any case no more than one full limit for each failover.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fault_lab.scheduling_delay import Watch
from fault_lab.topologies import ReplicatedCluster, WatchedHouse
from fault_lab.traffic import LIMITS, Tally, Traffic, between, over
from limitkeeper import AsyncLimiter, Limiter, RedisStore, StoreError, TokenBucket
from limitkeeper.stores.redis.cluster import slot_of

BUDGET = 0.15
SLACK = 0.15
RECOVERY = 0.3
#: A budget that no busy machine uses up, where it is not the point.
AMPLE = 30.0
#: Enough keys that every node of a cluster has some.
KEYS = tuple(f"user:{number}" for number in range(9))


@pytest.fixture(scope="module")
def watched() -> Iterator[WatchedHouse]:
    with WatchedHouse() as house:
        yield house


@pytest.fixture(scope="module")
def cluster() -> Iterator[ReplicatedCluster]:
    with ReplicatedCluster() as house:
        yield house


def failed_over(house: WatchedHouse | ReplicatedCluster, name: str, change: Callable[[], None]) -> Tally:
    """Traffic around a change of primaries, until all is well again: no promise is broken; what was seen."""
    with RedisStore(house.url) as store:
        store.answers_within(round(BUDGET * 1e6))
        traffic = Traffic(store, name=name, keys=KEYS, pause=0.002).start()
        assert traffic.go_on(0.3, until=lambda seen: seen.bucket_at)
        change()
        changed = time.monotonic()
        with Watch(house.alive) as watch:
            recovery = traffic.recovery(changed)
            again = traffic.go_on(until=lambda seen: between(seen.bucket_at, changed + recovery) > 0)
        tally = traffic.stop()
    assert tally.strange == []
    assert tally.hung == 0
    assert tally.slow <= BUDGET + SLACK, f"{tally.longest:.3f} s in a call, threads woke {tally.late:.3f} s late"
    assert over(tally, LIMITS, forgotten=1) == {}
    assert recovery <= watch.allows(5 * RECOVERY), f"the machine was {watch.late:.3f} s late"
    assert again, "no call was admitted after the failover"
    return tally


def test_a_failover_by_sentinels_is_survived(watched):
    """The sentinels promote the replica: callers reach it within the budget of each call."""
    failed_over(watched, "watched", watched.promote)


def test_a_planned_failover_by_sentinels_admits_no_more_than_the_stated_bound(watched):
    """Stores connected before it, and one that comes after it: beyond the rule is admitted at most what was left, plus what
    the rate gives until the last store has left the old primary, which is long before the Sentinels demote it."""
    rate, burst = 100, 200
    old, admitted, over = watched.primary().port, list[tuple[float, int]](), threading.Event()

    def work(store: RedisStore) -> None:
        limiter = Limiter(TokenBucket(f"{rate}/s", burst=burst), store=store, name="planned")
        while not over.is_set():
            with contextlib.suppress(StoreError):
                if limiter.hit("k"):
                    server = store.route.direct
                    admitted.append((time.monotonic(), server.port if server else old))
            time.sleep(0.002)

    async def tasks(store: RedisStore) -> None:
        limiter = AsyncLimiter(TokenBucket(f"{rate}/s", burst=burst), store=store, name="planned")
        while not over.is_set():
            with contextlib.suppress(StoreError):
                if await limiter.hit("k"):
                    server = store.route.direct
                    admitted.append((time.monotonic(), server.port if server else old))
            await asyncio.sleep(0.002)

    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(RedisStore(watched.url)) for _ in range(3)]
        threads = [threading.Thread(target=work, args=(store,)) for store in stores]
        threads[0] = threading.Thread(target=lambda: asyncio.run(tasks(stores[0])))
        begun = time.monotonic()
        for thread in threads[:2]:
            thread.start()
        time.sleep(0.5)
        failed_over_at = time.monotonic()
        watched.promote()
        threads[2].start()
        end = time.monotonic() + 8
        while time.monotonic() < end and any(store.route.direct and store.route.direct.port == old for store in stores):
            time.sleep(0.01)
        time.sleep(0.5)
        over.set()
        for thread in threads:
            thread.join()
        ended = time.monotonic()
    both = max(at for at, port in admitted if port == old) - failed_over_at
    assert both < 5 * 1.3
    assert len(admitted) <= burst + rate * (ended - begun) + burst + rate * both


def test_a_node_of_a_cluster_fails_over(cluster):
    """A node is killed and its replica takes its slots: callers reach it; the other nodes' keys are exact all the time."""
    with RedisStore(cluster.url, timeout=AMPLE) as store:
        traffic = Traffic(store, name="elsewhere", keys=KEYS, threads=2, tasks=2)
        window = traffic.near["window"].named[0]
        elsewhere = tuple(key for key in KEYS if cluster.keeper(slot_of(store.names.key(window, key))) != 0)
        traffic.keys = elsewhere
        traffic.start()
        failed_over(cluster, "cluster killed", cluster.fail_over)
        traffic.go_on(until=lambda seen: all(seen.admitted[f"window {key}"] >= LIMITS["window"].capacity for key in elsewhere))
        traffic.go_on(0.2)
        tally = traffic.stop()
    assert elsewhere
    assert {tally.admitted[f"window {key}"] for key in elsewhere} == {LIMITS["window"].capacity}
    assert (tally.errors.total(), tally.strange, tally.hung) == (0, [], 0)


def test_a_planned_failover_of_a_cluster_forgets_nothing(cluster):
    """The replica catches up before it takes over: no window admits more than its limit."""
    cluster.mend()
    tally = failed_over(cluster, "cluster promoted", cluster.promote)
    assert over(tally, LIMITS) == {}
