"""Draws every picture of the docs from runs of the real library: `python docs/pictures/make.py` writes the SVG files."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from scenes import PICTURES


def main() -> None:
    for name, draw in PICTURES.items():
        path = Path(__file__).resolve().with_name(f"{name}.svg")
        path.write_text(draw().markup(), encoding="utf-8")
        print(f"docs/pictures/{path.name}")


if __name__ == "__main__":
    main()
