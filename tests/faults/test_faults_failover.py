"""Failover in the middle of traffic: a primary behind Sentinels, and a node of a Cluster. Real servers, threads and tasks.

Replication is asynchronous, so the new primary may not know the last writes of the old one: at most what was admitted while they
were under way is admitted again, and in any case no more than one full limit for each failover.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from headgate import RedisStore
from laboratory.houses import ReplicatedCluster, WatchedHouse
from laboratory.traffic import LIMITS, Tally, Traffic, between, over

BUDGET = 0.15
SLACK = 0.15
RECOVERY = 0.3
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


def failed_over(url: str, name: str, change, after: float = 0.9) -> tuple[Tally, float]:
    """Traffic around a change of primaries; what was seen, and when the change was over."""
    with RedisStore(url) as store:
        store.answers_within(round(BUDGET * 1e6))
        traffic = Traffic(store, name=name, keys=KEYS, pause=0.002).start()
        time.sleep(0.3)
        change()
        over_at = time.monotonic()
        time.sleep(after)
        return traffic.stop(), over_at


def held(tally: Tally, over_at: float) -> None:
    assert tally.strange == []
    assert tally.hung == 0
    assert tally.longest <= BUDGET + SLACK + tally.late, f"{tally.longest:.3f} s in a call, threads woke {tally.late:.3f} s late"
    assert over(tally, LIMITS, forgotten=1) == {}
    assert tally.unwell(over_at + RECOVERY + tally.late) == ""
    assert between(tally.bucket_at, over_at + RECOVERY) > 0


def test_a_failover_by_sentinels_is_survived(watched):
    """The sentinels make the replica the primary: callers are led there, within the budget of each call."""
    held(*failed_over(watched.url, "watched", watched.promote))


def test_a_node_of_a_cluster_fails_over(cluster):
    """A node is killed and its replica takes its slots: callers are led there; the other nodes' keys are exact all the time."""
    tally, over_at = failed_over(cluster.url, "cluster killed", cluster.fail_over)
    held(tally, over_at)
    exact = {tally.admitted[f"window {key}"] for key in KEYS}
    assert LIMITS["window"].capacity in exact


def test_a_planned_failover_of_a_cluster_forgets_nothing(cluster):
    """The replica catches up before it takes over: every window admits exactly its limit."""
    cluster.mend()
    tally, over_at = failed_over(cluster.url, "cluster promoted", cluster.promote)
    held(tally, over_at)
    assert over(tally, LIMITS) == {}
