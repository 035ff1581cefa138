"""The Flask extension: order, error handlers, limits of single views, and what a refusal does not reach."""

from __future__ import annotations

import re
import sqlite3
from io import BytesIO

import pytest
from flask import Blueprint, Flask, Response, abort, g, jsonify, request, send_file, session, stream_with_context
from flask.sessions import SecureCookieSessionInterface
from flask.views import MethodView

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.flask import RateLimit, RefusalException

ONE = "limits: [{name: api, key: ip, limit: token bucket 1/min burst 1}]"


@pytest.fixture
def gate(store: MemoryStore):
    return lambda policy=ONE, **more: Gate(Policy.read(policy), store=store, **more)


@pytest.fixture
def app() -> Flask:
    app = Flask("shop")
    app.secret_key = "of the tests"
    app.add_url_rule("/", view_func=lambda: "hello", endpoint="index")
    return app


@pytest.fixture
def limits(store: MemoryStore) -> RateLimit:
    """The extension without a policy: only views with limits of their own are limited."""
    return RateLimit(store=store)


# Order


def test_a_refusal_takes_no_connection(app, gate, tmp_path):
    """A refused request runs no before_request function, opens no session and calls no view: the pool is not touched."""
    taken = []

    class DatabaseSessions(SecureCookieSessionInterface):
        def open_session(self, app, request):
            taken.append(("session", sqlite3.connect(tmp_path / "sessions.db")))
            return super().open_session(app, request)

    app.session_interface = DatabaseSessions()

    @app.before_request
    def connect():  # registered before the extension, and still after it
        g.db = sqlite3.connect(tmp_path / "shop.db")
        taken.append(("database", g.db))

    RateLimit(app, policy=gate())

    @app.get("/orders")
    def orders():
        return jsonify(g.db.execute("select 1").fetchall())

    client = app.test_client()
    assert client.get("/orders").json == [[1]]
    assert [who for who, _ in taken] == ["session", "database"]
    assert [client.get("/orders").status_code for _ in range(5)] == [429] * 5
    assert len(taken) == 2
    for _, connection in taken:
        connection.close()


def test_a_response_counts_once_when_an_after_request_function_fails(app, gate):
    """Flask calls those of the request again for the response to the error."""
    counted = gate()
    RateLimit(app, policy=counted, early=False)
    app.after_request(lambda response: 1 // 0)
    assert app.test_client().get("/").status_code == 500
    assert sum(counted.snapshot().rules[0].statuses.values()) == 1


def test_a_refusal_is_dressed_like_any_answer(app, gate):
    """after_request functions (CORS headers, logs) and teardown functions run for a refusal too."""
    torn_down = []
    RateLimit(app, policy=gate())

    @app.after_request
    def cors(response):
        response.headers["Access-Control-Allow-Origin"] = "*"
        return response

    @app.teardown_request
    def teardown(error):
        torn_down.append(error)

    client = app.test_client()
    client.get("/")
    refused = client.get("/")
    assert refused.status_code == 429
    assert refused.headers["Access-Control-Allow-Origin"] == "*"
    assert torn_down == [None, None]


def test_the_decision_is_at_hand(app, gate):
    """`g.limitkeeper` is the evaluation, in before_request functions and views; None where the view is exempt."""
    limits = RateLimit(app, policy=gate(ONE.replace("burst 1", "burst 9")))
    seen = []
    app.before_request(lambda: seen.append(g.limitkeeper))

    @app.get("/left")
    def left():
        return str(g.limitkeeper.decision.remaining)

    @app.get("/free")
    @limits.exempt
    def free():
        return str(g.limitkeeper)

    client = app.test_client()
    assert client.get("/left").text == "8"
    assert client.get("/left").text == "7"
    assert client.get("/free").text == "None"
    assert [evaluation is None for evaluation in seen] == [False, False, True]


def test_late_identities_may_use_the_session(app, gate):
    """`early=False` decides within the request, so that a callable can read the session or values set by before_request."""

    def user_of(facts):
        return session.get("user") or g.get("user")

    policy = Policy.of(
        identify={"user": {"call": user_of}}, limits=[{"name": "api", "key": "user", "limit": "token bucket 1/min burst 1"}]
    )

    @app.before_request
    def bring():
        g.user = request.headers.get("X-User")

    RateLimit(app, policy=Gate(policy, store=gate().store), early=False)
    client, other = app.test_client(), app.test_client()
    with client.session_transaction() as stored:
        stored["user"] = "ada"
    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    assert [other.get("/", headers={"X-User": "ben"}).status_code for _ in range(2)] == [200, 429]


def test_late_refusals_leave_later_functions_alone(app, gate):
    """Decided late, the policy has the position of init_app: before_request functions that come later do not run."""
    ran = []
    app.before_request(lambda: ran.append("before"))
    RateLimit(app, policy=gate(), early=False)
    app.before_request(lambda: ran.append("after"))
    client = app.test_client()
    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    assert ran == ["before", "after", "before"]


# Responses


def test_an_error_handler_may_answer(app, gate):
    """`errorhandler(429)` makes the response from the evaluation; the fields are on it all the same."""
    RateLimit(app, policy=gate())

    @app.errorhandler(429)
    def too_many(error):
        assert isinstance(error, RefusalException)
        assert g.limitkeeper is error.evaluation
        return {"wait": error.retry_after, "said": error.description}, 429

    client = app.test_client()
    client.get("/")
    refused = client.get("/")
    assert refused.json == {"wait": 60, "said": "Too many requests. Retry after 60s."}
    assert refused.headers["Retry-After"] == "60"
    assert refused.headers["X-RateLimit-Remaining"] == "0"


def test_every_status_finds_its_handler(app, gate):
    """A rule with a status of its own is handled by the handlers of that status."""
    RateLimit(app, policy=gate(ONE.replace("burst 1", "burst 1, status: 503")))
    app.errorhandler(503)(lambda error: ("busy", 503))
    client = app.test_client()
    client.get("/")
    assert client.get("/").text == "busy"


def test_without_a_handler_the_body_is_ours(app, gate):
    """The default body is the short JSON, also where the application answers other errors in HTML."""
    RateLimit(app, policy=gate())
    client = app.test_client()
    client.get("/")
    refused = client.get("/", headers={"Accept": "text/html"})
    assert refused.content_type == "application/json"
    assert refused.json == {"code": "RATE_LIMITED", "message": "Too many requests. Retry after 60s."}


def test_a_handler_that_raises_is_a_500(app, gate):
    """An error handler of the application that fails is answered like any failure."""
    RateLimit(app, policy=gate())
    app.logger.disabled = True

    @app.errorhandler(429)
    def broken(error):
        raise RuntimeError("broken")

    client = app.test_client()
    client.get("/")
    assert client.get("/").status_code == 500


# Construction


def test_a_factory_finds_its_policy_in_the_configuration(tmp_path):
    """init_app reads LIMITKEEPER_POLICY, beside the application, and LIMITKEEPER_STORE."""
    (tmp_path / "limitkeeper.yaml").write_text(ONE)
    limits = RateLimit()
    app = Flask("shop", root_path=str(tmp_path))
    app.config.update(LIMITKEEPER_POLICY="limitkeeper.yaml", LIMITKEEPER_STORE=f"shared://{tmp_path}/limits")
    limits.init_app(app)
    app.add_url_rule("/", view_func=lambda: "hello")
    client = app.test_client()
    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    with app.app_context():
        assert limits.gate.snapshot().refused == 1
        limits.gate.close()
    assert (tmp_path / "limits").exists()


def test_a_second_extension_is_refused(app, gate):
    """Twice would count every request twice."""
    RateLimit(app, policy=gate())
    with pytest.raises(ConfigurationError, match="twice"):
        RateLimit(app, policy=gate())


def test_a_view_without_an_extension_is_an_error_with_the_remedy(app, limits):
    """A limited view in an application without the extension is an error that names the remedy."""
    app.testing = True
    app.add_url_rule("/limited", view_func=limits.limit("1/min")(lambda: "x"), endpoint="limited")
    with pytest.raises(ConfigurationError, match="init_app"):
        app.test_client().get("/limited")


def test_a_missing_gate_is_an_error(app, limits):
    """Without a policy there is no gate to inspect."""
    limits.init_app(app)
    with app.app_context(), pytest.raises(ConfigurationError, match="LIMITKEEPER_POLICY"):
        limits.gate


def test_a_mistake_is_an_error_at_the_decorator(limits):
    """A limit that can't be read is an error where the decorator is written, not at the first request."""
    with pytest.raises(ConfigurationError):
        limits.limit("5/parsec")(lambda: "x")


# Views


def statuses(app, path, times=3, **more):
    client = app.test_client()
    return [client.get(path, **more).status_code for _ in range(times)]


def test_a_view_is_limited_per_client(app, limits):
    """A view's own limit counts for each client alone, and for no other view."""
    limits.init_app(app)

    @app.get("/a")
    @limits.limit("token bucket 1/min burst 2")
    def a():
        return str(g.limitkeeper.decision.remaining)

    @app.get("/b")
    @limits.limit("token bucket 1/min burst 2")
    def b():
        return "b"

    assert statuses(app, "/a") == [200, 200, 429]
    assert statuses(app, "/b") == [200, 200, 429]
    assert statuses(app, "/a", environ_base={"REMOTE_ADDR": "192.0.2.7"}) == [200, 200, 429]


def test_a_views_answer_carries_the_fields(app, limits):
    """Successes have what is left, refusals the retry time, both with the view's name."""
    limits.init_app(app)

    @app.get("/a")
    @limits.limit("5/s burst 10")
    def a():
        return "a"

    client = app.test_client()
    answer = client.get("/a")
    assert answer.headers["X-RateLimit-Remaining"] == "9"
    assert re.fullmatch(r'"a-[0-9a-f]{8}";q=10;w=2', answer.headers["RateLimit-Policy"])
    for _ in range(9):
        client.get("/a")
    refused = client.get("/a")
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "1"
    assert refused.headers["Cache-Control"] == "no-store"
    assert refused.json["code"] == "RATE_LIMITED"


def test_async_views_are_limited(app, limits):
    """A coroutine is limited like a function."""
    limits.init_app(app)

    @app.get("/a")
    @limits.limit("token bucket 1/min burst 1")
    async def a():
        return "a"

    assert statuses(app, "/a", 2) == [200, 429]


def test_class_based_views_have_limits_of_their_own(app, limits):
    """Two classes that are limited alike do not share."""
    limits.init_app(app)

    class First(MethodView):
        decorators = (limits.limit("token bucket 1/min burst 1"),)

        def get(self):
            return "first"

    class Second(First):
        async def get(self):
            return "second"

    app.add_url_rule("/first", view_func=First.as_view("first"))
    app.add_url_rule("/second", view_func=Second.as_view("second"))
    assert statuses(app, "/first", 2) == [200, 429]
    assert statuses(app, "/second", 2) == [200, 429]


def test_several_limits_of_a_view_all_count(app, limits):
    """Decorators can be stacked: each counts for itself, all are named, the tightest decides."""
    limits.init_app(app)

    @app.get("/a")
    @limits.limit("fixed window 10/h")
    @limits.limit("fixed window 3/min")
    def a():
        return "a"

    answer = app.test_client().get("/a")
    assert answer.headers["X-RateLimit-Limit"] == "3"
    assert answer.headers["RateLimit"].count(";r=") == 2
    assert statuses(app, "/a") == [200, 200, 429]


def test_views_under_one_name_share(app):
    """Views that are limited under the same name share one limit, without a common store in the arguments."""
    limits = RateLimit(app)
    for path in ("/a", "/b"):
        view = limits.limit("token bucket 1/min burst 2", name="reports")(lambda: "report")
        app.add_url_rule(path, view_func=view, endpoint=path.strip("/"))
    assert [statuses(app, path, 1) for path in ("/a", "/b", "/a")] == [[200], [200], [429]]


def test_the_policy_and_the_view_are_both_named(app, gate):
    """Where the policy and the view both limit, both are named, and the tighter one decides."""
    limits = RateLimit(app, policy=gate("limits: [{name: site, key: ip, limit: fixed window 2/h}]"))

    @app.get("/a")
    @limits.limit("fixed window 100/min")
    def a():
        return "a"

    answer = app.test_client().get("/a")
    assert answer.headers["X-RateLimit-Limit"] == "2"
    assert answer.headers["RateLimit-Policy"].startswith('"site";q=2;w=3600, "')
    assert len(answer.headers.getlist("RateLimit")) == 1


def test_keys_are_callables_or_identity_names(app, gate):
    """A view's key is a callable given the request, or identities of the site's policy; without a value: the address."""
    policy = "identify: {user: {header: X-User}}\nlimits: [{name: site, key: ip, limit: token bucket 1/s burst 1000}]"
    limits = RateLimit(app, policy=gate(policy))

    @app.get("/words")
    @limits.limit("token bucket 1/min burst 1", key="user | ip")
    def texts():
        return "a"

    @app.get("/called")
    @limits.limit("token bucket 1/min burst 1", key=lambda request: request.args.get("id", type=int))
    def called():
        return "a"

    for path in ("/words", "/called?id=1", "/called?id=2", "/called"):
        headers = {"X-User": "ada"} if path == "/words" else {}
        assert statuses(app, path, 2, headers=headers) == [200, 429]
    assert statuses(app, "/words", 2) == [200, 429]


def test_a_blueprints_views_share_a_limit(app, limits):
    """A limit of a blueprint is one for all its views; a view may have another one on top."""
    limits.init_app(app)
    blueprint = Blueprint("orders", "orders")
    limits.limit("token bucket 1/min burst 3")(blueprint)
    blueprint.add_url_rule("/list", view_func=lambda: "list", endpoint="list")

    @blueprint.get("/new")
    @limits.limit("token bucket 1/min burst 1")
    def new():
        return "new"

    app.register_blueprint(blueprint, url_prefix="/orders")
    assert statuses(app, "/orders/new", 2) == [200, 429]
    assert statuses(app, "/orders/list", 2) == [200, 429]
    assert statuses(app, "/", 2) == [200, 200]


def test_exempt_views_and_blueprints_are_not_limited_by_the_policy(app, gate):
    """An exempt view is outside of the policy, whatever its path; limits of its own stay."""
    limits = RateLimit(app, policy=gate())
    blueprint = limits.exempt(Blueprint("health", "health"))
    blueprint.add_url_rule("/live", view_func=lambda: "ok", endpoint="live")
    app.register_blueprint(blueprint)

    @app.get("/free/<name>")
    @limits.exempt
    def free(name):
        return name

    @app.get("/own")
    @limits.exempt
    @limits.limit("token bucket 1/min burst 2")
    def own():
        return "own"

    assert statuses(app, "/live") == [200, 200, 200]
    assert statuses(app, "/free/x") == [200, 200, 200]
    assert statuses(app, "/own") == [200, 200, 429]
    assert statuses(app, "/", 2) == [200, 429]


def test_exempt_views_stay_so_when_decided_late(app, gate):
    """The same where the policy is evaluated within the request."""
    limits = RateLimit(app, policy=gate(), early=False)
    app.add_url_rule("/live", view_func=limits.exempt(lambda: "ok"), endpoint="live")
    assert statuses(app, "/live") == [200, 200, 200]
    assert statuses(app, "/", 2) == [200, 429]


def test_two_applications_do_not_share(limits):
    """One extension and one view in two applications: each counts for itself, unless a store was given to both."""
    views = RateLimit()
    limited = views.limit("token bucket 1/min burst 1")(lambda: "x")
    for name in ("first", "second"):
        app = Flask(name)
        views.init_app(app)
        app.add_url_rule("/", view_func=limited, endpoint="limited")
        assert statuses(app, "/", 2) == [200, 429]


def test_a_view_may_degrade(app, limits):
    """A view's limit may name a cheaper view, which is called without arguments and finds everything in `request`."""
    limits = RateLimit(app, store=MemoryStore(), handlers={"cached": lambda: f"cached {request.view_args['n']}"})

    @app.get("/a/<int:n>")
    @limits.limit("token bucket 1/min burst 1", on_refusal="degrade cached")
    def a(n):
        return f"fresh {n}"

    client = app.test_client()
    assert [client.get("/a/7").text for _ in range(2)] == ["fresh 7", "cached 7"]


# Settling


def test_a_response_that_is_refused_for_its_size_is_closed(app, store):
    """Work that the view leaves to the end of its response is done when the refusal has been sent."""
    closed = []

    @app.get("/large")
    @RateLimit(app, store=store).limit("fixed window 1000/min", cost={"response": "1B", "estimate": 1})
    def large():
        response = Response(iter([b"x" * 1001]), headers={"Content-Length": "1001"})
        response.call_on_close(lambda: closed.append("large"))
        return response

    with app.test_client().get("/large") as answer:  # and closes it, as servers do
        assert answer.status_code == 429
    assert closed == ["large"]


@pytest.fixture
def shop(app, store):
    """Views whose limits are settled by outcome and by size."""
    limits = RateLimit(app, store=store)
    failures = {"limit": "fixed window 9/min", "charge": {"status": ["4xx", "5xx"]}}
    sizes = {"limit": "fixed window 1000/min", "cost": {"response": "1B", "estimate": 1}}

    @app.get("/fails/<int:status>")
    @limits.limit(**failures)
    def fails(status):
        return abort(status) if status != 200 else "fine"

    @app.get("/raises")
    @limits.limit(**failures)
    def raises():
        raise ValueError("raised")

    @app.get("/bytes")
    @limits.limit(**sizes)
    def whole():
        return "x" * 10

    @app.get("/stream")
    @limits.limit(**sizes)
    def stream():
        return Response(stream_with_context(piece for piece in ("four", "four")))

    @app.get("/file")
    @limits.limit(**sizes)
    def file():
        return send_file(BytesIO(b"x" * 20), mimetype="text/plain")

    app.logger.disabled = True
    return app


def tally_of(app, name):
    """The counter of the view's limit."""
    gates = app.extensions["limitkeeper"]._gates
    return next(gate.snapshot().rules[0] for (_, own), gate in gates.items() if own.startswith(f"{name}-"))


def spent(app, path):
    """The units spent for a request to this path, its own cost included."""
    answer = app.test_client().get(path)
    limit, left = int(answer.headers["X-RateLimit-Limit"]), int(answer.headers["X-RateLimit-Remaining"])
    answer.close()
    return limit - left


def test_outcomes_that_do_not_count_are_given_back(shop):
    """Only failures count: successes are given back when they are known."""
    client = shop.test_client()
    for _ in range(20):
        assert client.get("/fails/200").status_code == 200
    assert client.get("/fails/404").status_code == 404
    assert spent(shop, "/fails/200") == 2


def test_a_view_that_raises_is_a_failure(shop):
    """An exception is the outcome 500, whether Flask makes a response of it or, in tests, lets it through."""
    assert shop.test_client().get("/raises").status_code == 500
    shop.testing = True
    with pytest.raises(ValueError, match="raised"):
        shop.test_client().get("/raises")
    shop.testing = False
    counted = tally_of(shop, "raises")
    assert (counted.passed, counted.given_back, counted.statuses) == (2, 0, {"5xx": 2})


def test_responses_cost_their_size(shop):
    """A complete response is settled at once, a streamed one when it has been sent."""
    assert spent(shop, "/bytes") == 10
    assert spent(shop, "/bytes") == 20
    client = shop.test_client()
    assert client.get("/stream").text == "fourfour"
    assert spent(shop, "/stream") == 9


def test_a_file_costs_its_length_and_stays_the_servers(shop):
    """A file is charged by its announced length, and passed on so that the server can send it in its own way."""
    answer = shop.test_client().get("/file")
    assert answer.data == b"x" * 20
    answer.close()
    assert spent(shop, "/file") == 40


def test_a_stream_that_is_given_up_is_settled(shop):
    """A client that disconnects in the middle is charged for what it got."""
    answer = shop.test_client().get("/stream", buffered=False)
    chunks = answer.iter_encoded()
    assert next(chunks) == b"four"
    answer.close()
    assert spent(shop, "/stream") == 5


def test_long_names_fit(app, limits):
    """However deeply nested a view's definition, its limit has a name that fits, and the same one every time."""

    def a_view_with_a_name_that_nobody_would_want_to_read_in_a_header_field_of_a_response():
        return "x"

    limits.init_app(app)
    app.add_url_rule(
        "/long",
        view_func=limits.limit("token bucket 1/min burst 1")(
            a_view_with_a_name_that_nobody_would_want_to_read_in_a_header_field_of_a_response
        ),
    )
    assert statuses(app, "/long", 2) == [200, 429]
    assert max(len(name) for _, name in app.extensions["limitkeeper"]._gates) <= 64


def test_an_error_costs_its_estimate(store):
    """Flask makes the response to an exception of a view, whose size is not known when its request ends."""
    app = Flask("shop")
    limits = RateLimit(app, store=store)

    @app.get("/<kind>")
    @limits.limit("fixed window 1000/h", name="bytes", cost={"response": "1B", "estimate": 7})
    def view(kind):
        return {"fine": ""}[kind]

    client = app.test_client()
    assert client.get("/fails").status_code == 500
    assert client.get("/fine").headers["X-RateLimit-Remaining"] == str(1000 - 7 - 7)


def test_a_limit_in_the_place_of_the_application_is_refused_with_the_remedy():
    """`RateLimit("5/s")` names `@limits.limit`."""
    with pytest.raises(ConfigurationError, match=r"expected a Flask application, got .5/s.; write RateLimit\(app\)"):
        RateLimit("5/s")


def test_a_response_that_is_returned_twice_has_the_fields_of_each_request(app, limits):
    """One object for all requests: no client is sent the quota of another."""
    same = Response("ok", headers={"X-Own": "kept"})
    limits.init_app(app)
    app.get("/same")(limits.limit("fixed window 9/min", name="same")(lambda: same))
    peers = ("192.0.2.1", "192.0.2.1", "192.0.2.2")
    answers = [app.test_client().get("/same", environ_base={"REMOTE_ADDR": peer}).headers for peer in peers]
    assert [(one["X-RateLimit-Remaining"], one["X-Own"]) for one in answers] == [("8", "kept"), ("7", "kept"), ("8", "kept")]
    assert "X-RateLimit-Remaining" not in same.headers
