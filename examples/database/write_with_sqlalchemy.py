"""At most four concurrent writes of all processes together with SQLAlchemy: the places are in a store that they share.

The guard stands in front of the session, not in the pool: a write that waits then holds no connection, and reads are not
limited. Here the store is a file (shared memory) for the processes of one host; several hosts use redis://.

python examples/database/write_with_sqlalchemy.py postgresql+psycopg://localhost/shop shared:///tmp/shop.limits
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from schema import CREATE, INSERT, NAME
from sqlalchemy import Engine, create_engine, text

from limitkeeper.concurrency import DistributedBulkhead


def save(engine: Engine, writes: DistributedBulkhead, item: str) -> None:
    with writes, engine.begin() as connection:
        connection.execute(text(INSERT.format(item=":item")), {"item": item})


def main(url: str, store: str, count: int = 40) -> None:
    engine = create_engine(url, pool_size=10, connect_args={"application_name": NAME})
    writes = DistributedBulkhead(4, store, name="order writes", max_waiting=100, timeout="30s", poll="2ms")
    with engine.begin() as connection:
        connection.execute(text(CREATE))
    with ThreadPoolExecutor(10) as threads:
        list(threads.map(lambda number: save(engine, writes, f"item {number}"), range(count)))
    writes.close()
    engine.dispose()


if __name__ == "__main__":
    main(*sys.argv[1:3])
