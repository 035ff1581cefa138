"""The stores that limitkeeper has, held to the contract."""

from __future__ import annotations

import os

from limitkeeper import MemoryStore
from limitkeeper.testing import ManualClock, StoreContract


class TestMemoryStore(StoreContract):
    """MemoryStore, sync and async."""

    examples = 500 if os.environ.get("LIMITKEEPER_SOAK") == "1" else 25

    def make_store(self, clock: ManualClock) -> MemoryStore:
        return MemoryStore(clock=clock)
