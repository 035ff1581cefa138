"""Shards that record their calls and fail on demand, and keys by their shards, for the tests of ShardedStore."""

from __future__ import annotations

import itertools
from typing import Any

from limitkeeper import Decision, MemoryStore, StoreTimeout, StoreUnavailable
from limitkeeper.stores.sharded import ShardedStore
from limitkeeper.testing import ManualClock


class SteadyClock:
    """A clock that several stores share. When it goes back they continue from the latest moment that any of them read."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.last_us = self.shift_us = 0

    def now_us(self) -> int:
        now_us = self.clock.now_us() + self.shift_us
        self.shift_us += max(0, self.last_us - now_us)
        self.last_us = max(now_us, self.last_us)
        return self.last_us

    def __getattr__(self, name: str) -> Any:
        return getattr(self.clock, name)


class FarShard(MemoryStore):
    """A MemoryStore as a remote server that records its calls and fails while `down`; `meanwhile` runs before each call."""

    local = False

    def __init__(self, clock: Any) -> None:
        super().__init__(clock=clock)
        self.calls: list[str] = []
        self.down: Any = None
        self.failing: set[str] = set()
        self.meanwhile: Any = None

    def record(self, method: str) -> None:
        self.calls.append(method)
        if self.meanwhile is not None:
            self.meanwhile(method)
        if self.down or method in self.failing:
            raise StoreTimeout("no answer in time") if self.down == "slow" else StoreUnavailable("no answer")

    def decide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Decision:
        method = "decide at" if options.get("not_before_us") else "decide"
        self.record(method if options.get("commit", True) else "peek")
        return super().decide(claims, max_wait_us, **options)

    def decide_many(self, asks: Any, max_wait_us: int | None = 0) -> list[Decision]:
        self.record("decide_many")
        return super().decide_many(asks, max_wait_us)

    def give_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        self.record("give_back")
        return super().give_back(claims, charged_at)

    def reset(self, claims: Any) -> None:
        self.record("reset")
        super().reset(claims)

    def items(self, limit: Any) -> Any:
        self.record("items")
        return super().items(limit)

    def load(self, limit: Any, items: Any) -> None:
        self.record("load")
        super().load(limit, items)


def key_on(store: ShardedStore, shard: str, number: int = 0) -> str:
    """The n-th key that lives on a shard."""
    found = (f"user:{i}" for i in itertools.count() if store.home_of(f"user:{i}") == shard)
    return next(itertools.islice(found, number, None))
