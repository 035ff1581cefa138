"""The contract on the stores of limitkeeper."""

from __future__ import annotations

from effort import scaled
from limitkeeper import MemoryStore
from limitkeeper.testing import ManualClock, StoreContract


class TestMemoryStore(StoreContract):
    """MemoryStore, sync and async."""

    examples = scaled(25)

    def make_store(self, clock: ManualClock) -> MemoryStore:
        return MemoryStore(clock=clock)
