"""Limiter and AsyncLimiter: acquire, reserve, refund, reset, sync and async. `hit` and `peek` are in `limiter_base.py`.

`acquire` and `reserve` make one decision and sleep once: the decision charges at a later start, and the caller sleeps until then.
They never poll, and no waiter is overtaken. A timeout shorter than the wait refuses at once, and a cancelled caller gives its
start back. What sleeps or gives back is a plan (`stores/sans_io.py`), written once for both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import CancelledError
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, Never, TypeVar

from .algorithms import Limit
from .algorithms.claim import Claim, NamedLimit, charge_numbers
from .algorithms.constants import MAX_WAIT
from .algorithms.limit_parser import named_limits
from .algorithms.no_key import NO_KEY
from .decision import Decision, Decisions
from .decorators import CostArgument, KeyArgument, limited, misplaced_argument, refuse_limit_options, refuse_rate_as_key
from .errors import ConfigurationError, RateLimited, StoreError
from .fifo_gate import AsyncEvent, Event, FifoGate
from .limiter_base import Cost, Key, LimiterBase, checked_cost, is_off
from .observe.events import GIVE_BACK_FAILED, OVERFLOW, WAITED
from .rate import Duration, duration_us
from .reservation import AsyncReservation, PendingReservation, Reservation
from .stores import Store
from .stores.sans_io import Call, CallToEnd, Plan, WakeEvent, arun, run
from .stores.urls import open_store
from .wait_queue import BEGUN, Waiter, WaitQueue, of_loop, refunded, sleeper_us, wait_queue_of

#: The compiled method, unbound: `super().hit` makes an awaited hit a fifth slower.
_hit = LimiterBase.hit
log = logging.getLogger("limitkeeper")
F = TypeVar("F", bound=Callable[..., Any])
Limits = Limit | str | Mapping[str, Limit | str] | Sequence[Limit | str]
#: Ends the name under which the state of a limiter's own cells is kept.
OWN = "\0own"
GatesByLoop = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, FifoGate]


class Stats(NamedTuple):
    """Counters of a limiter.

    Attributes:
        allowed: decisions that allowed a call.
        refused: decisions that refused a call.
        waiting: callers in this process that wait now.
        keys: keys in the store, of all its limiters; 0 for a store that can't count them.
        overflow: decisions on overflow cells, because the store was full of active keys.
    """

    allowed: int
    refused: int
    waiting: int
    keys: int
    overflow: int


class WaitingLimiter(LimiterBase):
    """Base of Limiter and AsyncLimiter: waiting, giving back, and the decorator."""

    __slots__ = ("_gate", "_gates_by_loop", "_own_limits", "_owns_store", "_queue")

    def __init__(self, limits: Limits, store: Store | str | None = None, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not name or name.endswith(OWN)):
            raise ConfigurationError(f"a limiter's name must be a non-empty string, got {name!r}")
        self._owns_store = store is None or isinstance(store, str)
        store = open_store(store)
        super().__init__(named_limits(limits, name), store, name)
        self._own_limits: tuple[NamedLimit, ...] = ()
        self._queue: WaitQueue = wait_queue_of(store)
        self._gate: FifoGate = FifoGate()
        self._gates_by_loop: GatesByLoop = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        limits = (f"{name!r}: {limit}" if name != str(limit) else repr(name) for name, limit in self.limits.items())
        return f"<{type(self).__name__} {', '.join(limits)}>"

    def claims(self, key: Key, cost: Cost = 1) -> list[Claim]:
        """The claims of one call. Without a key they are of the limiter's own cells: the same limits under a name that no
        limiter can have."""
        if key is not NO_KEY:
            return super().claims(key, cost)
        if not self._own_limits:
            self._own_limits = tuple([NamedLimit(self.name + OWN, name, limit) for name, limit in self.limits.items()])
            for named in self._own_limits:
                self.store.register(named)
        return [Claim(named, "", one) for named, one in zip(self._own_limits, self._costs(cost), strict=True)]

    def waiting(self, key: Key | None = None) -> int:
        """The number of callers in this process that wait, for one key or for any."""
        identities = {named.identity for named in (*self.named, *self._own_limits)}
        keys = None if key is None else {claim.key for claim in self.claims(key)}
        gates: list[FifoGate] = [self._gate, *self._gates_by_loop.values()]
        gate_key = None if key is None else self._gate_key(key)
        return self._queue.waiting(identities, keys) + sum(gate.waiting(gate_key) for gate in gates)

    def stats(self) -> Stats:
        """The counters since this limiter was created."""
        keys = len(self.store) if isinstance(self.store, Sized) else 0
        return Stats(*self._counts(), self.waiting(), keys, self._overflow)

    # Waiting ---------------------------------------------------------------------------------------------------

    def _reserve_start(
        self, claims: list[Claim], key: Key, cost: Cost, max_wait_us: int, remember: bool = False
    ) -> tuple[Decision, Waiter | None]:
        """Makes one decision; a later start joins the queue in the same step. `remember`: the claims keep the charge."""
        if max_wait_us == 0 and not remember:
            return self._decide(key, cost), None
        with self._queue.lock if self.store.never_waits else nullcontext():  # the queue is not locked while a store waits
            decision = self._decide_claims(claims, key, cost, max_wait_us)
            if remember and decision and claims and not claims[0].number:
                claims[0].number = next(charge_numbers)
            return decision, self._enqueue(claims, max_wait_us, decision)

    async def _areserve_start(
        self, claims: list[Claim], key: Key, cost: Cost, max_wait_us: int, remember: bool = False
    ) -> tuple[Decision, Waiter | None]:
        if self.store.local:
            return self._reserve_start(claims, key, cost, max_wait_us, remember)
        if max_wait_us == 0:
            return await arun(self._decide_now(claims, key, cost)), None
        async with self._queue.departures().decision(claims):
            decision = await self._adecide_claims(claims, max_wait_us)
            return decision, self._enqueue(claims, max_wait_us, decision)

    async def _adecide_claims(self, claims: list[Claim], max_wait_us: int, commit: bool = True) -> Decision:
        if is_off() or not claims:
            return self._unlimited()
        return await self.store.adecide(claims, None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)

    def _enqueue(self, claims: list[Claim], max_wait_us: int, decision: Decision) -> Waiter | None:
        if not decision.wait_us:
            return None
        deadline = None if max_wait_us >= MAX_WAIT else decision.start_us - decision.wait_us + max_wait_us
        waiter = Waiter(claims, decision, deadline, until_us=sleeper_us(self.store, decision) + decision.wait_us)
        self._queue.join(waiter)
        return waiter

    def _wait(self, waiter: Waiter, key: Key, cost: Cost, loop: asyncio.AbstractEventLoop | None = None) -> Plan[Decision]:
        """Sleeps until the waiter's start, which may move up meanwhile; `loop` is that of an async caller. After an exception the
        caller abandons the claims; in a forked child they are the parent's, which waits for that start."""
        wake = WakeEvent() if loop is None else AsyncEvent()
        event = weakref.ref(wake)  # a task whose loop was closed can be collected, and gives its start back
        waiter.asleep, waiter.loop = True, loop
        waiter.wake = wake.set if loop is None else lambda: _wake(loop, event())
        process = os.getpid()
        try:
            while True:
                wake.clear()
                if waiter.interrupted:
                    raise CancelledError("another thread or task interrupted the wait")
                waiter.alarm_us = waiter.until_us
                yield Call(self.store.clock, "sleep", (waiter.left_us(sleeper_us(self.store)) / 1e6, wake))
                if not wake.is_set():
                    break
        except BaseException:
            if process != os.getpid():
                for claim in waiter.own_claims:
                    claim.forget_charge()
            raise
        self._queue.done(waiter)
        if self._publisher is not None:
            self.events.publish(WAITED, self.name, key, cost, waiter.decision)
        return waiter.decision

    def _abandon(self, claims: list[Claim], key: Key, cost: Cost) -> Plan[None]:
        """Gives back what an interrupted call has charged, wherever it was interrupted."""
        waiter = self._queue.find(claims)
        if waiter is None:
            start_us = max((claim.charged_at() for claim in claims), default=-1)
            if start_us < 0:
                return
            wait_us = 0
            with suppress(StoreError):  # which knows no time: given back as a charge that has begun
                wait_us = max(0, start_us - self.store.now_us())
            decision = Decision(True, start_us=start_us, wait_us=wait_us)
            waiter = self._enqueue(claims, MAX_WAIT, decision) or Waiter(claims, decision, None, BEGUN)
        yield from self._give_up(waiter, key, cost, waiter.decision)

    async def _aabandon(self, claims: list[Claim], key: Key, cost: Cost, loop: asyncio.AbstractEventLoop) -> None:
        """As `_abandon`. On a local store the tasks cancelled in one iteration of the loop leave together. `loop` is the
        caller's: a task whose loop was closed is collected without a running one."""
        waiter = self._queue.find(claims)
        if waiter is None or not self._leave_soon(waiter, key, cost, loop):
            await arun(self._abandon(claims, key, cost))

    def _leave_soon(self, waiter: Waiter, key: Key, cost: Cost, loop: asyncio.AbstractEventLoop) -> bool:
        """Gives a start on a local store back together with those of the other tasks cancelled in this iteration of the loop;
        False: not on this store."""
        leaves = bool(self.store.local and self.store.can_rebook)
        if leaves:
            self._queue.leave_soon(waiter, loop, partial(self._give_back_failed, key, cost, waiter.decision))
        return leaves

    def _give_up(self, waiter: Waiter, key: Key, cost: Cost, decision: Decision) -> Plan[bool]:
        """Gives a start back; False when its keys were reset since. A store error is published as an event, because it must not
        hide the reason for giving up."""
        try:
            return (yield Call(self._queue, "leave", ([waiter],)))  # type: ignore[no-any-return]
        except StoreError as error:
            self._give_back_failed(key, cost, decision, error)
        return True

    def _give_back_failed(self, key: Key, cost: Cost, decision: Decision, error: StoreError) -> None:
        log.warning("giving back to %r failed: %s", self.name, error)
        self.events.publish(GIVE_BACK_FAILED, self.name, key, cost, decision, error)

    # Acquiring -------------------------------------------------------------------------------------------------

    def _acquire(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        if not self._reserves:
            return run(self._acquire_in_order(key, cost, timeout, self._gate, WakeEvent()))
        claims = self.claims(key, cost)
        try:
            decision, waiter = self._reserve_start(claims, key, cost, self._max_wait_us(timeout, "timeout"))
            self._count(decision, key, cost)
            if waiter is not None:
                return run(self._wait(waiter, key, cost))
        except BaseException:
            run(self._abandon(claims, key, cost))
            raise
        if not decision:
            raise RateLimited(decision)
        return decision

    async def _aacquire(self, key: Key, cost: Cost, timeout: Duration | None) -> Decision:
        loop = asyncio.get_running_loop()
        if not self._reserves:
            gate = of_loop(self._gates_by_loop, loop, FifoGate)
            return await arun(self._acquire_in_order(key, cost, timeout, gate, AsyncEvent()))
        claims = self.claims(key, cost)
        try:
            decision, waiter = await self._areserve_start(claims, key, cost, self._max_wait_us(timeout, "timeout"))
            self._count(decision, key, cost)
            if waiter is not None:
                return await arun(self._wait(waiter, key, cost, loop))
        except BaseException:
            await self._aabandon(claims, key, cost, loop)
            raise
        if not decision:
            raise RateLimited(decision)
        return decision

    def _gate_key(self, key: Key) -> Hashable:
        return tuple(sorted((k, v) for k, v in key.items() if v is not None)) if isinstance(key, Mapping) else key

    def _acquire_in_order(self, key: Key, cost: Cost, timeout: Duration | None, gate: FifoGate, event: Event) -> Plan[Decision]:
        """For limits that can't reserve: waits in order of arrival, and decides again after `retry_after`."""
        clock, gate_key = self.store.clock, self._gate_key(key)
        deadline = None if timeout is None else clock.now_us() + duration_us(timeout, "timeout")
        waited = False
        try:
            if waited := not gate.enter(gate_key, event):
                self._refuse_if_late((yield from self._ask(key, cost, False)), deadline, clock.now_us(), key, cost)
                if deadline is None:
                    yield event  # type: ignore[misc]  # an event of the caller's kind
                else:
                    yield Call(clock, "sleep", (max(0, deadline - clock.now_us()) / 1e6, event))
                if not event.is_set():
                    raise RateLimited(self._count(self._refuse_behind((yield from self._ask(key, cost, False))), key, cost))
            while True:
                decision = yield from self._ask(key, cost)
                if decision:
                    self._count(decision, key, cost)
                    if waited and self._publisher is not None:
                        self.events.publish(WAITED, self.name, key, cost, decision)
                    return decision
                self._refuse_if_late(decision, deadline, clock.now_us(), key, cost)
                yield Call(clock, "sleep", (decision.retry_after,))
                waited = True
        finally:
            try:
                gate.leave(gate_key, event)
            except BaseException:  # of a signal handler: no other would have its turn
                gate.leave(gate_key, event)
                raise

    def _ask(self, key: Key, cost: Cost, commit: bool = True) -> Plan[Decision]:
        """One decision without a wait; `commit` False stores nothing."""
        claims = self.claims(key, cost)
        if is_off() or not claims:
            return self._unlimited()
        overflow = self._overflow
        if commit:
            decision = yield from self._decide_now(claims, key, cost)
        else:
            decision = yield Call(self.store, "decide", (claims,), {"commit": False})
        if commit and self._publisher is not None and self._overflow != overflow:
            self.events.publish(OVERFLOW, self.name, key, cost, decision)
        return decision

    def _decide_now(self, claims: list[Claim], key: Key, cost: Cost) -> Plan[Decision]:
        """One decision without a wait. A task that is cancelled meanwhile gives back what a remote store has charged."""
        if is_off() or not claims:
            return self._unlimited()
        if self.store.local:
            return (yield Call(self.store, "decide", (claims,)))  # type: ignore[no-any-return]
        call = CallToEnd(self.store, "decide", (claims,))
        try:
            return (yield call)  # type: ignore[no-any-return]
        except BaseException:
            if call.answer:
                try:
                    yield from self._give_up(Waiter(claims, call.answer, None, BEGUN), key, cost, call.answer)
                finally:
                    for claim in claims:
                        claim.forget_charge()  # the caller would give it back again
            raise

    def _refuse_behind(self, decision: Decision) -> Decision:
        """The refusal of a call whose time is over before it is first: what its limits may have left is for those ahead of it."""
        parts = decision.decisions if decision else ()
        times = [(1, part.reset_us, 0, part.start_us) for part in parts]
        both = zip(parts, times, strict=True)
        refused = [Decision(False, part.limit, part.remaining, *time, part.name, part.source) for part, time in both]
        return Decisions.join(refused) if refused else decision

    def _refuse_if_late(self, decision: Decision, deadline: int | None, now_us: int, key: Key, cost: Cost) -> None:
        """Raises RateLimited if the call can never be admitted, or not before the deadline."""
        never = decision.retry_us < 0
        if not decision and (never or (deadline is not None and now_us + decision.retry_us > deadline)):
            raise RateLimited(self._count(decision, key, cost))

    def _max_wait_us(self, max_wait: Duration | None, name: str = "max_wait") -> int:
        if not self._reserves:
            return 0
        return MAX_WAIT if max_wait is None else min(MAX_WAIT, duration_us(max_wait, name))

    # Decorating ------------------------------------------------------------------------------------------------

    def limit(
        self, *misplaced: Never, key: KeyArgument = NO_KEY, cost: CostArgument = 1, timeout: Duration | None = 0
    ) -> Callable[[F], F]:
        """Limits every call of a function, method, coroutine or (async) generator.

        `key` and `cost` are values, or functions of the call's arguments; without a key all calls share the limiter's own cell.
        A refused call raises `RateLimited`; with a `timeout` it first waits up to that long.
        """
        if misplaced:
            raise TypeError(misplaced_argument(misplaced[0]))
        refuse_rate_as_key(key)

        def decorate(function: F) -> F:
            return limited(self, function, key, cost, timeout)  # type: ignore[no-any-return]

        return decorate


class Limiter(WaitingLimiter):
    """Rate limiting for threads and plain functions: `Limiter("5/s burst 10")`.

    Without a key, a call uses the limiter's own cell: one limit for the limiter as a whole. `with limiter:` waits for one unit
    of it.

    Args:
        limits: a limit, its text (`"5/s burst 10"`), several as text (`"10/s; 1000/h"`) or as a sequence, or a mapping of names
            to limits. Several limits are charged together, or not at all.
        store: a store or its URL. By default the state is in the memory of this process.
        name: what identifies the state in the store. By default it is the text of the limits: limiters with equal limits on
            one store share their state.
    """

    __slots__ = ()

    def __init__(self, limits: Limits, store: Store | str | None = None, name: str | None = None, **misplaced: Never) -> None:
        refuse_limit_options("Limiter", misplaced)
        super().__init__(limits, store, name)

    def acquire(self, key: Key = NO_KEY, cost: Cost = 1, timeout: Duration | None = None) -> Decision:
        """Waits until the cost is admitted: one decision, one sleep. Raises `RateLimited` at once if the wait would exceed
        `timeout`; None waits without bound."""
        return self._acquire(key, cost, timeout)

    def reserve(self, key: Key = NO_KEY, cost: Cost = 1, max_wait: Duration | None = None) -> Reservation:
        """Charges an estimate now or at a later start: `with limiter.reserve(key, cost=500) as r:` waits for the start, and
        `r.settle(425)` sets the actual cost. The result is falsy if the wait would exceed `max_wait`."""
        claims = self.claims(key, cost)
        try:
            decision, waiter = self._reserve_start(claims, key, cost, self._max_wait_us(max_wait), remember=True)
            return Reservation(self, key, cost, claims, waiter, self._count(decision, key, cost))
        except BaseException:
            run(self._abandon(claims, key, cost))
            raise

    def refund(self, key: Key = NO_KEY, cost: Cost = 1) -> None:
        """Gives back units that were not used, at most what was charged."""
        claims = self._refund_claims(key, cost)
        if claims:
            self._queue.leave([refunded(claims)])

    def reset(self, key: Key = NO_KEY) -> None:
        """Deletes the state of a key; without one, that of the limiter's own cell."""
        self.store.reset(self.claims(key))

    def close(self) -> None:
        """Closes the store if this limiter created it."""
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Decision:
        """Acquires one unit of the limiter's own cell: waits for it. Closing is `close()`."""
        return self._acquire(NO_KEY, 1, None)

    def __exit__(self, *exc: object) -> None:
        """An exception gives nothing back."""

    async def __aenter__(self) -> Never:
        """Always a TypeError: waiting would block the event loop."""
        raise TypeError("expected `with` around a Limiter, got `async with`; write AsyncLimiter(…)")

    async def __aexit__(self, *exc: object) -> None:
        """Never called."""


class AsyncLimiter(WaitingLimiter):
    """Rate limiting for asyncio: `AsyncLimiter("5/s burst 10")`. On a local store only sleeping is awaited.

    Without a key, a call uses the limiter's own cell: one limit for the limiter as a whole. `async with limiter:` waits for one
    unit of it.

    Args:
        limits: a limit, its text (`"5/s burst 10"`), several as text (`"10/s; 1000/h"`) or as a sequence, or a mapping of names
            to limits. Several limits are charged together, or not at all.
        store: a store or its URL. By default the state is in the memory of this process.
        name: what identifies the state in the store. By default it is the text of the limits: limiters with equal limits on
            one store share their state.
    """

    __slots__ = ("_local",)

    def __init__(self, limits: Limits, store: Store | str | None = None, name: str | None = None, **misplaced: Never) -> None:
        refuse_limit_options("AsyncLimiter", misplaced)
        super().__init__(limits, store, name)
        self._local = bool(self.store.local)

    async def hit(self, key: Key = NO_KEY, cost: Cost = 1) -> Decision:  # type: ignore[override]
        """Charges `cost` now, or returns a refusal with the time to retry. Does not wait for capacity."""
        if self._local:
            return _hit(self, key, cost)
        if self._single is not None and type(key) is str and not is_off():
            units = checked_cost(cost) if isinstance(cost, int) else self._costs(cost)[0]
            decision = self.store.hit_nowait(self._single, key, units)
            if decision is None:
                decision = await self.store.adecide_one(self._single, key, units, 0, True)
            return self._count(decision, key, cost)
        return self._count(await self._adecide_claims(self.claims(key, cost), 0), key, cost)

    async def peek(self, key: Key = NO_KEY, cost: Cost = 1) -> Decision:  # type: ignore[override]
        """The Decision that a hit of that cost would get now. Stores and counts nothing."""
        if self._local:
            return super().peek(key, cost)
        return await self._adecide_claims(self.claims(key, cost), 0, commit=False)

    async def hit_many(self, keys: Iterable[Key], cost: int | Iterable[int] = 1) -> list[Decision]:  # type: ignore[override]
        """One hit per key, in order and at one time; a duplicate key sees its earlier hits."""
        if self._local:
            return super().hit_many(keys, cost)
        wanted, costs = self._keys_and_costs(keys, cost)
        claims = self._claims_of_each(wanted, costs)
        some = [one for one in claims if one]
        found = self._merge_decisions(claims, await self.store.adecide_many(some, 0) if some else [])
        self._publish_many(wanted, costs, found, [])
        return found

    async def acquire(self, key: Key = NO_KEY, cost: Cost = 1, timeout: Duration | None = None) -> Decision:
        """Waits until the cost is admitted: one decision, one sleep. Raises `RateLimited` at once if the wait would exceed
        `timeout`; None waits without bound."""
        return await self._aacquire(key, cost, timeout)

    def reserve(self, key: Key = NO_KEY, cost: Cost = 1, max_wait: Duration | None = None) -> PendingReservation:
        """Charges an estimate now or at a later start: `async with limiter.reserve(key, cost=500) as r:` waits for the start,
        and `await r.settle(425)` sets the actual cost. `r = await limiter.reserve(…)` is falsy if the wait would exceed
        `max_wait`."""

        async def make() -> AsyncReservation:
            claims, loop = self.claims(key, cost), asyncio.get_running_loop()
            try:
                decision, waiter = await self._areserve_start(claims, key, cost, self._max_wait_us(max_wait), remember=True)
                return AsyncReservation(self, key, cost, claims, waiter, self._count(decision, key, cost))
            except BaseException:
                await self._aabandon(claims, key, cost, loop)
                raise

        return PendingReservation(make)

    async def refund(self, key: Key = NO_KEY, cost: Cost = 1) -> None:
        """Gives back units that were not used, at most what was charged."""
        claims = self._refund_claims(key, cost)
        if claims:
            await self._queue.aleave([refunded(claims)])

    async def reset(self, key: Key = NO_KEY) -> None:
        """Deletes the state of a key; without one, that of the limiter's own cell."""
        await self.store.areset(self.claims(key))

    async def aclose(self) -> None:
        """Closes the store if this limiter created it."""
        if self._owns_store:
            await self.store.aclose()

    async def __aenter__(self) -> Decision:
        """Acquires one unit of the limiter's own cell: waits for it. Closing is `aclose()`."""
        return await self._aacquire(NO_KEY, 1, None)

    async def __aexit__(self, *exc: object) -> None:
        """An exception gives nothing back."""


def _wake(loop: asyncio.AbstractEventLoop, event: Event | None) -> None:
    """Sets an event of a loop from any thread; does nothing if the loop is closed, or the event gone."""
    try:
        if event is not None:
            loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        pass
