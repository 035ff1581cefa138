"""A signal handler may raise after any call and where any function begins: nothing uncompiled is left locked, or uncollected."""

from __future__ import annotations

import fcntl
import gc
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from interrupts import interrupted_at
from limitkeeper import Limiter, MemoryStore, SharedStore, compiled

numbers = count()
CALLS: dict[str, Callable[[Limiter], object]] = {
    "hit": lambda limiter: limiter.hit({"a": "k", "b": "k"}),
    "single": lambda limiter: limiter.hit({"a": "k", "b": None}),
    "hit_many": lambda limiter: limiter.hit_many(["k", "l"]),
    "reserve": lambda limiter: limiter.reserve("k", max_wait=9).cancel(),
    "reset": lambda limiter: limiter.reset("k"),
    "items": lambda limiter: limiter.store.items(limiter.named[0]),
    "rebook": lambda limiter: rebook(limiter),
}


def rebook(limiter: Limiter) -> None:
    """One of two reservations leaves, and the other, of another cost, moves up; of a new key: an interrupt leaves the other."""
    key = f"{next(numbers)}"
    first, second = limiter.reserve(key, 1000), limiter.reserve(key, 999)
    first.cancel()
    second.cancel()


uncompiled = pytest.mark.skipif(compiled, reason="compiled code has no such moment while it holds the lock")


@uncompiled
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_moment_leaves_nothing_locked(name: str, tmp_path: Path) -> None:
    """Every moment of every kind of call, one after the other: neither the threads' lock nor the file's lock is held."""
    path = tmp_path / "shared"
    with SharedStore(path, max_keys=10_000) as store, open(f"{path}.lock", "wb") as other:  # a full one would share cells
        limiter = Limiter({"a": "1000/s", "b": "fixed window 1000/min"}, store=store)
        CALLS[name](limiter)
        number = 1
        while interrupted_at(number, lambda: CALLS[name](limiter)):
            assert not store._lock._is_owned(), number
            assert store.depth == 0, number
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_UN)
            number += 1
        assert number > 20
        assert limiter.hit("k")


@uncompiled
@pytest.mark.parametrize("kind", ["memory", "shared"])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_moment_leaves_the_garbage_collector_enabled(name: str, kind: str, tmp_path: Path) -> None:
    """A call during which no finaliser may run enables the collector again, wherever it is interrupted."""
    with MemoryStore() if kind == "memory" else SharedStore(tmp_path / "shared", max_keys=1000) as store:
        limiter = Limiter({"a": "1000/s", "b": "sliding window log 1000/min"}, store=store)
        number = 1
        while interrupted_at(number, lambda: CALLS[name](limiter)):
            found = gc.isenabled()
            gc.enable()
            assert found, number
            number += 1
