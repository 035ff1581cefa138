"""A frame of a drawing: a rectangle that shows a range of time (or load) and of a level, with its axes and lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .svg import Drawing


@dataclass(frozen=True, slots=True)
class Frame:
    """A rectangle of the drawing, and the range of time and level that it shows."""

    x: float
    y: float
    width: float
    height: float
    begin: float
    end: float
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


def time_axis(drawing: Drawing, frame: Frame, ticks: Iterable[tuple[float, str]], top: float | None = None) -> None:
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


def level_line(
    drawing: Drawing, frame: Frame, points: Sequence[tuple[float, float]], colour: str = "blue", floor: float | None = None
) -> None:
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
