"""What of a request's text becomes part of a key.

A key lives in the store for as long as its limit remembers it, and whoever sends requests chooses the text. So a value of more
than 256 characters (a header bomb, a whole token) is kept as its SHA-256: 71 characters, still one key per value. A shorter text
that looks like such a hash is hashed too: two values never share a key. Any character may stand in a key; keys are never echoed.
"""

from __future__ import annotations

import hashlib

LONGEST = 256
HASHED = "sha256:"
_HASHED_LENGTH = len(HASHED) + 64


def kept(value: str) -> str:
    """The value itself, or `sha256:…` when it is too long to keep."""
    length = len(value)
    if length <= LONGEST and (length != _HASHED_LENGTH or not value.startswith(HASHED)):
        return value
    return HASHED + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
