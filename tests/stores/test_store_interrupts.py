"""A signal handler may raise at any moment of a call that charges a later start: no charge of others is given back."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import limitkeeper
from interrupts import Interrupted, interrupted_at
from limitkeeper import GuardedStore, LeasedStore, Limiter, MemoryStore, ShardedStore, SharedStore
from limitkeeper.stores import Store
from limitkeeper.stores.sans_io import Pause, Plan, run
from limitkeeper.testing import ManualClock
from stand_ins import NOON

STORES: dict[str, Callable[[Path, ManualClock], Store]] = {
    "memory": lambda path, clock: MemoryStore(clock=clock),
    "shared": lambda path, clock: SharedStore(path / "shared", max_keys=10_000, clock=clock),
    "leased": lambda path, clock: LeasedStore(MemoryStore(clock=clock)),
    "sharded": lambda path, clock: ShardedStore([MemoryStore(clock=clock), MemoryStore(clock=clock)]),
    "guarded": lambda path, clock: GuardedStore(MemoryStore(clock=clock), on_failure="closed"),
}


def enter(limiter: Limiter, key: str) -> None:
    with limiter.reserve(key):
        pass


CALLS: dict[str, Callable[[Limiter, str], object]] = {
    "cancel": lambda limiter, key: limiter.reserve(key).cancel(),
    "settle": lambda limiter, key: limiter.reserve(key, 2).settle(1),
    "enter": enter,
    "acquire": lambda limiter, key: limiter.acquire(key),
}
RATES = [{"a": "1/h"}, {"a": "1/h", "b": "leaky bucket queue 1/h", "c": "sliding window log 3/h"}]


@pytest.mark.parametrize("rates", RATES, ids=["one limit", "three limits"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", STORES)
def test_an_interrupt_at_any_moment_gives_back_no_charge_of_others(
    kind: str, name: str, rates: dict[str, str], tmp_path: Path
) -> None:
    """Every moment, one after the other, each with a key of its own: the charge of an earlier call stays, and no caller waits."""
    clock = ManualClock(NOON)
    with STORES[kind](tmp_path, clock) as store:
        limiter = Limiter(rates, store=store)
        number, going = 1, True
        while going:
            key, began = f"key {number}", clock.now_us()
            limiter.hit(key)
            going = interrupted_at(number, lambda key=key: CALLS[name](limiter, key))  # type: ignore[misc]
            assert clock.now_us() > began or not limiter.peek(key), number
            assert not limiter.waiting(key), number
            number += 1
        assert number > 10


@pytest.mark.skipif(limitkeeper.compiled, reason="compiled, no handler runs where a caller enters and leaves")
def test_an_interrupted_caller_does_not_hold_up_a_change_of_shards() -> None:
    """A hand-over waits for the callers that use the table: none is left of calls that were interrupted at any moment."""
    store = ShardedStore([MemoryStore(), MemoryStore()])
    one, two = Limiter("5/h", store=store), Limiter({"a": "5/h", "b": "6/h"}, store=store)
    calls: list[Callable[[], object]] = [lambda: one.hit("k"), lambda: two.hit("k"), lambda: one.hit_many(["k", "l", "m"])]
    for call in calls:
        number = 1
        while interrupted_at(number, call):
            number += 1
        assert [store.router.callers(side) for side in (0, 1)] == [0, 0]


def test_a_plan_gives_back_when_a_handler_raises_where_its_loop_begins_again() -> None:
    """The interpreter runs handlers at backward jumps, too: the plan gets the exception, and not only its end."""
    outcomes: list[str] = []

    def plan() -> Plan[None]:
        try:
            yield Pause(0.0)
            yield Pause(0.0)
        except Interrupted:
            outcomes.append("gave back")
            raise

    def interrupt(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = frame.f_code is run.__code__
        if event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("JUMP_BACKWARD"):
            sys.settrace(None)
            raise Interrupted
        return interrupt

    sys.settrace(interrupt)
    try:
        with pytest.raises(Interrupted):
            run(plan(), sleep=lambda seconds: None)
    finally:
        sys.settrace(None)
    assert outcomes == ["gave back"]
