"""Who calls `tend` of a leased store while nobody asks: a daemon thread for sync callers, a timer on their loop for async ones.

Both only wait until there is something to do. The thread begins with the first batch that has to be looked after (a flood of
keys that come once leaves nothing in hand, and begins none), and ends when the store is closed or gone. On a loop nothing is
pending but a timer; a task lives as long as its calls to the parent.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from typing import Any

log = logging.getLogger("limitkeeper")


class Maintenance:
    """Wakes up when a lease runs low or ends."""

    def __init__(self, store: Any) -> None:
        self._bell = threading.Event()
        self._store = weakref.ref(store, lambda _: self._bell.set())
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()
        self._closed = False

    @property
    def thread(self) -> threading.Thread | None:
        return self._thread

    def ring(self) -> None:
        """There is something to do, now or in a while."""
        store = self._store()
        if self._closed or store is None:
            return
        loop = None if store.local else running_loop()
        if loop is not None:
            self._turn_soon(loop, 0.0)
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._attend, name="limitkeeper leases", daemon=True)
                self._thread.start()
        self._bell.set()

    def close(self) -> None:
        """Ends the thread and the timers."""
        self._closed = True
        self._bell.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        for pending in list(self._loops.values()):
            if isinstance(pending, asyncio.TimerHandle):
                pending.cancel()

    # In a thread -----------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        while not self._closed:
            store = self._store()
            if store is None:
                return
            pause = store.pause_s()
            del store
            self._bell.wait(pause)
            self._bell.clear()
            self._tend()

    def _tend(self) -> None:
        store = self._store()
        if store is None or self._closed:
            return
        try:
            store.tend()
        except Exception as error:
            store.failed(error)

    # On a loop -------------------------------------------------------------------------------------------------

    def _turn_soon(self, loop: asyncio.AbstractEventLoop, pause: float) -> None:
        pending = self._loops.get(loop)
        if isinstance(pending, asyncio.Task) and not pending.done():
            return  # it looks again before it ends
        if isinstance(pending, asyncio.TimerHandle):
            if not pending.cancelled() and pending.when() <= loop.time() + pause:
                return
            pending.cancel()
        self._loops[loop] = loop.call_later(pause, self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        store = self._store()
        self._loops.pop(loop, None)
        if store is None or self._closed:
            return
        pause = store.pause_s()
        if pause is None:
            return
        if pause > 0:
            self._turn_soon(loop, pause)
            return
        task = loop.create_task(self._atend(store))
        self._loops[loop] = task
        task.add_done_callback(lambda _: self._again(loop))

    def _again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loops.pop(loop, None)
        if not self._closed and not loop.is_closed():
            self._turn_soon(loop, 0.0)

    async def _atend(self, store: Any) -> None:
        try:
            await store.atend()
        except Exception as error:
            store.failed(error)


def running_loop() -> Any:
    """The loop whose turn this is, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
