"""`make bench`: measures limitkeeper's stated figures, prints a table per group, and writes RESULTS.md.

python benchmarks/run.py [--quick] [--only GROUP]      a quick or partial run prints, and leaves RESULTS.md as it is
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quoted_figures
from built import built
from report import Section, whole
from timing import Effort

HERE = Path(__file__).resolve().parent
GROUPS = (
    *("hot", "several", "keys", "tasks", "many", "memory", "pauses", "log", "plain", "threads"),
    *("shared", "central", "leased", "sharded", "guarded", "web", "concurrency", "shaping", "shares", "client", "service"),
    "simulate",
)


def built_floors(folder: str) -> Any:
    """The compiled floors; None where they can't be built."""
    try:
        return built("floors", folder)
    except (Exception, SystemExit) as error:
        print(f"bench: no compiled floors ({type(error).__name__}: {error}); ratios to them are left out", flush=True)
        return None


def noted(group: str) -> Callable[[str], None]:
    """Prints the current step, on one line where that is a terminal."""
    begun = time.monotonic()

    def note(text: str) -> None:
        line = f"{group:>8}  {time.monotonic() - begun:5.1f} s  {text}"
        if sys.stdout.isatty():
            print(f"\r{line:<100}", end="", flush=True)
        else:
            print(line, flush=True)

    return note


def run_group(group: str, floors: Any, effort: Effort) -> Section:
    note = noted(group)
    note("begins")
    try:
        section: Section = importlib.import_module(group).run(floors, effort, note)
    except Exception as error:  # the other groups still have results
        section = Section(group, "This group could not be measured.", missed=1)
        section.fail({group: f"{type(error).__name__}: {error}"})
    note("done")
    print("\n\n" + section.text(markdown=False) + "\n", flush=True)
    return section


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures limitkeeper beside its floors and its peers.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and keys: a look, not a result")
    parser.add_argument("--only", choices=GROUPS, action="append", help="one group (may be given several times)")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        floors = built_floors(folder)
        sections = [run_group(group, floors, Effort(options.quick)) for group in options.only or GROUPS]
    missed = sum(section.missed for section in sections)
    print(f"bench: {missed} goals missed, {time.monotonic() - begun:.0f} s in all")
    if not options.quick and not options.only:
        (HERE / "RESULTS.md").write_text(whole(sections, time.monotonic() - begun))
        quoted_figures.main()
        print("bench: wrote benchmarks/RESULTS.md, and its figures into README.md and docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
