"""A chart of lines over one axis, with marked positions (a limit, an objective) and a legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from .frame import Frame, level_axis, straightened, time_axis
from .svg import Drawing

WIDTH, HEIGHT = 640.0, 300.0  # with one row of the legend
LEGEND_X, LEGEND_ROW = 64.0, 18.0


@dataclass(frozen=True, slots=True)
class Line:
    """A named line through points. `dots` draws the points themselves instead: measured, not computed."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = "blue"
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A named position: a dashed line across the chart, vertical unless `level`."""

    name: str
    at: float
    colour: str = "red"
    level: bool = False


def ticks(high: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to at least `high`, at most `most` steps of 1, 2 or 5 × a power of ten."""
    size = 10.0 ** floor(log10(high / most))
    step = next(size * factor for factor in (1, 2, 5, 10) if high / (size * factor) <= most)
    count = 1
    while count * step < high * (1 - 1e-9):
        count += 1
    return [round(step * number, 9) for number in range(count + 1)]


def line_chart(title: str, x_name: str, y_name: str, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> Drawing:
    """Draws the lines from (0, 0) to the largest value; both axes are labelled with round numbers."""
    high_x = max([x for line in lines for x, _ in line.points] + [mark.at for mark in marks if not mark.level])
    high_y = max([y for line in lines for _, y in line.points] + [mark.at for mark in marks if mark.level])
    xs, ys = ticks(high_x or 1.0), ticks(high_y or 1.0)
    about = "; ".join(f"{line.name}: {len(line.points)} points" for line in lines)
    drawing = Drawing(WIDTH, HEIGHT, title, about)
    frame = Frame(64, 46, WIDTH - 96, HEIGHT - 104, 0.0, xs[-1], 0.0, ys[-1])
    time_axis(drawing, frame, [(x, f"{x:g}") for x in xs])
    level_axis(drawing, frame, ys, "")
    drawing.text(8, 20, y_name, "soft small")
    drawing.text(frame.right, frame.bottom + 34, x_name, "soft small", "end")
    for mark in marks:
        draw_mark(drawing, frame, mark)
    for line in lines:
        places = [(frame.px(x), frame.py(y)) for x, y in line.points]
        if line.dots:
            for x, y in places:
                drawing.circle(x, y, 3.4, line.colour)
        else:
            drawing.polyline(straightened(places) if len(places) > 2 else places, f"{line.colour}-line bold")
    draw_legend(drawing, lines)
    return drawing


def draw_mark(drawing: Drawing, frame: Frame, mark: Mark) -> None:
    if mark.level:
        y = frame.py(mark.at)
        drawing.line(frame.x, y, frame.right, y, f"{mark.colour}-line fine dash")
        drawing.text(frame.x + 6, y - 5, mark.name, f"{mark.colour} small")
    else:
        x = frame.px(mark.at)
        drawing.line(x, frame.y, x, frame.bottom, f"{mark.colour}-line fine dash")
        drawing.text(x, frame.y - 6, mark.name, f"{mark.colour} small", "middle")


def legend_places(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """The left end of each name, from left to right; a name that would run over the edge begins a row."""
    x, y, found = LEGEND_X, HEIGHT, []
    for line in lines:
        width = 40 + 6.4 * len(line.name)
        if x > LEGEND_X and x + width > WIDTH:
            x, y = LEGEND_X, y + LEGEND_ROW
        found.append((x, y))
        x += width
    return found


def draw_legend(drawing: Drawing, lines: Sequence[Line]) -> None:
    for line, (x, y) in zip(lines, legend_places(lines), strict=True):
        drawing.rect(x, y - 14, 10, 4, line.colour)
        drawing.text(x + 16, y - 9, line.name, "soft small")
        drawing.height = y
