"""Law 1 with several rates under one name: a retry time holds from a rate's first call on a key on, admitted or refused."""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from laws.test_law_12_stores import BEGIN, NOON, STORES, MakeStore, Step, histories
from limitkeeper import FixedWindow, Limit, Limiter, MemoryStore, SharedStore, SlidingWindowLog, TokenBucket
from limitkeeper.stores import Store
from limitkeeper.testing import ManualClock
from limitkeeper.testing.strategies import LIMITS, limits

every_rule = pytest.mark.parametrize("rule", list(LIMITS), ids=lambda rule: rule.kind)
#: Wrappers that pass a decision on unchanged; LeasedStore documents how its retry times differ.
EXACT = ["memory", "shared", "sharded", "guarded"]


@st.composite
def pairs_and_histories(draw: Any, rule: type[Limit], most: int) -> Any:
    """Some rates of one name, as many of another (or none), and a history over both."""
    some = draw(st.lists(limits(rule), min_size=2, max_size=most, unique_by=str).map(tuple))
    other = draw(st.just(()) | st.lists(limits(draw(st.sampled_from(list(LIMITS)))), min_size=len(some), max_size=len(some)))
    return some, tuple(other), draw(histories(some))


def keeps_every_promise(
    make: MakeStore, some: tuple[Limit, ...], other: tuple[Limit, ...], history: list[Step], end_us: int = 2**62
) -> None:
    """Plays a history. After each refusal with a retry time before `end_us`, nothing else happens until then: the same call is
    refused a tick before, and accepted at that time."""
    clock = ManualClock(BEGIN)
    with TemporaryDirectory() as folder, make(clock, f"{folder}/limits") as store:
        rows = [{"one": limit, **({"two": other[i]} if other else {})} for i, limit in enumerate(some)]
        limiters = [Limiter(row, store=store, name="name") for row in rows]
        for step in history:
            clock.advance(step.after_us / 1e6)
            call = call_of(limiters[step.rate], step)
            refused = call()
            retry_us = refused.retry_us
            if step.what == "peek" or refused or not 0 < retry_us < 2**50 or clock.now_us() + retry_us >= end_us:
                continue
            tick = max(limit.tick for limit in rows[step.rate].values())
            promised_us = clock.now_us() + retry_us
            if retry_us > tick:
                clock.advance((retry_us - tick) / 1e6)
                sweep(store)
                assert not call(), (step, "accepted a tick too early")
            clock.advance((promised_us - clock.now_us()) / 1e6)
            assert call(), (step, "refused at the promised time")


@every_rule
@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_retry_time_holds_on_an_overflow_cell(kind: str, rule: type[Limit]) -> None:
    """The same for a key that is new to a full store: an overflow cell keeps the states of several rates, as any other. (After
    a year the key may be mapped to another one.)"""

    def full(clock: ManualClock, path: str) -> Store:
        store = MemoryStore(1, clock) if kind == "memory" else SharedStore(path, max_keys=1, log_entries=64, clock=clock)
        Limiter(FixedWindow("1/365d", align="first"), store=store, name="other").hit("active")
        return store

    @effort(40)
    @given(pairs_and_histories(rule, 6))
    def law(drawn: Any) -> None:
        keeps_every_promise(full, *drawn, end_us=int(BEGIN + 364 * 86_400) * 10**6)

    law()


def call_of(limiter: Limiter, step: Step) -> Callable[[], Any]:
    if step.what == "peek":
        return lambda: limiter.peek("key", step.cost)
    wait = step.max_wait_us / 1e6 if step.what == "reserve" else 0
    return lambda: limiter.reserve("key", step.cost, wait).decision if wait else limiter.hit("key", step.cost)


def sweep(store: Any) -> None:
    if hasattr(store, "sweep"):
        store.sweep()


@every_rule
@pytest.mark.parametrize("kind", EXACT)
def test_a_retry_time_holds_whatever_rates_were_used_before(kind: str, rule: type[Limit]) -> None:
    """Up to six rates of one or two names in random order, hits and reservations, with peeks and sweeps in between."""

    @effort(50 if kind in ("memory", "shared") else 15)
    @given(pairs_and_histories(rule, 6))
    def law(drawn: Any) -> None:
        keeps_every_promise(STORES[kind], *drawn)

    law()


def bucket_beside_a_full_window(make: MakeStore, path: str) -> None:
    clock = ManualClock(NOON)
    with make(clock, path) as store:
        hour, minute = (Limiter(FixedWindow(rate), store=store, name="api") for rate in ("1000/h", "10/min"))
        assert hour.hit("key", 1000)
        clock.advance(30)
        refused = minute.hit("key")
        assert refused.retry_after == 30
        before = hour.peek("key")
        clock.advance(30)
        assert minute.hit("key").remaining == 9
        assert not hour.hit("key")
        assert hour.peek("key").remaining == before.remaining == 0


@pytest.mark.parametrize("kind", EXACT)
def test_a_short_window_beside_a_full_long_one_opens_at_its_retry_time(kind: str, tmp_path: Any) -> None:
    """1000/h is used up; the first 10/min call is refused for the rest of this minute, not for the rest of the hour."""
    bucket_beside_a_full_window(STORES[kind], str(tmp_path / "limits"))


@pytest.mark.parametrize("kind", EXACT)
def test_a_peek_is_no_first_use(kind: str, tmp_path: Any) -> None:
    """Peeking under a new rate stores nothing: a minute later, the rate still starts with what the others hold then."""
    clock = ManualClock(NOON)
    with STORES[kind](clock, str(tmp_path / "limits")) as store:
        hour, minute = (Limiter(FixedWindow(rate), store=store, name="api") for rate in ("1000/h", "10/min"))
        assert hour.hit("key", 1000)
        assert not minute.peek("key")
        clock.advance(60)
        assert not minute.peek("key")
        assert minute.hit("key").retry_after == 60
        clock.advance(60)
        assert minute.peek("key")


@pytest.mark.parametrize("kind", EXACT)
def test_a_refused_first_call_changes_no_answer(kind: str, tmp_path: Any) -> None:
    """Law 2: every rate, the new one included, answers a peek as before it."""
    clock = ManualClock(NOON)
    with STORES[kind](clock, str(tmp_path / "limits")) as store:
        limiters = [Limiter(TokenBucket(rate), store=store, name="api") for rate in ("1/s burst 100", "1/h burst 40", "3/min")]
        assert limiters[0].hit("key", 90)
        assert limiters[1].hit("key", 0)
        before = [limiter.peek("key") for limiter in limiters]
        assert not limiters[2].hit("key")
        assert [limiter.peek("key") for limiter in limiters] == before


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_longer_log_keeps_entries_from_its_refused_first_call_on(kind: str, tmp_path: Any) -> None:
    """5/min is used up, and 3/h is refused for an hour: the entries stay for the hour, whatever is swept."""
    clock = ManualClock(NOON)
    with STORES[kind](clock, str(tmp_path / "limits")) as store:
        short, long = (Limiter(SlidingWindowLog(rate), store=store, name="api") for rate in ("5/min", "3/h"))
        assert short.hit("key", 5)
        assert long.hit("key").retry_after == 3600
        clock.advance(3599)
        sweep(store)
        assert long.hit("key").retry_after == 1
        clock.advance(1)
        assert long.hit("key")
