"""Plays a trace on a limiter, and notes what it answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..errors import RateLimited
from .traces import Step


class Player:
    """Plays steps on a limiter and notes what it answered: `to_dict()` of a decision, True or False of a settlement."""

    def __init__(self, limiter: Any, clock: Any) -> None:
        self.limiter = limiter
        self.clock = clock
        self.reservations: list[Any] = []
        self.hits: list[tuple[Any, Any]] = []
        self.last: Any = None

    def play(self, trace: Sequence[Step]) -> list[Any]:
        return [self.step(step) for step in trace]

    def step(self, step: Step) -> Any:
        verb = getattr(self, type(step).__name__.lower())
        return verb(*step)

    def named(self, value: Any) -> Any:
        """A tuple, one for each limit, as the mapping that limiters take."""
        return dict(zip(self.limiter.limits, value, strict=True)) if isinstance(value, tuple) else value

    def told(self, decision: Any) -> Any:
        self.last = decision
        answer = decision.to_dict()
        for part in (answer, *answer.get("decisions", ())):
            del part["source"]  # as `==` ignores it: a lease answers the same as its parent
        return answer

    def wait(self, us: int) -> None:
        self.clock.advance(us / 1_000_000)

    def until(self, what: str, beside: int) -> None:
        if self.last is None:
            return
        us = {"retry": self.last.retry_us, "reset": self.last.reset_us}.get(what, self.last.wait_us)
        if us >= 0:
            self.wait(max(0, us + beside))

    def hit(self, key: Any, cost: Any) -> Any:
        decision = self.limiter.hit(self.named(key), self.named(cost))
        if decision:
            self.hits.append((self.named(key), self.named(cost)))
        return self.told(decision)

    def peek(self, key: Any, cost: Any) -> Any:
        return self.told(self.limiter.peek(self.named(key), self.named(cost)))

    def hitmany(self, keys: Sequence[Any], cost: int) -> Any:
        return [self.told(decision) for decision in self.limiter.hit_many([self.named(key) for key in keys], cost)]

    def acquire(self, key: Any, cost: Any, timeout_us: int | None) -> Any:
        try:
            return self.told(self.limiter.acquire(self.named(key), self.named(cost), seconds(timeout_us)))
        except RateLimited as refused:
            return self.told(refused.decision)

    def reserve(self, key: Any, cost: Any, max_wait_us: int | None) -> Any:
        reservation = self.limiter.reserve(self.named(key), self.named(cost), seconds(max_wait_us))
        self.reservations.append(reservation)
        return self.told(reservation.decision)

    def cancel(self, back: int) -> Any:
        return self.reservations[-1 - back].cancel() if back < len(self.reservations) else None

    def settle(self, back: int, used: int) -> Any:
        if back >= len(self.reservations):
            return None
        return self.reservations[-1 - back].settle(dict.fromkeys(self.limiter.limits, used))

    def refund(self, back: int) -> None:
        if back < len(self.hits):
            self.limiter.refund(*self.hits.pop(-1 - back))

    def reset(self, key: Any) -> None:
        self.limiter.reset(self.named(key))


def seconds(us: int | None) -> float | None:
    return None if us is None else us / 1_000_000


def promised_us(decision: Any) -> int | None:
    """When a refused call may come back, None for never."""
    return None if decision.retry_after == math.inf else int(decision.retry_us)
