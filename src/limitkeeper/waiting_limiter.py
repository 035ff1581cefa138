"""WaitingLimiter: acquire and reserve, sync and async, with one decision and one sleep.

The decision charges at a later start, and the caller sleeps until then. It never polls, and no waiter is overtaken. A timeout
shorter than the wait refuses at once, and a cancelled caller gives its start back. Only code that sleeps or calls a store exists
in a sync and an async version.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

from .algorithms import Limit
from .algorithms.claim import Claim
from .algorithms.constants import MAX_WAIT
from .algorithms.limit_parser import named_limits
from .decision import Decision
from .decorator import CostArgument, KeyArgument, decorated
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
GatesByLoop = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, FifoGate[asyncio.Event]]


class Stats(NamedTuple):
    """Counters of a limiter: decisions, callers that wait now, and the keys and overflow decisions of its store."""

    allowed: int
    refused: int
    waiting: int
    keys: int
    shared: int


class WaitingLimiter(LimiterBase):
    """Base of Limiter and AsyncLimiter: waiting, giving back, and the decorator."""

    __slots__ = ("_gate", "_gates_by_loop", "_owns_store", "_queue")

    def __init__(self, limits: Limits, store: Store | str | None = None, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigurationError(f"a limiter's name must be a non-empty string, got {name!r}")
        self._owns_store = store is None or isinstance(store, str)
        if store is None:
            store = memory_store()
        elif isinstance(store, str):
            store = store_from_url(store)
        elif not isinstance(store, Store):
            raise ConfigurationError(f"store must be a store or a URL such as 'memory://', got {store!r}")
        super().__init__(named_limits(limits, name), store, name)
        self._queue: WaitQueue = wait_queue_of(store)
        self._gate: FifoGate[threading.Event] = FifoGate()
        self._gates_by_loop: GatesByLoop = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        limits = ", ".join(
            f"{name!r}: {limit}" if name != str(limit) else repr(str(limit)) for name, limit in self.limits.items()
        )
        return f"<{type(self).__name__} {limits}>"

    def waiting(self, key: Key | None = None) -> int:
        """The number of callers in this process that wait, for one key or for any."""
        identities = {named.identity for named in self.named}
        keys = None if key is None else {claim.key for claim in self.claims(key)}
        gates: list[FifoGate[threading.Event] | FifoGate[asyncio.Event]] = [self._gate, *self._gates_by_loop.values()]
        gate_key = None if key is None else self._gate_key(key)
        return self._queue.waiting(identities, keys) + sum(gate.waiting(gate_key) for gate in gates)

    def stats(self) -> Stats:
        """Counters since this limiter was created."""
        keys = len(self.store) if isinstance(self.store, Sized) else 0
        return Stats(*self._counts(), self.waiting(), keys, self._overflow)

    # Waiting ---------------------------------------------------------------------------------------------------

    def _reserve_start(self, key: Key, cost: Cost, max_wait_us: int) -> tuple[Decision, Waiter | None]:
        """Makes one decision; a waiter with a later start joins the queue in the same step."""
        if max_wait_us == 0:
            return self._decide(key, cost), None
        claims = self.claims(key, cost)
        if not self.store.local:  # not local: the queue is not locked while the store is called
            decision = self._decide_claims(claims, key, cost, max_wait_us)
            return decision, self._enqueue(claims, max_wait_us, decision)
        with self._queue.lock:
            decision = self._decide_claims(claims, key, cost, max_wait_us)
            return decision, self._enqueue(claims, max_wait_us, decision)

    async def _areserve_start(self, key: Key, cost: Cost, max_wait_us: int) -> tuple[Decision, Waiter | None]:
        if self.store.local:
            return self._reserve_start(key, cost, max_wait_us)
        claims = self.claims(key, cost)
        decision = await self._adecide_claims(claims, max_wait_us)
        return decision, self._enqueue(claims, max_wait_us, decision)

    def _enqueue(self, claims: list[Claim], max_wait_us: int, decision: Decision) -> Waiter | None:
        if not decision.wait_us:
            return None
        deadline = None if max_wait_us >= MAX_WAIT else decision.start_us - decision.wait_us + max_wait_us
        waiter = Waiter(claims, decision, deadline)
        self._queue.join(waiter)
        return waiter

    def _sleep(self, waiter: Waiter, key: Key, cost: Cost) -> None:
        """Sleeps until the waiter's start, which may move up meanwhile."""
        wake = threading.Event()
        waiter.asleep, waiter.wake = True, wake.set
        try:
            while True:
                moved = wake.is_set()
                wake.clear()
                decision = waiter.decision
                self.store.clock.sleep(self._left(decision) if moved else decision.wait, wake)
                if not wake.is_set():
                    break
        except BaseException:
            self._give_up(waiter, key, cost, waiter.decision)
            raise
        self._finish_wait(waiter, key, cost)

    async def _asleep(self, waiter: Waiter, key: Key, cost: Cost) -> None:
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()
        waiter.asleep, waiter.wake = True, lambda: _wake(loop, wake)
        try:
            while True:
                moved = wake.is_set()
                wake.clear()
                decision = waiter.decision
                await self.store.clock.asleep(self._left(decision) if moved else decision.wait, wake)
                if not wake.is_set():
                    break
        except BaseException:
            if self.store.local and self.store.can_rebook:
                self._queue.leave_soon(waiter, loop)
            else:
                await self._agive_up(waiter, key, cost, waiter.decision)
            raise
        self._finish_wait(waiter, key, cost)

    def _left(self, decision: Decision) -> float:
        """Seconds until a start that has moved up."""
        return max(0, decision.start_us - self.store.now_us()) / 1e6

    def _finish_wait(self, waiter: Waiter, key: Key, cost: Cost) -> None:
        self._queue.done(waiter)
        if self._publisher is not None:
            self.events.publish(WAITED, self.name, key, cost, waiter.decision)

    # Giving back -----------------------------------------------------------------------------------------------

    def _give_up(self, waiter: Waiter | None, key: Key, cost: Cost, decision: Decision) -> None:
        """Gives a start back. A store error is published as an event, because it must not hide the reason for giving up."""
        try:
            self._queue.leave([waiter or Waiter(self.claims(key, cost), decision, None)])
        except StoreError as error:
            self._give_back_failed(key, cost, decision, error)

    async def _agive_up(self, waiter: Waiter | None, key: Key, cost: Cost, decision: Decision) -> None:
        try:
            await self._agive_back(waiter or Waiter(self.claims(key, cost), decision, None))
        except StoreError as error:
            self._give_back_failed(key, cost, decision, error)

    async def _agive_back(self, waiter: Waiter) -> None:
        if self.store.local:
            self._queue.leave([waiter])
        else:
            await self._queue.aleave([waiter])

    def _give_back_failed(self, key: Key, cost: Cost, decision: Decision, error: StoreError) -> None:
        log.warning("giving back to %r failed: %s", self.name, error)
        self.events.publish(GIVE_BACK_FAILED, self.name, key, cost, decision, error)

    # Acquiring -------------------------------------------------------------------------------------------------

    def _acquire(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        max_wait_us = MAX_WAIT if timeout is None else min(MAX_WAIT, duration_us(timeout))
        if not self._reserves:
            return self._acquire_in_order(key, cost, timeout)
        decision, waiter = self._reserve_start(key, cost, max_wait_us)
        if not self._count(decision, key, cost):
            raise RateLimited(decision)
        if waiter is not None:
            self._sleep(waiter, key, cost)
            return waiter.decision
        return decision

    async def _aacquire(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        max_wait_us = MAX_WAIT if timeout is None else min(MAX_WAIT, duration_us(timeout))
        if not self._reserves:
            return await self._aacquire_in_order(key, cost, timeout)
        decision, waiter = await self._areserve_start(key, cost, max_wait_us)
        if not self._count(decision, key, cost):
            raise RateLimited(decision)
        if waiter is not None:
            await self._asleep(waiter, key, cost)
            return waiter.decision
        return decision

    def _gate_key(self, key: Key) -> Hashable:
        return tuple(sorted((k, v) for k, v in key.items() if v is not None)) if isinstance(key, Mapping) else key

    def _acquire_in_order(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        """For limits that can't reserve: waits in order of arrival, and decides again after `retry_after`."""
        clock, gate_key = self.store.clock, self._gate_key(key)
        deadline = None if timeout is None else clock.now_us() + duration_us(timeout)
        event = threading.Event()
        first = self._gate.enter(gate_key, event)
        waited = not first
        try:
            if not first:
                self._refuse_if_late(self.peek(key, cost), deadline, clock.now_us(), key, cost)
                if deadline is None:
                    event.wait()
                else:
                    clock.sleep(max(0, deadline - clock.now_us()) / 1e6, event)
                if not event.is_set():
                    raise RateLimited(self._count(self.peek(key, cost), key, cost))
            while True:
                decision = self._decide(key, cost)
                if decision:
                    return self._count_admitted(decision, key, cost, waited)
                self._refuse_if_late(decision, deadline, clock.now_us(), key, cost)
                clock.sleep(decision.retry_after)
                waited = True
        finally:
            following = self._gate.leave(gate_key, event)
            if following is not None:
                following.set()

    async def _aacquire_in_order(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        clock, gate_key = self.store.clock, self._gate_key(key)
        deadline = None if timeout is None else clock.now_us() + duration_us(timeout)
        event = asyncio.Event()
        gate = self._gates_by_loop.setdefault(asyncio.get_running_loop(), FifoGate())
        first = gate.enter(gate_key, event)
        waited = not first
        try:
            if not first:
                self._refuse_if_late(await self._adecide(key, cost, commit=False), deadline, clock.now_us(), key, cost)
                if deadline is None:
                    await event.wait()
                else:
                    await clock.asleep(max(0, deadline - clock.now_us()) / 1e6, event)
                if not event.is_set():
                    raise RateLimited(self._count(await self._adecide(key, cost, commit=False), key, cost))
            while True:
                decision = await self._adecide(key, cost)
                if decision:
                    return self._count_admitted(decision, key, cost, waited)
                self._refuse_if_late(decision, deadline, clock.now_us(), key, cost)
                await clock.asleep(decision.retry_after)
                waited = True
        finally:
            following = gate.leave(gate_key, event)
            if following is not None:
                following.set()

    async def _adecide(self, key: Key, cost: Cost, max_wait_us: int = 0, commit: bool = True) -> Decision:
        if self.store.local:
            return self._decide(key, cost, max_wait_us) if commit else LimiterBase.peek(self, key, cost)
        return await self._adecide_claims(self.claims(key, cost), max_wait_us, commit)

    async def _adecide_claims(self, claims: list[Claim], max_wait_us: int, commit: bool = True) -> Decision:
        if is_off() or not claims:
            return self._unlimited()
        return await self.store.adecide(claims, None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)

    def _count_admitted(self, decision: Decision, key: Key, cost: Cost, waited: bool) -> Decision:
        self._count(decision, key, cost)
        if waited and self._publisher is not None:
            self.events.publish(WAITED, self.name, key, cost, decision)
        return decision

    def _refuse_if_late(self, decision: Decision, deadline: int | None, now_us: int, key: Key, cost: Cost) -> None:
        """Raises RateLimited if the call can never be admitted, or not before the deadline."""
        never = decision.retry_us < 0
        if not decision and (never or (deadline is not None and now_us + decision.retry_us > deadline)):
            raise RateLimited(self._count(decision, key, cost))

    def _max_wait_us(self, max_wait: Duration | None) -> int:
        if not self._reserves:
            return 0
        return MAX_WAIT if max_wait is None else min(MAX_WAIT, duration_us(max_wait))

    # Decorating ------------------------------------------------------------------------------------------------

    def limit(self, key: KeyArgument, cost: CostArgument = 1, timeout: Duration | None = 0) -> Callable[[F], F]:
        """Limits every call of a function, method, coroutine or (async) generator.

        `key` and `cost` are values, or functions of the call's arguments. A refused call raises `RateLimited`; with a
        `timeout` it first waits up to that long.
        """

        def decorate(function: F) -> F:
            return decorated(self, function, key, cost, timeout)  # type: ignore[no-any-return]

        return decorate


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets an event of a loop from any thread; does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        pass
