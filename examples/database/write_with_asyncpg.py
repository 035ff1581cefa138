"""At most four concurrent writes with asyncpg, though the pool has ten connections: reads keep the other six.

python examples/database/write_with_asyncpg.py postgresql://localhost/shop
"""

from __future__ import annotations

import asyncio
import sys

import asyncpg
from schema import CREATE, INSERT, NAME

from limitkeeper.concurrency import Bulkhead

writes = Bulkhead(4, max_waiting=100, timeout="5s", name="order writes")


@writes.limit
async def save(pool: asyncpg.Pool, item: str) -> None:
    async with pool.acquire() as connection:  # after the bulkhead: a write that waits holds no connection
        await connection.execute(INSERT.format(item="$1"), item)


async def main(url: str, count: int = 40) -> None:
    async with asyncpg.create_pool(url, min_size=1, max_size=10, server_settings={"application_name": NAME}) as pool:
        await pool.execute(CREATE)
        await asyncio.gather(*(save(pool, f"item {number}") for number in range(count)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
