"""The command `limitkeeper simulate`: runs scenarios, prints the figures side by side, and writes the report's files."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from ..plan.cli import write
from ..policy import PolicyError
from ..rate import duration_us
from .report import Report
from .scenario import Scenario
from .simulation import Simulation

OK, ERRORS, INTERRUPTED = 0, 1, 130
BAR = 30


class ProgressBar:
    """A bar on a terminal; on anything else a line for each tenth."""

    def __init__(self, out: TextIO, name: str) -> None:
        self.out, self.name, self.shown = out, name, -1

    def show(self, share: float) -> None:
        steps = BAR if self.out.isatty() else 10
        filled = int(share * steps)
        if filled == self.shown:
            return
        self.shown = filled
        if steps == 10:
            print(f"{share:4.0%} {self.name}", file=self.out, flush=True)
        else:
            bar = "#" * filled + "." * (BAR - filled)
            print(f"\r[{bar}] {share:4.0%} {self.name} ", end="\n" if share >= 1 else "", file=self.out, flush=True)


def run_simulate(args: argparse.Namespace) -> int:
    scenarios = []
    try:
        for file in args.files:
            scenario = Scenario.load(file)
            scenarios.append(replace(scenario, duration_us=duration_us(args.duration)) if args.duration else scenario)
    except PolicyError as error:
        print(error, file=sys.stderr)
        return ERRORS
    from ..plan import ddsketch  # noqa: F401 - what a long simulation needs is missed before it, not at its end

    if args.png:
        from .matplotlib import import_figure

        import_figure()
    results = []
    for scenario in scenarios:
        results.append(Simulation(scenario, args.seed, ProgressBar(sys.stderr, scenario.name).show).run())
        if results[-1].interrupted:
            print(f"\ninterrupted after {results[-1].simulated_s:g} simulated seconds; these are kept", file=sys.stderr)
            break
    publish(Report(results), args)
    return INTERRUPTED if results[-1].interrupted else OK


def publish(report: Report, args: argparse.Namespace) -> None:
    """Prints the figures, and writes the files that were asked for."""
    print(json.dumps(report.as_dict(), indent=2) if args.json else report.text())
    if args.html:
        write(args.html, report.html(args.title), args.overwrite)
    if args.csv:
        write(args.csv, report.csv(), args.overwrite)
    if args.png:
        from .matplotlib import write_png

        for path in write_png(report, Path(args.png)):
            print(f"wrote {path}", file=sys.stderr)
