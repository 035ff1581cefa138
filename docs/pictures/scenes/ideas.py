"""Every algorithm under the same burst, and a reservation from its estimate to its settlement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from draw.chart import legend, mark
from draw.lanes import GROUPS, draw_lane, heights, outcome
from draw.runs import KEY, SECOND, Stage, watch
from draw.traffic import NOON, PATTERNS, Pattern, Run, runs

from limitkeeper import Reservation, TokenBucket
from limitkeeper.charts.frame import Frame, level_axis, level_line, time_axis
from limitkeeper.charts.svg import Drawing

from .sheet import panel, sheet


def comparison() -> Drawing:
    """20 at once through every algorithm; those with equal decisions share a lane."""
    pattern = next(pattern for pattern in PATTERNS if pattern.name == "20 at once")
    drawing = sheet(
        "20 at once, through every algorithm",
        "All 20 arrive at 0 s. Above a line: started. Below: refused. Equal results share a line.",
    )
    found = runs(pattern)
    y = 88.0
    for waits, words in GROUPS:
        drawing.text(24, y + 8, words, "strong soft small")
        y += 24
        for group in alike(run for run in found if run.lane.waits == waits):
            y = shared_lane(drawing, y, pattern, group) + 12
        y += 6
    axis = Frame(282, 88, 440, y - 94, pattern.begin, pattern.end)
    time_axis(drawing, axis, pattern.ticks(), top=axis.bottom)
    legend(drawing, 24, y + 44, ("admitted", "delayed", "refused"))
    drawing.height = round(y) + 64
    return drawing


def alike(found: Iterable[Run]) -> list[list[Run]]:
    """Runs with the same marks, together."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in found:
        groups.setdefault(tuple((mark.at, mark.start) for mark in run.marks), []).append(run)
    return list(groups.values())


def shared_lane(drawing: Drawing, y: float, pattern: Pattern, group: list[Run]) -> float:
    """Draws a lane with the names of all its limits; returns its lower end."""
    parts = outcome(group[0].figures)
    lines = [(str(run.lane.limit), "small") for run in group]
    lines += [(" · ".join(part), "soft small") for part in (parts[:2], parts[2:]) if part]
    frame = Frame(282, y, 440, max(sum(heights(group[0])), 16 * len(lines)), pattern.begin, pattern.end)
    draw_lane(drawing, frame, pattern, replace(group[0], edges=()))
    for i, (words, style) in enumerate(lines):
        drawing.text(24, y + 12 + 16 * i, words, style)
    return frame.bottom


def reservation() -> Drawing:
    """Charges an estimate and settles the actual cost; a failed call gives all of it back."""
    drawing = sheet(
        "A reservation: charge an estimate, settle the actual cost",
        'TokenBucket("100/s burst 1000"). Unused cost is given back; if the call fails, all of it is.',
        436,
    )
    frame = panel(96, 216, NOON, NOON + 7 * SECOND, -150, 1050)
    stage = Stage(TokenBucket("100/s burst 1000"), NOON)
    made: list[Reservation] = []
    events = (
        (NOON + SECOND, lambda: made.append(stage.limiter.reserve(KEY, cost=500))),
        (NOON + 3 * SECOND, lambda: made[0].settle(425)),
        (NOON + 3_500_000, lambda: made.append(stage.limiter.reserve(KEY, cost=900))),
        (NOON + 5 * SECOND, lambda: made[1].cancel()),
    )
    moments = range(frame.begin, frame.end + 1, SECOND // 100)
    line = watch(stage.clock, events, moments, lambda: 1000 - stage.peek().reset_after * 100)
    time_axis(
        drawing, Frame(frame.x, 96, frame.width, 282, frame.begin, frame.end), [(NOON + s * SECOND, f"{s} s") for s in range(8)]
    )
    level_axis(drawing, frame, (0, 500, 1000), "tokens")
    level_line(drawing, frame, line, floor=0)
    starts = [at + round(made[i].wait * SECOND) for i, at in enumerate((NOON + SECOND, NOON + 3_500_000))]
    reservation_notes(drawing, frame)
    calls(drawing, frame, starts)
    return drawing


def reservation_notes(drawing: Drawing, frame: Frame) -> None:
    """Labels the calls to the limiter."""
    for moment, level, code, words in (
        (1_060_000, 930, "reserve(cost=500)", "the estimate is charged"),
        (1_900_000, 390, "settle(425)", "75 are given back"),
        (3_560_000, 620, "reserve(cost=900)", "75 short: waits"),
        (5_080_000, 560, "an exception: cancel()", "all 900 are given back"),
    ):
        drawing.text(frame.px(NOON + moment), frame.py(level), code, "code")
        drawing.text(frame.px(NOON + moment), frame.py(level) + 17, words, "soft small")
    drawing.line(frame.px(NOON + 2_600_000), frame.py(470), frame.px(NOON + 2_950_000), frame.py(680), "soft-line thin")


def calls(drawing: Drawing, frame: Frame, starts: list[int]) -> None:
    """The two calls as bars: work, and waiting before it."""
    for y, asked, start, end, words in (
        (328, NOON + SECOND, starts[0], NOON + 3 * SECOND, "first call"),
        (352, NOON + 3_500_000, starts[1], NOON + 5 * SECOND, "second call"),
    ):
        if start > asked:
            drawing.line(frame.px(asked), y + 7, frame.px(start) - 2, y + 7, "amber-line bold")
            drawing.text(
                (frame.px(asked) + frame.px(start)) / 2, y + 1, f"{(start - asked) / SECOND:g} s", "amber small", "middle"
            )
        drawing.rect(frame.px(start), y, frame.px(end) - frame.px(start), 14, "green veil", round=4)
        drawing.text(frame.px(asked) - 8, y + 11, words, "soft small", "end")
    mark(drawing, frame.px(NOON + 5 * SECOND) + 10, 359, "refused")
    drawing.text(frame.px(NOON + 5 * SECOND) + 22, 363, "fails", "soft small")
    drawing.line(58, 416, 78, 416, "amber-line bold")
    drawing.text(84, 420, "waits", "soft small")
    drawing.rect(190, 409, 22, 14, "green veil", round=4)
    drawing.text(218, 420, "works", "soft small")
