"""Law 9: memory is bounded, and eviction never resets an exhausted key."""

from __future__ import annotations

from typing import Any

import pytest
from effort import effort
from hypothesis import given
from hypothesis import strategies as st
from lockstep import lockstep

from limitkeeper import Limit, Limiter, MemoryStore, TokenBucket
from limitkeeper.testing import ManualClock
from limitkeeper.testing.contract import FIFTY
from limitkeeper.testing.traces import LIMITS, limits, traces

every_kind = pytest.mark.parametrize("kind", list(FIFTY))


@pytest.mark.parametrize("rule", list(LIMITS), ids=lambda rule: rule.kind)
def test_forgetting_idle_keys_changes_no_answer(rule: type[Limit]) -> None:
    """Swept between any two steps, a limiter still says what the model says, which never forgets."""

    @effort(40)
    @given(limits(rule).flatmap(lambda limit: st.tuples(st.just(limit), traces([limit], several_keys=True, gives=False))))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        limit, trace = drawn
        lockstep({"limit": limit}, trace, sweeping=True)

    law()


@every_kind
def test_a_flood_of_fresh_keys_never_resets_an_exhausted_one(kind: str) -> None:
    """Ten thousand new keys hit a store for a hundred keys: it holds no more than that, and the exhausted key stays so."""
    store = MemoryStore(max_keys=100, clock=ManualClock(1_700_000_123.456789))
    limiter = Limiter(FIFTY[kind], store=store)
    assert limiter.hit("victim", 50)
    for number in range(10_000):
        limiter.hit(f"new key {number}")
        assert len(store) <= 100
    assert not limiter.hit("victim")
    assert limiter.stats().shared > 0


@every_kind
def test_strangers_are_neither_locked_out_nor_forgiven(kind: str) -> None:
    """In a full store most new keys are admitted, and none of them gets more than the limit however often it comes."""
    limiter = Limiter(FIFTY[kind], store=MemoryStore(max_keys=10, clock=ManualClock(1_700_000_123.456789)))
    for number in range(10):
        limiter.hit(f"known {number}", 50)
    new_keys = [f"new key {number}" for number in range(200)]
    first = [limiter.hit(key).allowed for key in new_keys]
    assert sum(first) > 150
    again = [sum(limiter.hit(key).allowed for _ in range(60)) for key in new_keys]
    assert all(admitted + began <= 50 for admitted, began in zip(again, first, strict=True))
    assert not any(limiter.hit(key).allowed for key in new_keys)
    assert not any(limiter.hit(f"known {number}").allowed for number in range(10))


@every_kind
def test_a_stranger_is_not_forgiven_when_room_comes_up(kind: str) -> None:
    """Exhausted on a shared cell while the store was full, a key stays exhausted when the store has room again."""
    clock = ManualClock(1_700_000_123.456789)
    store = MemoryStore(max_keys=1, clock=clock)
    limiter = Limiter(FIFTY[kind], store=store)
    limiter.hit("known")
    assert limiter.hit("new key", 50)
    limiter.reset("known")
    assert len(store) == 0
    assert not limiter.hit("new key")


@every_kind
def test_idle_keys_vanish(kind: str) -> None:
    """When their time is over all keys are gone: at once when swept, and otherwise a few with every call."""
    clock = ManualClock(1_700_000_123.456789)
    store = MemoryStore(clock=clock)
    limiter = Limiter(FIFTY[kind], store=store)
    for number in range(1000):
        limiter.hit(f"key {number}")
    store.sweep()
    assert len(store) == 1000
    clock.advance(3 * 3600.0)
    for _ in range(10_000):
        limiter.hit("busy")
    assert len(store) < 50
    store.sweep()
    assert len(store) == 1


def test_a_key_goes_at_the_moment_at_which_it_is_as_new() -> None:
    """A microsecond before its reset a key is kept, at its reset it is forgotten."""
    for kind, limit in FIFTY.items():
        clock = ManualClock(1_700_000_123.456789)
        store = MemoryStore(clock=clock)
        decision = Limiter(limit, store=store).hit("a")
        clock.advance(decision.reset_after - 1e-6)
        store.sweep()
        assert len(store) == 1, kind
        clock.advance(1e-6)
        store.sweep()
        assert len(store) == 0, kind


def test_a_rate_changed_to_and_fro_grants_nothing() -> None:
    """Two limiters of one name, one counting in microseconds and one in coarser ticks, take turns at one instant."""
    store = MemoryStore(clock=ManualClock(1_700_000_123.456789))
    fine, coarse = TokenBucket("1000000/s"), TokenBucket("1234567/d")
    assert fine.tick < coarse.tick
    quick, slow = (Limiter(limit, store=store, name="api") for limit in (fine, coarse))
    assert quick.hit("a", 1_000_000)
    for _ in range(50):
        assert slow.hit("a")
        assert not quick.hit("a")


@pytest.mark.parametrize("kind", ["fixed window", "sliding window log"])
def test_a_new_rate_keeps_what_was_used(kind: str) -> None:
    """A changed rate under an explicit name keeps its state: ten are used, of ten or of twenty."""
    store = MemoryStore(clock=ManualClock(1_700_000_123.456789))
    narrow, wide = (Limiter(f"{kind} {rate}", store=store, name="api") for rate in ("10/min", "20/min"))
    assert narrow.hit("a", 10)
    assert wide.peek("a").remaining == 10
    assert not narrow.hit("a")
    assert wide.hit("a", 10)
    assert narrow.peek("a").remaining == 0
    assert not wide.hit("a")
