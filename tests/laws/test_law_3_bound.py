"""Law 3: what started in any interval, less what was given back in it, is within the rule's stated worst case."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pure_traces import Decide, GiveBack, Played, with_traces

from effort import effort
from limitkeeper import FixedWindow, Limit, Limiter, MemoryStore, SlidingWindowLog
from limitkeeper.testing import ManualClock
from limitkeeper.testing.admission_bounds import check_bound
from limitkeeper.testing.strategies import LIMITS, Cancel, Hit, Reserve, Wait, limits

every_rule = pytest.mark.parametrize("rule", list(LIMITS), ids=lambda rule: rule.kind)


def check(limit: Limit, trace: list[Any]) -> None:
    """Plays the trace, then takes everything available, unit by unit and in the largest pieces; a store may have dropped states
    that report themselves as new."""
    for cost, swept in ((1, False), (1, True), (limit.capacity, True)):
        played = Played(limit, trace, swept)
        played.saturate(cost)
        check_bound(limit, played.admitted, played.returned)


@every_rule
def test_hits_and_reservations_stay_within_the_bound(rule: type[Limit]) -> None:
    """Nothing given back: exact, in fractions."""

    @effort(150)
    @given(with_traces(rule, late=False, gives=False, max_size=30))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        check(*drawn)

    law()


@every_rule
def test_common_starts_stay_within_the_bound(rule: type[Limit]) -> None:
    """Charges with a later, common start count at that start."""

    @effort(150)
    @given(with_traces(rule, gives=False, max_size=24))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        check(*drawn)

    law()


@every_rule
def test_giving_back_stays_within_the_bound(rule: type[Limit]) -> None:
    """Cancelled, settled and refunded: no caller gets what another was charged for."""

    @effort(200)
    @given(with_traces(rule, late=False, max_size=24))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        check(*drawn)

    law()


@every_rule
def test_giving_back_common_starts_stays_within_the_bound(rule: type[Limit]) -> None:
    """Cancelled, settled and refunded, with charges that have a later, common start."""

    @effort(200)
    @given(with_traces(rule, max_size=24))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        check(*drawn)

    law()


@effort(100)
@given(
    st.lists(limits(), min_size=2, max_size=3, unique_by=str),
    st.lists(
        st.builds(Reserve, st.just("a"), st.integers(1, 2), st.none())
        | st.builds(Hit, st.just("a"), st.integers(1, 2))
        | st.builds(Cancel, st.integers(0, 3))
        | st.builds(Wait, st.sampled_from((1, 100_000, 1_000_000, 60_000_000))),
        max_size=16,
    ),
)
def test_several_limits_stay_within_the_bound_of_each(some: list[Limit], trace: list[Any]) -> None:
    """Reserved together and cancelled in any order: each of the limits keeps its own bound."""
    clock = ManualClock(1_700_000_123.456789)
    store = MemoryStore(clock=clock)
    limiter = Limiter({str(limit): limit for limit in some}, store=store)
    taken: list[Any] = []
    returned: list[tuple[int, int]] = []
    for step in trace:
        if isinstance(step, Wait):
            clock.advance(step.us / 1e6)
        elif isinstance(step, Cancel):
            if step.back < len(taken):
                one, cost = taken[-1 - step.back]
                begun = one.decision.start_us <= store.now_us()
                if one.cancel():
                    returned += [(store.now_us(), cost)] if begun else []
                    if not begun:
                        taken.remove((one, cost))
        elif one := limiter.reserve("a", step.cost, getattr(step, "max_wait_us", 0)):
            taken.append((one, step.cost))
    for limit in some:
        starts = [(one.decision.start_us // limit.tick, cost) for one, cost in taken]
        check_bound(limit, starts, [(moment // limit.tick, cost) for moment, cost in returned])


def test_debt_is_repaid_before_anything_else_is_admitted() -> None:
    """Settled far above the estimate, again and again: the key is closed for its time, and never the other way round."""
    for rule in LIMITS:
        limit = next(limit for limit in LIMITS[rule] if limit.count == 5)
        clock = ManualClock(1_700_000_123.456789)
        limiter = Limiter(limit, store=MemoryStore(clock=clock))
        for _ in range(4):
            reservation = limiter.reserve("a", 1)
            if not reservation:
                break
            assert reservation.settle(10**30)
            refused = limiter.hit("a")
            assert not refused
            assert refused.remaining == 0
            assert refused.retry_after > 0.0


def test_the_window_log_holds_every_window() -> None:
    """12:00:05 admits again at 12:01:05, not before: half-open windows, to the microsecond."""
    clock = ManualClock(5.0)
    limiter = Limiter(SlidingWindowLog("1/min"), store=MemoryStore(clock=clock))
    assert limiter.hit("a")
    clock.advance(59.999999)
    assert not limiter.hit("a")
    clock.advance(0.000001)
    assert limiter.hit("a")


def test_a_window_is_not_forgotten_while_reservations_ahead_are_cancelled() -> None:
    """Full, reserved twice ahead, both cancelled: the running window is as full as it was."""
    for align in ("clock", "first"):
        clock = ManualClock(1_700_000_123.456789)
        limiter = Limiter(FixedWindow("1/s", align=align), store=MemoryStore(clock=clock))
        assert limiter.hit("a")
        ahead = [limiter.reserve("a"), limiter.reserve("a"), limiter.reserve("a")]
        for reservation in reversed(ahead):
            reservation.cancel()
        assert not limiter.hit("a")


@pytest.mark.parametrize("align", ["clock", "first"])
def test_a_window_is_not_forgotten_while_two_processes_cancel(align: Any) -> None:
    """Reserved in the next two windows by two processes, which cancel in order: the running window counts on, and is kept."""
    limit = FixedWindow("10/h", align=align)
    played = Played(limit, [Decide(8, 0), Decide(5, 10**12), Decide(7, 10**12), GiveBack(1), GiveBack(0)], swept=True)
    assert played.rule.look(played.now)[1] > played.now
    played.saturate(1, 20)
    check_bound(limit, played.admitted, played.returned)
