"""LeasedStore held to the contract: with lease=1 it is its parent, to the last field of every answer."""

from __future__ import annotations

import os

from headgate import MemoryStore
from headgate.stores.leased import LeasedStore
from headgate.testing import ManualClock, StoreContract


class TestLeaseOfOne(StoreContract):
    """LeasedStore(store, lease=1), sync and async: every law, compared with ==."""

    examples = 500 if os.environ.get("HEADGATE_SOAK") == "1" else 25

    def make_store(self, clock: ManualClock) -> LeasedStore:
        return LeasedStore(MemoryStore(clock=clock), lease=1)
