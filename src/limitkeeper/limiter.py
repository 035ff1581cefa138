"""Limiter and AsyncLimiter: what users type. Two thin shells over the same decisions and the same line of waiters."""

from __future__ import annotations

from collections.abc import Iterable

from .decision import Decision
from .limiter_base import Cost, Key, LimiterBase, checked_cost, is_off
from .rate import Duration
from .reservation import AsyncReservation, PendingReservation, Reservation
from .stores import Store
from .wait_queue import refunded
from .waiting_limiter import Limits, WaitingLimiter

#: The compiled verb itself: bound to an instance it would cost a fifth of an awaited hit more.
_hit = LimiterBase.hit


class Limiter(WaitingLimiter):
    """`Limiter(TokenBucket("5/s burst 10"))`: rate limiting for threads and plain functions."""

    __slots__ = ()

    def acquire(self, key: Key, cost: Cost = 1, timeout: Duration | None = None) -> Decision:
        """Waits its turn: one decision, one sleep. Raises `RateLimited` when that takes longer than `timeout`."""
        return self._acquire(key, cost, timeout)

    def reserve(self, key: Key, cost: Cost = 1, max_wait: Duration | None = None) -> Reservation:
        """Charges an estimate now or at a start to come; falsy when that is further away than `max_wait`."""
        decision, turn = self._book(key, cost, self._patience(max_wait))
        return Reservation(self, key, cost, turn, self.count(decision, key, cost))

    def refund(self, key: Key, cost: Cost = 1) -> None:
        """Gives back what was not used after all; never more than was taken."""
        claims = self.refundable(key, cost)
        if claims:
            self._line.leave([refunded(claims)])

    def reset(self, key: Key) -> None:
        """Forgets a key: it is as new."""
        self.store.reset(self.claims(key))

    def close(self) -> None:
        """Closes the store, if this limiter made it."""
        if self._owns:
            self.store.close()

    def __enter__(self) -> Limiter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncLimiter(WaitingLimiter):
    """The same for asyncio. On a store in this process nothing is awaited but the waiting itself."""

    __slots__ = ("_local",)

    def __init__(self, limits: Limits, store: Store | str | None = None, name: str | None = None) -> None:
        super().__init__(limits, store, name)
        self._local = bool(self.store.local)

    async def hit(self, key: Key, cost: Cost = 1) -> Decision:  # type: ignore[override]
        """Takes `cost` now, or says when to come back. Never waits for its turn."""
        if self._local:
            return _hit(self, key, cost)
        if self.only is not None and type(key) is str and not is_off():
            units = checked_cost(cost) if isinstance(cost, int) else self._costs(cost)[0]
            decision = self.store.hit_nowait(self.only, key, units)
            if decision is None:
                decision = await self.store.adecide_one(self.only, key, units, 0, True)
            return self.count(decision, key, cost)
        return self.count(await self._ask(key, cost), key, cost)

    async def peek(self, key: Key, cost: Cost = 1) -> Decision:  # type: ignore[override]
        """What a hit of that cost would be told now."""
        return await self._ask(key, cost, commit=False)

    async def hit_many(self, keys: Iterable[Key], cost: int | Iterable[int] = 1) -> list[Decision]:  # type: ignore[override]
        """One hit for each key, in order and at one moment."""
        if self.store.local:
            return super().hit_many(keys, cost)
        asked, costs = self.many_costs(keys, cost)
        claims = self.many_claims(asked, costs)
        some = [one for one in claims if one]
        found = self.all_told(claims, await self.store.adecide_many(some, 0) if some else [])
        self.tell_many(asked, costs, found, [])
        return found

    async def acquire(self, key: Key, cost: Cost = 1, timeout: Duration | None = None) -> Decision:
        """Waits its turn: one decision, one sleep. Raises `RateLimited` when that takes longer than `timeout`."""
        return await self._aacquire(key, cost, timeout)

    def reserve(self, key: Key, cost: Cost = 1, max_wait: Duration | None = None) -> PendingReservation:
        """`async with limiter.reserve(…) as r:`, or `r = await limiter.reserve(…)`."""

        async def make() -> AsyncReservation:
            decision, turn = await self._abook(key, cost, self._patience(max_wait))
            return AsyncReservation(self, key, cost, turn, self.count(decision, key, cost))

        return PendingReservation(make)

    async def refund(self, key: Key, cost: Cost = 1) -> None:
        """Gives back what was not used after all; never more than was taken."""
        claims = self.refundable(key, cost)
        if claims:
            await self._return_async(refunded(claims))

    async def reset(self, key: Key) -> None:
        """Forgets a key: it is as new."""
        await self.store.areset(self.claims(key))

    async def aclose(self) -> None:
        """Closes the store, if this limiter made it."""
        if self._owns:
            await self.store.aclose()

    async def __aenter__(self) -> AsyncLimiter:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
