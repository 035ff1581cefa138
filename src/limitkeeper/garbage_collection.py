"""Pauses the garbage collector during changes that a finaliser must not interrupt.

The collector may run finalisers wherever something is allocated, in the thread that is in the middle of a change and holds its
(re-entrant) lock. One that calls a limiter, such as a generator that is collected and gives its reservation back, would change
the same object. In a forked child the collector runs again where another thread of the parent had paused it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

from .fork import call_after_fork

P = ParamSpec("P")
T = TypeVar("T")
#: The threads that keep the garbage collector from running at the moment.
PAUSING: set[int] = set()


def uncollected(call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Calls something while the garbage collector is paused. A signal handler that raises, which it may after any call, does not
    leave it disabled. Of two threads that overlap, the first to end lets it run in the other's change, too: that is rare.
    Rejected: to wait for the last of them, since under load the collector then hardly runs."""
    if not gc.isenabled():
        return call(*args, **kwargs)
    try:
        PAUSING.add(get_ident())
        gc.disable()
        return call(*args, **kwargs)
    finally:
        gc.enable()
        PAUSING.discard(get_ident())


def without_finalisers(method: Callable[P, T]) -> Callable[P, T]:
    """A method during which no finaliser runs."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return uncollected(method, *args, **kwargs)  # type: ignore[no-any-return]

    return call


def _after_fork() -> None:
    if PAUSING - {get_ident()}:  # of the parent's other threads
        PAUSING.clear()
        gc.enable()


call_after_fork(_after_fork)
