"""The result of a round: its tally compared with what the mode promises, and the table of all rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .faults import Fault
from .modes import Mode
from .traffic import KEYS, LIMITS, Tally, between, most

#: On top of a call's budget: turns of loops and threads. How late the machine woke a sleeper comes on top of that.
SLACK = 0.25
LIMIT_KEYS = [f"{limit} {key}" for limit in LIMITS for key in KEYS]


@dataclass
class Record:
    """The results of one fault or one mode, over all its rounds."""

    rounds: int = 0
    calls: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    #: The most that was admitted, as a part of what the bound allows.
    fullest: float = 0.0
    #: The most that was admitted over the limit alone, in hits of one key, and the bound of that.
    beyond: float = 0.0
    broken: list[str] = field(default_factory=list)
    #: Rounds in which the machine itself was too late to judge recoveries.
    restless: int = 0

    def add(self, other: Record) -> None:
        self.rounds += other.rounds
        self.calls += other.calls
        self.errors += other.errors
        self.broken += other.broken
        self.restless += other.restless
        for name in ("longest", "fullest", "beyond"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def cells(self, name: str) -> list[str]:
        errors = ", ".join(f"{count} {kind}" for kind, count in sorted(self.errors.items())) or "none"
        verdict = "kept" if not self.broken else f"BROKEN {len(self.broken)}×"
        verdict += f" ({self.restless}× restless)" if self.restless else ""
        figures = [f"{self.calls:,}", errors, f"{self.longest * 1000:.0f} ms", f"+{self.beyond:.0f}", f"{self.fullest:.0%}"]
        return [name, str(self.rounds), *figures, verdict]


def judged(mode: Mode, fault: Fault, tally: Tally, seconds: float, nodes: int, healed: float) -> Record:
    """One mode's round: the figures, and every promise that was not kept."""
    record = counted(mode, fault, tally, seconds, nodes)
    if tally.late > mode.patience / 2:  # calls then time out by themselves
        record.restless = 1
    elif found := unrecovered(tally, healed + mode.recovery + tally.late):
        record.broken += [f"not recovered later than {mode.recovery} s after the fault was over: {what}" for what in found]
    return record


def counted(mode: Mode, fault: Fault, tally: Tally, seconds: float, nodes: int) -> Record:
    """The figures, and every promise that was not kept from beginning to end; whether it recovered is judged elsewhere."""
    record = Record(1, tally.calls, Counter(tally.errors), tally.longest)
    touched = fault.place == mode.place
    forgotten, jumps = (fault.forgets, fault.jumps) if touched else (0, 0)
    for name in LIMIT_KEYS:
        limit = LIMITS[name.split()[0]]
        bound = most(limit, seconds, forgotten, jumps) + mode.extra(limit, seconds, nodes)
        alone = mode.alone(limit, seconds, nodes)
        record.beyond = max(record.beyond, tally.admitted[name] + tally.alone[name] - most(limit, seconds))
        for who, admitted, allowed in (("the store", tally.admitted[name], bound), ("guards alone", tally.alone[name], alone)):
            record.fullest = max(record.fullest, admitted / allowed if allowed else 0.0)
            if admitted > allowed:
                record.broken.append(f"{name}: {admitted} admitted by {who}, at most {allowed:.1f}")
    if tally.hung:
        record.broken.append(f"{tally.hung} callers never came back")
    if tally.slow > mode.budget + SLACK:
        record.broken.append(f"one call took {tally.longest:.3f} s, and the machine was only {tally.late:.3f} s late")
    if tally.strange:
        record.broken.append(f"an error of somebody else: {tally.strange[0]}")
    return record


def unrecovered(tally: Tally, since: float, until: float = 1e12) -> list[str]:
    """What was wrong in a time in which everything should have been as before."""
    found = [unwell] if (unwell := tally.unwell(since, until)) else []
    alone, answers = between(tally.alone_at, since, until), between(tally.answers_at, since, until)
    if alone > answers // 50:
        found.append(f"guards alone decided {alone} of {answers} times")
    return found


HEADER = ["survived", "times", "decisions", "errors", "longest call", "beyond the limit", "of its bound", "promises"]


def table(title: str, records: dict[str, Record]) -> list[list[str]]:
    return [[title, *HEADER[1:]], *(record.cells(name) for name, record in records.items())]


def markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])


def as_data(records: dict[str, Record]) -> dict[str, Any]:
    return {name: {**vars(record), "errors": dict(record.errors)} for name, record in records.items()}
