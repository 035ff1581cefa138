"""What `cython` means where Cython is not installed: the source runs as it is, and every marker does nothing."""

from __future__ import annotations

import builtins as _builtins
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

compiled = False
int = longlong = ulonglong = Py_ssize_t = _builtins.int  # noqa: A001
void = None
bint = bool
p_longlong = uchar = Any
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
