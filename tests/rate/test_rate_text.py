"""The grammar of rates and limits: accepted texts and their values."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from limitkeeper import (
    GCRA,
    FixedWindow,
    InvalidLimit,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.rate import duration_us

SECOND, MINUTE, HOUR, DAY = 10**6, 60 * 10**6, 3600 * 10**6, 86400 * 10**6

SPELLINGS = {
    "5/s": (5, SECOND),
    "5/sec": (5, SECOND),
    "5/secs": (5, SECOND),
    "5/second": (5, SECOND),
    "5/seconds": (5, SECOND),
    "5 per second": (5, SECOND),
    "5 / s": (5, SECOND),
    "  5/s  ": (5, SECOND),
    "5 PER SECOND": (5, SECOND),
    "5/S": (5, SECOND),
    "5/1s": (5, SECOND),
    "100/min": (100, MINUTE),
    "100/m": (100, MINUTE),
    "100/mins": (100, MINUTE),
    "100/minute": (100, MINUTE),
    "100 per minutes": (100, MINUTE),
    "10 per 5 minutes": (10, 5 * MINUTE),
    "10/5min": (10, 5 * MINUTE),
    "10/300s": (10, 5 * MINUTE),
    "7/h": (7, HOUR),
    "7/hr": (7, HOUR),
    "7/hrs": (7, HOUR),
    "7/hour": (7, HOUR),
    "7 per 3 hours": (7, 3 * HOUR),
    "1/d": (1, DAY),
    "1/day": (1, DAY),
    "1/2 day": (1, 2 * DAY),
    "1/2 days": (1, 2 * DAY),
    "10007 per 30 days": (10007, 30 * DAY),
    "1234567/day": (1234567, DAY),
    "1/w": (1, 7 * DAY),
    "1/week": (1, 7 * DAY),
    "1/month": (1, 30 * DAY),
    "10 per 2 months": (10, 60 * DAY),
    "1/year": (1, 365 * DAY),
    "1 per 2 weeks": (1, 14 * DAY),
    "1/ms": (1, 1000),
    "1/10ms": (1, 10_000),
    "1 per 10 milliseconds": (1, 10_000),
    "1 per millisecond": (1, 1000),
    "1/1000us": (1, 1000),
    "1/1000µs": (1, 1000),
    "1 per 1000 microseconds": (1, 1000),
    "1_000_000/day": (1_000_000, DAY),
    "3/0.5s": (3, 500_000),
    "3 per 1.5 minutes": (3, 90 * SECOND),
    "1000000000/400d": (10**9, 400 * DAY),
}


@pytest.mark.parametrize(("text", "rate"), SPELLINGS.items(), ids=SPELLINGS)
def test_every_spelling_is_one_count_and_one_period(text, rate):
    """A rate's text is a count per period, in any of the accepted spellings."""
    limit = TokenBucket(text)
    assert (limit.count, limit.period) == rate


@pytest.mark.parametrize("text", SPELLINGS, ids=SPELLINGS)
def test_every_spelling_means_the_same_to_every_kind(text):
    """All six kinds of limit read a rate alike."""
    kinds = [LeakyBucket(text, 1), LeakyBucketQueue(text), FixedWindow(text), SlidingWindowLog(text), SlidingWindowCounter(text)]
    assert {(limit.count, limit.period) for limit in kinds} == {SPELLINGS[text]}


CANONICAL = {
    "5/s": "token bucket 5/s burst 5",
    "5/s burst 10": "token bucket 5/s burst 10",
    "5 per second BURST 1_0": "token bucket 5/s burst 10",
    "token bucket 5/s burst 10 initial 0": "token bucket 5/s burst 10 initial 0",
    "5/s initial 2 burst 10": "token bucket 5/s burst 10 initial 2",
    "5/s burst 10 initial 10": "token bucket 5/s burst 10",
    "gcra 5/s burst 10": "token bucket 5/s burst 10",
    "leaky bucket 5/s capacity 10": "leaky bucket 5/s capacity 10",
    "leaky bucket queue 5/s": "leaky bucket queue 5/s",
    "leaky bucket queue 5/s capacity 10": "leaky bucket queue 5/s capacity 10",
    "fixed window 1000/min": "fixed window 1000/min",
    "fixed window 1000/60s align clock": "fixed window 1000/min",
    "Fixed  Window 1000/min align FIRST": "fixed window 1000/min align first",
    "sliding window log 5/60000ms": "sliding window log 5/min",
    "sliding window counter 10/min": "sliding window counter 10/min",
    "1/2 day": "token bucket 1/2d burst 1",
    "1/week": "token bucket 1/7d burst 1",
    "1/month": "token bucket 1/30d burst 1",
    "1/year": "token bucket 1/365d burst 1",
    "1/90s": "token bucket 1/90s burst 1",
    "1/1500us": "token bucket 1/1500us burst 1",
}


@pytest.mark.parametrize(("text", "canonical"), CANONICAL.items(), ids=CANONICAL)
def test_a_limit_has_one_canonical_text(text, canonical):
    """For every accepted spelling `str(limit)` is the one canonical text."""
    assert str(parse_limit(text)) == canonical


counts = st.integers(1, 10**9)
periods = st.one_of(
    st.integers(1, 86400 * 400).map(lambda seconds: seconds * SECOND),
    st.integers(1, 1000).map(lambda ms: ms * 1000),
    st.sampled_from([1000, SECOND, MINUTE, HOUR, DAY, 7 * DAY, 30 * DAY, 400 * DAY]),
)
sizes = st.integers(1, 1000)


KINDS = [
    lambda count, per, size, part: TokenBucket(count, burst=size, per=per),
    lambda count, per, size, part: TokenBucket(count, burst=size, initial=part, per=per),
    lambda count, per, size, part: LeakyBucket(count, size, per=per),
    lambda count, per, size, part: LeakyBucketQueue(count, size, per=per),
    lambda count, per, size, part: LeakyBucketQueue(count, per=per),
    lambda count, per, size, part: FixedWindow(count, per=per),
    lambda count, per, size, part: FixedWindow(count, align="first", per=per),
    lambda count, per, size, part: SlidingWindowLog(count, per=per),
    lambda count, per, size, part: SlidingWindowCounter(count, per=per),
]


@st.composite
def limits(draw):
    """Any limit that can be made; one too fine to be counted exactly is another test's matter."""
    size = draw(sizes)
    kind, count, per = draw(st.sampled_from(KINDS)), draw(counts), timedelta(microseconds=draw(periods))
    try:
        return kind(count, per, size, draw(st.integers(0, size)))
    except InvalidLimit:
        reject()


@settings(max_examples=200, deadline=None)
@given(limits())
def test_the_canonical_text_parses_back(limit):
    """A limit made from numbers is equal to the limit made from its text."""
    assert parse_limit(str(limit)) == limit


@settings(max_examples=200, deadline=None)
@given(limits())
def test_the_repr_evaluates_to_an_equal_limit(limit):
    """`repr(limit)` is Python that makes the limit again."""
    assert eval(repr(limit)) == limit


@pytest.mark.parametrize(
    "per", [60, 60.0, "minute", "min", "1 minute", "60s", "60000ms", timedelta(minutes=1), timedelta(seconds=60)], ids=str
)
def test_a_number_with_per_is_the_same_rate(per):
    """`TokenBucket(5, per=…)` takes seconds, a timedelta or text."""
    assert TokenBucket(5, per=per) == TokenBucket("5/min")


def test_a_fractional_number_of_seconds_is_taken_as_it_is_written():
    """0.1 s are exactly 100 ms, though 0.1 is no exact float."""
    assert TokenBucket(5, per=0.1) == TokenBucket("5/100ms")


def test_burst_as_an_argument_is_burst_in_the_text():
    """`burst` and `initial` may be given in the text or as arguments."""
    assert TokenBucket("5/s", burst=10, initial=3) == TokenBucket("5/s burst 10 initial 3")


def test_capacity_as_an_argument_is_capacity_in_the_text():
    """`capacity` may be given in the text or as an argument."""
    assert LeakyBucket("5/s", capacity=10) == LeakyBucket("5/s capacity 10")
    assert LeakyBucketQueue("5/s", capacity=10) == LeakyBucketQueue("5/s capacity 10")


def test_align_as_an_argument_is_align_in_the_text():
    """`align` may be given in the text or as an argument."""
    assert FixedWindow("5/s", align="first") == FixedWindow("5/s align first")


def test_burst_defaults_to_the_count():
    """Without `burst` a token bucket holds as many tokens as its rate counts."""
    assert TokenBucket("100/min").burst == 100


def test_gcra_is_the_token_bucket():
    """GCRA is another name for the same code and the same state."""
    assert GCRA is TokenBucket


def test_a_limiter_takes_several_limits_in_one_text():
    """Limits in one text are separated by semicolons and keep their order."""
    limiter = Limiter("token bucket 5/s burst 10; fixed window 1000/min")
    assert list(limiter.limits.values()) == [TokenBucket("5/s burst 10"), FixedWindow("1000/min")]


def test_a_bare_rate_is_a_token_bucket():
    """A text that names no rule is a token bucket."""
    assert list(Limiter("5/s").limits.values()) == [TokenBucket("5/s")]


DURATIONS = {0: 0, 1: SECOND, 2.5: 2_500_000, 0.1: 100_000, 1e-6: 1, "250ms": 250_000, "1.5s": 1_500_000, "2 minutes": 2 * MINUTE}
DURATIONS |= {"hour": HOUR, "7us": 7, timedelta(milliseconds=5): 5000, "1 week": 7 * DAY}


@pytest.mark.parametrize(("duration", "expected"), DURATIONS.items(), ids=map(str, DURATIONS))
def test_durations_are_seconds_timedeltas_or_text(duration, expected):
    """A timeout or a wait is a number of seconds, a timedelta or a text with a unit."""
    assert duration_us(duration) == expected


def test_a_duration_is_rounded_up_to_a_microsecond():
    """A part of a microsecond counts as a whole one, so that no wait is too short."""
    assert duration_us(1e-9) == 1


@pytest.mark.parametrize("timeout", [1, 1.0, "1s", "1000ms", timedelta(seconds=1)], ids=str)
def test_verbs_take_durations_in_every_spelling(timeout, clock, store):
    """`acquire(timeout=…)` and `reserve(max_wait=…)` take durations in every spelling."""
    limiter = Limiter("1/s", store=store)
    limiter.hit("a")
    assert limiter.reserve("a", max_wait=timeout).wait == 1.0
    limiter.reset("a")
    limiter.hit("a")
    assert limiter.acquire("a", timeout=timeout).wait == 1.0
