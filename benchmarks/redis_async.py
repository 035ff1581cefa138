"""Sixty-four tasks on one loop, each deciding one thing after the other: beside redis-py's asyncio client doing one EVALSHA each.

The cases take turns in slices of a tenth of a second or so; a figure is the median over the slices, a ratio the median of the
ratios of neighbouring slices. The server has the other core, as in production. Its CPU time is that of INFO cpu.
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

from limitkeeper import AsyncLimiter, TokenBucket
from limitkeeper.stores.redis import RedisStore
from servers.valkey import Valkey

try:
    from glide import GlideClient, GlideClientConfiguration, NodeAddress, Script
except ImportError:  # one of the peers
    GlideClient = None  # type: ignore[assignment,misc]

TASKS = 64
GLIDE = "valkey-glide, the same script"
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
    received = client.info("cpu")
    return float(received["used_cpu_user"]) + float(received["used_cpu_sys"])


def times_as_many(mine: list[Any], theirs: list[Any]) -> float:
    """The median of the ratios of neighbouring slices."""
    return round(median(one[0] / other[0] for one, other in zip(mine, theirs, strict=True)), 2)


async def glide_client(server: Valkey) -> Any:
    """The other client library for asyncio; None where it is not installed."""
    if GlideClient is None:
        return None
    return await GlideClient.create(GlideClientConfiguration([NodeAddress("127.0.0.1", server.port)]))


async def measured(server: Valkey, slices: int) -> list[dict[str, Any]]:
    with server.client() as watching:
        sha = watching.script_load(MINIMAL)
        async with redis.asyncio.Redis(port=server.port) as client, RedisStore(server.url) as store:
            allow, deny = AsyncLimiter(TokenBucket("1000000/s"), store=store), AsyncLimiter(TokenBucket("1/h"), store=store)
            some: dict[str, tuple[Decide, int]] = {
                "redis-py asyncio, EVALSHA of a minimal script": (lambda: client.evalsha(sha, 1, KEY, "1", "1000000"), 15),
                "limitkeeper, allow": (lambda: allow.hit(KEY), 90),
                "limitkeeper, deny": (lambda: deny.hit(KEY), 90),
            }
            glide = await glide_client(server)
            if glide is not None:
                minimal = Script(MINIMAL)
                some[GLIDE] = (lambda: glide.invoke_script(minimal, keys=[KEY], args=["1", "1000000"]), 15)
            received: dict[str, list[tuple[float, float, float]]] = {name: [] for name in some}
            for decide, each in some.values():
                await slice_of(decide, each)
            for _ in range(slices):
                for name, (decide, each) in some.items():
                    before = server_cpu(watching)
                    rate, cpu = await slice_of(decide, each)
                    received[name].append((rate, cpu, (server_cpu(watching) - before) / TASKS / each * 1e6))
            if glide is not None:
                await glide.close()
    first = next(iter(received.values()))
    return [
        {
            "case": name,
            "decisions/s": round(median(one[0] for one in found)),
            "client CPU µs": round(median(one[1] for one in found), 2),
            "server CPU µs": round(median(one[2] for one in found), 2),
            "× redis-py": times_as_many(found, first),
        }
        | ({"× valkey-glide": times_as_many(found, received[GLIDE])} if GLIDE in received else {})
        for name, found in received.items()
    ]


def rows(slices: int = 25) -> list[dict[str, Any]]:
    """For each case: decisions/s, CPU of client and server for one, and how many times as many as through redis-py."""
    with Valkey() as server:
        return asyncio.run(measured(server, slices))


if __name__ == "__main__":
    for row in rows():
        print(row)
