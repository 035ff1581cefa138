"""Limiter and AsyncLimiter: what users type. The verbs that wait, on top of those that never do.

`acquire` is one decision and one sleep: the decision charges at a start to come, the caller sleeps until then. Nobody polls,
nobody is overtaken; a deadline shorter than the wait refuses at once, and who is cancelled gives its start back.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .algorithms import Limit
from .algorithms.text import named_limits
from .algorithms.verdict import MAX_WAIT
from .decision import Decision
from .errors import ConfigurationError, RateLimited
from .observe.events import WAITED
from .rate import Duration, duration_us
from .reservation import AsyncReservation, PendingReservation, Reservation
from .stores import Store, store_from_url
from .stores.memory import MemoryStore
from .verbs import Cost, Key, Verbs
from .waiting import Line, Turn, Turnstile, line_of

F = TypeVar("F", bound=Callable[..., Any])
Limits = Limit | str | Mapping[str, Limit | str] | Sequence[Limit | str]


class Stats(NamedTuple):
    """What a limiter counted: decisions, callers that sleep now, keys and shared decisions of its store."""

    allowed: int
    refused: int
    waiting: int
    keys: int
    shared: int


class Waits(Verbs):
    """What both colours share: how to wait, how to leave, how to decorate."""

    __slots__ = ("_line", "_loops", "_owns", "_turnstile")

    def __init__(self, limits: Limits, store: Store | str | None = None, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigurationError(f"a limiter's name must be a text, not {name!r}")
        self._owns = store is None or isinstance(store, str)
        if store is None:
            store = MemoryStore()
        elif isinstance(store, str):
            store = store_from_url(store)
        elif not isinstance(store, Store):
            raise ConfigurationError(f"store must be a store or a URL such as 'memory://', not {store!r}")
        super().__init__(named_limits(limits, name), store, name)
        self._line: Line = line_of(store)
        self._turnstile = Turnstile()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Turnstile] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        limits = ", ".join(
            f"{name!r}: {limit}" if name != str(limit) else repr(str(limit)) for name, limit in self.limits.items()
        )
        return f"<{type(self).__name__} {limits}>"

    def waiting(self, key: Key | None = None) -> int:
        """How many callers of this process are waiting, for a key or for any."""
        identities = {named.identity for named in self.named}
        keys = None if key is None else {claim.key for claim in self.claims(key)}
        standing = [self._turnstile, *self._loops.values()]
        ticket = None if key is None else self._ticket(key)
        return self._line.waiting(identities, keys) + sum(line.waiting(ticket) for line in standing)

    def stats(self) -> Stats:
        """Numbers since this limiter was made."""
        keys = len(self.store) if isinstance(self.store, MemoryStore) else 0
        return Stats(*self.counts(), self.waiting(), keys, self.shared)

    # Waiting ---------------------------------------------------------------------------------------------------

    def _book(self, key: Key, cost: Cost, patience_us: int) -> tuple[Decision, Turn | None]:
        """One decision; a start to come takes its place in the line in the same step."""
        with self._line.lock:
            decision = self.decide(key, cost, patience_us)
            return decision, self._turn(key, cost, patience_us, decision)

    async def _abook(self, key: Key, cost: Cost, patience_us: int) -> tuple[Decision, Turn | None]:
        if self.store.local:
            return self._book(key, cost, patience_us)
        claims = self.claims(key, cost)
        decision = await self.store.adecide(claims, None if patience_us >= MAX_WAIT else patience_us)
        return decision, self._turn(key, cost, patience_us, decision)

    def _turn(self, key: Key, cost: Cost, patience_us: int, decision: Decision) -> Turn | None:
        if not decision.wait_us:
            return None
        deadline = None if patience_us >= MAX_WAIT else decision.start_us - decision.wait_us + patience_us
        turn = Turn(self.claims(key, cost), decision, deadline)
        self._line.join(turn)
        return turn

    def _sleep(self, turn: Turn, key: Key, cost: Cost) -> None:
        """Sleeps until the turn has come, which may be earlier than promised."""
        wake = threading.Event()
        turn.asleep, turn.wake = True, wake.set
        try:
            while True:
                wake.clear()
                decision = turn.decision
                if not decision:
                    break
                self.store.clock.sleep(decision.wait, wake)
                if not wake.is_set():
                    break
        except BaseException:
            self._line.leave([turn])
            raise
        self._come(turn, key, cost)

    async def _asleep(self, turn: Turn, key: Key, cost: Cost) -> None:
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()
        turn.asleep, turn.wake = True, lambda: _wake(loop, wake)
        try:
            while True:
                wake.clear()
                decision = turn.decision
                if not decision:
                    break
                await self.store.clock.asleep(decision.wait, wake)
                if not wake.is_set():
                    break
        except BaseException:
            if self.store.local:
                self._line.leave_soon(turn, loop)
            else:
                await self._agive_up(turn, key, cost, turn.decision)
            raise
        self._come(turn, key, cost)

    def _come(self, turn: Turn, key: Key, cost: Cost) -> None:
        self._line.done(turn)
        if not turn.decision:  # somebody from elsewhere took the place while the line moved up
            raise RateLimited(self.count(turn.decision, key, cost))
        if self._publisher is not None:
            self.events.publish(WAITED, self.name, key, cost, turn.decision)

    def _give_up(self, turn: Turn | None, key: Key, cost: Cost, decision: Decision) -> None:
        if turn is not None:
            self._line.leave([turn])
        else:
            self.store.give_back(self.claims(key, cost), decision.start_us)

    async def _agive_up(self, turn: Turn | None, key: Key, cost: Cost, decision: Decision) -> None:
        if turn is None:
            await self.store.agive_back(self.claims(key, cost), decision.start_us)
        elif self.store.local:
            self._line.leave([turn])
        else:
            self._line.done(turn)
            await self.store.agive_back(turn.claims, turn.decision.start_us)

    # Acquiring -------------------------------------------------------------------------------------------------

    def _acquire(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        patience = MAX_WAIT if timeout is None else min(MAX_WAIT, duration_us(timeout))
        if not self.reserves:
            return self._stand(key, cost, timeout)
        decision, turn = self._book(key, cost, patience)
        if not self.count(decision, key, cost):
            raise RateLimited(decision)
        if turn is not None:
            self._sleep(turn, key, cost)
            return turn.decision
        return decision

    async def _aacquire(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        patience = MAX_WAIT if timeout is None else min(MAX_WAIT, duration_us(timeout))
        if not self.reserves:
            return await self._astand(key, cost, timeout)
        decision, turn = await self._abook(key, cost, patience)
        if not self.count(decision, key, cost):
            raise RateLimited(decision)
        if turn is not None:
            await self._asleep(turn, key, cost)
            return turn.decision
        return decision

    def _ticket(self, key: Key) -> Any:
        return tuple(sorted((k, v) for k, v in key.items() if v is not None)) if isinstance(key, Mapping) else key

    def _stand(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        """For limits that can't reserve: stand in line, and ask again when told to."""
        clock, ticket = self.store.clock, self._ticket(key)
        deadline = None if timeout is None else clock.now_us() + duration_us(timeout)
        turn = threading.Event()
        first = self._turnstile.enter(ticket, turn)
        try:
            if not first:
                self._check_in_time(self.peek(key, cost), deadline, clock.now_us(), key, cost)
                left = None if deadline is None else max(0, deadline - clock.now_us()) / 1e6
                if not turn.wait(left):
                    raise RateLimited(self.count(self.peek(key, cost), key, cost))
            while True:
                decision = self.decide(key, cost)
                if decision:
                    return self.count(decision, key, cost)
                self._check_in_time(decision, deadline, clock.now_us(), key, cost)
                clock.sleep(decision.retry_after)
        finally:
            following = self._turnstile.leave(ticket, turn)
            if following is not None:
                following.set()

    async def _astand(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        clock, ticket = self.store.clock, self._ticket(key)
        deadline = None if timeout is None else clock.now_us() + duration_us(timeout)
        turn = asyncio.Event()
        turnstile = self._loops.setdefault(asyncio.get_running_loop(), Turnstile())
        first = turnstile.enter(ticket, turn)
        try:
            if not first:
                self._check_in_time(await self._ask(key, cost, commit=False), deadline, clock.now_us(), key, cost)
                left = None if deadline is None else max(0, deadline - clock.now_us()) / 1e6
                try:
                    async with asyncio.timeout(left):
                        await turn.wait()
                except TimeoutError:
                    refused = await self._ask(key, cost, commit=False)
                    raise RateLimited(self.count(refused, key, cost)) from None
            while True:
                decision = await self._ask(key, cost)
                if decision:
                    return self.count(decision, key, cost)
                self._check_in_time(decision, deadline, clock.now_us(), key, cost)
                await clock.asleep(decision.retry_after)
        finally:
            following = turnstile.leave(ticket, turn)
            if following is not None:
                following.set()

    async def _ask(self, key: Key, cost: Cost, commit: bool = True) -> Decision:
        if self.store.local:
            return self.decide(key, cost) if commit else Verbs.peek(self, key, cost)
        return await self.store.adecide(self.claims(key, cost), 0, commit)

    def _check_in_time(self, decision: Decision, deadline: int | None, now_us: int, key: Key, cost: Cost) -> None:
        """A deadline before the promised moment refuses at once."""
        never = decision.retry_us < 0
        if not decision and (never or (deadline is not None and now_us + decision.retry_us > deadline)):
            raise RateLimited(self.count(decision, key, cost))

    def _patience(self, max_wait: Duration | None) -> int:
        if not self.reserves:
            return 0
        return MAX_WAIT if max_wait is None else min(MAX_WAIT, duration_us(max_wait))

    # Decorating ------------------------------------------------------------------------------------------------

    def limit(self, key: Any, cost: Any = 1, timeout: Duration | None = 0) -> Callable[[F], F]:
        """Limits every call of a function, method, coroutine or (async) generator.

        `key` and `cost` are values, or functions of the call's own arguments. Refused calls raise `RateLimited`; with a
        `timeout` they wait up to that long first.
        """

        def decorate(function: F) -> F:
            return _decorated(self, function, key, cost, timeout)  # type: ignore[no-any-return]

        return decorate


class Limiter(Waits):
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
            self.store.give_back(claims)

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


class AsyncLimiter(Waits):
    """The same for asyncio. On a store in this process nothing is awaited but the waiting itself."""

    __slots__ = ("_hit",)

    def __init__(self, limits: Limits, store: Store | str | None = None, name: str | None = None) -> None:
        super().__init__(limits, store, name)
        self._hit = super().hit if self.store.local else None

    async def hit(self, key: Key, cost: Cost = 1) -> Decision:  # type: ignore[override]
        """Takes `cost` now, or says when to come back. Never waits for its turn."""
        if self._hit is not None:
            return self._hit(key, cost)
        return self.count(await self._ask(key, cost), key, cost)

    async def peek(self, key: Key, cost: Cost = 1) -> Decision:  # type: ignore[override]
        """What a hit of that cost would be told now."""
        return await self._ask(key, cost, commit=False)

    async def hit_many(self, keys: Iterable[Key], cost: int | Iterable[int] = 1) -> list[Decision]:  # type: ignore[override]
        """One hit for each key, in order and at one moment."""
        if self.store.local:
            return super().hit_many(keys, cost)
        asked = list(keys)
        costs = [cost] * len(asked) if isinstance(cost, int) else list(cost)
        found = await self.store.adecide_many([self.claims(key, one) for key, one in zip(asked, costs, strict=True)], 0)
        return [self.count(decision, key, one) for decision, key, one in zip(found, asked, costs, strict=True)]

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
            await self.store.agive_back(claims)

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


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets an event of a loop from wherever this is; a loop that is gone has nobody left to wake."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        pass


def _called(value: Any, args: Any, kwargs: Any) -> Any:
    return value(*args, **kwargs) if callable(value) else value


def _key_of(key: Any, args: Any, kwargs: Any) -> Key:
    """The key of a decorated call; ints pass through str()."""
    found = _called(key, args, kwargs)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    if isinstance(found, Mapping):
        return {name: _key_of(one, (), {}) if one is not None else None for name, one in found.items()}  # type: ignore[misc]
    return found  # type: ignore[no-any-return]


def _decorated(limiter: Waits, function: Any, key: Any, cost: Any, timeout: Duration | None) -> Any:
    if not callable(function):
        raise TypeError(f"limit() decorates a function, not {function!r}; put it below @staticmethod and @classmethod")

    def enter(args: Any, kwargs: Any) -> None:
        limiter._acquire(_key_of(key, args, kwargs), _called(cost, args, kwargs), timeout)

    def aenter(args: Any, kwargs: Any) -> Awaitable[Decision]:
        return limiter._aacquire(_key_of(key, args, kwargs), _called(cost, args, kwargs), timeout)

    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def agenerate(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            await aenter(args, kwargs)
            inner = function(*args, **kwargs)
            try:
                value = await anext(inner)
                while True:
                    try:
                        sent = yield value
                    except Exception as error:
                        value = await inner.athrow(error)
                    else:
                        value = await inner.asend(sent)
            except StopAsyncIteration:
                return
            finally:
                await inner.aclose()

        return agenerate
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            await aenter(args, kwargs)
            return await function(*args, **kwargs)

        return acall
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Any:
            enter(args, kwargs)
            return (yield from function(*args, **kwargs))

        return generate

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        enter(args, kwargs)
        return function(*args, **kwargs)

    return call
