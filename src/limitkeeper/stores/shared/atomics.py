"""Writes to words that other processes read: the plain twin of atomics.pxd, for files that a lock file protects."""

from __future__ import annotations

HAS_ATOMICS = False


def publish(words: memoryview, at: int, value: int) -> None:
    """Writes a word after everything written before it."""
    words[at] = value
