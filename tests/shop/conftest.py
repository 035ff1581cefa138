"""The shop is an example outside the package: puts its folder on the path, as running it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from limitkeeper import MemoryStore
from limitkeeper.testing import ManualClock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture
def street(clock: ManualClock):
    """Makes a `Customer` of one and the same shop, at noon."""
    from customers import Street
    from shop.app import shop

    with Street(shop(MemoryStore(clock=clock))) as street:
        yield street
