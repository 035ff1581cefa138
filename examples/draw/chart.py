"""Parts of the pictures: arrivals as marks, and their legend.

Marks. Filled circle: admitted at once. Ring: delayed, drawn where it starts, with a trail from its arrival. Cross: refused.
Marks at the same time are stacked; bursts that would overlap are drawn back to back, so that both are visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from limitkeeper.charts.frame import Frame
from limitkeeper.charts.svg import Drawing

from .runs import Mark

GAP = 7.4  # pixels from mark to mark
RADIUS = 2.9


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
