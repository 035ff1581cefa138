"""The demo, in two chapters: the same arrivals through every algorithm, then a flash sale on real processes.

    python examples/demo.py [--html PATH] [--no-picture] [--no-live] [--seconds N] [--live-html PATH]

The first chapter runs on a ManualClock, so it does not wait. Every result comes from a real Limiter; the demo contains no
algorithm. The second (flash_sale_live) starts servers on loopback, takes about two minutes, and ends everything it has started.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from draw import page, terminal
from draw.traffic import PATTERNS, Run, runs
from flash_sale_live import play

OUT = Path(__file__).resolve().parent.parent / "out"
HTML, LIVE_HTML = OUT / "demo.html", OUT / "flash_sale_live.html"


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
        description="Draws what every algorithm of limitkeeper does with the same arrivals, then plays a flash sale on real "
        "processes, without and with limits."
    )
    parser.add_argument(
        "--html", type=Path, default=HTML, metavar="PATH", help="where to write the page (default: out/demo.html)"
    )
    parser.add_argument("--no-picture", action="store_true", help="print the tables only")
    parser.add_argument("--no-live", action="store_true", help="leave out the flash sale")
    parser.add_argument("--seconds", type=seconds, default=40.0, metavar="N", help="duration of each live run (default: 40)")
    parser.add_argument(
        "--live-html", type=Path, default=LIVE_HTML, metavar="PATH", help="the live report (default: out/flash_sale_live.html)"
    )
    return parser.parse_args(given)


def seconds(text: str) -> float:
    if not 1 <= (found := float(text)) <= 600:
        raise argparse.ArgumentTypeError(f"expected 1 to 600 seconds, got {text}")
    return found


def short(path: Path) -> Path:
    """A path relative to the current folder, if it is inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def show_algorithms(options: argparse.Namespace) -> None:
    """Chapter one."""
    found = [runs(pattern) for pattern in PATTERNS]
    options.html.parent.mkdir(parents=True, exist_ok=True)
    options.html.write_text(page.page(found), encoding="utf-8")
    lines = text(found, terminal.look_of(sys.stdout), not options.no_picture)
    print(f"The same results as an HTML page: {short(options.html)}", "", *lines, sep="\n", flush=True)


def main(given: list[str] | None = None) -> int:
    options, code = arguments(given), 0
    try:
        show_algorithms(options)
        if not options.no_live:
            print("\nThe flash sale, live\n", flush=True)
            code = play.play(options.seconds, options.live_html)
        if not options.no_live and code == 0:
            print(f"The report with charts: {short(options.live_html)}", flush=True)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
