"""ManualClock: a clock for tests that moves only when it is advanced."""

from __future__ import annotations

import asyncio
import threading


class ManualClock:
    """A clock for tests: `advance` and sleeping on it move it, and nothing else does.

    It keeps an integer number of microseconds, so that a thousand advances of 0.1 s are exactly 100 s.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now_us = round(start * 1_000_000)
        self._lock = threading.Lock()

    def now_us(self) -> int:
        return self._now_us

    def advance(self, seconds: float) -> None:
        """Moves the clock; a negative number moves it back."""
        with self._lock:
            self._now_us += round(seconds * 1_000_000)

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        self.advance(seconds)

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)
