"""Reservation and AsyncReservation: an estimate is charged now and settled later with the actual cost.

    with limiter.reserve("user:42", cost=500, max_wait=5) as r:      # entering waits for the start
        r.settle(425)                                                # gives 75 back; an exception gives all back

The first settle or cancel counts, later ones do nothing and return False; if neither is called, the whole charge stays. After a
`reset` of the key they do nothing and return False: the charge is gone. So they do in a forked child: the charge is the parent's,
and `sys.exit` in the child's copy of the block must not give it back. Settling above the estimate always succeeds, as debt. A
store error while giving back is published as an event instead of raised, because it must not hide the caller's own exception.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, NoReturn, Self

from .algorithms.claim import Claim
from .decision import Decision
from .errors import ConfigurationError, RateLimited
from .limiter_base import Cost, Key, checked_cost, is_off
from .stores.sans_io import Plan, arun, run
from .wait_queue import BEGUN, Waiter, sleeper_us

if TYPE_CHECKING:
    from .limiter import WaitingLimiter


class Charge:
    """Base of Reservation and AsyncReservation: the charge, and the part of it to give back."""

    def __init__(
        self, limiter: WaitingLimiter, key: Key, cost: Cost, claims: list[Claim], waiter: Waiter | None, decision: Decision
    ) -> None:
        self._limiter, self._key, self._cost, self._claims = limiter, key, cost, claims
        self._waiter, self._decision = waiter, decision
        self._waits = waiter is not None  # for its start
        self._arrival = max([claim.number for claim in claims], default=0) or BEGUN
        self._process, self._cancelled = os.getpid(), False
        self._undecided = [None] if decision else []  # emptied by the first settle or cancel
        self._free = is_off()  # limiting was turned off: nothing was charged

    @property
    def decision(self) -> Decision:
        """The decision; its start may move up while the caller waits, when an earlier waiter leaves. Of a store that is far away
        the caller learns that later, also after the start."""
        return self._waiter.decision if self._waiter is not None else self._decision

    @property
    def wait(self) -> float:
        """Seconds from the decision to its start."""
        return self.decision.wait

    def __bool__(self) -> bool:
        return bool(self._decision)

    def __repr__(self) -> str:
        state = "refused" if not self._decision else "open" if self._undecided else "settled"
        return f"<{type(self).__name__} {state}: {self._cost!r} for {self._key!r}, wait {self.wait:.3f} s>"

    def interrupt(self) -> None:
        """Ends the wait of another thread or task for this start, if one waits: its `with` raises
        `concurrent.futures.CancelledError`, and gives the charge back."""
        waiter = self._waiter
        if waiter is not None:
            waiter.interrupted = True
            if waiter.wake is not None:
                waiter.wake()

    def _differences(self, used: int | Mapping[str, int]) -> list[Claim]:
        """The claims to give back so that `used` stays charged; a negative cost charges more."""
        claims = self._claims if self._waiter is None else self._waiter.claims
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
                change = claim.cost - checked_cost(used[claim.limit.name])  # 0 asks whether the key was reset
                one = Claim(claim.limit, claim.key, change, claim.cost, claim.reset_id)
                states = claim.remembered() if claim.limit.limit.sums_later_starts and self._waits else None
                if states is not None:  # of a charge that is still to come: what is left of it stays where it was
                    one.remember(*states, claim.charged_at())
                found.append(one)
        return found

    def _settle(self, used: int | Mapping[str, int]) -> Plan[bool]:
        change = self._differences(used) if self._undecided else []
        if not self._is_first():
            return False
        if change and [claim.cost for claim in change] == [claim.cost for claim in self._claims]:
            return (yield from self._give_all_back())  # which restores the states before the charge where that is possible
        whole, arrival = self._waiter, self._arrival
        if whole is not None:
            if self._waits:
                self._limiter._queue.done(whole)
            arrival = whole.arrival
        if not change or self._free:
            return True
        waiter = Waiter(change, self.decision, None, arrival, whole=whole)
        return (yield from self._limiter._give_up(waiter, self._key, self._cost, self.decision))

    def _cancel(self) -> Plan[bool]:
        return (yield from self._give_all_back()) if self._is_first() else False

    def _is_first(self) -> bool:
        """Whether this call settles or cancels: the first does, also of several threads (`pop` is one step), in its process."""
        try:
            self._undecided.pop()
        except IndexError:
            return False
        return self._process == os.getpid()

    def _end(self) -> Waiter:
        """Ends a wait for its start; returns the waiter that has the charge then."""
        self._cancelled = True
        self.interrupt()
        waiter, self._decision, self._waiter = self._waiter, self.decision, None
        return waiter or Waiter(self._claims, self._decision, None, self._arrival)

    def _give_all_back(self) -> Plan[bool]:
        waiter = self._end()
        return self._free or (yield from self._limiter._give_up(waiter, self._key, self._cost, self._decision))

    def _enter(self, loop: asyncio.AbstractEventLoop | None = None) -> Plan[Self]:
        """Waits for the start; raises RateLimited if it was refused, and CancelledError if it was cancelled, also meanwhile by
        another thread or task: nothing is charged then. After an exception the caller cancels."""
        if not self._decision:
            raise RateLimited(self._decision)
        if (waiter := self._waiter) is not None and self._waits:  # None meanwhile: another thread cancels
            yield from self._limiter._wait(waiter, self._key, self._cost, loop)
            self._waits = False
        if self._cancelled:
            raise CancelledError("the reservation was cancelled before its start")
        return self

    def _left_us(self) -> int:
        """Microseconds until the start, which may have moved up."""
        return self._waiter.left_us(sleeper_us(self._limiter.store)) if self._waiter is not None and self._waits else 0


class Reservation(Charge):
    """A reserved start: the result of `limiter.reserve`. It is truthy when granted.

    `with` waits for the start, raises `RateLimited` when refused, and cancels when an exception leaves the block. A reservation
    that is never settled keeps its whole charge.
    """

    def settle(self, used: int | Mapping[str, int]) -> bool:
        """Sets the actual cost: gives the rest back, or charges the difference. False if it was settled or cancelled before,
        or its key was reset."""
        return run(self._settle(used))

    def cancel(self) -> bool:
        """Gives everything back; later waiters move up. False if it was settled or cancelled before, or its key was reset."""
        return run(self._cancel())

    def __enter__(self) -> Reservation:
        try:
            return run(self._enter())
        except BaseException:
            self.cancel()
            raise

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.cancel()
        self._undecided.clear()


class AsyncReservation(Charge):
    """A reserved start for async code: `async with`; settle and cancel are awaited."""

    async def settle(self, used: int | Mapping[str, int]) -> bool:
        """As `Reservation.settle`."""
        return await arun(self._settle(used))

    async def cancel(self) -> bool:
        """As `Reservation.cancel`."""
        return await arun(self._cancel())

    async def __aenter__(self) -> AsyncReservation:
        try:
            return await arun(self._enter(asyncio.get_running_loop()))
        except BaseException as error:
            await self._cancel_after(error)
            raise

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            await self._cancel_after(error)
        self._undecided.clear()

    async def _cancel_after(self, error: object) -> None:
        """As `cancel`; on a local store the tasks cancelled in one iteration of the loop give back together."""
        if not isinstance(error, asyncio.CancelledError) or self._free:
            await self.cancel()
        elif self._is_first():
            waiter, loop = self._end(), asyncio.get_running_loop()
            if self._limiter._leave_soon(waiter, self._key, self._cost, loop):
                await asyncio.sleep(0)  # given back by then
            else:
                await arun(self._limiter._give_up(waiter, self._key, self._cost, self._decision))


AWAIT_IT = "write await limiter.reserve(…), or async with"


class PendingReservation:
    """The result of `AsyncLimiter.reserve`: `await` it for an AsyncReservation, or enter it with `async with`."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, AsyncReservation]]) -> None:
        self._make = make
        self._made: AsyncReservation | None = None

    if not TYPE_CHECKING:  # type checkers find a forgotten `await` themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{name!r} of a reservation that is not made yet; {AWAIT_IT}", name=name, obj=self)

    def __bool__(self) -> NoReturn:
        raise TypeError(f"a reservation that is not made yet is neither allowed nor refused; {AWAIT_IT}")

    def __await__(self) -> Generator[Any, None, AsyncReservation]:
        return self._make().__await__()

    async def __aenter__(self) -> AsyncReservation:
        self._made = await self._make()
        return await self._made.__aenter__()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, trace)
