"""Requests that `concurrent` counts: until a streamed body has ended, also one of known length; not where no handler ran."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from io import BytesIO
from typing import Any
from wsgiref.util import FileWrapper

import pytest
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.template.response import SimpleTemplateResponse
from django.test import RequestFactory
from django.test.utils import override_settings
from django.urls import path
from django_asgi import Urls, configure
from fastapi import Depends, FastAPI
from flask import Flask, request, send_file
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette_client import TestClient

from limitkeeper import ConfigurationError, MemoryStore, RedisStore
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.testing import ManualClock
from limitkeeper.web import flask, starlette, wsgi
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.django import limit
from limitkeeper.web.django.middleware import arespond
from limitkeeper.web.fastapi import RateLimit, install
from limitkeeper.web.response_settlement import ClosingBody, Settlement
from stand_ins import WrappedStore

configure()

ONE = "limits: [{name: files, concurrent: 1}]"
WAITS = ONE.replace("}]", "}, {name: pace, limit: 1/s burst 1, on_refusal: wait up to 10s}]")


def plain_app(gate: Gate) -> Any:
    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Length", "9")])
        return FileWrapper(BytesIO(b"a" * 9), 3)

    return wsgi.RateLimitMiddleware(app, gate)


def flask_app(gate: Gate, early: bool = True) -> Any:
    app = Flask("files")
    flask.RateLimit(app, gate, early=early)
    app.get("/")(lambda: send_file(BytesIO(b"a" * 9), "text/plain"))
    return app


def late_flask_app(gate: Gate) -> Any:
    return flask_app(gate, early=False)


def django_app(gate: Gate) -> Any:
    return WSGIHandler()


@pytest.fixture(params=[plain_app, flask_app, late_flask_app, django_app])
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes an application of each framework, which sends a file of known length."""
    urls = Urls([path("", lambda request: FileResponse(BytesIO(b"a" * 9), content_type="text/plain"))])
    middleware = ["limitkeeper.web.django.RateLimitMiddleware"]

    def made(gate: Gate) -> Any:
        settings.enable()
        return request.param(gate)

    setting: dict[str, object] = {}
    settings = override_settings(LIMITKEEPER=setting, MIDDLEWARE=middleware, ROOT_URLCONF=urls)
    yield lambda gate: setting.update(POLICY=gate) or made(gate)
    settings.disable()


def call(app: Any, **more: object) -> tuple[int, Any]:
    """The status, and the body, which is not read."""
    statuses: list[int] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "SERVER_NAME": "shop", "SERVER_PORT": "80", "wsgi.url_scheme": "http"}
    environ |= {"REMOTE_ADDR": "192.0.2.1", "wsgi.input": BytesIO(), **more}
    body = app(environ, lambda status, headers, exc_info=None: statuses.append(int(status[:3])))
    return statuses[-1], body


def test_a_stream_of_known_length_counts_until_its_end(make):
    """A second request is refused while the file of the first is being sent; its end, or its close, makes room."""
    app = make(Gate(Policy.read(ONE), store=MemoryStore()))
    for _ in range(2):
        status, body = call(app)
        assert (status, call(app)[0]) == (200, 503)
        assert b"".join(body) == b"a" * 9
        body.close()
    status, body = call(app)
    body.close()
    assert (status, call(app)[0]) == (200, 200)


def test_a_client_that_disconnected_while_it_waited_holds_no_place(make):
    """The request of a disconnected client does not count as running, since its handler is not called."""
    clock = ManualClock()
    app = make(Gate(Policy.read(WAITS), store=MemoryStore(clock=clock)))
    call(app)[1].close()
    left, right = socket.socketpair()
    left.close()
    assert call(app, **{"gunicorn.socket": right})[0] == 499
    right.close()
    clock.advance(1)
    assert call(app)[0] == 200


@pytest.mark.parametrize("early", [True, False])
def test_a_stream_that_is_dropped_gives_its_place_back(early):
    """Where an after_request function of Flask raises, the body of the response is never sent: its request has ended."""
    gate = Gate(Policy.read(ONE), store=MemoryStore(clock=ManualClock()))
    app = flask_app(gate, early)

    @app.after_request
    def fails(response: Any) -> Any:
        if "fail" in request.args:
            raise ValueError("after")
        return response

    asked = [app.test_client().get(path, buffered=True).status_code for path in ("/?fail", "/", "/")]
    assert asked == [500, 200, 200]


def streamed(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse(iter([b"a"]))


def not_rendered(request: Any) -> SimpleTemplateResponse:
    return SimpleTemplateResponse("page.html")


def no_response(request: Any) -> None:
    """As a view that forgets to return one."""


class HangingStore(WrappedStore):
    """A remote store whose second decision is never answered: that on the size of a response."""

    asked: asyncio.Event

    async def adecide(self, *args: Any, **options: Any) -> Any:
        if "decide" in self.calls:
            self.asked.set()
            await asyncio.Event().wait()
        return self.decide(*args, **options)


def test_a_client_that_disconnects_while_its_size_is_charged_holds_no_place():
    """Django cancels the task: the response is not sent, and its request has ended."""
    store = HangingStore(MemoryStore())
    size = "{name: size, limit: fixed window 100/h, cost: {response: 1B}}"
    gate = Gate(Policy.read(f"limits: [{{name: running, concurrent: 1}}, {size}]\nbudget: 60s"), store=store)
    refused = []

    async def view(request: Any) -> HttpResponse:
        return HttpResponse(b"a" * 9)

    async def main() -> None:
        store.asked = asyncio.Event()
        task = asyncio.ensure_future(arespond(gate, view, RequestFactory().get("/")))
        await store.asked.wait()
        refused.append(not gate.ask(WrittenRequest("GET", "/")))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert refused == [True]
    assert gate.ask(WrittenRequest("GET", "/"))


def test_a_settlement_of_several_limits_that_is_cancelled_settles_all_of_them():
    """A client that disconnects while the first is settled (Starlette cancels its stream) keeps no place of the others."""
    gates = [Gate(Policy.read(ONE + "\nbudget: 60s"), store=WrappedStore(MemoryStore())) for _ in range(3)]

    async def main() -> None:
        settlement = Settlement([await gate.aask(WrittenRequest("GET", "/")) for gate in gates])
        task = asyncio.ensure_future(settlement.asettle())
        for _ in gates:
            await asyncio.sleep(0)
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert [(await gate.aask(WrittenRequest("GET", "/"))).allowed for gate in gates] == [True] * 3

    asyncio.run(main())


@pytest.mark.parametrize("view", [streamed, not_rendered, no_response])
def test_a_view_whose_response_is_never_sent_gives_its_place_back(view, eventually):
    """Django drops the response of a view in a thread whose client has disconnected, without closing it (ASGI); a view that
    returns none has failed."""
    options: Any = {"concurrent": {"max": 1, "hold": "1h"}, "name": "running"}
    with override_settings(LIMITKEEPER={"STORE": MemoryStore()}):
        with suppress(ConfigurationError):
            limit("100/s", **options)(view)(RequestFactory().get("/"))
        gc.collect()  # a response of Django refers to its body, and that to the response
        again = limit("100/s", **options)(streamed)
        eventually(lambda: again(RequestFactory().get("/")).status_code == 200)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No reference cycle is garbage for the length of a test."""
    gc.disable()
    yield
    gc.enable()


async def streamed_async(request: Any) -> StreamingHttpResponse:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"

    return StreamingHttpResponse(chunks())


@pytest.mark.parametrize("view", [streamed, streamed_async])
def test_a_stream_that_a_server_cannot_send_gives_its_place_back(view, eventually, uncollected):
    """Where `send` of an ASGI server raises, since the client has disconnected, Django closes no response."""
    gate = Gate(Policy.read("limits: [{name: running, concurrent: {max: 1, hold: 1h}}]"), store=MemoryStore())
    middleware = ["limitkeeper.web.django.RateLimitMiddleware"]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "client": ("192.0.2.1", 1)}

    async def main() -> None:
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": b"", "more_body": False})

        async def send(message: dict[str, Any]) -> None:
            raise OSError("the client has disconnected")

        with pytest.raises(OSError, match="disconnected"):
            await ASGIHandler()(scope, received.get, send)

    with override_settings(LIMITKEEPER={"POLICY": gate}, MIDDLEWARE=middleware, ROOT_URLCONF=Urls([path("", view)])):
        asyncio.run(main())
        eventually(lambda: gate.ask(WrittenRequest("GET", "/")).allowed)


class LockedSettlement(Settlement):
    """A settlement that needs a lock."""

    lock = threading.Lock()

    def settle(self, failed: bool = False) -> None:
        with self.lock:
            self.settled = True


def test_a_body_that_is_collected_waits_for_no_lock(eventually):
    """The thread that drops it may hold any lock: another one settles it."""
    settlement = LockedSettlement([])
    with settlement.lock:
        ClosingBody(iter([]), settlement)
    eventually(lambda: settlement.settled)


def test_a_response_that_a_decorator_replaces_gives_its_place_back(eventually):
    """A Starlette endpoint whose response is not sent, since code above its limit makes another one, no longer runs."""

    @starlette.limit("1000/s", concurrent={"max": 1, "hold": "1h"}, store=MemoryStore())
    async def endpoint(request: Any) -> Any:
        return PlainTextResponse("done")

    async def replaced(request: Any) -> Any:
        response = await endpoint(request)
        return PlainTextResponse(response.body.upper()) if response.status_code == 200 else response

    http = TestClient(Starlette(routes=[Route("/", replaced)]))
    assert http.get("/").text == "DONE"
    eventually(lambda: http.get("/").status_code == 200)


def test_an_endpoint_without_a_response_gives_its_place_back():
    """In Starlette, where a limit is around it: the server answers 500, and the request has ended."""
    store = MemoryStore()

    @starlette.limit("100/s", concurrent=1, name="running", store=store)
    async def endpoint(request: Any) -> Any:
        return None if "none" in request.query_params else PlainTextResponse("ok")

    client = TestClient(Starlette(routes=[Route("/", endpoint)]), raise_server_exceptions=False)
    assert [client.get(path).status_code for path in ("/?none", "/", "/")] == [500, 200, 200]


def behind_a_policy(gate: Gate, endpoint: Any) -> Any:
    app = Starlette(routes=[Route("/", endpoint)])
    app.add_middleware(RateLimitMiddleware, policy=gate)
    return app


def behind_a_policy_in_a_task(gate: Gate, endpoint: Any) -> Any:
    app = behind_a_policy(gate, endpoint)
    app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
    return app


def behind_a_dependency(gate: Gate, endpoint: Any) -> Any:
    app = FastAPI()
    install(app)
    app.get("/", dependencies=[Depends(RateLimit(policy=gate, rule="files"))])(endpoint)
    return app


@pytest.mark.parametrize("build", [behind_a_policy, behind_a_policy_in_a_task, behind_a_dependency])
def test_a_request_that_is_cancelled_because_its_server_stops_gives_its_place_back(build, valkey):
    """As uvicorn ends after its graceful time-out: it cancels requests, awaits the lifespan, and its loop cancels the rest."""
    policy = Policy.of(name=f"stopped {build.__name__}", budget="60s", limits=[{"name": "files", "concurrent": 1}])

    async def serve() -> None:
        gate, came = Gate(policy, store=RedisStore(valkey.url)), asyncio.Event()
        lifespan: asyncio.Queue[Any] = asyncio.Queue()
        answers: asyncio.Queue[Any] = asyncio.Queue()

        async def endpoint(request: Any = None) -> None:
            came.set()
            await asyncio.sleep(600)

        async def receive() -> Any:
            await asyncio.sleep(600)

        app = build(gate, endpoint)
        server = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, lifespan.get, answers.put))
        lifespan.put_nowait({"type": "lifespan.startup"})
        assert (await answers.get())["type"] == "lifespan.startup.complete"
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "client": ("192.0.2.1", 1)}
        running = asyncio.create_task(app(scope, receive, answers.put))
        await asyncio.wait({running, asyncio.ensure_future(came.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert came.is_set(), running.exception()
        running.cancel()
        lifespan.put_nowait({"type": "lifespan.shutdown"})
        assert (await answers.get())["type"] == "lifespan.shutdown.complete"
        await server

    asyncio.run(serve())
    with RedisStore(valkey.url) as store:
        assert Gate(policy, store=store).ask(WrittenRequest("GET", "/")).allowed
