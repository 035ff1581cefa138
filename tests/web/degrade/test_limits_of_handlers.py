"""Degrade handlers of limits within an application: of views, of routes, and of a policy that Flask evaluates late."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from io import BytesIO
from typing import Annotated, Any

import httpx
import pytest
import werkzeug.test
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpResponse
from django_asgi import configure
from fastapi import Body, Depends, FastAPI
from fastapi import Request as FastApiRequest
from flask import Flask
from flask import request as flask_request
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette_client import TestClient
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from wsgi_apps import environ_of

from limitkeeper import MemoryStore
from limitkeeper.concurrency import Shaper
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web import flask, starlette
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.degrade import DeferredRequests, StaleCache, is_reduced
from limitkeeper.web.degrade.django_handlers import record
from limitkeeper.web.degrade.flask_handlers import flask_cached, flask_deferred, flask_reduced
from limitkeeper.web.django.middleware import DjangoRequestContext
from limitkeeper.web.fastapi import RateLimit, install
from limitkeeper.web.response_settlement import DEGRADED
from limitkeeper.web.wsgi import RateLimitMiddleware as WsgiMiddleware

ONE = "fixed window 1/h align first"
POLICY = Policy.of(limits=[{"name": "orders", "match": "POST /", "limit": ONE, "on_refusal": "degrade later"}])


def made(request: Any, body: str) -> str:
    return f"{'less' if is_reduced(request) else 'all'} of {body}"


def flask_app(deferred: DeferredRequests | None, *, of_view: bool, reads: bool = True) -> Any:
    app = Flask("orders")
    handlers = {"later": flask_reduced(app) if deferred is None else flask_deferred(deferred, app)}
    limits = flask.RateLimit(app, None if of_view else POLICY, store=MemoryStore(), handlers=handlers, early=False)

    def view() -> str:
        return made(flask_request, flask_request.get_data(as_text=True))

    def read() -> None:
        if reads:
            flask_request.get_data()

    app.before_request(read)
    app.add_url_rule("/", view_func=limits.limit(ONE, on_refusal="degrade later")(view) if of_view else view, methods=["POST"])
    return app


def itself(deferred: DeferredRequests | None, apps: list[Any]) -> Gate:
    """The gate of a policy whose rule degrades to the application that has the limit."""

    async def again(scope: Any, receive: Any, send: Any) -> None:
        await apps[0](scope, receive, send)

    return Gate(POLICY, store=MemoryStore(), handlers={"later": again if deferred is None else deferred.asgi_handler(again)})


def starlette_app(deferred: DeferredRequests | None) -> Any:
    apps: list[Any] = []

    @starlette.limit(policy=itself(deferred, apps), rule="orders")
    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse(made(request, (await request.body()).decode()))

    apps.append(Starlette(routes=[Route("/", view, methods=["POST"])]))
    return apps[0] if deferred is None else deferred.asgi(apps[0])


def fastapi_app(deferred: DeferredRequests | None, keyed: bool = False) -> Any:
    apps: list[Any] = []
    orders = RateLimit(policy=itself(deferred, apps), rule="orders")
    app = FastAPI()
    install(app)

    async def checked(request: FastApiRequest) -> None:
        await orders.check(request, key="ann")

    @app.post("/", dependencies=[Depends(checked if keyed else orders)], response_class=PlainTextResponse)
    async def view(request: FastApiRequest, item: Annotated[str, Body(media_type="text/plain")]) -> str:
        return made(request, item)

    apps.append(app)
    return app if deferred is None else deferred.asgi(app)


APPS: dict[str, Any] = {
    "flask view": functools.partial(flask_app, of_view=True),
    "flask policy": functools.partial(flask_app, of_view=False),
    "starlette": starlette_app,
    "fastapi": fastapi_app,
    "fastapi, keyed": functools.partial(fastapi_app, keyed=True),
}


@pytest.fixture
def deferred() -> Iterator[DeferredRequests]:
    found = DeferredRequests(Shaper("1000/s", capacity=9))
    yield found
    found.shaper.shutdown()


class ThreadedFlask(httpx.AsyncBaseTransport):
    """A Flask application for an async client."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        client = self.app.test_client()
        answer = await asyncio.to_thread(client.open, request.url.raw_path.decode(), method=request.method, data=content)
        return httpx.Response(answer.status_code, headers=list(answer.headers), content=answer.data)


def exchange(app: Any, *bodies: str) -> list[tuple[int, str]]:
    """The responses to these requests, those of tickets when they are ready."""
    transport = ThreadedFlask(app) if isinstance(app, Flask) else httpx.ASGITransport(app)

    async def ask(client: httpx.AsyncClient, body: str) -> tuple[int, str]:
        answer = await client.post("/", content=body, headers={"Content-Type": "text/plain"})
        target = answer.headers.get("Location", "")
        while answer.status_code == 202:
            await asyncio.sleep(0.001)
            answer = await client.get(target)
        return answer.status_code, answer.text

    async def main() -> list[tuple[int, str]]:
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [await asyncio.wait_for(ask(client, body), 10) for body in bodies]

    return asyncio.run(main())


@pytest.mark.parametrize("name", APPS)
def test_the_application_answers_with_less(name):
    """A handler that runs the application again passes the limit that has refused the request, and has the body."""
    assert exchange(APPS[name](None), "a", "b", "c") == [(200, "all of a"), (200, "less of b"), (200, "less of c")]


@pytest.mark.parametrize("name", APPS)
def test_a_deferred_request_runs_once(name, deferred):
    """It passes the limit that has deferred it, and has its body, which other code has read before."""
    assert exchange(APPS[name](deferred), "a", "b") == [(200, "all of a"), (200, "all of b")]


def test_other_limits_hold_for_a_reduced_response():
    """The limits that were not asked before the handler are asked when it runs the application."""
    app = Flask("orders")
    limits = flask.RateLimit(app, store=MemoryStore(), handlers={"later": flask_reduced(app)})

    @app.post("/")
    @limits.limit(ONE, on_refusal="degrade later")
    @limits.limit("fixed window 3/h align first")
    def view() -> str:
        return made(flask_request, "a")

    assert [status for status, _ in exchange(app, *"abcd")] == [200, 200, 200, 429]


@pytest.mark.parametrize("reads", [True, False])
def test_a_chunked_body_that_was_read_is_not_deferred(reads, deferred):
    """In Flask its length is not known afterwards: its request is refused, and deferred where nothing has read it."""
    app = flask_app(deferred, of_view=True, reads=reads)
    chunked = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}

    def post() -> int:
        return app.test_client().post("/", input_stream=BytesIO(b"one"), environ_overrides=chunked).status_code  # type: ignore[no-any-return]

    assert [post(), post()] == [200, 429 if reads else 202]


@pytest.mark.parametrize("framework", ["starlette", "fastapi"])
def test_a_handler_of_a_route_gets_the_refusal_of_its_limit(framework):
    """Not the evaluation of the policy's middleware, which has admitted the request."""
    rule = {"name": "export", "match": "GET /none", "limit": ONE, "on_refusal": "degrade cached"}
    policy = Policy.of(limits=[{"name": "api", "limit": "fixed window 9/h"}, rule])
    gate = Gate(policy, store=MemoryStore(), handlers={"cached": StaleCache().asgi_handler})
    app: Any
    if framework == "starlette":
        limited = starlette.limit(policy=gate, rule="export")(lambda request: PlainTextResponse("rows"))
        app = Starlette(routes=[Route("/", limited)])
    else:
        app = FastAPI()
        install(app)
        app.get("/", dependencies=[Depends(RateLimit(policy=gate, rule="export"))])(lambda: "rows")
    http = TestClient(RateLimitMiddleware(app, gate))
    assert [http.get("/").status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("framework", ["starlette", "fastapi"])
def test_a_rule_of_the_policy_is_charged_once_when_a_handler_runs_the_application(framework):
    """A route that names the rule does not charge it: the policy's middleware has, before the route's own limit refused."""
    rules = [
        {"name": "api", "match": "GET /", "limit": "fixed window 9/h align first"},
        {"name": "export", "match": "GET /none", "limit": ONE, "on_refusal": "degrade less"},
    ]
    apps: list[Any] = []

    async def less(scope: Any, receive: Any, send: Any) -> None:
        await apps[0](scope, receive, send)

    gate = Gate(Policy.of(limits=rules), store=MemoryStore(), handlers={"less": less})
    limits = [{"policy": gate, "rule": name} for name in ("api", "export")]
    if framework == "starlette":
        outer, inner = [starlette.limit(**limit) for limit in limits]
        apps.append(Starlette(routes=[Route("/", outer(inner(lambda request: PlainTextResponse(made(request, "rows")))))]))
    else:
        app = FastAPI()
        install(app)

        @app.get("/", dependencies=[Depends(RateLimit(**limit)) for limit in limits])
        def rows(request: FastApiRequest) -> str:
            return made(request, "rows")

        apps.append(app)
    http = TestClient(RateLimitMiddleware(apps[0], gate))
    assert ["less" in http.get("/").text for _ in range(3)] == [False, True, True]
    assert gate.snapshot().rules[0].passed == 3


def test_a_reduced_response_of_a_view_is_not_recorded():
    """A client that the policy refuses later gets the full response from before."""
    cache, app = StaleCache(shared=True), Flask("search")
    app.wsgi_app = cache.wsgi(app.wsgi_app)  # type: ignore[method-assign]
    site = Policy.of(limits=[{"name": "site", "limit": "fixed window 2/h align first", "on_refusal": "degrade cached"}])
    handlers = {"cached": flask_cached(cache), "less": flask_reduced(app)}
    limits = flask.RateLimit(app, site, store=MemoryStore(), handlers=handlers)

    @app.get("/")
    @limits.limit(ONE, on_refusal="degrade less")
    def search() -> str:
        return made(flask_request, "rows")

    http = app.test_client()
    assert [http.get("/").text for _ in range(3)] == ["all of rows", "less of rows", "all of rows"]


def test_responses_are_recorded_where_flask_evaluates_the_policy_late():
    """The recorder runs before the policy, whose identities are in the key of a response."""
    cache, app = StaleCache(), Flask("search")
    app.wsgi_app = cache.wsgi(app.wsgi_app)  # type: ignore[method-assign]
    site = Policy.of(
        identify={"user": {"header": "X-User"}}, limits=[{"name": "site", "limit": ONE, "on_refusal": "degrade cached"}]
    )
    flask.RateLimit(app, site, store=MemoryStore(), handlers={"cached": flask_cached(cache)}, early=False)
    app.add_url_rule("/", view_func=lambda: "rows")
    http = app.test_client()
    assert [http.get("/", headers={"X-User": user}, buffered=True).status_code for user in ("ann", "ann", "bob")] == [
        200,
        200,
        429,
    ]


BY_SIZE = Policy.of(
    limits=[{"name": "bytes", "limit": "fixed window 9/h", "cost": {"response": "1B"}, "on_refusal": "degrade later"}]
)


@pytest.mark.parametrize("handler", ["cached", "deferred"])
def test_a_handler_of_a_response_that_is_too_large_gets_the_refusal(handler, deferred):
    """Not the evaluation of the view's own limit, which admitted the request before its response was known."""
    app, cache = Flask("site"), StaleCache()
    handlers = {"later": flask_cached(cache) if handler == "cached" else flask_deferred(deferred, app)}
    limits = flask.RateLimit(app, BY_SIZE, store=MemoryStore(), handlers=handlers)
    app.add_url_rule("/", view_func=limits.limit("9/h")(lambda: "x" * 6))
    assert [app.test_client().get("/").status_code for _ in range(2)] == [200, 429]


def test_a_cached_response_replaces_one_that_is_too_large():
    """Also where a middleware within has evaluated the request again."""
    cache = StaleCache()

    def site(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Length", "6")])
        return [b"x" * 6]

    inner = WsgiMiddleware(site, Policy.of(limits=[{"name": "inner", "limit": "9/h"}]), store=MemoryStore())
    app = WsgiMiddleware(cache.wsgi(inner), BY_SIZE, store=MemoryStore(), handlers={"later": cache.wsgi_handler})
    with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://shop") as client:
        assert [("Age" in client.get("/").headers) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("reduced", [False, True])
def test_in_django_a_reduced_response_of_a_limited_view_is_not_recorded(reduced):
    """The limit of the view has admitted the request, and the policy has refused it before."""
    configure()
    request, cache, gate = WSGIRequest(environ_of("GET", "/")), StaleCache(), Gate(Policy(), store=MemoryStore())
    request.limitkeeper = gate.ask(DjangoRequestContext(request))
    request.environ |= {DEGRADED: True} if reduced else {}
    record(cache, request, HttpResponse("prices"))
    assert (cache.stored_bytes == 0) == reduced


def test_a_rule_that_a_route_names_bounds_its_reduced_responses():
    """The middleware has charged it only for the request that all rules admitted."""
    limits = [
        {"name": "search", "limit": ONE, "on_refusal": "degrade less"},
        {"name": "all", "limit": "fixed window 3/h align first"},
    ]
    apps: list[Any] = []

    async def again(scope: Any, receive: Any, send: Any) -> None:
        await apps[0](scope, receive, send)

    gate = Gate(Policy.of(limits=limits), store=MemoryStore(), handlers={"less": again})

    @starlette.limit(policy=gate, rule="search")
    @starlette.limit(policy=gate, rule="all")
    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse(made(request, "a"))

    apps.append(Starlette(routes=[Route("/", view, methods=["POST"])]))
    answers = exchange(RateLimitMiddleware(apps[0], gate), *"abcd")
    assert [status for status, _ in answers] == [200, 200, 200, 429]
    assert [text for _, text in answers[:3]] == ["all of a", "less of a", "less of a"]


@pytest.mark.parametrize("framework", ["flask", "starlette"])
def test_a_limit_of_a_view_is_charged_once_when_the_response_is_too_large(framework):
    """Though the handler of the policy runs the application again."""
    if framework == "flask":
        site = Flask("site")
        limits = flask.RateLimit(site, BY_SIZE, store=MemoryStore(), handlers={"later": flask_reduced(site)})
        site.add_url_rule("/", view_func=limits.limit("2/h", name="own")(lambda: "x" * 6))
        client: Any = site.test_client()
    else:

        async def view(request: Request) -> PlainTextResponse:
            return PlainTextResponse("x" * 6)

        inner = Starlette(routes=[Route("/", starlette.limit("2/h", name="own")(view))])
        client = TestClient(RateLimitMiddleware(inner, BY_SIZE, store=MemoryStore(), handlers={"later": inner}))
    assert [client.get("/").status_code for _ in range(3)] == [200, 200, 429]


def mounted_asgi() -> Any:
    """An application with one route at `/a` and another at `/sub/a`, and the client of its limit by size."""

    async def other(request: Request) -> PlainTextResponse:
        return PlainTextResponse("other")

    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse("less" if is_reduced(request) else "x" * 6)

    inner = Starlette(routes=[Route("/a", other), Mount("/sub", routes=[Route("/a", view)])])
    return TestClient(RateLimitMiddleware(inner, BY_SIZE, store=MemoryStore(), handlers={"later": inner}))


def mounted_wsgi() -> Any:
    def view(request: werkzeug.Request) -> werkzeug.Response:
        return werkzeug.Response("less" if is_reduced(request) else "x" * 6)

    application = werkzeug.Request.application
    inner = DispatcherMiddleware(application(lambda request: werkzeug.Response("other")), {"/sub": application(view)})
    return werkzeug.test.Client(WsgiMiddleware(inner, BY_SIZE, store=MemoryStore(), handlers={"later": inner}))


@pytest.mark.parametrize("client", [mounted_asgi, mounted_wsgi])
def test_a_response_that_is_too_large_is_replaced_by_one_of_the_same_route(client):
    """A mount changes the scope or environ: the handler gets it as the middleware did."""
    asking = client()
    assert [asking.get("/sub/a").text for _ in range(2)] == ["xxxxxx", "less"]


@pytest.mark.parametrize("framework", ["starlette", "fastapi"])
def test_a_route_whose_response_is_too_large_runs_once_more(framework):
    """Its handler runs the application again, where the limit that refused the size is not evaluated again."""
    calls: list[bool] = []
    apps: list[Any] = []

    async def again(scope: Any, receive: Any, send: Any) -> None:
        await apps[0](scope, receive, send)

    gate = Gate(BY_SIZE, store=MemoryStore(), handlers={"later": again})

    async def view(request: FastApiRequest) -> PlainTextResponse:
        calls.append(is_reduced(request))
        return PlainTextResponse("x" * 6)

    if framework == "starlette":
        apps.append(Starlette(routes=[Route("/", starlette.limit(policy=gate, rule="bytes")(view))]))
    else:
        apps.append(FastAPI())
        apps[0].get("/", dependencies=[Depends(RateLimit(policy=gate, rule="bytes"))])(view)
        install(apps[0])
    client = TestClient(apps[0])
    assert [client.get("/").status_code for _ in range(2)] == [200, 200]
    assert calls == [False, False, True]


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("mounted", [False, True])
def test_a_route_below_a_mount_is_run_again_by_its_application(mounted, by_size):
    """The handler gets the scope as the application did, which finds the same route again; one that is `mounted` itself, too."""
    apps: list[Any] = []
    policy = BY_SIZE if by_size else Policy.of(limits=[{"name": "bytes", "limit": ONE, "on_refusal": "degrade later"}])
    gate = Gate(policy, store=MemoryStore(), handlers={"later": lambda *event: apps[0](*event)})

    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse("less" if is_reduced(request) else "x" * 6)

    async def other(request: Request) -> PlainTextResponse:
        return PlainTextResponse("other")

    routes = [Route("/a", starlette.limit(policy=gate, rule="bytes")(view))]
    mount = Mount("/sub", app=Starlette(routes=routes)) if mounted else Mount("/sub", routes=routes)
    app = Starlette(routes=[Route("/a", other), mount])
    apps.append(mount.app if mounted else app)
    client = TestClient(app)
    assert [client.get("/sub/a").text for _ in range(2)] == ["xxxxxx", "less"]
