"""Limits by a field of the body: it is read once, bounded, and reaches the application, in every framework, on real servers."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import httpx
import pytest
from django.http import HttpResponse
from django.test import AsyncRequestFactory, Client
from django.test.utils import override_settings
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django_asgi import Handler, Urls, configure
from fastapi import Body, Depends, FastAPI, Request
from flask import Flask
from flask import request as flask_request
from servers_asgi import Hypercorn, Uvicorn
from servers_wsgi import Waitress
from starlette.applications import Starlette
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response
from starlette.routing import Route
from wsgi_apps import environ_of

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.identity.body import MAX_BODY
from limitkeeper.web import asgi, fastapi, flask, starlette, wsgi
from limitkeeper.web.django import limit as django_limit
from limitkeeper.web.headers import AsgiRequestContext

configure()

IDENTIFY = {"account": {"body": "email"}}
ONE = {"limit": "fixed window 1/min", "key": "account | ip", "identify": IDENTIFY}
POLICY = Policy.of(identify=IDENTIFY, limits=[{"name": "login", "key": "account | ip", "limit": "fixed window 1/min"}])
FORM, JSON = "application/x-www-form-urlencoded", "application/json"


def asgi_app(store: MemoryStore) -> Any:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return asgi.RateLimitMiddleware(echo, POLICY, store=store)


def starlette_app(store: MemoryStore) -> Any:
    @starlette.limit(store=store, **ONE)
    async def echo(request: Request) -> Response:
        return Response(b"".join([part async for part in request.stream()]))

    return Starlette(routes=[Route("/", echo, methods=["POST"])])


def fastapi_app(store: MemoryStore) -> Any:
    app = FastAPI()
    fastapi.install(app)

    @app.post("/", dependencies=[Depends(fastapi.RateLimit(store=store, **ONE))])
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    return app


def wsgi_app(store: MemoryStore) -> Any:
    def echo(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))]

    return wsgi.RateLimitMiddleware(echo, POLICY, store=store)


def flask_app(store: MemoryStore) -> Any:
    app = Flask("bodies")
    flask.RateLimit(app, POLICY, store=store)
    app.post("/")(lambda: flask_request.get_data())
    return app


def flask_view(store: MemoryStore) -> Any:
    app = Flask("bodies")
    app.post("/")(flask.RateLimit(app, store=store).limit(**ONE)(lambda: flask_request.get_data()))
    return app


SITES: dict[str, tuple[Callable[[MemoryStore], Any], Any]] = {
    "asgi": (asgi_app, Uvicorn),
    "starlette": (starlette_app, Uvicorn),
    "fastapi": (fastapi_app, Uvicorn),
    "wsgi": (wsgi_app, Waitress),
    "flask policy": (flask_app, Waitress),
    "flask view": (flask_view, Waitress),
}


@pytest.fixture(params=SITES, ids=SITES)
def send(request: pytest.FixtureRequest, store: MemoryStore) -> Iterator[Callable[..., tuple[int, bytes]]]:
    """Sends a body to a site that limits by the account in it and echoes it."""
    make, server_class = SITES[request.param]
    server = server_class(make(store), [])

    def post(body: bytes, kind: str, chunks: int = 0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=90)
        parts = [body[at : at + chunks] for at in range(0, len(body), chunks)] if chunks else body
        connection.request("POST", "/", parts, {"Content-Type": kind}, encode_chunked=bool(chunks))
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    yield post
    server.close()


def test_accounts_are_limited_and_bodies_arrive(send):
    """Each account has its own limit, whatever the type of its body, and the application reads the whole body."""
    ann, ben = b'{"email": "ann", "password": "\xc3\xa4"}', b"email=ben&password=%20"
    assert send(ann, JSON) == (200, ann)
    assert send(b"email=ann", FORM)[0] == 429
    assert send(ben, FORM) == (200, ben)
    assert send(b'{"email": "ben"}', JSON)[0] == 429


def test_what_is_not_read_shares_one_key(send):
    """A body above the bound arrives whole, and is counted together with all others that are not read."""
    large = json.dumps({"email": "ann", "padding": "x" * (2 * MAX_BODY)}).encode()
    assert send(large, JSON) == (200, large)
    assert send(large.replace(b"ann", b"ben"), JSON)[0] == 429
    assert send(b"email=cid", "text/plain")[0] == 429
    assert send(b'{"email": "cid"}', JSON)[0] == 200


@pytest.mark.parametrize("send", ["asgi", "starlette", "fastapi"], indirect=True)
def test_bodies_without_a_length(send):
    """Under ASGI a body that comes in chunks is read up to the bound, and arrives whole."""
    body = json.dumps({"email": "ann", "padding": "x" * 5000}).encode()
    assert send(body, JSON, chunks=700) == (200, body)
    assert send(body, JSON, chunks=999)[0] == 429
    large = json.dumps({"email": "ben", "padding": "x" * (2 * MAX_BODY)}).encode()
    assert send(large, JSON, chunks=30_000) == (200, large)
    assert send(large, JSON, chunks=30_000)[0] == 429


def test_parameters_of_fastapi_are_read_first(store):
    """FastAPI reads the body for the handler's parameters before its limits, which then use the same bytes."""
    app = FastAPI()
    fastapi.install(app)

    @app.post("/", dependencies=[Depends(fastapi.RateLimit(store=store, **ONE))])
    async def login(email: str = Body(embed=True)) -> str:
        return email

    server = Uvicorn(app, [])
    try:
        bodies = (b'{"email": "ann"}', b'{"email": "ann"}', b'{"email": "ben"}')
        answers = [server.request("POST", "/", [("Content-Type", JSON)], body, "127.0.0.1") for body in bodies]
        assert [answer.status for answer in answers] == [200, 429, 200]
    finally:
        server.close()


def test_a_form_that_fastapi_has_parsed():
    """A form whose stream was consumed for the handler's parameters is read from them."""
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", FORM.encode())]})
    request._stream_consumed, request._form = True, FormData([("email", "ann&ben"), ("photo", UploadFile(BytesIO()))])
    asyncio.run(starlette.read_request_body(request))
    assert AsgiRequestContext(request.scope).body() == b"email=ann%26ben"


def test_a_form_that_flask_has_parsed(store):
    """A before_request function that reads the form does not hide it from the limit."""
    app = Flask("bodies")
    seen = []
    app.before_request(lambda: seen.append(flask_request.form.get("email")))
    app.post("/")(flask.RateLimit(app, store=store).limit(**ONE)(lambda: flask_request.form["email"]))
    client = app.test_client()
    assert [client.post("/", data={"email": name}).status_code for name in ("ann", "ann", "ben")] == [200, 429, 200]
    assert seen == ["ann", "ann", "ben"]


def echo_view(request: Any) -> HttpResponse:
    return HttpResponse(request.body)


def django_site(view: Any) -> Urls:
    return Urls([path("", csrf_exempt(view))])


def posts(client: Client, *bodies: bytes, kind: str = JSON) -> list[tuple[int, bytes]]:
    return [(answer.status_code, answer.content) for answer in [client.post("/", body, content_type=kind) for body in bodies]]


def test_django(store):
    """The middleware and a view's limit read the body that the view then has; one above the bound shares the key of all."""
    ann, large = b'{"email": "ann"}', json.dumps({"email": "ben", "padding": "x" * MAX_BODY}).encode()
    middleware = ["limitkeeper.web.django.RateLimitMiddleware"]
    setting = {"POLICY": POLICY, "STORE": store}
    with override_settings(LIMITKEEPER=setting, MIDDLEWARE=middleware, ROOT_URLCONF=django_site(echo_view)):
        first, second, third, fourth = posts(Client(), ann, ann, large, large)
        assert (first, second[0], third, fourth[0]) == ((200, ann), 429, (200, large), 429)
    view = django_limit(**ONE)(echo_view)
    with override_settings(LIMITKEEPER={"STORE": store}, MIDDLEWARE=[], ROOT_URLCONF=django_site(view)):
        first, second, third = posts(Client(), ann, ann, b'{"email": "ben"}')
        assert (first, second[0], third[0]) == ((200, ann), 429, 200)


def test_django_under_asgi(store):
    """Under ASGI too; a body without a length, which Django would read whole, shares the key of unread bodies."""
    view = csrf_exempt(django_limit(**ONE)(echo_view))
    with override_settings(LIMITKEEPER={"STORE": store}, MIDDLEWARE=[]):
        server = Uvicorn(Handler(Urls([path("", view)])), [], lifespan="off")
        try:
            answers = [
                server.request("POST", "/", [("Content-Type", JSON)], body, "127.0.0.1")
                for body in (b'{"email": "ann"}', b'{"email": "ann"}', b'{"email": "ben"}')
            ]
            assert [answer.status for answer in answers] == [200, 429, 200]
            assert answers[0].body == b'{"email": "ann"}'
        finally:
            server.close()


class WrappedRequest:
    """A request as Django REST framework hands it to the methods of its views."""

    _stream = None

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@pytest.mark.parametrize("body", [b"", b"email=ann"])
def test_a_wrapped_request_of_django_under_asgi(body, store):
    """Whether a request without a length has a body is read of Django's own request, which a framework may have wrapped."""
    view = django_limit("fixed window 1/min", key="account", identify=IDENTIFY)(lambda request: HttpResponse(request.method))
    with override_settings(LIMITKEEPER={"STORE": store}):
        request = AsyncRequestFactory().generic("POST", "/", content_type="text/plain")
        request._stream = BytesIO(body)  # as Django's handler, which has read it into a file
        statuses = [view(WrappedRequest(request)).status_code for _ in range(2)]
        assert statuses == [200, 429 if body else 200]


def django_middleware_app(store: MemoryStore) -> Any:
    return Handler(django_site(echo_view))


@pytest.mark.parametrize("make", [asgi_app, starlette_app, django_middleware_app])
def test_bodies_that_http_2_does_not_announce(make, store):
    """Over HTTP/2 a body of another type shares the key of unread bodies, whatever the method; without a body it is absent."""
    site = {"POLICY": POLICY, "STORE": store}
    with override_settings(LIMITKEEPER=site, MIDDLEWARE=["limitkeeper.web.django.RateLimitMiddleware"]):
        server = Hypercorn(make(store), [])
        methods = ["POST"] if make is starlette_app else ["POST", "DELETE", "BREW"]
        found = []
        for body in ([], [b"email=ann"]):
            for method in methods:
                with httpx.Client(http1=False, http2=True, timeout=90) as client:
                    url = f"http://127.0.0.1:{server.port}/"
                    found.append(
                        client.request(method, url, content=iter(body), headers={"Content-Type": "text/plain"}).status_code
                    )
        server.close()
    later = [429] * (len(methods) - 1)
    assert found == [200, *later, 200, *later]  # by address, then by the key of unread bodies


def test_an_unannounced_body_to_flask(store):
    """A server that ends the input itself (gunicorn) need not announce a body over HTTP/2: Flask reads it, so it counts."""
    app = Flask("shop")
    limits = flask.RateLimit(app, store=store)

    @app.post("/")
    @limits.limit("fixed window 1/min", key="account", identify=IDENTIFY)
    def login() -> Any:
        return flask_request.get_json()["email"]

    def post() -> str:
        statuses: list[str] = []
        environ = environ_of("POST", "/", **{"wsgi.input": BytesIO(b'{"email": "ann"}'), "CONTENT_TYPE": JSON})
        environ |= {"wsgi.input_terminated": True, "SERVER_PROTOCOL": "HTTP/2"}
        environ.pop("CONTENT_LENGTH", None)
        app(environ, lambda status, headers, exc_info=None: statuses.append(status[:3]))
        return statuses[0]

    assert [post() for _ in range(2)] == ["200", "429"]


def test_zeros_before_a_length(store):
    """A large body is not read where zeros precede its length, and shares the key of unread bodies."""
    app, reads = wsgi_app(store), []

    class Input(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            reads.append(size)
            return super().read(size)

    def post(email: str, padding: int, zeros: int) -> str:
        statuses: list[str] = []
        body = json.dumps({"email": email, "padding": "x" * padding}).encode()
        environ = environ_of("POST", "/", **{"wsgi.input": Input(body), "CONTENT_TYPE": JSON})
        environ["CONTENT_LENGTH"] = "0" * zeros + str(len(body))
        app(environ, lambda status, headers, exc_info=None: statuses.append(status[:3]))
        return statuses[0]

    assert [post(email, MAX_BODY, 22) for email in ("ann", "ben")] == ["200", "429"]
    assert len(reads) == 1  # the application's
    assert [post("ann", 0, zeros) for zeros in (0, 22)] == ["200", "429"]
