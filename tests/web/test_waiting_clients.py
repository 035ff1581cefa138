"""Clients that disconnect while their request waits leave the queue, and their handlers do not run; others are served whole."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
from asgi_apps import BUILDERS, AsgiApp
from asgi_loop import Exchange, scope_of
from fastapi import Body, Depends, FastAPI
from fastapi import Request as FastApiRequest
from servers_asgi import Hypercorn, Uvicorn, Wire
from servers_wsgi import Waitress
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from wsgi_apps import WsgiApp

from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy
from limitkeeper.web import asgi
from limitkeeper.web.asgi import MIN_READ_AHEAD, RateLimitMiddleware
from limitkeeper.web.fastapi import RateLimit
from limitkeeper.web.headers import AsgiRequestContext
from limitkeeper.web.starlette import limit
from limitkeeper.web.wsgi import has_disconnected
from stand_ins import HeldClock, WrappedStore, driven

WAITS = "budget: 50ms\nlimits: [{name: api, limit: token bucket 1/s burst 1, on_refusal: wait up to 10s per client 9}]"


@pytest.fixture
def gate(held: HeldClock) -> Gate:
    return Gate(Policy.read(WAITS), store=MemoryStore(clock=held))


def waiting(gate: Gate) -> int:
    return gate.snapshot().rules[0].waiting


def begin(wire: Wire, path: str, body: bytes = b"") -> socket.socket:
    """Sends a request on a connection of its own."""
    connection = socket.create_connection(("127.0.0.1", wire.port), 60)
    connection.sendall(b"POST %s HTTP/1.1\r\nHost: shop\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
    return connection


@pytest.fixture(
    params=[(name, server) for name in BUILDERS for server in (Uvicorn, Hypercorn)], ids=lambda one: f"{one[0]}-{one[1].__name__}"
)
def running(request: pytest.FixtureRequest, gate: Gate) -> Iterator[Any]:
    framework, server = request.param
    served = AsgiApp(framework, server).make(gate)
    yield served
    served.close()


@pytest.mark.parametrize("size", [0, 40 * MIN_READ_AHEAD])
def test_a_client_that_disconnects_leaves_the_queue(running, gate, held, eventually, size):
    """Its place is free at once, the requests behind it move up, and its handler is never called, whatever it has sent."""
    assert running.request("GET", "/first", [], b"", "").status == 200
    gone = begin(running, "/gone", b"x" * size)
    eventually(lambda: waiting(gate) == 1)
    behind = begin(running, "/behind")
    eventually(lambda: waiting(gate) == 2)
    gone.close()
    eventually(lambda: waiting(gate) == 1)
    held.advance(1)
    assert behind.recv(12) == b"HTTP/1.1 200"
    behind.close()
    held.advance(1)
    assert running.request("GET", "/last", [], b"", "").status == 200
    assert running.calls == ["GET /first", "POST /behind", "GET /last"]


@pytest.mark.parametrize("framework", list(BUILDERS))
@pytest.mark.parametrize("size", [0, 10, MIN_READ_AHEAD, 5 * MIN_READ_AHEAD])
@pytest.mark.parametrize("server", [Uvicorn, Hypercorn])
def test_the_body_of_a_request_that_waited_is_whole(framework, server, size, gate, held, eventually):
    """The bytes read while a request waited are the first that the application reads."""
    running = AsgiApp(framework, server).make(gate)
    try:
        assert running.request("GET", "/first", [], b"", "").status == 200
        connection = begin(running, "/body", b"x" * size)
        eventually(lambda: waiting(gate) == 1 and bool(held.sleeps))
        held.advance(1)
        reply = b""
        while b"}" not in reply and (data := connection.recv(65_536)):
            reply += data
        connection.close()
        assert b'"length":%d' % size in reply.replace(b" ", b"")
    finally:
        running.close()


def test_a_body_that_comes_in_parts_reaches_a_request_that_waited_through_a_middleware(gate, held):
    """The `receive` of Starlette's BaseHTTPMiddleware loses a message where it is cancelled: the application has it, whole."""

    async def pass_on(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    async def size(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    wrapped = [Middleware(BaseHTTPMiddleware, dispatch=pass_on), Middleware(RateLimitMiddleware, policy=gate)]
    app = Starlette(routes=[Route("/", size, methods=["POST"])], middleware=wrapped)
    parts: asyncio.Queue[Any] = asyncio.Queue()
    sent = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def main() -> None:
        gate.ask(AsgiRequestContext(scope_of("POST", "/", [], "192.0.2.1")))
        task = asyncio.ensure_future(app(scope_of("POST", "/", [], "192.0.2.1"), parts.get, send))
        parts.put_nowait({"type": "http.request", "body": b"one", "more_body": True})
        while not (waiting(gate) and held.sleeps):
            await asyncio.sleep(0.001)
        held.advance(1)
        while waiting(gate):
            await asyncio.sleep(0.001)
        parts.put_nowait({"type": "http.request", "body": b"two", "more_body": False})
        await asyncio.wait_for(task, 30)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert b"".join(sent) == b"6"


def test_a_request_that_waited_can_ask_whether_its_client_has_disconnected(gate, held):
    """Starlette's `is_disconnected` cancels a `receive` that does not return at once."""

    async def until_gone(request: Request) -> PlainTextResponse:
        while not await request.is_disconnected():
            await asyncio.sleep(0.001)
        return PlainTextResponse("gone")

    app = RateLimitMiddleware(Starlette(routes=[Route("/", until_gone, methods=["POST"])]), gate)

    async def main() -> None:
        gate.ask(AsgiRequestContext(scope_of("POST", "/", [], "192.0.2.1")))
        exchange = Exchange(b"x")
        task = asyncio.ensure_future(app(scope_of("POST", "/", [], "192.0.2.1"), exchange.receive, exchange.send))
        while not (waiting(gate) and held.sleeps):
            await asyncio.sleep(0.001)
        held.advance(1)
        while waiting(gate):
            await asyncio.sleep(0.001)
        exchange.over.set()
        await asyncio.wait_for(task, 30)

    asyncio.run(main())


async def exchange_with(app: Any, gate_waits: Callable[[], bool], gone: bool, clock: HeldClock, body: bytes) -> Exchange:
    """One request that waits: its client disconnects, or its start comes."""
    exchange = Exchange(body)
    scope = scope_of("POST", "/", [("content-length", str(len(body)))], "192.0.2.1")
    task = asyncio.ensure_future(app(scope, exchange.receive, exchange.send))
    while not gate_waits():
        await asyncio.sleep(0.001)
    if gone:
        exchange.over.set()
        while gate_waits():
            await asyncio.sleep(0.001)
    clock.advance(1)
    await task
    return exchange


def routed(kind: str, store: MemoryStore, calls: list[int]) -> Any:
    """An app whose route has the limit."""
    options: Any = {"store": store, "on_refusal": "wait up to 10s per client 9", "name": "api"}
    if kind == "starlette":

        @limit("token bucket 1/s burst 1", **options)
        async def endpoint(request: Request) -> PlainTextResponse:
            calls.append(len(await request.body()))
            return PlainTextResponse("done")

        return Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    app = FastAPI()

    @app.post("/", dependencies=[Depends(RateLimit("token bucket 1/s burst 1", **options))])
    async def handler(request: FastApiRequest) -> str:
        calls.append(len(await request.body()))
        return "done"

    return app


@pytest.mark.parametrize("kind", ["starlette", "fastapi"])
@pytest.mark.parametrize("gone", [True, False])
def test_a_route_that_waits_notices_that_its_client_disconnects(kind, gone, held):
    """The limit of one route does the same: no handler for a client that has disconnected, the whole body for one that stayed."""
    calls: list[int] = []
    store = MemoryStore(clock=held)
    app = routed(kind, store, calls)

    async def main() -> None:
        first = Exchange(b"x")
        await app(scope_of("POST", "/", [("content-length", "1")], "192.0.2.1"), first.receive, first.send)
        begun = len(held.sleeps)
        waits = lambda: len(held.sleeps) > begun and not left.is_set()  # noqa: E731
        left = asyncio.Event()

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            left.set()

        await exchange_with(watched, waits, gone, held, b"x" * 20_000)

    driven(main())
    assert calls == ([1] if gone else [1, 20_000])


def streaming(kind: str, store: MemoryStore) -> Any:
    """An app whose route has the limit, and a response without an end."""
    options: Any = {"store": store, "on_refusal": "wait up to 10s per client 9", "name": "api"}

    async def pieces() -> Any:
        while True:
            yield b"piece"
            await asyncio.sleep(0.001)

    async def endpoint(request: Request) -> StreamingResponse:
        return StreamingResponse(pieces())

    async def with_body(item: Annotated[int, Body()]) -> StreamingResponse:
        return StreamingResponse(pieces())

    if kind == "starlette":
        return Starlette(routes=[Route("/", limit("token bucket 1/s burst 1", **options)(endpoint), methods=["POST"])])
    app = FastAPI()
    app.post("/", dependencies=[Depends(RateLimit("token bucket 1/s burst 1", **options))])(with_body)
    return app


@pytest.mark.parametrize("kind", ["starlette", "fastapi"])
def test_a_stream_after_a_wait_ends_with_its_client(kind, held):
    """A server that reports the disconnection once (hypercorn) reports it to the response, not to a `receive` of the wait."""
    app = streaming(kind, MemoryStore(clock=held))
    scope = scope_of("POST", "/", [("content-length", "1"), ("content-type", "application/json")], "192.0.2.1")
    scope["asgi"]["spec_version"] = "2.1"  # hypercorn's: an older one, whose `send` does not raise

    async def main() -> None:
        for waits in (False, True):
            came: asyncio.Queue[Any] = asyncio.Queue()
            sent: asyncio.Queue[Any] = asyncio.Queue()
            came.put_nowait({"type": "http.request", "body": b"1", "more_body": False})
            begun = len(held.sleeps)
            task = asyncio.ensure_future(app(dict(scope), came.get, sent.put))
            while waits and len(held.sleeps) == begun:
                await asyncio.sleep(0.001)
            held.advance(1)
            while (await sent.get()).get("body") != b"piece":
                pass
            came.put_nowait({"type": "http.disconnect"})
            await asyncio.wait_for(task, 5)

    asyncio.run(main())


@pytest.mark.parametrize("gone", [True, False])
def test_a_wait_over_a_remote_store_is_noticed_too(gone, held):
    """A remote store has its budget first: nothing is read ahead of a request that does not wait."""
    gate = Gate(Policy.read(WAITS), store=WrappedStore(MemoryStore(clock=held)))
    calls: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(len((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async def main() -> None:
        limited = RateLimitMiddleware(app, policy=gate)
        first = Exchange(b"1")
        await limited(scope_of("POST", "/", [], "192.0.2.1"), first.receive, first.send)
        await exchange_with(limited, lambda: waiting(gate) == 1, gone, held, b"xx")

    driven(main())
    assert calls == ([1] if gone else [1, 2])
    assert waiting(gate) == 0


def test_a_cancelled_task_leaves_the_queue(gate, held):
    """A server that cancels the task of a request while it waits: the place is given back before the task ends."""

    async def main() -> None:
        app = RateLimitMiddleware(lambda *_: asyncio.sleep(0), policy=gate)
        scope = scope_of("GET", "/", [], "192.0.2.1")
        await gate.aask(AsgiRequestContext(scope))
        exchange = Exchange(b"")
        task = asyncio.ensure_future(app(scope, exchange.receive, exchange.send))
        while waiting(gate) == 0:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (task.cancelled(), waiting(gate), exchange.messages) == (True, 0, [])

    driven(main())


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("part", [b"", b"x" * 1000])
def test_what_is_read_of_waiting_requests_is_bounded(gate, held, requests, part, monkeypatch):
    """One request reads ahead at most MAX_READ_AHEAD, all together TOTAL_READ_AHEAD; at the end nothing is counted."""
    monkeypatch.setattr(asgi, "MAX_READ_AHEAD", 2 * MIN_READ_AHEAD)
    monkeypatch.setattr(asgi, "TOTAL_READ_AHEAD", 3 * MIN_READ_AHEAD)
    read = 0

    async def endless() -> dict[str, Any]:
        nonlocal read
        read += len(part) + asgi.MESSAGE_SIZE
        await asyncio.sleep(0)
        return {"type": "http.request", "body": part, "more_body": True}

    async def main() -> None:
        app = RateLimitMiddleware(lambda *_: asyncio.sleep(0), policy=gate)
        await gate.aask(AsgiRequestContext(scope_of("GET", "/", [], "192.0.2.1")))
        scopes = [scope_of("POST", "/", [], "192.0.2.1") for _ in range(requests)]
        tasks = [asyncio.ensure_future(app(scope, endless, Exchange(b"").send)) for scope in scopes]
        before, quiet = -1, 0
        while quiet < 100:
            quiet, before = quiet + 1 if read == before and waiting(gate) == requests else 0, read
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    driven(main())
    whole = min(2 * requests, requests + 3) * MIN_READ_AHEAD
    assert whole <= read <= whole + requests * (len(part) + asgi.MESSAGE_SIZE)
    assert asgi.read_bytes == 0


@pytest.mark.parametrize("reads", [True, False])
def test_what_was_read_of_a_request_counts_until_its_application_has_read_it(gate, held, reads, monkeypatch):
    """Or until the request ends: a handler that does not read the body leaves it in memory as long as it runs."""
    monkeypatch.setattr(asgi, "MAX_READ_AHEAD", 2 * MIN_READ_AHEAD)
    counted = []

    async def app(_: Any, receive: Any, send: Any) -> None:
        counted.append(asgi.read_bytes > MIN_READ_AHEAD / 2)
        for _ in range(200 if reads else 0):
            await receive()
        counted.append(asgi.read_bytes > 0)

    async def endless() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    async def main() -> None:
        limited = RateLimitMiddleware(app, policy=gate)
        await gate.aask(AsgiRequestContext(scope_of("GET", "/", [], "192.0.2.1")))
        task = asyncio.ensure_future(limited(scope_of("POST", "/", [], "192.0.2.1"), endless, Exchange(b"").send))
        for _ in range(1000):
            await asyncio.sleep(0)
        held.advance(1)
        await task
        await asyncio.sleep(0)

    driven(main())
    assert counted == [True, not reads]
    assert asgi.read_bytes == 0


@pytest.mark.parametrize("framework", ["plain", "flask", "flask-late", "django"])
def test_waiting_leaves_threads_to_other_requests(framework, held, eventually):
    """With the default of one waiting thread, a server of four threads answers others however many clients want to wait, and the
    handler of a client that disconnected while it waited is not called, where the server says that it did."""
    text = WAITS.replace("limits: [{", "limits: [{match: GET /slow/**, ")
    gate = Gate(Policy.read(text), store=MemoryStore(clock=held))
    running = WsgiApp(framework, Waitress).make(gate)
    connections = []
    try:
        assert running.request("GET", "/slow/first", [], b"", "").status == 200
        for number in range(8):
            connections.append(socket.create_connection(("127.0.0.1", running.port), 60))
            connections[-1].sendall(b"GET /slow/%d HTTP/1.1\r\nHost: shop\r\n\r\n" % number)
        eventually(lambda: gate.snapshot().rules[0].queue_full == 7)
        assert waiting(gate) == 1
        assert running.request("GET", "/quick", [], b"", "").status == 200
        held.advance(1)
        eventually(lambda: waiting(gate) == 0)
    finally:
        for connection in connections:
            connection.close()
        running.close()


@pytest.mark.parametrize(("closed", "received"), [(False, False), (True, True)])
def test_a_server_shows_whether_a_client_is_still_connected(closed, received):
    """gunicorn's socket is peeked at, without taking a byte, and keeps its timeout; waitress has a function; others have none."""
    left, right = socket.socketpair()
    right.settimeout(7)
    if closed:
        left.close()
    assert has_disconnected({"gunicorn.socket": right}) == received
    assert right.gettimeout() == 7
    if not closed:
        left.sendall(b"GET")
        assert not has_disconnected({"gunicorn.socket": right})
        assert right.recv(3) == b"GET"
        left.close()
    right.close()
    assert has_disconnected({"waitress.client_disconnected": lambda: closed}) == received
    assert not has_disconnected({})


@pytest.mark.parametrize("is_far", [False, True])
def test_a_task_that_is_cancelled_as_its_wait_ends_holds_no_place(is_far):
    """In whichever iteration of the loop a request is cancelled, it no longer counts as one of those that run at a time."""
    text = WAITS.replace("50ms", "10s").replace("}]", "}, {name: busy, concurrent: {max: 9, hold: 1h}}]")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async def cancelled_after(iterations: int) -> int:
        held = HeldClock()
        store = MemoryStore(clock=held)
        gate = Gate(Policy.read(text), store=WrappedStore(store) if is_far else store, clock=held)
        middleware = RateLimitMiddleware(app, gate)
        forever = asyncio.Event()

        async def receive() -> Any:
            await forever.wait()

        async def send(message: Any) -> None: ...

        await middleware(scope_of("GET", "/", [], "192.0.2.1"), receive, send)
        task = asyncio.ensure_future(middleware(scope_of("GET", "/", [], "192.0.2.1"), receive, send))
        while not held.sleeps:
            await asyncio.sleep(0)
        held.advance(1)
        for _ in range(iterations):
            await asyncio.sleep(0)
        task.cancel()
        while len(asyncio.all_tasks()) > 1:  # another task completes the settlement of a cancelled one
            await asyncio.sleep(0)
        found = Gate(gate.policy, store=store).explain(AsgiRequestContext(scope_of("GET", "/", [], "192.0.2.1")))
        return found[1].decision.remaining

    assert [driven(cancelled_after(iterations)) for iterations in range(40)] == [9] * 40
