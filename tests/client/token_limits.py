"""Limits on requests and tokens on a manual clock, with a view of what is left of them."""

from __future__ import annotations

from typing import Any

from limitkeeper import Limiter, MemoryStore, SlidingWindowLog
from limitkeeper.client import ClientLimits, TokenMeter

LIMITS = {"requests": SlidingWindowLog("100/min"), "tokens": SlidingWindowLog("10000/min")}


class Tokens:
    """Limits of a client on the manual clock, and what is left of them."""

    def __init__(self, clock: Any, limits: Any = LIMITS, **options: Any) -> None:
        self.store = MemoryStore(clock=clock)
        self.limits = ClientLimits(limits, self.store, "llm", meter=options.pop("meter", TokenMeter()), **options)
        self._view = Limiter(limits, self.store, "llm")

    def left(self) -> dict[str, int]:
        peeked = self._view.peek("127.0.0.1", cost=0)
        return {one.name: one.remaining for one in peeked.decisions}
