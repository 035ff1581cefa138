"""Law 1 on leases: a refused call that comes again at `retry_after` is allowed, unless another node fetched in between.

Random histories on a virtual clock, each played again up to its last call, which is refused, and then to the promised moment.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from leased_fleet import Fleet

from limitkeeper import Decision, LeakyBucket, Limiter, SlidingWindowCounter, SlidingWindowLog, TokenBucket
from limitkeeper.algorithms import FixedWindow, Limit

LIMITS: list[Limit] = [
    TokenBucket("100/s burst 10"),
    TokenBucket("1000/s burst 100"),
    TokenBucket("20/s burst 5"),
    TokenBucket("3/s burst 7"),
    LeakyBucket("100/s", 20),
    FixedWindow("20/s"),
    SlidingWindowLog("20/s"),
    SlidingWindowCounter("200/s"),
]


class History(NamedTuple):
    """Calls (microseconds from the beginning, node, cost) on a fleet."""

    limit: Limit
    nodes: int
    options: dict[str, Any]
    calls: list[tuple[int, int, int]]


def history(seed: int, nodes: int, mixed: bool) -> History:
    chance = random.Random(seed)
    limit = chance.choice(LIMITS)
    costs = [1, 1, 1, 2, 3, limit.capacity // 4, limit.capacity // 2] if mixed else [1]
    per_us = chance.choice([0.5, 1, 2, 5, 10]) * limit.count / limit.period
    options = {"lease": chance.choice([None, None, None, 2, 5, 20]), "life": chance.choice(["100ms", "100ms", "20ms", "1s"])}
    calls, moment = [], 0
    for _ in range(chance.choice([20, 60])):
        gaps = [int(chance.expovariate(per_us)), int(chance.expovariate(per_us)), int(chance.expovariate(per_us)), 0, 1]
        moment += chance.choice(gaps)
        calls.append((moment, chance.randrange(nodes), max(1, chance.choice(costs))))
    return History(limit, nodes, options, calls)


class Played:
    """A fleet after a history, its last call repeated until it was refused."""

    def __init__(self, told: History) -> None:
        self.fleet = Fleet(told.limit, told.nodes, **told.options)
        self.begin_us = self.fleet.clock.now_us()
        for moment, node, cost in told.calls:
            self.fleet.to(self.begin_us + moment)
            self.last = self.hit(node, cost)
        self.node, self.cost = told.calls[-1][1:]
        while self.last:
            self.last = self.hit(self.node, self.cost)

    def hit(self, node: int, cost: int) -> Decision:
        limiter: Limiter = self.fleet.limiters[node]
        decision = limiter.hit(self.fleet.key, cost)
        if self.fleet.stores[node].cache.due:
            self.fleet.stores[node].tend()
        return decision

    def again_after(self, wait_us: int) -> tuple[Decision, int]:
        """The same call after so long without other traffic, and how often the parent was asked meanwhile."""
        asked = self.fleet.tally.operations
        self.fleet.to(self.fleet.clock.now_us() + wait_us)
        asked = self.fleet.tally.operations - asked
        return self.hit(self.node, self.cost), asked


@pytest.mark.parametrize("mixed", [False, True], ids=["cost 1", "mixed costs"])
def test_one_node_is_never_told_too_early(mixed: bool) -> None:
    """With one node, a call that was refused is allowed when it comes again at its retry, whatever the costs."""
    for seed in range(80):
        played = Played(history(seed, 1, mixed))
        again, _ = played.again_after(played.last.retry_us)
        assert again, f"history {seed}"


@pytest.mark.parametrize("mixed", [False, True], ids=["cost 1", "mixed costs"])
def test_several_nodes_are_told_too_early_only_by_a_fetch(mixed: bool) -> None:
    """With several nodes, a call comes too early only if a background asked the parent between the two calls (or, of a rule that
    is not a bucket, before)."""
    early = 0
    for seed in range(80):
        played = Played(history(seed, 2 + seed % 3, mixed))
        again, fetches = played.again_after(played.last.retry_us)
        assert again or fetches or not played.fleet.limit.gain, f"history {seed}"
        early += not again
    assert early <= 2


def test_one_node_with_cost_1_is_told_no_later_than_needed() -> None:
    """With one node and calls of cost 1 on a bucket or window, a call one microsecond before its retry is refused."""
    for seed in range(80):
        told = history(seed, 1, False)
        played = Played(told)
        if played.last.retry_us > 1 and told.limit.reserves:
            assert not played.again_after(played.last.retry_us - 1)[0], f"history {seed}"
