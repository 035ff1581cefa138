"""The layout of a shared file, with real sizes and the words of a real file, and the steps of a change."""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise

from draw.runs import SECOND
from draw.traffic import NOON

from limitkeeper import Limiter, SharedStore, TokenBucket
from limitkeeper.charts.svg import Drawing
from limitkeeper.stores.shared import layout
from limitkeeper.stores.shared.layout import Regions, regions
from limitkeeper.testing import ManualClock

from .sheet import LEFT, RIGHT, sheet

KEYS, ENTRIES = 100_000, 256
#: Name, width in the picture, what it is, colour.
PARTS = (
    ("header", 88, ("lock", "counters"), "red"),
    ("journal", 92, ("word,", "old value"), "amber"),
    ("directory", 86, ("limits and", "rates"), "violet"),
    ("heads", 76, ("hash", "chains"), "soft"),
    ("cells", 128, ("64 bytes a key:", "state, short key"), "blue"),
    ("blocks", 86, ("longer", "keys"), "soft"),
    ("logs", 110, ("rings of", "sliding logs"), "green"),
)
STEPS = (
    ("1  lock", ("free → this process,", "ID and start time"), ("a dead owner's lock", "is taken over"), "red"),
    ("2  journal", ("journal ← word and", "its old value"), ("nothing has changed:", "nothing to undo"), "amber"),
    ("3  change", ("the words of the cell,", "of several limits"), ("old values are restored", "from the journal"), "blue"),
    ("4  commit", ("journal's length ← 0,", "lock → free"), ("the change is complete", "and stays"), "green"),
)


def shared_file() -> Drawing:
    drawing = sheet(
        "A shared file and a change in it",
        f"SharedStore(path): capacity {KEYS:,} keys. Sparse: unused parts take no space on the disk.",
        500,
    )
    plan = regions(KEYS, ENTRIES)
    file_bar(drawing, 92, plan)
    cell(drawing, 222, plan)
    change(drawing, 344)
    return drawing


def sizes(plan: Regions) -> list[int]:
    """Bytes of each part, in file order."""
    starts = (0, plan.journal, plan.directory, plan.heads, plan.cells, plan.blocks, plan.logs, plan.end)
    return [(after - before) * 8 for before, after in pairwise(starts)]


def size_text(size: int) -> str:
    if size < 1 << 20:
        return f"{size >> 10} KiB"
    return f"{size / (1 << 20):.0f} MiB" if size >= 10 << 20 else f"{size / (1 << 20):.1f} MiB"


def file_bar(drawing: Drawing, y: float, plan: Regions) -> None:
    x = float(LEFT)
    for (name, width, words, colour), size in zip(PARTS, sizes(plan), strict=True):
        drawing.rect(x, y, width - 3, 56, f"{colour} veil", round=4)
        drawing.text(x + (width - 3) / 2, y + 17, name, "strong small", "middle")
        for i, line in enumerate(words):
            drawing.text(x + (width - 3) / 2, y + 33 + 14 * i, line, "soft small", "middle")
        drawing.text(x + (width - 3) / 2, y + 72, size_text(size), "soft small", "middle")
        x += width
    drawing.text(RIGHT, y - 10, f"{size_text(plan.end * 8)} in total, not to scale", "soft small", "end")
    before = LEFT + sum(width for _, width, *_ in PARTS[:4])
    for side, end in ((before, LEFT), (before + PARTS[4][1] - 3, RIGHT)):
        drawing.line(side, y + 80, end, y + 126, "soft-line thin dash")


def words_of_a_cell(plan: Regions) -> tuple[list[int], bytes]:
    """The eight words of the only cell of a file: "user:42" after a cost of 3 at noon, of 5/s burst 10."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "limits")
        with SharedStore(path, clock=ManualClock(NOON / SECOND)) as store:
            Limiter(TokenBucket("5/s burst 10"), store=store).hit("user:42", cost=3)
            with open(path, "rb") as file:
                file.seek(plan.cells * 8)
                found = file.read(layout.CELL * 8)
    return list(memoryview(found).cast("q")), found[layout.KEY * 8 :]


def cell(drawing: Drawing, y: float, plan: Regions) -> None:
    words, key = words_of_a_cell(plan)
    state = words[layout.STATE : layout.STATE + 3]
    x = float(LEFT)
    shown = (
        ("hash", "keyed", 84, "blue"),
        ("state", f"{state[0]}", 136, "blue"),
        ("state", f"{state[1]}", 90, "blue"),
        ("state", f"{state[2]}", 52, "blue"),
        ("next", "chain, size", 84, "blue"),
        ("tag", "limit, rate", 84, "blue"),
        ("key", key.rstrip(b"\0").decode(), 136, "blue"),
    )
    for name, value, width, colour in shown:
        drawing.rect(x, y, width - 3, 42, f"{colour} wash", round=4)
        drawing.text(x + (width - 3) / 2, y + 16, name, "soft small", "middle")
        drawing.text(x + (width - 3) / 2, y + 33, value, "code" if value[0].isdigit() or name == "key" else "small", "middle")
        x += width
    drawing.text(
        LEFT,
        y + 62,
        'a cell, after hit("user:42", cost=3) at noon: the moment in µs, and what is missing then, 3 × 200 000',
        "soft small",
    )


def change(drawing: Drawing, y: float) -> None:
    drawing.text(LEFT, y - 14, "a change, and the recovery if the process is killed at that step", "strong small")
    width = (RIGHT - LEFT) / len(STEPS)
    for i, (name, does, dies, colour) in enumerate(STEPS):
        x = LEFT + i * width
        drawing.rect(x, y, width - 14, 62, f"{colour} veil", round=6)
        drawing.text(x + 10, y + 19, name, "strong")
        for j, line in enumerate(does):
            drawing.text(x + 10, y + 37 + 15 * j, line, "small")
        if i + 1 < len(STEPS):
            drawing.text(x + width - 7, y + 36, "→", "soft", "middle")
        drawing.cross(x + 14, y + 86, 4, "red-line bold")
        for j, line in enumerate(dies):
            drawing.text(x + 26, y + 90 + 16 * j, line, "soft small")
    drawing.cross(LEFT + 4, y + 135, 3, "red-line bold")
    drawing.text(LEFT + 14, y + 139, "kill -9", "soft small")
