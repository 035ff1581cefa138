"""Resets objects and module locks in a forked child.

A child has one thread: a lock that another thread of the parent held would stay locked for ever, and background threads, waiters
and connections of the parent are not its own. In a child the functions registered with `call_after_fork` run first, then
`_reset_after_fork()` of every live object in the order of creation: an object is reset after the objects that it was built on.
Rejected: one `os.register_at_fork` per module, whose order is the order of imports.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary


class ForkAware(Protocol):
    """An object whose locks, threads or connections a forked child can't use."""

    def _reset_after_fork(self) -> None: ...


_functions: list[Callable[[], None]] = []
_objects: WeakValueDictionary[int, ForkAware] = WeakValueDictionary()
_numbers = count()


def reset_after_fork(made: ForkAware) -> None:
    """Calls `made._reset_after_fork()` in every forked child, as long as the object lives; it is held weakly."""
    _objects[next(_numbers)] = made


def call_after_fork(function: Callable[[], None]) -> None:
    """Calls `function` in every forked child, before the objects are reset."""
    _functions.append(function)


def _in_child() -> None:
    """Resets everything, then raises the first error, which the interpreter prints: one failed reset does not stop the others."""
    references = list(_objects.valuerefs())  # taken at once: a reset may start a thread, and that may create objects
    errors: list[Exception] = []
    for reset in [*_functions, *(made._reset_after_fork for reference in references if (made := reference()) is not None)]:
        try:
            reset()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
