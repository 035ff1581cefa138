"""A server with workers and a FIFO queue behind an adaptive bulkhead, simulated on a virtual clock: response times depend on what
the bulkhead admits, and its size on the response times."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from limitkeeper.concurrency import AdaptiveBulkhead, AdaptiveCall, BulkheadFull
from limitkeeper.testing import ManualClock


@dataclass
class ClosedLoop:
    """`workers` serve a call in `service_us` each; calls come every `every_us`. `hung`: the server answers nothing, and
    callers give up after `patience_us`."""

    adaptive: AdaptiveBulkhead
    clock: ManualClock
    workers: int = 40
    service_us: int = 50_000
    every_us: int = 600
    patience_us: int = 1_000_000
    hung: bool = False
    done: list[tuple[int, int]] = field(default_factory=list)  # (end, response time), µs
    refused: int = 0

    def __post_init__(self) -> None:
        self.queue: deque[tuple[AdaptiveCall, int]] = deque()
        self.busy = 0
        self.events: list[tuple[int, int, str, object]] = []
        self.numbers = count()
        self.at(self.clock.now_us(), "arrive", None)

    def at(self, moment_us: int, kind: str, what: object) -> None:
        heapq.heappush(self.events, (moment_us, next(self.numbers), kind, what))

    def run(self, seconds: float) -> None:
        end_us = self.clock.now_us() + round(seconds * 1e6)
        while self.events[0][0] <= end_us:
            moment_us, _, kind, what = heapq.heappop(self.events)
            self.clock.advance((moment_us - self.clock.now_us()) / 1e6)
            getattr(self, kind)(what)
        self.clock.advance((end_us - self.clock.now_us()) / 1e6)

    def arrive(self, _: object) -> None:
        now_us = self.clock.now_us()
        self.at(now_us + self.every_us, "arrive", None)
        call = self.adaptive.call()
        try:
            call.__enter__()
        except BulkheadFull:
            self.refused += 1
            return
        if self.hung:
            self.at(now_us + self.patience_us, "give_up", call)
        else:
            self.queue.append((call, now_us))
            self.serve()

    def serve(self) -> None:
        while self.queue and self.busy < self.workers:
            self.busy += 1
            self.at(self.clock.now_us() + self.service_us, "finish", self.queue.popleft())

    def finish(self, what: tuple[AdaptiveCall, int]) -> None:
        call, began_us = what
        self.busy -= 1
        call.__exit__(None)
        self.done.append((self.clock.now_us(), self.clock.now_us() - began_us))
        self.serve()

    def give_up(self, call: AdaptiveCall) -> None:
        call.__exit__(TimeoutError)

    def goodput(self, seconds: float, within_us: float = float("inf")) -> float:
        """Calls a second answered in time during the last so many seconds."""
        since = self.clock.now_us() - seconds * 1e6
        return sum(end > since and took <= within_us for end, took in self.done) / seconds

    def p95(self, seconds: float) -> float:
        """Of the response times, in seconds."""
        since = self.clock.now_us() - seconds * 1e6
        times = sorted(took for end, took in self.done if end > since)
        return times[int(len(times) * 0.95)] / 1e6
