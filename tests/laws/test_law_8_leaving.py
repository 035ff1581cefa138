"""Law 8 while waiters leave: throughput, order and the remaining charges, on memory, a shared file and Redis, in virtual time."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from fractions import Fraction
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import (
    AsyncLimiter,
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    SharedStore,
    SlidingWindowLog,
    TokenBucket,
    wait_queue,
)
from limitkeeper.algorithms.claim import Claim
from limitkeeper.stores import Store
from limitkeeper.stores.redis import RedisStore
from limitkeeper.testing import ManualClock
from servers.valkey import Valkey
from stand_ins import NOON, WrappedStore
from virtual_time import VirtualClock

SECOND = 1_000_000
MakeStore = Callable[[VirtualClock], Store]


@pytest.fixture(params=["memory", "shared", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
    """The stores. A decision is held back for a departure however long that takes: its bound is in real time."""
    monkeypatch.setattr(wait_queue, "HOLD", 60)
    monkeypatch.setattr(wait_queue, "LONGEST_HOLD", 60)
    numbers = count()
    if request.param == "memory":
        yield lambda clock: MemoryStore(clock=clock)
    elif request.param == "shared":
        yield lambda clock: SharedStore(tmp_path / f"shared {next(numbers)}", max_keys=100, clock=clock)
    else:
        valkey: Valkey = request.getfixturevalue("valkey")
        with valkey.client() as client:
            client.flushall()
        yield lambda clock: RedisStore(valkey.url, prefix=f"leaving {next(numbers)}", timeout="60s", clock=clock)


def settled(limiter: AsyncLimiter) -> Callable[[], Awaitable[None]]:
    """Returns when every request of the tasks is answered and every task waits for time."""

    async def settle() -> None:
        quiet = 0
        while quiet < 2:
            for _ in range(8):
                await asyncio.sleep(0)
            if not limiter.store.local:
                await limiter.peek("another key")
            departures = limiter._queue.departures()
            quiet = 0 if departures.deciding or departures.call is not None else quiet + 1

    return settle


def at_once(limit: Any) -> int:
    """The largest hit that a new key admits."""
    return 1 if limit.kind == "leaky bucket queue" else limit.capacity


RULES = [TokenBucket("200/s burst 1"), LeakyBucketQueue("200/s"), SlidingWindowLog("20/100ms"), FixedWindow("20/100ms")]
RATES = [(rule,) for rule in RULES]
RATES += [(TokenBucket("200/s burst 1"), TokenBucket("220/s burst 2")), (LeakyBucket("200/s", 10), LeakyBucket("400/s", 20))]


@pytest.mark.parametrize("rates", RATES, ids=lambda rates: f"{rates[0].kind}, {len(rates)}")
def test_a_quarter_that_leaves_at_random_costs_no_throughput(rates: tuple[Any, ...], make_store: MakeStore) -> None:
    """40 tasks call again and again under one or two rates, a quarter of them cancelled while they wait: 95 % of the lowest rate
    is used; then none waits."""

    @effort(2, least=1)
    @given(st.integers(0, 2**32))
    def law(seed: int) -> None:
        async def main() -> None:
            clock, rng = VirtualClock(), random.Random(seed)
            store = make_store(clock)
            limiters = [AsyncLimiter({"limit": rate}, store=store, name="name") for rate in rates]
            settle, end_us = settled(limiters[0]), clock.now_us() + SECOND
            served, left = 0, 0
            asking: set[asyncio.Task[Any]] = set()

            async def one(limiter: AsyncLimiter) -> None:
                nonlocal served, left
                while clock.now_us() < end_us:
                    asked = asyncio.create_task(limiter.acquire("k"))
                    asking.add(asked)
                    asked.add_done_callback(asking.discard)
                    if rng.random() < 0.25:
                        over = clock.at(clock.now_us() + rng.randrange(SECOND // 5))
                        await asyncio.wait({asked, over}, return_when=asyncio.FIRST_COMPLETED)
                        asked.cancel()
                    try:
                        await asked
                        served += 1
                    except asyncio.CancelledError:
                        left += 1

            tasks = [asyncio.ensure_future(one(limiters[number % len(rates)])) for number in range(40)]
            await clock.run_until(end_us, settle)
            assert served >= 0.95 * 200
            assert left > 20
            for task in (*tasks, *asking):
                task.cancel()
            await asyncio.wait((*tasks, *asking))
            await settle()
            assert limiters[0].waiting() == 0
            assert [limiter for limiter in limiters if (await limiter.peek("k")).retry_after > 0.1] == []
            await store.aclose()

        asyncio.run(main())

    law()


@pytest.mark.parametrize("limit", RULES, ids=lambda limit: limit.kind)
def test_tasks_cancelled_at_any_moment_leave_nothing_behind(limit: Any, make_store: MakeStore) -> None:
    """Before their request is sent, while it is in flight, and while they wait: the key is then as it was, and those that
    stayed have the first starts, in order."""

    async def main() -> None:
        clock, rng = VirtualClock(), random.Random(9)
        limiter = AsyncLimiter(limit, store=make_store(clock))
        full = at_once(limit)
        await limiter.hit("k", full)
        settle = settled(limiter)
        for _ in range(6):
            before = await limiter.peek("k")
            tasks = []
            for _ in range(30):
                tasks.append(asyncio.create_task(limiter.acquire("k", timeout=10)))
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    rng.choice(tasks).cancel()
            await settle()
            model = AsyncLimiter(limit, store=MemoryStore(clock=clock))
            await model.hit("k", full)
            stayed = [task for task in tasks if not task.done() and not task.cancelling()]
            expected = [(await model.reserve("k")).decision.start_us for _ in stayed]
            waiters = limiter._queue._waiters[limiter.named[0].identity, "k"]
            assert [waiter.decision.start_us for waiter in waiters] == expected
            for task in stayed:
                task.cancel()
            await asyncio.wait(tasks)
            await settle()
            assert limiter.waiting() == 0
            assert await limiter.peek("k") == before
        await limiter.store.aclose()

    asyncio.run(main())


class CountingClock(VirtualClock):
    """Counts how often a task goes to sleep on it."""

    sleeps = 0

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        self.sleeps += 1
        await super().asleep(seconds, wake)


def test_one_that_leaves_wakes_one_waiter_and_not_all_behind_it(make_store: MakeStore) -> None:
    """100 tasks wait, and 10 leave one after the other: each departure wakes one task at most, and all are served in time."""

    async def main() -> None:
        clock = CountingClock()
        limiter = AsyncLimiter(TokenBucket("1/s burst 1"), store=make_store(clock))
        settle, begun_us = settled(limiter), clock.now_us()
        tasks = [asyncio.create_task(limiter.acquire("k")) for _ in range(101)]
        await settle()
        before = clock.sleeps
        for task in tasks[1:51:5]:
            task.cancel()
            await settle()
        assert clock.sleeps <= before + 10
        await clock.run_until(begun_us + 90 * SECOND, settle)
        starts = [task.result().start_us for task in tasks if not task.cancelled()]
        assert starts == [begun_us + number * SECOND for number in range(91)]
        await limiter.store.aclose()

    asyncio.run(main())


def test_a_charge_from_before_a_reset_gives_nothing_back(make_store: MakeStore) -> None:
    """Waiters from before and after a reset do not exchange their starts: those from after it keep what they have paid for."""

    async def main() -> None:
        limiter = AsyncLimiter(TokenBucket("1/s burst 1"), store=make_store(VirtualClock()))
        await limiter.hit("k")
        before = [await limiter.reserve("k") for _ in range(2)]
        await limiter.reset("k")
        await limiter.hit("k")
        after = [await limiter.reserve("k") for _ in range(3)]
        assert not await before[0].cancel()
        assert [one.wait for one in (before[1], *after)] == [2.0, 1.0, 2.0, 3.0]
        assert (await limiter.peek("k")).retry_after == 4.0
        assert await after[1].cancel()
        assert [one.wait for one in (before[1], after[0], after[2])] == [2.0, 1.0, 2.0]
        assert (await limiter.peek("k")).retry_after == 3.0
        await limiter.store.aclose()

    asyncio.run(main())


# Any history ----------------------------------------------------------------------------------------------------------------

#: Small numbers, so that short histories meet: a start is 10 to 100 ms away.
SMALL = [
    TokenBucket("20/s burst 1"),
    TokenBucket("50/s burst 3"),
    LeakyBucket("30/s", capacity=2),
    LeakyBucketQueue("25/s"),
    SlidingWindowLog("2/100ms"),
    FixedWindow("2/100ms"),
]
KEYS = ("k", "l")
Pair = tuple[str, str]
WHICH = st.sampled_from((0, 0, 0, 1, 2, 3))
STEPS = st.one_of(
    st.tuples(st.just("ask"), WHICH, st.sampled_from((1, 1, 2)), st.sampled_from((None, None, 40, 150)), st.integers(1, 4)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("turns"), st.integers(0, 4)),
    st.tuples(st.just("pass"), st.sampled_from((1, 7, 20, 50, 133))),
    st.tuples(st.just("reset"), WHICH),
)


class Asked:
    """One call of `acquire`: its time, its costs, and the number of resets of its keys by then."""

    def __init__(self, history: History, keys: dict[str, str], cost: int, timeout_ms: int | None) -> None:
        self.keys, self.cost = keys, cost
        self.number = len(history.asked)
        self.resets = {pair: history.resets[pair] for pair in keys.items()}
        timeout = None if timeout_ms is None else timeout_ms / 1000
        self.task = asyncio.create_task(history.limiter.acquire(keys, cost, timeout))
        self.ended_us = 0
        self.task.add_done_callback(lambda _: setattr(self, "ended_us", history.clock.now_us()))

    def start_us(self) -> int | None:
        """When it was served; None for one that waits, was refused or left."""
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result().start_us if done else None

    def waits(self) -> bool:
        return not self.task.done() and not self.task.cancelling()


class History:
    """Calls on one or two limits with two keys each. The steps are made in order, at any moment between request and reply."""

    def __init__(self, limits: dict[str, Any], make_store: MakeStore) -> None:
        self.clock = VirtualClock()
        self.limits, self.limiter = limits, AsyncLimiter(limits, store=make_store(self.clock), name="history")
        self.settle = settled(self.limiter)
        self.asked: list[Asked] = []
        self.resets: dict[Pair, int] = dict.fromkeys(product(limits, KEYS), 0)
        self.reset_at: dict[tuple[Pair, int], int] = {}

    def keys(self, number: int) -> dict[str, str]:
        """Both limits of one key, or one key for each."""
        return {name: KEYS[number >> place & 1] for place, name in enumerate(self.limits)}

    async def make(self, step: tuple[Any, ...]) -> None:
        if step[0] == "ask":
            for _ in range(step[4]):
                self.asked.append(Asked(self, self.keys(step[1]), *step[2:4]))
        elif step[0] == "leave":
            waiting = [one for one in self.asked if one.waits()]
            if waiting:
                waiting[step[1] % len(waiting)].task.cancel()
        elif step[0] == "turns":
            for _ in range(step[1]):
                await asyncio.sleep(0)
        elif step[0] == "pass":
            await self.clock.run_until(self.clock.now_us() + step[1] * 1000, self.settle)
        else:
            await self.settle()
            keys = self.keys(step[1])
            await self.limiter.reset(keys)
            for pair in keys.items():
                self.resets[pair] += 1
                self.reset_at[pair, self.resets[pair]] = self.clock.now_us()

    def served(self, pair: Pair, resets: int) -> list[Asked]:
        """The served calls on a key after so many resets of it, in order of arrival."""
        return [one for one in self.asked if one.resets.get(pair) == resets and one.start_us() is not None]

    def check_order(self) -> None:
        """First come, first served, among those with the same keys. (With one key in common, only one of them may have to wait
        for another key.) Those that came after a reset are a new order; those that waited when it came keep theirs."""
        by_keys: dict[Any, list[int]] = {}
        for one in self.asked:
            start_us = one.start_us()
            if start_us is not None:
                by_keys.setdefault(tuple(one.resets.items()), []).append(start_us)
        for keys, starts in by_keys.items():
            assert starts == sorted(starts), keys

    def check_moments(self) -> None:
        """Each caller returns at its start, also where that has moved up."""
        for one in self.asked:
            assert one.start_us() in (None, one.ended_us), one.number

    def replayed(self, pair: Pair) -> Limiter:
        """A limiter that knows only the served calls, each at its start: it admits all of them."""
        clock = ManualClock(NOON)
        model = Limiter(self.limits[pair[0]], store=MemoryStore(clock=clock))
        for resets in range(self.resets[pair] + 1):
            over_us = self.reset_at.get((pair, resets + 1), self.clock.now_us() + 1)
            model.reset("k")
            for one in sorted(self.served(pair, resets), key=lambda one: (one.start_us(), one.number)):
                start_us = one.start_us()
                assert start_us is not None
                if start_us < over_us:
                    clock._now_us = max(clock._now_us, start_us)
                    assert model.hit("k", one.cost), f"{pair} at {start_us}"
        clock._now_us = self.clock.now_us()
        return model

    async def check_rest(self) -> None:
        """What left is available again, whichever others were served: the next call gets what it would get without those."""
        for pair in self.resets:
            model, (name, key) = self.replayed(pair), pair
            for cost in (1, 2):
                found = await self.limiter.peek({**dict.fromkeys(self.limits), name: key}, cost)
                expected = model.peek("k", cost)
                assert found.remaining <= expected.remaining, f"{pair}, {cost}"
                assert found.retry_after >= expected.retry_after, f"{pair}, {cost}"
                if len(self.limits) == 1:  # with several, what began meanwhile may keep a charge from being undone exactly
                    assert found.remaining == expected.remaining, f"{pair}, {cost}"
                    assert found.retry_after == expected.retry_after, f"{pair}, {cost}"


@pytest.mark.parametrize("number", [1, 2], ids=["one limit", "two limits"])
def test_in_any_history_order_holds_and_what_left_is_available_again(number: int, make_store: MakeStore) -> None:
    """Cancels, timeouts and resets at any moment, with any costs and keys: starts have the order of the calls; nothing is
    admitted above the rule; and a caller that left or was refused has taken nothing (of one limit: exactly nothing)."""

    @effort(60)
    @given(
        st.lists(st.sampled_from(SMALL), min_size=number, max_size=number),
        st.lists(STEPS, min_size=3, max_size=25),
        st.booleans(),
    )
    def law(limits: list[Any], steps: list[Any], stay: bool) -> None:
        async def main() -> None:
            history = History({f"limit {i}": limit for i, limit in enumerate(limits)}, make_store)
            for step in steps:
                await history.make(step)
            await history.settle()
            waiting = [one.task for one in history.asked if one.waits()]
            if stay:
                await history.clock.run_until(history.clock.now_us() + 60 * SECOND, history.settle)
                assert all(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*[one.task for one in history.asked], return_exceptions=True)
            await history.settle()
            assert history.limiter.waiting() == 0
            assert not any(history.limiter._queue._waiters.values())
            history.check_order()
            history.check_moments()
            await history.check_rest()
            await history.limiter.store.aclose()

        asyncio.run(main())

    law()


@pytest.mark.parametrize(
    ("tokens", "requests", "least"),
    [
        (LeakyBucket("50000/min", capacity=20_000), None, 200),  # 134 where estimates are held back until they are paid
        (LeakyBucket("50000/min", capacity=20_000), TokenBucket("60/min burst 1"), 110),  # 33 there
        (TokenBucket("50000/min"), TokenBucket("60/min burst 1"), 110),
    ],
    ids=["own starts", "starts of another limit", "of a token bucket"],
)
def test_estimates_that_are_settled_below_cost_no_throughput(
    tokens: Any, requests: Any, least: int, make_store: MakeStore
) -> None:
    """20 tasks reserve 4500 tokens, run for 5 s and settle 300, for two minutes: what they do not use is used by others."""

    async def main() -> None:
        clock = VirtualClock()
        limits = {"tokens": tokens} | ({"requests": requests} if requests else {})
        limiter = AsyncLimiter(limits, store=make_store(clock))
        begun_us, calls = clock.now_us(), 0

        async def one() -> None:
            nonlocal calls
            while True:
                async with limiter.reserve("k", cost={"tokens": 4500}) as reservation:
                    await clock.asleep(5)
                    await reservation.settle({"tokens": 300})
                    calls += 1

        tasks = [asyncio.ensure_future(one()) for _ in range(20)]
        await clock.run_until(begun_us + 120 * SECOND, settled(limiter))
        assert calls >= least
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await limiter.store.aclose()

    asyncio.run(main())


SLOW_REFILL = [
    (TokenBucket(10**6, per="400d"), TokenBucket(2 * 10**6, per="400d")),
    (LeakyBucket("1/d", 10**5), LeakyBucket("2/d", 10**6)),
]


def tokens_used(limiter: Limiter) -> int:
    left = {one.name: one.remaining for one in limiter.peek("k", {"tokens": 0, "requests": 0}).decisions}
    return int(limiter.limits["tokens"].capacity) - left["tokens"]


@pytest.mark.parametrize("rates", SLOW_REFILL, ids=lambda rates: rates[0].kind)
@pytest.mark.parametrize("costs", [(4500,), (4500, 1000, 400)], ids=["alike", "different"])
def test_estimates_of_two_rates_that_are_settled_below_leave_what_was_used(
    rates: tuple[Any, ...], costs: tuple[int, ...], make_store: MakeStore
) -> None:
    """Calls of two plans of one name wait for their turn, and settle 300: each plan has what all of them used, and no more."""
    clock = VirtualClock()
    draw = random.Random(1)
    requests = TokenBucket("60/min burst 1")
    store = make_store(clock)
    plans = [Limiter({"tokens": rate, "requests": requests}, store=store, name="plan") for rate in rates]
    used, waiting = 0, []
    for number in range(30):
        plan = plans[number > 5] if number < 20 else draw.choice(plans)  # an upgrade; then both
        waiting += [
            one for one in [plan.reserve("k", {"tokens": draw.choice(costs)}, 20) for _ in range(draw.randrange(4))] if one
        ]
        clock.advance(draw.choice([0.5, 1, 2]))
        for one in [one for one in waiting if one.decision.start_us <= clock.now_us()]:
            waiting.remove(one)
            assert one.settle({"tokens": 300})
            used += 300
    clock.advance(30)
    for one in waiting:
        assert one.settle({"tokens": 300})
        used += 300
    assert used > 5000
    for plan in plans:
        assert used - 10 <= tokens_used(plan) <= used
    store.close()


@pytest.mark.parametrize("limit", [rates[0] for rates in SLOW_REFILL], ids=lambda limit: limit.kind)
@pytest.mark.parametrize("behind", [False, True])
def test_a_call_that_is_settled_before_its_start_keeps_what_it_used(limit: Any, behind: bool, make_store: MakeStore) -> None:
    """Of calls that wait, every second is settled at once, far below its estimate, at times with others behind it: what it used
    stays charged, and so does what the others settle later."""
    clock = VirtualClock()
    limiter = Limiter({"tokens": limit, "requests": TokenBucket("60/min burst 1")}, store=make_store(clock))
    kept = []
    for _ in range(4):
        kept.append(limiter.reserve("k", {"tokens": 1000}))
        early = limiter.reserve("k", {"tokens": 4500})
        if behind:
            kept.append(limiter.reserve("k", {"tokens": 500}))
        assert early.settle({"tokens": 300})
        clock.advance(0.0001)
    charged = 4 * 1300 + 2000 * behind
    assert charged <= tokens_used(limiter) <= charged + 2  # until the last start, the refill is not counted
    clock.advance(20)
    for one in kept:
        assert one.settle({"tokens": 100})
    assert tokens_used(limiter) == pytest.approx(4 * 400 + 400 * behind, abs=2)
    limiter.store.close()


class SlowRebooking(WrappedStore):
    """A remote store whose answer to the first `rebook` (of tasks: to all) takes long; it decides at once, or late."""

    can_rebook, first = True, True

    def __init__(self, inner: MemoryStore, late: bool) -> None:
        super().__init__(inner)
        self.late, self.asked, self.answer, self.answered = late, threading.Event(), threading.Event(), asyncio.Event()

    def rebook(self, bookings: Any) -> list[Any]:
        first, self.first = self.first, False
        decisions = None if first and self.late else self.inner.rebook(bookings)
        if first:
            self.asked.set()
            self.answer.wait(60)
        return self.inner.rebook(bookings) if decisions is None else decisions

    async def arebook(self, bookings: Any) -> list[Any]:
        decisions = None if self.late else self.inner.rebook(bookings)
        await self.answered.wait()
        return self.inner.rebook(bookings) if decisions is None else decisions


COSTS = st.lists(st.sampled_from((1, 1, 1, 2)), min_size=4, max_size=9)
LEAVING = st.lists(st.integers(0, 8), min_size=1, max_size=4)
BEHIND = (TokenBucket("10/s burst 2"), LeakyBucketQueue("10/s"), SlidingWindowLog("2/200ms"))


@effort(100, least=20)
@given(st.sampled_from(BEHIND), COSTS, LEAVING, st.booleans())
def test_tasks_that_leave_during_a_call_that_moves_others_up_share_no_start(
    limit: Any, costs: list[int], leaving: list[int], late: bool
) -> None:
    """While a call moves waiters up, some of them leave: those that stay have the first starts, and a newcomer the next one."""

    async def main() -> None:
        clock = ManualClock(NOON)
        store = SlowRebooking(MemoryStore(clock=clock), late)
        limiter, model = AsyncLimiter(limit, store=store), Limiter(limit, store=MemoryStore(clock=clock))
        await limiter.hit("k", at_once(limit))
        model.hit("k", at_once(limit))
        reserved = [(await limiter.reserve("k", cost), cost) for cost in (2, *costs, 1)]
        tasks = [asyncio.create_task(reserved.pop(0)[0].cancel())]
        for number in leaving:
            for _ in range(5):
                await asyncio.sleep(0)
            if reserved:
                tasks.append(asyncio.create_task(reserved.pop(number % len(reserved))[0].cancel()))
        for _ in range(5):
            await asyncio.sleep(0)
        store.answered.set()
        assert all(await asyncio.gather(*tasks))
        expected = [model.reserve("k", cost).decision.start_us for _, cost in reserved]
        assert [one.decision.start_us for one, _ in reserved] == expected
        assert (await limiter.reserve("k")).decision.start_us == model.reserve("k").decision.start_us

    asyncio.run(main())


@effort(100, least=20)
@given(st.sampled_from(BEHIND), COSTS, LEAVING, st.booleans())
def test_threads_that_leave_during_a_call_that_moves_others_up_share_no_start(
    limit: Any, costs: list[int], leaving: list[int], late: bool
) -> None:
    """While the call of one thread moves waiters up, another thread cancels some of them: all starts together are admitted."""
    store = SlowRebooking(MemoryStore(clock=ManualClock(NOON)), late)
    limiter = Limiter(limit, store=store)
    limiter.hit("k", at_once(limit))
    reserved = [(limiter.reserve("k", cost), cost) for cost in (2, *costs, 1)]
    other = threading.Thread(target=reserved.pop(0)[0].cancel)
    other.start()
    store.asked.wait(60)
    for number in leaving:
        if reserved:
            reserved.pop(number % len(reserved))[0].cancel()
    store.answer.set()
    other.join()
    reserved += [(limiter.reserve("k"), 1) for _ in range(5)]
    clock = ManualClock(NOON)
    model = Limiter(limit, store=MemoryStore(clock=clock))
    model.hit("k", at_once(limit))
    for start_us, cost in sorted((one.decision.start_us, cost) for one, cost in reserved):
        clock._now_us = max(clock._now_us, start_us)
        assert model.hit("k", cost)


CHARGES = st.one_of(
    st.tuples(st.sampled_from(["reserve", "foreign"]), st.integers(1, 10), st.integers(0, 40)),
    st.tuples(st.sampled_from(["settle", "cancel", "foreign back"]), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("advance"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("hit"), st.integers(1, 4), st.just(0)),
)


@effort(400)
@given(st.sampled_from([TokenBucket("10/s burst 10"), LeakyBucket("3/s", capacity=10)]), st.lists(CHARGES, max_size=40))
def test_what_is_given_back_leaves_enough_for_every_start_to_come(limit: Any, steps: list[tuple[str, int, int]]) -> None:
    """Reservations that are settled (also above their estimates) and cancelled in any order, beside charges that another process
    made and that this one does not know of: the bucket is never fuller than those that are still to start leave it."""
    clock = ManualClock(NOON)
    store = MemoryStore(clock=clock)
    limiter = Limiter({"bucket": limit, "other": TokenBucket("10/s burst 1")}, store=store, name="n")
    named = limiter.named[0]
    mine: list[tuple[Any, int]] = []
    foreign: list[tuple[Claim, int]] = []
    settled_early: list[tuple[int, int]] = []
    for step, number, late in steps:
        if step == "reserve":
            if reservation := limiter.reserve("k", cost={"bucket": number}, max_wait=10):
                mine.append((reservation, number))
        elif step == "foreign":
            claims = [Claim(named, "k", number)]
            decision = store.decide(claims, 10 * SECOND, not_before_us=clock.now_us() + late * SECOND // 10)
            foreign += [(Claim(named, "k", number), decision.start_us)] if decision else []
        elif step == "hit":
            limiter.hit("k", cost={"bucket": number})
        elif step == "advance":
            clock.advance(number / 10)
        elif step == "foreign back" and foreign:
            claim, start_us = foreign.pop(number % len(foreign))
            store.give_back([claim], start_us)
        elif step in ("settle", "cancel") and mine:
            reservation, cost = mine.pop(number % len(mine))
            used = late if step == "settle" else 0
            reservation.settle({"bucket": used, "other": int(used > 0)})
            settled_early += [(reservation.decision.start_us, min(used, cost))] if used else []
        starts = [(one.decision.start_us, cost) for one, cost in mine] + [(start_us, claim.cost) for claim, start_us in foreign]
        starts += settled_early
        full_at = Fraction(clock.now_us())
        for start_us, cost in sorted(one for one in starts if one[0] > clock.now_us()):
            full_at = max(full_at, Fraction(start_us)) + cost * Fraction(limit.period, limit.count)
        decision = store.decide([Claim(named, "k", 0)], commit=False)
        assert decision.reset_us >= full_at - clock.now_us() - 1


def test_starts_that_were_cancelled_do_not_hide_one_that_has_begun() -> None:
    """What a call did not use is given back once all starts have begun, though later ones with other costs were cancelled."""
    clock = ManualClock(NOON)
    limiter = Limiter(TokenBucket("10/s burst 10"), store=MemoryStore(clock=clock))
    limiter.hit("k", cost=10)
    first, second, third = (limiter.reserve("k", cost=cost) for cost in (8, 3, 6))
    second.cancel()  # the third moves up
    third.cancel()
    limiter.reserve("k", cost=3)
    clock.advance(1.1)  # the last start; the third one's was at 1.4 s
    first.settle(4)
    assert limiter.peek("k").reset_after == pytest.approx(0.6)


@pytest.mark.parametrize("limit", [TokenBucket("10/s burst 10"), LeakyBucket("10/s", capacity=10)], ids=lambda limit: limit.kind)
@pytest.mark.parametrize("costs", [(5,), (5, 5), (1, 5, 2)])
def test_debt_is_no_start_behind_a_waiter_that_leaves(limit: Any, costs: tuple[int, ...], make_store: MakeStore) -> None:
    """After a call settled 5 above its estimate, waiters that leave give back all that they were charged."""
    limiter = Limiter(limit, store=make_store(VirtualClock()))
    begun = limiter.reserve("k", cost=10)
    waiting = [limiter.reserve("k", cost=cost) for cost in costs]
    begun.settle(15)
    for one in reversed(waiting):
        assert one.cancel()
    assert limiter.peek("k").retry_after == 0.6
    decision = limiter.reserve("k", cost=3).decision
    limiter.store.give_back([Claim(limiter.named[0], "k", -5)])
    limiter.store.give_back([Claim(limiter.named[0], "k", 3)], decision.start_us)  # without the states of the charge
    assert limiter.peek("k").retry_after == 1.1
    limiter.store.close()


@pytest.mark.parametrize("limit", [LeakyBucketQueue("10/s"), FixedWindow("1/100ms")], ids=lambda limit: limit.kind)
def test_a_call_that_moved_up_gives_back_no_later_start(limit: Any, make_store: MakeStore) -> None:
    """The first of three waiters leaves; the second fails at the start of the third, which stays charged."""

    async def main() -> None:
        clock = VirtualClock()
        limiter = AsyncLimiter(limit, store=make_store(clock))
        settle = settled(limiter)
        assert await limiter.hit("k")
        first, second, third = [await limiter.reserve("k") for _ in range(3)]
        await first.cancel()
        entering = [asyncio.ensure_future(one.__aenter__()) for one in (second, third)]
        await clock.run_until(clock.now_us() + SECOND // 5, settle)
        assert await asyncio.gather(*entering) == [second, third]
        await second.cancel()
        refused = await limiter.hit("k")
        assert not refused
        assert refused.retry_after == 0.1
        await limiter.store.aclose()

    asyncio.run(main())


def test_a_key_on_which_calls_always_wait_needs_no_more_memory_with_time() -> None:
    """Of a bucket with 20 waiters at all times, as many starts are known after a thousand calls as there are waiters."""
    clock = ManualClock(NOON)
    limiter = Limiter(TokenBucket("10/s burst 1"), store=MemoryStore(clock=clock))
    for _ in range(20):
        limiter.reserve("k")
    for _ in range(1000):
        limiter.reserve("k")
        clock.advance(0.1)
    assert [[len(one.last) for one in rates] for rates in limiter._queue._later._known.values()] == [[21]]
