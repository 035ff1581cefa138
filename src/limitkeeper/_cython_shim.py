"""Replaces the `cython` module where Cython is not installed: types are Python's, and decorators do nothing."""

from __future__ import annotations

import builtins as _builtins
from collections.abc import Callable
from typing import Any, TypeVar
from typing import TypeAlias as _TypeAlias

T = TypeVar("T")

compiled = False
# One typed alias per line: type checkers resolve the C types of the installed sources here.
int: _TypeAlias = _builtins.int  # noqa: A001
longlong: _TypeAlias = _builtins.int
ulonglong: _TypeAlias = _builtins.int
Py_ssize_t: _TypeAlias = _builtins.int
void: _TypeAlias = None
double: _TypeAlias = float
bint: _TypeAlias = bool
p_longlong: _TypeAlias = Any
p_void: _TypeAlias = Any
p_uchar: _TypeAlias = Any
uchar: _TypeAlias = Any
NULL = None


def _unchanged(value: T) -> T:
    return value


cfunc = ccall = cclass = nogil = inline = _unchanged


def exceptval(*_args: object, **_options: object) -> Callable[[T], T]:
    return _unchanged


def annotation_typing(_on: bool) -> Callable[[T], T]:
    return _unchanged


def address(value: T) -> T:
    return value


def cast(_kind: object, value: T) -> T:
    return value
