"""A fleet on a virtual clock: some nodes, each with its LeasedStore, one parent behind them, and given arrivals.

The background of every node is driven by the test: `tend` whenever a lease is due, and every twentieth of a lease life. The
parent is made by a factory from a clock; its operations are counted.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from limitkeeper import Limiter, MemoryStore
from limitkeeper.algorithms import Limit
from limitkeeper.stores import Store
from limitkeeper.stores.leased import LeasedStore
from limitkeeper.testing import ManualClock

#: 2023-11-14, on no round minute.
BEGIN = 1_700_000_123.456789


class Tally(Store):
    """A store whose operations are counted; verbs in `failing` raise the given errors."""

    def __init__(self, inner: Store, local: bool = True) -> None:
        self.inner = inner
        self.local = local
        self.calls: list[tuple[str, int]] = []
        self.failing: dict[str, Exception] = {}

    @property
    def clock(self) -> Any:
        return self.inner.clock

    def now_us(self) -> int:
        return self.inner.now_us()

    def register(self, limit: Any) -> None:
        self.inner.register(limit)

    def _noted(self, verb: str, cost: int) -> Store:
        self.calls.append((verb, cost))
        if verb in self.failing:
            raise self.failing[verb]
        return self.inner

    def decide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Any:
        return self._noted("decide", sum(claim.cost for claim in claims)).decide(claims, max_wait_us, **options)

    def decide_many(self, asks: Any, max_wait_us: int | None = 0) -> Any:
        return self._noted("decide_many", sum(c.cost for claims in asks for c in claims)).decide_many(asks, max_wait_us)

    def give_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        return self._noted("give_back", sum(claim.cost for claim in claims)).give_back(claims, charged_at)

    def reset(self, claims: Any) -> None:
        self._noted("reset", 0).reset(claims)

    def items(self, limit: Any) -> Any:
        return self.inner.items(limit)

    def load(self, limit: Any, items: Any) -> None:
        self.inner.load(limit, items)

    @property
    def operations(self) -> int:
        return len(self.calls)


@dataclass
class Report:
    """The results of a run."""

    nodes: int
    begin_us: int = 0
    offered: int = 0
    admitted: list[tuple[int, int]] = field(default_factory=list)  # (moment, node)
    operations: int = 0
    gaps: list[int] = field(default_factory=list)

    @property
    def per_decision(self) -> float:
        return self.operations / self.offered

    def most_in(self, window_us: int) -> int:
        """The most that was admitted in any half-open window of this length."""
        moments = sorted(moment for moment, _ in self.admitted)
        return max((i + 1 - bisect_right(moments, moment - window_us) for i, moment in enumerate(moments)), default=0)

    def of(self, node: int) -> list[int]:
        return [moment for moment, who in self.admitted if who == node]


class Fleet:
    """Nodes that lease from one parent."""

    def __init__(
        self, limit: Limit, nodes: int, parent: Callable[[ManualClock], Store] | None = None, key: str = "k", **leased: Any
    ) -> None:
        self.clock = ManualClock(BEGIN)
        self.limit = limit
        self.key = key
        self.tally = Tally(MemoryStore(clock=self.clock) if parent is None else parent(self.clock))
        self.stores = [LeasedStore(self.tally, **leased) for _ in range(nodes)]
        self.limiters = [Limiter(limit, store=store) for store in self.stores]
        self.life_us = self.stores[0].cache.life_us
        self.report = Report(nodes, self.clock.now_us())
        self.down: set[int] = set()

    def to(self, moment_us: int) -> None:
        """Moves to a moment, with every node's background on its beat."""
        beat = max(1, self.life_us // 20)
        now = self.clock.now_us()
        while now < moment_us:
            step = min(beat - now % beat, moment_us - now)
            self.clock.advance(step / 1e6)
            now = self.clock.now_us()
            if now % beat == 0:
                for node, store in enumerate(self.stores):
                    if node not in self.down:
                        store.tend()

    def hit(self, node: int, cost: int = 1) -> bool:
        decision = self.limiters[node].hit(self.key, cost)
        self.report.offered += 1
        if decision:
            self.report.admitted += [(self.clock.now_us(), node)] * cost
        if self.stores[node].cache.due:
            self.stores[node].tend()
        return bool(decision)

    def play(self, arrivals: Iterable[tuple[int, int]]) -> Report:
        """Arrivals are (microseconds from now, node), in order."""
        begin = self.clock.now_us()
        before = self.tally.operations
        for moment, node in arrivals:
            self.to(begin + moment)
            self.hit(node)
        self.report.operations += self.tally.operations - before
        return self.report


def poisson(rates: list[float], seconds: float, seed: int = 1) -> Iterable[tuple[int, int]]:
    """Independent arrivals at so many a second for each node, merged."""

    def one(node: int, rate: float) -> Iterable[tuple[int, int]]:
        chance = random.Random(f"{seed} {node}")
        moment = 0.0
        while rate > 0:
            moment += chance.expovariate(rate)
            if moment >= seconds:
                return
            yield round(moment * 1e6), node

    return heapq.merge(*(one(node, rate) for node, rate in enumerate(rates)))
