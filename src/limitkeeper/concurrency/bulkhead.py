"""Bulkhead: at most `max_concurrent` calls run at a time, at most `max_waiting` wait for a place, each at most `timeout`.

One object serves threads and tasks of any event loop; all wait in one FIFO queue. A call that ends hands its place to the
first waiter, so that a newcomer never overtakes one that waits:

    a waiter exists  ⇒  in_use ≥ max_concurrent

A smaller size takes effect as calls end, a larger one starts waiters at once. A waiter that is cancelled, times out, or is
garbage collected leaves the queue, and passes on a place that it was just given. A forked child starts with all places free: the
release of a place that was taken before the fork is ignored there.

The lock is re-entrant: the garbage collector can close a waiting coroutine while this thread holds it. Rejected:
threading.Semaphore and asyncio.Semaphore; the first is not fair, neither can be resized or shared by threads and tasks.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar

from ..clock import SYSTEM, Clock
from ..decorators import decorated
from ..errors import BulkheadFull, InvalidLimit
from ..fork import reset_after_fork
from ..observe.events import ALLOWED, BULKHEAD_KINDS, FINISHED, REFUSED, RESIZED, WAITED, Publisher
from ..observe.snapshot import BulkheadSnapshot, Snapshot
from ..rate import MAX_COUNT, Duration, duration_us
from ..stores.sans_io import WakeEvent

P = ParamSpec("P")
R = TypeVar("R")


def checked_size(value: object, what: str, least: int) -> int:
    """`value` if it is an int between `least` and MAX_COUNT; otherwise raises InvalidLimit."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidLimit(f"{what} must be a whole number, got {value!r}")
    if not least <= value <= MAX_COUNT:
        raise InvalidLimit(f"{what} must be between {least} and {MAX_COUNT}, got {value}")
    return value


class PlaceWaiter:
    """A thread or task in the queue. `granted`: it holds a place, which `_abandon` gives back."""

    __slots__ = ("__weakref__", "event", "granted", "loop", "thread")

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.loop, self.thread, self.granted = loop, threading.get_ident(), False
        self.event: Any = WakeEvent() if loop is None else asyncio.Event()

    def wait(self, timeout: float | None = None) -> object:
        return self.event.wait(timeout)

    async def await_(self, timeout: float | None = None) -> object:
        return await self.event.wait()

    def wake(self) -> bool:
        """False when the event loop of the waiter is closed: it will never run."""
        if self.loop is None:
            self.event.set()
            return True
        if self.loop.is_closed():
            return False
        if self.thread == threading.get_ident():
            self.event.set()
            return True
        try:
            self.loop.call_soon_threadsafe(self.event.set)
        except RuntimeError:  # closed meanwhile
            return False
        return True


class PlaceContext:
    """What is acquired and released, as a context manager, sync and async, and as a decorator."""

    __slots__ = ()

    def acquire(self) -> None:
        raise NotImplementedError

    async def aacquire(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        await self.aacquire()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.release()

    def limit(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorates a function, method, coroutine or (async) generator: every call holds a place until it ends."""
        return decorated(function, lambda args, kwargs: self)  # type: ignore[no-any-return]


class Bulkhead(PlaceContext):
    """`Bulkhead(40)`: 40 calls run at a time, the others wait in order of arrival.

    `max_waiting` None bounds the queue by nothing, 0 refuses at once; `timeout` None waits without bound. A refused call raises
    `BulkheadFull`. Use it as a context manager (`with`, `async with`), as a decorator (`@bulkhead.limit`), or in pairs
    (`acquire` or `aacquire`, and `release`).
    """

    __slots__ = (
        *("__weakref__", "_clock", "_inherited", "_listeners", "_lock", "_permitted", "_queue", "_rejected", "_timed_out"),
        *("_timeout", "_waited", "events", "in_use", "max_concurrent", "max_waiting", "name"),
    )

    def __init__(
        self,
        max_concurrent: int,
        max_waiting: int | None = None,
        timeout: Duration | None = None,
        *,
        name: str = "bulkhead",
        clock: Clock = SYSTEM,
    ) -> None:
        self.max_concurrent = checked_size(max_concurrent, "max_concurrent", 1)
        self.max_waiting = None if max_waiting is None else checked_size(max_waiting, "max_waiting", 0)
        self._timeout = None if timeout is None else duration_us(timeout) / 1e6
        self.name, self._clock = name, clock
        self.events = Publisher(BULKHEAD_KINDS)
        self._listeners = self.events._listeners  # tested on the hot path
        self.in_use = self._inherited = 0
        self._permitted = self._rejected = self._timed_out = self._waited = 0
        self._lock = threading.RLock()
        self._queue: OrderedDict[PlaceWaiter, None] = OrderedDict()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        self._lock, self._queue = threading.RLock(), OrderedDict()
        self._inherited += self.in_use
        self.in_use = 0

    def __repr__(self) -> str:
        return f"<Bulkhead {self.name!r}: {self.in_use} of {self.max_concurrent} in use, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """The number of callers in the queue."""
        return len(self._queue)

    @property
    def timeout(self) -> float | None:
        """The longest wait in seconds; None is without bound."""
        return self._timeout

    # Taking and releasing places --------------------------------------------------------------------------------

    def try_acquire(self) -> bool:
        """Takes a place if one is free; never waits."""
        with self._lock:
            taken = self.in_use < self.max_concurrent
            if taken:
                self.in_use += 1
                self._permitted += 1
            else:
                self._rejected += 1
        if self._listeners:
            self.events.publish(ALLOWED if taken else REFUSED, self.name)
        return taken

    def acquire(self) -> None:
        """Takes a place, waiting for one if necessary; raises `BulkheadFull` when the queue is full or the timeout passes."""
        with self._lock:
            free = self.in_use < self.max_concurrent
            if free:
                self.in_use += 1
                self._permitted += 1
        if not free:
            self._wait(PlaceWaiter(None))
        if self._listeners:
            self.events.publish(ALLOWED, self.name)

    async def aacquire(self) -> None:
        """As `acquire`, for a task."""
        with self._lock:
            free = self.in_use < self.max_concurrent
            if free:
                self.in_use += 1
                self._permitted += 1
        if not free:
            await self._await(PlaceWaiter(asyncio.get_running_loop()))
        if self._listeners:
            self.events.publish(ALLOWED, self.name)

    def release(self) -> None:
        """Gives a place back; the first waiter gets it. Raises RuntimeError when none is taken."""
        self._release()
        if self._listeners:
            self.events.publish(FINISHED, self.name)

    def _release(self) -> None:
        with self._lock:
            if self.in_use > 0:
                self.in_use -= 1
                try:
                    self._grant()
                except BaseException:  # of a signal handler: a waiter would never be woken
                    self._grant()
                    raise
            elif self._inherited:
                self._inherited -= 1
            else:
                raise RuntimeError(f"release() of {self.name!r} without acquire(): all {self.max_concurrent} places are free")

    def resize(self, max_concurrent: int) -> None:
        """Changes the size while in use. Calls that run beyond a smaller size go on; none begins before they have ended."""
        size = checked_size(max_concurrent, "max_concurrent", 1)
        with self._lock:
            changed = size != self.max_concurrent
            self.max_concurrent = size
            self._grant()
        if changed and self._listeners:
            self.events.publish(RESIZED, self.name, cost=size)

    # Waiting ---------------------------------------------------------------------------------------------------

    def _join(self, waiter: PlaceWaiter) -> None:
        with self._lock:
            closed = self._timeout == 0 or (self.max_waiting is not None and len(self._queue) >= self.max_waiting)
            if not closed or self.in_use < self.max_concurrent:
                self._queue[waiter] = None
                self._grant()
                return
        raise self._rejected_call("is full")

    def _rejected_call(self, why: str) -> BulkheadFull:
        with self._lock:
            self._rejected += 1
        if self._listeners:
            self.events.publish(REFUSED, self.name)
        return BulkheadFull(self.name, self.max_concurrent, f"{why}: {self.in_use} running, {self.waiting} waiting")

    def _wait(self, waiter: PlaceWaiter) -> None:
        try:
            self._join(waiter)
            if self._timeout is None:
                waiter.event.wait()
            elif not waiter.granted:
                self._clock.sleep(self._timeout, waiter.event)
            self._begin(waiter)
        except BaseException:
            self._abandon(waiter)
            raise

    async def _await(self, waiter: PlaceWaiter) -> None:
        try:
            self._join(waiter)
            if self._timeout is None:
                await waiter.event.wait()
            elif not waiter.granted:
                await self._clock.asleep(self._timeout, waiter.event)
            self._begin(waiter)
        except BaseException:
            self._abandon(waiter)
            raise

    def _begin(self, waiter: PlaceWaiter) -> None:
        """After the wait: the waiter has a place, or its time is over."""
        with self._lock:
            granted = waiter.granted
            self._queue.pop(waiter, None)
            if granted:
                self._permitted += 1
                self._waited += 1
            else:
                self._timed_out += 1
        if not granted:
            raise self._rejected_call(f"had no free place for {self._timeout:g} s")
        if self._listeners:
            self.events.publish(WAITED, self.name)

    def _abandon(self, waiter: PlaceWaiter) -> None:
        """Leaves the queue, and passes on the place that was granted, if any. After an interrupt it can be called again."""
        with self._lock:
            self._queue.pop(waiter, None)
            if waiter.granted:
                waiter.granted = False
                if self.in_use > 0:
                    self.in_use -= 1
                else:  # it was taken before a fork
                    self._inherited -= 1
            self._grant()

    def take(self, waiter: PlaceWaiter) -> None:
        """As `acquire`, for a caller that gives the place back by `_abandon`, whatever it was interrupted at."""
        self._wait(waiter)

    async def atake(self, waiter: PlaceWaiter) -> None:
        await self._await(waiter)

    def _grant(self) -> None:
        """Gives free places to the first waiters. The order of the steps matters where the garbage collector closes a waiter, or
        a signal handler raises: called again, it wakes a waiter that was given a place."""
        while self._queue:
            waiter = next(iter(self._queue))
            if not waiter.granted:
                if self.in_use >= self.max_concurrent:
                    return
                self.in_use += 1
                waiter.granted = True
            woken = waiter.wake()
            self._queue.pop(waiter, None)
            if not woken and waiter.granted:
                waiter.granted = False
                self.in_use -= 1

    # Counters --------------------------------------------------------------------------------------------------

    def stats(self) -> BulkheadSnapshot:
        """The counters since this bulkhead was created."""
        with self._lock:
            sizes = (self.max_concurrent, self.max_waiting, self.in_use, len(self._queue))
            return BulkheadSnapshot(self.name, *sizes, self._permitted, self._rejected, self._timed_out, self._waited)

    def snapshot(self) -> Snapshot:
        """For metrics sinks (`LimitkeeperCollector(bulkhead)`)."""
        return Snapshot("", bulkheads=(self.stats(),))
