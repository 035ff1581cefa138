"""ManualClock, and `unlimited()`, which switches limiting off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..limiter_base import switch


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


@contextmanager
def unlimited() -> Iterator[None]:
    """Switches limiting off in the whole process: every call is allowed, and nothing is stored."""
    switch(True)
    try:
        yield
    finally:
        switch(False)
