"""A signal handler may raise at any moment of a call that charges a later start: no charge of others is given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from interrupts import interrupted_at
from limitkeeper import GuardedStore, LeasedStore, Limiter, MemoryStore, ShardedStore, SharedStore
from limitkeeper.stores import Store
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
