"""DistributedBulkhead: a bulkhead whose places are in a store, shared by all processes that use its name.

A place is an entry of a sliding window log of `max_concurrent` per `ttl`. Taking one is a hit; releasing it gives that very entry
back; what a crashed process held is free after `ttl`. Every store has such a log, exact and on its own clock, and one call each
takes and releases (Redis: one script call with server time). All rates of one name share the entries of a log, so another size
counts what is held, and a rate that is never reached renews:

    renew, every ttl / 3:  add an entry dated now, whatever the size; then give the old one back

The count is therefore never too low, and for a moment one too high. (In a shared file whose log is full the old entry goes first;
another process may take its room, until the next renewal that finds some.) While the store can't be reached for longer than the
ttl, places of running calls expire.

The first waiter of a process asks the store again every `poll`, and at once when this process releases a place; the others wait
behind it in FIFO order. Processes do not queue for each other. Rejected: a Lua script over a sorted set, a second mechanism, and
on Redis only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

from ..algorithms.claim import Claim, NamedLimit
from ..algorithms.sliding_log import SlidingWindowLog
from ..decision import STORE
from ..errors import BulkheadFull, ConfigurationError, InvalidLimit, StoreError
from ..fork import reset_after_fork
from ..observe.events import ALLOWED, BULKHEAD_KINDS, FINISHED, GIVE_BACK_FAILED, REFUSED, RESIZED, Publisher
from ..observe.snapshot import BulkheadSnapshot, Snapshot
from ..periodic_thread import PeriodicThread
from ..rate import MAX_COUNT, Duration, Rate, duration_us
from ..stores import Store, store_from_url
from ..stores.sans_io import Call, Plan, arun, run
from .bulkhead import Bulkhead, PlaceContext, PlaceWaiter, checked_size

log = logging.getLogger("limitkeeper")
#: The key under which all places of a bulkhead are.
KEY = "places"


class Place(NamedTuple):
    """A place in the store: its charge, the time of its entry (µs, the store's clock), and who granted it, or refused it."""

    claims: list[Claim]
    dated_us: int
    source: str = STORE
    granted: bool = True


class Renewal(PeriodicThread):
    """Renews the places of a bulkhead until that is closed or collected."""

    def __init__(self, bulkhead: DistributedBulkhead, interval_us: int) -> None:
        self._bulkhead = weakref.ref(bulkhead)
        super().__init__(f"limitkeeper {bulkhead.name}", interval_us)

    def work(self, woken: bool) -> None:
        bulkhead = self._bulkhead()
        if bulkhead is None:
            self.stopped = True
        else:
            bulkhead.renew()


class DistributedBulkhead(PlaceContext):
    """`DistributedBulkhead(40, "redis://…", name="database")`: 40 calls at a time in all processes of that name together.

    Used as a `Bulkhead`: `with`, `async with`, `@bulkhead.limit`; `acquire` and `release`, or `aacquire` and `arelease`.
    `max_waiting` and `timeout` are those of this process, whose first waiter asks the store every `poll`. Places that a crashed
    process held are free after `ttl`. A store that failed raises its `StoreError` when a place is taken.
    """

    def __init__(
        self,
        max_concurrent: int,
        store: Store | str,
        *,
        name: str,
        max_waiting: int | None = None,
        timeout: Duration | None = None,
        ttl: Duration = "30s",
        poll: Duration = "50ms",
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"a distributed bulkhead's name must be a non-empty string, got {name!r}")
        self.name = name
        self.max_waiting = None if max_waiting is None else checked_size(max_waiting, "max_waiting", 0)
        self._ttl_us, self._poll_us = duration_us(ttl), duration_us(poll)
        if self._ttl_us < 1000 or self._poll_us < 1:
            raise InvalidLimit(f"ttl must be at least 1 ms and poll at least 1 µs, got {ttl!r} and {poll!r}")
        self._timeout_us = None if timeout is None else duration_us(timeout)
        if not isinstance(store, Store | str):
            raise ConfigurationError(f"a distributed bulkhead needs a store or its URL, got {store!r}")
        self._owns_store = isinstance(store, str)
        self.store = store_from_url(store) if isinstance(store, str) else store
        self._clock = self.store.clock
        self.events = Publisher((*BULKHEAD_KINDS, GIVE_BACK_FAILED))
        behind = None if max_waiting is None else max(0, max_waiting - 1)
        self._gate = Bulkhead(1, behind, timeout, name=name, clock=self._clock)  # held by the waiter that asks the store
        self._permitted = self._rejected = self._inherited = 0
        self._renewal: Renewal | None = None
        self._renewing_limit = self._named(MAX_COUNT)  # whatever the size here and in other processes
        self._set_size(checked_size(max_concurrent, "max_concurrent", 1))
        self._clear()
        reset_after_fork(self)

    def _clear(self) -> None:
        self._lock = threading.RLock()
        self._held: deque[Place] = deque()  # the oldest entry first
        self._renewing = self._owed = 0  # places in renewal, and how many of them were released meanwhile
        self._asking: weakref.ref[PlaceWaiter] | None = None  # weak: a task of a closed event loop can be collected

    def _reset_after_fork(self) -> None:
        """A child holds nothing: its parent renews and releases."""
        self._inherited += self.in_use
        self._clear()

    def _set_size(self, size: int) -> None:
        self.max_concurrent = size
        self._limit = self._named(size)

    def _named(self, count: int) -> NamedLimit:
        named = NamedLimit(self.name, "bulkhead", SlidingWindowLog(Rate(count, self._ttl_us)))
        self.store.register(named)
        return named

    def __repr__(self) -> str:
        here = f"{self.in_use} in use and {self.waiting} waiting here"
        return f"<DistributedBulkhead {self.name!r} of {self.max_concurrent}: {here}>"

    @property
    def in_use(self) -> int:
        """The places that this process holds."""
        return len(self._held) + self._renewing - self._owed

    @property
    def waiting(self) -> int:
        """The callers of this process that wait."""
        return self._gate.in_use + self._gate.waiting

    def taken(self) -> int:
        """The places taken in all processes (a call to the store)."""
        decision = self.store.decide([Claim(self._limit, KEY, 0)], 0, commit=False)
        return self.max_concurrent - decision.remaining

    # Taking and releasing places --------------------------------------------------------------------------------

    def try_acquire(self) -> bool:
        """Takes a place if one is free; never waits for one."""
        return self._counted(run(self._try_take()))

    async def atry_acquire(self) -> bool:
        return self._counted(await arun(self._try_take()))

    def acquire(self) -> None:
        """Takes a place, waiting for one if necessary; raises `BulkheadFull` when too many wait or the timeout passes."""
        run(self._take(PlaceWaiter(None)))

    async def aacquire(self) -> None:
        await arun(self._take(PlaceWaiter(asyncio.get_running_loop())))

    def release(self) -> None:
        """Gives a place back. A store that fails does not raise: the place is free after the ttl."""
        place = self._released()
        if place is not None:
            run(self._free(place))

    async def arelease(self) -> None:
        place = self._released()
        if place is not None:
            await arun(self._free(place))

    def resize(self, max_concurrent: int) -> None:
        """Changes the size as this process sees it; every process has to call it. What is taken stays counted."""
        self._set_size(checked_size(max_concurrent, "max_concurrent", 1))
        self.events.publish(RESIZED, self.name, cost=max_concurrent)
        self._wake()

    async def __aexit__(self, *exc: Any) -> None:
        await self.arelease()

    def close(self) -> None:
        """Ends the renewals, and closes the store if it was given as a URL."""
        if self._renewal is not None:
            self._renewal.stop()
        if self._owns_store:
            self.store.close()

    # Plans -----------------------------------------------------------------------------------------------------

    def _take(self, turn: PlaceWaiter) -> Plan[None]:
        if not self._gate.in_use and (yield from self._try_take()):
            self._counted(True)
            return
        deadline_us = None if self._timeout_us is None else self._clock.now_us() + self._timeout_us
        if self.max_waiting == 0 or self._timeout_us == 0:
            self._counted(False)
            raise BulkheadFull(self.name, self.max_concurrent, "is full")
        try:
            try:
                yield Call(self._gate, "take", (turn,))
                yield from self._ask_until(deadline_us)
            finally:
                try:
                    self._gate._abandon(turn)
                except BaseException:  # of a signal handler: no other caller would have its turn
                    self._gate._abandon(turn)
                    raise
        except BulkheadFull as error:
            self._counted(False)
            raise BulkheadFull(self.name, self.max_concurrent, f"is full, {self.waiting} more wait here") from error
        self._counted(True)

    def _ask_until(self, deadline_us: int | None) -> Plan[None]:
        while not (yield from self._try_take()):
            left_us = self._poll_us if deadline_us is None else min(self._poll_us, deadline_us - self._clock.now_us())
            if left_us <= 0:
                raise BulkheadFull(self.name, self.max_concurrent, "had no free place in time")
            yield Call(self, "pause", (left_us / 1e6,))

    def _try_take(self) -> Plan[bool]:
        place = yield from self._ask(self._limit)
        if not place.granted:
            return False
        try:
            with self._lock:
                if self._renewal is None:
                    self._renewal = Renewal(self, self._ttl_us // 3)
                self._held.append(place)
        except RuntimeError:  # no room for a thread: the next call tries again
            yield from self._free(place)
            raise
        return True

    def _ask(self, limit: NamedLimit) -> Plan[Place]:
        claims = [Claim(limit, KEY, 1)]
        try:
            decision = yield Call(self.store, "decide", (claims, 0), {"remember": True})
        except BaseException:  # cancelled while the store decided
            if claims[0].charged_at() >= 0:
                yield from self._free(Place(claims, claims[0].charged_at()))
            raise
        return Place(claims, decision.start_us, decision.source, decision.allowed)

    def _free(self, place: Place) -> Plan[None]:
        try:
            yield Call(self, "give_back", (place,))
        except StoreError as error:
            log.warning("bulkhead %r: a place could not be given back, it is free after its ttl: %s", self.name, error)
            self.events.publish(GIVE_BACK_FAILED, self.name, error=error)
        finally:
            self._wake()

    def give_back(self, place: Place) -> None:
        self.store.give_back(*place[:3])

    async def agive_back(self, place: Place) -> None:
        """Goes on when the caller is cancelled. On a local store it needs no loop: a task may be collected after its own."""
        if self.store.local:
            self.store.give_back(*place[:3])
        else:
            await asyncio.shield(self.store.agive_back(*place[:3]))

    def renew(self) -> int:
        """Renews the places that were dated a third of the ttl ago or earlier, or (the store's clock went back) as far ahead; how
        many. The background thread calls it."""
        return run(self._renew())

    def _renew(self) -> Plan[int]:
        renewed, now_us, age_us = 0, self.store.now_us(), self._ttl_us // 3
        for _ in range(len(self._held)):
            with self._lock:
                if not self._held or abs(now_us - self._held[0].dated_us) < age_us:
                    break
                place = self._held.popleft()
                self._renewing += 1
            try:
                later = yield from self._ask(self._renewing_limit)
                full = not later.granted and later.source == STORE  # no guard whose store fails
                if full:
                    yield from self._free(place)
                    later = yield from self._ask(self._renewing_limit)
                if later.granted:
                    old, place = place, later
                    renewed += 1
                    if not full:
                        yield from self._free(old)
            except StoreError as error:
                log.warning("bulkhead %r: a place could not be renewed: %s", self.name, error)
            finally:
                released = self._end_renewal(place)
            if released:
                yield from self._free(place)
        return renewed

    def _end_renewal(self, place: Place) -> bool:
        """Puts a place back among those held; True when it was released meanwhile."""
        with self._lock:
            self._renewing -= 1
            if self._owed:
                self._owed -= 1
                return True
            self._held.append(place)
            return False

    def _released(self) -> Place | None:
        """A place to give back: all places of a process are alike, the oldest goes. None when a renewal gives it back."""
        with self._lock:
            if self._held:
                place: Place | None = self._held.popleft()
            elif self._renewing > self._owed:
                place, self._owed = None, self._owed + 1
            elif self._inherited:
                self._inherited -= 1
                return None
            else:
                raise RuntimeError(f"release() of {self.name!r} without acquire(): this process holds no place")
        self.events.publish(FINISHED, self.name)
        return place

    # Waiting ---------------------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Until this process releases a place, at most so long."""
        waiter = PlaceWaiter(None)
        self._asking = weakref.ref(waiter)
        self._clock.sleep(seconds, waiter.event)

    async def apause(self, seconds: float) -> None:
        waiter = PlaceWaiter(asyncio.get_running_loop())
        self._asking = weakref.ref(waiter)
        await self._clock.asleep(seconds, waiter.event)

    def _wake(self) -> None:
        asking, self._asking = self._asking, None
        if asking is not None and (waiter := asking()) is not None:
            waiter.wake()

    # Counters --------------------------------------------------------------------------------------------------

    def _counted(self, permitted: bool) -> bool:
        with self._lock:
            self._permitted += permitted
            self._rejected += not permitted
        self.events.publish(ALLOWED if permitted else REFUSED, self.name)
        return permitted

    def stats(self) -> BulkheadSnapshot:
        """The counters of this process."""
        sizes = (self.max_concurrent, self.max_waiting, self.in_use, self.waiting)
        return BulkheadSnapshot(self.name, *sizes, self._permitted, self._rejected)

    def snapshot(self) -> Snapshot:
        """For metrics sinks."""
        return Snapshot("", bulkheads=(self.stats(),))
