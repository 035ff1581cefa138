"""What the type checker sees of Cython's pure-Python mode: C integers are ints, decorators change nothing."""

import builtins
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

_T = TypeVar("_T")

compiled: bool
longlong: TypeAlias = builtins.int
double: TypeAlias = builtins.float
int: TypeAlias = builtins.int
void: TypeAlias = None
ulonglong: TypeAlias = builtins.int
Py_ssize_t: TypeAlias = builtins.int
bint: TypeAlias = bool
p_longlong: TypeAlias = Any
p_void: TypeAlias = Any
p_uchar: TypeAlias = Any

def cfunc(f: _T) -> _T: ...
def ccall(f: _T) -> _T: ...
def cclass(f: _T) -> _T: ...
def nogil(f: _T) -> _T: ...
def inline(f: _T) -> _T: ...
def exceptval(*args: Any, check: bool = ...) -> Callable[[_T], _T]: ...
def annotation_typing(on: bool) -> Callable[[_T], _T]: ...
def cast(kind: Any, value: Any) -> Any: ...
