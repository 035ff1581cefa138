"""Law 9: memory is bounded, and eviction never resets an exhausted key."""

from __future__ import annotations

import itertools
import os
import tempfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep import lockstep

from effort import effort
from limitkeeper import Limit, Limiter, MemoryStore, SharedStore, TokenBucket
from limitkeeper.stores.contract import Store
from limitkeeper.testing import ManualClock
from limitkeeper.testing.store_contract import FIFTY
from limitkeeper.testing.strategies import LIMITS, limits, traces

every_kind = pytest.mark.parametrize("kind", list(FIFTY))


@pytest.mark.parametrize("rule", list(LIMITS), ids=lambda rule: rule.kind)
def test_forgetting_idle_keys_changes_no_answer(rule: type[Limit]) -> None:
    """Swept between any two steps, a limiter still answers as the model, which never forgets."""

    @effort(40)
    @given(limits(rule).flatmap(lambda limit: st.tuples(st.just(limit), traces([limit], several_keys=True, gives=False))))
    def law(drawn: tuple[Limit, list[Any]]) -> None:
        limit, trace = drawn
        lockstep({"limit": limit}, trace, sweeping=True)

    law()


class Flooded:
    """A bounded and an unbounded store that get the same calls, on one clock. `known` keys had cells of their own from the start;
    they are compared as long as they are not as new, since after that a full store may let them share a cell."""

    def __init__(self, store: Store, clock: ManualClock, limits: list[Limit]) -> None:
        self.store, self.clock = store, clock
        self.free = MemoryStore(clock=clock)
        rules = {f"limit {number}": limit for number, limit in enumerate(limits)}
        self.limiters = [Limiter({name: limit}, store=store, name="n") for name, limit in rules.items()]
        self.twins = [Limiter({name: limit}, store=self.free, name="n") for name, limit in rules.items()]
        if len(rules) > 1:  # and a limiter that decides all of them at once
            self.limiters.append(Limiter(rules, store=store, name="n"))
            self.twins.append(Limiter(rules, store=self.free, name="n"))
        self.known: set[tuple[int, str]] = set()
        self.fresh = itertools.count()

    def start(self, most: int) -> None:
        """Exhausts some keys of every limit."""
        for number, limiter in enumerate(self.limiters):
            for key in (f"known {n}" for n in range(most)):
                for cost in {limit.initial for limit in limiter.limits.values() if len(limiter.limits) == 1 and limit.initial}:
                    if self.twins[number].hit(key, cost):
                        assert limiter.hit(key, cost)
                        self.known.add((number, key))

    def wait(self, us: int) -> None:
        self.clock.advance(us / 1e6)

    def flood(self, which: int, count: int) -> None:
        """So many fresh keys. Once each kept cell must have been checked, none is left that is as new."""
        which %= len(self.limiters)
        overflow, before, inserted = self.store.overflow, len(self.store), 0
        for number in itertools.islice(self.fresh, count):
            key = f"fresh {number}"
            inserted += bool(self.limiters[which].hit(key))
            self.twins[which].hit(key)
        self.free.sweep()
        others = len(self.limiters) + 1 + overflow  # ends of tables, and overflow cells, which are swept as well
        if self.store.overflow == overflow and 4 * inserted >= before + inserted + others:
            assert len(self.store) <= len(self.free)

    def check(self, max_keys: int) -> None:
        assert len(self.store) <= max_keys
        for number, key in list(self.known):
            expected = self.twins[number].peek(key)
            if expected.reset_after == 0:
                self.known.remove((number, key))
            else:
                assert self.limiters[number].peek(key) == expected

    def hit_known(self, which: int) -> None:
        for number, key in sorted(self.known)[which % 3 :: 3]:
            assert self.limiters[number].hit(key) == self.twins[number].hit(key)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("flood"), st.integers(0, 3), st.integers(1, 60)),
        st.tuples(st.just("wait"), st.sampled_from([1, 999, 10**6, 60 * 10**6, 3600 * 10**6, 86_400 * 10**6])),
        st.tuples(st.just("hit_known"), st.integers(0, 2)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("kind", ["memory", "shared"])
@pytest.mark.parametrize("rule", list(LIMITS), ids=lambda rule: rule.kind)
def test_floods_reset_no_key_and_leave_nothing_that_is_as_new(rule: type[Limit], kind: str) -> None:
    """Random floods at random times over one to three limits: no more than max_keys keys, known keys are decided as in a store
    without bounds, and what is as new goes at least as fast as new keys come."""

    @effort(25)
    @given(limits(rule), st.lists(st.sampled_from(list(FIFTY.values())), max_size=2, unique=True), st.integers(6, 60), steps)
    def law(limit: Limit, others: list[Limit], max_keys: int, trace: list[tuple[Any, ...]]) -> None:
        clock = ManualClock(1_700_000_123.456789)
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            store: Store = MemoryStore(max_keys, clock=clock)
            if kind == "shared":
                store = SharedStore(f"{folder}/limits", max_keys, log_entries=64, clock=clock)
            with store:
                flooded = Flooded(store, clock, [limit, *others])
                flooded.start(2)
                for name, *arguments in trace:
                    getattr(flooded, name)(*arguments)
                    flooded.check(max_keys)

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
    assert limiter.stats().overflow > 0


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
    """Exhausted on an overflow cell while the store was full, a key stays exhausted when the store has room again."""
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
    """Expired keys are gone: at once when swept, and otherwise a few with every call."""
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
