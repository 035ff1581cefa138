"""Keys as bytes in words, and the hash that every process of a host agrees on. The plain twin of words.pxd.

Files of the two builds never meet (each has its own way to keep others out, and the file says which), so the bytes of a key
may differ between them: UTF-8 here, the string's own characters when compiled.
"""

from __future__ import annotations

import hashlib
from typing import Any

from .layout import MAGIC_TEXT


def kind_of(key: str) -> int:
    return 1


def size_of(key: str) -> int:
    return len(key.encode("utf-8", "surrogatepass"))


def hashed(key: str, secret: int, other: int, table: int) -> int:
    """A keyed hash: who does not know the file's secret can't choose keys that collide."""
    secrets = b"".join(part.to_bytes(8, "little", signed=True) for part in (secret, other, table))
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


def publish(words: Any, at: int, value: int) -> None:
    """Writes a word behind everything written before it."""
    words[at] = value


def magic() -> int:
    return int.from_bytes(MAGIC_TEXT, "little")
