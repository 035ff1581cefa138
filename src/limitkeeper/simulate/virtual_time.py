"""Virtual time for real code: an asyncio event loop that jumps to its next timer, clocks on it, blocking code in turns.

What waits on this loop (asyncio.sleep, timeouts, call_later, tasks) waits in virtual time, in one thread, so a run is fixed
by its inputs. Code that blocks (the hand-over of a ShardedStore) runs in a thread of its own, and the loop waits for every
step of it: only one of the two ever runs. Rejected: SimPy, whose processes are generators of its own; the stores await asyncio.
"""

from __future__ import annotations

import asyncio
import queue
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from ..errors import StoreUnavailable

T = TypeVar("T")
#: Virtual time begins at 2026-01-10 12:00:00 UTC: a round hour.
BEGIN_US = 1_768_046_400_000_000


class NeverBlocks(selectors.SelectSelector):
    """A selector that waits for nothing: it moves the loop to its next timer instead."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self.loop.jump()
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while something runs, and jumps to the next timer when nothing does."""

    def __init__(self) -> None:
        self._seconds = 0.0
        selector = NeverBlocks()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._seconds

    def now_us(self) -> int:
        """Microseconds since the loop was made."""
        return round(self._seconds * 1e6)

    def jump(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        if not timers:
            raise RuntimeError("every task waits for something that never comes; the simulation would hang")
        self._seconds = max(self._seconds, timers[0].when())


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in virtual time, as asyncio.run does in real time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class SimulatedClock:
    """The clock of one machine: virtual time with an offset, a drift, and steps."""

    def __init__(self, loop: VirtualTimeLoop, offset_us: int = 0, drift_ppm: int = 0) -> None:
        self._loop = loop
        self._rate = 1 + drift_ppm / 1e6
        self._begin_us = BEGIN_US + offset_us
        self._stepped_us = 0
        self.steps: list[int] = []

    def steady_us(self) -> int:
        """The time without steps."""
        return self._begin_us + round(self._loop.now_us() * self._rate)

    def now_us(self) -> int:
        return self.steady_us() + self._stepped_us

    def step(self, by_us: int) -> None:
        self._stepped_us += by_us
        self.steps.append(by_us)

    def forget_steps(self) -> None:
        """Steps count from here on: a process that starts now knows no others."""
        self._begin_us, self._stepped_us, self.steps = self._begin_us + self._stepped_us, 0, []

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        if wake is None or not wake.is_set():
            block_on(self.asleep(seconds))

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        try:
            async with asyncio.timeout(seconds / self._rate):
                await (wake or asyncio.Event()).wait()
        except TimeoutError:
            pass


class TurnTaking:
    """What passes between the loop and a thread of blocking code: one of them always waits for the other."""

    def __init__(self) -> None:
        self.to_loop: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self.to_thread: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()


_turns = threading.local()


async def run_in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """As asyncio.to_thread, in virtual time: the code may block on this loop through `block_on`. A cancelled caller ends when the
    code does; its calls fail from then on."""
    turns, cancelled = TurnTaking(), False
    thread = threading.Thread(target=_work, args=(turns, function, args, kwargs))
    thread.start()
    while True:
        ended, value = turns.to_loop.get()
        if ended:
            thread.join()
            break
        try:
            if cancelled:
                value.close()
                raise StoreUnavailable("the process has crashed")
            turns.to_thread.put((await value, None))
        except asyncio.CancelledError:
            cancelled = True
            turns.to_thread.put((None, StoreUnavailable("the process has crashed")))
        except Exception as error:
            turns.to_thread.put((None, error))
    if cancelled:
        raise asyncio.CancelledError
    return value()


def _work(turns: TurnTaking, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _turns.current = turns
    try:
        found = function(*args, **kwargs)
        turns.to_loop.put((True, lambda: found))
    except BaseException as error:
        failure = error
        turns.to_loop.put((True, lambda: _raise(failure)))


def _raise(error: BaseException) -> None:
    raise error


def block_on(work: Coroutine[Any, Any, T]) -> T:
    """Waits in a thread of `run_in_thread` for a coroutine that the loop performs."""
    turns: TurnTaking = _turns.current
    turns.to_loop.put((False, work))
    answer, error = turns.to_thread.get()
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
