"""Decisions whose keys live on several shards: all or nothing in two steps, at one common start, whatever fails on the way."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from failing import HangingTasks
from shards import FarShard, key_on

from limitkeeper import (
    AsyncLimiter,
    FixedWindow,
    LeakyBucketQueue,
    LeasedStore,
    Limiter,
    MemoryStore,
    SlidingWindowLog,
    StoreTimeout,
    StoreUnavailable,
)
from limitkeeper.stores.contract import Booking
from limitkeeper.stores.sans_io import perform_call, run
from limitkeeper.stores.sharded import ShardedStore
from limitkeeper.testing import ManualClock
from virtual_time import VirtualClock

BEGIN = 1_700_000_123.456789


@pytest.fixture
def shards(clock):
    return {name: FarShard(clock) for name in ("left", "right")}


@pytest.fixture
def sharded(shards):
    return ShardedStore(shards, hot=False)


@pytest.fixture
def keys(sharded):
    """A user on the one shard, a tenant on the other."""
    return {"user": key_on(sharded, "left"), "tenant": key_on(sharded, "right")}


def remaining(limiter, keys):
    return [part.remaining for part in limiter.peek(keys).decisions]


def test_what_all_grant_costs_one_call_each(make, sharded, shards, keys):
    """Granted at once, a decision on two shards is one call of each."""
    limiter = make({"user": "5/s", "tenant": "10/s"}, store=sharded)
    assert limiter.hit(keys, cost={"tenant": 3})
    assert [shard.calls for shard in shards.values()] == [["decide"], ["decide"]]
    assert remaining(limiter, keys) == [4, 7]


@pytest.mark.parametrize("narrow", ["user", "tenant"])
def test_what_one_refuses_none_has_charged(make, sharded, shards, keys, narrow):
    """Refused by one shard, the decision leaves every shard as it was; the limit with the longest retry decides."""
    limits = {"user": FixedWindow("5/h"), "tenant": FixedWindow("5/h"), narrow: FixedWindow("1/h")}
    limiter = make(limits, store=sharded)
    assert limiter.hit(keys)
    before = [sorted(sharded.items(one)) for one in limiter.named]
    refused = limiter.hit(keys)
    assert (bool(refused), refused.name) == (False, narrow)
    assert [bool(part) for part in refused.decisions] == [name != narrow for name in limits]
    assert [sorted(sharded.items(one)) for one in limiter.named] == before


def test_however_many_on_several_shards_leave_one_step_gives_them_back(make, sharded, keys):
    """The number of those that leave in one turn grows with the time of a call, so it must not take one call after the other."""
    limiter, bookings, steps = make({"user": "1/h burst 20", "tenant": "1/h burst 30"}, store=sharded), [], []
    for _ in range(20):
        claims = limiter.claims(keys)
        bookings.append(Booking(claims, sharded.decide(claims, remember=True).start_us, 0, False))

    def perform_all(calls):
        steps.append(len(calls))
        return [perform_call(call._replace(target=call.target.store)) for call in calls]

    run(sharded.plan_rebook(bookings), perform_all=perform_all)
    assert steps == [40]
    assert remaining(limiter, keys) == [20, 30]


@pytest.mark.parametrize("ending", ["refused", "cancelled"])
def test_leases_of_several_limits_get_back_what_a_call_took(shards, clock, ending):
    """After a decision that another shard refuses, or that is cancelled, a log and a window of leases have back all that it
    took."""
    sharded = ShardedStore({**shards, "left": LeasedStore(shards["left"], lease=20, life="1s")}, hot=False)
    keys = dict.fromkeys(("window", "log"), key_on(sharded, "left")) | {"tenant": key_on(sharded, "right")}
    limits = {"window": FixedWindow("100/h"), "log": SlidingWindowLog("100/h"), "tenant": FixedWindow("1/h")}
    limiter = Limiter(limits, store=sharded, name="leased")
    alone = {**keys, "tenant": None}
    for _ in range(25):
        assert limiter.hit(alone)
        clock.advance(0.001)
        sharded.shards["left"].tend()
    for _ in range(10):
        if ending == "cancelled":
            assert limiter.reserve(keys, max_wait=0).cancel()
        else:
            assert not limiter.hit(keys, cost={"tenant": 5})
        clock.advance(0.001)
        sharded.shards["left"].tend()
    sharded.shards["left"].return_all()
    assert remaining(limiter, alone) == [75, 75]


def test_the_longest_retry_decides(make, sharded, keys):
    """Both refuse: the one with the longest retry decides, wherever it lives."""
    limiter = make({"user": "1/h", "tenant": "1/d"}, store=sharded)
    limiter.hit(keys)
    refused = limiter.hit(keys)
    assert refused.name == "tenant"
    assert refused.retry_after == 86400.0
    assert make({"user": "1/h", "tenant": "1/d"}, store=sharded).hit(keys, cost=2).retry_after == float("inf")


def test_limits_that_can_start_earlier_are_charged_at_the_common_start(make, sharded, keys, clock):
    """With a timeout all are charged at the latest start: a bucket that could have started at once pays then, not now."""
    limiter = make({"user": "1/s burst 2", "tenant": LeakyBucketQueue("1 per 10s")}, store=sharded)
    limiter.hit(keys)
    later = limiter.reserve(keys)
    assert later.wait == 10.0
    clock.advance(10)
    assert remaining(limiter, keys)[0] == 1


def test_shards_may_have_clocks_of_their_own(keys, sharded):
    """Starts are compared as waits: two shards whose clocks differ by a day wait and give back as two that agree."""
    clocks = [ManualClock(BEGIN), ManualClock(BEGIN + 86_400)]
    apart = ShardedStore({name: FarShard(clock) for name, clock in zip(("left", "right"), clocks, strict=True)}, hot=False)
    limiter = Limiter({"user": SlidingWindowLog("2/min"), "tenant": SlidingWindowLog("1/min")}, store=apart)
    first = limiter.reserve(keys)
    second = limiter.reserve(keys)
    assert (first.wait, second.wait) == (0.0, 60.0)
    second.cancel()
    first.cancel()
    assert remaining(limiter, keys) == [2, 1]


def test_a_caller_in_between_moves_the_common_start(make, sharded, shards, keys):
    """When another caller takes the common start before a shard is charged at it, all move to the next one together."""
    limits = {"user": LeakyBucketQueue("1 per 4s"), "tenant": LeakyBucketQueue("1 per 10s")}
    limiter, other = make(limits, store=sharded), Limiter(limits, store=sharded)
    limiter.hit(keys)
    came = []

    def meanwhile(method):
        if method == "decide at" and not came:
            came.append(0.0)
            came.extend(other.reserve({"user": keys["user"], "tenant": None}).wait for _ in range(3))

    shards["left"].meanwhile = meanwhile
    assert limiter.reserve(keys).wait == 16.0
    assert came == [0.0, 4.0, 8.0, 12.0]
    shards["left"].meanwhile = None
    assert limiter.reserve(keys).wait == 26.0


def test_calls_that_take_longer_than_the_wait_find_a_common_start(make, sharded, shards, keys, clock):
    """A start that has passed when a shard is called for it is now: slow shards don't postpone each other for ever."""
    limiter = make({"user": "1000/s burst 2", "tenant": LeakyBucketQueue("1 per 25ms")}, store=sharded)
    limiter.hit(keys)
    for shard in shards.values():
        shard.meanwhile = lambda method: clock.advance(0.01)
    assert limiter.reserve(keys, max_wait=1)


def test_limits_with_coarse_ticks_find_a_common_start(make, sharded, keys, clock):
    """A limit that counts in ticks of 10 µs rounds the common start down; that counts as the same start, and nothing is lost."""
    limiter = make({"user": "token bucket 1/day burst 100000", "tenant": "40/s burst 1"}, store=sharded)
    assert limiter.limits["user"].tick == 10
    clock.advance(0.000003)
    limiter.hit(keys)
    clock.advance(0.000001)
    assert [limiter.reserve(keys).wait for _ in range(3)] == [0.024999, 0.049999, 0.074999]
    assert remaining(limiter, keys)[0] == 99996


@pytest.mark.parametrize("error", [True, "slow"])
def test_a_shard_that_fails_leaves_the_other_uncharged(make, sharded, shards, keys, error):
    """One shard grants and the next can't be reached: the first gets its charge back, and the error is the caller's."""
    limiter = make({"user": "5/h", "tenant": "5/h"}, store=sharded)
    shards["right"].down = error
    with pytest.raises(StoreTimeout if error == "slow" else StoreUnavailable):
        limiter.hit(keys)
    shards["right"].down = None
    assert remaining(limiter, keys) == [5, 5]


def test_what_can_not_be_given_back_is_lost_and_never_admitted(make, sharded, shards, keys):
    """The bound of a failure in between: one decision's cost stays charged, and no more is ever admitted."""
    limiter = make({"user": "5/h", "tenant": "2/h"}, store=sharded)
    limiter.hit(keys, cost=2)
    shards["left"].failing.add("give_back")
    assert not limiter.hit(keys)
    shards["left"].failing.clear()
    assert remaining(limiter, keys) == [2, 0]


def test_threads_never_get_more_than_the_limits(sharded, keys):
    """However many decide at once on two shards, no limit is exceeded, and the rest matches the admissions."""
    limiter = Limiter({"user": "60/h", "tenant": FixedWindow("50/h")}, store=sharded)
    admitted = []
    interval = sys.getswitchinterval()

    def work():
        admitted.append(sum(bool(limiter.hit(keys)) for _ in range(8)))

    threads = [threading.Thread(target=work) for _ in range(16)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    total = sum(admitted)
    assert total <= 50
    assert remaining(limiter, keys) == [60 - total, 50 - total]
    while limiter.hit(keys):
        total += 1
    assert total == 50


@pytest.mark.parametrize("method", ["hit", "peek", "acquire", "reserve"])
def test_a_cancelled_task_gives_back_once_what_several_shards_charged(clock, method):
    """A task that is cancelled in any iteration of its decision on two shards leaves both as they were."""

    async def remaining_after(iterations):
        sharded = ShardedStore({name: FarShard(clock) for name in ("left", "right")}, hot=False)
        keys = {"user": key_on(sharded, "left"), "tenant": key_on(sharded, "right")}
        limiter = AsyncLimiter({"user": "5/h", "tenant": "5/h"}, store=sharded)
        await limiter.hit(keys, cost={"user": 3, "tenant": 3})

        async def call():
            return await getattr(limiter, method)(keys)

        task = asyncio.ensure_future(call())
        for _ in range(iterations):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() or method == "peek"  # which takes fewer iterations
        for _ in range(20):
            await asyncio.sleep(0)
        return [part.remaining for part in (await limiter.peek(keys)).decisions]

    assert [asyncio.run(remaining_after(n)) for n in range(7)] == [[2, 2]] * 7


def test_two_decisions_with_one_start_give_back_their_own_entries():
    """A log gives back the entry of its charge's own start, though another decision with that start had another one there."""
    left, right = ManualClock(1000), ManualClock(1005)
    sharded = ShardedStore({"left": FarShard(left), "right": FarShard(right)}, hot=False)
    keys = {"user": key_on(sharded, "left"), "tenant": key_on(sharded, "right")}
    limiter = Limiter({"user": SlidingWindowLog("50/h"), "tenant": SlidingWindowLog("5/h")}, store=sharded)
    first = limiter.reserve(keys, 2)
    right.advance(5)
    second = limiter.reserve(keys)
    assert first.decision.start_us == second.decision.start_us
    first.cancel()
    assert remaining(limiter, keys) == [49, 4]


def test_settling_a_decision_on_several_shards(make, sharded, keys):
    """Unused cost goes back to each shard; cost above the estimate is charged on each."""
    limiter = make({"user": "100/h", "tenant": "100/h"}, store=sharded)
    limiter.reserve(keys, cost=50).settle({"user": 20, "tenant": 60})
    assert remaining(limiter, keys) == [80, 40]


def test_many_keys_are_one_call_per_shard(make, sharded, shards):
    """hit_many calls every shard once, in order, whatever the mixture of keys."""
    limiter = make("2/h", store=sharded)
    left, right = (key_on(sharded, name) for name in ("left", "right"))
    decisions = limiter.hit_many([left, right, left, left, right, right])
    assert [bool(one) for one in decisions] == [True, True, True, False, True, False]
    assert [shard.calls for shard in shards.values()] == [["decide_many"], ["decide_many"]]


def test_many_decisions_keep_their_order_around_one_that_spans(make, sharded, keys):
    """A decision on several shards among many includes those before it, and is included by those after it."""
    limiter = make({"user": "2/h", "tenant": "2/h"}, store=sharded)
    alone = {**keys, "tenant": None}
    assert [bool(one) for one in limiter.hit_many([alone, keys, alone, keys])] == [True, True, False, False]
    assert remaining(limiter, keys) == [0, 1]


class DistantShard(FarShard):
    """A shard whose answer to a task comes some iterations of the loop later, the first one last."""

    async def adecide(self, claims, max_wait_us=0, **options):
        decision = self.decide(claims, max_wait_us, **options)
        for _ in range(max(1, 9 - len(self.calls))):
            await asyncio.sleep(0)
        return decision

    async def agive_back(self, claims, charged_at=-1, source="store"):
        await asyncio.sleep(0)
        return self.give_back(claims, charged_at, source)


def test_tasks_that_wait_at_once_get_starts_one_after_the_other(clock):
    """Keys that are free some microseconds apart: each of six tasks gets the next common start, and no start is left out."""
    sharded = ShardedStore({name: DistantShard(clock) for name in ("left", "right")}, hot=False)
    keys = {"user": key_on(sharded, "left"), "tenant": key_on(sharded, "right")}
    limiter = AsyncLimiter({"user": "token bucket 10/s burst 1", "tenant": "token bucket 10/s burst 1"}, store=sharded)

    async def waits():
        await limiter.hit({**keys, "tenant": None})
        clock.advance(0.000037)
        await limiter.hit({**keys, "user": None})
        return [found.wait for found in await asyncio.gather(*[limiter.reserve(keys) for _ in range(6)])]

    assert sorted(asyncio.run(waits())) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


class SlowShard(FarShard):
    """A shard that takes 20 ms for every call of a task."""

    async def adecide(self, claims, max_wait_us=0, **options):
        await self.clock.asleep(0.01)
        decision = self.decide(claims, max_wait_us, **options)
        await self.clock.asleep(0.01)
        return decision

    async def agive_back(self, claims, charged_at=-1, source="store"):
        await self.clock.asleep(0.02)
        return self.give_back(claims, charged_at, source)


async def iterate():
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("timeout", "seconds"), [(60, 12), (2, 2.5)])
def test_a_long_queue_of_waiting_tasks_uses_the_rate_and_keeps_the_timeout(timeout, seconds):
    """However long the queue for two slow shards is, the limits are used while tasks wait, and each ends within its timeout."""
    clock = VirtualClock()
    sharded = ShardedStore({name: SlowShard(clock) for name in ("left", "right")}, hot=False, clock=clock)
    keys = {"user": key_on(sharded, "left"), "tenant": key_on(sharded, "right")}
    limiter = AsyncLimiter({"user": "token bucket 20/s burst 5", "tenant": "token bucket 10/s burst 5"}, store=sharded)

    async def served():
        tasks = [asyncio.ensure_future(limiter.acquire(keys, timeout=timeout)) for _ in range(100)]
        await clock.run_until(clock.now_us() + int(seconds * 1e6), iterate)
        assert all(task.done() for task in tasks)
        return sum(task.exception() is None for task in tasks)

    assert asyncio.run(served()) >= min(100, 0.9 * (5 + 10 * timeout))


@pytest.mark.filterwarnings("ignore")  # of tasks that are collected in progress
def test_closing_does_not_wait_for_tasks_of_a_closed_loop(clock):
    """A decision on two shards is cancelled while it hangs and its loop is closed around it: `aclose` on another one returns."""
    store = ShardedStore({name: HangingTasks(MemoryStore(clock=clock)) for name in ("left", "right")}, hot=False)
    limiter = AsyncLimiter({"user": "5/s", "tenant": "10/s"}, store=store)
    keys = {"user": key_on(store, "left"), "tenant": key_on(store, "right")}

    async def cancelled():
        task = asyncio.ensure_future(limiter.hit(keys))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)

    async def close():
        await asyncio.wait_for(store.aclose(), 60)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(cancelled())
    loop.close()
    asyncio.run(close())


def test_a_start_that_an_earlier_decision_had_too_is_that_of_the_later_one(clock):
    """Two decisions have the same joined start, and of the first a part began earlier. The second goes back to its own."""
    stores = {name: LeasedStore(FarShard(clock), lease=3) for name in ("left", "right")}
    sharded = ShardedStore(stores, hot=False, clock=clock)
    keys = {"user": key_on(sharded, "left"), "tenant": key_on(sharded, "right")}
    limiter = Limiter({"user": SlidingWindowLog("100/h"), "tenant": SlidingWindowLog("100/h")}, store=sharded)
    for _ in range(2):
        assert limiter.hit({**keys, "user": None})
    clock.advance(0.001)
    assert limiter.hit(keys)  # of a batch that was charged a millisecond ago
    limiter.reset(keys)
    claims = limiter.claims(keys)
    decision = sharded.decide(claims)
    for claim, part in zip(claims, decision.decisions, strict=True):
        assert sharded.give_back([claim], part.start_us, part.source)
    for store in stores.values():
        store.return_all()
    assert [part.remaining for part in limiter.peek(keys).decisions] == [100, 100]
