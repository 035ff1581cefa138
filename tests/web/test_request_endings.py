"""However a request ends, in every framework: only an outcome that is known not to count is refunded.

The rule counts failed logins (401). So a 200 or a 500 of the application is refunded, a 401 is not; and neither is an unknown
outcome: a task that was cancelled, a server that stopped, a client that disconnected. A client can choose that ending for each
guess.
"""

import asyncio
import io
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from asgi_loop import scope_of
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest, HttpResponse
from django.test.utils import override_settings
from django.urls import re_path
from django.views.decorators.csrf import csrf_exempt
from django_asgi import configure
from django_site import OURS, handler
from fastapi import Depends, FastAPI
from flask import Flask
from flask import request as flask_request
from grpc_shop import SERVICE, Client
from litestar import Litestar, Request, Response, post
from litestar.middleware import DefineMiddleware
from quart import Quart
from quart import request as quart_request
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response as StarletteResponse
from starlette.routing import Route
from wsgi_apps import environ_of

from limitkeeper import FixedWindow, MemoryStore
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.model import Charge, Rule
from limitkeeper.web import django as limited_django
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.fastapi import RateLimit, install
from limitkeeper.web.flask import RateLimit as FlaskRateLimit
from limitkeeper.web.grpc import AsyncRateLimitInterceptor, RateLimitInterceptor
from limitkeeper.web.starlette import limit
from limitkeeper.web.wsgi import RateLimitMiddleware as WsgiMiddleware
from stand_ins import driven

LOGIN = "limits: [{name: login, key: ip, limit: fixed window 5/min, charge: {status: [401]}}]"
ROUTE: Any = {"limit": "fixed window 5/min", "name": "login", "charge": {"status": [401]}}
configure()
logging.getLogger("quart.app").disabled = True


@pytest.fixture
def gate(store: MemoryStore) -> Gate:
    """A gate whose first rule has the state of every limit here: routes have the same name, limit and store."""
    return Gate(Policy.read(LOGIN), store=store)


def used(gate: Gate, *keys: str) -> int:
    """The number of failed logins that are charged; the key of a route's limit is marked as an address."""
    named = gate.compiled.rules[0].default_entries[0].named
    found = [gate.store.decide_one(named, key, 0, 0, False) for key in keys or ("192.0.2.1", "ip:192.0.2.1")]
    return sum(decision.limit - decision.remaining for decision in found)


class LoginFailed(Exception):
    """An exception that the application's own handler turns into a 401."""


Behave = Callable[[Callable[[], Awaitable[bytes]]], Awaitable[int]]

# ASGI -------------------------------------------------------------------------------------------------------------------


def plain(gate: Gate, behave: Behave) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def read() -> bytes:
            while (message := await receive())["type"] == "http.request":
                if not message.get("more_body", False):
                    return b""
            raise OSError("the client has disconnected")

        try:
            status = await behave(read)
        except LoginFailed:
            status = 401
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body"})

    return RateLimitMiddleware(app, policy=gate)


async def answer_failed(request: Any, error: Exception) -> StarletteResponse:
    return StarletteResponse(status_code=401)


def starlette(behave: Behave, around: Any = lambda endpoint: endpoint, **options: Any) -> Starlette:
    async def login(request: StarletteRequest) -> StarletteResponse:
        return StarletteResponse(status_code=await behave(request.body))

    routes = [Route("/", around(login), methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={LoginFailed: answer_failed}, **options)


def starlette_around(gate: Gate, behave: Behave) -> Any:
    return RateLimitMiddleware(starlette(behave), policy=gate)


def starlette_inside(gate: Gate, behave: Behave) -> Any:
    return starlette(behave, middleware=[Middleware(RateLimitMiddleware, policy=gate)])


def starlette_route(gate: Gate, behave: Behave) -> Any:
    return starlette(behave, limit(store=gate.store, **ROUTE))


def fastapi(behave: Behave, dependencies: Any = ()) -> FastAPI:
    app = FastAPI(exception_handlers={LoginFailed: answer_failed}, dependencies=dependencies)

    @app.post("/")
    async def login(request: StarletteRequest) -> StarletteResponse:
        return StarletteResponse(status_code=await behave(request.body))

    return app


def fastapi_inside(gate: Gate, behave: Behave) -> Any:
    app = fastapi(behave)
    app.add_middleware(RateLimitMiddleware, policy=gate)
    return app


def fastapi_route(gate: Gate, behave: Behave) -> Any:
    app = fastapi(behave, [Depends(RateLimit(store=gate.store, **ROUTE))])
    install(app)
    return app


def litestar(gate: Gate, behave: Behave) -> Any:
    @post("/")
    async def login(request: Request) -> Response[bytes]:
        return Response(b"", status_code=await behave(request.body))

    return Litestar(
        [login],
        middleware=[DefineMiddleware(RateLimitMiddleware, policy=gate)],
        exception_handlers={LoginFailed: lambda request, error: Response(b"", status_code=401)},
        openapi_config=None,
        logging_config=None,
    )


def quart(gate: Gate, behave: Behave) -> Any:
    app = Quart("shop")

    @app.post("/")
    async def login() -> Any:
        return "", await behave(quart_request.get_data)

    @app.errorhandler(LoginFailed)
    async def failed(error: Exception) -> Any:
        return "", 401

    app.asgi_app = RateLimitMiddleware(app.asgi_app, policy=gate)  # type: ignore[method-assign]
    return app


class MapsErrors:
    """A Django middleware that answers an exception of the application."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response
        if asyncio.iscoroutinefunction(get_response):
            from asgiref.sync import markcoroutinefunction

            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        return HttpResponse(status=401) if isinstance(error, LoginFailed) else None


MAPS = f"{__name__}.MapsErrors"


def django_urls(behave: Behave, around: Any = lambda view: view) -> list[Any]:
    async def login(request: HttpRequest) -> HttpResponse:
        async def read() -> bytes:
            return request.body

        return HttpResponse(status=await behave(read))

    return [re_path("^.*$", csrf_exempt(around(login)))]


def django_around(gate: Gate, behave: Behave) -> Any:
    return RateLimitMiddleware(handler(ASGIHandler, django_urls(behave), {"STORE": gate.store}, (MAPS,)), policy=gate)


def django_middleware(gate: Gate, behave: Behave) -> Any:
    return handler(ASGIHandler, django_urls(behave), {"POLICY": gate}, (OURS, MAPS))


def django_view(gate: Gate, behave: Behave) -> Any:
    settings: Any = {"STORE": gate.store}
    app = handler(ASGIHandler, django_urls(behave, limited_django.limit(**ROUTE)), settings, (MAPS,))

    async def at_this_site(*request: Any) -> None:
        with override_settings(LIMITKEEPER=settings):
            await app(*request)

    return at_this_site


ASGI = [plain, starlette_around, starlette_inside, starlette_route, fastapi_inside, fastapi_route, litestar, quart]
ASGI += [django_around, django_middleware, django_view]
#: Limits of single handlers: the response that others make from an exception of their handler is unknown to them.
ROUTES = (starlette_route, django_view)
#: Django reads the whole body before anything of it is called.
READS_FIRST = (django_around, django_middleware, django_view)


class Ending:
    """A handler that ends in one way, with the client and server for it."""

    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.began, self.gone = asyncio.Event(), asyncio.Event()
        self.messages = [{"type": "http.request", "body": b"x", "more_body": "hung up" in ending}]
        if ending == "hung up before":
            self.gone.set()

    async def behave(self, read: Callable[[], Awaitable[bytes]]) -> int:
        self.began.set()
        if self.ending.startswith("answered"):
            return int(self.ending[-3:])
        if self.ending == "raised":
            raise ValueError("mine")
        if self.ending == "raised and mapped":
            raise LoginFailed
        if self.ending in ("cancelled", "stopped"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if self.ending == "stopped":
                    raise RuntimeError("shutting down") from None
                raise
        if self.ending in ("hung up before", "hung up after"):
            await read()
            await asyncio.Event().wait()  # Django has read the body before, and cancels a view whose client has disconnected
        try:
            await read()
            await asyncio.Event().wait()
        except (Exception, asyncio.CancelledError):
            if self.ending == "hung up, then raised":
                raise ValueError("mine") from None
        return int(self.ending[-3:])

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def run(self, app: Any) -> None:
        async def send(message: Any) -> None:
            if self.gone.is_set() and "hung up" in self.ending:
                raise OSError("the client has disconnected")

        scope = scope_of("POST", "/", [("content-length", "2" if "hung up" in self.ending else "1")], "192.0.2.1")
        task = asyncio.ensure_future(app(scope, self.receive, send))
        began = asyncio.ensure_future(self.began.wait())
        await asyncio.wait({began, task}, return_when=asyncio.FIRST_COMPLETED)
        began.cancel()
        self.gone.set() if "hung up" in self.ending else None
        if self.ending in ("cancelled", "stopped"):
            task.cancel()
        async with asyncio.timeout(30):
            await asyncio.gather(task, return_exceptions=True)


#: ending -> how many failed logins it counts as.
ENDINGS = {
    "answered 200": 0,
    "answered 401": 1,
    "answered 500": 0,
    "raised": 0,
    "raised and mapped": 1,
    "cancelled": 1,
    "stopped": 1,
    "hung up before": 1,
    "hung up after": 1,
    "hung up, then raised": 1,
    "hung up, then answered 400": 1,
    "hung up, then answered 401": 1,
}


@pytest.mark.parametrize("build", ASGI, ids=lambda build: build.__name__)
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_endings_of_a_task(build, ending, gate):
    """In every ASGI framework, around it, inside it and on one route."""
    asgi_ending: Any = None

    async def main() -> None:
        nonlocal asgi_ending
        asgi_ending = Ending(ending)
        if build in READS_FIRST:  # the client disconnects when its body has arrived
            asgi_ending.messages[0]["more_body"] = False
        await asgi_ending.run(build(gate, asgi_ending.behave))

    driven(main())
    assert asgi_ending.began.is_set() or ending == "hung up before"
    known = ENDINGS[ending] if ending != "raised" or build not in ROUTES else 1
    assert used(gate) == known


# WSGI -------------------------------------------------------------------------------------------------------------------


class LostInput(io.BytesIO):
    """A body of which a part comes before its client disconnects, with an error or without one."""

    def __init__(self, error: bool) -> None:
        super().__init__(b"x")
        self.error = error

    def read(self, size: int | None = -1) -> bytes:
        if self.error:
            raise ConnectionResetError("the client has disconnected")
        return super().read(size)


WsgiBehave = Callable[[Callable[[], bytes]], int]


def wsgi_plain(gate: Gate, behave: WsgiBehave) -> Any:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        def read() -> bytes:
            stream, data = environ["wsgi.input"], b""
            while len(data) < 2:
                if not (more := stream.read(2 - len(data))):
                    raise ValueError("the body is not complete")
                data += more
            return data

        try:
            status = behave(read)
        except LoginFailed:
            status = 401
        start_response(f"{status} So be it", [])
        return []

    return WsgiMiddleware(app, gate)


def flask(limits: Callable[[Flask], Any], behave: WsgiBehave) -> Any:
    app = Flask("shop")
    app.logger.disabled = True
    around = limits(app)

    def login() -> Any:
        return "", behave(flask_request.get_data)

    app.add_url_rule("/", "login", around(login), methods=["POST"])
    app.register_error_handler(LoginFailed, lambda error: ("", 401))
    return app


def flask_early(gate: Gate, behave: WsgiBehave) -> Any:
    return flask(lambda app: FlaskRateLimit(app, policy=gate) and (lambda view: view), behave)


def flask_late(gate: Gate, behave: WsgiBehave) -> Any:
    return flask(lambda app: FlaskRateLimit(app, policy=gate, early=False) and (lambda view: view), behave)


def flask_view(gate: Gate, behave: WsgiBehave) -> Any:
    return flask(lambda app: FlaskRateLimit(app, store=gate.store).limit(**ROUTE), behave)


def django_wsgi(settings: dict[str, Any], middleware: Any, around: Any, behave: WsgiBehave) -> Any:
    def login(request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=behave(lambda: request.body))

    return handler(WSGIHandler, [re_path("^.*$", csrf_exempt(around(login)))], settings, middleware)


def django_sync(gate: Gate, behave: WsgiBehave) -> Any:
    return django_wsgi({"POLICY": gate}, (OURS, MAPS), lambda view: view, behave)


def django_sync_view(gate: Gate, behave: WsgiBehave) -> Any:
    return django_wsgi({"STORE": gate.store}, (MAPS,), limited_django.limit(**ROUTE), behave)


WSGI = [wsgi_plain, flask_early, flask_late, flask_view, django_sync, django_sync_view]
WSGI_ENDINGS = {
    "answered 200": 0,
    "answered 401": 1,
    "answered 500": 0,
    "raised": 0,
    "raised and mapped": 1,
    "stopped": 1,
    "interrupted": 1,
    "hung up": 1,
    "hung up with an error": 1,
}


@pytest.mark.parametrize("build", WSGI, ids=lambda build: build.__name__)
@pytest.mark.parametrize("ending", WSGI_ENDINGS)
def test_the_endings_of_a_thread(build, ending, gate):
    """In every WSGI framework: a worker that is stopped raises in its handler, and a client may send half of its body."""

    def behave(read: Callable[[], bytes]) -> int:
        if ending.startswith("answered"):
            return int(ending[-3:])
        if ending.startswith("hung up") and len(read()) < 2:
            raise ValueError("the body is not complete")
        raise {"raised": ValueError, "raised and mapped": LoginFailed, "stopped": SystemExit}.get(ending, KeyboardInterrupt)

    environ = environ_of("POST", "/", CONTENT_LENGTH="2", REMOTE_ADDR="192.0.2.1")
    environ["wsgi.input"] = LostInput("error" in ending) if "hung up" in ending else io.BytesIO(b"xx")
    try:
        with override_settings(LIMITKEEPER={"STORE": gate.store}):
            body = build(gate, behave)(environ, lambda *_: None)
            list(body)
            getattr(body, "close", lambda: None)()
    except (ValueError, OSError, SystemExit, KeyboardInterrupt):
        pass
    known = WSGI_ENDINGS[ending] if ending != "raised" or build is not django_sync_view else 1
    if ending == "hung up" and build is django_sync:
        known = 0  # Django passes on what came, and its view has failed: a 500 that is known
    assert used(gate) == known


# gRPC -------------------------------------------------------------------------------------------------------------------

RULE = Rule("login", (FixedWindow("5/h"),), charge=Charge(((401, 401),)))


class Login:
    """A handler that ends in one way: at once, or when the call is over for its client."""

    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.began, self.over, self.done = threading.Event(), threading.Event(), threading.Event()

    def code(self) -> Any:
        return {"refuses": grpc.StatusCode.UNAUTHENTICATED, "aborts": grpc.StatusCode.NOT_FOUND}.get(self.ending.split()[-1])

    def in_thread(self, request: str, context: Any) -> str:
        self.began.set()
        if "," in self.ending:
            self.over.wait(30)
        if self.code() is not None:
            context.abort(self.code(), "no")
        if self.ending.endswith("raises"):
            raise ValueError("mine")
        return "welcome"

    async def in_task(self, request: str, context: Any) -> str:
        self.began.set()
        try:
            while "," in self.ending and not self.over.is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            if self.ending.endswith("returns"):
                return "welcome"
        if self.code() is not None:
            await context.abort(self.code(), "no")
        if self.ending.endswith("raises"):
            raise ValueError("mine")
        return "welcome"


GRPC_ENDINGS = {
    "returns": 0,
    "refuses": 1,
    "raises": 0,
    "cancelled, returns": 1,
    "cancelled, raises": 1,
    "cancelled, aborts": 1,
    "past its deadline, returns": 1,
    "past its deadline, raises": 1,
    "past its deadline, aborts": 1,
    "stopped, returns": 1,
    "stopped, raises": 1,
}


def generic(login: Login, kind: str) -> Any:
    function = login.in_task if kind == "tasks" else login.in_thread
    made = grpc.unary_unary_rpc_method_handler(function, bytes.decode, str.encode)
    return grpc.method_handlers_generic_handler(SERVICE, {"Pay": made})


class ThreadServer:
    def __init__(self, gate: Gate, login: Login) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.server = grpc.server(ThreadPoolExecutor(4), interceptors=[RateLimitInterceptor(gate)])
        self.server.add_generic_rpc_handlers((generic(login, "threads"),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def stop(self) -> None:
        self.server.stop(None)


class TaskServer:
    def __init__(self, gate: Gate, login: Login) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self.start(gate, login), self.loop).result(60)

    async def start(self, gate: Gate, login: Login) -> int:
        self.server = grpc.aio.server(interceptors=[AsyncRateLimitInterceptor(gate)])
        self.server.add_generic_rpc_handlers((generic(login, "tasks"),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return port

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(None), self.loop).result(60)


@pytest.mark.parametrize("kind", [ThreadServer, TaskServer])
@pytest.mark.parametrize("ending", GRPC_ENDINGS)
def test_the_endings_of_a_call(kind, ending, store, eventually):
    """gRPC, by real servers: a call that is cancelled, past its deadline or stopped is charged, whatever its handler does."""
    gate = Gate(Policy(rules=(RULE,)), store=store)
    login = Login(ending)
    server = kind(gate, login)
    count = gate.compiled.rules[0]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = Client(channel).method("Pay").future("x", timeout=2 if "deadline" in ending else 60)  # its handler begins before
        assert login.began.wait(60)
        if ending.startswith("cancelled"):
            call.cancel()
        if ending.startswith("stopped"):
            server.stop()
        if "," in ending:
            eventually(call.done)
            threading.Event().wait(0.05)  # the server learns it after the client
        login.over.set()
        eventually(call.done)
        eventually(lambda: sum(count.statuses) == 1)
    server.stop()
    assert used(gate, "*") == GRPC_ENDINGS[ending]
