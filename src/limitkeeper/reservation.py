"""A reservation: an estimate charged ahead, the truth settled later.

    with limiter.reserve("user:42", cost=500, max_wait=5) as r:      # entering waits its turn
        r.settle(425)                                                # gives 75 back; an exception gives all back

The first settle or cancel decides, later ones do nothing and return False. Never settled, the whole charge stays. Settling
above the estimate always succeeds; the rule takes it as debt. A store that fails while something is given back is told as an
event: it must not hide the caller's own exception.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from .algorithms.claim import Claim
from .decision import Decision
from .errors import ConfigurationError, RateLimited, StoreError
from .limiter_base import checked_cost, is_off
from .wait_queue import Waiter

if TYPE_CHECKING:
    from .waiting_limiter import WaitingLimiter


class Charge:
    """What both colours of a reservation share: what was charged, and what is to be given back."""

    def __init__(self, limiter: WaitingLimiter, key: Any, cost: Any, turn: Waiter | None, decision: Decision) -> None:
        self._limiter = limiter
        self._key = key
        self._cost = cost
        self._turn = turn
        self._decision = decision
        self._decided = not decision
        self._free = is_off()  # made while limiting was turned off: nothing was charged

    @property
    def decision(self) -> Decision:
        """The decision behind it; it may get better while it waits (somebody ahead left)."""
        return self._turn.decision if self._turn is not None else self._decision

    @property
    def wait(self) -> float:
        """Seconds from the decision to its start."""
        return self.decision.wait

    def __bool__(self) -> bool:
        return bool(self._decision)

    def __repr__(self) -> str:
        state = "refused" if not self._decision else "settled" if self._decided else "open"
        return f"<{type(self).__name__} {state}: {self._cost!r} for {self._key!r}, wait {self.wait:.3f} s>"

    def _differences(self, used: Any) -> list[Claim]:
        """The claims to give back so that `used` is what stays charged; below zero: to charge on top."""
        claims = self._limiter.claims(self._key, self._cost)
        if not isinstance(used, Mapping):
            if len({claim.cost for claim in claims}) > 1:
                names = ", ".join(claim.limit.name for claim in claims)
                raise ConfigurationError(f"settle({used!r}): the limits were charged differently; settle by name ({names})")
            used = {claim.limit.name: used for claim in claims}
        for name in used:
            if name not in self._limiter.limits:
                raise ConfigurationError(f"settle names {name!r}, which is no limit of {self._limiter.name!r}")
        found = []
        for claim in claims:
            if claim.limit.name in used:
                change = claim.cost - checked_cost(used[claim.limit.name])
                if change:
                    found.append(Claim(claim.limit, claim.key, change, claim.cost))
        return found

    def _first(self) -> bool:
        """True for the first who decides."""
        if self._decided:
            return False
        self._decided = True
        return True


class Reservation(Charge):
    """A place in time, reserved. Truthy when granted; entering waits for it."""

    def settle(self, used: int | Mapping[str, int]) -> bool:
        """Says what was really used; the rest is given back, or charged on top. False when it was decided before."""
        change = [] if self._decided else self._differences(used)
        if not self._first():
            return False
        if self._turn is not None:
            self._limiter._line.done(self._turn)
        try:
            if change and not self._free:
                self._limiter._line.leave([Waiter(change, self.decision, None)])
        except StoreError as error:
            self._limiter._give_back_failed(self._key, self._cost, self.decision, error)
        return True

    def cancel(self) -> bool:
        """Gives everything back; whoever waits behind moves up. False when it was decided before."""
        if not self._first():
            return False
        if not self._free:
            self._limiter._give_up(self._turn, self._key, self._cost, self._decision)
        return True

    def __enter__(self) -> Reservation:
        if not self._decision:
            raise RateLimited(self._decision)
        if self._turn is not None:
            try:
                self._limiter._sleep(self._turn, self._key, self._cost)
            except BaseException:
                self._decided = True
                raise
            self._decision, self._turn = self._turn.decision, None
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.cancel()
        else:
            self._decided = True


class AsyncReservation(Charge):
    """The same for async code: `async with`, and settle and cancel are awaited."""

    async def settle(self, used: int | Mapping[str, int]) -> bool:
        change = [] if self._decided else self._differences(used)
        if not self._first():
            return False
        if self._turn is not None:
            self._limiter._line.done(self._turn)
        try:
            if change and not self._free:
                await self._limiter._return_async(Waiter(change, self.decision, None))
        except StoreError as error:
            self._limiter._give_back_failed(self._key, self._cost, self.decision, error)
        return True

    async def cancel(self) -> bool:
        if not self._first():
            return False
        if not self._free:
            await self._limiter._agive_up(self._turn, self._key, self._cost, self._decision)
        return True

    async def __aenter__(self) -> AsyncReservation:
        if not self._decision:
            raise RateLimited(self._decision)
        if self._turn is not None:
            try:
                await self._limiter._asleep(self._turn, self._key, self._cost)
            except BaseException:
                self._decided = True
                raise
            self._decision, self._turn = self._turn.decision, None
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            await self.cancel()
        else:
            self._decided = True


class PendingReservation:
    """What `AsyncLimiter.reserve` returns: `await` it for the reservation, or enter it with `async with`."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._made: AsyncReservation | None = None

    def __await__(self) -> Generator[Any, None, AsyncReservation]:
        return self._make().__await__()  # type: ignore[no-any-return]

    async def __aenter__(self) -> AsyncReservation:
        self._made = await self._make()
        return await self._made.__aenter__()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, trace)
