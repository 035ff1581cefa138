"""The domain: counts, bursts and costs to 10^9, periods from 1 ms to 400 days; an error names the nearest value that fits."""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from limitkeeper import (
    FixedWindow,
    InvalidLimit,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.testing import ManualClock
from stand_ins import NOON

BILLION = 10**9
PERIODS = ["1ms", "s", "min", "h", "d", "30d", "400d"]
KINDS = [
    TokenBucket,
    lambda rate: LeakyBucket(rate, BILLION),
    lambda rate: LeakyBucketQueue(rate, BILLION),
    LeakyBucketQueue,
    FixedWindow,
    SlidingWindowLog,
    SlidingWindowCounter,
]


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("count", [1, 7, 10007, 999_999_937, BILLION])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_every_corner_of_the_domain_is_accepted(kind, count, period):
    """Counts and sizes to 10^9 over periods from 1 ms to 400 days are limits of every kind, but for those that take 14 000 years
    to fill."""
    years = BILLION * FixedWindow(f"{count}/{period}").period / count / 1e6 / 86400 / 365
    with suppress(InvalidLimit) if years > 14_000 else nullcontext():
        assert KINDS[kind](f"{count}/{period}").count == count


@pytest.mark.parametrize("text", ["10007 per 30 days", "1234567/day", "54/min", "7 per 3 hours", "1/400d", "1000000000/ms"])
def test_awkward_rates_refuse_the_first_call_beyond_them_and_admit_it_in_time(text, clock, store):
    """An unusual rate works as any other: used up, it has a retry time, exact to the tick."""
    limit = TokenBucket(text)
    limiter = Limiter(limit, store=store)
    assert limiter.hit("a", cost=limit.burst)
    wait = limiter.hit("a").retry_after
    assert wait == pytest.approx(limit.period / limit.count / 1e6, abs=limit.tick / 1e6)
    clock.advance(wait)
    assert limiter.hit("a")


def test_a_cost_of_a_billion_is_taken_whole(store):
    """A burst of 10^9 admits a cost of 10^9, once."""
    limiter = Limiter(TokenBucket("1/s", burst=BILLION), store=store)
    assert limiter.hit("a", cost=BILLION).remaining == 0
    assert not limiter.hit("a")


def nearest(error: InvalidLimit) -> str:
    """The rate that an error names as one that fits."""
    found = re.search(r"limit that fits is (\S+)", str(error))
    assert found is not None, f"no nearest limit in {error}"
    return found[1]


#: Rates whose period can't be counted in a coarser tick, with a size that needs one.
TOO_FINE = [
    (TokenBucket, "999999937/86399999999us", BILLION),
    (TokenBucket, "7/86399999999us", 10**7),
    (TokenBucket, "7/45036008us", 999_999_917),
    (LeakyBucket, "7/86399999999us", 10**7),
    (LeakyBucketQueue, "7/34559999999999us", 90_001),
    (SlidingWindowCounter, "999999937/86399999999us", None),
    (SlidingWindowCounter, "1000000000/30000017us", None),
    (SlidingWindowCounter, "1000000000/34559999999999us", None),
]


def made(kind, rate, size):
    return kind(rate) if size is None else kind(rate, size)


@pytest.mark.parametrize(("kind", "rate", "size"), TOO_FINE, ids=lambda one: getattr(one, "__name__", str(one)))
def test_what_does_not_fit_names_the_nearest_that_does(kind, rate, size):
    """A limit too fine to be counted exactly is an InvalidLimit that names a near one, and that one is accepted."""
    with pytest.raises(InvalidLimit, match=re.escape(rate)) as caught:
        made(kind, rate, size)
    near = made(kind, nearest(caught.value), size)
    assert near.period == pytest.approx(made(FixedWindow, rate, None).period, rel=1e-3)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([TokenBucket, LeakyBucket, LeakyBucketQueue, SlidingWindowCounter]), st.data())
def test_a_limit_is_accepted_or_its_nearest_is(kind, data):
    """Anywhere in the domain a limit is accepted, or the limit that its error names is."""
    count = data.draw(st.integers(1, BILLION))
    period = data.draw(st.integers(1000, 400 * 86400 * 10**6))
    size = None if kind is SlidingWindowCounter else data.draw(st.integers(1, BILLION))
    rate = f"{count}/{period}us"
    for _ in range(2):  # the nearest that is exact may still take too long to fill
        try:
            made(kind, rate, size)
        except InvalidLimit as error:
            rate = nearest(error)
    made(kind, rate, size)


@settings(max_examples=200, deadline=None)
@example(TokenBucket, 5, 879_235, BILLION)
@example(LeakyBucket, 1, 34_560_000, 10**6)
@given(
    st.sampled_from([TokenBucket, LeakyBucket, LeakyBucketQueue]),
    st.integers(1, 1000),
    st.integers(1, 34_560_000),
    st.integers(10**4, BILLION),
)
def test_times_of_an_accepted_limit_are_counted_in_64_bits(kind, count, seconds, size):
    """A key that is charged its whole size is as new after the time that the rate needs for it, or the limit is an error."""
    try:
        limit = kind(f"{count}/{seconds}s", size)
    except InvalidLimit as error:
        limit = kind(nearest(error), size)
    found = Limiter(limit, MemoryStore(clock=ManualClock(NOON))).hit("a", size)
    assert found.reset_after == pytest.approx(size * limit.period / limit.count / 1e6)


@pytest.mark.parametrize("rate", ["7/86399999999us", "7/86400000001us"])
def test_the_nearest_is_really_near(rate):
    """One microsecond beside a day, the nearest that fits is a day, on either side."""
    with pytest.raises(InvalidLimit) as caught:
        TokenBucket(rate, burst=10**7)
    assert nearest(caught.value) == "7/d"
