"""Who holds a lock, and whether it still lives: a process is its number and the moment it was started.

A number alone is used again sooner or later; with the start time beside it, a lock whose owner was killed can be told from
one whose owner is slow. A zombie is dead. All of it is read from /proc; where there is
none, the kernel's file locks are used instead.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache


def stat_of(pid: int) -> tuple[str, int] | None:
    """The state letter and the start time of a process; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may hold anything
    return fields[0].decode(), int(fields[19])


def word_of(pid: int) -> int:
    """What a process writes into a lock that it holds."""
    found = stat_of(pid)
    if found is None:
        raise OSError(f"/proc/{pid}/stat can't be read")
    return pid << 32 | found[1] & 0xFFFFFFFF


def is_alive(word: int) -> bool:
    """Whether the process that wrote this into a lock still lives."""
    found = stat_of(word >> 32)
    return found is not None and found[0] not in "ZXx" and found[1] & 0xFFFFFFFF == word & 0xFFFFFFFF


@cache
def has_proc() -> bool:
    """Whether processes can be looked up."""
    return stat_of(os.getpid()) is not None


@cache
def boot() -> tuple[int, int]:
    """Two words that are others after every start of the machine; zeros where nobody knows."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            digest = hashlib.blake2b(file.read().strip(), digest_size=16).digest()
    except OSError:
        return 0, 0
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


def namespace() -> int:
    """The space in which this process's number means something: containers have their own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
