"""Demo load: hits of one limit by made-up clients, for the dashboard. Bounded in rate and time, one at a time in a worker."""

from __future__ import annotations

import asyncio
from random import Random

from ..errors import LimitkeeperError
from ..stores.sans_io import arun
from .app import Application

MAX_RATE, MAX_SECONDS, MAX_KEYS = 2000, 30, 1000
STEP = 0.02


class DemoLoad:
    """Client i of n is `demo:i`; low numbers are frequent (the cube of a uniform number), so that some are refused."""

    def __init__(self, app: Application, rng: Random) -> None:
        self._app, self._rng = app, rng
        self._task: asyncio.Task[None] | None = None

    def start(self, limit: str, rate: int, seconds: float, keys: int) -> None:
        """Begins; a load that runs already ends."""
        self.stop()
        self._task = asyncio.get_running_loop().create_task(self._run(limit, rate, seconds, keys))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, limit: str, rate: int, seconds: float, keys: int) -> None:
        sent, steps = 0, max(1, round(seconds / STEP))
        for step in range(1, steps + 1):
            for _ in range(round(rate * step * STEP) - sent):
                await self._hit(limit, f"demo:{int(keys * self._rng.random() ** 3)}")
                sent += 1
            await asyncio.sleep(STEP)

    async def _hit(self, limit: str, key: str) -> None:
        try:
            if self._app.hit_nowait(limit, key) is None:
                await arun(self._app.hit_many([self._app.checked_hit(limit, key)]))
        except LimitkeeperError:  # the limit was removed, or the store failed: the dashboard shows it
            pass
