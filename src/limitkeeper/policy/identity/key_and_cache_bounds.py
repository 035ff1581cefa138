"""Bounds the length of client-supplied keys by hashing long ones, and the size of caches that they are keys of.

A key stays in the store as long as its limit remembers it, and clients choose its text. A value of more than 256 characters (a
header bomb, a whole token) is therefore replaced by its SHA-256: 71 characters, still one key per value. A shorter text that
looks like such a hash is hashed too, so two values never share a key. A key may hold any character; keys are never echoed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from itertools import islice
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_KEY_LENGTH = 256
HASHED = "sha256:"
_HASHED_LENGTH = len(HASHED) + 64


def hash_long(value: str) -> str:
    """The value itself, or `sha256:…` when it is too long for a key."""
    length = len(value)
    if length <= MAX_KEY_LENGTH and (length != _HASHED_LENGTH or not value.startswith(HASHED)):
        return value
    return HASHED + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def remember(cache: dict[K, V], key: K, value: V, maximum: int) -> V:
    """Adds an entry to a cache of at most `maximum` and returns its value. A full cache drops its oldest eighth: dropping one by
    one would scan the dict's deleted entries each time. Lock-free, since a fork could leave a lock held; a race costs entries.
    """
    if len(cache) >= maximum:
        try:
            for oldest in list(islice(cache, maximum // 8 + 1)):
                cache.pop(oldest, None)
        except RuntimeError:  # another thread changed the dict meanwhile
            pass
    cache[key] = value
    return value
