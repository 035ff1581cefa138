"""Background probe of a failed store: a daemon thread, or a task where an event loop runs.

It sleeps until a probe is due, probes, and ends when the breaker is closed, when its guard is closed or garbage-collected, or
when its event loop ends; then the next caller that finds the breaker open starts a new one. It refers to the guard's health
only while it probes.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import TYPE_CHECKING

from ..sans_io import Call, Pause, Plan, arun, run

if TYPE_CHECKING:
    from .health import StoreHealth

NAME = "limitkeeper prober"


class Prober:
    """One background probe; StoreHealth runs at most one at a time."""

    __slots__ = ("_clock", "_health", "_stopped", "_thread", "_wake", "ended", "task")

    def __init__(self, health: StoreHealth) -> None:
        self._health = weakref.ref(health)
        self._clock = health.clock
        self._stopped = threading.Event()
        self._wake: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended = False  # by itself

    def start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Starts as a task of this loop, or in a thread."""
        if loop is not None:
            self._wake = asyncio.Event()
            self.task = loop.create_task(self._arun(), name=NAME)
        elif (health := self._health()) is not None:
            self._thread = health.start_thread(self._run, NAME)

    @property
    def alive(self) -> bool:
        """Slower and more exact than `ended`: an event loop may have been closed around the task."""
        if self.task is not None:
            return not self.task.done() and not self.task.get_loop().is_closed()
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
            while (pause_s := self._pause_s()) is not None:
                yield Pause(pause_s)
                health = self._health()
                if health is None or self._stopped.is_set():
                    return
                if health.is_probe_due():
                    yield Call(health, "probe")
                del health
        finally:
            self.ended = True

    def _pause_s(self) -> float | None:
        health = self._health()
        return None if health is None or self._stopped.is_set() else health.pause_s(self)
