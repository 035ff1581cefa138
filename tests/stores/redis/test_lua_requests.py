"""Whole requests against MemoryStore: the same traces, at the same artificial times, and every answer and every state the same.
Whole requests against MemoryStore: the same traces, at the same artificial times, and every answer and every state the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lua_store import LuaStore, MovingStore

from effort import effort
from limitkeeper import FixedWindow, Limit, Limiter, MemoryStore, TokenBucket
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.stores.contract import bounded_wait_us
from limitkeeper.stores.redis import script_request
from limitkeeper.testing import ManualClock
from limitkeeper.testing.limiter_trace_player import TracePlayer
from limitkeeper.testing.strategies import LIMITS, limits, traces
from servers.valkey import Valkey
from stand_ins import NOON, WrappedStore

#: A soak tries more.
few = st.lists(limits(), min_size=1, max_size=3, unique_by=str)
several = st.lists(limits(), min_size=2, max_size=4, unique_by=str)


@pytest.fixture
def client(valkey: Valkey) -> Iterator[Any]:
    with valkey.client() as client:
        client.flushall()
        yield client


class Both:
    """One trace on two stores, each on a clock of its own that shows the same."""

    def __init__(self, client: Any, some: list[Limit], moving: bool = False) -> None:
        client.flushall()
        self.lua_clock, self.clock = ManualClock(NOON), ManualClock(NOON)
        named = {f"limit {number}": limit for number, limit in enumerate(some)}
        memory = MemoryStore(clock=self.clock)
        self.lua = Limiter(named, store=(MovingStore if moving else LuaStore)(client, self.lua_clock), name="twins")
        self.memory = Limiter(named, store=memory if moving else WrappedStore(memory), name="twins")
        for one in self.memory.named:
            memory.register(one)

    def play(self, trace: list[Any]) -> None:
        lua, memory = TracePlayer(self.lua, self.lua_clock), TracePlayer(self.memory, self.clock)
        for step in trace:
            result, expected = lua.step(step), memory.step(step)
            assert result == expected, step
        for named in self.lua.named:
            states = dict(self.memory.store.items(named))
            for key, state in self.lua.store.items(named):
                assert self.that_counts(named.limit, state) == self.that_counts(named.limit, states.pop(key, state))
            assert not states, "a key that is not as new was forgotten"

    def that_counts(self, limit: Limit, state: Any) -> Any:
        """A state without obsolete parts: the count of the window before one that has begun. Memory may have forgotten it
        together with a key that was as new, where Redis still holds it for a second."""
        over = isinstance(limit, FixedWindow) and state[0] <= self.lua.store.last_us
        return state[:2] if over else state


@pytest.mark.parametrize("algorithm", LIMITS, ids=lambda algorithm: algorithm.__name__)
def test_one_limit_answers_as_in_memory(client: Any, algorithm: type[Limit]) -> None:
    """Hits, peeks, waits, reservations, refunds, settlements: Lua answers as MemoryStore, and holds the same states."""

    @effort(40)
    @given(limits(algorithm).flatmap(lambda limit: st.tuples(st.just(limit), traces([limit], several_keys=True, backwards=True))))
    def check(drawn: tuple[Limit, list[Any]]) -> None:
        Both(client, [drawn[0]]).play(drawn[1])

    check()


def test_several_limits_answer_as_in_memory(client: Any) -> None:
    """Several limits of any kinds decide together as in memory, each with its own key and cost."""

    @effort(100)
    @given(several.flatmap(lambda some: st.tuples(st.just(some), traces(some, several_keys=True, backwards=True))))
    def check(drawn: tuple[list[Limit], list[Any]]) -> None:
        Both(client, drawn[0]).play(drawn[1])

    check()


def test_a_line_moves_up_as_in_memory(client: Any) -> None:
    """When a waiter leaves a queue, those behind it are booked again in one call: to the same starts as in memory."""

    @effort(100)
    @given(few.flatmap(lambda some: st.tuples(st.just(some), traces(some, several_keys=len(some) > 1))))
    def check(drawn: tuple[list[Limit], list[Any]]) -> None:
        Both(client, drawn[0], moving=True).play(drawn[1])

    check()


@effort(40)
@given(
    st.lists(limits(), min_size=1, max_size=5, unique_by=str),
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.integers(0, 3), st.sampled_from((0, 10**6, None))), max_size=30
    ),
)
def test_many_requests_in_one_call_are_as_many_calls(valkey: Valkey, some: list[Limit], drawn: list[Any]) -> None:
    """Requests of every kind in one batch are answered as if each had been sent alone."""
    with valkey.client() as client:
        client.flushall()
        stores = [LuaStore(client, ManualClock(NOON), prefix=prefix) for prefix in ("together", "alone")]
        named = [NamedLimit("many", str(limit), limit) for limit in some]
        for store in stores:
            for one in named:
                store.register(one)
        made = [[request_of(store, named, *each) for each in drawn] for store in stores]
        together = stores[0].send(*made[0]) if drawn else []
        assert together == [stores[1].send(request)[0] for request in made[1]]


def request_of(
    store: LuaStore, named: list[NamedLimit], which: int, key: str, cost: int, patience: int | None
) -> script_request.AnyRequest:
    limit = named[which % len(named)]
    if which == 4 and limit.limit.refunds:
        return script_request.GiveBackRequest(store.names, [Claim(limit, key, cost)], -1, store.moment())
    claims = [Claim(limit, key, cost)] if which < 3 else [Claim(one, key, cost) for one in named]
    options = script_request.DecideOptions(bounded_wait_us(patience), which != 2, store.moment())
    return script_request.encode_decide(store.names, claims, options)


@pytest.mark.parametrize("count", [1, 5])
def test_a_decision_is_one_round_trip(client: Any, count: int) -> None:
    """Whatever the number of limits, a decision is one call of one script."""
    store = LuaStore(client)
    limiter = Limiter({f"limit {n}": TokenBucket(f"{n + 1}/s burst 10") for n in range(count)}, store=store)
    limiter.hit("warm")
    store.round_trips = 0
    before = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
    limiter.hit("user:42")
    assert store.round_trips == 1
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 1


def test_none_starts_before_it_may(client: Any) -> None:
    """With `not_before_us` a claim is charged at that start, as the second pass over several limits does it."""
    clock = ManualClock(NOON)
    store = LuaStore(client, clock)
    named = NamedLimit("late", "late", TokenBucket("1/s burst 2"))
    claim, now_us = Claim(named, "a", 2), clock.now_us()
    options = script_request.DecideOptions(10**15, now_us=now_us, not_before_us=now_us + 5_000_000)
    decision = store.send(script_request.encode_decide(store.names, [claim], options))[0]
    expected = named.limit.decide((0, 0, 0), now_us, 2, 10**15, now_us + 5_000_000)
    assert (decision.wait, decision.start_us) == (5.0, expected[3])
    assert dict(store.items(named)) == {"a": expected[:3]}
    assert claim.remembered() == ((0, 0, 0), expected[:3], None)


def test_what_was_charged_last_is_undone_exactly(client: Any) -> None:
    """A charge that may wait and has none behind it goes back to exactly the earlier state."""
    clock = ManualClock(NOON)
    store = LuaStore(client, clock)
    named = NamedLimit("undo", "undo", TokenBucket("3/s burst 2"))
    for _ in range(2):
        store.decide([Claim(named, "a", 1)], None)
        clock.advance(0.1)
    before = dict(store.items(named))
    claim = Claim(named, "a", 2)
    decision = store.decide([claim], None)
    clock.advance(0.1)
    assert decision.wait > 0
    store.give_back([claim], decision.start_us)
    assert dict(store.items(named)) == before


def test_a_decision_may_have_hundreds_of_limits(client: Any) -> None:
    """300 limits are decided together, all or none, and the last one is charged as the first."""
    store = LuaStore(client, ManualClock(NOON))
    some = [NamedLimit("wide", f"limit {n}", TokenBucket("1/h burst 2")) for n in range(300)]
    assert store.decide([Claim(one, "a", 1) for one in some], 10).remaining == 1
    assert not store.decide([Claim(one, "a", 1 if n < 299 else 2) for n, one in enumerate(some)])
    assert store.decide([Claim(one, "a", 1) for one in some]).remaining == 0
