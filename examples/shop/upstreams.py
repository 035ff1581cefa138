"""The services behind the shop, and their protection: calls to inventory and pricing with the caps of the policy's
`dependencies`, and a database whose writes go through a bulkhead."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from threading import Lock
from typing import Any

import httpx

from limitkeeper.concurrency import Bulkhead, Dependencies
from limitkeeper.policy import Policy
from limitkeeper.stores import Store
from shop.services import SERVICES

#: Concurrent writes that the database can take; those that wait hold no connection.
WRITES = 4


class Upstreams:
    """Inventory, pricing and the database. INVENTORY_URL and PRICING_URL are the addresses of the services; without them they run
    in this process, for tests."""

    def __init__(self, policy: Policy, store: Store) -> None:
        self.dependencies = Dependencies.of_policy(policy, store)
        self.writes = Bulkhead(WRITES, max_waiting=100, timeout="1s", name="order writes")
        self.clients = {name: self._client(name) for name in SERVICES}
        self._database = sqlite3.connect(os.environ.get("SHOP_DATABASE", ":memory:"), check_same_thread=False)
        self._database.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, product INTEGER, cents INTEGER)")
        self._one_at_a_time = Lock()  # SQLite has one writer; a pool of connections would be here

    def _client(self, name: str) -> httpx.AsyncClient:
        url = os.environ.get(f"{name.upper()}_URL")
        here = None if url else httpx.ASGITransport(SERVICES[name]())
        return httpx.AsyncClient(base_url=url or f"http://{name}", transport=here, timeout=2, trust_env=False)

    async def ask(self, service: str, method: str, path: str) -> dict[str, Any]:
        """One call to a service: RateLimited or BulkheadFull when its cap is reached and stays so."""
        async with self.dependencies[service]:
            answer = await self.clients[service].request(method, path)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def save(self, product: int, cents: int) -> int:
        """Writes an order; at most WRITES of them at a time."""
        async with self.writes:
            return await asyncio.to_thread(self._insert, product, cents)

    def _insert(self, product: int, cents: int) -> int:
        with self._one_at_a_time, self._database as connection:
            return connection.execute("INSERT INTO orders (product, cents) VALUES (?, ?)", (product, cents)).lastrowid or 0

    def saved(self) -> int:
        """The number of orders."""
        with self._one_at_a_time:
            found: int = self._database.execute("SELECT count(*) FROM orders").fetchone()[0]
            return found

    async def aclose(self) -> None:
        for client in self.clients.values():
            await client.aclose()
        self._database.close()
