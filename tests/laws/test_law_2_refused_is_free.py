"""Law 2: a refused call leaves the state as it was. (Through stores: see `StoreContract`.)"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pure_traces import Played, with_traces

from effort import effort
from limitkeeper import Limit
from limitkeeper.testing.strategies import LIMITS, costs, moments


@pytest.mark.parametrize("rule", list(LIMITS), ids=lambda rule: rule.kind)
def test_a_refusing_rule_returns_the_state_that_it_was_given(rule: type[Limit]) -> None:
    """Number for number, for every cost and maximum wait."""

    @effort(100)
    @given(with_traces(rule), st.data())
    def law(drawn: tuple[Limit, list[Any]], data: Any) -> None:
        limit, trace = drawn
        played = Played(limit, trace)
        state = tuple(played.rule.state)
        cost = data.draw(costs([limit]).filter(lambda cost: cost < 10**12), label="cost")
        answer = limit.decide(state, played.now, cost, data.draw(moments([limit]), label="max_wait") // limit.tick)
        assert answer[3] >= 0 or tuple(answer[:3]) == state

    law()
