"""LimiterPair: one set of limits for sync and async callers, as targets of a plan's calls; Charge: what one call was charged."""

from __future__ import annotations

from collections.abc import Mapping

from ..limiter import AsyncLimiter, Limiter, Limits
from ..limiter_base import is_off
from ..rate import Duration
from ..reservation import AsyncReservation, Reservation
from ..stores import Store
from ..wait_queue import Waiter, refunded

Used = int | Mapping[str, int]


class Charge:
    """A reservation whose methods either driver calls: the sync one `settle`, the async one `asettle`."""

    def __init__(self, reservation: Reservation | AsyncReservation, cost: Used) -> None:
        self.decision, self.cost = reservation.decision, cost
        self.settle = self.asettle = reservation.settle
        self.cancel = self.acancel = reservation.cancel


class LimiterPair:
    """A Limiter and an AsyncLimiter on one store, under one name."""

    def __init__(self, limits: Limits | Limiter | AsyncLimiter, store: Store | str | None, name: str | None) -> None:
        if isinstance(limits, (Limiter, AsyncLimiter)):
            store, name, limits = limits.store, limits.name, limits.limits
        self.sync = Limiter(limits, store, name)
        self.async_ = AsyncLimiter(self.sync.limits, self.sync.store, self.sync.name)
        self.acquire, self.aacquire = self.sync.acquire, self.async_.acquire
        self.hit, self.ahit = self.sync.hit, self.async_.hit
        self.close = self.sync.close
        #: A hit is quicker than `acquire`, and where every limit reserves, it does not overtake those that wait.
        self.hit_first = bool(self.sync.store.local) and self.sync._reserves

    def reserve(self, key: str, cost: Used, max_wait: Duration | None) -> Charge:
        """Waits for the start; raises RateLimited when it is later than `max_wait`."""
        reservation = self.sync.reserve(key, cost, max_wait)
        reservation.__enter__()
        return Charge(reservation, cost)

    async def areserve(self, key: str, cost: Used, max_wait: Duration | None) -> Charge:
        reservation = await self.async_.reserve(key, cost, max_wait)
        await reservation.__aenter__()
        return Charge(reservation, cost)

    def refund(self, key: str) -> None:
        """Gives back one unit of each limit that takes refunds, for a call that was not sent."""
        self.sync._queue.leave([self._refunded(key)])

    async def arefund(self, key: str) -> None:
        await self.sync._queue.aleave([self._refunded(key)])

    def _refunded(self, key: str) -> Waiter:
        return refunded([claim for claim in self.sync.claims(key) if claim.limit.limit.refunds and not is_off()])

    async def aclose(self) -> None:
        if self.sync._owns_store:
            await self.sync.store.aclose()
