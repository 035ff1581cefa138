"""PacedQueue: a bounded FIFO queue, for threads and tasks, whose items leave at the starts that a limit decides.

    units + cost ≤ capacity             puts wait for room, or are refused; units: the cost of all that is in the queue

The start of the first item is decided when a getter is ready for it, never before: starts that were decided while the items
waited for a getter would come together after a stall. With the leaky bucket queue (the rule of a bare rate) starts are at least
an interval of `cost / rate` apart, and a start does not depend on when earlier getters woke up, so that delays do not add up.
What a stall of more than an interval has missed is not made up. A limit with a burst ("token bucket 100/s burst 20") makes it up.

A getter may wake up after its start. So that the gap to the next one is not too short, a strict queue also holds every getter
back until SHORTEST_GAP of an interval after the one before. A delay below an interval is thus made up little by little, where
sleeps end less than a tenth of the interval late; where they end later, the gap is kept and the rate falls.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

from ..algorithms import LeakyBucketQueue, Limit
from ..algorithms.limit_parser import parse_limit
from ..decision import Decision
from ..errors import ConfigurationError, InvalidLimit, RateLimited
from ..fork import reset_after_fork
from ..limiter import AsyncLimiter, Limiter
from ..limiter_base import checked_cost
from ..observe.events import REFUSED, Publisher
from ..rate import MAX_COUNT
from ..reservation import Charge
from ..stores import Store
from ..stores.sans_io import Call, Plan, arun, run
from .bulkhead import Bulkhead, PlaceWaiter, checked_size

T = TypeVar("T")
#: The shortest gap between two starts of a strict queue, as a part of the interval.
SHORTEST_GAP = 0.9


class QueueClosed(Exception):
    """The queue is closed: a put is too late, or a getter has got everything."""


class Entry(Generic[T]):
    """An item in the queue and its cost."""

    __slots__ = ("cost", "item")

    def __init__(self, item: T, cost: int) -> None:
        self.item, self.cost = item, cost


def pace(rate: str | Limit, capacity: int | None) -> tuple[Limit, int | None]:
    """The limit of a rate (a bare one is a leaky bucket queue), and the capacity, which may be the limit's own."""
    if not isinstance(rate, str | Limit):
        raise InvalidLimit(f"expected a rate or a limit, got {rate!r}; write it like '100/s' or 'token bucket 100/s burst 20'")
    limit = parse_limit(rate, LeakyBucketQueue.kind) if isinstance(rate, str) else rate
    if isinstance(limit, LeakyBucketQueue) and limit.bounded:
        if capacity is not None:
            raise ConfigurationError(f"capacity={capacity!r} is given beside {str(limit)!r}; give it once")
        limit, capacity = LeakyBucketQueue(limit.rate), limit.capacity
    return limit, None if capacity is None else checked_size(capacity, "capacity", 1)


class PacedQueue(Generic[T]):
    """`put` waits for room and `put_nowait` raises RateLimited; `get` waits for an item and for its start. `aput`, `aget`: for
    tasks. `capacity` None is without bound."""

    #: Whether a putter that waits for room waits until the queue is empty.
    one_by_one = False

    def __init__(self, rate: str | Limit, capacity: int | None, name: str, store: Store | str | None) -> None:
        self.limit, self.capacity = pace(rate, capacity)
        self.name = name
        self.limiter = Limiter(self.limit, store, name)
        self._async_limiter = AsyncLimiter(self.limit, self.limiter.store, name)
        self._async_limiter._publisher = self.limiter.events
        if not self.limiter._reserves:
            raise ConfigurationError(f"{str(self.limit)!r} can't decide a start ahead; use a leaky bucket queue or token bucket")
        self._strict = isinstance(self.limit, LeakyBucketQueue)
        self._leaving_until_us = self._earliest_us = 0
        self._put_turn, self._get_turn = Bulkhead(1), Bulkhead(1)  # one putter and one getter at a time, in order of arrival
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """A child starts with an empty queue: the items belong to threads of the parent."""
        self._lock = threading.RLock()
        self._entries: deque[Entry[T]] = deque()
        self.units = self._wanted = 0  # in the queue; what the first putter waits for
        self.closed = False
        self._error: BaseException | None = None
        # Weak: a task of a closed event loop can be collected, and then the next putter or getter has its turn.
        self._putter: weakref.ref[PlaceWaiter] | None = None
        self._getter: weakref.ref[PlaceWaiter] | None = None
        self._charge: Charge | None = None  # of the start that the getter waits for

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        bound = "" if self.capacity is None else f" of {self.capacity}"
        return f"<{type(self).__name__} {self.name!r}: {self.limit}, {self.units}{bound} queued>"

    @property
    def events(self) -> Publisher:
        return self.limiter.events

    # Putting ---------------------------------------------------------------------------------------------------

    def put(self, item: T, cost: int = 1) -> Entry[T]:
        """Waits for room."""
        entry = Entry(item, self.checked(cost))
        run(self._put(entry.cost, entry, None))
        return entry

    async def aput(self, item: T, cost: int = 1) -> Entry[T]:
        entry = Entry(item, self.checked(cost))
        await arun(self._put(entry.cost, entry, asyncio.get_running_loop()))
        return entry

    def wait_for_room(self) -> None:
        """Waits until one unit has room."""
        run(self._put(1, None, None))

    async def await_for_room(self) -> None:
        await arun(self._put(1, None, asyncio.get_running_loop()))

    def put_nowait(self, item: T, cost: int = 1) -> Entry[T]:
        """Raises RateLimited when the queue is full; its `retry_after` is exact as long as getters are ready. What leaves now has
        its place until its interval ends, as in the leaky bucket queue."""
        entry = Entry(item, self.checked(cost))
        with self._lock:
            if self.capacity is not None:
                leaving_us = max(0, self._leaving_until_us - self.limiter.store.now_us())
                retry_us = leaving_us - self._interval_us(self.capacity - self.units - self._wanted - cost)
                if retry_us > 0:
                    raise self._refusal(cost, retry_us, leaving_us + self._interval_us(self.units))
            self._append(entry)
        return entry

    def checked(self, cost: int) -> int:
        """Validates a cost; raises RateLimited if it can never fit."""
        cost = checked_cost(cost)
        if cost > min(self.limit.capacity, self.capacity or MAX_COUNT):
            raise self._refusal(cost, -1, 0)
        return cost

    def _put(self, cost: int, entry: Entry[T] | None, loop: asyncio.AbstractEventLoop | None) -> Plan[None]:
        """Waits until so many units have room, and puts the entry if there is one."""
        turn = PlaceWaiter(loop)
        try:
            yield Call(self._put_turn, "take", (turn,))
            while (waiter := self._offer(cost, entry, loop)) is not None:
                yield waiter
        finally:
            if turn.granted:
                self._putter, self._wanted = None, 0
            try:
                self._put_turn._abandon(turn)
            except BaseException:  # of a signal handler: no other putter would have its turn
                self._put_turn._abandon(turn)
                raise

    def _offer(self, cost: int, entry: Entry[T] | None, loop: asyncio.AbstractEventLoop | None) -> PlaceWaiter | None:
        with self._lock:
            full = self.capacity is not None and self.units + cost > self.capacity
            if (full or (self.one_by_one and self._entries)) and not self.closed:
                waiter = PlaceWaiter(loop)
                self._putter, self._wanted = weakref.ref(waiter), cost
                return waiter
            self._append(entry)
            return None

    def _append(self, entry: Entry[T] | None) -> None:
        if self.closed:
            raise QueueClosed(self.name)
        if entry is not None:
            self.units += entry.cost  # first: a signal handler may raise after any call
            self._entries.append(entry)
            self._wake(self._getter)

    def _refusal(self, cost: int, retry_us: int, reset_us: int) -> RateLimited:
        capacity = min(self.limit.capacity, self.capacity or MAX_COUNT)
        decision = Decision(False, capacity, max(0, capacity - self.units), retry_us, reset_us, 0, 0, self.name)
        self.events.publish(REFUSED, self.name, self.name, cost, decision)
        return RateLimited(decision)

    def _interval_us(self, units: int) -> int:
        return units * self.limit.period // self.limit.count

    # Getting ---------------------------------------------------------------------------------------------------

    def get(self) -> T:
        """The first item, at its start. Raises the error with which the queue was closed, and then QueueClosed."""
        return run(self._get(None))

    async def aget(self) -> T:
        return await arun(self._get(asyncio.get_running_loop()))

    def _get(self, loop: asyncio.AbstractEventLoop | None) -> Plan[T]:
        turn = PlaceWaiter(loop)
        try:
            yield Call(self._get_turn, "take", (turn,))
            while True:
                while isinstance(first := self._first(loop), PlaceWaiter):
                    yield first
                charge: Charge = yield Call(self, "reserve", (first,))
                try:
                    yield from charge._enter(loop)
                    while (early := self._too_early(loop)) is not None:
                        yield Call(self.limiter.store.clock, "sleep", (early[0], early[1].event))
                    entry = self._take(charge)
                except CancelledError:  # the first item left the queue, or all did
                    yield from charge._cancel()
                except BaseException:
                    yield from charge._cancel()
                    raise
                else:
                    if entry.cost != first.cost:
                        yield from charge._settle(entry.cost)
                    return entry.item
        finally:
            try:
                self._get_turn._abandon(turn)
            except BaseException:  # as in `_put`
                self._get_turn._abandon(turn)
                raise

    def _first(self, loop: asyncio.AbstractEventLoop | None) -> Entry[T] | PlaceWaiter:
        """The first entry, or a waiter that is woken when there may be one."""
        with self._lock:
            self._getter = self._charge = None
            if self._entries:
                return self._entries[0]
            if self.closed:
                error, self._error = self._error, None
                raise error or QueueClosed(self.name)
            waiter = PlaceWaiter(loop)
            self._getter = weakref.ref(waiter)
            return waiter

    def reserve(self, first: Entry[T]) -> Charge:
        """Decides the start of the first entry."""
        return self._watched(first, self.limiter.reserve(self.name, first.cost))

    async def areserve(self, first: Entry[T]) -> Charge:
        return self._watched(first, await self._async_limiter.reserve(self.name, first.cost))

    def _watched(self, first: Entry[T], charge: Charge) -> Charge:
        """Notes a charge: the removal of the first entry interrupts the wait for its start."""
        with self._lock:
            self._charge = charge
            if not self._entries or self._entries[0] is not first:
                charge.interrupt()
        return charge

    def _too_early(self, loop: asyncio.AbstractEventLoop | None) -> tuple[float, PlaceWaiter] | None:
        """If the last start is too short a time ago: the seconds to sleep, and a waiter whose event ends the sleep."""
        with self._lock:
            early_us = self._earliest_us - self.limiter.store.now_us() if self._strict and self._entries else 0
            self._getter = None
            if early_us <= 0:
                return None
            waiter = PlaceWaiter(loop)
            self._getter = weakref.ref(waiter)
            return early_us / 1e6, waiter

    def _take(self, charge: Charge) -> Entry[T]:
        with self._lock:
            if not self._entries:
                raise CancelledError
            entry = self._entries[0]
            interval_us = self._interval_us(entry.cost)
            self._leaving_until_us = charge.decision.start_us + interval_us
            self._earliest_us = self.limiter.store.now_us() + int(SHORTEST_GAP * interval_us)
            self._charge = None
            self._wake(self._putter)
            self.units -= entry.cost
            self._entries.popleft()
            return entry

    def _wake(self, reference: weakref.ref[PlaceWaiter] | None) -> None:
        if reference is not None and (waiter := reference()) is not None:
            waiter.wake()

    # Leaving and closing ---------------------------------------------------------------------------------------

    def remove(self, entry: Entry[T] | None = None) -> T | None:
        """Removes an entry, or the first, that has not left; the ones behind it move up. None: there is none, or it has left."""
        with self._lock:
            first = self._entries[0] if self._entries else None
            entry = entry or first
            if entry is None or entry not in self._entries:
                return None
            self.units -= entry.cost
            self._entries.remove(entry)
            self._wake(self._putter)
            if entry is first:
                self._interrupt()
            return entry.item

    def clear(self) -> list[T]:
        """Removes all items and returns them; a start that a getter waits for is given back."""
        with self._lock:
            items = [entry.item for entry in self._entries]
            self.units = 0
            self._entries.clear()
            self._wake(self._putter)
            self._interrupt()
            return items

    def _interrupt(self) -> None:
        self._wake(self._getter)
        if self._charge is not None:
            self._charge.interrupt()

    def close(self, error: BaseException | None = None) -> None:
        """No item can be put any more; getters get the rest, at its pace, and then `error` once."""
        with self._lock:
            if not self.closed:
                self.closed, self._error = True, error
                self._wake(self._putter)
                self._wake(self._getter)
