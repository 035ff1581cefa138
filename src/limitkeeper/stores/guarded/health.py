"""Health of one guarded store: turns failures and probes into transitions of the breaker, publishes them, runs the prober.

Transitions are made under a lock; events are published after it is released. A probe repeats the call that failed last, without
charging: the same key goes to the same shard, slot and server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from ...algorithms.claim import Claim
from ...clock import Clock
from ...errors import StoreError, StoreTimeout
from ...observe.events import BREAKER_CLOSED, HALF_OPENED, OPENED, PROBE_FAILED, STORE_KINDS, Publisher
from ..sans_io import Call, Pause, Plan, WakeEvent, arun, run, running_loop, start_task
from .breaker import OPEN, Breaker
from .deadline_store import StartThread

if TYPE_CHECKING:
    from .store import GuardedStore

log = logging.getLogger("limitkeeper")
PROBER = "limitkeeper prober"


class StoreHealth:
    """The health of a guard's store. `background`: whether a prober is started when the breaker opens."""

    def __init__(
        self, breaker: Breaker, clock: Clock, name: str, guard: GuardedStore, background: bool, start_thread: StartThread
    ) -> None:
        self.breaker = breaker
        self.clock = clock
        self.name = name
        self.events = Publisher(kinds=STORE_KINDS)
        self.start_thread = start_thread
        self._guard = weakref.ref(guard)
        self._background = background
        self._failed_claims: Sequence[Claim] = ()
        self.failures = self.timeouts = self.opened = self.probes = self.rejected = 0
        self.closed = False  # a store that was closed raises its own errors
        self.reset_after_fork(None)

    def reset_after_fork(self, rng: Random | None) -> None:
        """In a new process: a new lock, no prober, and a random generator of its own."""
        self.lock = threading.RLock()
        self.prober: Prober | None = None
        self.breaker.probing = False
        if rng is not None:
            self.breaker.rng = rng

    def may_call(self) -> bool:
        """Whether a caller may call the store while the breaker is not closed."""
        if self.closed:
            return True
        if self.breaker.state is OPEN:
            self.rejected += 1  # no call and no jump back inside: threads do not lose a count here
            prober = self.prober
            if self._background and (prober is None or prober.ended or (not self.rejected & 15 and not prober.alive)):
                self._start_prober()
            return False
        now_us = self.clock.now_us()
        with self.lock:
            recovered = self.breaker.close_after_ramp(now_us)
            through = self.breaker.lets_through(now_us)
        if recovered:
            self._publish(BREAKER_CLOSED)
        elif self._background and (self.prober is None or not self.prober.alive):
            self._start_prober()
        return through

    def record_failure(self, error: StoreError, claims: Sequence[Claim]) -> None:
        """Counts a caller's failed call; raises the error when the guard is closed."""
        if self.closed:
            raise error
        now_us = self.clock.now_us()
        with self.lock:
            self.failures += 1
            self.timeouts += isinstance(error, StoreTimeout)
            self._failed_claims = [Claim(claim.limit, claim.key, 1) for claim in claims]
            opens = self.breaker.record_failure(now_us)
            self.opened += opens
        if opens:
            holds = "until a probe succeeds it is not called, and on_failure decides (its default, open, admits without counting)"
            log.warning("the guarded store %r fails; %s: %s", self.name, holds, str(error))
            self._publish(OPENED, error)
            if self._background:
                self._start_prober()

    def until_probe_us(self) -> int:
        return self.breaker.until_probe_us(self.clock.now_us())

    def _publish(self, kind: str, error: BaseException | None = None) -> None:
        self.events.publish(kind, self.name, error=error)

    def probe(self) -> bool:
        """Probes the store once, when the breaker is open and no probe is in progress; False when it stays open."""
        return run(self._plan_probe())

    async def aprobe(self) -> bool:
        return await arun(self._plan_probe())

    def _plan_probe(self) -> Plan[bool]:
        with self.lock:
            begins = self.breaker.begin_probe()
            self.probes += begins
        if begins:
            try:
                if (guard := self._guard()) is not None:
                    yield from guard.plan_probe(self._failed_claims)
            except Exception as error:
                self._end_probe(error)
            except BaseException:
                self.breaker.probing = False
                raise
            else:
                self._end_probe(None)
        return self.breaker.state != OPEN

    def _end_probe(self, error: Exception | None) -> None:
        now_us = self.clock.now_us()
        with self.lock:
            if error is not None:
                self.breaker.probe_failed(now_us)
            else:
                self.breaker.probe_succeeded(now_us)
        if error is None:
            self._publish(HALF_OPENED)
            return
        if not isinstance(error, StoreError):
            log.error("a probe of %s raised an error that is not a StoreError: %r", self.name, error)
        self._publish(PROBE_FAILED, error)

    def _start_prober(self) -> None:
        """Starts a prober, unless one is alive: as a task where an event loop runs, unless the one before has ended with its
        loop. The present one may end as soon (`asyncio.run` for every call), and no probe would be made."""
        with self.lock:
            if self.prober is None or not self.prober.alive:
                self.breaker.probing = False  # of a prober whose event loop has stopped during a probe
                loop = running_loop() if self.prober is None else None
                self.prober = Prober(self)
                self.prober.start(loop)

    def pause_s(self, prober: Prober) -> float | None:
        """Seconds until the prober has something to do; None when it is not needed any more."""
        breaker = self.breaker
        now_us = self.clock.now_us()
        with self.lock:
            if breaker.closed or self.prober is not prober:
                if self.prober is prober:
                    self.prober = None
                return None
            if breaker.state == OPEN:
                return breaker.until_probe_us(now_us) / 1e6
            return max(1, breaker.since_us + breaker.ramp_us - now_us) / 1e6

    def is_probe_due(self) -> bool:
        """Whether to probe now; closes the breaker when its ramp has ended."""
        now_us = self.clock.now_us()
        with self.lock:
            recovered = self.breaker.close_after_ramp(now_us)
            due = self.breaker.state == OPEN and self.breaker.probe_at_us <= now_us
        if recovered:
            log.warning("the guarded store %r answers again", self.name)
            self._publish(BREAKER_CLOSED)
        return due

    def close(self) -> None:
        """Ends the prober; failures are the store's own from here on."""
        with self.lock:
            self._background, self.closed = False, True
            prober, self.prober = self.prober, None
        if prober is not None:
            prober.stop()


class Prober:
    """Background probe of a failed store: a daemon thread, or a task where an event loop runs. At most one at a time.

    It sleeps until a probe is due, probes, and ends when the breaker is closed, when its guard is closed or garbage-collected,
    or when its event loop ends; then, or when its loop does not run, one of the next callers that find the breaker open starts a
    new one, in a thread.
    """

    def __init__(self, health: StoreHealth) -> None:
        self._health = weakref.ref(health)
        self._clock = health.clock
        self._stopped = WakeEvent()
        self._wake: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended = False  # by itself

    def start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Starts as a task of this loop, or in a thread."""
        if loop is not None:
            self._wake = asyncio.Event()
            self.task = start_task(self._arun(), loop, PROBER)
        elif (health := self._health()) is not None:
            self._thread = health.start_thread(self._run, PROBER)

    @property
    def alive(self) -> bool:
        """Slower and more exact than `ended`: the event loop of the task may have been closed or stopped around it."""
        if self.task is not None:
            return not self.task.done() and self.task.get_loop().is_running()
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Stops probing, from any thread."""
        self._stopped.set()
        if self.task is not None and self._wake is not None:
            try:
                self.task.get_loop().call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop is closed, and the task with it
                pass

    def _run(self) -> None:
        run(self._plan(), sleep=lambda seconds: self._clock.sleep(seconds, self._stopped))

    async def _arun(self) -> None:
        await arun(self._plan(), sleep=lambda seconds: self._clock.asleep(seconds, self._wake))

    def _plan(self) -> Plan[None]:
        try:
            while (health := self._watched()) is not None and (pause_s := health.pause_s(self)) is not None:
                del health
                yield Pause(pause_s)
                health = self._watched()
                if health is not None and health.is_probe_due():
                    yield Call(health, "probe")
                del health
        finally:
            self.ended = True

    def _watched(self) -> StoreHealth | None:
        return None if self._stopped.is_set() else self._health()
