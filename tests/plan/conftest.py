"""The files of the planner's tests and examples, and the seed's hundred requests."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def files() -> Path:
    return Path(__file__).parent / "files"


@pytest.fixture
def examples() -> Path:
    return ROOT / "examples" / "plan"


@pytest.fixture
def hundred() -> list[float]:
    """Requests 1–50 took 200 ms, 51–95 600 ms, 96–99 1.5 s, and number 100 took 5 s."""
    return [0.2] * 50 + [0.6] * 45 + [1.5] * 4 + [5.0]
