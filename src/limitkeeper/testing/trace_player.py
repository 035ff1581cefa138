"""TracePlayer: plays a trace of steps on a limiter and records its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..decision import Decision
from ..errors import RateLimited
from ..limiter import Limiter
from ..limiter_base import Cost, Key
from ..reservation import Reservation
from .clock import ManualClock
from .traces import Step, StepCost, StepKey

Answer = dict[str, Any]


class TracePlayer:
    """Plays steps on a limiter and returns its answers: `to_dict()` of a decision, True or False of a settlement."""

    def __init__(self, limiter: Limiter, clock: ManualClock) -> None:
        self.limiter = limiter
        self.clock = clock
        self.reservations: list[Reservation] = []
        self.hits: list[tuple[Key, Cost]] = []
        self.last: Decision | None = None

    def play(self, trace: Sequence[Step]) -> list[Any]:
        return [self.step(step) for step in trace]

    def step(self, step: Step) -> Any:
        return getattr(self, type(step).__name__.lower())(*step)

    def named_key(self, key: StepKey) -> Key:
        """A tuple, one key for each limit, as the mapping that limiters take."""
        return dict(zip(self.limiter.limits, key, strict=True)) if isinstance(key, tuple) else key

    def named_cost(self, cost: StepCost) -> Cost:
        return dict(zip(self.limiter.limits, cost, strict=True)) if isinstance(cost, tuple) else cost

    @property
    def decision(self) -> Decision:
        """The last decision."""
        assert self.last is not None
        return self.last

    def answer(self, decision: Decision) -> Answer:
        self.last = decision
        answer = decision.to_dict()
        for part in (answer, *answer.get("decisions", ())):
            del part["source"]  # as `==` ignores it: a lease answers the same as its parent
        return answer

    def wait(self, us: int) -> None:
        self.clock.advance(us / 1_000_000)

    def until(self, what: str, offset: int) -> None:
        if self.last is None:
            return
        us = {"retry": self.last.retry_us, "reset": self.last.reset_us}.get(what, self.last.wait_us)
        if us >= 0:
            self.wait(max(0, us + offset))

    def hit(self, key: StepKey, cost: StepCost) -> Answer:
        decision = self.limiter.hit(self.named_key(key), self.named_cost(cost))
        if decision:
            self.hits.append((self.named_key(key), self.named_cost(cost)))
        return self.answer(decision)

    def peek(self, key: StepKey, cost: StepCost) -> Answer:
        return self.answer(self.limiter.peek(self.named_key(key), self.named_cost(cost)))

    def hitmany(self, keys: Sequence[StepKey], cost: int) -> list[Answer]:
        return [self.answer(decision) for decision in self.limiter.hit_many([self.named_key(key) for key in keys], cost)]

    def acquire(self, key: StepKey, cost: StepCost, timeout_us: int | None) -> Answer:
        try:
            return self.answer(self.limiter.acquire(self.named_key(key), self.named_cost(cost), seconds(timeout_us)))
        except RateLimited as refused:
            return self.answer(refused.decision)

    def reserve(self, key: StepKey, cost: StepCost, max_wait_us: int | None) -> Answer:
        reservation = self.limiter.reserve(self.named_key(key), self.named_cost(cost), seconds(max_wait_us))
        self.reservations.append(reservation)
        return self.answer(reservation.decision)

    def cancel(self, back: int) -> bool | None:
        return self.reservations[-1 - back].cancel() if back < len(self.reservations) else None

    def settle(self, back: int, used: int) -> bool | None:
        if back >= len(self.reservations):
            return None
        return self.reservations[-1 - back].settle(dict.fromkeys(self.limiter.limits, used))

    def refund(self, back: int) -> None:
        if back < len(self.hits):
            self.limiter.refund(*self.hits.pop(-1 - back))

    def reset(self, key: StepKey) -> None:
        self.limiter.reset(self.named_key(key))


def seconds(us: int | None) -> float | None:
    return None if us is None else us / 1_000_000


def retry_us(decision: Decision) -> int | None:
    """Microseconds until a refused call may be repeated, None for never."""
    return None if decision.retry_after == math.inf else int(decision.retry_us)
