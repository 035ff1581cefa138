"""Flask: nested blueprints, and tests and traps that inspect a refusal."""

from __future__ import annotations

from typing import ClassVar

import pytest
from flask import Blueprint, Flask, g, request
from flask.views import MethodView
from werkzeug.routing import BaseConverter

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.flask import RateLimit, RefusalException

ONE = "limits: [{name: api, key: ip, limit: token bucket 1/min burst 1}]"


@pytest.fixture
def gate(store: MemoryStore):
    return lambda policy=ONE: Gate(Policy.read(policy), store=store)


@pytest.fixture
def limits(store: MemoryStore) -> RateLimit:
    return RateLimit(store=store)


@pytest.fixture
def app() -> Flask:
    app = Flask(__name__)
    app.add_url_rule("/", view_func=lambda: "hello", endpoint="index")
    return app


def nested(limits: RateLimit, version: str) -> Blueprint:
    """A version of an interface with an admin part in it, as applications with several versions have them."""
    outer = Blueprint(version, f"{version}_of_tests", url_prefix=f"/{version}")
    admin = Blueprint("admin", f"{version}_admin_of_tests", url_prefix="/admin")
    admin.add_url_rule("/users", "users", lambda: "users")
    limits.limit("fixed window 1/min")(admin)
    outer.register_blueprint(admin)
    return outer


def test_blueprints_of_one_name_do_not_share(app, limits):
    """Two blueprints of one name, one in each version of an interface, are two limits."""
    limits.init_app(app)
    for version in ("v1", "v2"):
        app.register_blueprint(nested(limits, version))
    http = app.test_client()
    assert [http.get(f"/{version}/admin/users").status_code for version in ("v1", "v2", "v1")] == [200, 200, 429]


def test_an_exempt_blueprint_is_so_with_all_in_it(app, gate):
    """Exempting a blueprint exempts the blueprints in it."""
    limits = RateLimit(app, policy=gate())
    outer, inner = Blueprint("outer", __name__), Blueprint("inner", __name__)
    outer.add_url_rule("/outer", "one", lambda: "one")
    inner.add_url_rule("/inner", "one", lambda: "one")
    outer.register_blueprint(inner)
    app.register_blueprint(limits.exempt(outer))
    http = app.test_client()
    assert [http.get(path).status_code for path in ("/inner", "/outer", "/inner", "/outer", "/", "/")] == [200] * 5 + [429]


def test_a_test_can_look_at_a_refusal(app, gate):
    """`with client:` keeps the contexts of a refused request as of any other."""
    RateLimit(app, policy=gate())
    for status, allowed in ((200, True), (429, False)):
        with app.test_client() as http:
            assert http.get("/?q=tea").status_code == status
            assert (request.args["q"], g.limitkeeper.allowed) == ("tea", allowed)


def test_trapped_refusals(app, gate):
    """An application that traps HTTP exceptions, to see where they come from, sees the refusal itself."""
    app.config.update(TRAP_HTTP_EXCEPTIONS=True, TESTING=True)
    RateLimit(app, policy=gate())
    http = app.test_client()
    http.get("/")
    with pytest.raises(RefusalException):
        http.get("/")


def test_views_that_one_function_made_do_not_share(app, limits):
    """Views of one name, made by one function or of one class, are distinguished by their endpoints; under a name= they share."""
    limits.init_app(app)

    def made(word, **said):
        @limits.limit("fixed window 1/min", **said)
        def view():
            return word

        return view

    class Report(MethodView):
        decorators: ClassVar = [limits.limit("fixed window 1/min")]

        def __init__(self, kind):
            self.kind = kind

        def get(self):
            return self.kind

    for word in ("users", "orders"):
        app.add_url_rule(f"/{word}", word, made(word))
        app.add_url_rule(f"/shared/{word}", f"shared {word}", made(word, name="shared"))
        app.add_url_rule(f"/report/{word}", view_func=Report.as_view(f"report {word}", word))
    http = app.test_client()
    for where in ("", "/report"):
        assert [http.get(f"{where}/{word}").status_code for word in ("users", "orders", "users")] == [200, 200, 429]
    assert [http.get(f"/shared/{word}").status_code for word in ("users", "orders")] == [200, 429]


def test_a_key_from_the_path_is_the_value_that_flask_has_converted(app, gate):
    """Values that a converter takes for one value are one key: in a view's limit, and in a policy that is evaluated within
    Flask."""

    class Word(BaseConverter):
        def to_python(self, value: str) -> int:
            return {"seven": 7}.get(value) or int(value)

    app.url_map.converters["word"] = Word
    identify = "identify: {order: {path: order}}\n"
    site = identify + "limits: [{name: order, match: '/policy/{order}', key: order, limit: fixed window 1/min}]"
    limits = RateLimit(app, policy=gate(site), early=False)
    limited = limits.limit("fixed window 1/min", key="order", match="/view/{order}")(lambda order: str(order))
    app.add_url_rule("/view/<word:order>", "view", limited)
    app.add_url_rule("/policy/<word:order>", "policy", lambda order: str(order))
    http = app.test_client()
    for route in ("view", "policy"):
        assert [http.get(f"/{route}/{value}").status_code for value in ("seven", "7", "07", "+7", "8")] == [
            200,
            429,
            429,
            429,
            200,
        ]
