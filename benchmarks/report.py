"""The output of a run: a table per group, each figure with its goal, and the machine of the measurement."""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PEERS = (
    *("limits", "throttled-py", "pyrate-limiter", "token-bucket", "rust-py-rate-limit", "aiolimiter", "asynciolimiter"),
    *("slowapi", "fastapi-limiter", "flask-limiter", "starlette", "uvicorn"),
)


@dataclass
class Table:
    head: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def markdown(self) -> str:
        numbers = [i > 0 for i in range(len(self.head))]
        lines = [self.head, tuple("--:" if right else "---" for right in numbers), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def plain(self) -> str:
        widths = [max(len(row[i]) for row in [self.head, *self.rows]) for i in range(len(self.head))]
        lines = [self.head, tuple("-" * width for width in widths), *self.rows]
        return "\n".join(
            "  "
            + "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )


@dataclass
class Section:
    """One group of figures: how they were measured, each against its goal, and the numbers behind them."""

    title: str
    how: str
    figures: Table = field(default_factory=lambda: Table(("figure", "measured", "goal", "")))
    details: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missed: int = 0

    def figure(
        self, name: str, measured: float | None, goal: float | None, unit: str, at_least: bool = False, shown: str | None = None
    ) -> None:
        """Adds a figure; without a goal it is only reported, without a value it could not be measured."""
        shown = shown or ("not measured" if measured is None else number(measured, unit))
        wanted = "" if goal is None else f"{'≥' if at_least else '≤'} {number(goal, unit)}"
        verdict = ""
        if goal is not None and measured is not None:
            met = measured >= goal if at_least else measured <= goal
            verdict = "ok" if met else "missed"
            self.missed += not met
        self.figures.rows.append((name, shown, wanted, verdict))

    def fail(self, failed: dict[str, str]) -> None:
        self.notes += [f"not measured: {name} ({scrubbed(why)})" for name, why in failed.items()]

    def text(self, markdown: bool) -> str:
        tables = [table for table in (self.figures, *self.details) if table.rows]
        parts = [f"{'## ' if markdown else ''}{self.title}", self.how]
        parts += [table.markdown() if markdown else table.plain() for table in tables]
        parts += ["\n".join(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n\n".join(parts)


def spaced(count: int) -> str:
    """A whole number in groups of three digits."""
    return f"{count:,}".replace(",", " ")


def number(value: float, unit: str) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:,.{digits}f}".replace(",", " ")
    return f"{text} {unit}" if unit and unit != "×" else f"{text}{unit and ' ' + unit}"


def scrubbed(text: str) -> str:
    """An error's text without anything that names this machine."""
    return re.sub(r"(/[\w.+-]+){2,}", "…", text.splitlines()[0] if text else "")[:160]


def cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def build() -> str:
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    flags = [
        name
        for name in ("--enable-optimizations", "--with-lto", "--enable-shared", "--disable-gil", "--with-pydebug")
        if name in options
    ]
    flags += re.findall(r"-O\w+", sysconfig.get_config_var("OPT") or "")
    return ", ".join(
        [f"{platform.python_implementation()} {platform.python_version()}", platform.python_compiler(), " ".join(flags)]
    )


def versions() -> list[str]:
    found = []
    for name in (*PEERS, "Cython"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return found


def machine() -> Table:
    import limitkeeper

    kernel = ".".join(re.findall(r"\d+", platform.release())[:2])
    table = Table(("run", ""))
    table.rows = [
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("command", "`python benchmarks/run.py" + "".join(f" {word}" for word in sys.argv[1:]) + "` (`make bench`)"),
        ("limitkeeper", f"{limitkeeper.__version__}, {'compiled' if limitkeeper.compiled else 'plain'}"),
        ("CPU", f"{cpu()}, {os.cpu_count()} cores"),
        ("Python", build()),
        (
            "system",
            f"{platform.system()} {kernel}, {platform.machine()}, {' '.join(platform.libc_ver()).strip() or 'libc unknown'}",
        ),
        ("peers", ", ".join(versions())),
    ]
    return table


def whole(sections: list[Section], seconds: float) -> str:
    """The text of RESULTS.md."""
    missed = sum(section.missed for section in sections)
    judged = sum(1 for section in sections for row in section.figures.rows if row[3])
    head = (
        "# Figures\n\nWritten by `make bench`. Ratios come from one run on one machine, floors and peers measured in turn with "
        "limitkeeper: batches of about 0.2 ms, the smallest batch of a repeat, the median of the repeats. The cost "
        f"of the loop is in every figure.\n\n{judged - missed} of {judged} goals met, in {seconds:.0f} s."
    )
    return "\n\n".join([head, machine().markdown(), *(section.text(markdown=True) for section in sections)]) + "\n"
