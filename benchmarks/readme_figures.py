"""Writes the figures that README.md quotes from RESULTS.md, between two comments. `make bench` runs it; a test compares them."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
README, RESULTS = HERE.parent / "README.md", HERE / "RESULTS.md"
BEGIN, END = "<!-- figures: begin (written by `make bench`) -->\n", "<!-- figures: end -->\n"
#: Library, its rule of the section about one hot key, its row of the section about memory, and what it answers.
ROWS = (
    (
        "**limitkeeper**",
        "token bucket",
        "limitkeeper, token bucket",
        "allowed, remaining, and exactly when to retry",
    ),
    (
        "limits (Flask-Limiter, slowapi)",
        "limits, fixed window",
        "limits, fixed window",
        "a bool; the rest by a second call",
    ),
    ("throttled-py", "throttled-py, fixed window", "throttled-py, GCRA", "limited, remaining, reset and retry after"),
    ("pyrate-limiter", "pyrate-limiter, token bucket", "pyrate-limiter, GCRA", "a bool"),
)


def cell(results: str, section: str, row: str, column: int) -> str:
    """One figure of a table of RESULTS.md, as it is printed there."""
    text = results.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.M)
    if found is None:
        raise SystemExit(f"RESULTS.md has no row {row!r} in {section!r}: run make bench")
    return found[1].split("|")[column].strip()


def table(results: str) -> str:
    head = "| one decision in memory | allowed, ns | refused, ns | bytes a key, 1 M keys | the answer |"
    lines = [head, "| --- | --: | --: | --: | --- |"]
    for name, hot, memory, answer in ROWS:
        figures = [cell(results, "One hot key", hot, column) for column in (0, 1)] + [cell(results, "Memory", memory, 0)]
        lines.append(f"| {name} | {' | '.join(figures)} | {answer} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    readme = README.read_text()
    head, tail = readme.partition(BEGIN), readme.partition(END)
    README.write_text(head[0] + BEGIN + table(RESULTS.read_text()) + END + tail[2])


if __name__ == "__main__":
    main()
