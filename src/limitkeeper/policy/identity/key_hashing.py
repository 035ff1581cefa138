"""What of a request's text becomes part of a key.

A key lives in the store for as long as its limit remembers it, and whoever sends requests chooses the text. So a value of more
than 256 characters (a header bomb, a whole token) is kept as its SHA-256: 71 characters, still one key per value. A shorter text
that looks like such a hash is hashed too: two values never share a key. Any character may stand in a key; keys are never echoed.

`remember` keeps answers about such values in a dict that can't grow without bound either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from itertools import islice
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

LONGEST = 256
HASHED = "sha256:"
_HASHED_LENGTH = len(HASHED) + 64


def hash_long(value: str) -> str:
    """The value itself, or `sha256:…` when it is too long to keep."""
    length = len(value)
    if length <= LONGEST and (length != _HASHED_LENGTH or not value.startswith(HASHED)):
        return value
    return HASHED + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def remember(table: dict[K, V], key: K, value: V, most: int) -> V:
    """Puts an answer into a table of at most so many. When it is full the oldest eighth goes (one by one would cost more each
    time: a dict is searched past all that left it). No lock, which a fork could leave locked: the worst that a race does is to
    keep a few more or less."""
    if len(table) >= most:
        try:
            for old in list(islice(table, most // 8 + 1)):
                table.pop(old, None)
        except RuntimeError:  # somebody else is at it
            pass
    table[key] = value
    return value
