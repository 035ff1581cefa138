"""Identifies the process that owns a lock (pid and start time), and tells whether it is alive.

A pid is reused sooner or later; with the start time, a killed owner is told from a slow one. A zombie is dead. Everything is read
from /proc; without it, the kernel's file locks are used instead.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache


def process_stat(pid: int) -> tuple[str, int] | None:
    """The state letter and the start time of a process; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may hold anything
    return fields[0].decode(), int(fields[19])


def owner_word(pid: int) -> int:
    """The word that a process writes into a lock that it owns."""
    found = process_stat(pid)
    if found is None:
        raise OSError(f"/proc/{pid}/stat can't be read")
    return pid << 32 | found[1] & 0xFFFFFFFF


def is_alive(word: int) -> bool:
    """Whether the process that wrote this word is alive."""
    found = process_stat(word >> 32)
    return found is not None and found[0] not in "ZXx" and found[1] & 0xFFFFFFFF == word & 0xFFFFFFFF


@cache
def has_proc() -> bool:
    """Whether /proc can be read."""
    return process_stat(os.getpid()) is not None


@cache
def boot_id() -> tuple[int, int]:
    """Two words that change with every boot; zeros where that is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            digest = hashlib.blake2b(file.read().strip(), digest_size=16).digest()
    except OSError:
        return 0, 0
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


def pid_namespace() -> int:
    """The pid namespace of this process; containers have their own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
