"""Sticky sharding: the owners of slots, and the slots that a new shard takes over. Drawn from the real table."""

from __future__ import annotations

from limitkeeper.charts.svg import Drawing
from limitkeeper.stores.sharded.slots import SLOTS, homes

from .sheet import LEFT, RIGHT, sheet

COLOURS = {"a": "blue", "b": "green", "c": "amber", "d": "violet", "new": "red"}
COLUMNS, ROWS = 48, 5
SHOWN = COLUMNS * ROWS


def sharding() -> Drawing:
    """The first slots of the table with four shards, and with five: only the slots of the fifth have moved."""
    before, after = (homes(tuple((name, 1.0) for name in names)) for names in ("abcd", ("a", "b", "c", "d", "new")))
    moved = sum(old != now for old, now in zip(before, after, strict=True))
    drawing = sheet(
        "A fifth shard moves a fifth of the keys",
        f"Each slot has one home shard. {moved:,} of {SLOTS:,} slots move ({moved / SLOTS:.1%}), all of them to the new shard.",
        396,
    )
    block(drawing, 100, "four shards", before, before)
    block(drawing, 230, "five shards: moved slots are highlighted", after, before)
    shares(drawing, 356, after)
    return drawing


def block(drawing: Drawing, y: float, words: str, table: tuple[str, ...], before: tuple[str, ...]) -> None:
    """Some slots as cells in the colour of their home; pale where nothing changed."""
    size = (RIGHT - LEFT) / COLUMNS
    drawing.text(LEFT, y - 10, words, "strong small")
    for slot in range(SHOWN):
        row, column = divmod(slot, COLUMNS)
        pale = "" if table[slot] != before[slot] else " veil"
        drawing.rect(LEFT + column * size, y + row * 18, size - 2, 16, COLOURS[table[slot]] + pale, round=2)


def shares(drawing: Drawing, y: float, table: tuple[str, ...]) -> None:
    """The share of each shard."""
    x = float(LEFT)
    for name, colour in COLOURS.items():
        drawing.rect(x, y - 10, 12, 12, colour if name == "new" else f"{colour} veil", round=2)
        drawing.text(x + 18, y, f"{name}: {table.count(name) / SLOTS:.1%}", "soft small")
        x += 104
    drawing.text(RIGHT, y, f"{SHOWN} of {SLOTS:,} slots", "soft small", "end")
