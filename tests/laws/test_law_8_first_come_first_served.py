"""Law 8: waiters are served in order of arrival, and a waiter that leaves delays no other. (More in `StoreContract`.)"""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pure_traces import Played, with_traces

from effort import effort
from limitkeeper import (
    AsyncLimiter,
    FixedWindow,
    LeakyBucketQueue,
    Limit,
    Limiter,
    MemoryStore,
    RateLimited,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.testing import ManualClock
from limitkeeper.testing.strategies import LIMITS, limits
from stand_ins import HeldClock

LINES = [rule for rule in LIMITS if LIMITS[rule][0].reserves]
#: Rules whose own three numbers are enough to undo any charge; the store undoes the others' last charge for them.
EXACT = (SlidingWindowLog, LeakyBucketQueue)


@pytest.mark.parametrize("rule", LINES, ids=lambda rule: rule.kind)
def test_a_charge_given_back_at_once_was_never_made(rule: type[Limit]) -> None:
    """From any state every call is answered as before it; where a rule alone can't know, at most more strictly."""

    @effort(150)
    @given(with_traces(rule, max_size=8), st.data())
    def law(drawn: tuple[Limit, list[Any]], data: Any) -> None:
        limit, trace = drawn
        played = Played(limit, trace)
        before, now = tuple(played.rule.state), played.now
        cost = data.draw(st.integers(1, 3), label="cost")
        late = data.draw(st.sampled_from((0, 1, limit.period // limit.tick, 2 * limit.period // limit.tick + 1)), label="late")
        *after, start, _, _, _ = limit.decide(before, now, cost, 10**12, now + late)
        if start < 0:
            return
        after = limit.give_back(tuple(after), now, cost, start)
        for probe in (1, 2, limit.capacity):
            found, was = (limit.decide(state, now, probe, 0)[3:] for state in (after, before))
            if rule in EXACT or (rule is FixedWindow and late == 0):
                assert found == was, f"a hit of {probe}"
            else:
                assert (found[0] >= 0) <= (was[0] >= 0), f"a hit of {probe}"
                assert limit.decide(after, now, 0)[5] <= limit.decide(before, now, 0)[5]

    law()


@effort(150)
@given(st.lists(limits(), min_size=1, max_size=4, unique_by=str), st.lists(st.integers(1, 2), max_size=4), st.integers(1, 2))
def test_a_reservation_cancelled_at_once_was_never_made(some: list[Limit], taken: list[int], cost: int) -> None:
    """With any limits together, at any common start: after it every call is answered as before it."""
    limiter = Limiter({str(limit): limit for limit in some}, store=MemoryStore(clock=ManualClock(1_700_000_123.456789)))
    for one in taken:
        limiter.reserve("a", one)
    before = [limiter.peek("a", probe) for probe in (1, 2)]
    if reservation := limiter.reserve("a", cost):
        reservation.cancel()
    assert [limiter.peek("a", probe) for probe in (1, 2)] == before


@effort(150)
@given(
    st.lists(limits(*LINES), min_size=2, max_size=3, unique_by=str),
    st.lists(st.integers(1, 2), min_size=2, max_size=6),
    st.integers(0, 5),
)
def test_reservations_behind_a_cancelled_one_start_no_later(some: list[Limit], costs: list[int], leaver: int) -> None:
    """With several limits too: a waiter's start never moves away, it stays granted, and the order stays."""
    limiter = Limiter({str(limit): limit for limit in some}, store=MemoryStore(clock=ManualClock(1_700_000_123.456789)))
    line = [one for cost in costs if (one := limiter.reserve("a", cost))]
    if not line:
        return
    promised = [one.wait for one in line]
    line[leaver % len(line)].cancel()
    waits = [one.wait for one in line]
    assert all(now <= then for now, then in zip(waits, promised, strict=True))
    assert all(line)
    stayed = [wait for number, wait in enumerate(waits) if number != leaver % len(line)]
    assert stayed == sorted(stayed)


def test_several_limits_move_up_to_where_they_would_have_been() -> None:
    """A wide bucket and a slow queue: when the first waiter leaves, the others get its start and the ones behind it."""
    for wide in (TokenBucket("1/s", burst=1), TokenBucket("1/s", burst=10)):
        limiter = Limiter({"wide": wide, "slow": LeakyBucketQueue("1/10s")}, store=MemoryStore(clock=ManualClock()))
        line = [limiter.reserve("a") for _ in range(4)]
        assert [one.wait for one in line] == [0.0, 10.0, 20.0, 30.0]
        line[1].cancel()
        assert [one.wait for one in (line[0], *line[2:])] == [0.0, 10.0, 20.0]


def test_tasks_are_served_in_order_of_arrival() -> None:
    """Twenty tasks at a queue of 200/s come through in the order of their calls, no closer than 5 ms."""

    async def main() -> list[tuple[int, int]]:
        limiter, done = AsyncLimiter(LeakyBucketQueue("200/s")), []

        async def work(number: int) -> None:
            start_us = (await limiter.acquire("a")).start_us
            assert limiter.store.clock.now_us() >= start_us
            done.append((start_us, number))

        await asyncio.gather(*(work(number) for number in range(20)))
        return sorted(done)

    done = asyncio.run(main())
    assert [number for _, number in done] == list(range(20))
    assert min(later - start for (start, _), (later, _) in pairwise(done)) >= 5000


def test_a_cancelled_task_gives_its_turn_to_those_behind() -> None:
    """The first of three waiters is cancelled: the second gets its start, the third the second's."""

    async def main(clock: HeldClock) -> None:
        limiter = AsyncLimiter(LeakyBucketQueue("10/s"), store=MemoryStore(clock=clock))
        await limiter.acquire("a")
        tasks = [asyncio.create_task(limiter.acquire("a")) for _ in range(3)]
        await asyncio.sleep(0)
        assert limiter.waiting("a") == 3
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        for turn in (1, 2):
            assert not tasks[turn].done()
            clock.advance(0.1)
            await asyncio.wait_for(tasks[turn], 30)

    asyncio.run(main(HeldClock()))


def test_a_task_that_times_out_never_took_a_turn() -> None:
    """A deadline shorter than the wait refuses at once, and the next waiter gets the start that it would have had."""

    async def main(clock: ManualClock) -> tuple[int, int]:
        limiter = AsyncLimiter(LeakyBucketQueue("10/s"), store=MemoryStore(clock=clock))
        await limiter.acquire("a")
        with pytest.raises(RateLimited):
            await limiter.acquire("a", timeout=0.05)
        refused = clock.now_us()
        await limiter.acquire("a")
        return refused, clock.now_us()

    assert asyncio.run(main(ManualClock())) == (0, 100_000)


@pytest.mark.parametrize("text", ["leaky bucket queue 100/s", "token bucket 100/s burst 1", "sliding window counter 1/10ms"])
def test_threads_are_served_in_order_of_arrival(text: str) -> None:
    """Threads that call one after the other come through in that order, also where a rule can't reserve."""
    limiter, done = Limiter(text), []
    limiter.acquire("a")
    threads = []
    for number in range(6):
        thread = threading.Thread(target=lambda number=number: done.append((limiter.acquire("a").start_us, number)))
        thread.start()
        threads.append(thread)
        while limiter.waiting("a") < number + 1 and thread.is_alive() and len(done) <= number:
            time.sleep(0.0002)
    for thread in threads:
        thread.join(60)
    assert [number for _, number in sorted(done)] == list(range(6))


def test_what_can_never_fit_is_refused_at_once() -> None:
    """A cost above the capacity is refused without a sleep, and nothing is charged."""
    for rule in LIMITS:
        limit = LIMITS[rule][0]
        clock = ManualClock()
        limiter = Limiter(limit, store=MemoryStore(clock=clock))
        with pytest.raises(RateLimited) as refused:
            limiter.acquire("a", limit.capacity + 1)
        assert refused.value.decision.retry_after == float("inf")
        assert clock.now_us() == 0
        assert limiter.peek("a").reset_after == 0.0
