"""A third-party store that fails, hangs and recovers on demand."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from limitkeeper import Decision, MemoryStore, StoreUnavailable
from stand_ins import WrappedStore

ALL = {"decide", "decide_many", "give_back", "reset", "items", "load"}


class FailingStore(WrappedStore):
    """A wrapped store whose `register` may fail too."""

    def register(self, limit: Any) -> None:
        if "register" in self.failing:
            raise StoreUnavailable("register: no answer")
        self.inner.register(limit)


class HangingStore(FailingStore):
    """Its decisions hang until `gate` is set; refunds are recorded."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.hangs = True
        self.returned: list[tuple[str, int]] = []

    def _noted(self, verb: str) -> MemoryStore:
        inner = super()._noted(verb)
        if self.hangs and verb != "give_back":
            self.gate.wait(60)
        return inner

    def give_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        self.returned += [(claim.key, claim.cost) for claim in claims]
        return super().give_back(claims, charged_at)


class HangingTasks(HangingStore):
    """The same with async methods of its own."""

    async def anoted(self, verb: str) -> MemoryStore:
        self.calls.append("a" + verb)
        if verb in self.failing:
            raise StoreUnavailable(f"a{verb}: no answer")
        while self.hangs and not self.gate.is_set():
            await asyncio.sleep(0.001)
        return self.inner

    async def adecide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Decision:
        return (await self.anoted("decide")).decide(claims, max_wait_us, **options)

    async def adecide_many(self, asks: Any, max_wait_us: int | None = 0) -> list[Decision]:
        return (await self.anoted("decide_many")).decide_many(asks, max_wait_us)

    async def agive_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        return self.give_back(claims, charged_at)
