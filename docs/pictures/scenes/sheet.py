"""The sheet that every picture is drawn on: a card with a title and a caption, and the run that is drawn on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from draw.chart import GAP, arrival_marks, legend
from draw.runs import Mark, Point, Stage, watch

from limitkeeper import Decision, Limit
from limitkeeper.charts.frame import Frame, time_axis
from limitkeeper.charts.svg import Drawing

WIDTH = 760
LEFT, RIGHT = 56, 722


def sheet(title: str, caption: str, height: float = 0) -> Drawing:
    """A card with a title and a one-line caption."""
    drawing = Drawing(WIDTH, height, title, caption)
    drawing.card = True
    drawing.text(24, 34, title, "title")
    drawing.text(24, 56, caption, "soft")
    return drawing


def panel(y: float, height: float, begin: int, end: int, low: float = 0.0, high: float = 1.0) -> Frame:
    """A frame as wide as the sheet."""
    return Frame(LEFT, y, RIGHT - LEFT, height, begin, end, low, high)


def played(
    limit: Limit,
    arrivals: Sequence[int],
    frame: Frame,
    read: Callable[[Decision], float],
    waits: bool = False,
    cost: int = 1,
    also: Iterable[int] = (),
) -> tuple[list[Mark], list[Point]]:
    """The arrivals through a limit, and its level at every pixel and at the given times."""
    stage = Stage(limit, frame.begin)
    marks: list[Mark] = []
    events = [(at, lambda: marks.append(stage.arrive(waits, cost))) for at in arrivals]
    step = (frame.end - frame.begin) // round(frame.width)
    moments = {*range(frame.begin, frame.end, step), frame.end, *also}
    drawn = {at for at in moments if frame.begin <= at <= frame.end}
    return marks, watch(stage.clock, events, drawn, lambda: read(stage.peek()))


def edges(moments: Iterable[int]) -> list[int]:
    """Just before and at each moment: where a level falls in one step."""
    return [at for moment in moments for at in (moment - 1, moment)]


def arrivals_below(
    drawing: Drawing,
    frame: Frame,
    y: float,
    marks: Sequence[Mark],
    ticks: Sequence[tuple[int, str]],
    up: int,
    down: int,
    name: str = "arrivals",
) -> None:
    """The strip of arrivals under a level, its time axis and its legend, which end the sheet.

    `up` and `down` are the most marks that stand above and hang below its line.
    """
    base = y + 18 + up * GAP
    strip = Frame(frame.x, y, frame.width, 30 + (up + down) * GAP, frame.begin, frame.end)
    time_axis(drawing, strip, ticks, top=frame.y)
    drawing.line(strip.x, base, strip.right, base, "grid-line thin")
    drawing.text(strip.x - 8, y + 9, name, "soft small")
    arrival_marks(drawing, strip, base, marks, stack=10)
    legend(drawing, strip.x, strip.bottom + 44, kinds(marks))
    drawing.height = round(strip.bottom) + 64


def kinds(marks: Sequence[Mark]) -> set[str]:
    """The kinds of results that occur."""
    return {"refused" if mark.start is None else "delayed" if mark.delayed else "admitted" for mark in marks}
