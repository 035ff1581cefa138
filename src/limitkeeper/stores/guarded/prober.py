"""Somebody who looks whether a store is back, in the background: a daemon thread, or a task where an event loop runs.

It sleeps until a probe is due, probes, and ends when the store answers for good, when its guard is closed or forgotten, or when
its event loop ends; then the next caller that finds the guard open posts a new one. It holds its watch only while it looks.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .health import StoreHealth


class Prober:
    """One at a time for each watch."""

    __slots__ = ("over", "stop", "task", "thread", "wake", "watch")

    def __init__(self, watch: StoreHealth) -> None:
        self.watch = weakref.ref(watch)
        self.over = False  # it has ended by itself
        self.stop = threading.Event()
        self.task: asyncio.Task[None] | None = None
        self.thread: threading.Thread | None = None
        self.wake: asyncio.Event | None = None

    def post(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Begins to look: in this loop, or in a thread."""
        if loop is not None:
            self.wake = asyncio.Event()
            self.task = loop.create_task(self._alook(), name="limitkeeper lookout")
        else:
            self.thread = threading.Thread(target=self._look, name="limitkeeper lookout", daemon=True)
            self.thread.start()

    @property
    def alive(self) -> bool:
        """The whole truth, which takes longer to find out: an event loop may have been closed around it."""
        if self.task is not None:
            return not self.task.done() and not self.task.get_loop().is_closed()
        return self.thread is not None and self.thread.is_alive()

    def end(self) -> None:
        """Stops looking, from any thread."""
        self.stop.set()
        if self.task is not None and self.wake is not None:
            try:
                self.task.get_loop().call_soon_threadsafe(self.wake.set)
            except RuntimeError:  # the loop is gone, and the task with it
                pass

    def _look(self) -> None:
        try:
            while (found := self._due()) is not None:
                clock, pause = found
                clock.sleep(pause, self.stop)
                watch = self.watch()
                if watch is None or self.stop.is_set():
                    break
                watch.look()
                del watch
        finally:
            self.over = True

    async def _alook(self) -> None:
        try:
            while (found := self._due()) is not None:
                clock, pause = found
                await clock.asleep(pause, self.wake)
                watch = self.watch()
                if watch is None or self.stop.is_set():
                    break
                await watch.alook()
                del watch
        finally:
            self.over = True

    def _due(self) -> tuple[Any, float] | None:
        """The clock to sleep on, and for how many seconds; None when there is nothing more to look for."""
        watch = self.watch()
        pause = None if watch is None or self.stop.is_set() else watch.pause_us(self)
        return None if watch is None or pause is None else (watch.clock, pause / 1e6)
