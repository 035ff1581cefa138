"""At most four concurrent writes with psycopg in threads.

python examples/database/write_with_psycopg.py postgresql://localhost/shop
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import psycopg
from schema import CREATE, INSERT, NAME

from limitkeeper.concurrency import Bulkhead

writes = Bulkhead(4, max_waiting=100, timeout="5s", name="order writes")


def save(url: str, item: str) -> None:
    with writes, psycopg.connect(url, application_name=NAME, autocommit=True) as connection:
        connection.execute(INSERT.format(item="%s"), [item])


def main(url: str, count: int = 40) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(CREATE)
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda number: save(url, f"item {number}"), range(count)))


if __name__ == "__main__":
    main(sys.argv[1])
