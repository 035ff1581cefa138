"""Limiter and AsyncLimiter: the sync and the async limiter, on the same decisions and the same wait queue."""

from __future__ import annotations

from collections.abc import Iterable

from .decision import Decision
from .limiter_base import Cost, Key, LimiterBase, checked_cost, is_off
from .rate import Duration
from .reservation import AsyncReservation, PendingReservation, Reservation
from .stores import Store
from .wait_queue import refunded
from .waiting_limiter import Limits, WaitingLimiter

#: The compiled method, unbound: `super().hit` makes an awaited hit a fifth slower.
_hit = LimiterBase.hit


class Limiter(WaitingLimiter):
    """`Limiter(TokenBucket("5/s burst 10"))`: rate limiting for threads and plain functions."""

    __slots__ = ()

    def acquire(self, key: Key, cost: Cost = 1, timeout: Duration | None = None) -> Decision:
        """Waits until the cost is admitted: one decision, one sleep. Raises `RateLimited` if the wait would exceed `timeout`."""
        return self._acquire(key, cost, timeout)

    def reserve(self, key: Key, cost: Cost = 1, max_wait: Duration | None = None) -> Reservation:
        """Charges an estimate now or at a later start; the result is falsy if the wait would exceed `max_wait`."""
        decision, waiter = self._reserve_start(key, cost, self._max_wait_us(max_wait))
        return Reservation(self, key, cost, waiter, self._count(decision, key, cost))

    def refund(self, key: Key, cost: Cost = 1) -> None:
        """Gives back units that were not used, at most what was charged."""
        claims = self._refund_claims(key, cost)
        if claims:
            self._queue.leave([refunded(claims)])

    def reset(self, key: Key) -> None:
        """Deletes the state of a key."""
        self.store.reset(self.claims(key))

    def close(self) -> None:
        """Closes the store if this limiter created it."""
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Limiter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncLimiter(WaitingLimiter):
    """`AsyncLimiter(TokenBucket("5/s burst 10"))`: rate limiting for asyncio. On a local store only sleeping is awaited."""

    __slots__ = ("_local",)

    def __init__(self, limits: Limits, store: Store | str | None = None, name: str | None = None) -> None:
        super().__init__(limits, store, name)
        self._local = bool(self.store.local)

    async def hit(self, key: Key, cost: Cost = 1) -> Decision:  # type: ignore[override]
        """Charges `cost` now, or returns a refusal with the time to retry. Does not wait for capacity."""
        if self._local:
            return _hit(self, key, cost)
        if self._single is not None and type(key) is str and not is_off():
            units = checked_cost(cost) if isinstance(cost, int) else self._costs(cost)[0]
            decision = self.store.hit_nowait(self._single, key, units)
            if decision is None:
                decision = await self.store.adecide_one(self._single, key, units, 0, True)
            return self._count(decision, key, cost)
        return self._count(await self._adecide(key, cost), key, cost)

    async def peek(self, key: Key, cost: Cost = 1) -> Decision:  # type: ignore[override]
        """The Decision that a hit of that cost would get now. Stores and counts nothing."""
        return await self._adecide(key, cost, commit=False)

    async def hit_many(self, keys: Iterable[Key], cost: int | Iterable[int] = 1) -> list[Decision]:  # type: ignore[override]
        """One hit per key, in order and at one time; a duplicate key sees its earlier hits."""
        if self.store.local:
            return super().hit_many(keys, cost)
        wanted, costs = self._keys_and_costs(keys, cost)
        claims = self._claims_of_each(wanted, costs)
        some = [one for one in claims if one]
        found = self._merge_decisions(claims, await self.store.adecide_many(some, 0) if some else [])
        self._publish_many(wanted, costs, found, [])
        return found

    async def acquire(self, key: Key, cost: Cost = 1, timeout: Duration | None = None) -> Decision:
        """Waits until the cost is admitted: one decision, one sleep. Raises `RateLimited` if the wait would exceed `timeout`."""
        return await self._aacquire(key, cost, timeout)

    def reserve(self, key: Key, cost: Cost = 1, max_wait: Duration | None = None) -> PendingReservation:
        """`async with limiter.reserve(…) as r:`, or `r = await limiter.reserve(…)`."""

        async def make() -> AsyncReservation:
            decision, waiter = await self._areserve_start(key, cost, self._max_wait_us(max_wait))
            return AsyncReservation(self, key, cost, waiter, self._count(decision, key, cost))

        return PendingReservation(make)

    async def refund(self, key: Key, cost: Cost = 1) -> None:
        """Gives back units that were not used, at most what was charged."""
        claims = self._refund_claims(key, cost)
        if claims:
            await self._agive_back(refunded(claims))

    async def reset(self, key: Key) -> None:
        """Deletes the state of a key."""
        await self.store.areset(self.claims(key))

    async def aclose(self) -> None:
        """Closes the store if this limiter created it."""
        if self._owns_store:
            await self.store.aclose()

    async def __aenter__(self) -> AsyncLimiter:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
