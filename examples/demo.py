"""The demo: sends the same arrivals through every algorithm, and shows a table, a terminal chart, and an HTML page.

    python examples/demo.py [--html PATH] [--no-picture]

It runs on a ManualClock, so it does not wait. Every result comes from a real Limiter; the demo contains no algorithm.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from draw import page, terminal
from draw.traffic import PATTERNS, Run, runs

HTML = Path(__file__).resolve().parent.parent / "out" / "demo.html"


def text(found: list[list[Run]], look: terminal.Look, pictures: bool = True) -> Iterator[str]:
    """The printed lines."""
    if pictures:
        yield terminal.legend(look)
    for pattern, lanes in zip(PATTERNS, found, strict=True):
        yield ""
        yield look.paint(f"{look.rule * 2} {pattern.name} ".ljust(98, look.rule), "strong")
        yield pattern.story
        yield ""
        if pictures:
            yield from terminal.picture(pattern, lanes, look)
            yield ""
        yield from terminal.table(pattern, lanes, look)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Sends the same arrivals through every algorithm of limitkeeper and draws the results."
    )
    parser.add_argument(
        "--html", type=Path, default=HTML, metavar="PATH", help="where to write the page (default: out/demo.html)"
    )
    parser.add_argument("--no-picture", action="store_true", help="print the tables only")
    return parser.parse_args(given)


def short(path: Path) -> Path:
    """A path relative to the current folder, if it is inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    found = [runs(pattern) for pattern in PATTERNS]
    options.html.parent.mkdir(parents=True, exist_ok=True)
    options.html.write_text(page.page(found), encoding="utf-8")
    lines = text(found, terminal.look_of(sys.stdout), not options.no_picture)
    try:
        print(f"The same results as an HTML page: {short(options.html)}", "", *lines, sep="\n", flush=True)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
