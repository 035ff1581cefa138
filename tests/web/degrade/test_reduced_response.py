"""Reduced responses: a rule degrades to the application itself, whose views read `is_reduced`."""

from __future__ import annotations

from typing import Any

import pytest
from test_stale_cache import Client

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.degrade import is_reduced

POLICY = "limits: [{name: api, limit: fixed window 1/h align first, on_refusal: degrade less}]"


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


def wsgi(_: Any) -> Any:
    from limitkeeper.web.wsgi import RateLimitMiddleware

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return [text_of(environ).encode()]

    return RateLimitMiddleware(app, gate(app))


def flask(_: Any) -> Any:
    from flask import Flask, abort, request

    from limitkeeper.web.degrade.flask_handlers import flask_reduced
    from limitkeeper.web.flask import RateLimit

    app = Flask("reduced")
    app.add_url_rule("/a", "a", lambda: text_of(request))
    app.before_request(lambda: abort(403) if request.headers["X-User"] == "eve" else None)
    RateLimit(app, gate(flask_reduced(app)))
    return app


def django(_: Any) -> Any:
    import django_site
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpResponse
    from django.urls import re_path

    from limitkeeper.web.degrade.django_handlers import reduced

    urls = [re_path("^.*$", lambda request: HttpResponse(text_of(request)))]
    return django_site.handler(WSGIHandler, urls, {"POLICY": gate(reduced)})


FRAMEWORKS = {"asgi": asgi, "wsgi": wsgi, "flask": flask, "django": django}


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
