"""Parts of the pictures: a frame of time and level, a level line, arrivals as marks, a legend.

Marks. Filled circle: admitted at once. Ring: delayed, drawn where it starts, with a trail from its arrival. Cross: refused.
Marks at the same time are stacked; bursts that would overlap are drawn back to back, so that both are visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .runs import Mark, Point
from .svg import Drawing

GAP = 7.4  # pixels from mark to mark
RADIUS = 2.9


@dataclass(frozen=True, slots=True)
class Frame:
    """A rectangle of the drawing, and the range of time and level that it shows."""

    x: float
    y: float
    width: float
    height: float
    begin: int
    end: int
    low: float = 0.0
    high: float = 1.0

    def px(self, moment: float) -> float:
        return self.x + (moment - self.begin) / (self.end - self.begin) * self.width

    def py(self, level: float) -> float:
        return self.y + self.height - (level - self.low) / (self.high - self.low) * self.height

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def right(self) -> float:
        return self.x + self.width


def time_axis(drawing: Drawing, frame: Frame, ticks: Iterable[tuple[int, str]], top: float | None = None) -> None:
    """Labels under the frame, with a hair line up to `top`."""
    for moment, label in ticks:
        x = frame.px(moment)
        drawing.line(x, frame.y if top is None else top, x, frame.bottom + 4, "grid-line thin")
        drawing.text(x, frame.bottom + 18, label, "soft small", "middle")


def level_axis(drawing: Drawing, frame: Frame, ticks: Iterable[float], name: str) -> None:
    """Labels at the left of the frame, and what is measured above them."""
    for level in ticks:
        y = frame.py(level)
        drawing.line(frame.x, y, frame.right, y, "grid-line thin")
        drawing.text(frame.x - 8, y + 4, f"{level:g}".replace("-", "−"), "soft small", "end")
    drawing.text(frame.x - 8, frame.y - 10, name, "soft small")


def level_line(drawing: Drawing, frame: Frame, points: Sequence[Point], colour: str = "blue", floor: float | None = None) -> None:
    """The level over time, with a wash below it down to `floor`."""
    line = straightened([(frame.px(moment), frame.py(level)) for moment, level in points])
    base = frame.py(frame.low if floor is None else floor)
    drawing.polyline([(line[0][0], base), *line, (line[-1][0], base)], f"{colour} wash", close=True)
    drawing.polyline(line, f"{colour}-line bold")


def straightened(points: Sequence[tuple[float, float]], slack: float = 0.05) -> list[tuple[float, float]]:
    """Without the points that lie on the straight line between their neighbours."""
    kept = [points[0]]
    for here, after in pairwise(points[1:]):
        (x0, y0), (x1, y1), (x2, y2) = kept[-1], here, after
        if abs((x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)) > slack * max(abs(x2 - x0), abs(y2 - y0), slack):
            kept.append(here)
    return [*kept, points[-1]]


def arrival_marks(drawing: Drawing, frame: Frame, base: float, marks: Sequence[Mark], stack: int = 5) -> None:
    """Draws starts above the base line and refusals below it."""
    for moment in dict.fromkeys(mark.at for mark in marks if mark.delayed):
        last = max(mark.start for mark in marks if mark.start is not None and mark.at == moment)
        drawing.line(frame.px(moment), base, frame.px(last), base, "amber-line fine")
    at_once = Counter(mark.at for mark in marks if mark.start == mark.at)
    delayed = Counter(mark.start for mark in marks if mark.start is not None and mark.delayed)
    refused = Counter(mark.at for mark in marks if mark.start is None)
    for x, row in stacked(frame, at_once, stack):
        drawing.circle(x, base - 6 - row * GAP, RADIUS, "green")
    for x, row in stacked(frame, delayed, stack):
        drawing.circle(x, base - 6 - row * GAP, RADIUS - 0.3, "amber-line fine")
    for x, row in stacked(frame, refused, stack):
        drawing.cross(x, base + 6 + row * GAP, RADIUS - 0.6, "red-line fine")


def stacked(frame: Frame, counts: Counter[int], stack: int) -> Iterable[tuple[float, int]]:
    """The position of each mark: columns of `stack`, right of its time, or left when the next burst is near."""
    moments = sorted(counts)
    for i, moment in enumerate(moments):
        x, step = frame.px(moment), GAP
        if i + 1 < len(moments) and frame.px(moments[i + 1]) - x < GAP * -(-counts[moment] // stack):
            x, step = x - GAP / 2 - 1, -GAP
        elif i and frame.px(moments[i - 1]) > x - GAP:
            x += GAP / 2 + 1
        for n in range(counts[moment]):
            yield x + n // stack * step, n % stack


LEGEND = (("admitted", "admitted at once"), ("delayed", "delayed: drawn where it starts"), ("refused", "refused"))


def legend(drawing: Drawing, x: float, y: float, kinds: Iterable[str]) -> None:
    """Draws the legend of the marks in one line."""
    for kind, words in LEGEND:
        if kind in kinds:
            mark(drawing, x + 4, y - 4, kind)
            drawing.text(x + 14, y, words, "soft small")
            x += 34 + 6.2 * len(words)


def mark(drawing: Drawing, x: float, y: float, kind: str) -> None:
    """Draws one mark."""
    if kind == "admitted":
        drawing.circle(x, y, RADIUS + 0.4, "green")
    elif kind == "delayed":
        drawing.circle(x, y, RADIUS + 0.1, "amber-line fine")
    else:
        drawing.cross(x, y, RADIUS - 0.2, "red-line fine")
