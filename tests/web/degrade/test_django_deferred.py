"""Deferred requests of Django: the response of a view in a thread of the shaper is read whole, and closed."""

from __future__ import annotations

import asyncio
import threading
from io import BytesIO
from typing import Any

import django_asgi
import django_site
import httpx
import pytest
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_finished
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import RequestFactory
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from limitkeeper.concurrency import Shaper
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.degrade import DeferredRequests
from limitkeeper.web.degrade.django_handlers import deferred_status, django_deferred
from limitkeeper.web.django.middleware import respond

POLICY = Policy.of(limits=[{"name": "all", "match": "POST /**", "limit": "blocked", "on_refusal": "degrade later"}])
FILES: list[BytesIO] = []
#: The middleware of the status path, by its import path.
status: Any = None


async def stream(request: HttpRequest) -> StreamingHttpResponse:
    async def parts() -> Any:
        for word in ("one ", "two"):
            yield word

    return StreamingHttpResponse(parts())


def cookies(request: HttpRequest) -> HttpResponse:
    response = HttpResponse("set")
    response.set_cookie("session", "ann", httponly=True, samesite="Lax", max_age=60)
    response.set_cookie("cart", "7 cups")
    return response


def file(request: HttpRequest) -> FileResponse:
    FILES.append(BytesIO(b"rows"))
    return FileResponse(FILES[-1])


@pytest.fixture(params=[WSGIHandler, ASGIHandler])
def post(request: pytest.FixtureRequest) -> Any:
    """Sends a request that is deferred; returns the response that the site has for its ticket."""
    global status
    deferred = DeferredRequests(Shaper("1000/s", capacity=9))
    status = deferred_status(deferred)
    gate = Gate(POLICY, handlers={"later": django_deferred(deferred)})
    urls = [path(view.__name__, csrf_exempt(view)) for view in (stream, cookies, file)]
    app = django_site.handler(request.param, urls, {"POLICY": gate}, (django_site.OURS, f"{__name__}.status"))

    async def ask() -> httpx.Response:
        inner = httpx.ASGITransport(app) if request.param is ASGIHandler else None
        transport = inner or ThreadedWSGI(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            accepted = await client.post(wanted[0])
            assert accepted.status_code == 202
            while (found := await client.get(accepted.headers["Location"])).status_code == 202:
                await asyncio.sleep(0.01)
            return found

    wanted: list[str] = []

    def send(target: str) -> httpx.Response:
        wanted[:] = [target]
        return asyncio.run(asyncio.wait_for(ask(), 60))

    yield send
    deferred.shaper.shutdown()


class ThreadedWSGI(httpx.AsyncBaseTransport):
    """A WSGI application for an async client."""

    def __init__(self, app: Any) -> None:
        self.inner = httpx.WSGITransport(app)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sent = httpx.Request(request.method, request.url, headers=request.headers, content=await request.aread())

        def call() -> httpx.Response:
            response = self.inner.handle_request(sent)
            return httpx.Response(response.status_code, headers=response.headers, content=response.read())

        return await asyncio.to_thread(call)


def test_a_stream_of_an_async_view_is_kept(post):
    """A stream of an async view is read whole."""
    found = post("/stream")
    assert (found.status_code, found.text) == (200, "one two")


def test_cookies_are_kept(post):
    """A deferred response has the cookies that the view has set, with their attributes."""
    lines = sorted([line.strip() for line in post("/cookies").headers.get_list("Set-Cookie")])
    assert len(lines) == 2
    assert lines[0].startswith('cart="7 cups"; ')
    assert {"session=ann", "HttpOnly", "SameSite=Lax", "Max-Age=60"} <= {part.strip() for part in lines[1].split(";")}


def test_a_response_is_closed_in_its_thread(post):
    """The end of a deferred request is reported in its thread, where Django closes connections; its files are closed."""
    threads: list[str] = []

    def finished(**_: object) -> None:
        threads.append(threading.current_thread().name)

    request_finished.connect(finished)
    try:
        assert post("/file").content == b"rows"
    finally:
        request_finished.disconnect(finished)
    assert any(name.startswith("limitkeeper shaper") for name in threads)
    assert FILES[-1].closed


def test_a_form_that_was_read_is_refused():
    """The body of a form with files, which CsrfViewMiddleware reads for the token, can't be had again: it is not deferred."""
    django_asgi.configure()
    deferred = DeferredRequests(Shaper("1000/s", capacity=9))
    gate = Gate(POLICY, handlers={"later": django_deferred(deferred)})
    request = RequestFactory().post("/", {"name": BytesIO(b"rows")})
    assert request.POST is not None
    assert respond(gate, file, request).status_code == 429
    deferred.shaper.shutdown()
