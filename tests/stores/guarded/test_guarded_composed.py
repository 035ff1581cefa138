"""Guards among other wrappers: one guard around all shards, a guard for each of them, a guard around leases."""

from __future__ import annotations

import asyncio
import time

import pytest
from failing import ALL, FailingStore

from limitkeeper import (
    AsyncLimiter,
    FixedWindow,
    GuardedStore,
    LeasedStore,
    Limiter,
    MemoryStore,
    ShardedStore,
    SharedStore,
    SlidingWindowLog,
    StoreError,
    StoreUnavailable,
    TokenBucket,
)
from limitkeeper.algorithms.claim import Claim
from limitkeeper.testing import ManualClock
from stand_ins import NOON


class AtOnce(FailingStore):
    """Answers some hits from local state."""

    at_hand = 3

    def hit_nowait(self, named, key, cost):
        if "hit_nowait" in self.failing:
            raise StoreUnavailable("hit_nowait: no answer")
        if not self.at_hand:
            return None
        self.at_hand -= 1
        return self.inner.decide_one(named, key, cost, 0, True)


def guard_of(behind, clock, **more) -> GuardedStore:
    return GuardedStore(behind, budget=5, on_failure="local", share=2, failures=1, clock=clock, background=False, **more)


def test_what_the_store_has_at_hand_is_answered_at_once(store, clock):
    """In asyncio, hits that the store behind can answer without waiting are not awaited; open, the share answers as quickly."""
    behind = AtOnce(store)
    guard = guard_of(behind, clock)

    async def main():
        limiter = AsyncLimiter(FixedWindow("100/h"), store=guard)
        for _ in range(5):
            await limiter.hit("a")
        assert behind.calls == ["decide", "decide"]
        behind.failing |= ALL
        decisions = [await limiter.hit("a") for _ in range(5)]
        assert all(guard.answered_here(one) for one in decisions)
        assert behind.calls == ["decide", "decide", "decide"]
        return guard.hit_nowait(limiter.named[0], "a", 1)

    assert guard.answered_here(asyncio.run(main()))


def test_failing_at_what_is_at_hand_is_a_failure(store, clock):
    """A store that fails there too is replaced by the share."""
    behind = AtOnce(store)
    behind.failing |= {"hit_nowait"}
    guard = guard_of(behind, clock)
    limiter = Limiter(FixedWindow("100/h"), store=guard)
    assert guard.answered_here(guard.hit_nowait(limiter.named[0], "a", 1))
    assert guard.state == "open"


def test_half_open_nothing_is_answered_at_once(store, clock):
    """While it is half open, the breaker decides per call which callers are let through."""
    behind = AtOnce(store)
    guard = guard_of(behind, clock)
    limiter = Limiter(FixedWindow("100/h"), store=guard)
    behind.failing |= ALL
    limiter.hit("a")
    behind.failing.clear()
    guard.probe()
    assert guard.hit_nowait(limiter.named[0], "a", 1) is None


# Shards


@pytest.fixture
def shards(clock):
    return {name: FailingStore(MemoryStore(clock=clock), local=True) for name in ("decide_one", "two", "three")}


@pytest.fixture
def sharded():
    return pytest.importorskip("limitkeeper.stores.sharded", reason="ShardedStore is not there").ShardedStore


def test_a_guard_for_each_shard_keeps_the_others_going(sharded, shards, clock):
    """With one shard dead, its keys are decided on the share, and all other keys by their shards."""
    guards = {name: guard_of(shard, clock) for name, shard in shards.items()}
    limiter = Limiter(FixedWindow("10/h"), store=sharded(guards, hot=False))
    shards["two"].failing |= ALL
    here = {n: GuardedStore.answered_here(limiter.hit(f"user {n}")) for n in range(60)}
    assert [guard.state for guard in guards.values()] == ["closed", "open", "closed"]
    assert 5 <= sum(here.values()) <= 40
    for n, alone in here.items():
        assert sum(bool(limiter.hit(f"user {n}")) for _ in range(12)) == (4 if alone else 9)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_charge_over_a_dead_shard_and_a_living_one_goes_back_to_both(sharded, shards, clock, when):
    """A reservation on two shards, one of them replaced by its guard's share, gives back to each where it was charged."""
    guards = {name: guard_of(shard, clock) for name, shard in shards.items()}
    store = sharded(guards, hot=False)
    limiter = Limiter({"user": FixedWindow("10/h"), "tenant": FixedWindow("10/h")}, store=store)
    homes = {n: store.home_of(f"key {n}") for n in range(50)}
    user = next(f"key {n}" for n, home in homes.items() if home == "decide_one")
    tenant = next(f"key {n}" for n, home in homes.items() if home == "two")
    both = {"user": user, "tenant": tenant}
    shards["two"].failing |= ALL
    reservation = limiter.reserve(both, cost=3)
    assert [part.remaining for part in limiter.peek(both).decisions] == [7, 2]
    if when == "after":
        shards["two"].failing.clear()
        guards["two"].probe()
        clock.advance(1)
    assert reservation.cancel() is True
    expected = [10, 5] if when == "before" else [10, 10]
    assert [part.remaining for part in limiter.peek(both).decisions] == expected


def test_one_guard_around_all_shards(sharded, shards, clock):
    """A guard outside answers for all keys when a shard fails, and recovers when that shard does."""
    guard = guard_of(sharded(shards, hot=False), clock)
    limiter = Limiter(TokenBucket("10/h"), store=guard)
    shards["two"].failing |= ALL
    for n in range(60):
        assert limiter.hit(f"user {n}")
    assert guard.state == "open"
    assert guard.probe() is False  # it calls the shard that failed, not any other
    shards["two"].failing.clear()
    assert guard.probe() is True


# Leases


def test_a_guard_around_leases(clock):
    """Hits from a lease continue while the parent is away; when it is used up, the share decides."""
    leased = pytest.importorskip("limitkeeper.stores.leased", reason="LeasedStore is not there").LeasedStore
    parent = FailingStore(MemoryStore(clock=clock))
    guard = guard_of(leased(parent, lease=5), clock)
    limiter = Limiter(TokenBucket("4/h burst 100"), store=guard)
    assert not guard.answered_here(limiter.hit("a"))
    parent.failing |= ALL
    decisions = [limiter.hit("a") for _ in range(80)]
    here = [guard.answered_here(one) for one in decisions]
    assert here.index(True) >= 1  # the lease was used up first
    assert sum(map(bool, (one for one in decisions if guard.answered_here(one)))) == 50
    guard.close()


@pytest.mark.parametrize("promises", [True, False])
def test_refusals_that_leases_know_of_are_no_successes_of_a_failed_store(clock, promises):
    """A key that is known to be exhausted is refused from RAM during an outage, too: calls for others open the breaker all the
    same, however many of them that key has in between."""
    behind = FailingStore(MemoryStore(clock=clock), local=promises)
    guard = GuardedStore(LeasedStore(behind), clock=clock)
    limiter = Limiter("fixed window 10/h", store=guard)
    for _ in range(20):
        limiter.hit("attacker")
    behind.failing |= ALL
    for number in range(5):
        assert {limiter.hit("attacker").source for _ in range(20)} == {"lease"}
        assert limiter.hit(f"user{number}").source == "open"
    assert guard.state == "open"


@pytest.mark.parametrize("promises", [True, False])
def test_a_probe_asks_the_store_behind_the_leases(clock, promises):
    """A probe is not answered by a refusal that leases know of, as if a failed store were back."""
    behind = FailingStore(MemoryStore(clock=clock), local=promises)
    guard = GuardedStore(LeasedStore(behind), failures=1, clock=clock)
    limiter = Limiter("sliding window log 10/h", store=guard)
    for _ in range(20):
        limiter.hit("k")
    behind.failing |= ALL
    assert limiter.hit("k").source == "lease"
    assert limiter.hit("k", cost=5).source == "open"
    assert guard.probe() is False


@pytest.mark.parametrize("on_failure", ["open", "closed"])
def test_a_closed_store_is_no_store_that_fails(tmp_path, on_failure):
    """After close() a guard has no fallback: a call is an error, whatever on_failure is."""
    guard = GuardedStore(SharedStore(tmp_path / "limits"), on_failure=on_failure)
    one, several = Limiter("50/h", store=guard), Limiter({"a": "5/s", "b": "5/min"}, store=guard)
    assert one.hit("a")
    guard.close()
    for limiter in (one, several):
        with pytest.raises(StoreError, match="closed"):
            limiter.hit("a")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_close_returns_all_leases_however_many_calls_that_takes(asynchronous):
    """close() has no budget: leases of sixty logs go back to a store of which each call takes half of the guard's budget."""
    clock = ManualClock(NOON)

    class Slow(FailingStore):
        def answers_within(self, budget_us):
            return True

        def give_back(self, *call):
            clock.advance(0.05)
            return super().give_back(*call)

    parent = Slow(MemoryStore(clock=clock))
    guard = GuardedStore(LeasedStore(parent, lease=10, life="1h"), budget="100ms", clock=clock)
    limiter, keys = Limiter(SlidingWindowLog("1000/d"), store=guard), [f"k{i}" for i in range(60)]
    for key in keys:
        assert limiter.hit(key)
    asyncio.run(guard.aclose()) if asynchronous else guard.close()
    bare = Limiter(SlidingWindowLog("1000/d"), store=parent.inner)
    assert {bare.peek(key).remaining for key in keys} == {999}


@pytest.mark.parametrize("number", [1, 32])
def test_a_call_counts_once_whatever_the_number_of_its_decisions(number):
    """A store that fails in two of three calls is not called any more, also where each call has many decisions."""
    store = AtOnce(MemoryStore(clock=ManualClock(NOON)))
    guard = GuardedStore(store, clock=ManualClock(NOON))
    limiter = Limiter("1000/s", store=guard)
    for call in range(90):
        store.failing = set() if call % 3 == 0 else {"decide_many"}
        limiter.hit_many([str(key) for key in range(number)])
    assert store.calls.count("decide_many") < 90


# A busy event loop


class InSomeIterations(FailingStore):
    """A remote store that answers within any budget, after several iterations of the event loop."""

    def answers_within(self, budget_us):
        return True

    async def adecide(self, claims, max_wait_us=0, **options):
        for _ in range(4):
            await asyncio.sleep(0)
        return self.inner.decide(claims, max_wait_us, **options)

    async def adecide_one(self, *call):
        return await self.adecide([Claim(*call[:3])], call[3], commit=call[4])

    async def agive_back(self, *call):
        await asyncio.sleep(0)
        return self.inner.give_back(*call)


COMPOSED = {
    "leases": lambda: LeasedStore(InSomeIterations(MemoryStore())),
    "shards": lambda: ShardedStore([InSomeIterations(MemoryStore()) for _ in range(3)], hot=False),
    "leases of shards": lambda: LeasedStore(ShardedStore([InSomeIterations(MemoryStore()) for _ in range(3)], hot=False)),
}


@pytest.mark.parametrize("behind", COMPOSED.values(), ids=COMPOSED)
def test_the_delay_of_a_loop_is_not_the_stores(behind):
    """Where each iteration of the loop takes longer than a plan's part of the budget, its steps are made all the same."""

    async def main():
        guard = GuardedStore(behind(), budget="16ms", failures=1, ratio=1, background=False)
        limiter = AsyncLimiter({"user": TokenBucket("1000/s"), "tenant": TokenBucket("1000/s")}, store=guard)
        hits = [asyncio.create_task(limiter.hit({"user": "u", "tenant": f"t{i}"})) for i in range(6)]
        while not all(hit.done() for hit in hits):
            time.sleep(0.012)
            await asyncio.sleep(0)
        await guard.inner.aclose()
        return [guard.answered_here(hit.result()) for hit in hits], guard.stats().failures

    assert asyncio.run(main()) == ([False] * 6, 0)


class Rebooking(FailingStore):
    """A store in which waiters move up."""

    can_rebook = True

    def rebook(self, bookings):
        return self._noted("rebook").rebook(bookings)


def test_what_waited_before_and_after_an_outage_gives_back_what_it_did_not_use(store, clock):
    """Estimates of 4500 that use 300 behind a paced limit; during ten seconds the share decides, with waiters of its own. After
    that the store has as used what calls used, and the estimates of those that were settled meanwhile or still wait."""
    behind = Rebooking(store, local=True)
    guard = guard_of(behind, clock)
    tokens = TokenBucket(10**7, per="400d")
    limits = {"requests": TokenBucket("60/min burst 1"), "tokens": tokens}
    limiter = Limiter(limits, store=guard, name="api")
    used, waiting = 0, []
    for second in range(300):
        behind.failing = ALL | {"rebook"} if 100 <= second < 110 else set()
        if not behind.failing:
            guard.probe()
        waiting += [one for one in [limiter.reserve("a", {"tokens": 4500}, 20) for _ in range(3)] if one]
        clock.advance(1)
        for one in [one for one in waiting if one.decision.start_us <= clock.now_us()]:
            waiting.remove(one)
            is_away = guard.state == "open"
            one.settle({"tokens": 300})
            if one.decision.source == "store":
                used += 4500 if is_away else 300
    used += sum(4500 for one in waiting if one.decision.source == "store")
    left = Limiter(limits, store=store, name="api").peek("a", {"requests": 0, "tokens": 0}).decisions[1].remaining
    assert used - 200 <= tokens.capacity - left <= used + 2 * 4500
