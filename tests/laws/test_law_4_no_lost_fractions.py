"""Law 4: under saturation, the long-run rate is the configured rate, for rates whose interval is no whole number of ticks."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from pure_traces import BEGIN_US, Rule

from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.testing import ManualClock

AWKWARD = ("54/min", "3/s", "7 per 3 hours", "10007/30d", "1234567/d", "3 per 7us")
every_rate = pytest.mark.parametrize("rate", AWKWARD)


def saturate(limit: Any, calls: int) -> list[int]:
    """The ticks, from the first on, at which one unit after the other is admitted, each as early as it can be."""
    rule, now, admitted = Rule(limit), BEGIN_US // limit.tick, []
    begin = now
    while len(admitted) < calls:
        start, retry_at, *_ = rule.decide(now, 1, 0)
        if start is None:
            now = retry_at
        else:
            admitted.append(start - begin)
    return admitted


@every_rate
@pytest.mark.parametrize("burst", [2, 3, 10])
def test_a_bucket_admits_its_burst_and_its_rate(rate: str, burst: int) -> None:
    """After any time T: burst + ⌊rate · T⌋, to the unit, and each of them at its first tick."""
    for limit in (TokenBucket(rate, burst=burst), LeakyBucket(rate, capacity=burst)):
        interval = Fraction(limit.period, limit.tick * limit.count)
        expected = [0] * burst + [ceil(n * interval) for n in range(1, 3000)]
        assert saturate(limit, len(expected)) == expected


@every_rate
def test_a_bucket_of_one_loses_less_than_a_tick_a_unit(rate: str) -> None:
    """A bucket of one is full before the next tick comes: what overflows in between is less than a tick."""
    limit = TokenBucket(rate, burst=1)
    interval = Fraction(limit.period, limit.tick * limit.count)
    admitted = saturate(limit, 3000)
    assert {later - earlier for earlier, later in pairwise(admitted)} == {ceil(interval)}


@every_rate
@pytest.mark.parametrize("capacity", [None, 5])
def test_a_queue_starts_at_its_rate(rate: str, capacity: int | None) -> None:
    """The n-th start of a queue is at ⌈n · interval⌉: rounded for the caller, not in the queue."""
    limit = LeakyBucketQueue(rate, capacity=capacity)
    interval = Fraction(limit.period, limit.tick * limit.count)
    rule, begin = Rule(limit), BEGIN_US // limit.tick
    now, starts = begin, []
    while len(starts) < 3000:
        start, retry_at, *_ = rule.decide(now, 1, 10**12)
        if start is None:
            now = retry_at
        else:
            starts.append(start - begin)
    assert starts == [ceil(n * interval) for n in range(3000)]


@pytest.mark.parametrize("rate", ["54/min", "3/s", "7 per 3 hours"])
def test_a_line_for_several_limits_loses_nothing_either(rate: str) -> None:
    """A queue keeps its own pace when a caller waits for it together with another limit."""
    clock = ManualClock(1_700_000_123.456789)
    queue = LeakyBucketQueue(rate)
    limiter = Limiter({"queue": queue, "wide": TokenBucket("1000/s")}, store=MemoryStore(clock=clock))
    waits = [limiter.reserve("a").decision.wait_us for _ in range(300)]
    assert waits == [ceil(Fraction(n * queue.period, queue.count)) for n in range(300)]


@every_rate
def test_windows_admit_their_count(rate: str) -> None:
    """Fixed windows and the log: `count` in every window, the first one whole."""
    for limit in (FixedWindow(rate, align="first"), SlidingWindowLog(rate)):
        calls = min(3 * limit.count, 20_000)
        window = limit.period // limit.tick
        assert saturate(limit, calls) == [n // limit.count * window for n in range(calls)]


@pytest.mark.parametrize("rate", ["54/min", "3/s", "7 per 3 hours", "10/s", "2/s"])
def test_a_counter_admits_its_count_but_one_in_every_window(rate: str) -> None:
    """The older window weighs on the newer until its very end, so the last unit of a window comes with the next."""
    limit = SlidingWindowCounter(rate)
    window = limit.period // limit.tick
    first = BEGIN_US // limit.tick
    admitted = [first + after for after in saturate(limit, 50 * limit.count)]
    windows = range(first // window + 1, admitted[-1] // window)
    counts = [sum(1 for moment in admitted if moment // window == number) for number in windows]
    assert set(counts) <= {limit.count - 1, limit.count}
