"""Default limits, which a handler's own limit replaces; limits that several handlers share; the decorator of FastAPI's routes."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from django.conf.urls.i18n import i18n_patterns
from django.http import HttpResponse
from django.test import Client
from django.test.utils import override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.translation import override
from django.views import View
from django_asgi import Urls, configure
from fastapi import APIRouter, Depends, FastAPI, Request, WebSocket
from flask import Blueprint, Flask
from flask.views import MethodView
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route, WebSocketRoute
from starlette.websockets import WebSocketDisconnect
from starlette_client import TestClient

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.testing import ManualClock, use_clock
from limitkeeper.web import fastapi, flask, starlette
from limitkeeper.web.django import exempt, limit

configure()

ONE, TWO = "fixed window 1/min", "fixed window 2/min"


def flask_statuses(app: Flask, *paths: str) -> list[int]:
    client = app.test_client()
    return [client.get(path).status_code for path in paths]


def statuses(app: Any, *paths: str) -> list[int]:
    http = TestClient(app, client=("192.0.2.1", 50000), raise_server_exceptions=False)
    return [http.get(path).status_code for path in paths]


async def ok(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


# Flask ------------------------------------------------------------------------------------------------------------------


def test_flask(store, tmp_path):
    """Each view without a limit has the default, for itself; own limits, those of a blueprint and exemptions replace it."""
    app = Flask("defaults", static_folder=str(tmp_path), static_url_path="/static")
    (tmp_path / "a.txt").write_text("a")
    limits = flask.RateLimit(app, store=store, default=ONE)
    for name in ("a", "b"):
        app.get(f"/{name}", endpoint=name)(lambda: "ok")
    app.get("/own", endpoint="own")(limits.limit(TWO)(lambda: "ok"))
    app.get("/exempt", endpoint="exempt")(limits.exempt(lambda: "ok"))
    blueprint = Blueprint("shop", __name__, url_prefix="/shop")
    limits.limit(TWO)(blueprint)
    blueprint.get("/tea", endpoint="tea")(lambda: "ok")
    app.register_blueprint(blueprint)
    assert flask_statuses(app, "/a", "/a", "/b", "/b") == [200, 429, 200, 429]
    assert flask_statuses(app, *["/own"] * 3) == flask_statuses(app, *["/shop/tea"] * 3) == [200, 200, 429]
    assert flask_statuses(app, *["/exempt"] * 3, *["/static/a.txt"] * 3) == [200] * 6
    assert flask_statuses(app, *["/none"] * 3) == [404] * 3


def test_a_limit_of_one_method_of_a_view_class_replaces_the_default(store):
    """For that method alone, in Flask and in Django."""
    app = Flask("defaults")
    limits = flask.RateLimit(app, store=store, default=ONE)

    class Orders(MethodView):
        @limits.limit(TWO)
        def get(self) -> str:
            return "ok"

        def post(self) -> str:
            return "ok"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    client = app.test_client()
    assert [client.get("/orders").status_code for _ in range(2)] + [client.head("/orders").status_code] == [200, 200, 429]
    assert [client.post("/orders").status_code for _ in range(2)] == [200, 429]

    class Page(View):
        @method_decorator(limit(TWO))
        def get(self, request: Any) -> HttpResponse:
            return HttpResponse("ok")

        def post(self, request: Any) -> HttpResponse:
            return HttpResponse("ok")

    setting = {"DEFAULT": ONE, "STORE": store}
    ours = ["limitkeeper.web.django.RateLimitMiddleware"]
    with override_settings(LIMITKEEPER=setting, MIDDLEWARE=ours, ROOT_URLCONF=Urls([path("page", Page.as_view())])):
        assert [Client().get("/page").status_code for _ in range(3)] == [200, 200, 429]
        assert [Client().post("/page").status_code for _ in range(2)] == [200, 429]


def test_a_view_of_flask_that_is_called_static_has_the_default(store):
    """Only what sends files has none."""
    app = Flask("defaults", static_folder=None)
    flask.RateLimit(app, store=store, default=ONE)
    blueprint = Blueprint("shop", __name__, url_prefix="/shop")
    for owner in (app, blueprint):
        owner.get("/page", endpoint="static")(lambda: "ok")
    app.register_blueprint(blueprint)
    assert flask_statuses(app, "/page", "/page", "/shop/page", "/shop/page") == [200, 429, 200, 429]


def test_flask_configuration(store):
    """LIMITKEEPER_DEFAULT may hold the arguments of `limit`; with a name the views count together, and the policy comes first."""
    app = Flask("defaults")
    app.config["LIMITKEEPER_DEFAULT"] = {
        "limit": [TWO, "9/h"],
        "name": "all",
        "exempt_when": lambda request: "free" in request.args,
    }
    policy = Policy.of(limits=[{"name": "policy", "match": "GET /a", "key": "ip", "limit": ONE}])
    flask.RateLimit(app, policy, store=store)
    app.get("/a", endpoint="a")(lambda: "ok")
    app.get("/b", endpoint="b")(lambda: "ok")
    assert flask_statuses(app, "/a", "/a", "/b", "/b", "/b?free") == [200, 429, 200, 429, 200]
    with pytest.raises(ConfigurationError, match="default: unknown option 'key_func'; write key="):
        flask.RateLimit(Flask("other"), default={"limit": ONE, "key_func": None})


def test_a_blueprint_is_limited_before_it_is_registered(store):
    """Flask reads the functions of a blueprint when it is registered: a limit afterwards is an error, not without effect."""
    app, shop = Flask("late"), Blueprint("shop", __name__)
    app.register_blueprint(shop)
    with pytest.raises(AssertionError, match="can no longer be called"):
        flask.RateLimit(app, store=store).limit(ONE)(shop)


# Django -----------------------------------------------------------------------------------------------------------------


def view(request: Any, **_: Any) -> HttpResponse:
    return HttpResponse("ok")


@method_decorator(limit(TWO), name="dispatch")
class Report(View):
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("ok")


URLS = Urls(
    [
        path("a/<int:n>", view),
        path("b", view),
        path("own", limit(TWO)(view)),
        path("report", Report.as_view()),
        path("exempt", exempt(lambda request: HttpResponse("ok"))),
    ]
)


@pytest.mark.parametrize("policy", [None, Policy.of(limits=[{"name": "p", "match": "GET /b", "key": "ip", "limit": ONE}])])
def test_django(store, policy):
    """LIMITKEEPER["DEFAULT"] limits each view without a limit, by its URL pattern, with and without a policy."""
    setting = {"DEFAULT": TWO, "STORE": store, "POLICY": policy}
    ours = ["limitkeeper.web.django.RateLimitMiddleware"]
    with override_settings(LIMITKEEPER=setting, MIDDLEWARE=ours, ROOT_URLCONF=URLS):

        def get(*paths: str) -> list[int]:
            return [Client().get(path).status_code for path in paths]

        assert get("/a/1", "/a/2", "/a/3") == [200, 200, 429]
        assert get("/b", "/b", "/b") == ([200, 200, 429] if policy is None else [200, 429, 429])
        assert get(*["/own"] * 3) == get(*["/report"] * 3) == [200, 200, 429]
        assert get(*["/exempt"] * 4) == [200] * 4
        assert get("/none") == [404]


@pytest.mark.parametrize("prefixed", [True, False])
def test_django_in_every_language(store, prefixed):
    """A view of `i18n_patterns` has one count for all languages, though LocaleMiddleware sets the language below."""
    patterns = [*i18n_patterns(path("page", view), prefix_default_language=prefixed), path("plain", view)]
    locale = "django.middleware.locale.LocaleMiddleware"
    setting = {"DEFAULT": "fixed window 3/min", "STORE": store}
    ours = ["limitkeeper.web.django.RateLimitMiddleware", locale]
    own = "/en/page" if prefixed else "/page"
    with override_settings(LIMITKEEPER=setting, MIDDLEWARE=ours, ROOT_URLCONF=Urls(patterns), LANGUAGE_CODE="en"), override("en"):
        paths = (own, "/de/page", "/fr/page", own, "/de/page", "/plain")
        assert [Client().get(one).status_code for one in paths] == [200, 200, 200, 429, 429, 200]


# Starlette --------------------------------------------------------------------------------------------------------------


def test_starlette(store):
    """`default_for` limits each route without a limit, mounted ones and websockets too."""

    class Own(HTTPEndpoint):
        @starlette.limit(TWO, store=store)
        async def get(self, request: Request) -> PlainTextResponse:
            return PlainTextResponse("ok")

    async def talk(websocket: Any) -> None:
        await websocket.accept()
        await websocket.close()

    own = starlette.limit(TWO, store=store)(ok)
    inner = [Route("/a", ok), WebSocketRoute("/talk", talk)]
    host = Host("other.test", Starlette(routes=[Route("/a", ok)]))
    app = Starlette(routes=[host, Route("/a", ok), Route("/own", own), Route("/class", Own), Mount("/inner", routes=inner)])
    starlette.limit(ONE, store=store).default_for(app.routes)
    assert statuses(app, *["http://other.test/a"] * 2) == [200, 429]
    assert statuses(app, "/a", "/a", "/inner/a", "/inner/a") == [200, 429, 200, 429]
    assert statuses(app, *["/own"] * 3) == statuses(app, *["/class"] * 3) == [200, 200, 429]
    with TestClient(app).websocket_connect("/inner/talk"):
        pass
    with pytest.raises(WebSocketDisconnect) as closed, TestClient(app).websocket_connect("/inner/talk"):
        pass
    assert closed.value.code == 1013


# FastAPI ----------------------------------------------------------------------------------------------------------------


def test_fastapi(store):
    """A default of the app does not apply where the route, its router, the place that includes it or a decorator has a limit."""
    app = FastAPI(dependencies=[Depends(fastapi.RateLimit(ONE, store=store, default=True))])
    fastapi.install(app)
    two = fastapi.RateLimit(TWO, store=store)
    router = APIRouter(prefix="/router", dependencies=[Depends(two)])
    app.get("/a")(ok_handler)
    app.get("/b")(ok_handler)
    app.get("/own", dependencies=[Depends(two)])(ok_handler)
    app.get("/decorated")(fastapi.limit(TWO, store=store)(ok_handler))
    router.get("/tea")(ok_handler)
    app.include_router(router)
    plain = APIRouter(prefix="/included")
    plain.get("/tea")(ok_handler)
    app.include_router(plain, dependencies=[Depends(two)])
    assert statuses(app, "/a", "/a", "/b", "/b") == [200, 429, 200, 429]
    for path_ in ("/own", "/decorated", "/router/tea", "/included/tea"):
        assert statuses(app, *[path_] * 3) == [200, 200, 429], path_


async def ok_handler() -> str:
    return "ok"


def test_the_decorator_of_a_route(store):
    """`@limit` below the route limits it, async or not; parameters, dependencies and stacked limits work as without it."""
    app = FastAPI()
    fastapi.install(app)

    @app.get("/items/{item}")
    @fastapi.limit(TWO, store=store)
    @fastapi.limit("fixed window 3/h", store=store, key=lambda request: "all")
    async def item(item: int, q: Annotated[str, Depends(lambda: "q")], limit: int = 5) -> list[object]:
        """An item."""
        return [item, q, limit]

    @app.get("/plain")
    @fastapi.limit(ONE, store=store)
    def plain(request: Request) -> str:
        return request.url.path

    http = TestClient(app, client=("192.0.2.1", 50000))
    first = http.get("/items/7?limit=9")
    assert (first.json(), first.headers["x-ratelimit-remaining"]) == ([7, "q", 9], "1")
    assert first.headers["ratelimit-policy"].count(";q=") == 2
    assert statuses(app, "/items/8", "/items/9", "/plain", "/plain") == [200, 429, 200, 429]
    operation = app.openapi()["paths"]["/items/{item}"]["get"]
    assert [one["name"] for one in operation["parameters"]] == ["item", "limit"]
    assert operation["description"] == "An item."
    with pytest.raises(ConfigurationError, match="expected a function under @limit"):
        fastapi.limit("1/s")(5)  # type: ignore[type-var]


def test_the_decorator_of_a_websocket_route(store):
    """`@limit` limits the handshakes of a websocket."""
    app = FastAPI()

    @app.websocket("/talk")
    @fastapi.limit(ONE, store=store)
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    with TestClient(app).websocket_connect("/talk"):
        pass
    with pytest.raises(WebSocketDisconnect) as closed, TestClient(app).websocket_connect("/talk"):
        pass
    assert closed.value.code == 1013


def test_refusals_of_limited_routes_are_in_openapi(store):
    """After `install`, the description of each limited route has the 429; a route's own description of it stays."""
    app = FastAPI()
    fastapi.install(app)
    limited = [Depends(fastapi.RateLimit(ONE, store=store))]
    app.get("/free")(ok_handler)
    app.get("/limited", dependencies=limited)(ok_handler)
    app.get("/decorated")(fastapi.limit(ONE, store=store)(ok_handler))
    app.get("/own", dependencies=limited, responses={429: {"description": "mine"}})(ok_handler)
    router = APIRouter(prefix="/router")
    router.get("/tea", dependencies=limited)(ok_handler)
    app.include_router(router)
    described = {path: operations["get"]["responses"].get("429") for path, operations in app.openapi()["paths"].items()}
    ours = fastapi.REFUSAL_RESPONSES[429]
    assert described.pop("/own")["description"] == "mine"
    assert described == {"/free": None, "/limited": ours, "/decorated": ours, "/router/tea": ours}


# Shared limits ----------------------------------------------------------------------------------------------------------


def test_limits_of_one_name_are_one_without_a_store():
    """Several declarations of one name share a limit in memory too, as they do on a shared store."""
    app = FastAPI()
    app.get("/a", dependencies=[Depends(fastapi.RateLimit(TWO, name="shared fastapi"))])(ok_handler)
    app.get("/b", dependencies=[Depends(fastapi.RateLimit(TWO, name="shared fastapi"))])(ok_handler)
    routes = [Route(path, starlette.limit(TWO, name="shared starlette")(ok)) for path in ("/a", "/b")]
    views = Flask("shared")
    limits = flask.RateLimit(views)
    for name in ("a", "b"):
        views.get(f"/{name}", endpoint=name)(limits.limit(TWO, name="shared flask")(lambda: "ok"))
    with use_clock(ManualClock()):
        assert statuses(app, "/a", "/b", "/a") == [200, 200, 429]
        assert statuses(Starlette(routes=routes), "/a", "/b", "/a") == [200, 200, 429]
        assert flask_statuses(views, "/a", "/b", "/a") == [200, 200, 429]


def test_django_views_of_one_name_are_one():
    """The same for Django's views."""
    first, second = limit(TWO, name="shared")(view), limit(TWO, name="shared")(view)
    urls = Urls([path("a", first), path("b", second)])
    with override_settings(LIMITKEEPER={"STORE": MemoryStore(clock=ManualClock())}, MIDDLEWARE=[], ROOT_URLCONF=urls):
        assert [Client().get(path).status_code for path in ("/a", "/b", "/a")] == [200, 200, 429]
