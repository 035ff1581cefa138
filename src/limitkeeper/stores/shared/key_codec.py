"""Plain twin of key_codec.pxd: encodes keys of any length as 8-byte words of a shared file, and hashes them.

The two builds never share a file (they lock it differently, and the file says how), so the bytes of a key may differ: UTF-8 here,
the string's own characters when compiled.
"""

from __future__ import annotations

import hashlib
from typing import Any


def kind_of(key: str) -> int:
    return 1


def size_of(key: str) -> int:
    return len(key.encode("utf-8", "surrogatepass"))


def hashed(key: str, secret: int, other: int, limit_id: int) -> int:
    """A keyed hash: without the file's secret, colliding keys can't be chosen."""
    secrets = b"".join(part.to_bytes(8, "little", signed=True) for part in (secret, other, limit_id))
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=secrets).digest()
    return int.from_bytes(digest, "little", signed=True)


def copy_in(words: Any, at: int, key: str, offset: int, size: int) -> None:
    """Copies `size` bytes of the key, from `offset` on, into words beginning at `at`."""
    data = key.encode("utf-8", "surrogatepass")[offset : offset + size]
    count = (len(data) + 7) // 8
    words[at : at + count] = memoryview(data.ljust(8 * count, b"\0")).cast("q")


def same_at(words: Any, at: int, key: str, offset: int, size: int) -> bool:
    """Whether the words at `at` hold these bytes of the key."""
    return copy_out(words, at, size) == key.encode("utf-8", "surrogatepass")[offset : offset + size]


def copy_out(words: Any, at: int, size: int) -> bytes:
    return bytes(words[at : at + (size + 7) // 8].tobytes()[:size])


def text_of(kind: int, data: bytes) -> str:
    """The key whose bytes these are."""
    return data.decode("utf-8", "surrogatepass")
