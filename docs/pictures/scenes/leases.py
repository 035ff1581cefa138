"""Pictures of leases: the leased tokens of each node and the round trips to a remote store. From real runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from draw.runs import KEY, SECOND, Point, move
from draw.traffic import NOON

from limitkeeper import LeasedStore, Limiter, MemoryStore, TokenBucket
from limitkeeper.charts.frame import Frame, level_axis, level_line, time_axis
from limitkeeper.charts.svg import Drawing
from limitkeeper.testing import ManualClock

from .sheet import LEFT, RIGHT, panel, sheet

MS = 1000


class Counted(MemoryStore):
    """A simulated remote store that records the times of its calls."""

    local = False

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.trips: list[int] = []

    def travel(self, ask: Callable[..., Any], *args: Any) -> Any:
        self.trips.append(self.now_us())
        return ask(*args)

    def decide(self, *args: Any, **options: Any) -> Any:
        return self.travel(super().decide, *args)

    def decide_many(self, *args: Any) -> Any:
        return self.travel(super().decide_many, *args)

    def give_back(self, *args: Any, **options: Any) -> Any:
        return self.travel(super().give_back, *args)


class Node:
    """A node: its leases, their level over time, and the times of its round trips."""

    def __init__(self, far: Counted, limit: TokenBucket, **options: Any) -> None:
        self.far = far
        self.leases = LeasedStore(far, **options)
        self.limiter = Limiter(limit, store=self.leases)
        self.line: list[Point] = []
        self.asked: list[int] = []
        self.waited: list[int] = []
        self.hits = self.passed = 0

    def hit(self) -> None:
        """One request, then one step of the background maintenance."""
        before = len(self.far.trips)
        self.hits += 1
        self.passed += bool(self.limiter.hit(KEY))
        self.waited += self.far.trips[before:]
        self.tend(before)

    def tend(self, before: int | None = None) -> None:
        before = len(self.far.trips) if before is None else before
        self.leases.tend()
        self.asked += self.far.trips[before:]

    def look(self, moment: int) -> None:
        self.line.append((moment, float(self.leases.leased(self.limiter.named[0], KEY))))


def played(nodes: Sequence[Node], clock: ManualClock, rates: Sequence[Callable[[int], int]], end: int, step: int) -> None:
    """Hits every node at its rate (hits per second, for each second) and samples its level before and after."""
    due = [0.0 for _ in nodes]
    for moment in range(NOON, end + 1, step):
        move(clock, moment)
        for i, (node, rate) in enumerate(zip(nodes, rates, strict=True)):
            node.look(moment)
            due[i] += rate((moment - NOON) // SECOND) * step / SECOND
            while due[i] >= 1 - 1e-9:
                due[i] -= 1
                node.hit()
            node.tend()
            node.look(moment)


def regions() -> Drawing:
    """Two regions lease from one remote store: one is busy all the time, the other in the second half."""
    drawing = sheet(
        "Two regions, one limit: leases from a remote store",
        'LeasedStore(far, life="1s") in each region, TokenBucket("100/s burst 100"). Strokes: round trips to the store.',
        516,
    )
    clock = ManualClock(NOON / SECOND)
    far = Counted(clock)
    limit = TokenBucket("100/s burst 100")
    nodes = [Node(far, limit, life="1s") for _ in range(2)]
    end = NOON + 8 * SECOND
    played(nodes, clock, (lambda s: 40, lambda s: 0 if s < 2 else 40), end, 5 * MS)
    time_axis(drawing, Frame(LEFT, 100, RIGHT - LEFT, 348, NOON, end), [(NOON + s * SECOND, f"{s} s") for s in range(9)])
    for i, (node, name) in enumerate(zip(nodes, ("region 1", "region 2"), strict=True)):
        frame = panel(100 + i * 190, 110, NOON, end, 0, 34)
        in_hand(drawing, frame, node, f"{name}: leased tokens")
        said = f"{node.passed} of {node.hits} requests admitted, {len(node.asked)} round trips"
        drawing.text(frame.right, frame.y - 10, said, "soft small", "end")
    key_to_strokes(drawing, 56, 498)
    return drawing


def leases() -> Drawing:
    """One node with a steady demand: batches, and the next before the first runs out."""
    drawing = sheet(
        "Leases: batches from the store, decisions from RAM",
        'LeasedStore(store), TokenBucket("1000/s burst 200"), 400 requests per second. The batch size follows the demand.',
        330,
    )
    clock = ManualClock(NOON / SECOND)
    node = Node(Counted(clock), TokenBucket("1000/s burst 200"))
    end = NOON + 1 * SECOND
    played([node], clock, (lambda s: 400,), end, 2500)
    frame = panel(100, 150, NOON, end, 0, 44)
    ticks = [(NOON + tenth * SECOND // 10, f"{tenth / 10:g} s") for tenth in range(11)]
    time_axis(drawing, Frame(frame.x, 100, frame.width, 166, NOON, end), ticks)
    in_hand(drawing, frame, node, "leased tokens")
    said = f"{node.passed} of {node.hits} requests admitted, {len(node.asked)} round trips"
    drawing.text(frame.right, frame.y - 10, said, "soft small", "end")
    key_to_strokes(drawing, 56, 312)
    return drawing


def in_hand(drawing: Drawing, frame: Frame, node: Node, name: str) -> None:
    """The level of leased tokens, and the round trips below it."""
    level_axis(drawing, frame, (0, 10, 20, 30), name)
    level_line(drawing, frame, node.line)
    for moment in sorted(set(node.asked)):
        x, colour = frame.px(moment), "red" if moment in node.waited else "soft"
        drawing.line(x, frame.bottom + 4, x, frame.bottom + 13, f"{colour}-line fine")


def key_to_strokes(drawing: Drawing, x: float, y: float) -> None:
    drawing.line(x, y - 9, x, y, "red-line fine")
    drawing.text(x + 8, y, "a request waited for this round trip", "soft small")
    drawing.line(x + 210, y - 9, x + 210, y, "soft-line fine")
    drawing.text(x + 218, y, "in the background: no request waited", "soft small")
