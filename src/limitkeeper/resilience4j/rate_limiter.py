"""RateLimiter: Resilience4j's interface over one token bucket and one key of a `Limiter`.

Permissions grow gradually. Taking them is one decision: refill first, then take. Missing permissions are reserved ahead of time
when the wait fits into `timeout_duration`. A wait that does not fit changes nothing and is refused at once: the caller does not
sleep through its timeout only to be refused. A caller that leaves while waiting gives back.

Waits are whole microseconds, rounded up, reported in nanoseconds. Rejected: a time index in here (a second algorithm).
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import NamedTuple, TypeVar, overload

from ..decision import Decision
from ..decorators import is_kind
from ..errors import ConfigurationError, LimitkeeperError, RateLimited
from ..fork import reset_after_fork
from ..limiter import AsyncLimiter, Limiter
from ..limiter_base import checked_cost
from ..observe.events import DRAINED
from ..rate import Duration
from ..stores import Store
from .config import Outcome, RateLimiterConfig
from .events import EventPublisher, EventType

log = logging.getLogger("limitkeeper")
F = TypeVar("F", bound=Callable[..., object])
R = TypeVar("R")
Permits = int | Callable[..., int]
#: The one key of a RateLimiter.
KEY = "permissions"
#: The answer of a reservation whose wait would be longer than the timeout.
REFUSED = -1
#: Seconds after which a caller that waits with a `cancel` event looks whether its start has moved up.
POLL = 0.05


class RequestNotPermitted(RateLimited):
    """Refused. `decision` says when to retry; `retry_after` is inf when the number can never be available."""

    def __str__(self) -> str:
        d = self.decision
        if d.retry_after == float("inf"):
            return f"RateLimiter {d.name!r} can never permit this call: it holds at most {d.limit} permissions"
        return f"RateLimiter {d.name!r} does not permit this call within its timeout: try again in {d.retry_after:.3f} s"


class AcquirePermissionCancelled(LimitkeeperError):
    """The `cancel` event of a waiting caller was set; its reservation was given back."""


class Current(NamedTuple):
    """The configuration in force and its limiters; a change replaces them together."""

    config: RateLimiterConfig
    limiter: Limiter
    async_limiter: AsyncLimiter

    @classmethod
    def of(cls, name: str, config: RateLimiterConfig, store: Store | str | None) -> Current:
        limiter = Limiter(config.limit, store, name)
        return cls(config, limiter, AsyncLimiter(config.limit, limiter.store, name))


class Metrics:
    """Live numbers of one RateLimiter; each property is computed when it is read."""

    def __init__(self, rate_limiter: RateLimiter) -> None:
        self._rate_limiter = rate_limiter

    @property
    def available_permissions(self) -> int:
        """Whole permissions available now; below zero when they are reserved ahead: −1 means that up to one is owed.

        Exact: a positive number comes from a peek. Debt does not show in a peek, so it is read from the store's own state
        (at, taken, …) at the moment of that peek: floor((full − max(0, taken − elapsed · gain)) / unit). Rejected: to give back
        0, which rounds what is reserved ahead up to a tick of the clock.
        """
        limiter = self._rate_limiter.limiter
        now = limiter.peek(KEY)
        if now.remaining > 0:
            return now.remaining
        (named,) = limiter.named
        limit = named.limit
        for key, state in limiter.store.items(named):
            if key == KEY:
                elapsed = max(0, now.start_us // limit.tick - state[0])
                return int((limit.full - max(0, state[1] - elapsed * limit.gain)) // limit.unit)
        return 0

    @property
    def number_of_waiting_threads(self) -> int:
        """Callers of this process that sleep until their permission comes: threads, and tasks too."""
        return self._rate_limiter.waiting()

    @property
    def nanos_to_wait(self) -> int:
        """Nanoseconds until one permission is available, with no other traffic; 0 when it is available now."""
        return self._rate_limiter.limiter.peek(KEY).retry_us * 1000

    def __repr__(self) -> str:
        return (
            f"Metrics(available_permissions={self.available_permissions}, "
            f"number_of_waiting_threads={self.number_of_waiting_threads}, nanos_to_wait={self.nanos_to_wait})"
        )


class RateLimiter:
    """Permissions under a name. `store` keeps them, and its clock is the one that counts.

    `of` also takes a function that returns the configuration.
    """

    def __init__(
        self,
        name: str,
        config: RateLimiterConfig | None = None,
        *,
        store: Store | str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        config = RateLimiterConfig() if config is None else config
        if not isinstance(config, RateLimiterConfig):
            raise ConfigurationError(f"{name!r}: expected a RateLimiterConfig, got {config!r}")
        self.name = name
        self._current = Current.of(name, config, store)
        self._owner = self._current.limiter  # it closes the store if it opened it
        self.store: Store = self._owner.store
        self.tags: Mapping[str, str] = MappingProxyType(dict(tags or {}))
        self.event_publisher = EventPublisher(self.store.clock)
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._cancellable_waiters = 0

    @classmethod
    def of(
        cls,
        name: str,
        config: RateLimiterConfig | Callable[[], RateLimiterConfig],
        *,
        store: Store | str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> RateLimiter:
        return cls(name, config() if callable(config) else config, store=store, tags=tags)

    @classmethod
    def of_defaults(cls, name: str, *, store: Store | str | None = None, tags: Mapping[str, str] | None = None) -> RateLimiter:
        return cls(name, store=store, tags=tags)

    @property
    def config(self) -> RateLimiterConfig:
        return self._current.config

    @property
    def limiter(self) -> Limiter:
        """The limitkeeper limiter underneath, with its own events and counters."""
        return self._current.limiter

    @property
    def metrics(self) -> Metrics:
        return Metrics(self)

    def waiting(self) -> int:
        """Callers of this process that sleep until their permission comes."""
        return self.limiter.waiting(KEY) + self._cancellable_waiters

    def close(self) -> None:
        """Closes the store if this RateLimiter opened it."""
        self._owner.close()

    def __repr__(self) -> str:
        return f"<RateLimiter {self.name!r} {self.config!r}>"

    # Waiting ---------------------------------------------------------------------------------------------------

    def wait_for_permission(self, permits: int = 1, cancel: threading.Event | None = None) -> None:
        """Takes permissions, waiting up to the timeout. Raises RequestNotPermitted at once when the wait would be longer.

        Setting `cancel` ends the wait: the reservation is given back, and AcquirePermissionCancelled is raised.
        """
        config, limiter, _ = self._current
        with self._published(permits):
            if cancel is None:
                limiter.acquire(KEY, permits, config.timeout)
            else:
                self._acquire_unless(cancel, limiter, permits, config)

    async def wait_for_permission_async(self, permits: int = 1) -> None:
        """The same for asyncio; a cancelled task gives back, and its CancelledError propagates."""
        config, _, async_limiter = self._current
        with self._published(permits):
            await async_limiter.acquire(KEY, permits, config.timeout)

    def acquire_permission(self, permits: int = 1, cancel: threading.Event | None = None) -> bool:
        """As wait_for_permission, returning true or false. A number that can never be available raises RequestNotPermitted."""
        with _suppress_not_yet(), suppress(AcquirePermissionCancelled):
            self.wait_for_permission(permits, cancel)
            return True
        return False

    async def acquire_permission_async(self, permits: int = 1) -> bool:
        """The same for asyncio."""
        with _suppress_not_yet():
            await self.wait_for_permission_async(permits)
            return True
        return False

    def _acquire_unless(self, cancel: threading.Event, limiter: Limiter, permits: int, config: RateLimiterConfig) -> None:
        """Acquires, and stops waiting when `cancel` is set. Threads can't be interrupted in Python; an event can be set."""
        if cancel.is_set():
            raise AcquirePermissionCancelled(f"RateLimiter {self.name!r}: cancelled before the call; nothing was taken")
        reservation = limiter.reserve(KEY, permits, config.timeout)
        if not reservation:
            raise RateLimited(reservation.decision)
        try:
            while (left_us := reservation._left_us()) > 0:  # an event that the caller sets can't say that the start has moved up
                self._sleep(min(left_us / 1e6, POLL), cancel)
        except BaseException:
            reservation.cancel()
            raise
        reservation.settle(permits)

    def _sleep(self, seconds: float, cancel: threading.Event) -> None:
        with self._lock:
            self._cancellable_waiters += 1
        try:
            self.store.clock.sleep(seconds, cancel)
        finally:
            with self._lock:
                self._cancellable_waiters -= 1
        if cancel.is_set():
            raise AcquirePermissionCancelled(f"RateLimiter {self.name!r}: cancelled while waiting; nothing was taken")

    # Reserving -------------------------------------------------------------------------------------------------

    def reserve_permission(self, permits: int = 1) -> int:
        """Takes permissions without waiting: 0 is permitted now, n > 0 after n nanoseconds, −1 is refused and nothing changed.

        A number that can never be available raises RequestNotPermitted.
        """
        config, limiter, _ = self._current
        with _suppress_not_yet(), self._published(permits):
            return _granted_ns(limiter, permits, limiter._decide(KEY, permits, config.timeout_us))
        return REFUSED

    async def reserve_permission_async(self, permits: int = 1) -> int:
        """The same for asyncio."""
        config, limiter, _ = self._current
        with _suppress_not_yet(), self._published(permits):
            return _granted_ns(limiter, permits, await self._adecide(limiter, permits, config.timeout_us))
        return REFUSED

    async def _adecide(self, limiter: Limiter, permits: int, max_wait_us: int) -> Decision:
        if self.store.local:
            return limiter._decide(KEY, permits, max_wait_us)
        return await self.store.adecide(limiter.claims(KEY, permits), max_wait_us)

    # Draining --------------------------------------------------------------------------------------------------

    def drain_permissions(self) -> int:
        """Takes all available permissions and returns how many. A fraction of one goes on growing."""
        limiter = self.limiter
        while True:
            remaining = limiter.peek(KEY).remaining
            decision = limiter._decide(KEY, remaining)
            if decision:  # refused: another caller took some in between; read again
                return self._publish_drained(limiter, remaining, decision)

    async def drain_permissions_async(self) -> int:
        """The same for asyncio."""
        _, limiter, async_limiter = self._current
        while True:
            remaining = (await async_limiter.peek(KEY)).remaining
            decision = await self._adecide(limiter, remaining, 0)
            if decision:
                return self._publish_drained(limiter, remaining, decision)

    def _publish_drained(self, limiter: Limiter, permits: int, decision: Decision) -> int:
        limiter.events.publish(DRAINED, self.name, KEY, permits, decision)
        self.event_publisher.publish(EventType.DRAINED, self.name, cost=permits)
        return permits

    @contextmanager
    def _published(self, permits: int) -> Iterator[None]:
        """Publishes how an attempt ended; turns RateLimited into RequestNotPermitted."""
        checked_cost(permits)
        try:
            yield
        except BaseException as error:
            self.event_publisher.publish(EventType.FAILED_ACQUIRE, self.name, cost=permits)
            if isinstance(error, RateLimited):
                raise RequestNotPermitted(error.decision) from None
            raise
        self.event_publisher.publish(EventType.SUCCESSFUL_ACQUIRE, self.name, cost=permits)

    # Changes ---------------------------------------------------------------------------------------------------

    def change_timeout_duration(self, timeout_duration: Duration) -> None:
        """Changes the timeout for later calls; callers that wait already keep waiting."""
        with self._lock:
            self._current = self._current._replace(config=self.config.replace(timeout_duration=timeout_duration))

    def change_limit_for_period(self, limit_for_period: int) -> None:
        """Changes the rate from now on (not from the next period). What is missing or reserved stays so, up to the new capacity.

        The capacity follows, unless one was given; a bucket that started full counts as started full under the new one.
        """
        with self._lock:
            old = self.config
            new = old.replace(limit_for_period=limit_for_period, initial_permits=0)
            full = old.initial_permits == old.permit_capacity
            initial = new.permit_capacity if full else min(old.initial_permits, new.permit_capacity)
            self._current = Current.of(self.name, new.replace(initial_permits=initial), self.store)
            claims = self.limiter.claims(KEY, 1) if any(self.store.items(self.limiter.named[0])) else []
            if claims and (first := self.store.decide(claims, remember=True)):  # the new rate's first use is this moment
                self.store.give_back(claims, first.start_us, first.source)
            elif claims and new.limit_for_period != old.limit_for_period:
                self._cap_debt(self.limiter)

    def _cap_debt(self, limiter: Limiter) -> None:
        """A rate that was in use before was charged all that was permitted since: it may owe more than its capacity."""
        (named,) = limiter.named
        limit, now_us = named.limit, limiter.peek(KEY).start_us
        for key, state in self.store.rate_items(named):
            if key == KEY and limit.used(state, now_us // limit.tick) > 2 * limit.capacity:
                self.store.load(named, [(KEY, (now_us // limit.tick, 2 * limit.full, 0))])

    # Results ---------------------------------------------------------------------------------------------------

    def on_result(self, result: object) -> None:
        """Reports what a call returned; drains the permissions if the configuration says so."""
        if self._drains(Outcome(result=result)):
            self.drain_permissions()

    def on_error(self, error: BaseException) -> None:
        """Reports what a call raised."""
        if self._drains(Outcome(error=error)):
            self.drain_permissions()

    def on_success(self) -> None:
        """Reports that a call without a result succeeded."""
        self.on_result(None)

    async def _settle_async(self, outcome: Outcome) -> None:
        if self._drains(outcome):
            await self.drain_permissions_async()

    def _drains(self, outcome: Outcome) -> bool:
        predicate = self.config.drain_permissions_on_result
        try:
            return predicate is not None and bool(predicate(outcome))
        except Exception:  # it must not hide how the call ended
            log.exception("drain_permissions_on_result of RateLimiter %r failed; nothing is drained", self.name)
            return False

    # Decorators ------------------------------------------------------------------------------------------------

    @overload
    def decorate(self, function: F, permits: Permits = 1) -> F: ...

    @overload
    def decorate(self, function: None = None, permits: Permits = 1) -> Callable[[F], F]: ...

    def decorate(self, function: F | None = None, permits: Permits = 1) -> F | Callable[[F], F]:
        """A function, or coroutine function, that waits for permission before every call.

        `permits` is a number, or a function of the call's own arguments. Refused calls raise RequestNotPermitted. Without a
        function it is a decorator: `@backend.decorate(permits=3)`.
        """
        return functools.partial(self._decorate, permits) if function is None else self._decorate(permits, function)

    def _decorate(self, permits: Permits, function: F) -> F:
        if not callable(function) or isinstance(function, staticmethod):
            raise TypeError(f"decorate() takes a function, not {function!r}; put it below @staticmethod and @classmethod")
        if is_kind(function, inspect.isasyncgenfunction):
            raise TypeError(f"{function!r} is an async generator function; use limitkeeper.AsyncLimiter.limit for that")

        def count(args: tuple[object, ...], kwargs: dict[str, object]) -> int:
            return permits(*args, **kwargs) if callable(permits) else permits

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            self.wait_for_permission(count(args, kwargs))
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                self.on_error(error)
                raise
            self.on_result(result)
            return result

        @functools.wraps(function)
        async def acall(*args: object, **kwargs: object) -> object:
            await self.wait_for_permission_async(count(args, kwargs))
            try:
                result = await function(*args, **kwargs)  # type: ignore[misc]  # a coroutine function
            except Exception as error:
                await self._settle_async(Outcome(error=error))
                raise
            await self._settle_async(Outcome(result=result))
            return result

        return acall if is_kind(function, inspect.iscoroutinefunction) else call  # type: ignore[return-value]

    def execute(self, function: Callable[..., R], *args: object, permits: Permits = 1, **kwargs: object) -> R:
        """Calls a function once it has permission; of a coroutine function it returns the coroutine."""
        return self.decorate(function, permits)(*args, **kwargs)


def _granted_ns(limiter: Limiter, permits: int, decision: Decision) -> int:
    """The nanoseconds to wait."""
    if not limiter._count(decision, KEY, permits):
        raise RateLimited(decision)
    return decision.wait_us * 1000


@contextmanager
def _suppress_not_yet() -> Iterator[None]:
    """Suppresses RequestNotPermitted unless the call can never be permitted."""
    try:
        yield
    except RequestNotPermitted as refused:
        if refused.decision.retry_us < 0:
            raise
