"""Reservation and AsyncReservation: an estimate is charged now and settled later with the actual cost.

    with limiter.reserve("user:42", cost=500, max_wait=5) as r:      # entering waits for the start
        r.settle(425)                                                # gives 75 back; an exception gives all back

The first settle or cancel counts, later ones do nothing and return False. If neither is called, the whole charge stays. Settling
above the estimate always succeeds; the algorithm records it as debt. A store error while giving back is published as an event
instead of raised, because it must not hide the caller's own exception.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import TYPE_CHECKING, Any

from .algorithms.claim import Claim
from .decision import Decision
from .errors import ConfigurationError, RateLimited, StoreError
from .limiter_base import Cost, Key, checked_cost, is_off
from .wait_queue import Waiter

if TYPE_CHECKING:
    from .waiting_limiter import WaitingLimiter


class Charge:
    """Base of Reservation and AsyncReservation: the charge, and the part of it to give back."""

    def __init__(self, limiter: WaitingLimiter, key: Key, cost: Cost, waiter: Waiter | None, decision: Decision) -> None:
        self._limiter = limiter
        self._key = key
        self._cost = cost
        self._waiter = waiter
        self._decision = decision
        self._decided = not decision
        self._free = is_off()  # limiting was turned off: nothing was charged

    @property
    def decision(self) -> Decision:
        """The decision; its start may move up while the caller waits, when an earlier waiter leaves."""
        return self._waiter.decision if self._waiter is not None else self._decision

    @property
    def wait(self) -> float:
        """Seconds from the decision to its start."""
        return self.decision.wait

    def __bool__(self) -> bool:
        return bool(self._decision)

    def __repr__(self) -> str:
        state = "refused" if not self._decision else "settled" if self._decided else "open"
        return f"<{type(self).__name__} {state}: {self._cost!r} for {self._key!r}, wait {self.wait:.3f} s>"

    def _differences(self, used: int | Mapping[str, int]) -> list[Claim]:
        """The claims to give back so that `used` stays charged; a negative cost charges more."""
        claims = self._limiter.claims(self._key, self._cost)
        if not isinstance(used, Mapping):
            if len({claim.cost for claim in claims}) > 1:
                names = ", ".join(claim.limit.name for claim in claims)
                raise ConfigurationError(
                    f"settle({used!r}): the limits have different charges; pass a mapping of names ({names}) to costs"
                )
            used = {claim.limit.name: used for claim in claims}
        for name in used:
            if name not in self._limiter.limits:
                raise ConfigurationError(
                    f"settle: unknown limit {name!r}; {self._limiter.name!r} has {', '.join(self._limiter.names)}"
                )
        found = []
        for claim in claims:
            if claim.limit.name in used:
                change = claim.cost - checked_cost(used[claim.limit.name])
                if change:
                    found.append(Claim(claim.limit, claim.key, change, claim.cost))
        return found

    def _first(self) -> bool:
        """Marks the reservation as settled or cancelled; False if it already was."""
        if self._decided:
            return False
        self._decided = True
        return True


class Reservation(Charge):
    """A reserved start. Truthy when granted; entering waits for the start."""

    def settle(self, used: int | Mapping[str, int]) -> bool:
        """Sets the actual cost: gives the rest back, or charges the difference. False if it was settled or cancelled before."""
        change = [] if self._decided else self._differences(used)
        if not self._first():
            return False
        if self._waiter is not None:
            self._limiter._queue.done(self._waiter)
        try:
            if change and not self._free:
                self._limiter._queue.leave([Waiter(change, self.decision, None)])
        except StoreError as error:
            self._limiter._give_back_failed(self._key, self._cost, self.decision, error)
        return True

    def cancel(self) -> bool:
        """Gives everything back; later waiters move up. False if it was settled or cancelled before."""
        if not self._first():
            return False
        if not self._free:
            self._limiter._give_up(self._waiter, self._key, self._cost, self._decision)
        return True

    def __enter__(self) -> Reservation:
        if not self._decision:
            raise RateLimited(self._decision)
        if self._waiter is not None:
            try:
                self._limiter._sleep(self._waiter, self._key, self._cost)
            except BaseException:
                self._decided = True
                raise
            self._decision, self._waiter = self._waiter.decision, None
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.cancel()
        else:
            self._decided = True


class AsyncReservation(Charge):
    """A reserved start for async code: `async with`; settle and cancel are awaited."""

    async def settle(self, used: int | Mapping[str, int]) -> bool:
        """As `Reservation.settle`."""
        change = [] if self._decided else self._differences(used)
        if not self._first():
            return False
        if self._waiter is not None:
            self._limiter._queue.done(self._waiter)
        try:
            if change and not self._free:
                await self._limiter._agive_back(Waiter(change, self.decision, None))
        except StoreError as error:
            self._limiter._give_back_failed(self._key, self._cost, self.decision, error)
        return True

    async def cancel(self) -> bool:
        """As `Reservation.cancel`."""
        if not self._first():
            return False
        if not self._free:
            await self._limiter._agive_up(self._waiter, self._key, self._cost, self._decision)
        return True

    async def __aenter__(self) -> AsyncReservation:
        if not self._decision:
            raise RateLimited(self._decision)
        if self._waiter is not None:
            try:
                await self._limiter._asleep(self._waiter, self._key, self._cost)
            except BaseException:
                self._decided = True
                raise
            self._decision, self._waiter = self._waiter.decision, None
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            await self.cancel()
        else:
            self._decided = True


class PendingReservation:
    """The result of `AsyncLimiter.reserve`: `await` it for an AsyncReservation, or enter it with `async with`."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, AsyncReservation]]) -> None:
        self._make = make
        self._made: AsyncReservation | None = None

    def __await__(self) -> Generator[Any, None, AsyncReservation]:
        return self._make().__await__()

    async def __aenter__(self) -> AsyncReservation:
        self._made = await self._make()
        return await self._made.__aenter__()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, trace)
