"""The traffic of the demo: the examples of the five source documents, and the limits that they pass through.

A lane is one limit and one method: `hit` (start now or be refused) or `reserve` (start later). A queue releases one at a time,
so it uses `reserve`; the sliding window counter can't reserve, so it uses `hit`.
"""

from __future__ import annotations

from dataclasses import dataclass

from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limit,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)

from .runs import MINUTE, SECOND, Figures, Mark, figures, send

TWO_O_CLOCK = 2 * 60 * MINUTE
NOON = 12 * 60 * MINUTE


@dataclass(frozen=True, slots=True)
class Lane:
    """A limit, and whether its callers wait."""

    limit: Limit
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """Arrivals, their lanes, and the drawn period of time with an axis tick every `tick`."""

    name: str
    story: str
    arrivals: tuple[int, ...]
    lanes: tuple[Lane, ...]
    window: int
    end: int
    tick: int
    clock: bool = False

    @property
    def begin(self) -> int:
        return self.arrivals[0] - self.arrivals[0] % self.window

    def ticks(self) -> list[tuple[int, str]]:
        """Times with their labels: seconds from the beginning, or the time of day."""
        moments = range(self.begin, self.end + 1, self.tick)
        return [(at, time_of_day(at) if self.clock else f"{(at - self.begin) / SECOND:g} s") for at in moments]


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a lane."""

    lane: Lane
    marks: tuple[Mark, ...]
    figures: Figures
    edges: tuple[int, ...]


def time_of_day(moment: int) -> str:
    """12:00:01, or 12:00:00.999 with a fraction."""
    seconds, rest = divmod(moment % (24 * 60 * MINUTE), SECOND)
    text = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{rest // 1000:03}" if rest else text


def lanes(buckets: tuple[str, int], windows: str) -> tuple[Lane, ...]:
    """Lanes of every algorithm: buckets with a rate and a size, windows with a rate."""
    rate, size = buckets
    token, leaky = TokenBucket(rate, burst=size), LeakyBucket(rate, capacity=size)
    fixed, log = FixedWindow(windows), SlidingWindowLog(windows)
    hits = (token, leaky, fixed, FixedWindow(windows, align="first"), log, SlidingWindowCounter(windows))
    reservations = (LeakyBucketQueue(rate, capacity=size), LeakyBucketQueue(rate), token, leaky, fixed, log)
    return (*(Lane(limit) for limit in hits), *(Lane(limit, waits=True) for limit in reservations))


def through(lane: Lane, pattern: Pattern) -> Run:
    """Sends a pattern through a lane; the boundaries of fixed windows are taken from the decisions."""
    marks = tuple(send(lane.limit, pattern.arrivals, lane.waits))
    ends = {mark.reset_at for mark in marks} if isinstance(lane.limit, FixedWindow) else set()
    edges = sorted(ends | {end - pattern.window for end in ends})
    return Run(lane, marks, figures(marks, pattern.window), tuple(edges))


def runs(pattern: Pattern) -> list[Run]:
    """Sends the pattern through all its lanes."""
    return [through(lane, pattern) for lane in pattern.lanes]


EVERYONE = lanes(("5/s", 10), "10/s")
PATTERNS = (
    Pattern(
        "Double burst at the window boundary",
        "10 at 12:00:00.999 and 10 at 12:00:01.001. A fixed window admits 20 within 2 ms; the log admits 10.",
        (NOON + 999_000,) * 10 + (NOON + 1_001_000,) * 10,
        EVERYONE,
        SECOND,
        NOON + 6 * SECOND,
        SECOND,
        clock=True,
    ),
    Pattern(
        "3 per second",
        "Normal traffic below the limit: no request waits or is refused.",
        tuple(NOON + i * SECOND // 3 for i in range(12)),
        EVERYONE,
        SECOND,
        NOON + 4 * SECOND,
        SECOND,
    ),
    Pattern(
        "10 at once",
        "A sudden burst. A bucket admits all of it; the queue spreads it out at 5 per second.",
        (NOON,) * 10,
        EVERYONE,
        SECOND,
        NOON + 4 * SECOND,
        SECOND,
    ),
    Pattern(
        "20 at once",
        "Too many. 10 fit and 10 are refused; with `reserve` they start later instead.",
        (NOON,) * 20,
        EVERYONE,
        SECOND,
        NOON + 4 * SECOND,
        SECOND,
    ),
    Pattern(
        "3 per minute, across the full minute",
        "3 requests before 2:01:00 and 3 after it. A fixed window admits all 6 within one minute.",
        tuple(TWO_O_CLOCK + second * SECOND for second in (30, 40, 50, 65, 75, 85)),
        lanes(("3/min", 3), "3/min"),
        MINUTE,
        TWO_O_CLOCK + 150 * SECOND,
        30 * SECOND,
        clock=True,
    ),
)
