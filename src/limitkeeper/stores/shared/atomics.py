"""Plain twin of atomics.pxd: ordinary writes of words, because a lock file keeps other processes out."""

from __future__ import annotations

HAS_ATOMICS = False


def publish(words: memoryview, at: int, value: int) -> None:
    """Writes a word after everything written before it."""
    words[at] = value
