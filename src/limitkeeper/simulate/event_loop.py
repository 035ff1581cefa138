# cython: annotation_typing=False
"""EventLoop: simulated time, and the calls that are due at it. It is also the clock of the stores, gates and bulkheads in a run.

    heap      (time, number, call, argument): calls at any time, equal times in the order in which they were scheduled
    timeouts  one FIFO queue per duration; only its head is in the heap. Most calls end before their timeout, so a timeout costs
              an append and a popleft instead of a push and a pop of the heap.

Times are integer microseconds from START_US, so that a run repeats exactly. Rejected: SimPy, whose generators reach 158 000
bare events per second, this loop 1.1 million; the flash sale of the examples has 4.9 million (benchmarks/simulate.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

#: Simulated time begins here (µs since 1970), a whole number of days: windows that align to UTC begin with the run.
START_US = 1_000_000_800_000_000 // 86_400_000_000 * 86_400_000_000

Event = Callable[[Any], object]


@cython.cclass
class Timeout:
    """A timeout. `call` None: it has passed, or was cancelled."""

    __slots__ = ("at_us", "call")

    def __init__(self, call: Callable[[], object] | None) -> None:
        self.at_us, self.call = 0, call


@cython.cclass
class AwaitedReply(Timeout):
    """A reply and its timeout: the first of the two counts. `owner` has `answered(status)` and `timed_out()`."""

    __slots__ = ("owner",)

    def __init__(self, owner: Any) -> None:
        self.at_us, self.call, self.owner = 0, owner.timed_out, owner

    def reply(self, status: int) -> None:
        if self.call is not None:
            self.call = None
            self.owner.answered(status)


@cython.cclass
class EventLoop:
    """Runs calls in the order of their times. `now` is the simulated time in µs."""

    def __init__(self) -> None:
        self.now = START_US
        self.events = 0  # calls that were made
        self._heap: list[tuple[int, int, Event, Any]] = []
        self._number = 0
        self._timeouts: dict[int, deque[Timeout]] = {}

    def at(self, time_us: int, call: Event, argument: Any = None) -> None:
        """Schedules `call(argument)`."""
        self._number += 1
        heappush(self._heap, (time_us, self._number, call, argument))

    def after(self, delay_us: int, call: Event, argument: Any = None) -> None:
        self._number += 1
        heappush(self._heap, (self.now + delay_us, self._number, call, argument))

    def start_timeout(self, delay_us: int, timeout: Timeout) -> None:
        """Schedules `timeout.call()`, unless that is None by then."""
        queue = self._timeouts.get(delay_us)
        if queue is None:
            queue = self._timeouts[delay_us] = deque()
        timeout.at_us = self.now + delay_us
        if not queue:
            self.at(timeout.at_us, self._pass_timeouts, queue)
        queue.append(timeout)

    def _pass_timeouts(self, queue: deque[Timeout]) -> None:
        while queue and (queue[0].call is None or queue[0].at_us <= self.now):
            timeout = queue[0]
            call, timeout.call = timeout.call, None
            if call is not None:
                call()
            queue.popleft()  # last: a queue that is not empty is not put into the heap again
        if queue:
            self.at(queue[0].at_us, self._pass_timeouts, queue)

    def run(self, until_us: int) -> None:
        """Makes all calls that are due before `until_us`, and moves the time there."""
        heap, count = self._heap, 0
        try:
            while heap and heap[0][0] < until_us:
                self.now, _, call, argument = heappop(heap)
                call(argument)
                count += 1
        finally:
            self.events += count
        self.now = until_us

    # The clock of the stores. `advance` tells a LeasedStore that no thread may run beside it.

    def now_us(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        raise RuntimeError("the event loop moves the simulated time")

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        raise RuntimeError("nothing may block in a simulation")

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        raise RuntimeError("nothing may block in a simulation")


class SkewedClock(EventLoop):
    """The clock of a node that differs from the simulated time by `skew_us`."""

    def __init__(self, loop: EventLoop, skew_us: int) -> None:
        self._loop, self._skew_us = loop, skew_us

    def now_us(self) -> int:
        return self._loop.now + self._skew_us
