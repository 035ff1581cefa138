"""Draws the pictures of the flash sale from runs at full size: `python docs/pictures/flash_sale/draw.py`."""

from __future__ import annotations

from pathlib import Path

from limitkeeper.simulate import Result, Scenario, Simulation
from limitkeeper.simulate.matplotlib import write_png
from limitkeeper.simulate.report import Report, charts_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FOLDER = ROOT / "examples" / "flash_sale"
LATENCY = "p95 latency of what no limit refused"
#: A folder of PNG files with all its runs side by side: the runs, and the charts.
GROUPS = {
    "layers": (
        ("without_limits", "layer_1", "layers_1_2", "layers_1_2_3", "one_looping_user"),
        ("All clients", "Goodput", LATENCY, "Places in use", "Waiting in queues"),
    ),
    "capacity": (("capacity_350", "capacity_500", "capacity_600", "capacity_600_limited"), (LATENCY, "Waiting in queues")),
    "regions": (("two_regions",), ("All clients",)),
}
#: Runs that are drawn as SVG files, too.
DRAWN = ("without_limits", "layers_1_2_3")
CHARTS = {"All clients": "requests", "Goodput": "goodput"}


def draw(name: str, result: Result) -> None:
    for chart in charts_of(result):
        if chart.title in CHARTS:
            path = HERE / f"{name}_{CHARTS[chart.title]}.svg"
            path.write_text(chart.svg(style=True), encoding="utf-8")
            print(path.relative_to(ROOT), flush=True)


def draw_group(folder: str) -> None:
    names, titles = GROUPS[folder]
    results = {name: Simulation(Scenario.load(FOLDER / f"{name}.yaml")).run() for name in names}
    for name in DRAWN:
        if name in results:
            draw(name, results[name])
    for path in write_png(Report(list(results.values())), HERE / folder, titles):
        print(path.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    for folder in GROUPS:
        draw_group(folder)
