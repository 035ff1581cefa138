"""Pictures of outgoing calls: 25 calls at once under five rules of "10/s", and the tokens of LLM calls from estimate to usage."""

from __future__ import annotations

from bisect import bisect_right

from draw.runs import KEY, SECOND, move
from draw.traffic import NOON

from limitkeeper import Limiter, MemoryStore
from limitkeeper.charts.frame import Frame, level_axis, level_line, time_axis
from limitkeeper.charts.svg import Drawing
from limitkeeper.testing import ManualClock

from .sheet import panel, sheet

RULES = (
    ("token bucket 10/s burst 1", "one every 100 ms"),
    ("leaky bucket queue 10/s", "the same, as a queue"),
    ("sliding window log 10/s", "what a bare 10/s means here"),
    ("token bucket 10/s burst 10", "10 at once, then 10 a second"),
    ("fixed window 10/s", "10 in each second of the clock"),
)
#: The calls come 700 ms into a second of the clock.
ARRIVED = NOON + 700_000


def starts_of(rule: str, calls: int = 25) -> list[int]:
    """When each of so many calls that come at once may start."""
    clock = ManualClock(NOON / 1e6)
    move(clock, ARRIVED)
    limiter = Limiter(rule, MemoryStore(clock=clock))
    return [ARRIVED + round(limiter.reserve(KEY).wait * 1e6) for _ in range(calls)]


def most_in_a_second(starts: list[int]) -> int:
    return max(bisect_right(starts, start + SECOND - 1) - i for i, start in enumerate(starts))


def rules_of_a_client() -> Drawing:
    """The starts of 25 calls under every rule, and the most in any one second."""
    drawing = sheet(
        "25 calls at once, an API that takes 10 a second",
        "Each line is a start. Right: the most starts in any one second, wherever that second begins.",
    )
    y = 84.0
    for rule, words in RULES:
        starts = starts_of(rule)
        frame = Frame(252, y, 400, 34, ARRIVED - 100_000, ARRIVED + 2_500_000)
        drawing.text(24, y + 14, rule, "small strong")
        drawing.text(24, y + 30, words, "soft small")
        drawing.line(frame.x, frame.bottom, frame.right, frame.bottom, "grid-line thin")
        for start in sorted(set(starts)):
            height = 8 + 2.2 * starts.count(start)
            drawing.line(frame.px(start), frame.bottom, frame.px(start), frame.bottom - height, "green-line bold")
        drawing.text(690, y + 26, str(most_in_a_second(starts)), "big strong", "end")
        y += 50
    axis = Frame(252, 84, 400, y - 96, ARRIVED - 100_000, ARRIVED + 2_500_000)
    time_axis(drawing, axis, [(ARRIVED + i * SECOND // 2, f"{i / 2:g} s") for i in range(6)], top=axis.bottom)
    drawing.height = round(y) + 24
    return drawing


def token_settlement() -> Drawing:
    """The tokens that are left of a minute while calls reserve their estimate and settle their usage."""
    drawing = sheet(
        "Tokens per minute: reserve an estimate, settle the usage",
        'TokenBucket("6000/min"). Each call reserves 2000 tokens, and its response says 700, 1100 or 400.',
        380,
    )
    frame = panel(92, 220, NOON, NOON + 14 * SECOND, 0, 6000)
    clock = ManualClock(NOON / 1e6)
    limiter = Limiter("6000/min", MemoryStore(clock=clock))
    line: list[tuple[int, float]] = []
    open_calls = {}
    for moment in range(NOON, frame.end + 1, SECOND // 20):
        move(clock, moment)
        line.append((moment, limiter.peek(KEY).remaining))
        step = (moment - NOON) / SECOND
        if step in (1, 2, 6):
            open_calls[step] = limiter.reserve(KEY, cost=2000)
        if step in (4, 5, 10):
            begun, used = {4: (1, 700), 5: (2, 1100), 10: (6, 400)}[int(step)]
            open_calls[begun].settle(used)
        line.append((moment, limiter.peek(KEY).remaining))
    level_axis(drawing, frame, (0, 2000, 4000, 6000), "tokens left")
    time_axis(drawing, frame, [(NOON + i * SECOND, f"{i} s") for i in range(0, 15, 2)])
    level_line(drawing, frame, line)
    for at, words in ((1, "reserve"), (4, "700 used"), (6, "reserve"), (10, "400 used")):
        drawing.text(frame.px(NOON + at * SECOND), 348, words, "soft small", "middle")
    return drawing
