"""One lane: the name of a limit, its results, and its marks along the time axis."""

from __future__ import annotations

from collections import Counter

from limitkeeper.charts.frame import Frame
from limitkeeper.charts.svg import Drawing

from .chart import GAP, arrival_marks
from .runs import SECOND, Figures
from .traffic import Pattern, Run

STACK = 5
GROUPS = (
    (False, "hit: start now or be refused"),
    (True, "reserve: start now or later"),
)


def span(duration: int) -> str:
    """A wait, in seconds."""
    return f"{duration / SECOND:g} s"


def window_name(window: int) -> str:
    return "1 s" if window == SECOND else f"{window // SECOND} s"


def outcome(figures: Figures) -> list[str]:
    """The results as short phrases."""
    parts = [f"{figures.at_once} at once"]
    if figures.delayed:
        parts.append(f"{figures.delayed} delayed, up to {span(figures.longest_wait)}")
    if figures.refused:
        parts.append(f"{figures.refused} refused")
    return parts


def heights(run: Run) -> tuple[float, float]:
    """Height of the marks of a run above and below their base line, in pixels."""
    at_once = Counter(mark.at for mark in run.marks if mark.start == mark.at)
    delayed = Counter(mark.start for mark in run.marks if mark.delayed)
    refused = Counter(mark.at for mark in run.marks if mark.start is None)
    above = max([*at_once.values(), *delayed.values(), 1])
    below = max(refused.values(), default=0)
    return 5 + GAP * min(above, STACK), 5 + GAP * min(below, STACK)


def draw_lane(drawing: Drawing, frame: Frame, pattern: Pattern, run: Run) -> None:
    """The marks of a run on their base line; window boundaries are dashed."""
    base = frame.y + heights(run)[0]
    for moment, _ in pattern.ticks():
        drawing.line(frame.px(moment), frame.y, frame.px(moment), frame.bottom, "grid-line thin")
    for edge in run.edges:
        if frame.begin <= edge <= frame.end:
            drawing.line(frame.px(edge), frame.y, frame.px(edge), frame.bottom, "violet-line thin dash")
    drawing.line(frame.x, base, frame.right, base, "grid-line thin")
    arrival_marks(drawing, frame, base, run.marks, STACK)
