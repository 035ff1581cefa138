"""Costs by response size: a size that is known before the first byte is sent is charged then, or its response is not sent."""

import asyncio
from typing import Any

import grpc
import pytest
from asgi_loop import Exchange, scope_of
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.test import RequestFactory
from django.test.utils import override_settings
from django_asgi import configure
from fastapi import Depends, FastAPI
from flask import Flask, send_file
from flask import Response as FlaskResponse
from grpc_shop import Client, Shop, refusal, rule, serving
from grpc_shop import gate as grpc_gate
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse as StarletteFile
from starlette.responses import Response
from starlette.routing import Route
from wsgi_apps import InProcess

from limitkeeper import FixedWindow, MemoryStore
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.policy.model import Cost
from limitkeeper.web import django as limited_django
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.fastapi import RateLimit, install
from limitkeeper.web.flask import RateLimit as FlaskRateLimit
from limitkeeper.web.starlette import limit
from limitkeeper.web.wsgi import RateLimitMiddleware as WsgiMiddleware
from stand_ins import driven

configure()
MANY = "limits: [{name: bytes, key: ip, limit: fixed window 100/day, cost: {response: 1kB}}]"
ROUTE: Any = {"limit": "fixed window 100/day", "name": "bytes", "cost": {"response": "1kB"}}
HUGE, LARGE = 100_000_000, 60_000


@pytest.fixture
def gate(store: MemoryStore) -> Gate:
    return Gate(Policy.read(MANY), store=store)


def used(store: MemoryStore, gate: Gate) -> int:
    """Kilobytes that are charged, under the key of a policy and of a route."""
    named = gate.compiled.rules[0].default_entries[0].named
    found = [store.decide_one(named, key, 0, 0, False) for key in ("192.0.2.1", "ip:192.0.2.1", "127.0.0.1", "ip:127.0.0.1")]
    return sum(one.limit - one.remaining for one in found)


# ASGI: `sizes` is how the response is written --------------------------------------------------------------------------


def announced(size: int) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        for _ in range(size // 1_000_000 or 1):
            await send({"type": "http.response.body", "body": b"x" * min(size, 1_000_000), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


def whole(size: int) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size})

    return app


def sent_by_server(size: int) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.pathsend", "path": "/x"})

    return app


async def answer(app: Any, method: str = "GET") -> tuple[int, int]:
    """Status, and the number of bytes of a body that were passed to the server."""
    exchange = Exchange(b"")
    await app(scope_of(method, "/", [], "192.0.2.1"), exchange.receive, exchange.send)
    size = sum(len(message.get("body", b"")) for message in exchange.messages)
    files = [message for message in exchange.messages if message["type"] == "http.response.pathsend"]
    return exchange.messages[0]["status"], size + HUGE * len(files)


def first_part(size: int) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
        await send({"type": "http.response.body"})

    return app


@pytest.mark.parametrize("write", [announced, whole, sent_by_server, first_part])
def test_a_response_that_cannot_be_afforded_is_not_sent(write, gate, store):
    """100 kB a day do not let 100 MB pass: none of it is sent, and the request keeps its estimate."""
    status, size = driven(answer(RateLimitMiddleware(write(HUGE), policy=gate)))
    assert (status, size < 1000) == (429, True)
    assert used(store, gate) == 1
    assert (gate.snapshot().requests, gate.snapshot().allowed, gate.snapshot().refused) == (1, 0, 1)


@pytest.mark.parametrize("write", [announced, whole])
def test_many_at_once_share_what_is_left(write, gate, store):
    """Sizes are charged before they are sent, so concurrent responses do not pass on the same allowance."""

    async def main() -> list[tuple[int, int]]:
        app = RateLimitMiddleware(write(LARGE), policy=gate)
        return await asyncio.gather(*[answer(app) for _ in range(5)])

    statuses = [status for status, _ in driven(main())]
    assert (statuses.count(200), statuses.count(429)) == (1, 4)
    assert used(store, gate) == 60 + 4


def test_the_retry_of_a_response_that_was_not_sent_is_true(store):
    """After exactly that time the same request is sent whole; before it, it is not. A response above the limit has no retry
    time."""
    text = MANY.replace("fixed window 100/day", "token bucket 10/s burst 100")
    for early in (True, False):
        gate = Gate(Policy.read(text.replace("bytes", f"bytes-{early}")), store=store)
        app = RateLimitMiddleware(announced(LARGE), policy=gate)
        assert driven(answer(app))[0] == 200
        heard: list[Any] = []
        gate.events.on("refused", heard.append)
        assert driven(answer(app))[0] == 429
        store.clock.advance((heard[0].decision.refusal.retry_us - early) / 1e6)
        assert driven(answer(app))[0] == (429 if early else 200)


def test_what_has_no_body_costs_no_size(gate, store):
    """HEAD, 204 and 304 announce a length that is not sent."""
    assert driven(answer(RateLimitMiddleware(announced(HUGE), policy=gate), "HEAD"))[0] == 200

    async def unchanged(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 304, "headers": [(b"content-length", b"%d" % HUGE)]})
        await send({"type": "http.response.body"})

    assert driven(answer(RateLimitMiddleware(unchanged, policy=gate)))[0] == 304
    assert used(store, gate) == 0


def test_a_client_that_stops_reading_pays_what_was_sent(gate, store):
    """A charge in advance for bytes that are not sent is refunded."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"50000")]})
        await send({"type": "http.response.body", "body": b"x" * 20_000, "more_body": True})
        raise OSError("the client has disconnected")

    with pytest.raises(OSError, match="disconnected"):
        driven(answer(RateLimitMiddleware(app, policy=gate)))
    assert used(store, gate) == 20


def starlette_route(store: MemoryStore, size: int, path: Any) -> Any:
    @limit(store=store, **ROUTE)
    async def endpoint(request: Request) -> Response:
        return Response(b"x" * size) if path is None else StarletteFile(path)

    return Starlette(routes=[Route("/", endpoint)])


def fastapi_route(store: MemoryStore, size: int, path: Any) -> Any:
    app = FastAPI(dependencies=[Depends(RateLimit(store=store, **ROUTE))])
    install(app)

    @app.get("/")
    async def handler() -> Response:
        return Response(b"x" * size) if path is None else StarletteFile(path)

    return app


def around(store: MemoryStore, size: int, path: Any) -> Any:
    policy = MANY.replace("}]", "}, {name: visits, key: ip, limit: fixed window 100/day}]")
    return RateLimitMiddleware(whole(size), policy=Gate(Policy.read(policy), store=store))


@pytest.mark.parametrize("build", [around, starlette_route, fastapi_route])
def test_the_fields_of_a_response_count_its_size(build, store):
    """`r` and X-RateLimit-Remaining are what is left for the next request, and that is what it finds."""
    app = build(store, 40_000, None)
    for left in (b"60", b"20"):
        exchange = Exchange(b"")
        driven(app(scope_of("GET", "/", [], "192.0.2.1"), exchange.receive, exchange.send))
        fields = dict(exchange.messages[0]["headers"])
        assert fields[b"x-ratelimit-remaining"] == left
        assert fields[b"ratelimit"].startswith(b'"bytes";r=%b;' % left)


@pytest.mark.parametrize("build", [starlette_route, fastapi_route])
@pytest.mark.parametrize("file", [False, True])
def test_the_limit_of_a_route_does_the_same(build, file, store, gate, tmp_path):
    """A body or a file, on a route with a limit of its own."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * LARGE)
    app = build(store, LARGE, path if file else None)
    assert [driven(answer(app))[0] for _ in range(2)] == [200, 429]
    assert used(store, gate) == 61


# WSGI -------------------------------------------------------------------------------------------------------------------


def wsgi_list(environ: Any, start_response: Any) -> Any:
    start_response("200 OK", [])
    return [b"x" * LARGE]


def wsgi_iterator(environ: Any, start_response: Any) -> Any:
    start_response("200 OK", [("Content-Length", str(LARGE))])
    return iter([b"x" * LARGE])


def wsgi_generator(environ: Any, start_response: Any) -> Any:
    start_response("200 OK", [("Content-Length", str(LARGE))])
    yield b"x" * (LARGE // 2)
    yield b"x" * (LARGE // 2)


def wsgi_write(environ: Any, start_response: Any) -> Any:
    write = start_response("200 OK", [("Content-Length", str(LARGE))])
    write(b"x" * (LARGE // 2))
    write(b"x" * (LARGE // 2))
    return []


@pytest.mark.parametrize("app", [wsgi_list, wsgi_iterator, wsgi_generator, wsgi_write])
def test_wsgi_applications(app, gate, store):
    """However an application gives its body, a second start of the response replaces the first before anything is sent."""
    running = InProcess(WsgiMiddleware(app, gate), [])
    answers = [running.request("GET", "/", [], b"", "192.0.2.1") for _ in range(2)]
    assert [one.status for one in answers] == [200, 429]
    assert (len(answers[0].body), answers[0].field("x-ratelimit-remaining")) == (LARGE, "40")
    assert b"RATE_LIMITED" in answers[1].body
    assert used(store, gate) == 61


@pytest.mark.parametrize("kind", ["early", "late", "view"])
def test_flask(kind, gate, store):
    """Around the application, as a before_request function, and on a view; error handlers answer the refusal."""
    app = Flask("shop")
    limits = FlaskRateLimit(app, store=store) if kind == "view" else FlaskRateLimit(app, policy=gate, early=kind == "early")
    view = limits.limit(**ROUTE) if kind == "view" else lambda view: view
    app.add_url_rule("/", "big", view(lambda: "x" * LARGE))
    app.register_error_handler(429, lambda error: (f"later, {error.evaluation.refusal.rule.name}", 429))
    http = app.test_client()
    answers = [http.get("/") for _ in range(2)]
    assert [(one.status_code, len(one.data)) for one in answers] == [(200, LARGE), (429, len("later, bytes"))]
    assert answers[0].headers["X-RateLimit-Remaining"] == "40"
    assert answers[1].headers["Retry-After"]
    assert used(store, gate) == 61


@pytest.mark.parametrize("kind", ["early", "late", "view"])
def test_a_stream_of_known_length_in_flask(kind, gate, store):
    """A stream that announces its length is charged, or refused, before it is sent."""
    app = Flask("shop")
    limits = FlaskRateLimit(app, store=store) if kind == "view" else FlaskRateLimit(app, policy=gate, early=kind == "early")
    view = limits.limit(**ROUTE) if kind == "view" else lambda view: view
    stream = lambda: FlaskResponse((b"x" * 1000 for _ in range(LARGE // 1000)), headers={"Content-Length": str(LARGE)})  # noqa: E731
    app.add_url_rule("/", "big", view(stream))
    http = app.test_client()
    answers = [http.get("/") for _ in range(2)]
    assert [one.status_code for one in answers] == [200, 429]
    assert len(answers[0].data) == LARGE
    assert used(store, gate) == 61


@pytest.mark.parametrize("kind", ["late", "view"])
def test_a_file_that_has_not_changed_costs_no_size_in_flask(kind, gate, store, tmp_path):
    """A 304 keeps the length of the file, which is not sent."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * LARGE)
    app = Flask("shop")
    limits = FlaskRateLimit(app, store=store) if kind == "view" else FlaskRateLimit(app, policy=gate, early=False)
    view = limits.limit(**ROUTE) if kind == "view" else lambda view: view
    app.add_url_rule("/", "file", view(lambda: send_file(path)))
    http = app.test_client()
    first = http.get("/")
    again = http.get("/", headers={"If-None-Match": first.headers["ETag"]})
    assert (first.status_code, again.status_code, used(store, gate)) == (200, 304, 60)


def test_a_response_that_one_limit_of_a_flask_view_refuses_costs_no_other_limit_its_size(store):
    """The estimates stay charged, since the view has run."""
    app = Flask("shop")
    small = Gate(Policy.read(MANY.replace("100/day", "50/day").replace("bytes", "site")), store=store)
    limits = FlaskRateLimit(app, policy=small, early=False)
    app.add_url_rule("/", "big", limits.limit(**ROUTE)(lambda: "x" * LARGE))
    assert app.test_client().get("/").status_code == 429
    assert used(store, small) == 1
    assert used(store, Gate(Policy.read(MANY), store=store)) == 1


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("make", ["body", "file", "stream"])
def test_django_views(asynchronous, make, gate, store, tmp_path):
    """A body or a file is charged before it is sent; a stream of unknown length at its end."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * LARGE)

    def view(request: Any) -> Any:
        if make == "file":
            return FileResponse(path.open("rb"))
        return HttpResponse(b"x" * LARGE) if make == "body" else StreamingHttpResponse(iter([b"x" * LARGE]))

    async def async_view(request: Any) -> Any:
        return view(request)

    limited = limited_django.limit(**ROUTE)(async_view if asynchronous else view)
    statuses, left = [], []
    with override_settings(LIMITKEEPER={"STORE": store}):
        for _ in range(2):
            response = limited(RequestFactory().get("/", REMOTE_ADDR="192.0.2.1"))
            response = asyncio.run(response) if asyncio.iscoroutine(response) else response
            statuses.append(response.status_code)
            left.append(response.headers["X-RateLimit-Remaining"])
            if response.streaming:
                b"".join(response)
            response.close()
    assert statuses == [200, 200 if make == "stream" else 429]
    assert left[0] == ("99" if make == "stream" else "40")


@pytest.mark.parametrize("kind", ["threads", "tasks", "mixed"])
def test_grpc_calls(kind, clock):
    """A response of one message is charged before it is sent, and is RESOURCE_EXHAUSTED where it can't be."""
    guarded = grpc_gate(rule(FixedWindow("10/h"), cost=Cost("response", per=1)), clock=clock)
    with serving(kind, Shop(), guarded) as place, grpc.insecure_channel(place) as channel:
        client = Client(channel)
        answer, call = client.method("Pay").with_call("1", timeout=60)
        assert (answer, dict(call.initial_metadata())["x-ratelimit-remaining"]) == ("paid 1", "4")
        error = refusal(lambda: client.pay("1"))
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many requests. Retry after 3600s.")
    assert guarded.explain(WrittenRequest("POST", "/"))[0].decision.remaining == 3


@pytest.mark.parametrize("kind", ["late", "view", "django"])
def test_a_refusal_by_size_that_is_not_degraded_has_a_retry_time(kind, store):
    """Where a degrade handler can't answer any more, the refusal has Retry-After, and caches do not store it."""
    route = {**ROUTE, "on_refusal": "degrade cheap"}
    handlers = {"cheap": lambda *_: "cheap"}
    if kind == "django":
        view = limited_django.limit(**route)(lambda request: HttpResponse(b"x" * LARGE))
        with override_settings(LIMITKEEPER={"STORE": store, "HANDLERS": handlers}):
            answers = [view(RequestFactory().get("/", REMOTE_ADDR="192.0.2.1")) for _ in range(2)]
    else:
        app = Flask("shop")
        gate = Gate(Policy.of(limits=[{**route, "key": "ip"}]), store=store, handlers=handlers)
        given: Any = {"store": store, "handlers": handlers} if kind == "view" else {"policy": gate, "early": False}
        limits = FlaskRateLimit(app, **given)
        app.add_url_rule("/", "big", (limits.limit(**route) if kind == "view" else lambda view: view)(lambda: "x" * LARGE))
        answers = [app.test_client().get("/") for _ in range(2)]
    assert [one.status_code for one in answers] == [200, 429]
    assert int(answers[1].headers["Retry-After"]) > 0
    assert answers[1].headers["Cache-Control"] == "no-store"
