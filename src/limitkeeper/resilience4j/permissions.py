"""Permissions that grow gradually, and callers that take them, now or at a moment to come.

They are one token bucket and one key of a `Limiter`, so taking is one decision: refill first, then take. What is missing is
reserved ahead of time when the wait fits into `timeout_duration`. A wait that does not fit changes nothing and is refused at
once: the caller does not sleep through its timeout only to hear no. Who leaves while waiting gives back.

Waits are whole microseconds, rounded up, told in nanoseconds. Rejected: a time index in here (it would be a second algorithm).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..decision import Decision
from ..errors import RateLimited
from ..fork import reset_after_fork
from ..limiter import AsyncLimiter, Limiter
from ..limiter_base import checked_cost
from ..observe.events import DRAINED
from ..stores import Store
from .config import RateLimiterConfig
from .errors import AcquirePermissionCancelled, RequestNotPermitted
from .events import EventPublisher, EventType

#: The one key of a RateLimiter.
KEY = "permissions"
#: What a reservation answers when the wait would be longer than the timeout.
REFUSED = -1


class Standing(NamedTuple):
    """What holds now; a change puts another in its place, so that nobody sees half of one."""

    config: RateLimiterConfig
    limiter: Limiter
    alimiter: AsyncLimiter


def stand(name: str, config: RateLimiterConfig, store: Store | str | None) -> Standing:
    limiter = Limiter(config.limit, store, name)
    return Standing(config, limiter, AsyncLimiter(config.limit, limiter.store, name))


class Permissions:
    """The verbs that take permissions."""

    def __init__(self, name: str, config: RateLimiterConfig, store: Store | str | None) -> None:
        self.name = name
        self._standing = stand(name, config, store)
        self.store: Store = self._standing.limiter.store
        self._publisher = EventPublisher(self.store.clock)
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """A lock that nobody holds, and nobody who waits: at the start, and in the child of a fork."""
        self._lock = threading.Lock()
        self._cancellable = 0

    def waiting(self) -> int:
        """Callers of this process that sleep until their permission comes."""
        return self._standing.limiter.waiting(KEY) + self._cancellable

    # Waiting ---------------------------------------------------------------------------------------------------

    def wait_for_permission(self, permits: int = 1, cancel: threading.Event | None = None) -> None:
        """Takes permissions, waiting up to the timeout. Raises RequestNotPermitted at once when that would not do.

        Setting `cancel` ends the wait: what was reserved is given back, and AcquirePermissionCancelled is raised.
        """
        config, limiter, _ = self._standing
        with self._told(permits):
            if cancel is None:
                limiter.acquire(KEY, permits, config.timeout)
            else:
                self._acquire_unless(cancel, limiter, permits, config)

    async def wait_for_permission_async(self, permits: int = 1) -> None:
        """The same for asyncio; a cancelled task gives back, and its CancelledError goes on as it is."""
        config, _, alimiter = self._standing
        with self._told(permits):
            await alimiter.acquire(KEY, permits, config.timeout)

    def acquire_permission(self, permits: int = 1, cancel: threading.Event | None = None) -> bool:
        """As wait_for_permission, answering true or false. More than can ever be there raises RequestNotPermitted."""
        try:
            self.wait_for_permission(permits, cancel)
        except AcquirePermissionCancelled:
            return False
        except RequestNotPermitted as refused:
            return bool(_unless_never(refused, 0))
        return True

    async def acquire_permission_async(self, permits: int = 1) -> bool:
        """The same for asyncio."""
        try:
            await self.wait_for_permission_async(permits)
        except RequestNotPermitted as refused:
            return bool(_unless_never(refused, 0))
        return True

    def _acquire_unless(self, cancel: threading.Event, limiter: Limiter, permits: int, config: RateLimiterConfig) -> None:
        """Acquires, and leaves the line when `cancel` is set. Threads can't be interrupted in Python; an event can."""
        if cancel.is_set():
            raise AcquirePermissionCancelled(f"RateLimiter {self.name!r}: cancelled before it asked")
        reservation = limiter.reserve(KEY, permits, config.timeout)
        if not reservation:
            raise RateLimited(reservation.decision)
        try:
            if reservation.wait:
                self._sleep(reservation.wait, cancel)
        except BaseException:
            reservation.cancel()
            raise
        reservation.settle(permits)

    def _sleep(self, seconds: float, cancel: threading.Event) -> None:
        with self._lock:
            self._cancellable += 1
        try:
            self.store.clock.sleep(seconds, cancel)
        finally:
            with self._lock:
                self._cancellable -= 1
        if cancel.is_set():
            raise AcquirePermissionCancelled(f"RateLimiter {self.name!r}: cancelled while it waited; nothing was taken")

    # Reserving -------------------------------------------------------------------------------------------------

    def reserve_permission(self, permits: int = 1) -> int:
        """Takes permissions and never waits: 0 is go, more are the nanoseconds to wait first, −1 is refused, nothing changed.

        More than can ever be there raises RequestNotPermitted.
        """
        config, limiter, _ = self._standing
        try:
            with self._told(permits):
                return _granted(limiter, permits, limiter.decide(KEY, permits, config.timeout_us))
        except RequestNotPermitted as refused:
            return _unless_never(refused, REFUSED)

    async def reserve_permission_async(self, permits: int = 1) -> int:
        """The same for asyncio."""
        config, limiter, _ = self._standing
        try:
            with self._told(permits):
                return _granted(limiter, permits, await self._adecide(limiter, permits, config.timeout_us))
        except RequestNotPermitted as refused:
            return _unless_never(refused, REFUSED)

    async def _adecide(self, limiter: Limiter, permits: int, max_wait_us: int) -> Decision:
        if self.store.local:
            return limiter.decide(KEY, permits, max_wait_us)
        return await self.store.adecide(limiter.claims(KEY, permits), max_wait_us)

    # Draining --------------------------------------------------------------------------------------------------

    def drain_permissions(self) -> int:
        """Takes all permissions that are there now, and says how many. A fraction of one goes on growing."""
        limiter = self._standing.limiter
        while True:
            left = limiter.peek(KEY).remaining
            decision = limiter.decide(KEY, left)
            if decision:  # refused: somebody took some in between; look again
                return self._drained(limiter, left, decision)

    async def drain_permissions_async(self) -> int:
        """The same for asyncio."""
        _, limiter, alimiter = self._standing
        while True:
            left = (await alimiter.peek(KEY)).remaining
            decision = await self._adecide(limiter, left, 0)
            if decision:
                return self._drained(limiter, left, decision)

    def _drained(self, limiter: Limiter, permits: int, decision: Decision) -> int:
        limiter.events.publish(DRAINED, self.name, KEY, permits, decision)
        self._publisher.publish(EventType.DRAINED, self.name, permits)
        return permits

    # Telling ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _told(self, permits: int) -> Iterator[None]:
        """Tells how an attempt ended; a refusal leaves as RequestNotPermitted."""
        checked_cost(permits)
        try:
            yield
        except BaseException as error:
            self._publisher.publish(EventType.FAILED_ACQUIRE, self.name, permits)
            if isinstance(error, RateLimited):
                raise RequestNotPermitted(error.decision) from None
            raise
        self._publisher.publish(EventType.SUCCESSFUL_ACQUIRE, self.name, permits)


def _granted(limiter: Limiter, permits: int, decision: Decision) -> int:
    """The nanoseconds to wait."""
    if not limiter.count(decision, KEY, permits):
        raise RateLimited(decision)
    return decision.wait_us * 1000


def _unless_never(refused: RequestNotPermitted, answer: int) -> int:
    """Not yet is an answer; never is an error."""
    if refused.decision.retry_us < 0:
        raise refused
    return answer
