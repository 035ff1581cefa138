"""The example with a breaker, a limit and a bulkhead: refusals do not open the breaker, failures do, and it closes again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "circuit_breaker" / "pay.py"


@pytest.fixture(scope="module")
def found() -> Any:
    pytest.importorskip("purgatory", reason="the breaker is not installed: pip install purgatory")
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_refusals_do_not_open_the_breaker(found):
    """Of 100 calls at once most are refused by the bulkhead, at least four are paid, and none finds the breaker open."""
    outcomes = found["100 at once, healthy"]
    assert sum(outcomes.values()) == 100
    assert outcomes["paid"] >= 4
    assert outcomes["BulkheadFull"] >= 90
    assert "breaker open" not in outcomes
    assert found["most at the same time"] == 4


def test_failures_open_the_breaker(found):
    """Three failures in a row open the breaker: the other seven calls do not reach the service."""
    assert found["10 in a row, down"] == {"failed": 3, "breaker open": 7}


def test_an_open_breaker_takes_no_start_and_no_place(found):
    """While the breaker is open, 100 calls at once neither reach the service nor are refused by the limit or the bulkhead."""
    assert found["100 at once, open"] == {"breaker open": 100}
    assert found["calls while open"] == 0


def test_the_breaker_closes_again(found):
    """After its pause the breaker lets a call through, which is paid."""
    assert found["one after the pause"] == {"paid": 1}
