"""Malformed limits: each is an InvalidLimit that shows the text and the right form."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from limitkeeper import (
    FixedWindow,
    InvalidLimit,
    LeakyBucket,
    LeakyBucketQueue,
    Limit,
    Limiter,
    LimitkeeperError,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.rate import duration_us

KINDS = [TokenBucket, LeakyBucketQueue, FixedWindow, SlidingWindowLog, SlidingWindowCounter]

#: The text -> words that must be in the message.
MALFORMED = {
    "": "write it like",
    " ": "write it like",
    "5": "write it like",
    "5/": "write it like",
    "/s": "write it like",
    "5 s": "write it like",
    "5//s": "write it like",
    "s/5": "write it like",
    "0/s": "at least 1",
    "00/s": "at least 1",
    "-5/s": "the count must be at least 1, got -5; write it like",
    "-0.5/s": "the count must be at least 1, got -0.5",
    "+5/s": "write it like",
    "5.5/s": "the count must be a whole number, got 5.5; write 11 per 2s",
    ".5 per 3 min": "the count must be a whole number, got .5; write 1 per 6min",
    "1.5/0s": "the count must be a whole number, got 1.5; write it like",
    "9.9999999999/d": "the count must be a whole number, got 9.9999999999; write it like",
    f"1.{'5' * 5000}/s": "write it like",
    "1e3/s": "write it like",
    "five/s": "write it like",
    "5/0s": "greater than zero",
    "5/-1s": "write it like",
    "5 per": "write it like",
    "1 per millenium": "unknown unit 'millenium'; use one of us, ms, s, min, h, d, week, month, year, or",
    "1/ns": "unknown unit 'ns'; use one of",
    "1/mo": "unknown unit 'mo'",
    "1/2 years": "at most 400 days",
    "1000000001/s": "at most 1000000000",
    "1/401d": "at most 400 days",
    "1/58 weeks": "at most 400 days",
    "1/1.5us": "round it to 2us",
    "5/s and more": "unknown option 'and'",
    "5/s, 10/min": "separate limits with ';'",
    "5/s,10/min": "separate limits with ';'",
    "5/s 10/min": "separate limits with ';'",
    "5/s & 10 per min": "separate limits with ';'",
    "5/s and fixed window 10/min": "separate limits with ';'",
    "5/s\0": "expected an option and its value",
    None: "write it like",
    5: "give a number and per=",
    5.5: "give a number and per=",
    b"5/s": "write it like",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("text", "advice"), MALFORMED.items(), ids=map(repr, MALFORMED))
def test_a_malformed_rate_shows_itself_and_what_to_write(kind, text, advice):
    """Every malformed rate is an InvalidLimit with the text and the right form."""
    with pytest.raises(InvalidLimit) as caught:
        kind(text)
    assert repr(text) in str(caught.value)
    assert advice in str(caught.value)


#: A whole limit that can't be made -> words that must be in the message.
WRONG = {
    "5/s burst 10 burst 20": (TokenBucket, "duplicate option 'burst'; give it once"),
    "5/s initial 1 initial 1": (TokenBucket, "duplicate option 'initial'; give it once"),
    "5/s burst": (TokenBucket, "write it like"),
    "5/s burst 0": (TokenBucket, "burst must be at least 1"),
    "5/s burst=40": (TokenBucket, "write burst 40, with a space"),
    "5/s capacity: 40": (LeakyBucket, "write capacity 40, with a space"),
    "5/s burst ten": (TokenBucket, "burst must be a whole number"),
    "5/s burst -1": (TokenBucket, "expected an option and its value"),
    "5/s burst 1.5": (TokenBucket, "expected an option and its value"),
    "5/s burst 1000000001": (TokenBucket, "at most 1000000000"),
    "5/s burst 10 initial 11": (TokenBucket, "initial must be at most burst (10), got 11"),
    "5/s capacity 10": (TokenBucket, "has only burst and initial"),
    "5/s": (LeakyBucket, "5/s capacity 10"),
    "5/s capacity 0": (LeakyBucket, "capacity must be at least 1"),
    "5/s burst 10": (LeakyBucket, "has only capacity"),
    "5/s capacity 0 ": (LeakyBucketQueue, "capacity must be at least 1"),
    "10/s burst 5": (FixedWindow, "unknown option 'burst'"),
    "10/s align middle": (FixedWindow, "'clock' or 'first'"),
    "10/s burst 6": (SlidingWindowLog, "unknown option 'burst'"),
    "10/s burst 7": (SlidingWindowCounter, "unknown option 'burst'"),
}


@pytest.mark.parametrize(("text", "kind", "advice"), [(text, *rest) for text, rest in WRONG.items()], ids=WRONG)
def test_a_wrong_option_shows_the_text_and_what_to_write(text, kind, advice):
    """An option that is wrong, given twice or in the wrong place is an InvalidLimit that names the mistake."""
    with pytest.raises(InvalidLimit) as caught:
        kind(text)
    assert repr(text) in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.parametrize("text", ["{}/s", "5/{}s", "5/1.{}s", "5/s burst {}", "1_{}/s"])
def test_a_number_of_thousands_of_digits_is_an_invalid_limit(text):
    """Numbers too long for `int` are refused as all others beyond the domain are."""
    with pytest.raises(InvalidLimit):
        TokenBucket(text.format("1" * 5000))


def test_an_option_in_the_text_and_as_an_argument_is_said_twice():
    """`burst` in the text and as an argument is an error, even when both agree."""
    with pytest.raises(InvalidLimit, match="duplicate option 'burst'"):
        TokenBucket("5/s burst 10", burst=10)
    with pytest.raises(InvalidLimit, match="duplicate option 'capacity'"):
        LeakyBucket("5/s capacity 10", capacity=10)
    with pytest.raises(InvalidLimit, match="duplicate option 'align'"):
        FixedWindow("5/s align first", align="first")


@pytest.mark.parametrize(
    "per", [0, -1, -0.5, timedelta(0), timedelta(seconds=-1), float("nan"), float("inf"), "", "5", "monthly"], ids=repr
)
def test_a_period_that_is_none_is_refused(per):
    """`per=` must be a positive, finite length of time with a fixed length."""
    with pytest.raises(InvalidLimit, match=re.escape(repr(per))):
        TokenBucket(5, per=per)


@pytest.mark.parametrize("count", [0, -5, 5.0, True, None, 10**9 + 1, 10**30], ids=repr)
def test_a_count_that_is_none_is_refused(count):
    """With `per=` the count must be a whole number from 1 to 10^9."""
    with pytest.raises(InvalidLimit, match=re.escape(str(count))):
        TokenBucket(count, per=1)


@pytest.mark.parametrize("burst", [0, -1, 1.5, True, "10", 10**9 + 1], ids=repr)
def test_a_burst_that_is_none_is_refused(burst):
    """`burst=` must be a whole number from 1 to 10^9."""
    with pytest.raises(InvalidLimit, match=re.escape(str(burst))):
        TokenBucket("5/s", burst=burst)


def test_a_period_said_twice_is_refused():
    """A text already has its period; `per=` beside it is an error."""
    with pytest.raises(InvalidLimit, match="duplicate period"):
        TokenBucket("5/s", per=1)


@pytest.mark.parametrize("text", ["bucket 7/s", "window 7/s", "token 7/s", "tokenbucket 7/s", "7/s; ", "; 7/s", "fixed window"])
def test_a_text_that_names_no_rule_lists_the_rules(text):
    """A limiter's text that can't be read is an InvalidLimit that shows the text and lists the valid forms."""
    with pytest.raises(InvalidLimit, match=r"did you mean|expected one of: |expected a rate after|empty limit") as caught:
        Limiter(text)
    assert repr(text.removesuffix(" 7/s")) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sliding window 20/s", "did you mean 'sliding window counter' or 'sliding window log'?"),
        ("token 5/s", "did you mean 'token bucket'?"),
        ("-1/s", "'-1/s': the count must be at least 1, got -1"),
        ("fixed window -1/s", "'-1/s': the count must be at least 1, got -1"),
        ("1.5/s burst 3", "'1.5/s burst 3': the count must be a whole number, got 1.5; write 3 per 2s burst 3"),
    ],
)
def test_a_limiters_text_names_the_remedy(text, message):
    """The beginning of an algorithm's name lists every algorithm that it may mean; a wrong count is named."""
    with pytest.raises(InvalidLimit, match=re.escape(message)):
        Limiter(text)


@pytest.mark.parametrize("duration", [-1, -0.001, "-1s", float("nan"), float("inf"), "soon", "", True, b"1s", [1]], ids=repr)
def test_a_duration_that_is_none_is_refused(duration, store):
    """A timeout must be a finite length of time, not below zero."""
    with pytest.raises(InvalidLimit):
        Limiter("5/s", store=store).acquire("a", timeout=duration)


def test_a_duration_without_a_unit_gets_the_remedy():
    """A text of digits may mean seconds or milliseconds: the message shows how to write both."""
    with pytest.raises(InvalidLimit, match="'800' has no unit; write '800s' or '800ms'"):
        duration_us("800")


def test_an_invalid_limit_is_a_value_error():
    """InvalidLimit is a LimitkeeperError and a ValueError."""
    assert issubclass(InvalidLimit, LimitkeeperError)
    assert issubclass(InvalidLimit, ValueError)


def test_the_base_of_limits_is_no_limit():
    """`Limit` itself can't be made; its error names the limits that can."""
    with pytest.raises(TypeError, match="TokenBucket"):
        Limit()
