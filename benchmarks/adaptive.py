"""Adaptive limits in front of a real server, a process on loopback that loses half of its workers: goodput and p95 of AIMD and
Gradient2 beside the best fixed limit.

Calls come at a steady OFFERED rate whatever is answered (an open loop); a call beyond the limit is refused here and not sent.
Goodput counts the calls that were answered within IN_TIME.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from report import Section, Table, number
from timing import Effort

from limitkeeper.concurrency import AIMD, AdaptiveBulkhead, AdaptiveCall, BulkheadFull, Gradient2

WORKERS, SERVICE, OFFERED = 32, 0.04, 1200
#: Seconds in which a call has to be answered. A limit of more than 2.5 times the workers answers none in time.
IN_TIME = 2.5 * SERVICE
#: The last one suits the whole capacity.
FIXED = (WORKERS // 2, WORKERS * 5 // 8, WORKERS * 3 // 4, WORKERS, WORKERS * 3 // 2)


class Server(asyncio.Protocol):
    """WORKERS workers and a FIFO queue. A line is the number of a call, which is the answer; "half" halves the workers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.workers, self.busy = transport, WORKERS, 0
        self.queue: deque[bytes] = deque()

    def data_received(self, data: bytes) -> None:
        for line in data.splitlines():
            if line == b"half":
                self.workers //= 2
            else:
                self.queue.append(line)
        self.serve()

    def serve(self) -> None:
        while self.queue and self.busy < self.workers:
            self.busy += 1
            asyncio.get_running_loop().call_later(SERVICE, self.finish, self.queue.popleft())

    def finish(self, line: bytes) -> None:
        self.busy -= 1
        if not self.transport.is_closing():
            self.transport.write(line + b"\n")  # type: ignore[attr-defined]
        self.serve()


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def served() -> Iterator[int]:
    """Runs a server; its port. (At most some hundred bytes are in flight: a read never ends within a line.)"""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


class Outcome(NamedTuple):
    """Of the calls that ended: seconds since the drop of the capacity, and response time (s)."""

    calls: list[tuple[float, float]]

    def goodput(self, begin: float, end: float) -> float:
        return sum(begin < at <= end and took <= IN_TIME for at, took in self.calls) / (end - begin)

    def p95(self, begin: float, end: float) -> float:
        times = sorted(took for at, took in self.calls if begin < at <= end)
        return times[int(len(times) * 0.95)] if times else float("inf")

    def recovered(self, wanted: float, seconds: int) -> float:
        """Seconds until the first second with so much goodput begins; inf: there is none."""
        steps = range(10 * (seconds - 1) + 1)
        return next((step / 10 for step in steps if self.goodput(step / 10, step / 10 + 1) >= wanted), float("inf"))


class Client(asyncio.Protocol):
    """Sends the calls that the limit admits."""

    def __init__(self, adaptive: AdaptiveBulkhead) -> None:
        self.adaptive, self.calls, self.sent = adaptive, [], 0
        self.running: dict[int, tuple[AdaptiveCall, float]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        for line in data.splitlines():
            call, begun = self.running.pop(int(line))
            call.__exit__(None)
            self.calls.append((now, now - begun))

    def send(self) -> None:
        call = self.adaptive.call()
        try:
            call.__enter__()
        except BulkheadFull:
            return
        self.sent += 1
        self.running[self.sent] = call, time.perf_counter()
        self.transport.write(b"%d\n" % self.sent)  # type: ignore[attr-defined]

    async def offer(self, seconds: float) -> None:
        begun, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - begun) < seconds:
            while count < passed * OFFERED:
                self.send()
                count += 1
            await asyncio.sleep(0.001)


class Fixed:
    """A limit that does not move."""

    window_us, least_samples = 0, 1

    def __init__(self, limit: int) -> None:
        self.limit = float(limit)

    def update(self, seconds: float, in_flight: int, dropped: bool) -> float:
        return self.limit


ADAPTIVE: dict[str, Callable[[], Any]] = {
    "Gradient2": lambda: Gradient2(initial=WORKERS, minimum=4, window="100ms"),
    "AIMD": lambda: AIMD(initial=WORKERS, minimum=4, timeout=1.5 * SERVICE, window="100ms"),
}


async def load(port: int, limit: Any, before: float, after: float) -> Outcome:
    """Offers calls for `before` seconds, halves the server, and offers them for `after` seconds."""
    made = await asyncio.get_running_loop().create_connection(lambda: Client(AdaptiveBulkhead(limit)), "127.0.0.1", port)
    transport, client = made
    await client.offer(before)
    transport.write(b"half\n")
    dropped = time.perf_counter()
    await client.offer(after)
    transport.close()
    return Outcome([(at - dropped, took) for at, took in client.calls])


def measured(limit: Any, before: float, after: float) -> Outcome:
    with served() as port:
        return asyncio.run(load(port, limit, before, after))


def add_to(section: Section, effort: Effort, note: Callable[[str], None]) -> None:
    """Adds the figures of a capacity that drops to half; about 30 s."""
    before, after, each = effort.pick(3, 2), effort.pick(7, 4), effort.pick(12, 8) / 10
    best, rows = 0.0, []
    for size in FIXED:
        note(f"half the capacity, a fixed limit of {size}")
        found = measured(Fixed(size), 0.0, each)
        best = max(best, found.goodput(0.3, each))
        rows.append((f"fixed, {size}", "", number(found.goodput(0.3, each), ""), number(found.p95(0.3, each) * 1e3, "")))
    for name, make in ADAPTIVE.items():
        note(f"capacity halved, {name}")
        found = measured(make(), before, after)
        section.figure(f"{name}, half the capacity: s to 0.9 of the best goodput", found.recovered(0.9 * best, after), 5, "s")
        last = found.goodput(after - 2, after)
        section.figure(f"{name}, in the last 2 s: goodput / that of the best fixed limit", last / best, 0.9, "×", True)
        section.figure(f"{name}, in the last 2 s: p95", found.p95(after - 2, after) * 1e3, IN_TIME * 1e3, "ms")
        rows.append((name, number(found.goodput(-1, 0), ""), number(last, ""), number(found.p95(after - 2, after) * 1e3, "")))
    section.details.append(Table(("limit", "before, calls/s in time", "after", "p95 after, ms"), rows))


if __name__ == "__main__":
    asyncio.run(serve())
