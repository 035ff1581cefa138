"""First come, first served through a RedisStore in asyncio, also when the server has lost its scripts."""

from __future__ import annotations

import asyncio

import pytest

from limitkeeper import AsyncLimiter, TokenBucket
from limitkeeper.stores.redis import RedisStore
from servers.valkey import Valkey


@pytest.mark.parametrize("flushes", [1, 5])
def test_after_a_script_flush_nobody_is_overtaken(valkey: Valkey, flushes: int) -> None:
    """400 tasks ask one after the other while scripts are flushed: their starts are in the order in which they asked."""

    async def main() -> list[int]:
        async with RedisStore(valkey.url, prefix=f"flush {flushes}", timeout="60s") as store:
            limiter = AsyncLimiter(TokenBucket("1/min burst 1"), store=store)
            await limiter.hit("k")
            tasks: list[asyncio.Task[int]] = []

            async def start() -> int:
                return (await limiter.reserve("k")).decision.start_us

            with valkey.client() as client:
                for number in range(400):
                    tasks.append(asyncio.create_task(start()))
                    if number % 9 == 0:
                        await asyncio.sleep(0.0005 * (number % 4))
                    if number % (400 // flushes) == 50:
                        client.script_flush()
            return list(await asyncio.gather(*tasks))

    starts = asyncio.run(main())
    assert starts == sorted(starts)
    assert len(set(starts)) == 400
