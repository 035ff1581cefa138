"""Maintenance: renews leases that run low, gives back idle and expired batches; in a thread, or on the callers' event loop.

`Background` runs the rounds of a `Maintenance` when there is something to do: in a daemon thread for sync callers, by a timer on
their event loop for async ones. The thread starts with the first batch (a flood of keys that come once starts none), and ends
when the store is closed or collected.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable

from ...clock import Clock
from ..sans_io import Plan, WakeEvent, arun, run, running_loop, start_task
from .lease_cache import LeaseCache
from .lease_refill import Refill, Want

log = logging.getLogger("limitkeeper")
#: The longest pause of the background after failures.
MAX_BACKOFF_US = 5_000_000
#: How many keys are fetched in one call.
MAX_FETCHED = 64


class Maintenance:
    """Keeps the leases of a cache filled and returns what they do not need."""

    def __init__(self, cache: LeaseCache, refill: Refill) -> None:
        self.cache = cache
        self.refill = refill
        self.failures = self.backoff_us = self.paused_until_us = self.running = 0
        self.closed = False

    def round(self) -> Plan[None]:
        """One round, counted in `running`."""
        with self.cache.lock:
            self.running += 1
        try:
            yield from self._round()
        finally:
            with self.cache.lock:
                self.running -= 1

    def _round(self) -> Plan[None]:
        """Puts expired batches aside, gives them back, and fetches for the leases that run low. A round that is under
        way when the store is closed fetches no more: that batch would not be given back."""
        cache, now_us = self.cache, self.cache.now_us()
        cache.check(now_us, 1_000_000)
        if now_us < self.paused_until_us:
            return
        yield from self.refill.give_back(cache.take_put_aside())
        while cache.due and not self.closed:
            wants: list[Want] = []
            while len(wants) < MAX_FETCHED and (lease := cache.take_due()) is not None:
                if lease.fetching() is None and lease.has_room() and cache.find(lease.terms.named, lease.key) is lease:
                    wants.append(Want(lease, 1, lease.next_batch(now_us, 1, cache.round_trip_us)))
            if wants:
                yield from self.refill.fetch(wants)
        self.backoff_us = 0

    def pause_s(self) -> float | None:
        """Seconds until there is something to do; None: nothing until the background is woken."""
        cache = self.cache
        at_us = cache.next_check_us()
        if cache.due or cache.unspent:
            at_us = self.paused_until_us
        return None if at_us is None else max(0, at_us - cache.now_us()) / 1e6

    def attempt_round(self) -> Plan[None]:
        """One round. When it fails, it is counted and the parent is left alone for a while, longer each time."""
        try:
            yield from self.round()
        except Exception as error:
            self.failures += 1
            self.backoff_us = min(MAX_BACKOFF_US, max(self.cache.life_us, 2 * self.backoff_us))
            self.paused_until_us = self.cache.now_us() + self.backoff_us
            log.warning("leases of %r: %s; retrying in %.1f s", self.refill.parent, error, self.backoff_us / 1e6)


#: `threading.Thread`, or what makes something that starts and joins like it.
ThreadFactory = Callable[..., threading.Thread]


class Background:
    """Runs the rounds of a Maintenance for as long as that exists."""

    def __init__(self, maintenance: Maintenance, make_thread: ThreadFactory, clock: Clock) -> None:
        self._woken = WakeEvent()
        self._maintenance = weakref.ref(maintenance, lambda _: self._woken.set())
        self._make_thread = make_thread
        self._clock = clock
        self._lock = threading.Lock()
        #: The next round of each loop, and when it begins; or the task of the present one. Both refer to their loop.
        self._on_loops: dict[asyncio.AbstractEventLoop, tuple[float, asyncio.Handle] | asyncio.Task[None]] = {}
        self._closed = False
        self.thread: threading.Thread | None = None

    def wake(self) -> None:
        """Looks for something to do, now or in a while."""
        maintenance = self._maintenance()
        if self._closed or maintenance is None:
            return
        loop = None if maintenance.refill.parent.local else running_loop()
        if loop is not None:
            self._schedule(loop, 0.0)
            return
        with self._lock:
            if self.thread is None and not self._closed:
                self.thread = self._make_thread(target=self._run, name="limitkeeper leases", daemon=True)
                self.thread.start()
        self._woken.set()

    def close(self) -> None:
        """Ends the thread and the timers."""
        self._closed = True
        self._woken.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
        for pending in list(self._on_loops.values()):
            if isinstance(pending, tuple):
                pending[1].cancel()

    def _run(self) -> None:
        while not self._closed:
            maintenance = self._maintenance()
            if maintenance is None:
                return
            pause = maintenance.pause_s()
            del maintenance  # while it waits, the store may be collected
            if pause is None:
                self._woken.wait()
            else:
                self._clock.sleep(pause, self._woken)
            self._woken.clear()
            maintenance = self._maintenance()
            if maintenance is not None and not self._closed:
                run(maintenance.attempt_round())

    def _schedule(self, loop: asyncio.AbstractEventLoop, pause: float) -> None:
        pending, begins = self._on_loops.get(loop), loop.time() + pause
        if isinstance(pending, tuple):  # uvloop's handles are no TimerHandle
            if not pending[1].cancelled() and pending[0] <= begins:
                return
            pending[1].cancel()
        elif pending is not None and not pending.done():
            return  # it schedules the next when it ends
        for other in [one for one in list(self._on_loops) if one.is_closed()]:
            self._on_loops.pop(other, None)
        self._on_loops[loop] = (begins, loop.call_later(pause, self._start_round, loop))

    def _start_round(self, loop: asyncio.AbstractEventLoop) -> None:
        maintenance = self._maintenance()
        self._on_loops.pop(loop, None)
        if maintenance is None or self._closed:
            return
        pause = maintenance.pause_s()
        if pause is None:
            return
        if pause > 0:
            self._schedule(loop, pause)
            return
        task = self._on_loops[loop] = start_task(arun(maintenance.attempt_round()), loop)
        task.add_done_callback(lambda _: self._end_round(loop))

    def _end_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._on_loops.pop(loop, None)
        if not self._closed and not loop.is_closed():
            self._schedule(loop, 0.0)
