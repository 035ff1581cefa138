"""The contract on RedisStore with a real server, sync and async."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from effort import scaled
from limitkeeper.stores.redis import RedisStore
from limitkeeper.testing import ManualClock, StoreContract
from servers.valkey import Valkey

_fresh = itertools.count()


class TestRedisStore(StoreContract):
    """A single server; the test's time is sent along."""

    examples = scaled(6)

    @pytest.fixture(autouse=True)
    def _server(self, valkey: Valkey) -> Iterator[None]:
        self.url = valkey.url
        yield
        with valkey.client() as client:
            client.flushall()

    def make_store(self, clock: ManualClock) -> RedisStore:
        return RedisStore(self.url, prefix=f"contract-{next(_fresh)}", timeout="60s", clock=clock)
