"""For tests: ManualClock, `use_clock`, the StoreContract that every store must pass, and `unlimited()`, which turns limits off.

`StoreContract` needs pytest and hypothesis, so it is imported on first use only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..clock import SYSTEM, Clock
from ..limiter_base import switch
from ..stores.worker_warning import set_clock_of_default_stores

if TYPE_CHECKING:
    from .store_contract import StoreContract

__all__ = ["ManualClock", "StoreContract", "unlimited", "use_clock"]


class ManualClock:
    """A clock for tests: `advance` and sleeping on it move it, and nothing else does.

    It keeps an integer number of microseconds, so that a thousand advances of 0.1 s are exactly 100 s. `start` is in seconds
    since 1970.
    """

    def __init__(self, start: float = 0.0) -> None:
        try:
            self._now_us = round(start * 1_000_000)
        except TypeError:
            raise TypeError(
                f"start: expected seconds since 1970 as a number, got {start!r}; a datetime has timestamp()"
            ) from None
        self._lock = threading.Lock()

    def now_us(self) -> int:
        return self._now_us

    def advance(self, seconds: float) -> None:
        """Moves the clock; a negative number moves it back."""
        try:
            step_us = round(seconds * 1_000_000)
        except TypeError:
            raise TypeError(f"expected seconds as a number, got {seconds!r}; write advance(1.5)") from None
        with self._lock:
            self._now_us += step_us

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


@contextmanager
def use_clock(clock: Clock) -> Iterator[None]:
    """Puts all limits of the process that keep their state in memory by default (no store=, or "memory://") on a clock. They
    start empty, and are empty again, on real time, afterwards. Stores that were passed as objects keep their own clocks."""
    set_clock_of_default_stores(clock)
    try:
        yield
    finally:
        set_clock_of_default_stores(SYSTEM)


def __getattr__(name: str) -> object:
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .store_contract import StoreContract

    return StoreContract
