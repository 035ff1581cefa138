"""100 tasks that call an API which accepts at most 10 calls per second."""

import asyncio
import time

from limitkeeper import AsyncLimiter

limiter = AsyncLimiter("10/s burst 1")  # evenly spaced: one call every 100 ms


async def call_api(number: int) -> int:
    async with limiter:
        return number  # here: the real call


async def main(tasks: int = 100) -> list[int]:
    return await asyncio.gather(*[call_api(number) for number in range(tasks)])


if __name__ == "__main__":
    start = time.monotonic()
    asyncio.run(main())
    print(f"100 calls in {time.monotonic() - start:.1f} s")
