"""Sixty-four tasks on one loop, each deciding one thing after the other: beside redis-py's asyncio client doing one EVALSHA each.

The cases take turns in slices of a tenth of a second or so; a figure is the median over the slices, a ratio the median of the
ratios of neighbouring slices. The server has the other core, as in life. Its CPU is what it says itself (INFO cpu).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import redis
import redis.asyncio
from redis_sync import KEY, MINIMAL

from headgate import AsyncLimiter, TokenBucket
from headgate.stores.redis import RedisStore
from servers.valkey import Valkey

TASKS = 64
Decide = Callable[[], Awaitable[Any]]


async def slice_of(decide: Decide, each: int) -> tuple[float, float]:
    """Decisions/s of so many tasks together, and the client's CPU for one, in µs."""

    async def caller() -> None:
        for _ in range(each):
            await decide()

    begun, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*[caller() for _ in range(TASKS)])
    return TASKS * each / (time.perf_counter() - begun), (time.process_time() - spent) / TASKS / each * 1e6


def server_cpu(client: redis.Redis) -> float:
    told = client.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


async def measured(server: Valkey, slices: int) -> list[dict[str, Any]]:
    with server.client() as watching:
        sha = watching.script_load(MINIMAL)
        async with redis.asyncio.Redis(port=server.port) as client, RedisStore(server.url) as store:
            allow, deny = AsyncLimiter(TokenBucket("1000000/s"), store=store), AsyncLimiter(TokenBucket("1/h"), store=store)
            some: dict[str, tuple[Decide, int]] = {
                "redis-py asyncio, EVALSHA of a minimal script": (lambda: client.evalsha(sha, 1, KEY, "1", "1000000"), 15),
                "headgate, allow": (lambda: allow.hit(KEY), 90),
                "headgate, deny": (lambda: deny.hit(KEY), 90),
            }
            told: dict[str, list[tuple[float, float, float]]] = {name: [] for name in some}
            for decide, each in some.values():
                await slice_of(decide, each)
            for _ in range(slices):
                for name, (decide, each) in some.items():
                    before = server_cpu(watching)
                    rate, cpu = await slice_of(decide, each)
                    told[name].append((rate, cpu, (server_cpu(watching) - before) / TASKS / each * 1e6))
    first = next(iter(told.values()))
    return [
        {
            "case": name,
            "decisions/s": round(median(one[0] for one in found)),
            "client CPU µs": round(median(one[1] for one in found), 2),
            "server CPU µs": round(median(one[2] for one in found), 2),
            "× redis-py": round(median(mine[0] / theirs[0] for mine, theirs in zip(found, first, strict=True)), 2),
        }
        for name, found in told.items()
    ]


def rows(slices: int = 25) -> list[dict[str, Any]]:
    """For each case: decisions/s, CPU of client and server for one, and how many times as many as through redis-py."""
    with Valkey() as server:
        return asyncio.run(measured(server, slices))


if __name__ == "__main__":
    for row in rows():
        print(row)
