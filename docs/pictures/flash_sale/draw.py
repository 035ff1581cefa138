"""Draws the pictures of the flash sale from runs at full size: `python docs/pictures/flash_sale/draw.py`."""

from __future__ import annotations

from pathlib import Path

from limitkeeper.simulate import Result, Scenario, Simulation
from limitkeeper.simulate.report import charts_of

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[2] / "examples" / "flash_sale"
RUNS = ("without_limits", "layers_1_2_3")
CHARTS = {"All clients": "requests", "Goodput": "goodput"}


def draw(name: str, result: Result) -> None:
    for chart in charts_of(result):
        if chart.title in CHARTS:
            path = HERE / f"{name}_{CHARTS[chart.title]}.svg"
            path.write_text(chart.svg(style=True), encoding="utf-8")
            print(f"docs/pictures/flash_sale/{path.name}")


if __name__ == "__main__":
    for name in RUNS:
        draw(name, Simulation(Scenario.load(FOLDER / f"{name}.yaml")).run())
