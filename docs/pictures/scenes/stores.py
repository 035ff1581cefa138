"""Pictures of stores shared by many workers. Every mark and line is a decision of a real store on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

from draw.chart import GAP, arrival_marks, legend
from draw.runs import KEY, SECOND, Mark, Point, Stage, move, watch
from draw.traffic import NOON

from limitkeeper import TokenBucket
from limitkeeper.charts.frame import Frame, level_axis, level_line, time_axis
from limitkeeper.charts.svg import Drawing

from .rules import filled, seconds
from .sheet import kinds, panel, sheet

LIMIT = "5/s burst 10"
WORKERS = 10


def one_store() -> Drawing:
    """Ten workers of two hits a second each: on a store each, and on one store for all."""
    drawing = sheet(
        "Ten workers: ten stores, or one",
        f"Each worker hits twice a second; the limit is {LIMIT}. Total admitted so far.",
        380,
    )
    frame = panel(96, 216, NOON, NOON + 8 * SECOND, 0, 170)
    each, together = (
        admitted([Stage(TokenBucket(LIMIT), NOON) for _ in range(WORKERS)]),
        admitted([Stage(TokenBucket(LIMIT), NOON)]),
    )
    time_axis(drawing, frame, seconds(frame.begin, frame.end))
    level_axis(drawing, frame, (0, 50, 100, 150), "admitted")
    level_line(drawing, frame, each, "red")
    level_line(drawing, frame, together, "blue")
    drawing.line(frame.px(NOON), frame.py(10), frame.px(frame.end), frame.py(10 + 5 * 8), "soft-line fine dash")
    drawing.text(
        frame.px(NOON + 5_200_000), frame.py(132), f"ten stores: {each[-1][1]:.0f} in 8 s, none refused", "red small", "end"
    )
    drawing.text(frame.px(NOON + 7_900_000), frame.py(24), f"one store: {together[-1][1]:.0f} in 8 s", "blue small", "end")
    drawing.line(56, 356, 76, 356, "soft-line fine dash")
    drawing.text(84, 360, "what the limit allows: burst + rate × T", "soft small")
    return drawing


def admitted(stages: Sequence[Stage]) -> list[Point]:
    """The total admitted at each hit; the workers take turns on the stores."""
    line, so_far = [(NOON, 0.0)], 0
    for turn in range(16 * WORKERS):
        stage, moment = stages[turn % len(stages)], NOON + turn * SECOND // (2 * WORKERS)
        move(stage.clock, moment)
        so_far += bool(stage.limiter.hit(KEY))
        line.append((moment, float(so_far)))
    return [*line, (NOON + 8 * SECOND, float(so_far))]


#: When each of three nodes is asked: a steady one, one with a burst, one that comes late.
NODES = {
    "node 1": [NOON + 200_000 + i * SECOND // 2 for i in range(15)],
    "node 2": [*[NOON + 2 * SECOND] * 8, *(NOON + 5 * SECOND + i * SECOND // 5 for i in range(10))],
    "node 3": [NOON + 3 * SECOND + i * SECOND // 4 for i in range(16)],
}


def central() -> Drawing:
    """Three nodes on one store: one bucket for all of them."""
    drawing = sheet(
        "Shared state: three nodes, one bucket",
        f'TokenBucket("{LIMIT}") in one store. All nodes share the bucket; each decision is one round trip.',
        510,
    )
    frame = panel(92, 130, NOON, NOON + 8 * SECOND, 0, 11)
    stage = Stage(TokenBucket(LIMIT), NOON)
    marks: dict[str, list[Mark]] = {name: [] for name in NODES}
    asked = sorted((moment, name) for name, moments in NODES.items() for moment in moments)
    events = [(moment, lambda name=name: marks[name].append(stage.arrive())) for moment, name in asked]
    step = (frame.end - frame.begin) // round(frame.width)
    line = watch(stage.clock, events, range(frame.begin, frame.end + 1, step), lambda: 10 - filled(stage.peek()))
    level_axis(drawing, frame, (0, 5, 10), "tokens in the store")
    level_line(drawing, frame, line)
    for i, (name, some) in enumerate(marks.items()):
        lane(drawing, Frame(frame.x, 252 + i * 72, frame.width, 64, frame.begin, frame.end), name, some)
    time_axis(
        drawing, Frame(frame.x, 252, frame.width, 200, frame.begin, frame.end), seconds(frame.begin, frame.end), top=frame.y
    )
    every = [mark for some in marks.values() for mark in some]
    legend(drawing, frame.x, 496, kinds(every))
    said = f"{sum(mark.start is not None for mark in every)} of {len(every)} admitted in total"
    drawing.text(frame.right, 496, said, "soft small", "end")
    return drawing


def lane(drawing: Drawing, frame: Frame, name: str, marks: Sequence[Mark]) -> None:
    """The arrivals of one node, on one line."""
    base = frame.y + 16 + 4 * GAP
    drawing.line(frame.x, base, frame.right, base, "grid-line thin")
    drawing.text(frame.x + 4, frame.y + 16, name, "strong soft small")
    arrival_marks(drawing, frame, base, marks, stack=4)
