"""Bulkheads: a place taken and released without contention beside the standard library's semaphores, 10 000 waiters, and adaptive
limits in front of a server whose capacity drops to half (adaptive.py)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import adaptive
from report import Section, Table, number
from timing import BATCH_NS, Case, Effort, measure, one_core

from limitkeeper.concurrency import Bulkhead
from tasks import Loop, loop_of

THREADS = {
    "threading.Semaphore": ("with o: pass", lambda: threading.Semaphore(40)),
    "Bulkhead, thread": ("with o: pass", lambda: Bulkhead(40)),
}
TASKS = {
    "asyncio.Semaphore": ("await o.acquire(); o.release()", lambda: asyncio.Semaphore(40)),
    "Bulkhead, task": ("await o.aacquire(); o.release()", lambda: Bulkhead(40)),
}
QUEUES: dict[str, Callable[[], Any]] = {"asyncio.Semaphore": lambda: asyncio.Semaphore(1), "Bulkhead": lambda: Bulkhead(1)}


async def awaited(effort: Effort) -> dict[str, float]:
    """Nanoseconds of each case of TASKS, taking turns."""
    loops: dict[str, Loop] = {name: loop_of(call, {"o": make()}) for name, (call, make) in TASKS.items()}
    sizes = {name: max(1, int(BATCH_NS / max(1.0, await loop(100)))) for name, loop in loops.items()}
    best: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(effort.pick(9, 3)):
        smallest = {name: float("inf") for name in loops}
        for _ in range(effort.pick(25, 6)):
            for name, loop in loops.items():
                smallest[name] = min(smallest[name], await loop(sizes[name]))
        for name, value in smallest.items():
            best[name].append(value)
    return {name: median(values) for name, values in best.items()}


async def queue_of(waiters: int, make: Callable[[], Any]) -> float:
    """Microseconds for each of so many tasks that wait for one place, from joining to leaving."""
    one_place = make()

    async def call() -> None:
        async with one_place:
            pass

    await one_place.__aenter__()
    begun = time.perf_counter()
    tasks = [asyncio.create_task(call()) for _ in range(waiters)]
    await asyncio.sleep(0)
    one_place.release()
    await asyncio.gather(*tasks)
    return (time.perf_counter() - begun) / waiters * 1e6


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Bulkheads",
        "A place of 40 taken and released, uncontended. Then N tasks that wait for one place, the cost of each from "
        "joining the queue to leaving the bulkhead. Then a server process on loopback with "
        f"{adaptive.WORKERS} workers and {adaptive.SERVICE * 1e3:g} ms a call, under {adaptive.OFFERED} calls/s, that loses "
        f"half of its workers: calls answered within {adaptive.IN_TIME * 1e3:g} ms.",
    )
    with one_core():
        cases = [Case(name, call, {"o": make(), "k": None}) for name, (call, make) in THREADS.items()]
        found, failed = measure(cases, effort, note)
        note("tasks")
        found |= asyncio.run(awaited(effort))
        note("waiters")
        waits: dict[tuple[int, str], float] = {}
        for _ in range(effort.pick(7, 2)):
            for n in (100, 1000, 10_000):
                for name, made in QUEUES.items():
                    waits[n, name] = min(waits.get((n, name), float("inf")), asyncio.run(queue_of(n, made)))
    section.fail(failed)
    section.figure("thread: / threading.Semaphore", found["Bulkhead, thread"] / found["threading.Semaphore"], 2, "×")
    section.figure("task: / asyncio.Semaphore", found["Bulkhead, task"] / found["asyncio.Semaphore"], 2, "×")
    # O(log n): log 10 000 / log 100 = 2.
    section.figure("one of 10 000 waiters / one of 100", waits[10_000, "Bulkhead"] / waits[100, "Bulkhead"], 2, "×")
    semaphore = waits[10_000, "asyncio.Semaphore"] / waits[100, "asyncio.Semaphore"]
    section.figure("the same of asyncio.Semaphore", semaphore, None, "×")
    ratio = waits[10_000, "Bulkhead"] / waits[10_000, "asyncio.Semaphore"]
    section.figure("one of 10 000 waiters / one of asyncio.Semaphore's", ratio, None, "×")
    section.details = [
        Table(("acquire and release", "ns"), [(name, number(value, "")) for name, value in found.items()]),
        Table(("waiting tasks", "µs each"), [(f"{n}, {name}", number(value, "")) for (n, name), value in waits.items()]),
    ]
    adaptive.add_to(section, effort, note)
    return section
