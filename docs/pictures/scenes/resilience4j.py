"""The refill-rate-limiter's two pictures, redrawn from a run of `limitkeeper.resilience4j`.

Its own example: 10 permissions per second, at most 10, 2 of them at startup. It counts in thousandths of a permission here, so
that `available_permissions`, a whole number, shows them grow. The time index is where the time that is already spent ends: the
permissions there are lie between it and now, and when it lies in the future, that long a caller waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from draw.runs import SECOND, Mark, Point, watch
from draw.traffic import NOON

from limitkeeper import MemoryStore
from limitkeeper.charts.frame import Frame, level_axis, level_line, straightened, time_axis
from limitkeeper.charts.svg import Drawing
from limitkeeper.resilience4j import RateLimiter, RateLimiterConfig
from limitkeeper.testing import ManualClock

from .rules import seconds, top_line
from .sheet import arrivals_below, panel, sheet

RATE = 10
MS = 1000
#: Milliseconds, permissions, timeout.
Ask = tuple[int, int, str]


class Permits:
    """A RateLimiter of 10 per second, at most 10, initially 2, and the result for each requested permission."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOON / SECOND)
        config = RateLimiterConfig(RATE * 1000, "1s", "100ms", permit_capacity=10_000, initial_permits=2_000)
        self.limiter = RateLimiter("backend", config, store=MemoryStore(clock=self.clock))
        self.marks: list[Mark] = []

    def ask(self, permits: int, timeout: str = "100ms") -> int:
        """0: allowed; above 0: the nanoseconds to wait; −1: refused."""
        self.limiter.change_timeout_duration(timeout)
        answer, now = self.limiter.reserve_permission(permits * 1000), self.clock.now_us()
        self.marks += [Mark(now, None if answer < 0 else now + answer // 1000, now)] * permits
        return answer

    def available(self) -> float:
        return self.limiter.metrics.available_permissions / 1000

    def time_index(self) -> float:
        """Milliseconds from noon at which the time spent so far ends."""
        return (self.clock.now_us() - NOON) / MS - self.available() / RATE * 1000


def permissions() -> Drawing:
    drawing = sheet(
        "Permissions over time",
        "10 per second, at most 10, 2 at startup. Requests take them; they are replenished continuously, never above 10.",
    )
    frame = panel(92, 180, NOON, NOON + 6 * SECOND, -1, 11)
    asked = ((0, 1), (500, 3), (1000, 6), (1200, 2), (2500, 10), (2550, 1), (3100, 2), (5000, 4))
    permits = Permits()
    events = [(NOON + at * MS, lambda many=many: permits.ask(many)) for at, many in asked]
    line = watch(permits.clock, events, range(frame.begin, frame.end + 1, 5 * MS), permits.available)
    arrivals_below(
        drawing, frame, 280, permits.marks, seconds(frame.begin, frame.end), 10, 0, "requested, a mark for each permission"
    )
    level_axis(drawing, frame, (0, 5, 10), "available permissions")
    top_line(drawing, frame, 10, "permit_capacity 10")
    level_line(drawing, frame, line, floor=0)
    for at, level, words in (
        (60, 9.2, "initial_permits 2,"),
        (60, 8.3, "1 is taken at 0 s"),
        (3_920, 8.6, "full:"),
        (3_920, 7.6, "more is ignored"),
        (5_060, 5.2, "5 s: ask 4,"),
        (5_060, 4.2, "6 are left"),
    ):
        drawing.text(frame.px(NOON + at * MS), frame.py(level), words, "small")
    drawing.text(frame.px(NOON + 2_640 * MS), frame.py(-0.95), "below zero: reserved ahead", "amber small")
    return drawing


def internals() -> Drawing:
    drawing = sheet(
        "The time index",
        "Each permission taken adds 100 ms. While it is in the future, callers wait; a timeout leaves it unchanged.",
        500,
    )
    frame = Frame(84, 98, 632, 330, NOON, NOON + 450 * MS, -220, 520)
    asked = ((0, 1, "0s"), (50, 2, "0s"), (50, 2, "100ms"), (150, 1, "100ms"), (200, 3, "100ms"), (350, 1, "100ms"))
    permits = Permits()
    answers: list[int] = []
    events = [(NOON + at * MS, lambda many=many, wait=wait: answers.append(permits.ask(many, wait))) for at, many, wait in asked]
    line = watch(permits.clock, events, range(frame.begin, frame.end + 1, MS), permits.time_index)
    time_axis(drawing, frame, [(NOON + at * MS, f"{at} ms") for at in range(0, 451, 50)])
    level_axis(drawing, frame, range(-200, 501, 100), "time index, ms")
    between(drawing, frame, line)
    drawing.line(frame.px(NOON), frame.py(0), frame.right, frame.py(450), "soft-line fine dash")
    drawing.polyline(straightened([(frame.px(at), frame.py(level)) for at, level in line]), "blue-line bold")
    internals_notes(drawing, frame, asked, answers)
    return drawing


def between(drawing: Drawing, frame: Frame, line: Sequence[Point]) -> None:
    """The space between the time index and now: green is stored, amber is owed."""
    for x, colour, pick, words in (
        (84, "green", min, "behind now: permissions stored"),
        (338, "amber", max, "ahead of now: reserved, the caller waits"),
    ):
        edge = straightened([(frame.px(at), frame.py(pick(level, (at - NOON) / MS))) for at, level in line])
        drawing.polyline([*edge, (frame.right, frame.py(450)), (frame.x, frame.py(0))], f"{colour} veil", close=True)
        drawing.rect(x, 468, 22, 14, f"{colour} veil", round=3)
        drawing.text(x + 30, 479, words, "soft small")


def internals_notes(drawing: Drawing, frame: Frame, asked: Sequence[Ask], answers: Sequence[int]) -> None:
    """Labels each request with its result; dashed: the time index of a refused request, had it been allowed."""
    places = ((4, -166), (56, -66), (22, 150), (76, 250), (206, 474), (356, 262))
    for (at, permits, timeout), answer, (x, level) in zip(asked, answers, places, strict=True):
        received = answered(permits, timeout, answer)
        colour = "red" if answer < 0 else "amber" if answer else "ink"
        drawing.text(frame.px(NOON + x * MS), frame.py(level), f"{at} ms: {received}", f"{colour} small")
    for at, low, high in ((47, -100, 100), (200, 200, 500)):
        refused = frame.px(NOON + at * MS)
        drawing.line(refused, frame.py(low), refused, frame.py(high), "red-line fine dash")
        drawing.cross(refused, frame.py(high), 3, "red-line fine")
    drawing.text(frame.px(NOON + 310 * MS), frame.py(330), "now", "soft small", "end")


def answered(permits: int, timeout: str, answer: int) -> str:
    """A result of `reserve_permission`, as text."""
    if answer < 0:
        return f"ask {permits}, timeout {timeout}. Refused, nothing changes"
    return f"ask {permits}. Wait {answer / 1e6:g} ms" if answer else f"ask {permits}. Go"
