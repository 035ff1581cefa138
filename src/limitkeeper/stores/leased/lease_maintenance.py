"""Maintenance: renews leases that run low, gives back idle and expired batches; in a thread, or on the callers' event loop.

`Background` runs the rounds of a `Maintenance` when there is something to do: in a daemon thread for sync callers, in a task of
their event loop for async ones. The thread starts with the first batch (a flood of keys that come once starts none), and ends
when the store is closed or collected.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from ...clock import Clock, SystemClock
from ..sans_io import Plan, WakeEvent, arun, run, running_loop, start_task
from .lease_cache import LeaseCache
from .lease_refill import PendingMove, Refill, Want

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
        self.failures = self.backoff_us = self.paused_until_us = 0
        self.closed = False
        self.rounds: set[PendingMove] = set()  # under way

    def round(self) -> Plan[None]:
        """One round, in `rounds` while it is under way."""
        pending = PendingMove()
        try:
            self.rounds.add(pending)
            yield from self._round()
        finally:
            pending.done = True  # first, as that of a fetch
            self.rounds.discard(pending)
            pending.wake()

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
    """Runs the rounds of a Maintenance for as long as that exists.

    A task on each event loop sleeps until a round is due, and ends when there is nothing to do. After a loop has ended, the next
    one may be as short (`asyncio.run` for every call), and no round would end on it: a thread makes the rounds from then on.
    """

    def __init__(self, maintenance: Maintenance, make_thread: ThreadFactory, clock: Clock) -> None:
        self._woken = WakeEvent()
        self._maintenance = weakref.ref(maintenance, lambda _: self._woken.set())
        self._make_thread = make_thread
        self._clock = clock
        self._lock = threading.Lock()
        #: The task of each loop, and what wakes it. Both refer to their loop.
        self._on_loops: dict[asyncio.AbstractEventLoop, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._loops_end = False
        self._closed = False
        self.thread: threading.Thread | None = None

    def wake(self) -> None:
        """Looks for something to do, now or in a while."""
        maintenance = self._watched()
        if maintenance is None:
            return
        loop = None if self._loops_end or maintenance.refill.parent.local else running_loop()
        if loop is not None and self._wake_task(loop):
            return
        with self._lock:
            if self.thread is None and not self._closed:
                thread = self._make_thread(target=self._run, name="limitkeeper leases", daemon=True)
                with suppress(RuntimeError):  # no room for a thread: the next call tries again
                    thread.start()
                    self.thread = thread
        self._woken.set()

    def close(self) -> None:
        """Ends the thread and the tasks."""
        self._closed = True
        self._woken.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
        for loop, (_, woken) in list(self._on_loops.items()):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)

    def _watched(self) -> Maintenance | None:
        return None if self._closed else self._maintenance()

    def _run(self) -> None:
        while (maintenance := self._watched()) is not None:
            pause = maintenance.pause_s()
            del maintenance  # while it waits, the store may be collected
            if pause is None:
                self._woken.wait()
            else:
                self._clock.sleep(pause, self._woken)
            self._woken.clear()
            maintenance = self._watched()
            if maintenance is not None:
                run(maintenance.attempt_round())

    def _wake_task(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Has a task of the loop look; False when another loop was closed around its task."""
        if (found := self._on_loops.get(loop)) is not None:
            found[1].set()
            return True
        for other in [one for one in list(self._on_loops) if one.is_closed()]:
            self._on_loops.pop(other, None)
            self._note_end()
        if self._loops_end:
            return False
        woken = asyncio.Event()
        task = start_task(self._arun(woken), loop)
        self._on_loops[loop] = (task, woken)
        task.add_done_callback(lambda task: self._end_task(task, loop))
        return True

    async def _arun(self, woken: asyncio.Event) -> None:
        while (maintenance := self._watched()) is not None and (pause := maintenance.pause_s()) is not None:
            woken.clear()
            if pause > 0:
                del maintenance
                await self._clock.asleep(pause, woken)
            else:
                await arun(maintenance.attempt_round())
                await asyncio.sleep(0)  # callers first, also where a round has not waited

    def _end_task(self, task: asyncio.Task[None], loop: asyncio.AbstractEventLoop) -> None:
        found = self._on_loops.pop(loop, None)
        if task.cancelled():  # as a loop that ends does with its tasks
            self._note_end()
        if self._loops_end or (found is not None and found[1].is_set()):  # woken after it had found nothing to do
            with suppress(RuntimeError):  # no thread can be started when the process ends
                self.wake()

    def _note_end(self) -> None:
        """A simulation ends with its loop, and what it has held with it."""
        self._loops_end = isinstance(self._clock, SystemClock)
