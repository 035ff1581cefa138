"""Reduced responses: a rule degrades to the application itself, whose views read `is_reduced`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from test_stale_cache import Client

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.degrade import is_reduced

POLICY = "limits: [{name: api, limit: fixed window 1/h align first, on_refusal: degrade less}]"
OF_VIEW = "fixed window 2/h align first"


def gate(handler: Any) -> Gate:
    return Gate(Policy.read(POLICY), store=MemoryStore(), handlers={"less": handler})


def text_of(request: Any) -> str:
    return "less" if is_reduced(request) else "all"


def asgi(_: Any) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    from limitkeeper.web.asgi import RateLimitMiddleware

    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse(text_of(request))

    app = Starlette(routes=[Route("/a", view)])
    return RateLimitMiddleware(app, gate(app))


def limited_asgi(_: Any) -> Any:
    """The application within a middleware of its own. (A limit of a route keeps the evaluation of the policy in the scope.)"""
    from limitkeeper.web.asgi import RateLimitMiddleware

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text_of(scope).encode()})

    inner = RateLimitMiddleware(app, Policy.of(limits=[{"name": "inner", "limit": OF_VIEW}]), store=MemoryStore())
    return RateLimitMiddleware(inner, gate(inner))


def limited_route(_: Any) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    from limitkeeper.web.asgi import RateLimitMiddleware
    from limitkeeper.web.starlette import limit

    @limit(OF_VIEW)
    async def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse(text_of(request))

    app = Starlette(routes=[Route("/a", view)])
    return RateLimitMiddleware(app, gate(app))


def wsgi(_: Any, limited: bool = False) -> Any:
    from limitkeeper.web.wsgi import RateLimitMiddleware

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return [text_of(environ).encode()]

    own = Policy.of(limits=[{"name": "inner", "limit": OF_VIEW}])
    inner: Any = RateLimitMiddleware(app, own, store=MemoryStore()) if limited else app
    return RateLimitMiddleware(inner, gate(inner))


def flask(_: Any, limited: bool = False, early: bool = True) -> Any:
    from flask import Flask, abort, request

    from limitkeeper.web.degrade.flask_handlers import flask_reduced
    from limitkeeper.web.flask import RateLimit

    app = Flask("reduced")
    app.before_request(lambda: abort(403) if request.headers["X-User"] == "eve" else None)
    limits = RateLimit(app, gate(flask_reduced(app)), store=MemoryStore(), early=early)

    def view() -> str:
        return text_of(request)

    app.add_url_rule("/a", "a", limits.limit(OF_VIEW)(view) if limited else view)
    return app


def django(_: Any, limited: bool = False) -> Any:
    import django_site
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpResponse
    from django.urls import re_path

    from limitkeeper.web.degrade.django_handlers import reduced
    from limitkeeper.web.django import limit

    def view(request: Any) -> HttpResponse:
        return HttpResponse(text_of(request))

    urls = [re_path("^.*$", limit(OF_VIEW)(view) if limited else view)]
    return django_site.handler(WSGIHandler, urls, {"POLICY": gate(reduced)})


FRAMEWORKS = {"asgi": asgi, "wsgi": wsgi, "flask": flask, "django": django}
LIMITED = {
    "asgi": limited_asgi,
    "asgi, route": limited_route,
    "wsgi": partial(wsgi, limited=True),
    "flask": partial(flask, limited=True),
    "flask, late": partial(flask, limited=True, early=False),
    "django": partial(django, limited=True),
}


@pytest.fixture(params=FRAMEWORKS)
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr("test_stale_cache.FRAMEWORKS", FRAMEWORKS)
    return Client(request.param, None)  # type: ignore[arg-type]


def test_a_request_above_its_limit_gets_a_reduced_response(client):
    """With the fields of its limit, and without Retry-After: it is a response."""
    first, second = client.get(), client.get()
    assert [(one.status_code, one.text) for one in (first, second)] == [(200, "all"), (200, "less")]
    assert "Retry-After" not in second.headers
    assert "r=0" in second.headers["RateLimit"]


def test_the_rest_of_the_application_runs_for_it(monkeypatch):
    """In Flask its before_request functions, which may forbid the request."""
    monkeypatch.setattr("test_stale_cache.FRAMEWORKS", FRAMEWORKS)
    client = Client("flask", None)  # type: ignore[arg-type]
    assert [client.get(user=user).status_code for user in ("ann", "eve", "ann")] == [200, 403, 200]


@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_of_the_view_bounds_its_reduced_responses(name, monkeypatch):
    """What it admits stays reduced: it does not undo the refusal by the policy. What it refuses has the fields of a refusal."""
    monkeypatch.setattr("test_stale_cache.FRAMEWORKS", LIMITED)
    client = Client(name, None)  # type: ignore[arg-type]
    answers = [client.get() for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert [one.text for one in answers[:2]] == ["all", "less"]
    refused = answers[2].headers
    assert (refused["Retry-After"], refused["Cache-Control"], refused["X-RateLimit-Limit"]) == ("3600", "no-store", "2")
