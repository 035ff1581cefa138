"""Sends arrivals through a real Limiter on a ManualClock and records the results.

Times are integer microseconds since 1970, as everywhere in limitkeeper. The module contains no algorithm: every number comes from
the public API. The level of a limit is read with `peek` between the arrivals, which stores nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from limitkeeper import Decision, Limit, Limiter, MemoryStore
from limitkeeper.testing import ManualClock

SECOND = 1_000_000
MINUTE = 60 * SECOND
KEY = "user:42"

Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """One arrival: its time, its start (None: refused), and the time at which its limit is reset."""

    at: int
    start: int | None
    reset_at: int

    @property
    def delayed(self) -> bool:
        return self.start is not None and self.start > self.at


@dataclass(frozen=True, slots=True)
class Figures:
    """The counts of one run; waits in microseconds."""

    arrived: int
    at_once: int
    delayed: int
    refused: int
    longest_wait: int
    most_in_window: int


class Stage:
    """A limiter and the clock that drives it."""

    def __init__(self, limit: Limit, start: int) -> None:
        self.clock = ManualClock(start / SECOND)
        self.limiter = Limiter(limit, MemoryStore(clock=self.clock))

    def arrive(self, waits: bool = False, cost: int = 1) -> Mark:
        """One arrival, now: a `hit`, or a `reserve` if it waits."""
        now = self.clock.now_us()
        decision = self.limiter.reserve(KEY, cost).decision if waits else self.limiter.hit(KEY, cost)
        start = now + round(decision.wait * SECOND) if decision else None
        return Mark(now, start, now + round(decision.reset_after * SECOND))

    def peek(self) -> Decision:
        return self.limiter.peek(KEY)


def move(clock: ManualClock, moment: int) -> None:
    """Sets a clock to a time."""
    clock.advance((moment - clock.now_us()) / SECOND)


def send(limit: Limit, arrivals: Sequence[int], waits: bool = False) -> list[Mark]:
    """Sends the arrivals through an unused limit."""
    stage = Stage(limit, arrivals[0])
    marks = []
    for moment in arrivals:
        move(stage.clock, moment)
        marks.append(stage.arrive(waits))
    return marks


def watch(
    clock: ManualClock,
    events: Sequence[tuple[int, Callable[[], object]]],
    moments: Iterable[int],
    level: Callable[[], float],
) -> list[Point]:
    """Runs the events in order and reads the level at every given time, and just before and after every event."""
    line: list[Point] = []

    def look(moment: int) -> None:
        move(clock, moment)
        line.append((moment, level()))

    rest = sorted(set(moments))
    for at, happen in events:
        before = bisect_left(rest, at)
        for moment in [*rest[:before], at]:
            look(moment)
        rest = rest[before:]
        happen()
        look(at)
    for moment in rest:
        look(moment)
    return line


def figures(marks: Sequence[Mark], window: int) -> Figures:
    """Counts of admitted, delayed and refused arrivals, and the most starts within any half-open window."""
    starts = sorted(mark.start for mark in marks if mark.start is not None)
    waits = [mark.start - mark.at for mark in marks if mark.start is not None]
    delayed = sum(mark.delayed for mark in marks)
    return Figures(
        arrived=len(marks),
        at_once=len(starts) - delayed,
        delayed=delayed,
        refused=len(marks) - len(starts),
        longest_wait=max(waits, default=0),
        most_in_window=max((i + 1 - bisect_right(starts, end - window) for i, end in enumerate(starts)), default=0),
    )
