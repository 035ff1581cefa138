"""The contract on SharedStore."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from effort import scaled
from limitkeeper.stores.shared import SharedStore
from limitkeeper.testing import ManualClock, StoreContract


class TestSharedStore(StoreContract):
    """SharedStore, sync and async, each store on a file of its own."""

    examples = scaled(15)
    threads = 50

    @pytest.fixture(autouse=True)
    def _folder(self):
        self.folder = tempfile.mkdtemp(prefix="limitkeeper-shared-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.number = 0
        yield
        shutil.rmtree(self.folder)

    def make_store(self, clock: ManualClock) -> SharedStore:
        self.number += 1
        return SharedStore(f"{self.folder}/{self.number}", max_keys=1000, clock=clock)
