"""How a limiter waits, in both colours: one decision, one sleep.

The decision charges at a start to come, the caller sleeps until then. Nobody polls, nobody is overtaken; a deadline shorter than
the wait refuses at once, and who is cancelled gives its start back. Only what sleeps or talks to a store is written twice.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

from .algorithms import Limit
from .algorithms.claim import Claim
from .algorithms.constants import MAX_WAIT
from .algorithms.limit_parser import named_limits
from .decision import Decision
from .decorator import decorated
from .errors import ConfigurationError, RateLimited, StoreError
from .limiter_base import Cost, Key, LimiterBase, is_off
from .observe.events import GIVE_BACK_FAILED, WAITED
from .rate import Duration, duration_us
from .stores import Store, store_from_url
from .stores.worker_warning import memory_store
from .wait_queue import FifoGate, Waiter, WaitQueue, wait_queue_of

log = logging.getLogger("limitkeeper")
F = TypeVar("F", bound=Callable[..., Any])
Limits = Limit | str | Mapping[str, Limit | str] | Sequence[Limit | str]


class Stats(NamedTuple):
    """What a limiter counted: decisions, callers that sleep now, keys and shared decisions of its store."""

    allowed: int
    refused: int
    waiting: int
    keys: int
    shared: int


class WaitingLimiter(LimiterBase):
    """What both colours share: how to wait, how to leave, how to decorate."""

    __slots__ = ("_line", "_loops", "_owns", "_turnstile")

    def __init__(self, limits: Limits, store: Store | str | None = None, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigurationError(f"a limiter's name must be a non-empty string, got {name!r}")
        self._owns = store is None or isinstance(store, str)
        if store is None:
            store = memory_store()
        elif isinstance(store, str):
            store = store_from_url(store)
        elif not isinstance(store, Store):
            raise ConfigurationError(f"store must be a store or a URL such as 'memory://', got {store!r}")
        super().__init__(named_limits(limits, name), store, name)
        self._line: WaitQueue = wait_queue_of(store)
        self._turnstile = FifoGate()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, FifoGate] = weakref.WeakKeyDictionary()

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
        keys = len(self.store) if isinstance(self.store, Sized) else 0
        return Stats(*self.counts(), self.waiting(), keys, self.shared)

    # Waiting ---------------------------------------------------------------------------------------------------

    def _book(self, key: Key, cost: Cost, patience_us: int) -> tuple[Decision, Waiter | None]:
        """One decision; a start to come takes its place in the line in the same step."""
        if patience_us == 0:
            return self.decide(key, cost), None
        claims = self.claims(key, cost)
        if not self.store.local:  # far away: nobody waits for somebody else's answer
            decision = self.decide_claims(claims, key, cost, patience_us)
            return decision, self._turn(claims, patience_us, decision)
        with self._line.lock:
            decision = self.decide_claims(claims, key, cost, patience_us)
            return decision, self._turn(claims, patience_us, decision)

    async def _abook(self, key: Key, cost: Cost, patience_us: int) -> tuple[Decision, Waiter | None]:
        if self.store.local:
            return self._book(key, cost, patience_us)
        claims = self.claims(key, cost)
        decision = await self._ask_claims(claims, patience_us)
        return decision, self._turn(claims, patience_us, decision)

    def _turn(self, claims: list[Claim], patience_us: int, decision: Decision) -> Waiter | None:
        if not decision.wait_us:
            return None
        deadline = None if patience_us >= MAX_WAIT else decision.start_us - decision.wait_us + patience_us
        turn = Waiter(claims, decision, deadline)
        self._line.join(turn)
        return turn

    def _sleep(self, turn: Waiter, key: Key, cost: Cost) -> None:
        """Sleeps until the turn has come, which may be earlier than promised."""
        wake = threading.Event()
        turn.asleep, turn.wake = True, wake.set
        try:
            while True:
                moved = wake.is_set()
                wake.clear()
                decision = turn.decision
                self.store.clock.sleep(self._left(decision) if moved else decision.wait, wake)
                if not wake.is_set():
                    break
        except BaseException:
            self._give_up(turn, key, cost, turn.decision)
            raise
        self._come(turn, key, cost)

    async def _asleep(self, turn: Waiter, key: Key, cost: Cost) -> None:
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()
        turn.asleep, turn.wake = True, lambda: _wake(loop, wake)
        try:
            while True:
                moved = wake.is_set()
                wake.clear()
                decision = turn.decision
                await self.store.clock.asleep(self._left(decision) if moved else decision.wait, wake)
                if not wake.is_set():
                    break
        except BaseException:
            if self.store.local and self.store.can_rebook:
                self._line.leave_soon(turn, loop)
            else:
                await self._agive_up(turn, key, cost, turn.decision)
            raise
        self._come(turn, key, cost)

    def _left(self, decision: Decision) -> float:
        """Seconds until a start that has moved up while its waiter slept."""
        return max(0, decision.start_us - self.store.now_us()) / 1e6

    def _come(self, turn: Waiter, key: Key, cost: Cost) -> None:
        self._line.done(turn)
        if self._publisher is not None:
            self.events.publish(WAITED, self.name, key, cost, turn.decision)

    # Giving back -----------------------------------------------------------------------------------------------

    def _give_up(self, turn: Waiter | None, key: Key, cost: Cost, decision: Decision) -> None:
        """Gives a start back. A store that fails at it is told as an event: it must not hide why somebody gave up."""
        try:
            self._line.leave([turn or Waiter(self.claims(key, cost), decision, None)])
        except StoreError as error:
            self._give_back_failed(key, cost, decision, error)

    async def _agive_up(self, turn: Waiter | None, key: Key, cost: Cost, decision: Decision) -> None:
        try:
            await self._return_async(turn or Waiter(self.claims(key, cost), decision, None))
        except StoreError as error:
            self._give_back_failed(key, cost, decision, error)

    async def _return_async(self, turn: Waiter) -> None:
        if self.store.local:
            self._line.leave([turn])
        else:
            await self._line.aleave([turn])

    def _give_back_failed(self, key: Key, cost: Cost, decision: Decision, error: StoreError) -> None:
        log.warning("giving back to %r failed: %s", self.name, error)
        self.events.publish(GIVE_BACK_FAILED, self.name, key, cost, decision, error)

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
        waited = not first
        try:
            if not first:
                self._check_in_time(self.peek(key, cost), deadline, clock.now_us(), key, cost)
                if deadline is None:
                    turn.wait()
                else:
                    clock.sleep(max(0, deadline - clock.now_us()) / 1e6, turn)
                if not turn.is_set():
                    raise RateLimited(self.count(self.peek(key, cost), key, cost))
            while True:
                decision = self.decide(key, cost)
                if decision:
                    return self._counted(decision, key, cost, waited)
                self._check_in_time(decision, deadline, clock.now_us(), key, cost)
                clock.sleep(decision.retry_after)
                waited = True
        finally:
            following = self._turnstile.leave(ticket, turn)
            if following is not None:
                following.set()

    async def _astand(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        clock, ticket = self.store.clock, self._ticket(key)
        deadline = None if timeout is None else clock.now_us() + duration_us(timeout)
        turn = asyncio.Event()
        turnstile = self._loops.setdefault(asyncio.get_running_loop(), FifoGate())
        first = turnstile.enter(ticket, turn)
        waited = not first
        try:
            if not first:
                self._check_in_time(await self._ask(key, cost, commit=False), deadline, clock.now_us(), key, cost)
                if deadline is None:
                    await turn.wait()
                else:
                    await clock.asleep(max(0, deadline - clock.now_us()) / 1e6, turn)
                if not turn.is_set():
                    raise RateLimited(self.count(await self._ask(key, cost, commit=False), key, cost))
            while True:
                decision = await self._ask(key, cost)
                if decision:
                    return self._counted(decision, key, cost, waited)
                self._check_in_time(decision, deadline, clock.now_us(), key, cost)
                await clock.asleep(decision.retry_after)
                waited = True
        finally:
            following = turnstile.leave(ticket, turn)
            if following is not None:
                following.set()

    async def _ask(self, key: Key, cost: Cost, patience_us: int = 0, commit: bool = True) -> Decision:
        if self.store.local:
            return self.decide(key, cost, patience_us) if commit else LimiterBase.peek(self, key, cost)
        return await self._ask_claims(self.claims(key, cost), patience_us, commit)

    async def _ask_claims(self, claims: list[Claim], patience_us: int, commit: bool = True) -> Decision:
        if is_off() or not claims:
            return self.free()
        return await self.store.adecide(claims, None if patience_us >= MAX_WAIT else patience_us, commit=commit)

    def _counted(self, decision: Decision, key: Key, cost: Cost, waited: bool) -> Decision:
        self.count(decision, key, cost)
        if waited and self._publisher is not None:
            self.events.publish(WAITED, self.name, key, cost, decision)
        return decision

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
            return decorated(self, function, key, cost, timeout)  # type: ignore[no-any-return]

        return decorate


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets an event of a loop from wherever this is; a loop that is gone has nobody left to wake."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        pass
