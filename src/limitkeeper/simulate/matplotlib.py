"""Charts as PNG files, with matplotlib: `pip install 'limitkeeper[simulate]'`."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from ..charts.svg import LIGHT
from ..errors import ConfigurationError
from .report import Chart, Report

#: Runs side by side; more go into the next row.
COLUMNS = 2


def import_figure() -> Any:
    """matplotlib's Figure, which needs no display; ConfigurationError names what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError("PNG files need matplotlib; pip install 'limitkeeper[simulate]'") from None
    return Figure


def write_png(report: Report, folder: Path, titles: Container[str] | None = None) -> list[Path]:
    """One file per kind of chart (of those in `titles`), with the runs side by side, two in a row."""
    figure_class = import_figure()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder}: can't make the folder: {(error.strerror or str(error)).lower()}") from None
    found = []
    for charts in report.charts():
        title = charts[0][1].title
        if titles is not None and title not in titles:
            continue
        columns = min(len(charts), COLUMNS)
        rows = -(-len(charts) // columns)
        figure = figure_class(figsize=(6.4 * columns, 3.6 * rows), layout="constrained")
        for number, (name, chart) in enumerate(charts):
            draw(figure.add_subplot(rows, columns, number + 1), name, chart)
        found.append(folder / f"{title.lower().replace(' ', '_')}.png")
        figure.savefig(found[-1], dpi=110)
    return found


def draw(axes: Any, name: str, chart: Chart) -> None:
    axes.set_title(f"{chart.title}: {name}", fontsize=9)
    axes.set_xlabel("seconds")
    axes.set_ylabel(chart.unit)
    for line in chart.lines:
        axes.plot(*zip(*line.points, strict=True), color=LIGHT[line.colour], label=line.name, linewidth=1.5)
    for mark in chart.marks:
        axes.axhline(mark.at, color=LIGHT[mark.colour], linestyle="--", linewidth=1)
    highest = max(value for line in chart.lines for _, value in line.points)
    axes.set_ylim(0, None if highest else 1)
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(chart.lines))
