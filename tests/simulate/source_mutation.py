"""Mutations of source text: replaces a method by one with a change in one place while a test runs."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def mutated(owner: Any, name: str, old: str, new: str) -> Iterator[None]:
    """`owner.name` with `old` replaced by `new` in its source."""
    original = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {name}"
    made: dict[str, Any] = {}
    namespace = inspect.getmodule(original).__dict__  # type: ignore[union-attr]
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), f"<mutated {name}>", "exec"), namespace, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, original)
