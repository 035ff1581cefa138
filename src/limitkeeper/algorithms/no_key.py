"""NO_KEY: the key of a call without a key. It means the limiter's own cell, which no key reaches, not even an empty one."""

from __future__ import annotations

from typing import Any


class NoKey:
    """Rejected: None. A call whose key is None by mistake would share one cell with all others, unnoticed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "no key"

    def __reduce__(self) -> str:
        return "NO_KEY"


NO_KEY: Any = NoKey()
