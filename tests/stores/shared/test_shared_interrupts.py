"""A signal handler may raise after any call and where any function begins: an uncompiled shared file is never left locked."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
from interrupts import interrupted_at

from limitkeeper import Limiter, SharedStore, compiled

CALLS: dict[str, Callable[[Limiter], object]] = {
    "hit": lambda limiter: limiter.hit({"a": "k", "b": "k"}),
    "single": lambda limiter: limiter.hit({"a": "k", "b": None}),
    "hit_many": lambda limiter: limiter.hit_many(["k", "l"]),
    "reserve": lambda limiter: limiter.reserve("k", max_wait=9).cancel(),
    "reset": lambda limiter: limiter.reset("k"),
}


@pytest.mark.skipif(compiled, reason="compiled code has no such moment while it holds the lock")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_moment_leaves_nothing_locked(name: str, tmp_path: Path) -> None:
    """Every moment of every kind of call, one after the other: neither the threads' lock nor the file's lock is held."""
    path = tmp_path / "shared"
    with SharedStore(path, max_keys=100) as store, open(f"{path}.lock", "wb") as other:
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
