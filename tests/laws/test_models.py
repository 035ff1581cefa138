"""Every rule answers as its slow, exact model: pure function by pure function, and through the limiter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep import lockstep
from pure_traces import Compared, with_traces

from effort import effort
from limitkeeper import FixedWindow, Limit
from limitkeeper.testing.strategies import LIMITS, limits, traces

every_rule = pytest.mark.parametrize("rule", list(LIMITS), ids=lambda rule: rule.kind)


@every_rule
def test_decide_answers_as_the_model(rule: type[Limit]) -> None:
    """Hits, reservations and common starts: start, retry, remaining and reset are the model's, compared with ==."""

    @effort(150)
    @given(with_traces(rule, gives=False))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        Compared(*drawn)

    law()


@every_rule
def test_give_back_answers_as_the_model(rule: type[Limit]) -> None:
    """Cancels, settlements below and above, refunds: the rule's state is the model's, or between its two bounds."""

    @effort(150)
    @given(with_traces(rule, late=False))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        Compared(*drawn)

    law()


@pytest.mark.parametrize("rule", [rule for rule in LIMITS if rule is not FixedWindow], ids=lambda rule: rule.kind)
def test_give_back_answers_as_the_model_for_common_starts(rule: type[Limit]) -> None:
    """The same, with charges that have a later, common start. (A fixed window takes what it forgot for full: see law 3.)"""

    @effort(150)
    @given(with_traces(rule))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        Compared(*drawn)

    law()


@every_rule
def test_a_limiter_answers_as_the_model(rule: type[Limit]) -> None:
    """Every verb of a limiter, clocks that go back too: each answer, and each reservation's start, is the model's."""

    @effort(60)
    @given(limits(rule).flatmap(lambda limit: st.tuples(st.just(limit), traces([limit], several_keys=True, backwards=True))))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        limit, trace = drawn
        lockstep({"limit": limit}, trace)

    law()


@effort(250)
@given(
    st.lists(limits(), min_size=2, max_size=5, unique_by=str).flatmap(
        lambda some: st.tuples(st.just(some), traces(some, several_keys=True, backwards=True, gives=False))
    )
)
def test_several_limits_answer_as_the_model(drawn: tuple[list[Limit], list[Any]]) -> None:
    """Two to five limits of any kind, with keys and costs of their own, reserved at a common instant."""
    some, trace = drawn
    lockstep({f"limit {number}": limit for number, limit in enumerate(some)}, trace)
