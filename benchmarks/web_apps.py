"""The benchmarked apps: one handler that answers "ok", bare, behind limitkeeper, and behind a hand-written limiter."""

from __future__ import annotations

import time
from typing import Any

from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.wsgi import RateLimitMiddleware as WsgiMiddleware

#: Always allowed: the charge of a request is refilled before the next one; and used up after the first.
ALLOW, DENY = "token bucket 1000000/s burst 1000", "fixed window 1/h"
PATH = "/products/{number}"


def one_rule(limit: str = ALLOW, success: str = "always") -> Policy:
    """One rule for each address. `success` near: fields on a success only where less than a fifth is left."""
    return Policy.of(limits=[{"name": "api", "key": "ip", "limit": limit}], headers={"success": success})


def five_of(count: int, limit: str = ALLOW) -> Policy:
    """So many rules, of which five apply to the request: by address, by tenant, by user, by both, and one for all."""
    others = [
        {"name": f"other-{n}", "match": f"{method} /service-{n}/{rest}", "key": "ip", "limit": "100/min"}
        for n, (method, rest) in enumerate(shapes(count - 5))
    ]
    meant = [
        {"name": "address", "key": "ip", "limit": limit},
        {"name": "tenant", "match": "GET /products/**", "key": "tenant", "limit": limit},
        {"name": "user", "match": f"GET {PATH}", "key": "user | ip", "limit": limit},
        {"name": "both", "match": "GET,POST /products/*", "key": ["tenant", "user"], "limit": limit},
        {"name": "all", "match": PATH, "limit": limit},
    ]
    half = len(others) // 2
    return Policy.of(
        identify={"tenant": {"header": "X-Tenant"}, "user": {"header": "X-User"}},
        limits=[*others[:half], *meant, *others[half:]],
    )


def shapes(count: int) -> list[tuple[str, str]]:
    """Methods and the rests of paths, as they occur in policies."""
    kinds = (("GET", "items/{item}"), ("POST", "items"), ("GET,PUT", "**"), ("DELETE", "items/*/parts/{part}"))
    return [kinds[n % len(kinds)] for n in range(count)]


def one_of(count: int) -> Policy:
    """So many rules, of which one applies to the request."""
    rules = [
        {"name": f"other-{n}", "match": f"{method} /service-{n}/{rest}", "key": "ip", "limit": "100/min"}
        for n, (method, rest) in enumerate(shapes(count - 1))
    ]
    return Policy.of(limits=[*rules, {"name": "api", "match": f"GET {PATH}", "key": "ip", "limit": ALLOW}])


def by_host(count: int) -> Policy:
    """So many rules for the same path, each for a host of its own."""
    rules = [
        {"name": f"host-{n}", "match": {"path": PATH, "host": f"shop-{n}.test"}, "key": "ip", "limit": ALLOW}
        for n in range(count - 1)
    ]
    return Policy.of(limits=[*rules, {"name": "api", "match": {"path": PATH, "host": "shop.test"}, "key": "ip", "limit": ALLOW}])


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def product(request: Any) -> Any:
        return PlainTextResponse("ok")

    return Starlette(routes=[Route(PATH, product)])


def limitkeeper(policy: Policy) -> Any:
    return RateLimitMiddleware(starlette(), policy=Gate(policy))


class Through:
    """The minimum of a middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


class ByHand:
    """A token bucket in a dict by address, and the two X- fields: a minimal hand-written limiter."""

    def __init__(self, app: Any, rate: float = 1e6, burst: float = 1000.0) -> None:
        self.app, self.rate, self.burst = app, rate, burst
        self.buckets: dict[str, tuple[float, float]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        now = time.monotonic()
        who = scope["client"][0]
        tokens, then = self.buckets.get(who, (self.burst, now))
        tokens = min(self.burst, tokens + (now - then) * self.rate)
        if tokens < 1:
            await send({"type": "http.response.start", "status": 429, "headers": [(b"retry-after", b"1")]})
            await send({"type": "http.response.body", "body": b""})
            return
        self.buckets[who] = (tokens - 1, now)
        left = int(tokens - 1)

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (b"x-ratelimit-limit", b"%d" % self.burst),
                    (b"x-ratelimit-remaining", b"%d" % left),
                ]
            await send(message)

        await self.app(scope, receive, sending)


def plain_wsgi(environ: Any, start_response: Any) -> list[bytes]:
    """A WSGI app without a framework."""
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "2")])
    return [b"ok"]


def limitkeeper_wsgi(policy: Policy, app: Any = plain_wsgi) -> Any:
    return WsgiMiddleware(app, policy=Gate(policy))


def flask() -> Any:
    from flask import Flask

    app = Flask("bench")

    @app.get("/products/<number>")
    def product(number: str) -> str:
        return "ok"

    return app
