"""The platform of the live flash sale, each service a process of its own: `python -m flash_sale_live.services NAME FD`.

    gateway    → limitkeeper serve (with limits) → catalog, order
    catalog    → Redis, PostgreSQL on a cache miss                    GET /products
    order      → pricing, inventory, PostgreSQL, payment              POST /checkout
    pricing    → Redis, PostgreSQL on a cache miss
    inventory  → PostgreSQL: every checkout updates the same row
    payment    → waits as long as a payment provider takes

A service works on a bounded number of requests at a time, and the others wait. A caller that has given up does not stop a
request. The order service holds its connection while the payment is made, as many shops do. With ENFORCE=1, the gateway calls the
decision service, and the order service caps its calls and its writes; everything else is the same code. A process imports only
what its service needs: importing everything takes seconds on a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, Self

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from limitkeeper import BulkheadFull, RateLimited

POLICY = Path(__file__).with_name("limitkeeper.yaml")
#: Requests that a service works on at a time; connections of its pool.
PLACES = {"gateway": 200, "catalog": 20, "order": 20, "pricing": 20, "inventory": 20, "payment": 40}
CACHING = ("catalog", "pricing")
CONNECTIONS = {"catalog": 5, "order": 10, "pricing": 5, "inventory": 5}
#: Layer 3: writes of the order service at a time, and how many more may wait.
WRITES, WAITING_WRITES = 8, 20
#: Seconds: a gateway's timeout, a service's, and the life of cached values.
GATEWAY_TIMEOUT, CALL_TIMEOUT, CACHED = 1.5, 1.0, 1
SCHEMA = """
DROP TABLE IF EXISTS products, orders;
CREATE TABLE products (id int PRIMARY KEY, cents int NOT NULL, available int NOT NULL);
CREATE TABLE orders (id bigserial PRIMARY KEY, request text NOT NULL, cents int NOT NULL, paid bool NOT NULL DEFAULT false);
INSERT INTO products SELECT number, 100 * number, 1000000 FROM generate_series(1, 20) number;
"""
SALE = 1  # the product on sale
FORWARDED = ("X-Api-Key", "X-User", "X-Request-Id")
Answer = tuple[int, bytes]


class Places:
    """At most `size` at a time; the others wait in order of arrival, or are rejected where `waits` is False."""

    def __init__(self, size: int, waits: bool = True) -> None:
        self.size, self.waits = size, waits
        self._free = asyncio.Semaphore(size)
        self.in_use = self.waiting = self.most_in_use = self.requests = self.rejected = self.failed = 0

    async def __aenter__(self) -> Self:
        self.requests += 1
        if not self.waits and self._free.locked():
            self.rejected += 1
            raise web.HTTPServiceUnavailable
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.in_use += 1
        self.most_in_use = max(self.most_in_use, self.in_use)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.in_use -= 1
        self._free.release()

    def figures(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


class Upstream:
    """Calls to another service: so many attempts, each with a timeout, and behind a cap if there is one."""

    def __init__(self, name: str, url: str, timeout: float, attempts: int, cap: Any = None) -> None:
        self.name, self.url, self.cap, self.most = name, url, cap, attempts
        self.timeout = ClientTimeout(total=timeout)
        self.session = ClientSession(connector=TCPConnector(limit=0))
        self.calls = self.attempts = self.timeouts = self.refused = 0

    async def call(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        """The status and the body; 503 when a cap refused it, 504 when nothing came in time."""
        self.calls += 1
        status = 504
        for _ in range(self.most):
            self.attempts += 1
            try:
                async with (
                    self.cap or nullcontext(),
                    self.session.request(method, self.url + path, headers=headers, timeout=self.timeout) as answer,
                ):
                    status, body = answer.status, await answer.read()
                    if status < 500:
                        return status, body
            except (RateLimited, BulkheadFull):
                self.refused += 1
                return 503, b""
            except TimeoutError:
                self.timeouts, status = self.timeouts + 1, 504
            except ClientError:
                status = 502
        return status, b""


class Service:
    """A process's state: its places, its connections, and the services that it calls. `figures` are its counters."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name, self.environment = name, environment
        self.enforce = environment.get("ENFORCE") == "1"
        self.places = Places(PLACES[name], waits=name != "gateway")
        self.connections = Places(CONNECTIONS.get(name, 1))
        self.upstreams: list[Upstream] = []
        self.passed = 0  # requests of partners that went past the limits
        self.pool: Any = None
        self.redis: Any = None
        self.caps: Mapping[str, Any] = {}
        self.writes: AbstractAsyncContextManager[Any] = nullcontext()
        if self.enforce and name == "order":
            self.protect()

    def protect(self) -> None:
        """Layers 2 and 3: caps on calls, and a bulkhead in front of the database."""
        from limitkeeper.concurrency import Bulkhead, Dependencies
        from limitkeeper.policy import Policy

        self.caps = Dependencies.of_policy(Policy.load(POLICY), "memory://")
        self.writes = Bulkhead(WRITES, WAITING_WRITES, "500ms", name="order writes")

    def upstream(self, name: str, timeout: float = CALL_TIMEOUT, attempts: int = 2) -> Upstream:
        cap = self.caps[name] if self.caps else None
        self.upstreams.append(Upstream(name, self.environment[f"{name.upper()}_URL"], timeout, attempts, cap))
        return self.upstreams[-1]

    async def open(self, app: web.Application) -> None:
        """Opens the pool and the cache; the process ends with its parent."""
        self.watch = asyncio.create_task(end_with(os.getppid()))
        if self.name in CONNECTIONS:
            import asyncpg

            size = self.connections.size
            self.pool = await asyncpg.create_pool(self.environment["DATABASE_URL"], min_size=size, max_size=size)
        if self.name in CACHING:
            from redis.asyncio import Redis

            self.redis = Redis.from_url(self.environment["REDIS_URL"])

    async def figures(self, request: web.Request) -> web.Response:
        found: dict[str, Any] = {"places": {self.name: self.places.figures()}, "passed": self.passed}
        if self.pool is not None:
            found["places"][f"{self.name}'s connections"] = self.connections.figures()
        counters = ("calls", "attempts", "timeouts", "refused")
        found["calls"] = {f"{self.name} → {up.name}": {key: getattr(up, key) for key in counters} for up in self.upstreams}
        return web.json_response(found)

    async def cached(self, key: str, query: str) -> bytes:
        """A value of the cache, or of the database."""
        found: bytes | None = await self.redis.get(key)
        if found is None:
            async with self.connections, self.pool.acquire() as connection:
                found = str(await connection.fetchval(query)).encode()
            await self.redis.set(key, found, ex=CACHED)
        return found

    @web.middleware
    async def bounded(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        """Every request needs a place; figures do not."""
        if request.path == "/figures":
            return await handler(request)
        async with self.places:
            answer = await handler(request)
            self.places.failed += answer.status >= 500
            return answer


async def end_with(parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(1)
    os._exit(1)


# The services -------------------------------------------------------------------------------------------------------


def gateway(service: Service) -> Any:
    """Calls the decision service about a request, and forwards it."""
    order, catalog = service.upstream("order", GATEWAY_TIMEOUT), service.upstream("catalog", GATEWAY_TIMEOUT)
    limits = service.upstream("limits", timeout=5, attempts=1) if service.enforce else None

    async def handle(request: web.Request) -> web.Response:
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        if limits is not None:
            asked = {**headers, "X-Forwarded-Method": request.method, "X-Forwarded-Uri": request.path}
            status, body = await limits.call("GET", "/auth", asked)
            if status != 200:
                return web.Response(status=status, body=body)
        service.passed += "X-Api-Key" in headers
        upstream = order if request.path == "/checkout" else catalog
        status, body = await upstream.call(request.method, request.path, headers)
        return web.Response(status=status, body=body)

    return handle


def catalog(service: Service) -> Any:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=await service.cached("products", "SELECT json_agg(products) FROM products"))

    return handle


def pricing(service: Service) -> Any:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=await service.cached("price", f"SELECT cents FROM products WHERE id = {SALE}"))

    return handle


def inventory(service: Service) -> Any:
    """Takes one unit of the product on sale."""
    update = "UPDATE products SET available = available - 1 WHERE id = $1 AND available > 0 RETURNING available"

    async def handle(request: web.Request) -> web.Response:
        async with service.connections, service.pool.acquire() as connection:
            left = await connection.fetchval(update, SALE)
        return web.Response(status=409 if left is None else 200)

    return handle


def payment(service: Service) -> Any:
    """Replaces a provider that answers after 150 ms (median; p95 330 ms)."""
    rng = Random(1)

    async def handle(request: web.Request) -> web.Response:
        await asyncio.sleep(0.15 * rng.lognormvariate(0, 0.48))
        return web.Response()

    return handle


def order(service: Service) -> Any:
    """A checkout: a price, a unit of stock, and an order that is paid."""
    price, stock, pay = (service.upstream(name) for name in ("pricing", "inventory", "payment"))
    insert = "INSERT INTO orders (request, cents) VALUES ($1, $2) RETURNING id"

    async def write(request_id: str, cents: int) -> None:
        async with service.writes, service.connections, service.pool.acquire() as connection, connection.transaction():
            number = await connection.fetchval(insert, request_id, cents)
            status, _ = await pay.call("POST", "/payments", {})
            await connection.execute("UPDATE orders SET paid = $1 WHERE id = $2", status == 200, number)

    async def handle(request: web.Request) -> web.Response:
        status, cents = await price.call("GET", "/price", {})
        if status == 200:
            status, _ = await stock.call("POST", "/reservations", {})
        if status != 200:
            return web.Response(status=status)
        try:
            await write(request.headers["X-Request-Id"], int(cents))
        except BulkheadFull:
            return web.Response(status=503)
        return web.Response()

    return handle


SERVICES = {one.__name__: one for one in (catalog, pricing, inventory, payment, order, gateway)}


async def application(name: str) -> web.Application:
    service = Service(name, dict(os.environ))
    app = web.Application(middlewares=[service.bounded])
    app.on_startup.append(service.open)
    app.router.add_get("/figures", service.figures)
    app.router.add_route("*", "/{path:.+}", SERVICES[name](service))
    return app


if __name__ == "__main__":  # SIGTERM ends it at once: no client waits for the queued requests
    listening = socket.socket(fileno=int(sys.argv[2]))
    web.run_app(application(sys.argv[1]), sock=listening, print=None, access_log=None, handle_signals=False)
