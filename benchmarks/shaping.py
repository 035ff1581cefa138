"""Shaping: the mean rate and the shortest gap of strict shapers, exactly on a virtual clock, and in short runs in real time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from report import Section, Table
from timing import Effort

from limitkeeper import MemoryStore, TokenBucket
from limitkeeper.concurrency import shape
from limitkeeper.testing import ManualClock

#: Rate and virtual seconds by text; a message costs about 50 µs of CPU time.
RATES = {"100/s": (100, 30), "10000/s": (10_000, 3)}


class Pace(NamedTuple):
    """`mean`: the rate / the configured one; `shortest`: the shortest gap / the interval."""

    mean: float
    shortest: float
    messages: int


def pace_of(moments: list[float], rate: int) -> Pace:
    """Moments are in seconds."""
    count = len(moments) - 1
    shortest = min(after - before for before, after in itertools.pairwise(moments))
    return Pace(count / (moments[-1] - moments[0]) / rate, shortest * rate, len(moments))


def virtual(text: str, rate: int, seconds: int) -> Pace:
    """A run on a virtual clock; times are integer microseconds."""
    clock = ManualClock()
    shaped = shape(range(rate * seconds + 1), text, store=MemoryStore(clock=clock))
    return pace_of([clock.now_us() / 1e6 for _ in shaped], rate)


def by_thread(source: Iterable[int], limit: Any, rate: int) -> Pace:
    return pace_of([time.perf_counter() for _ in shape(source, limit)], rate)


def by_task(source: Iterable[int], limit: Any, rate: int) -> Pace:
    async def numbers() -> Any:
        for number in source:
            yield number

    async def collect() -> list[float]:
        return [time.perf_counter() async for _ in shape(numbers(), limit)]

    return pace_of(asyncio.run(collect()), rate)


REAL: tuple[tuple[str, Callable[[Iterable[int], Any, int], Pace], Any, int, int], ...] = (
    ("100/s, thread, strict", by_thread, "100/s", 100, 200),
    ("100/s, task, strict", by_task, "100/s", 100, 200),
    ("10000/s, thread, strict", by_thread, "10000/s", 10_000, 2000),
    ("10000/s, task, strict", by_task, "10000/s", 10_000, 1000),
    ("10000/s, task, token bucket, burst 50", by_task, TokenBucket("10000/s burst 50 initial 1"), 10_000, 10_000),
)


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Shaping",
        "An empty loop over a shaped iterator. Mean rate / the configured rate, and the shortest gap / the interval. On a "
        "virtual clock, which must be exact; in real time by a thread and by a task, which depends on the timers of the machine.",
    )
    rows = []
    for text, (rate, seconds) in RATES.items():
        note(f"{text}, virtual clock")
        found = virtual(text, rate, effort.pick(seconds, 1))
        section.figure(f"{text}, virtual clock: |mean rate − rate|", abs(found.mean - 1) * 100, 0.1, "%")
        section.figure(f"{text}, virtual clock: shortest gap / interval", found.shortest, 0.9, "×", True)
        rows.append((f"{text}, virtual clock", found))
    for name, measure, text, rate, count in REAL:
        note(name)
        rows.append((name, measure(range(count + 1), text, rate)))
    section.details = [
        Table(
            ("run", "mean / rate", "shortest gap / interval", "messages"),
            [(name, f"{one.mean:.4f}", f"{one.shortest:.3f}", str(one.messages)) for name, one in rows],
        )
    ]
    return section
