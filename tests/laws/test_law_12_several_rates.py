"""Law 12: each rate in use on a key keeps its own state; all are charged for an admitted call, and the caller's rate decides."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limit,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.algorithms.all_of import charged_too, seeded
from limitkeeper.testing import ManualClock
from limitkeeper.testing.admission_bounds import between, intervals
from limitkeeper.testing.strategies import LIMITS, costs, limits, moments
from models.limiter_model import Ask
from models.rates import RatesWorld

BEGIN_US = 1_700_000_123_456_789
WITHOUT_LOG = [rule for rule in LIMITS if rule is not SlidingWindowLog]


class Call(NamedTuple):
    """Time passes, then a call under one of the rates."""

    after_us: int
    rate: int
    cost: int
    max_wait_us: int


@cache
def calls(some: tuple[Limit, ...]) -> st.SearchStrategy[list[Call]]:
    wait = st.just(0) | (moments(some) if some[0].reserves else st.just(0))
    cost = costs(some).filter(lambda cost: cost < 10**18)
    return st.lists(st.builds(Call, st.just(0) | moments(some), st.integers(0, len(some) - 1), cost, wait), max_size=16)


def rates_and_calls(rule: type[Limit], most: int) -> st.SearchStrategy[tuple[tuple[Limit, ...], list[Call]]]:
    some = st.lists(limits(rule), min_size=1, max_size=most, unique_by=str).map(tuple)
    return some.flatmap(with_calls)


def with_calls(some: tuple[Limit, ...]) -> st.SearchStrategy[tuple[tuple[Limit, ...], list[Call]]]:
    return st.tuples(st.just(some), calls(some))


class PureRates:
    """The rates of one key, played from the pure functions."""

    def __init__(self, birth_us: int) -> None:
        self.birth_us = birth_us
        self.states: dict[Limit, Any] = {}

    def decide(self, limit: Limit, now_us: int, cost: int, max_wait_us: int) -> tuple[bool, int, int]:
        now = now_us // limit.tick
        state = self.states.get(limit)
        if state is None and not self.states:
            state = limit.new(self.birth_us)
        elif state is None:
            held = max(other.used(state, now_us // other.tick) for other, state in self.states.items())
            state = seeded(limit, self.birth_us, now_us, held)
        max_wait = (now_us + max_wait_us) // limit.tick - now if cost else 0
        *after, start, _, left, _ = limit.decide(state, now, cost, max_wait)
        if start == -1 and self.states and cost:  # a refused call is a first use too
            self.states[limit] = state
        if start < 0 or not cost:
            return start >= 0 or not cost, 0, limit.decide(state, now, 0, 0)[5]
        start_us = start * limit.tick if start > now else now_us
        for other in self.states:
            self.states[other] = charged_too(other, *self.states[other], now_us, start_us, cost)
        self.states[limit] = tuple(after)
        return True, start_us - now_us, left


def check_pure_rates(some: tuple[Limit, ...], trace: list[Call]) -> None:
    now_us = BEGIN_US
    pure, world = PureRates(now_us), RatesWorld({"name": some[0]}, now_us)
    for call in trace:
        now_us += call.after_us
        world.use("name", some[call.rate])
        if not world.is_exact("name", "key", now_us):
            return
        expected, _ = world.decide([Ask("name", "key", call.cost)], now_us, call.max_wait_us)
        found = pure.decide(some[call.rate], now_us, call.cost, call.max_wait_us)
        assert found == (expected["allowed"], round(expected["wait"] * 1e6), expected["remaining"]), (call, expected)


@pytest.mark.parametrize("rule", WITHOUT_LOG, ids=lambda rule: rule.kind)
def test_the_pure_functions_answer_as_the_model(rule: type[Limit]) -> None:
    """`used`, `seeded` and `charged_too`: up to four rates in any order; each call is answered as the model answers it."""

    @effort(150)
    @given(rates_and_calls(rule, 4))
    def law(drawn: tuple[tuple[Limit, ...], list[Call]]) -> None:
        check_pure_rates(*drawn)

    law()


#: From one unit in a year to a million in a microsecond: the debt of one admits what the other would need for ages.
EXTREME = ["1000000000/ms", "999999999/ms", "1000000000/s", "1/ms", "7/3h", "1/365d", "1000000000/365d"]


@pytest.mark.parametrize("rule", WITHOUT_LOG, ids=lambda rule: rule.kind)
def test_the_most_different_rates_answer_as_the_model(rule: type[Limit]) -> None:
    """A slow rate is charged with what a fast one admits, up to the largest debt that 2^53 can count, and no further."""
    rates = [rule(text, capacity=int(text.split("/")[0])) if rule is LeakyBucket else rule(text) for text in EXTREME]  # type: ignore[call-arg]

    @effort(150)
    @given(st.lists(st.sampled_from(rates), min_size=2, max_size=4, unique_by=str).map(tuple).flatmap(with_calls))
    def law(drawn: tuple[tuple[Limit, ...], list[Call]]) -> None:
        check_pure_rates(*drawn)

    law()


# Named cases -------------------------------------------------------------------------------------------------------------

NOON_US = 1_700_049_600_000_000


@pytest.mark.parametrize(
    ("limit", "charges", "held"),
    [
        (TokenBucket("1/s burst 10"), [(0, 4, 0)], 4),
        (TokenBucket("1/s burst 10"), [(0, 10, 0), (0, 3, 10**9)], 13),
        (LeakyBucketQueue("1/s"), [(0, 1, 0), (0, 2, 10**9)], 3),
        (FixedWindow("5/min"), [(0, 4, 0), (0, 3, 10**9)], 7),
        (FixedWindow("5/min"), [(0, 5, 0), (0, 5, 10**9), (0, 5, 10**9), (0, 1, 10**9)], 16),
        (SlidingWindowCounter("10/min"), [(0, 3, 0)], 3),
    ],
    ids=str,
)
def test_used_counts_debt_and_reservations(limit: Limit, charges: list[tuple[int, int, int]], held: int) -> None:
    """All that a state holds, including starts still to come; nothing once it is as new."""
    now = NOON_US // limit.tick
    state = limit.new(NOON_US)
    for after, cost, max_wait in charges:
        state = limit.decide(state, now + after, cost, max_wait)[:3]
    assert limit.used(state, now) == held
    assert limit.used(state, limit.decide(state, now)[6] + 2 * limit.window) == 0


def test_used_is_rounded_up() -> None:
    """Half a token is a token; a weighted count goes up to the next unit."""
    bucket, counter = TokenBucket("1/s burst 10"), SlidingWindowCounter("10/min")
    state = bucket.decide(bucket.new(), NOON_US, 2)[:3]
    assert bucket.used(state, NOON_US + 500_000) == 2
    assert bucket.used(state, NOON_US + 1_000_000) == 1
    state = counter.decide(counter.new(), NOON_US, 3)[:3]
    assert counter.used(state, NOON_US + 60_000_000 + 1) == 3
    assert counter.used(state, NOON_US + 60_000_000 + 20_000_000) == 2


def test_a_log_holds_its_unexpired_entries() -> None:
    """Entries a window old are gone; those dated in the future count."""
    log = SlidingWindowLog("5/min")
    entries = ((NOON_US - 60_000_000, 2), (NOON_US - 1, 1), (NOON_US + 5, 4))
    assert log.used((entries, 0, 0), NOON_US) == 5
    assert log.used(((), 0, 0), NOON_US) == 0


def test_a_new_rate_starts_with_the_amount_clamped_to_its_size() -> None:
    """An exhausted 60/min leaves 4940 of 5000/h; an exhausted 5000/h leaves nothing of 60/min, but no debt."""
    large, small = FixedWindow("5000/h"), FixedWindow("60/min")
    assert large.decide(seeded(large, 0, NOON_US, 60), NOON_US, 0)[5] == 4940
    assert small.decide(seeded(small, 0, NOON_US, 5000), NOON_US, 0)[5] == 0
    bucket = TokenBucket("1/s burst 10")
    assert seeded(bucket, 0, NOON_US, 7) == (NOON_US, 7 * bucket.unit, 0)
    assert seeded(bucket, 0, NOON_US, 99) == (NOON_US, bucket.full, 0)


def test_what_fits_is_charged_at_the_same_start_and_what_does_not_is_debt() -> None:
    """Another rate is charged where the call starts; beyond its limit, it is charged now."""
    bucket = TokenBucket("1/s burst 2")
    empty = (NOON_US, bucket.full, 0)
    later = NOON_US + 5_000_000
    assert charged_too(bucket, *bucket.new(), NOON_US, later, 1) == tuple(
        bucket.decide(bucket.new(), NOON_US, 1, 10**9, later)[:3]
    )
    assert charged_too(bucket, *empty, NOON_US, NOON_US, 1) == (NOON_US, 3 * bucket.unit, 0)
    assert charged_too(bucket, *bucket.new(), NOON_US, NOON_US, 9) == (NOON_US, 9 * bucket.unit, 0)
    window = FixedWindow("5/min")
    assert charged_too(window, NOON_US, 5, 0, NOON_US, NOON_US, 3) == (NOON_US, 8, 0)


def test_a_charge_beyond_all_sizes_of_another_rate_is_given_back_to_it() -> None:
    """As far as that rate can count: 150 000 000 calls of a rate of one a day take longer than its integers."""
    queue = LeakyBucketQueue("1/d")
    state = charged_too(queue, *queue.new(), NOON_US, NOON_US, 150_000_000)
    back = queue.give_back(state, NOON_US, 150_000_000, NOON_US)
    assert queue.used(state, NOON_US) - queue.used(back, NOON_US) == queue.capacity


def test_a_charge_beyond_the_size_of_another_rate_holds_no_start_of_it() -> None:
    """It was charged there as debt: to give it back leaves what is held back for that rate's own later start, for as long."""
    bucket = TokenBucket("1/min burst 1")
    state = bucket.decide(bucket.new(), NOON_US, 1)[:3]
    state = bucket.decide(state, NOON_US, 1, 10**9)[:3]
    owing = charged_too(bucket, *state, NOON_US, NOON_US + 2000, 1000)
    assert bucket.give_back(owing, NOON_US, 1000, NOON_US + 2000)[2] == state[2]


# Waiting -----------------------------------------------------------------------------------------------------------------


def limiters_of(clock: ManualClock, *rates: Limit) -> list[Limiter]:
    store = MemoryStore(clock=clock)
    return [Limiter({"rate": rate}, store=store, name="name") for rate in rates]


def test_a_start_above_the_size_of_another_rate_may_be_paid_there_before_it_comes() -> None:
    """What the page prints: two calls of 10/s burst 2 in the moment in which 10 units of 1/s burst 10 start."""
    clock = ManualClock(NOON_US / 1e6)
    small, large = limiters_of(clock, TokenBucket("10/s burst 2"), TokenBucket("1/s burst 10"))
    small.hit("key")
    assert large.hit("key", 9)
    assert large.reserve("key", 10).wait == 10
    clock.advance(10)
    assert [bool(small.hit("key")) for _ in range(3)] == [True, True, False]


WAITING = [
    (TokenBucket("1/s burst 10"), TokenBucket("10/min burst 50"), TokenBucket("3/s burst 3")),
    (LeakyBucket("1/s capacity 10"), LeakyBucket("10/s capacity 2")),
]


@pytest.mark.parametrize("rates", WAITING, ids=lambda rates: rates[0].kind)
def test_with_starts_that_callers_wait_for_an_interval_admits_the_sum_of_the_bounds(rates: tuple[Limit, ...]) -> None:
    """Hits and reservations of any cost under any of the rates, counted at their starts."""
    step = st.tuples(st.integers(0, 20_000_000), st.integers(0, len(rates) - 1), st.integers(1, 12), st.integers(0, 60))

    @effort(60)
    @given(st.lists(step, min_size=5, max_size=60))
    def law(calls: list[tuple[int, int, int, int]]) -> None:
        clock = ManualClock(NOON_US / 1e6)
        limiters = limiters_of(clock, *rates)
        admitted: list[tuple[int, int]] = []
        for after_us, rate, cost, wait in calls:
            clock.advance(after_us / 1e6)
            decision = limiters[rate].reserve("key", cost, wait).decision
            admitted += [(decision.start_us, cost)] if decision else []
        admitted.sort()
        for first, last in intervals(admitted):
            most = sum(rate.capacity + (last - first) * rate.count // rate.period for rate in rates)
            assert between(admitted, first, last) <= most

    law()
