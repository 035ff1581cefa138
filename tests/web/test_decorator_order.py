"""A limit above the route's own decorator would never be evaluated: every framework refuses it."""

from __future__ import annotations

import asyncio
from functools import wraps

import pytest
from fastapi import APIRouter, FastAPI
from flask import Blueprint, Flask
from starlette.routing import Mount
from starlette_client import TestClient

from limitkeeper import ConfigurationError
from limitkeeper.policy import Policy
from limitkeeper.web.fastapi import install, limit
from limitkeeper.web.flask import RateLimit

ABOVE = r"'home' to be registered with its limit, got it without.*; write @limit\(…\) below @app\.get\(…\)"


def traced(function):
    @wraps(function)
    def call(*args, **named):
        return function(*args, **named)

    return call


@pytest.mark.parametrize("options", [{}, {"default": "5/s"}, {"policy": Policy()}, {"policy": Policy(), "early": False}])
@pytest.mark.parametrize("factory", [False, True])
@pytest.mark.parametrize("between", [lambda view: view, traced])
def test_a_limit_above_a_flask_route_is_an_error_at_the_first_request(options, factory, between):
    """Also in a blueprint that is registered last, with another decorator between the two, and with any settings."""
    app, limits = Flask("shop"), RateLimit(**options)
    app.testing = True
    routes = Blueprint("pages", "pages") if factory else app

    @limits.limit("1/min")
    @between
    @routes.get("/")
    def home():
        return "home"

    limits.init_app(app)
    if factory:
        app.register_blueprint(routes)
    with pytest.raises(ConfigurationError, match=ABOVE):
        app.test_client().get("/")


@pytest.mark.parametrize("kind", ["app", "router", "mounted"])
def test_a_limit_above_a_fastapi_route_is_an_error_at_the_start(kind):
    """Also in a router that is included and an app that is mounted; the server gets the failure of the start."""
    app = FastAPI()
    install(app)
    routes = {"app": app, "router": APIRouter(), "mounted": FastAPI()}[kind]

    @limit("1/min")
    @routes.get("/")
    async def home() -> dict[str, str]:
        return {}

    if kind == "router":
        app.include_router(routes)
    elif kind == "mounted":
        app.router.routes.append(Mount("/shop", routes))
    with pytest.raises(ConfigurationError, match=ABOVE):
        TestClient(app).get("/")
    with pytest.raises(ConfigurationError, match=ABOVE), TestClient(app):
        pass


def test_a_server_gets_the_failure_of_the_start():
    """An exception alone means to a server that the app has no lifespan."""
    app, sent = FastAPI(), []
    install(app)

    @limit("1/min")
    @app.get("/")
    async def home() -> dict[str, str]:
        return {}

    async def send(message):
        sent.append(message)

    with pytest.raises(ConfigurationError):
        asyncio.run(app({"type": "lifespan"}, None, send))
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]


def test_a_limit_above_a_fastapi_route_is_found_without_install():
    """By the first limit of the app that is evaluated."""
    app = FastAPI()

    @limit("1/min")
    @app.get("/")
    async def home() -> dict[str, str]:
        return {}

    @app.get("/other")
    @limit("1/min")
    async def other() -> dict[str, str]:
        return {}

    with pytest.raises(ConfigurationError, match=ABOVE):
        TestClient(app).get("/other")


def plain():
    return {}


def test_a_handler_may_have_a_limit_in_one_app_only():
    """A function that was not decorated where it is defined may be registered without its limit elsewhere."""
    limited, free = FastAPI(), FastAPI()
    install(free)
    limited.get("/")(limit("1/min")(plain))
    free.get("/")(plain)
    assert [TestClient(app).get("/").status_code for app in (limited, limited, free, free)] == [200, 429, 200, 200]


def test_a_handler_may_have_a_route_with_and_another_without_a_limit():
    """Only a limit that no route has is an error."""
    flask, fast = Flask("shop"), FastAPI()
    install(fast)
    limits = RateLimit(flask)

    def home():
        return {}

    flask.add_url_rule("/free", "free", home)
    flask.add_url_rule("/", "limited", limits.limit("1/min")(limits.limit("2/min")(home)))
    fast.get("/free")(home)
    fast.get("/")(traced(limit("1/min")(home)))
    for client in (flask.test_client(), TestClient(fast)):
        assert [client.get(path).status_code for path in ("/free", "/", "/free", "/")] == [200, 200, 200, 429]
