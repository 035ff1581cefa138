"""What `cython` means where Cython is not installed: the source runs as it is, and every marker does nothing."""

from __future__ import annotations

import builtins as _builtins
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

compiled = False
# One alias a line, each typed: the installed sources import this module, and type checkers read their C types here.
int: TypeAlias = _builtins.int  # noqa: A001
longlong: TypeAlias = _builtins.int
ulonglong: TypeAlias = _builtins.int
Py_ssize_t: TypeAlias = _builtins.int
void: TypeAlias = None
bint: TypeAlias = bool
p_longlong: TypeAlias = Any
p_void: TypeAlias = Any
uchar: TypeAlias = Any
NULL = None


def _as_it_is(thing: T) -> T:
    return thing


cfunc = ccall = cclass = nogil = inline = _as_it_is


def exceptval(*_args: object, **_options: object) -> Callable[[T], T]:
    return _as_it_is


def annotation_typing(_on: bool) -> Callable[[T], T]:
    return _as_it_is


def address(thing: T) -> T:
    return thing


def cast(_kind: object, value: T) -> T:
    return value
