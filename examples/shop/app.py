"""A shop behind a policy, with limits in three layers: requests of clients (limitkeeper.yaml, added by one line,
`add_middleware`), calls of the shop to the services behind it, and concurrent writes to its database. Above some limits it serves
less instead of refusing (degrade.py).

uvicorn --factory shop.app:shop --app-dir examples        or: make shop
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from limitkeeper import RateLimited
from limitkeeper.concurrency import BulkheadFull
from limitkeeper.observe.prometheus import LimitkeeperCollector
from limitkeeper.policy.gate import Gate
from limitkeeper.stores import Store
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.degrade import is_reduced
from shop.degrade import Degradation
from shop.page import page
from shop.people import make_keys, plan_of, token_for
from shop.upstreams import Upstreams

POLICY = Path(__file__).resolve().parent / "limitkeeper.yaml"
GOODS = ("lamp", "chair", "kettle", "teapot", "blanket", "clock")


def shop(store: Store | None = None) -> FastAPI:
    """Creates the app. `store` replaces the policy's store in tests."""
    make_keys()
    degradation = Degradation()
    gate = Gate(POLICY, store=store, handlers=degradation.handlers)
    upstreams = Upstreams(gate.policy, gate.store)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        degradation.close()
        await upstreams.aclose()
        await gate.aclose()

    app = FastAPI(title="The shop", lifespan=lifespan)
    app.add_middleware(degradation)
    app.add_middleware(RateLimitMiddleware, policy=gate)  # added last: the outermost
    app.state.gate, app.state.upstreams = gate, upstreams
    add_services(app, upstreams)
    add_degrading(app)
    add_watching(app, gate)
    return app


def add_services(app: FastAPI, upstreams: Upstreams) -> None:
    """Adds the services of the shop; no handler contains a limit."""

    @app.exception_handler(httpx.HTTPError)
    async def failed(request: Request, error: Exception) -> PlainTextResponse:
        return PlainTextResponse("A service behind the shop failed.", 502)

    @app.exception_handler(RateLimited)
    @app.exception_handler(BulkheadFull)
    async def busy(request: Request, error: Exception) -> PlainTextResponse:
        """A service behind the shop has no room: the client may try again."""
        return PlainTextResponse("The shop is busy.", 503, headers={"Retry-After": "1"})

    @app.get("/products")
    async def products() -> dict[str, Any]:
        return {"products": [{"id": number, "name": name} for number, name in enumerate(GOODS, 1)]}

    @app.get("/products/{number}")
    async def product(number: int) -> dict[str, Any]:
        return {"id": number, "name": GOODS[(number - 1) % len(GOODS)]}

    @app.get("/search")
    async def search(q: str = "") -> dict[str, Any]:
        return {"found": [name for name in GOODS if q.lower() in name]}

    @app.post("/orders", status_code=201)
    async def order(product: int = 1) -> dict[str, Any]:
        await upstreams.ask("inventory", "POST", f"/reservations/{product}")
        price = await upstreams.ask("pricing", "GET", f"/prices/{product}")
        return {"order": await upstreams.save(product, price["cents"])}

    @app.post("/checkout")
    async def checkout(request: Request, product: int = 1) -> dict[str, Any]:
        price = await upstreams.ask("pricing", "GET", f"/prices/{product}")
        evaluation = request.scope["limitkeeper"]  # the decisions about this request
        return {
            "checkout": "done",
            "cents": price["cents"],
            "more_at_once": evaluation.decision.remaining if evaluation.decision else None,
        }

    @app.post("/payments")
    async def payment() -> dict[str, str]:
        return {"payment": "taken"}

    @app.post("/login")
    async def login(name: str) -> PlainTextResponse:
        """Issues a token for any name, for demonstration only."""
        return PlainTextResponse(token_for(name), headers={"X-Plan": plan_of(name)})

    @app.post("/otp", status_code=202)
    @app.post("/password-reset", status_code=202)
    async def sent() -> dict[str, str]:
        return {"sent": "to the registered address"}


def add_degrading(app: FastAPI) -> None:
    """Adds the services that serve less above their limits; the policy selects them by `degrade NAME`."""
    numbers = count(1)

    @app.get("/recommendations")
    async def recommendations() -> dict[str, Any]:
        """Expensive to compute; above its limit a client gets its last ones again."""
        return {"for_you": GOODS[:3], "computed": next(numbers)}

    @app.post("/invoices", status_code=201)
    async def invoice() -> dict[str, Any]:
        """An invoice is not urgent; above its limit it is made later."""
        return {"invoice": next(numbers)}

    @app.get("/reviews")
    async def reviews(request: Request) -> dict[str, Any]:
        """Above its limit a client gets the names only, which cost no query of the reviews."""
        return {name: "…" if is_reduced(request) else f"A fine {name}, I would buy it again." for name in GOODS[:3]}


def add_watching(app: FastAPI, gate: Gate) -> None:
    """Adds the pages for operators."""
    registry = CollectorRegistry()
    LimitkeeperCollector(gate, registry=registry)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"shop": "open"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/", response_class=HTMLResponse)
    async def home(request: Request) -> str:
        return page(gate, str(request.base_url).rstrip("/"))
