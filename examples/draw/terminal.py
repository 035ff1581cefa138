"""Terminal output: a table of figures, and a line of marks per lane, within 100 columns.

Colours are used on a terminal if NO_COLOR is unset and TERM is not "dumb". ASCII letters replace marks that the encoding lacks.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TextIO

from .lanes import GROUPS, span, window_name
from .runs import Mark
from .traffic import Pattern, Run

NAME = 36  # columns for a lane's name
WIDE = 61  # columns for its time line: 60 steps
CODES = {"green": "32", "amber": "33", "red": "31", "violet": "35", "soft": "2", "strong": "1"}


@dataclass(frozen=True, slots=True)
class Look:
    """The marks and colours for a terminal."""

    colours: bool = False
    admitted: str = "●"
    delayed: str = "○"
    refused: str = "✕"
    arrived: str = "▼"
    trail: str = "─"
    edge: str = "┊"
    rule: str = "─"
    none: str = "–"

    def paint(self, words: str, colour: str) -> str:
        return f"\x1b[{CODES[colour]}m{words}\x1b[0m" if self.colours and words.strip() else words


PLAIN = Look(admitted="*", delayed="o", refused="x", arrived="v", trail="-", edge="|", rule="-", none="-")


def look_of(stream: TextIO) -> Look:
    """The look that a stream supports."""
    wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    try:
        "●○✕▼─┊–".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return replace(PLAIN, colours=wanted)
    return Look(wanted)


def table(pattern: Pattern, runs: Iterable[Run], look: Look) -> Iterator[str]:
    """The figures of every lane."""
    heads = ("arrived", "at once", "delayed", "refused", "longest wait", f"most in {window_name(pattern.window)}")
    found = list(runs)
    for waits, words in GROUPS:
        titles = "".join(f"{head:>{len(head) + 2}}" for head in heads)
        yield look.paint(f"{words:<{NAME}}{titles}", "soft")
        for run in (run for run in found if run.lane.waits == waits):
            f = run.figures
            wait = span(f.longest_wait) if f.longest_wait else look.none
            cells = (str(f.arrived), str(f.at_once), str(f.delayed), str(f.refused), wait, str(f.most_in_window))
            row = "".join(f"{cell:>{len(head) + 2}}" for cell, head in zip(cells, heads, strict=True))
            yield f"{run.lane.limit!s:<{NAME}}{row}"


def picture(pattern: Pattern, runs: Iterable[Run], look: Look) -> Iterator[str]:
    """A time line per lane: starts, and refusals below them."""
    arrived = Counter(pattern.arrivals)
    yield " " * NAME + look.paint(axis(pattern), "soft")
    yield f"{'arrivals':<{NAME}}" + row(
        pattern, {moment: (look.arrived, many, "strong") for moment, many in arrived.items()}, (), look
    )
    found = list(runs)
    for waits, words in GROUPS:
        yield look.paint(words, "soft")
        for run in (run for run in found if run.lane.waits == waits):
            yield f"{run.lane.limit!s:<{NAME}}" + row(
                pattern, starts(run.marks, look), run.edges, look, trails(pattern, run.marks)
            )
            refused = Counter(mark.at for mark in run.marks if mark.start is None)
            if refused:
                below = {moment: (look.refused, many, "red") for moment, many in refused.items()}
                yield " " * NAME + row(pattern, below, (), look)


def starts(marks: Iterable[Mark], look: Look) -> dict[int, tuple[str, int, str]]:
    """The starts at each time: mark, count, colour."""
    found: dict[int, tuple[str, int, str]] = {}
    for mark in marks:
        if mark.start is not None:
            sign, colour = (look.delayed, "amber") if mark.delayed else (look.admitted, "green")
            found[mark.start] = (sign, found.get(mark.start, (sign, 0, colour))[1] + 1, colour)
    return found


def column(pattern: Pattern, moment: int) -> int:
    return round((moment - pattern.begin) / (pattern.end - pattern.begin) * (WIDE - 1))


def trails(pattern: Pattern, marks: Iterable[Mark]) -> set[int]:
    """The columns in which a request waits."""
    return {
        x
        for mark in marks
        if mark.start is not None and mark.delayed
        for x in range(column(pattern, mark.at), column(pattern, mark.start))
    }


def row(
    pattern: Pattern,
    signs: dict[int, tuple[str, int, str]],
    edges: Iterable[int],
    look: Look,
    waiting: Iterable[int] = (),
) -> str:
    """One line: signs with their counts, and boundaries, at their times; overlapping signs move to the left."""
    cells = [" "] * (WIDE + 4)
    for x in waiting:
        cells[x] = look.paint(look.trail, "amber")
    shown = {edge: (look.edge, 1, "violet") for edge in edges if pattern.begin <= edge <= pattern.end} | signs
    free = len(cells)
    for moment in sorted(shown, reverse=True):
        sign, many, colour = shown[moment]
        words = sign if many == 1 else f"{sign}{many}"
        free = max(0, min(column(pattern, moment), free - len(words)))
        cells[free : free + len(words)] = [look.paint(letter, colour) for letter in words]
    return "".join(cells).rstrip()


def axis(pattern: Pattern) -> str:
    """The time labels, each starting at its column."""
    line = ""
    for moment, label in pattern.ticks():
        x = column(pattern, moment)
        if x >= len(line) + (1 if line else 0) and x + len(label) <= WIDE + 2:
            line = line.ljust(x) + label
    return line


def legend(look: Look) -> str:
    """The legend of the marks."""
    return "   ".join(
        (
            f"{look.paint(look.admitted, 'green')} admitted at once ({look.paint(look.admitted + '10', 'green')}: ten of them)",
            f"{look.paint(look.trail + look.delayed, 'amber')} delayed until its start",
            f"{look.paint(look.refused, 'red')} refused",
            f"{look.paint(look.edge, 'violet')} window boundary",
        )
    )
