"""TracePlayer plays a trace of steps on a limiter and records its answers; SyncAdapter calls an async limiter like a sync one,
so that one law tests both modes."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from ..decision import Decision
from ..errors import RateLimited
from ..limiter import AsyncLimiter, Limiter, Limits
from ..limiter_base import Cost, Key
from ..reservation import AsyncReservation, Reservation
from ..stores.contract import Store
from . import ManualClock
from .strategies import Step, StepCost, StepKey

Answer = dict[str, Any]
MODES = ("sync", "async")


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

    def named(self, value: StepKey | StepCost) -> Any:
        """A tuple, one key or cost for each limit, as the mapping that limiters take."""
        return dict(zip(self.limiter.limits, value, strict=True)) if isinstance(value, tuple) else value

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
        decision = self.limiter.hit(self.named(key), self.named(cost))
        if decision:
            self.hits.append((self.named(key), self.named(cost)))
        return self.answer(decision)

    def peek(self, key: StepKey, cost: StepCost) -> Answer:
        return self.answer(self.limiter.peek(self.named(key), self.named(cost)))

    def hitmany(self, keys: Sequence[StepKey], cost: int) -> list[Answer]:
        return [self.answer(decision) for decision in self.limiter.hit_many([self.named(key) for key in keys], cost)]

    def acquire(self, key: StepKey, cost: StepCost, timeout_us: int | None) -> Answer:
        try:
            return self.answer(self.limiter.acquire(self.named(key), self.named(cost), seconds(timeout_us)))
        except RateLimited as refused:
            return self.answer(refused.decision)

    def reserve(self, key: StepKey, cost: StepCost, max_wait_us: int | None) -> Answer:
        reservation = self.limiter.reserve(self.named(key), self.named(cost), seconds(max_wait_us))
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
        self.limiter.reset(self.named(key))


def seconds(us: int | None) -> float | None:
    return None if us is None else us / 1_000_000


def retry_us(decision: Decision) -> int | None:
    """Microseconds until a refused call may be repeated, None for never."""
    return None if decision.retry_after == math.inf else int(decision.retry_us)


class SyncAdapter:
    """Runs each coroutine of an async object to its end, in an event loop of its own."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __bool__(self) -> bool:
        return bool(self.inner)

    def __getattr__(self, name: str) -> object:
        found = getattr(self.inner, name)
        return _sync(found) if inspect.ismethod(found) else found


def _sync(method: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        result = method(*args, **kwargs)
        return _run(result) if inspect.isawaitable(result) else result

    return call


def _run(awaitable: Awaitable[object]) -> object:
    async def wait() -> object:
        return await awaitable

    result = asyncio.run(wait())
    return SyncAdapter(result) if isinstance(result, AsyncReservation) else result


def make_limiter(mode: str, limits: Limits, store: Store) -> Limiter:
    """A limiter of this mode, called as a sync one."""
    if mode == "sync":
        return Limiter(limits, store)
    return cast(Limiter, SyncAdapter(AsyncLimiter(limits, store)))
