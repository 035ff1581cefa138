"""Virtual time for tasks: a clock that moves to the next event when every task waits for it, also with a real server behind."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Awaitable, Callable
from itertools import count

from limitkeeper.testing import ManualClock
from stand_ins import NOON


class VirtualClock(ManualClock):
    """A clock on which tasks sleep until `run_until` reaches their moment, in the order of these moments."""

    def __init__(self, start: float = NOON) -> None:
        super().__init__(start)
        self._events: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    def at(self, moment_us: int) -> asyncio.Future[None]:
        """A future that is done at a moment."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._events, (moment_us, next(self._numbers), future))
        return future

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        over = self.at(self.now_us() + round(seconds * 1e6))
        if wake is None:
            await over
            return
        woken = asyncio.ensure_future(wake.wait())
        try:
            await asyncio.wait({over, woken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        raise AssertionError("a blocking sleep on the clock of tasks")

    async def run_until(self, end_us: int, settle: Callable[[], Awaitable[object]]) -> None:
        """Moves to each event up to `end_us`; `settle` returns when every task waits for time."""
        await settle()
        while self._events and self._events[0][0] <= end_us:
            moment_us, _, future = heapq.heappop(self._events)
            if future.done():
                continue
            self._now_us = max(self._now_us, moment_us)
            future.set_result(None)
            await settle()
        self._now_us = max(self._now_us, end_us)
