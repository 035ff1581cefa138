"""Law 1 on leases: a refused call that comes again at `retry_after` is allowed; on logs and counters unless another node fetched.

Random histories on a virtual clock, each played again up to its last call, which is refused, and then to the promised moment.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, NamedTuple

import pytest
from leased_fleet import Fleet

from limitkeeper import (
    AsyncLimiter,
    Decision,
    LeakyBucket,
    LeasedStore,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.algorithms import FixedWindow, Limit
from limitkeeper.testing import ManualClock
from stand_ins import NOON

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

    def again_after(self, wait_us: int) -> Decision:
        """The same call after so long without other traffic."""
        self.fleet.to(self.fleet.clock.now_us() + wait_us)
        return self.hit(self.node, self.cost)


@pytest.mark.parametrize("mixed", [False, True], ids=["cost 1", "mixed costs"])
def test_the_retry_of_one_node_is_never_too_early(mixed: bool) -> None:
    """With one node, a refused call is allowed when it is repeated at its retry, whatever the costs."""
    for seed in range(80):
        played = Played(history(seed, 1, mixed))
        again = played.again_after(played.last.retry_us)
        assert again, f"history {seed}"


@pytest.mark.parametrize("mixed", [False, True], ids=["cost 1", "mixed costs"])
def test_the_retry_of_several_nodes_is_too_early_only_on_logs_and_counters(mixed: bool) -> None:
    """With several nodes, a refused call on a bucket, meter or window is allowed when it comes again at its retry: without calls
    no node fetches."""
    for seed in range(80):
        told = history(seed, 2 + seed % 3, mixed)
        played = Played(told)
        again = played.again_after(played.last.retry_us)
        assert again or isinstance(told.limit, SlidingWindowLog | SlidingWindowCounter), f"history {seed}"


@pytest.mark.parametrize("pause_us", [20_000, 30_000])
def test_a_large_cost_on_a_key_in_demand_counts_the_batches_of_other_nodes(pause_us: int) -> None:
    """A bucket's refusal of a cost above what the node reserves ahead is not answered from RAM once another node could spend."""
    steady = [(moment, 0, 1) for moment in range(0, 160_000, 8_000)]
    other = 160_000 + pause_us
    calls = [*steady, (160_000, 1, 98), (160_001, 0, 50), (other, 1, 10), (other + 1_000, 0, 50)]
    played = Played(History(TokenBucket("1000/s burst 100"), 2, {}, calls))
    assert played.again_after(played.last.retry_us)


def test_the_retry_of_a_refused_cost_above_two_batches_is_exact() -> None:
    """The tokens that a refused call withdrew from two batches return to both, so that the call is allowed at its retry."""
    calls = [(0, 0, 50), (5, 0, 2), (400, 0, 1), (500, 0, 50)]
    played = Played(History(TokenBucket("1000/s burst 100"), 1, {"life": "1s"}, calls))
    assert played.again_after(played.last.retry_us)


def test_the_retry_of_one_node_with_cost_1_is_no_later_than_needed() -> None:
    """With one node and calls of cost 1 on a bucket or window, a call one microsecond before its retry is refused."""
    for seed in range(80):
        told = history(seed, 1, False)
        played = Played(told)
        if played.last.retry_us > 1 and told.limit.reserves:
            assert not played.again_after(played.last.retry_us - 1), f"history {seed}"


def test_a_wait_is_served_from_the_batch_that_it_fetched() -> None:
    """A refused wait that is repeated at its time has a batch reserved ahead, and starts with it, not behind it."""
    clock = ManualClock(NOON)
    parent, rule = MemoryStore(clock=clock), TokenBucket("54/min burst 3")
    Limiter(rule, store=parent).hit("key", 3)
    limiter = Limiter(rule, store=LeasedStore(parent, lease=5, life="1s"))
    refused = limiter.reserve("key", max_wait=1)
    assert not refused
    clock.advance(refused.decision.retry_after)
    assert limiter.reserve("key", max_wait=1).wait == 1.0


@pytest.mark.parametrize("lease", [None, 2])
def test_a_refusal_is_not_kept_when_another_rate_of_the_name_charges(lease: int | None) -> None:
    """Admissions under one rate are charged to the other too: that one's known refusal is no longer valid."""
    clock = ManualClock(NOON)
    store = LeasedStore(MemoryStore(clock=clock), lease=lease)
    large, small = (Limiter(rule, store=store, name="plan") for rule in ("5/s burst 4", "3/s burst 1"))
    assert small.hit("key")
    assert not small.hit("key")
    assert large.hit("key")
    clock.advance(small.hit("key").retry_after)
    assert small.hit("key")


def test_a_refusal_is_forgotten_when_tokens_of_an_earlier_lease_of_the_key_go_back():
    """A key that was idle is forgotten before its expired batch has gone back, and is refused meanwhile: once it has, the key is
    allowed again, and not refused until the window ends."""
    clock = ManualClock(NOON)
    parent = MemoryStore(clock=clock)
    store = LeasedStore(parent, lease=20)
    limiter = Limiter("fixed window 40/h", store=store, name="n")
    assert limiter.hit("key")
    assert Limiter("fixed window 40/h", store=parent, name="n").hit("key", cost=20)
    clock.advance(0.3)
    assert limiter.hit("other")  # checks the idle key
    assert not limiter.hit("key")
    store.tend()
    assert limiter.peek("key").remaining == 19
    assert limiter.hit("key")


class Paused(MemoryStore):
    """A remote parent whose reply to an async decision, once it is made, waits for `held`. Its give-backs and resets are made
    once `late` is set."""

    local = False
    held: asyncio.Event | None = None
    late: asyncio.Event | None = None

    async def adecide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Decision:
        decision = self.decide(claims, max_wait_us, **options)
        if self.held is not None:
            await self.held.wait()
        return decision

    async def agive_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        if self.late is not None:
            await self.late.wait()
        return self.give_back(claims, charged_at, source)

    async def areset(self, claims: Any) -> None:
        if self.late is not None:
            await self.late.wait()
        self.reset(claims)


async def iterations() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


BOTH: dict[str, Limit] = {"window": FixedWindow("5/h"), "log": SlidingWindowLog("5/h")}


def test_a_refusal_that_arrives_after_something_was_given_back_is_not_kept():
    """Several limits are refused, and a charge is given back before the reply arrives: the next call is allowed."""

    async def main() -> None:
        parent = Paused(clock=ManualClock(NOON))
        limiter = AsyncLimiter(BOTH, store=LeasedStore(parent), name="n")
        reservation = await limiter.reserve("key", cost=5, max_wait=0)
        parent.held = asyncio.Event()
        refused = asyncio.ensure_future(limiter.hit("key"))
        await iterations()
        assert await reservation.cancel()
        parent.held.set()
        assert not await refused
        assert await limiter.hit("key")

    asyncio.run(main())


def test_a_refusal_of_a_key_without_a_lease_is_not_kept_when_something_was_given_back_meanwhile():
    """The same with a limit whose key has no lease, when the call is made and when it is refused."""

    async def main() -> None:
        parent = Paused(clock=ManualClock(NOON))
        limiter = AsyncLimiter(FixedWindow("5/h"), store=LeasedStore(parent), name="n")
        assert Limiter(FixedWindow("5/h"), store=parent, name="n").hit("key", cost=5)
        parent.held = asyncio.Event()
        refused = asyncio.ensure_future(limiter.hit("key"))
        await iterations()
        await limiter.refund("key")
        parent.held.set()
        assert not await refused
        assert await limiter.hit("key")

    asyncio.run(main())


@pytest.mark.parametrize("how", ["refund", "reset"])
def test_a_refusal_from_before_a_give_back_was_made_is_not_kept(how):
    """A call is refused while a refund or a reset is on its way to the parent: once that is made, the next call is allowed."""

    async def main() -> None:
        parent = Paused(clock=ManualClock(NOON))
        limiter = AsyncLimiter(FixedWindow("5/h"), store=LeasedStore(parent, lease=2), name="n")
        assert await limiter.hit("key", cost=5)
        parent.late = asyncio.Event()
        changing = asyncio.ensure_future(getattr(limiter, how)("key"))
        await iterations()
        assert not await limiter.hit("key")
        parent.late.set()
        await changing
        assert await limiter.hit("key")

    asyncio.run(main())
