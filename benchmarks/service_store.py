"""One decision through a limitkeeper service as a store, beside RedisStore on Valkey: client CPU, sync and with 64 tasks.

The service and Valkey run in processes of their own, on loopback. The cases take turns in short slices; a figure is the median
over the slices. python benchmarks/service_store.py
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "service"))

from redis_sync import keep_together
from running import Running

from limitkeeper import AsyncLimiter, Limiter, TokenBucket
from limitkeeper.stores import Store
from limitkeeper.stores.leased import LeasedStore
from limitkeeper.stores.redis import RedisStore
from limitkeeper.stores.remote import RemoteStore
from servers.valkey import Valkey

KEY = "user:123456"
TASKS = 64
WIDE = {f"limit {size}": TokenBucket("1000000/s", burst=size) for size in range(10**6, 10**6 + 5)}


def sync_cases(redis: Store, remote: Store) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for name, store in (("RedisStore", redis), ("RemoteStore", remote), ("LeasedStore over RemoteStore", LeasedStore(remote))):
        one, five = Limiter(TokenBucket("1000000/s"), store), Limiter(WIDE, store)
        found[f"{name}, one limit"] = lambda limiter=one: limiter.hit(KEY)  # type: ignore[misc]
        found[f"{name}, five limits"] = lambda limiter=five: limiter.hit(KEY)  # type: ignore[misc]
    return found


def measured(work: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Client CPU in µs a decision, and decisions a second."""
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    work()
    return (time.process_time_ns() - cpu) / calls / 1000, calls / (time.perf_counter_ns() - wall) * 1e9


def rows(slices: int = 20, calls: int = 200) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "limitkeeper.yaml")
        policy.write_text("name: bench\nlimits: []\n")
        with Valkey() as server, Running("--workers", "1", policy=policy) as service:
            keep_together(server)
            keep_together(service)  # type: ignore[arg-type]  # it has a process as well
            return measured_rows(server.url, f"limitkeeper://127.0.0.1:{service.resp}", slices, calls)


def measured_rows(redis_url: str, remote_url: str, slices: int, calls: int) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[float, float]]] = {}
    with RedisStore(redis_url) as redis, RemoteStore(remote_url) as remote:
        some = sync_cases(redis, remote)
        for call in some.values():
            call()
        for _ in range(slices):
            for name, call in some.items():
                slice_ = measured(lambda call=call: [call() for _ in range(calls)], calls)  # type: ignore[misc]
                found.setdefault(name, []).append(slice_)
        asyncio.run(async_slices(redis, remote, slices, found))
    return [
        {
            "case": name,
            "client CPU µs": round(median(one for one, _ in some), 2),
            "decisions/s": round(median(two for _, two in some)),
        }
        for name, some in found.items()
    ]


async def async_slices(redis: Store, remote: Store, slices: int, found: dict[str, list[tuple[float, float]]]) -> None:
    limiters = {
        name: AsyncLimiter(TokenBucket("1000000/s"), store) for name, store in (("RedisStore", redis), ("RemoteStore", remote))
    }
    rounds = 10
    for _ in range(slices + 1):
        for name, limiter in limiters.items():
            cpu, wall = time.process_time_ns(), time.perf_counter_ns()
            await asyncio.gather(*[repeated(limiter, rounds) for _ in range(TASKS)])
            calls = TASKS * rounds
            figures = (time.process_time_ns() - cpu) / calls / 1000, calls / (time.perf_counter_ns() - wall) * 1e9
            found.setdefault(f"{name}, {TASKS} tasks", []).append(figures)


async def repeated(limiter: AsyncLimiter, rounds: int) -> None:
    for _ in range(rounds):
        await limiter.hit(KEY)


if __name__ == "__main__":
    for row in rows():
        print(row)
