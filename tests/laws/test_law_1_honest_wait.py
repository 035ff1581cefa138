"""Law 1: refused with a promise, the same call is accepted at that moment and refused a tick before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pure_traces import Played, with_traces

from effort import effort
from limitkeeper import Limit, Limiter, MemoryStore, TokenBucket
from limitkeeper.testing import ManualClock
from limitkeeper.testing.strategies import LIMITS, costs, moments

every_rule = pytest.mark.parametrize("rule", list(LIMITS), ids=lambda rule: rule.kind)


@every_rule
def test_a_rule_keeps_its_promise_from_any_state(rule: type[Limit]) -> None:
    """After any charges, reservations, cancels and settlements, with any maximum wait."""

    @effort(200)
    @given(with_traces(rule), st.data())
    def law(drawn: tuple[Limit, list[Any]], data: Any) -> None:
        limit, trace = drawn
        played = Played(limit, trace)
        cost = data.draw(costs([limit]).filter(lambda cost: 0 < cost < 10**12), label="cost")
        patience = data.draw(st.just(0) | moments([limit]), label="max_wait") // limit.tick if limit.reserves else 0
        state, now = tuple(played.rule.state), played.now
        *_, start, promise, _, _ = limit.decide(state, now, cost, patience)
        if start == -2:
            assert cost > limit.capacity
        elif start == -1:
            assert cost <= limit.capacity
            assert promise > now
            assert limit.decide(state, promise - 1, cost, patience)[3] == -1, "accepted a tick too early"
            assert limit.decide(state, promise, cost, patience)[3] >= 0, "refused at the promised moment"

    law()


@every_rule
def test_an_acquisition_keeps_its_promise(rule: type[Limit]) -> None:
    """`acquire` with a deadline is refused with the moment at which it would have been accepted."""

    @effort(40)
    @given(st.sampled_from(LIMITS[rule]), st.data())
    def law(limit: Limit, data: Any) -> None:
        timeout = data.draw(moments([limit]), label="timeout in µs")
        clock = ManualClock(1_700_000_123.456789)
        limiter = Limiter(limit, store=MemoryStore(clock=clock))
        for _ in range(data.draw(st.integers(1, 4), label="taken")):
            limiter.reserve("a", max(1, limit.capacity // 2))
        refused = limiter.reserve("a", 1, timeout / 1e6).decision
        if refused or refused.retry_us > 2**50:  # after 35 years, seconds in a float are no longer exact microseconds
            return
        clock.advance(refused.retry_after)
        assert limiter.acquire("a", 1, timeout / 1e6)

    law()


def test_an_empty_bucket_fills_from_the_birth_of_its_limiter() -> None:
    """`initial=0`, then waiting `retry_after`: admitted; a key first used later holds its accrual since the birth."""
    for others in ({}, {"other": TokenBucket("100/s")}):
        clock = ManualClock(1_700_000_123.456789)
        limiter = Limiter({"slow": TokenBucket("2/s", burst=10, initial=0), **others}, store=MemoryStore(clock=clock))
        clock.advance(3.0)
        assert limiter.peek("a").decisions[0].remaining == 6
        refused = limiter.hit("a", 8)
        assert refused.retry_after == 1.0
        clock.advance(1.0)
        assert limiter.hit("a", 8)


def test_a_start_beyond_what_a_bucket_can_count_ahead_has_an_exact_retry() -> None:
    """In ticks of more than 1 µs: a settlement far above the estimate leaves the largest debt that 53 bits can count."""
    limit, clock = TokenBucket("12345678/365d burst 1000000"), ManualClock(1_700_000_123.456789)
    assert limit.tick > 1
    limiter = Limiter(limit, store=MemoryStore(clock=clock))
    limiter.reserve("a").settle(10**8)
    refused = limiter.reserve("a", max_wait=100).decision
    assert refused.retry_after + 100 > limit.horizon * limit.tick / 1e6
    clock.advance(refused.retry_after - 0.001)
    assert not limiter.reserve("a", max_wait=100)
    clock.advance(0.001)
    assert limiter.reserve("a", max_wait=100)
