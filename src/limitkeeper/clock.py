"""Clock and SystemClock: integer microseconds since 1970 from the monotonic clock. No other file reads the time.

`SystemClock` is the monotonic clock plus the offset to UTC, taken once: windows align to UTC, and a step of the wall
clock (NTP, an operator, a leap second) has no effect. Elsewhere time is an argument; tests pass a `ManualClock`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import NamedTuple, Protocol

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.monotonic import monotonic_us
else:

    def monotonic_us() -> int:
        return time.monotonic_ns() // 1000


def steady_us() -> int:
    """The monotonic clock, which is the same for all processes of a machine."""
    return monotonic_us()


def utc_us() -> int:
    """The wall clock, which may step; used only for the offset of a clock."""
    return time.time_ns() // 1000


class Clock(Protocol):
    """The clock of a store. A sleep ends early when `wake` is set (a waiter has moved up)."""

    def now_us(self) -> int: ...

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None: ...

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None: ...


@cython.cclass
class SystemClock:
    """Real time: the monotonic clock plus the offset to UTC."""

    __slots__ = ("offset_us",)

    def __init__(self) -> None:
        self.offset_us = utc_us() - monotonic_us()

    def now_us(self) -> int:
        return monotonic_us() + self.offset_us

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        if wake is None:
            time.sleep(seconds)
        else:
            wake.wait(seconds)

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        end_us = monotonic_us() + seconds * 1e6
        while True:
            if wake is None:
                await asyncio.sleep(seconds)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await wake.wait()
            left_us = end_us - monotonic_us()
            if left_us <= 0 or (wake is not None and wake.is_set()):
                return
            seconds = max(0.001, left_us / 1e6)  # uvloop's timers are in whole milliseconds, and up to one early


class ServerClock(NamedTuple):
    """The clock of a store whose state is on a server, for timeouts and sleeps: this machine's, because the server's may differ
    and be set (`now_us` of the store estimates it)."""

    now_us: Callable[[], int]
    sleep: Callable[..., None]
    asleep: Callable[..., Coroutine[None, None, None]]


#: One offset to UTC for the whole process.
SYSTEM = SystemClock()
