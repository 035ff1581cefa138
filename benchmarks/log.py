"""The sliding log: the memory of an entry, and whether the cost of a hit is independent of the log's length.

Each figure begins with a log of that length, written through the store's own `load`; a batch of hits is short against it.
"Steady" is a window of one millisecond under full load, where every hit also lets old entries go.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count as counting
from statistics import median
from typing import Any

from memory import resident
from pauses import NOTED_NS, comes_back
from report import Section, Table, number, spaced
from timing import Case, Effort, measure, one_core

from limitkeeper import Limiter, MemoryStore, SlidingWindowLog, TokenBucket
from limitkeeper.testing import ManualClock

LENGTHS = (10, 1000, 1_000_000)
HIT = "o.hit(k)"


def filled(limiter: Limiter, key: str, entries: int) -> str:
    """A key with a log of `entries`, one per microsecond, the newest of them now."""
    now_us = int(limiter.store.now_us())
    moments = tuple((now_us - entries + i, 1) for i in range(entries))
    limiter.store.load(limiter.named[0], [(key, (moments, 0, 0))])
    return key


def cases() -> list[Case]:
    made = [Case("token bucket", HIT, {"o": Limiter(TokenBucket("1000000000/h")), "k": "user:1"})]
    for entries in LENGTHS:
        roomy, full, fresh = Limiter(SlidingWindowLog("1000000000/h")), Limiter(SlidingWindowLog(f"{entries}/h")), counting()
        deny = {"o": full, "k": filled(full, "user:1", entries)}
        if entries < 10_000:
            before = lambda o=roomy, n=entries, fresh=fresh: filled(o, f"user:{next(fresh)}", n)  # noqa: E731
            made.append(Case(f"{entries} allow", HIT, {"o": roomy}, before, most=40))
        else:
            made.append(Case(f"{entries} allow", HIT, {"o": roomy, "k": filled(roomy, "user:1", entries)}))
        made.append(Case(f"{entries} deny", HIT, deny))
    made.append(Case("steady", HIT, {"o": Limiter(SlidingWindowLog("1000000000/ms")), "k": "user:1"}))
    return made


def weigh(entries: int) -> tuple[float, list[tuple[int, int]]]:
    """In a process of its own: bytes an entry, and the hits that took long, while a log grows by one entry per microsecond."""
    clock = ManualClock()
    limiter = Limiter(SlidingWindowLog("1000000000/h"), store=MemoryStore(clock=clock))
    limiter.hit("user:1")
    empty, noted, read = resident(), [], time.perf_counter_ns
    for i in range(entries):
        clock.advance(1e-6)
        begun = read()
        limiter.hit("user:1")
        took = read() - begun
        if took > NOTED_NS:
            noted.append((i, took))
    return (resident() - empty) / entries, noted


def weighed(section: Section, effort: Effort, note: Callable[[str], None]) -> None:
    entries, found = effort.pick(1_000_000, 100_000), []
    for i in range(3):
        note(f"weighing {entries} entries, run {i + 1} of 3")
        done = subprocess.run([sys.executable, __file__, str(entries)], capture_output=True, text=True, check=True, timeout=100)
        found.append(json.loads(done.stdout))
    section.figure(f"bytes an entry, {spaced(entries)} entries", median(weight for weight, _ in found), None, "B")
    pause, at = comes_back([noted for _, noted in found])
    section.figure(f"longest hit while one log grows (comes back at entry {spaced(at)})", pause, None, "ms")


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Sliding log",
        "`hit` on logs of 10, 1000 and 1 000 000 entries, allowed and refused. Bytes are the growth of a fresh process; a pause "
        "counts when three fresh processes have it at the same entry. Printed, without a goal: amortised O(1) is what to see.",
    )
    weighed(section, effort, note)
    with one_core():
        took, failed = measure(cases(), effort, note)
    section.fail(failed)
    for verdict in ("allow", "deny"):
        ratio = took[f"1000000 {verdict}"] / took[f"10 {verdict}"]
        section.figure(f"hit at 1 000 000 entries / at 10, {verdict}", ratio, None, "×")
    table = Table(("entries", "allow ns", "deny ns"))
    table.rows = [(spaced(n), number(took[f"{n} allow"], ""), number(took[f"{n} deny"], "")) for n in LENGTHS]
    table.rows += [
        ("steady, one window of 1 ms", number(took["steady"], ""), ""),
        ("token bucket", number(took["token bucket"], ""), ""),
    ]
    section.details = [table]
    return section


if __name__ == "__main__":
    print(json.dumps(weigh(int(sys.argv[1]))))
