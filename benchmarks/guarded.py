"""A guard around a server that hangs: the cost of a decision until the guard opens, while it is open, and while the store works.

The server is real: a socket that accepts and never answers. Every decision is timed by itself, so that the slow ones are seen;
the cost of timing is in every figure, also in that of the local answer with which they are compared.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from report import Section, Table, number
from timing import Case, Effort, measure, one_core

from limitkeeper import AsyncLimiter, Decision, Limiter, MemoryStore, StoreUnavailable, TokenBucket
from limitkeeper.stores import GuardedStore, Store

KEY = "user:123456"
LIMIT = TokenBucket("1000/s burst 1000")
BUDGET_MS = 20


class HungStore(Store):
    """A third-party store that calls a server which never answers."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def clock(self) -> Any:
        raise NotImplementedError

    def decide(self, claims: Sequence[Any], max_wait_us: int | None = 0, **options: Any) -> Decision:
        try:
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.sendall(b"?")
                connection.recv(1)
        except OSError as error:
            raise StoreUnavailable(str(error)) from None
        raise StoreUnavailable("it hung up")


@contextmanager
def hung_server() -> Iterator[int]:
    """A port that accepts connections and never sends anything; it closes them at the end."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield server.getsockname()[1]


def times(call: Callable[[], Any], count: int) -> list[int]:
    """Nanoseconds of each of so many calls."""
    clock, found = time.perf_counter_ns, []
    for _ in range(count):
        begun = clock()
        call()
        found.append(clock() - begun)
    return sorted(found)


async def async_times(limiter: AsyncLimiter, count: int) -> list[int]:
    clock, found = time.perf_counter_ns, []
    for _ in range(count):
        begun = clock()
        await limiter.hit(KEY)
        found.append(clock() - begun)
    return sorted(found)


def at(sorted_ns: list[int], part: float) -> float:
    """A percentile, in microseconds."""
    return sorted_ns[min(len(sorted_ns) - 1, int(len(sorted_ns) * part))] / 1000


def opened(port: int, on_failure: str) -> tuple[GuardedStore, list[int]]:
    """A guard that has opened, and the duration of each decision until then."""
    guard = GuardedStore(HungStore(port), f"{BUDGET_MS}ms", on_failure, share=4 if on_failure == "local" else None)
    limiter = Limiter(LIMIT, store=guard)
    took = []
    while guard.state != "open":
        took += times(lambda: limiter.hit(KEY), 1)
    return guard, took


def once_open(port: int, count: int) -> list[tuple[str, list[int], list[int]]]:
    """(case, times until it was open, times once it was): for each answer, sync and async; the local answer first."""
    local = Limiter(LIMIT, store=MemoryStore())
    rows: list[tuple[str, list[int], list[int]]] = [("the local answer: MemoryStore", [], times(lambda: local.hit(KEY), count))]
    for on_failure in ("open", "closed", "local"):
        guard, until = opened(port, on_failure)
        limiter = Limiter(LIMIT, store=guard)
        rows.append((f'hit, on_failure="{on_failure}"', until, times(lambda limiter=limiter: limiter.hit(KEY), count)))
        awaited = asyncio.run(async_times(AsyncLimiter(LIMIT, store=guard), count))
        rows.append((f'await hit, on_failure="{on_failure}"', until, awaited))
        guard.close()
    return rows


def healthy(effort: Effort, note: Callable[[str], None]) -> tuple[dict[str, float], dict[str, str]]:
    """Nanoseconds of a hit through a working store, with a guard around it and without."""

    class Plain(MemoryStore):
        """Not the limiter's own kind, so that it is called as any store."""

    bare, behind = Limiter(LIMIT, store=Plain()), Limiter(LIMIT, store=GuardedStore(Plain()))
    cases = [Case("bare", "o.hit(k)", {"o": bare, "k": KEY}), Case("guarded", "o.hit(k)", {"o": behind, "k": KEY})]
    with one_core():
        return measure(cases, effort, note)


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Guarded, the server hangs",
        f"A guard with a budget of {BUDGET_MS} ms around a store whose server accepts connections and never answers; a prober "
        "calls it all the time. Each decision is timed by itself; p99 over that of a MemoryStore's hit timed the same way.",
    )
    with hung_server() as port:
        rows = once_open(port, effort.pick(50_000, 5_000))
    base = at(rows[0][2], 0.99)
    table = Table(("decisions once open", "p50, µs", "p99, µs", "p99.9, µs", "largest before it opened, ms"))
    for what, until, after in rows:
        slowest = number(max(until) / 1e6, "") if until else ""
        table.rows.append((what, number(at(after, 0.5), ""), number(at(after, 0.99), ""), number(at(after, 0.999), ""), slowest))
        if until:
            section.figure(f"{what}: p99 over the local answer", at(after, 0.99) - base, 10, "µs")
    worst = max(max(until) for _, until, _ in rows if until) / 1e6
    section.figure(f"largest decision while it is found out, budget {BUDGET_MS} ms", worst, None, "ms")
    took, failed = healthy(effort, note)
    section.fail(failed)
    if not failed:
        section.figure("what a guard adds to a hit while all is well", took["guarded"] - took["bare"], None, "ns")
    section.details = [table]
    return section
