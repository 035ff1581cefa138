"""A hit on a file that processes share, beside the hit on this process's own memory; then two processes on one key."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from report import Section, Table, number, spaced
from timing import Case, Effort, measure, one_core

from limitkeeper import FixedWindow, Limiter, SharedStore, TokenBucket

KEY = "user:123456"
PLENTY = 10**9


@contextmanager
def shared_file() -> Iterator[str]:
    """A path in memory, where there is such a place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield os.path.join(folder, "limits")


def hits_in_a_child(limiter: Limiter, seconds: float) -> tuple[int, int]:
    """A process that hits for so long; its number, and where it writes its count."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        done, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(1000):
                done += limiter.hit(KEY).allowed
        os.write(writer, str(done).encode())
        os._exit(0)
    os.close(writer)
    return pid, reader


def together(path: str, processes: int, seconds: float) -> tuple[int, int]:
    """(hits answered, hits that the file counts) of so many processes on one key at once."""
    with SharedStore(path) as store:
        limiter = Limiter(FixedWindow(f"{PLENTY}/400d"), store=store, name=f"{processes} processes")
        children = [hits_in_a_child(limiter, seconds) for _ in range(processes)]
        answered = 0
        for pid, reader in children:
            with os.fdopen(reader) as said:
                answered += int(said.read())
            os.waitpid(pid, 0)
        return answered, PLENTY - limiter.peek(KEY).remaining


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Shared file",
        "`limiter.hit(key)` on a SharedStore in /dev/shm, one process, beside the same on a MemoryStore; then processes "
        "that hit one key as fast as they can, and whether the file counted what they were answered.",
    )
    with shared_file() as path, SharedStore(path) as store:
        cases = []
        for verdict, rate in (("allow", f"{PLENTY}/h"), ("deny", "1/h")):
            for kind, where in (("memory", None), ("shared", store)):
                limiter = Limiter(TokenBucket(rate), store=where)
                limiter.hit(KEY)
                cases.append(Case(f"{kind} {verdict}", "o.hit(k)", {"o": limiter, "k": KEY}))
        with one_core():
            took, failed = measure(cases, effort, note)
        section.fail(failed)
        for verdict in ("allow", "deny"):
            section.figure(f"shared hit / memory hit, {verdict}", took[f"shared {verdict}"] / took[f"memory {verdict}"], 3, "×")
        section.details = [Table(("one process", "shared ns", "memory ns"))]
        for verdict in ("allow", "deny"):
            ours, theirs = (number(took[f"{kind} {verdict}"], "") for kind in ("shared", "memory"))
            section.details[0].rows.append((verdict, ours, theirs))
        table = Table(("one key", "decisions/s together", "ns each, per process", "counted − answered"))
        for processes in (1, 2, 4):
            note(f"{processes} processes on one key")
            seconds = effort.pick(20, 5) / 10
            answered, counted = together(path, processes, seconds)
            table.rows.append(
                (
                    f"{processes} processes",
                    spaced(round(answered / seconds)),
                    number(processes * seconds * 1e9 / answered, ""),
                    str(counted - answered),
                )
            )
            if processes == 2:
                section.figure("two processes on one key: miscounted", counted - answered, 0, "", shown=str(counted - answered))
        section.details.append(table)
        section.notes.append("four processes share this machine's two cores: each has the lock, and its core, half the time")
    return section
