"""A primary behind sentinels: found, checked, and followed through failovers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from fault_lab.scheduling_delay import Watch
from limitkeeper import AsyncLimiter, Limiter, StoreError, StoreUnavailable, TokenBucket
from limitkeeper.stores.redis import RedisStore
from limitkeeper.stores.redis.sentinel import CONFIRM_US
from limitkeeper.testing import ManualClock
from servers.sentinel import Watched
from servers.valkey import Valkey, free_port
from stand_ins import Loop, driven

PASSWORD = "open sesame"
MANY = TokenBucket("1/h", burst=1_000_000)
#: What scheduling of threads and loops may take on top of a budget; how late the machine is comes on top of that.
NOISE = 0.5


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with Watched(password=PASSWORD) as started:
        yield started


def test_the_primary_is_found_in_both_modes(watched: Watched) -> None:
    """The sentinels name the primary, and ROLE confirms it; a sentinel that is down is passed over."""
    with RedisStore(watched.url.replace("@", f"@127.0.0.1:{free_port()},"), prefix="found", timeout="60s") as store:
        assert Limiter(MANY, store=store).hit("k").remaining == 999_999
        assert driven(AsyncLimiter(MANY, store=store).hit("k")).remaining == 999_998
        assert store.route.direct is not None
        assert store.route.direct.port == watched.primary().port


def test_an_unknown_service_is_an_error_with_its_name(watched: Watched) -> None:
    """The reply of each sentinel is in the error."""
    with (
        RedisStore(watched.url.replace("mymaster", "other"), timeout="60s") as store,
        pytest.raises(StoreUnavailable, match="knows no service 'other'"),
    ):
        Limiter(MANY, store=store).hit("k")


def test_a_ready_sentinel_client(watched: Watched) -> None:
    """`Sentinel.master_for` leads to the same primary, now and after a failover."""
    sentinels = redis.Sentinel([("127.0.0.1", sentinel.port) for sentinel in watched.sentinels], password=PASSWORD)
    with sentinels.master_for(watched.service) as client, RedisStore(client, prefix="ready", timeout="60s") as store:
        assert store.address.kind == "sentinel"
        assert Limiter(MANY, store=store).hit("k")
    for sentinel in sentinels.sentinels:
        sentinel.close()


def settled(watched: Watched, old: Valkey) -> None:
    """Makes the old primary follow the new one, as the sentinels do ten seconds later, so that there can be another failover."""
    with old.client(password=PASSWORD) as client:
        client.replicaof("127.0.0.1", watched.primary().port)
    end = time.monotonic() + 60
    while not watched.in_step() and time.monotonic() < end:
        time.sleep(0.02)


def test_a_primary_that_became_a_replica_is_left(watched: Watched) -> None:
    """A planned failover: the old primary stays up and replies READONLY; the same call is repeated on the new one."""
    with RedisStore(watched.url, prefix="planned", timeout="60s") as store:
        limiter, old = Limiter(MANY, store=store), watched.primary()
        assert limiter.hit("k")
        watched.failover()
        settled(watched, old)
        assert limiter.hit("k")
        assert driven(AsyncLimiter(MANY, store=store).hit("k"))
        assert store.route.direct is not None
        assert store.route.direct.port != old.port


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_replaced_primary_is_left_before_it_is_demoted(
    watched: Watched, mode: str, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    """For ten seconds after a planned failover the old primary accepts writes and reports itself as a primary: a Sentinel that is
    polled four times a second names the new one, and one decision later everything goes there."""
    clock = ManualClock()
    with RedisStore(watched.url, prefix=f"replaced {mode}", timeout="60s", budget_clock=clock) as store, Loop() as loop:
        limiter, tasks, old = Limiter(MANY, store=store), AsyncLimiter(MANY, store=store), watched.primary()

        def hit() -> int | None:
            assert limiter.hit("k") if mode == "sync" else loop.call(tasks.hit("k"))
            return store.route.direct and store.route.direct.port

        assert hit() == old.port
        watched.failover()
        assert hit() == old.port
        clock.advance(CONFIRM_US / 1e6)
        if mode == "sync":
            assert hit() == watched.primary().port
        else:
            eventually(lambda: hit() == watched.primary().port)
        with old.client(password=PASSWORD) as client:
            assert client.role()[0] in (b"master", "master")
    settled(watched, old)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_sentinel_that_hangs_costs_a_part_of_the_budget(watched: Watched, mode: str) -> None:
    """A store that looks for the primary calls the next sentinel in time; one that knows the primary stays connected to it."""
    frozen = watched.sentinels[0]
    frozen.freeze()
    try:
        with RedisStore(watched.url, prefix=f"frozen {mode}", timeout="9s") as store, Loop() as loop:
            limiter, tasks = Limiter(MANY, store=store), AsyncLimiter(MANY, store=store)
            route: Any = store.route
            for _ in range(2):
                assert route._sentinels[0].port == frozen.port
                assert limiter.hit("k") if mode == "sync" else loop.call(tasks.hit("k"))
                route._sentinels.sort(key=lambda one: one.port != frozen.port)
                route.confirm_at_us = 0
    finally:
        frozen.thaw()


@pytest.mark.asyncio_only(reason="it leaves the servers of the module changed")
def test_a_failover_during_traffic(watched: Watched, watch: Watch, eventually: Callable[[Callable[[], bool]], None]) -> None:
    """The primary is killed under four threads and a loop: every call answers or fails within its budget, and then all continue.

    A failover may forget what had not been replicated, so the bound is: at most the limit is admitted once more for each
    failover; here the limit is far away, and the test checks that the new primary has all that the old one had replicated.
    """
    budget = 0.4
    with RedisStore(watched.url, prefix="failover", timeout=budget) as store:
        limiter, tasks = Limiter(MANY, store=store), AsyncLimiter(MANY, store=store)
        limiter.hit("k")
        over = threading.Event()
        answers: list[tuple[float, float, object]] = []

        def note(begun: float, result: object) -> None:
            answers.append((begun, time.monotonic() - begun, result))

        def work() -> None:
            while not over.is_set():
                begun = time.monotonic()
                try:
                    note(begun, limiter.hit("k").remaining)
                except StoreError as error:
                    note(begun, error)
                time.sleep(0.01)

        async def loop_work() -> None:
            while not over.is_set():
                begun = time.monotonic()
                try:
                    note(begun, (await tasks.hit("k")).remaining)
                except StoreError as error:
                    note(begun, error)
                await asyncio.sleep(0.01)

        threads = [threading.Thread(target=work) for _ in range(4)]
        threads.append(threading.Thread(target=lambda: asyncio.run(loop_work())))
        for thread in threads:
            thread.start()
        eventually(lambda: sum(isinstance(result, int) for _, _, result in answers) > 50)
        known = min(result for _, _, result in list(answers) if isinstance(result, int))
        with watched.primary().client(password=PASSWORD) as client:
            client.set("behind what is known", 1)
            assert client.wait(1, 60_000) == 1, "the replica does not follow"
        old = watched.kill_primary()
        died = time.monotonic()
        eventually(lambda: any(begun > died and isinstance(result, int) for begun, _, result in list(answers)))
        time.sleep(0.3)
        over.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        eventually(lambda: watched.primary() is not old)  # the polled sentinel may notice it last
        assert max(took for _, took, _ in answers) < watch.allows(budget + NOISE)
        after = [result for begun, _, result in answers if isinstance(result, int) and begun > died]
        assert after
        assert max(after) < known
