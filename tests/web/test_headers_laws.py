"""Laws about the fields of any response: they parse, promise no more than the limit, and a retry at the stated time is allowed.
Laws about the fields of any response: they parse, promise no more than the limit, and a retry at the stated time is allowed."""

from __future__ import annotations

from fractions import Fraction

import http_sf
import pytest
from evaluations import RequestSequence, lines
from hypothesis import given, settings
from hypothesis import strategies as st

from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.algorithms.limit import Limit
from limitkeeper.policy.model import Headers
from limitkeeper.web.headers import fields

RATES = ("5/s", "3/s", "54/min", "7 per 3 hours", "1/2d", "10007 per 30 days", "1000/ms", "100 per 1500ms", "1/400d", "999983/s")
KINDS = (TokenBucket, LeakyBucket, LeakyBucketQueue, FixedWindow, SlidingWindowLog, SlidingWindowCounter)
BUCKETS = (TokenBucket, LeakyBucket)


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    kind, rate = draw(st.sampled_from(KINDS)), draw(st.sampled_from(RATES))
    if kind is FixedWindow:
        return FixedWindow(rate, align=draw(st.sampled_from(["clock", "first"])))
    if kind in BUCKETS:
        return kind(rate, draw(st.sampled_from([1, 2, 7, 10, 997])))
    if kind is LeakyBucketQueue:
        return LeakyBucketQueue(rate, draw(st.sampled_from([None, 1, 10])))
    return kind(rate)


#: Requests of some cost, and pauses: in microseconds, or in parts of the period.
steps = st.lists(
    st.tuples(st.integers(0, 12), st.one_of(st.just(0), st.integers(0, 3_000_000), st.fractions(0, 1, max_denominator=7))),
    min_size=1,
    max_size=25,
)


def pause(sequence: RequestSequence, limit: Limit, step: int | Fraction) -> None:
    us = step if isinstance(step, int) else int(step * limit.period)
    sequence.clock.advance(us / 1e6)


def members(found: dict[str, str], name: str) -> list[tuple[str, dict[str, int]]]:
    return http_sf.parse(found[name].encode(), tltype="list")


@settings(deadline=None)
@given(st.lists(limits(), min_size=1, max_size=4), steps)
def test_fields_parse_and_promise_no_more_than_there_is(chosen, played):
    """RFC 9651 reads both fields: names in order and once each, 0 ≤ r ≤ q, 1 ≤ w, 0 ≤ t, q/w within the rate."""
    sequence = RequestSequence(*chosen)
    for cost, rest in played:
        found = lines(fields(sequence.ask(cost)))
        policies, received = members(found, "ratelimit-policy"), members(found, "ratelimit")
        assert [name for name, _ in policies] == [name for name, _ in received] == [entry.label for entry in sequence.entries]
        for limit, (_, said), (_, now) in zip(chosen, policies, received, strict=True):
            assert set(said) == {"q", "w"}
            assert {"r"} <= set(now) <= {"r", "t"}
            assert 0 <= now["r"] <= said["q"]
            assert said["w"] >= 1
            assert now.get("t", 0) >= 0
            assert Fraction(said["q"], said["w"]) <= Fraction(limit.count * 1_000_000, limit.period)
        pause(sequence, chosen[0], rest)


@settings(deadline=None)
@given(limits().filter(lambda limit: isinstance(limit, BUCKETS)), steps)
def test_a_bucket_never_promises_more_than_its_rate(limit, played):
    """r within t is at most the rate; with nothing left, a unit is available after t."""
    sequence = RequestSequence(limit)
    for cost, rest in played:
        ((_, now),) = members(lines(fields(sequence.ask(cost))), "ratelimit")
        if now["r"] and "t" in now:
            assert Fraction(now["r"], now["t"]) <= Fraction(limit.count * 1_000_000, limit.period)
        pause(sequence, limit, rest)
    if now["r"] == 0:
        sequence.clock.advance(now["t"] if rest == 0 else 0)
        assert rest != 0 or sequence.ask().allowed


@settings(deadline=None)
@given(st.lists(limits(), min_size=1, max_size=3), steps)
def test_a_retry_at_the_stated_time_is_allowed(chosen, played):
    """Retry-After is no earlier than the t of any refusing limit; after exactly so long the same request passes."""
    sequence = RequestSequence(*chosen)
    for cost, rest in played:
        evaluation = sequence.ask(cost)
        if not evaluation.allowed:
            found = lines(fields(evaluation))
            if "retry-after" not in found:
                assert any(cost > limit.capacity for limit in chosen)
                continue
            wait = int(found["retry-after"])
            assert wait >= 1
            for part, (_, now) in zip(evaluation.decision.decisions, members(found, "ratelimit"), strict=True):
                assert part.allowed or now.get("t", 0) <= wait
            sequence.clock.advance(wait)
            assert sequence.ask(cost).allowed
        pause(sequence, chosen[0], rest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", RATES)
def test_a_lone_client_that_obeys_is_always_served(kind, rate):
    """For every rule and awkward rate: use it up, wait exactly Retry-After, and be served."""
    limit = kind(rate, 3) if kind in (*BUCKETS, LeakyBucketQueue) else kind(rate)
    sequence = RequestSequence(limit, start=1_768_046_400.123457)
    units = max(1, limit.capacity // 5)
    for _ in range(3):
        evaluation = sequence.ask(units)
        while evaluation.allowed:
            evaluation = sequence.ask(units)
        sequence.clock.advance(int(lines(fields(evaluation))["retry-after"]))
        assert sequence.ask(units).allowed


@settings(deadline=None)
@given(st.lists(limits(), min_size=1, max_size=3), steps, st.sampled_from(["draft-6", "draft-7"]))
def test_older_generations_parse_too(chosen, played, wire):
    """Draft 7 is a dictionary of three integers, draft 6 three integers, of which the remaining is at most the limit."""
    sequence = RequestSequence(*chosen, headers=Headers(wire=wire))
    for cost, rest in played:
        found = lines(fields(sequence.ask(cost)))
        assert [set(said) for _, said in members(found, "ratelimit-policy")] == [{"w"}] * len(chosen)
        if wire == "draft-7":
            received = {
                name: value for name, (value, _) in http_sf.parse(found["ratelimit"].encode(), tltype="dictionary").items()
            }
        else:
            received = {name: int(found[f"ratelimit-{name}"]) for name in ("limit", "remaining", "reset")}
        assert list(received) == ["limit", "remaining", "reset"]
        assert 0 <= received["remaining"] <= received["limit"]
        pause(sequence, chosen[0], rest)


def test_absurd_limits_stay_within_the_integers_of_a_field():
    """A bucket that fills within a hundred thousand years has times that a field can hold."""
    limit = TokenBucket("1/400d", 100_000)
    found = lines(fields(RequestSequence(limit).ask()))
    ((_, said),), ((_, now),) = members(found, "ratelimit-policy"), members(found, "ratelimit")
    assert (said["q"], said["w"]) == (100_000, 3_456_000_000_000)
    assert (now["r"], now["t"]) == (99_999, 3_455_965_440_000)
