"""DeferredRequests: 202 and a ticket for a refused request, which runs later; the same in every framework."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import weakref
from typing import Any

import httpx
import pytest
from app_under_test import until
from wsgi_apps import environ_of

from limitkeeper import MemoryStore
from limitkeeper.concurrency import Shaper
from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.testing import ManualClock
from limitkeeper.web.asgi import AsgiRequestContext
from limitkeeper.web.degrade import DeferredRequests, is_reduced
from limitkeeper.web.degrade.deferred_requests import TooLarge, call_asgi, call_wsgi

POLICY = "limits: [{name: orders, match: POST /orders, limit: fixed window 1/h align first, on_refusal: degrade later}]"
PATIENCE = 60


class App:
    """An application that echoes the body of a request, while `go` is set; one request per hour is not deferred."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock(0)
        self.go, self.bodies, self.reduced = threading.Event(), [], []
        self.go.set()
        self.policy = POLICY
        self.shaper = Shaper("1000/s", capacity=options.pop("capacity", 100), workers=2)
        self.deferred = DeferredRequests(self.shaper, clock=self.clock, **options)

    def gate(self, handler: Any) -> Gate:
        return Gate(Policy.read(self.policy), store=MemoryStore(clock=self.clock), handlers={"later": handler})

    def answer(self, content: bytes, request: Any = None) -> bytes:
        assert self.go.wait(PATIENCE)
        self.bodies.append(content)
        if request is not None:
            self.reduced.append(is_reduced(request))
        if content == b"fail":
            raise ValueError("as asked")
        return b"done " + content


def asgi(app: App) -> Any:
    from limitkeeper.web.asgi import RateLimitMiddleware

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        content = await asyncio.to_thread(app.answer, (await receive())["body"], scope)
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-order", b"7")]})
        await send({"type": "http.response.body", "body": content})

    return RateLimitMiddleware(app.deferred.asgi(inner), app.gate(app.deferred.asgi_handler(inner)))


def wsgi(app: App) -> Any:
    from limitkeeper.web.wsgi import RateLimitMiddleware

    def inner(environ: Any, start_response: Any) -> Any:
        content = app.answer(environ["wsgi.input"].read(), environ)
        start_response("201 Created", [("X-Order", "7")])
        yield content

    return RateLimitMiddleware(app.deferred.wsgi(inner), app.gate(app.deferred.wsgi_handler(inner)))


def flask(app: App) -> Any:
    from flask import Flask, request

    from limitkeeper.web.degrade.flask_handlers import flask_deferred
    from limitkeeper.web.flask import RateLimit

    made = Flask("deferred")
    made.add_url_rule(
        "/orders", "order", lambda: (app.answer(request.get_data(), request), 201, {"X-Order": "7"}), methods=["POST"]
    )
    RateLimit(made, app.gate(flask_deferred(app.deferred, made)))
    return made


def django(app: App) -> Any:
    import django_site
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpResponse
    from django.urls import re_path
    from django.views.decorators.csrf import csrf_exempt

    from limitkeeper.web.degrade.django_handlers import deferred_status, django_deferred

    @csrf_exempt
    def view(request: Any) -> HttpResponse:
        return HttpResponse(app.answer(request.body, request), status=201, headers={"X-Order": "7"})

    global status
    status = deferred_status(app.deferred)
    gate = app.gate(django_deferred(app.deferred))
    return django_site.handler(WSGIHandler, [re_path("^.*$", view)], {"POLICY": gate}, (django_site.OURS, f"{__name__}.status"))


status: Any = None
FRAMEWORKS = {"asgi": asgi, "wsgi": wsgi, "flask": flask, "django": django}


class Client:
    """Sends requests to an application in this process; an ASGI application runs in one event loop."""

    def __init__(self, framework: str, app: App, policy: str = POLICY) -> None:
        app.policy = policy
        self.app, self.made, self.is_asgi = app, FRAMEWORKS[framework](app), framework == "asgi"
        self.runner = asyncio.Runner()
        weakref.finalize(self, self.runner.close)
        self.address, self.headers = "127.0.0.1", {}

    def send(self, method: str, path: str, content: bytes = b"") -> httpx.Response:
        if not self.is_asgi:
            transport = httpx.WSGITransport(self.made, remote_addr=self.address)
            with httpx.Client(transport=transport, base_url="http://shop", headers=self.headers) as client:
                return client.request(method, path, content=content)

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.made, client=(self.address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://shop", headers=self.headers) as client:
                return await client.request(method, path, content=content)

        return self.runner.run(ask())

    def order(self, content: bytes) -> httpx.Response:
        return self.send("POST", "/orders", content)

    def wait(self, place: str) -> httpx.Response:
        """Polls until the request has ended, as a client does."""
        end = time.monotonic() + PATIENCE
        while (found := self.send("GET", place)).status_code == 202:
            assert time.monotonic() < end
            if self.is_asgi:
                self.runner.run(asyncio.sleep(0.01))
            time.sleep(0.01)
        return found


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_refused_request_is_accepted_and_runs_later(framework):
    """Its status path answers 202 until then, and afterwards with the response to the request."""
    app = App()
    client = Client(framework, app)
    assert client.order(b"a").status_code == 201
    app.go.clear()
    accepted = client.order(b"b")
    assert (accepted.status_code, accepted.json()["status"], accepted.headers["Cache-Control"]) == (202, "queued", "no-store")
    place = accepted.headers["Location"]
    pending = client.send("GET", place)
    assert (pending.status_code, pending.headers["Retry-After"]) == (202, "1")
    app.go.set()
    ended = client.wait(place)
    assert (ended.status_code, ended.text, ended.headers["X-Order"]) == (201, "done b", "7")
    head = client.send("HEAD", place)
    assert (head.status_code, head.content) == (201, b"")
    assert (app.bodies, app.reduced) == ([b"a", b"b"], [False, False])


def test_a_deferred_head_has_no_body():
    """A response to HEAD announces a body that it does not have; the response with its ticket announces none."""
    deferred = DeferredRequests(Shaper("1000/s", capacity=9, workers=1), make_ticket=lambda: "one")
    entry = deferred.reserve()
    assert entry is not None
    deferred.accept(entry, lambda: (200, [("Content-Length", "11"), ("ETag", '"7"')], b""), 0)
    until(lambda: deferred.find("/deferred/one")[0] == 200, "it did not run")
    assert deferred.find("/deferred/one") == (200, [("Content-Length", "0"), ("ETag", '"7"')], b"")


@pytest.mark.parametrize(
    ("framework", "status_path"), [*((one, "/deferred") for one in FRAMEWORKS), ("asgi", "/my shop/deferred")]
)
def test_a_mounted_application_has_its_status_path_below_the_mount_point(framework, status_path):
    """A client that follows Location finds its response, also where the status path names the mount point (in ASGI, where the
    path has it)."""
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    client = Client(framework, App(status_path=status_path), POLICY.replace("POST /orders", "POST /*/orders"))
    mounted, mount = client.made, "/my shop"
    client.made = Starlette(routes=[Mount(mount, mounted)]) if client.is_asgi else DispatcherMiddleware(mounted, {mount: mounted})
    client.send("POST", "/my%20shop/orders", b"a")
    place = client.send("POST", "/my%20shop/orders", b"b").headers["Location"]
    assert place.startswith("/my%20shop/deferred/")
    assert client.wait(place).text == "done b"


def test_a_full_queue_and_a_large_request_are_refused(framework):
    """With Retry-After, as without the handler."""
    app = App(capacity=1, max_body=5)
    client = Client(framework, app)
    client.order(b"a")
    app.go.clear()
    large = client.order(b"123456")
    found = [client.order(b"b") for _ in range(6)]
    app.go.set()
    refused = [one for one in (large, *found) if one.status_code == 429]
    assert large in refused
    assert len(refused) >= 2
    assert all(one.headers["Retry-After"] == "3600" for one in refused)


def test_a_request_that_fails_is_reported(framework):
    """As 500, without details."""
    app = App()
    client = Client(framework, app)
    client.order(b"a")
    ended = client.wait(client.order(b"fail").headers["Location"])
    assert (ended.status_code, "as asked" in ended.text) == (500, False)


def test_an_unknown_ticket_is_not_found(framework):
    """And other paths are the application's."""
    client = Client(framework, App())
    assert client.send("GET", "/deferred/guessed").status_code == 404


def test_head_gets_no_body(framework):
    """Neither with its ticket nor with the refusal: on a connection that is kept, the next response would begin with it."""
    policy = "limits: [{name: all, limit: fixed window 1/h align first, on_refusal: degrade later}]"
    client = Client(framework, App(), policy)
    client.order(b"a")
    found = [client.send("HEAD", path) for path in ("/orders", "/deferred/none")]
    assert [(one.status_code, one.content) for one in found] == [(202, b""), (429, b"")]


def test_requests_for_a_ticket_are_not_deferred(framework):
    """A rule that covers the status path refuses them: otherwise each would get a new ticket."""
    app = App(status_path="/orders")
    client = Client(framework, app, "limits: [{name: all, limit: fixed window 1/h align first, on_refusal: degrade later}]")
    client.order(b"a")
    place = client.order(b"b").headers["Location"]
    assert client.send("GET", place).status_code == 429


@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
def test_a_request_that_has_run_is_not_deferred(kind):
    """Its response is refused for its size after the application has run: it would run twice."""
    app = App()
    size = "{response: 1 kB, estimate: 1}"
    policy = f"limits: [{{name: bytes, limit: fixed window 3/h align first, cost: {size}, on_refusal: degrade later}}]"
    client = Client(kind, app, policy)
    client.made.app = large_response if kind == "asgi" else large_wsgi_response
    assert [(client.order(content).status_code, app.deferred._open) for content in (b"a", b"")] == [(429, {})] * 2


def large_wsgi_response(environ: Any, start_response: Any) -> Any:
    start_response("200 OK", [])
    return [b"x" * 5000]


async def large_response(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * 5000})


def test_requests_that_wait_are_bounded_in_bytes(framework):
    """Whatever the capacity of the shaper."""
    app = App(capacity=None, max_body=1000, max_bytes=9000)
    client = Client(framework, app)
    client.order(b"a")
    app.go.clear()
    found = [client.order(b"x" * 1000).status_code for _ in range(12)]
    app.go.set()
    assert found[0] == 202
    assert found[-4:] == [429] * 4
    wait_until(lambda: client.send("GET", "/deferred/none") and app.deferred._open_bytes == 0)


def environ_of_body(stream: Any, **more: Any) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "SERVER_NAME": "shop",
        "SERVER_PORT": "80",
        "wsgi.input": stream,
        **more,
    }


def test_a_wsgi_body_is_deferred_whole_or_not_at_all():
    """One without a length is read to its end, where the server marks that; one that ends early is refused."""
    app = App(max_body=10)
    made = wsgi(app)
    statuses: list[str] = []

    def send(content: bytes, **more: Any) -> str:
        made(environ_of_body(Trickle(content), **more), lambda status, headers: statuses.append(status))
        return statuses[-1][:3] if statuses else ""

    chunked = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
    list(made(environ_of_body(Trickle(b"")), lambda status, headers: None))
    assert send(b"chunked", **chunked) == "202"
    wait_until(lambda: len(app.bodies) == 2)
    assert send(b"whole", CONTENT_LENGTH="5") == "202"
    wait_until(lambda: len(app.bodies) == 3)
    assert app.bodies == [b"", b"chunked", b"whole"]
    assert send(b"x" * 11, **chunked) == "429"
    assert send(b"unmarked", HTTP_TRANSFER_ENCODING="chunked") == "429"
    assert send(b"cut", CONTENT_LENGTH="5") == "429"


class Trickle:
    """A stream of which each read returns one byte."""

    def __init__(self, content: bytes) -> None:
        self.left = list(content)

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            found, self.left = bytes(self.left), []
            return found
        return bytes([self.left.pop(0)]) if self.left and size else b""


def test_a_deferred_request_that_waits_is_handled_though_its_connection_is_closed():
    """Its client has been told 202 by then: gunicorn has closed the connection, and waitress reports a client that has gone."""
    from limitkeeper.web.wsgi import RateLimitMiddleware

    def inner(environ: Any, start_response: Any) -> Any:
        start_response("201 Created", [])
        return [b"done"]

    closed = socket.socket()
    closed.close()
    policy = Policy.read("limits: [{name: pace, limit: 50/s burst 1, on_refusal: wait up to 9s}]")
    for connection in ({"gunicorn.socket": closed}, {"waitress.client_disconnected": lambda: True}):
        app = RateLimitMiddleware(inner, policy)
        environ = {**environ_of("POST", "/"), **connection}
        assert [call_wsgi(app, environ, b"", 99)[0] for _ in range(3)] == [201, 201, 201]


def test_a_streamed_response_is_kept_whole():
    """Frameworks that watch for a disconnection find none before its end."""
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def order(request: Any) -> StreamingResponse:
        async def chunks() -> Any:
            for chunk in (b"a", b"b", b"c"):
                yield chunk
                await asyncio.sleep(0)

        return StreamingResponse(chunks())

    inner = Starlette(routes=[Route("/orders", order, methods=["POST"])])
    scope = {"type": "http", "method": "POST", "path": "/orders", "headers": [], "query_string": b"", "extensions": {}}
    assert asyncio.run(call_asgi(inner, scope, b"", 100))[::2] == (200, b"abc")


def test_a_response_without_end_is_cut_off():
    """When it has more than `max_body` bytes; the application gets the disconnection of its client."""
    told = []

    async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 10, "more_body": True})
        finally:
            told.append((await receive())["type"])

    def wsgi_app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        try:
            while True:
                yield b"x" * 10
        finally:
            told.append("closed")

    with pytest.raises(TooLarge):
        asyncio.run(call_asgi(asgi_app, {}, b"", 100))
    with pytest.raises(TooLarge):
        call_wsgi(wsgi_app, {}, b"", 100)
    assert told == ["http.disconnect", "closed"]


def test_one_client_has_a_quarter_of_the_places(framework):
    """Beyond that it is refused as without the handler, and others are accepted; the places are free when its requests end."""
    app = App(capacity=8)
    client = Client(framework, app)
    client.order(b"a")
    app.go.clear()
    found = [client.order(b"b") for _ in range(4)]
    assert [one.status_code for one in found] == [202, 202, 429, 429]
    client.address = "192.0.2.7"
    assert [client.order(b"c").status_code for _ in range(3)] == [202, 202, 429]
    app.go.set()
    for one in found[:2]:
        client.wait(one.headers["Location"])
    client.address = "127.0.0.1"
    wait_until(lambda: client.send("GET", "/deferred/none") and not app.deferred._clients)
    assert client.order(b"d").status_code == 202


def test_one_client_has_a_quarter_of_the_bytes(framework):
    """A few large requests of one client do not take the room of the others."""
    app = App(capacity=None, max_body=1000, max_bytes=20_000)
    client = Client(framework, app)
    client.order(b"a")
    app.go.clear()
    found = [client.order(b"x" * 1000).status_code for _ in range(5)]
    assert (found[0], found[-1]) == (202, 429)
    client.address = "192.0.2.7"
    assert client.order(b"x" * 1000).status_code == 202
    app.go.set()


def test_places_go_by_the_key_of_the_rule():
    """Two users of one address have a share each."""
    app = App(capacity=4)
    policy = POLICY.replace("match:", "key: user, match:") + "\nidentify: {user: {header: X-User}}"
    client = Client("asgi", app, policy)
    app.go.clear()
    for user, expected in (("ann", [202, 429]), ("bob", [202, 429])):
        client.headers = {"X-User": user}
        app.go.set()
        assert client.order(b"a").status_code == 201
        app.go.clear()
        assert [client.order(b"b").status_code for _ in range(2)] == expected
    app.go.set()


def test_bodies_that_are_being_read_count():
    """Slow clients hold no more memory than `max_bytes`; their places are free when they disconnect."""
    app = App(max_body=1000, max_bytes=9000)
    made = asgi(app)

    async def main() -> None:
        gone = asyncio.Event()
        statuses: list[int] = []

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        def slow(number: int) -> Any:
            lines = [(b"content-length", b"1000")]
            scope = {"type": "http", "method": "POST", "path": "/orders", "headers": lines, "query_string": b""}
            return made({**scope, "client": (f"192.0.2.{number}", 1)}, receive, send)

        scope = {"type": "http", "method": "POST", "path": "/orders", "headers": [], "client": None}
        assert made.gate.ask(AsgiRequestContext(scope)).allowed  # the next requests are refused
        reading = [asyncio.create_task(slow(number)) for number in range(20)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 0 < app.deferred._open_bytes <= 9000
        assert statuses.count(429) == 20 - len(app.deferred._clients) > 0
        gone.set()
        await asyncio.gather(*reading)
        assert (app.deferred._open_bytes, app.deferred._clients) == (0, {})

    asyncio.run(main())


def accept(deferred: DeferredRequests, content: bytes = b"") -> Any:
    entry = deferred.reserve()
    assert entry is not None
    return deferred.accept(entry, lambda: (200, [], content), 0)


def test_results_are_kept_for_a_time_and_within_a_size():
    """The oldest are dropped first."""
    app = App(keep="1min", max_body=1000, max_bytes=3000)
    tickets = []
    for _ in range(3):
        accepted = accept(app.deferred, b"x" * 1000)
        assert accepted is not None
        tickets.append(dict(accepted[1])["Location"])
        wait_until(lambda: app.deferred.find(tickets[-1])[0] != 202)
    assert [app.deferred.find(ticket)[0] for ticket in tickets] == [404, 404, 200]
    app.clock.advance(60)
    assert app.deferred.find(tickets[2])[0] == 200
    app.clock.advance(0.000001)
    assert app.deferred.find(tickets[2])[0] == 404


def test_a_response_that_is_too_large_is_not_kept():
    """The status under its ticket shows that."""
    app = App(max_body=10)
    place = dict(accept(app.deferred, b"x" * 11)[1])["Location"]
    wait_until(lambda: app.deferred.find(place)[0] != 202)
    code, _, content = app.deferred.find(place)
    assert (code, b"more than 10 bytes" in content) == (500, True)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_bad_options_are_named():
    """With the expected form."""
    for options, message in (({"status_path": "later/"}, "status_path"), ({"max_body": 0}, "max_body")):
        with pytest.raises(ConfigurationError, match=message):
            App(**options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_has_no_tickets():
    """They belong to its parent."""
    app = App()
    place = dict(accept(app.deferred)[1])["Location"]
    pid = os.fork()
    if pid == 0:
        os._exit(0 if app.deferred.find(place)[0] == 404 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
