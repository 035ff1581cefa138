"""Limits of single routes in every framework: trusted proxies, shared connections, names that clients may see, and keys."""

from __future__ import annotations

import re

import pytest
from fastapi import Depends, FastAPI, Request, Response
from flask import Blueprint, Flask
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette_client import TestClient

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.identity.client_ip import ClientIp
from limitkeeper.stores import store_from_url
from limitkeeper.web import handler_limit
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.fastapi import RateLimit, install
from limitkeeper.web.flask import RateLimit as FlaskLimits
from limitkeeper.web.handler_limit import HandlerGates, shared_store
from limitkeeper.web.starlette import limit

PROXIES = {"trusted_proxies": ["10.0.0.0/8"]}
RULE = "fixed window 2/h"


def nothing() -> dict[str, str]:
    return {}


def fastapi_app(**options):
    app = FastAPI()

    @app.get("/", dependencies=[Depends(RateLimit(RULE, **options))])
    async def home() -> dict[str, str]:
        return {}

    return TestClient(app, client=("10.0.0.2", 50_000))


def starlette_app(**options):
    @limit(RULE, **options)
    async def home(request):
        return JSONResponse({})

    return TestClient(Starlette(routes=[Route("/", home)]), client=("10.0.0.2", 50_000))


class FlaskClient:
    def __init__(self, app: Flask) -> None:
        self.client = app.test_client()

    def get(self, path: str, headers: dict[str, str] | None = None):
        return self.client.get(path, headers=headers, environ_base={"REMOTE_ADDR": "10.0.0.2"})


def flask_app(**options):
    app = Flask("shop")
    limits = FlaskLimits(app, **options)

    @app.get("/")
    @limits.limit(RULE)
    def home():
        return {}

    return FlaskClient(app)


APPS = {"fastapi": fastapi_app, "starlette": starlette_app, "flask": flask_app}


def asked(app, *forwarded: str) -> list[int]:
    return [app.get("/", headers={"X-Forwarded-For": one}).status_code for one in forwarded]


# Trusted proxies


@pytest.mark.parametrize("framework", APPS)
@pytest.mark.parametrize("given", [PROXIES, ClientIp(("10.0.0.0/8",))], ids=["fields", "identity"])
def test_clients_behind_a_trusted_proxy_are_counted_apart(framework, given):
    """The address that the proxy reports is the client; text that the client wrote further left changes nothing."""
    app = APPS[framework](client_ip=given)
    assert asked(app, "203.0.113.1", "203.0.113.1", "6.6.6.6, 203.0.113.1") == [200, 200, 429]
    assert asked(app, "203.0.113.2", "203.0.113.2") == [200, 200]


@pytest.mark.parametrize("framework", APPS)
def test_without_trusted_proxies_no_header_counts(framework):
    """Any client could forge its address."""
    assert asked(APPS[framework](), "203.0.113.1", "203.0.113.2", "203.0.113.3") == [200, 200, 429]


@pytest.mark.parametrize("framework", APPS)
def test_the_proxies_are_checked_where_the_limit_is_declared(framework):
    """A network that trusts every client is an error, with the remedy."""
    with pytest.raises(ConfigurationError, match="any client could forge its address"):
        APPS[framework](client_ip={"trusted_proxies": ["0.0.0.0/0"]})


def test_a_route_limit_uses_the_proxies_of_the_middleware(clock):
    """Where RateLimitMiddleware has evaluated the request, its policy defines the client."""
    identify = {"ip": {"client_ip": PROXIES}}
    policy = Policy.of(identify=identify, limits=[{"name": "site", "key": "ip", "limit": "fixed window 100/h"}])
    app = FastAPI()

    @app.get("/", dependencies=[Depends(RateLimit(RULE)), Depends(RateLimit("fixed window 3/h"))])
    async def home() -> dict[str, str]:
        return {}

    app.add_middleware(RateLimitMiddleware, policy=policy)
    client = TestClient(app, client=("10.0.0.2", 50_000))
    assert asked(client, "203.0.113.1", "203.0.113.1", "203.0.113.1", "203.0.113.2") == [200, 200, 429, 200]


@pytest.mark.parametrize("framework", ["fastapi", "starlette"])
def test_every_route_limit_uses_the_proxies_where_no_rule_applies(framework):
    """Also the second one of a route, which finds the first one's evaluation in the scope."""
    policy = Policy.of(identify={"ip": {"client_ip": PROXIES}}, limits=[{"name": "other", "match": "/other", "limit": "1/h"}])
    app = FastAPI()
    limits = [Depends(RateLimit("fixed window 9/h")), Depends(RateLimit(RULE))]
    app.get("/", dependencies=limits)(nothing)
    if framework == "starlette":
        home = limit("fixed window 9/h")(limit(RULE)(lambda request: JSONResponse({})))
        app = Starlette(routes=[Route("/", home)])
    app.add_middleware(RateLimitMiddleware, policy=policy)
    client = TestClient(app, client=("10.0.0.2", 50_000))
    assert asked(client, "203.0.113.1", "203.0.113.1", "203.0.113.1", "203.0.113.2") == [200, 200, 429, 200]


def test_a_rule_that_a_rewritten_path_would_match_was_not_evaluated(store):
    """Where code between the middleware and the route changes the path, the rule that the route names is evaluated there."""
    gate = Gate(Policy.of(limits=[{"name": "report", "match": "/report", "key": "ip", "limit": RULE}]), store=store)
    routes = Starlette(routes=[Route("/report", limit(policy=gate, rule="report")(lambda request: JSONResponse({})))])

    async def without_version(scope, receive, send):
        await routes({**scope, "path": scope["path"].removeprefix("/v1")}, receive, send)

    client = TestClient(RateLimitMiddleware(without_version, gate), client=("192.0.2.1", 50_000))
    assert [client.get(path).status_code for path in ("/report", "/v1/report", "/v1/report", "/report")] == [200, 200, 429, 429]


def test_a_wrong_limit_is_named_as_it_was_declared():
    """An error of a handler's limit names the application's text, not a place in a policy that it does not have."""
    unit = "limit: '5/sek': unknown unit 'sek'; use one of"
    with pytest.raises(ConfigurationError, match=rf"^RateLimit\('5/sek'\): {unit}"):
        RateLimit("5/sek")
    with pytest.raises(ConfigurationError, match=rf"^@limit\('5/sek'\): {unit}"):
        limit("5/sek")
    with pytest.raises(ConfigurationError, match=rf"^@limit\('5/sek'\): {unit}"):
        FlaskLimits(Flask("shop")).limit("5/sek")(nothing)
    with pytest.raises(ConfigurationError, match=r"^RateLimit\('5/s'\): key: unknown identity 'usr'"):
        RateLimit("5/s", key="usr | ip")


def test_where_a_policy_has_the_address_it_is_written_there():
    """Two places for one setting would contradict each other."""
    policy = Policy.of(limits=[{"name": "site", "key": "ip", "limit": "5/s"}])
    with pytest.raises(ConfigurationError, match=r"client_ip.*policy"):
        RateLimit(policy=policy, rule="site", client_ip=PROXIES)
    with pytest.raises(ConfigurationError, match=r"client_ip.*policy"):
        FlaskLimits(Flask("shop"), policy=policy, client_ip=PROXIES)


# Connections


def connections(valkey) -> int:
    return sum(client["lib-name"] != "redis-py" for client in valkey.client().client_list())


def test_thirty_routes_of_one_url_share_one_connection(valkey, monkeypatch):
    """One for each event loop, and one of the thread that reads overrides; the limits themselves stay apart."""
    monkeypatch.setattr(handler_limit, "DEFAULTS", Policy.of(budget="5s"))  # the machine may be busy
    app = FastAPI()
    for n in range(30):
        app.get(f"/{n}", dependencies=[Depends(RateLimit(RULE, store=valkey.url))])(nothing)
    before = connections(valkey)
    with TestClient(app) as client:
        for n in range(30):
            assert [client.get(f"/{n}").status_code for _ in range(3)] == [200, 200, 429]
        assert 1 <= connections(valkey) - before <= 2


def test_limits_of_one_url_share_store_and_guard():
    """One breaker counts the failures of a store that thirty limits use; another URL is another store."""
    url = "redis://127.0.0.1:1/0?timeout=1s"
    limits = [RateLimit("5/s", store=url) for _ in range(30)]
    gates = {id(one._gates.gate_for(one._limit, "x").store) for one in limits}
    assert gates == {id(shared_store(url))}
    assert shared_store("redis://127.0.0.1:1/1") is not shared_store(url)
    gates = HandlerGates(None, store_from_url(url))
    assert len({id(gates.gate_for(one._limit, str(n)).store) for n, one in enumerate(limits)}) == 1


def starlette_rule(policy, store):
    @limit(policy=policy, rule="checkout", store=store)
    async def home(request):
        return JSONResponse({})

    return Starlette(routes=[Route("/", home)])


def fastapi_rule(policy, store):
    app = FastAPI()
    app.get("/", dependencies=[Depends(RateLimit(policy=policy, rule="checkout", store=store))])(nothing)
    return app


def test_limits_that_name_rules_of_one_policy_share_its_gate():
    """Thirty routes under one rule of one Policy spend one limit, on one store."""
    policy = Policy.of(limits=[{"name": "checkout", "key": "ip", "limit": RULE}])
    app = FastAPI()
    for n in range(30):
        app.get(f"/{n}", dependencies=[Depends(RateLimit(policy=policy, rule="checkout"))])(nothing)
    client = TestClient(app)
    assert [client.get(f"/{n}").status_code for n in range(4)] == [200, 200, 429, 429]


@pytest.mark.parametrize("declare", [starlette_rule, fastapi_rule])
def test_a_policy_that_middleware_and_route_share_is_charged_once(declare, store):
    """Also where both were given the Policy, not one gate of it, on one store."""
    policy = Policy.of(limits=[{"name": "checkout", "key": "ip", "limit": RULE}])
    client = TestClient(RateLimitMiddleware(declare(policy, store), policy, store=store))
    assert [client.get("/").status_code for _ in range(3)] == [200, 200, 429]


# Names


def test_no_field_names_a_module():
    """Fields and bodies of responses have the handler's own name and a hash, which differs for handlers of the same name."""
    module = __name__.rpartition(".")[2]
    flask = Flask("shop")
    limits = FlaskLimits(flask)
    blue = limits.limit(RULE)(Blueprint("orders", __name__, url_prefix="/orders"))

    @blue.get("/")
    @limits.limit(RULE, problem=True)
    def home():
        return {}

    flask.register_blueprint(blue)
    client = FlaskClient(flask)
    seen = [fastapi_app().get("/"), starlette_app().get("/"), *[client.get("/orders/") for _ in range(3)]]
    for answer in seen:
        assert module not in str(answer.headers)
        assert module not in answer.text
    names = {tuple(re.findall(r'"([^"]+)"', one.headers["RateLimit-Policy"])) for one in seen[:3]}
    assert len(names) == 3
    assert all(re.fullmatch(r"(home|blueprint orders)-[0-9a-f]{8}", name) for each in names for name in each)


def test_a_name_of_your_own_stays():
    """`name=` is the name that clients see."""
    assert starlette_app(name="checkout").get("/").headers["RateLimit-Policy"].startswith('"checkout";')


# Keys of rules that a route names


@pytest.fixture
def gate(clock):
    policy = "limits: [{name: api, match: GET /none, key: ip, limit: fixed window 2/h}, {name: site, key: ip, limit: 5/s}]"
    return Gate(Policy.read(policy), store=MemoryStore(clock=clock))


@pytest.mark.parametrize("middleware", [False, True])
def test_check_uses_the_key_that_it_is_given(gate, middleware):
    """The rule counts by the key of the call: not by its own, and not with the middleware's count."""
    app = FastAPI()
    install(app)
    by_rule = RateLimit(policy=gate, rule="site" if middleware else "api")

    @app.get("/{user}")
    async def home(user: str, request: Request) -> dict[str, str]:
        await by_rule.check(request, key=user)
        return {}

    if middleware:
        app.add_middleware(RateLimitMiddleware, policy=gate)
    client = TestClient(app)
    if middleware:
        client.get("/ann")
        counts = {rule.name: rule.passed for rule in gate.snapshot().rules}
        assert counts == {"api": 0, "site": 2}  # once by address, once by the key
        return
    assert [client.get(f"/{user}").status_code for user in ("ann", "ann", "ann", "bob")] == [200, 200, 429, 200]
    assert [(rule.passed, rule.refused) for rule in gate.snapshot().rules] == [(3, 1), (0, 0)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_callable_key_of_a_named_rule_counts(gate, is_async):
    """A rule that a route names with key= counts by it; without a value, by the rule's own key."""

    async def awaited(request):
        return request.query_params.get("user")

    def called(request):
        return request.query_params.get("user")

    app = FastAPI()
    app.get("/", dependencies=[Depends(RateLimit(policy=gate, rule="api", key=awaited if is_async else called))])(nothing)
    client = TestClient(app, client=("192.0.2.1", 1))
    statuses = [client.get("/", params={"user": user} if user else {}).status_code for user in "aaabb"]
    assert statuses == [200, 200, 429, 200, 200]
    assert [client.get("/").status_code for _ in range(3)] == [200, 200, 429]


def test_a_long_key_is_hashed(gate):
    """Values that an application passes on from its client do not grow the store."""
    app = FastAPI()
    by_rule = RateLimit(policy=gate, rule="api")
    seen: list[str] = []

    @app.get("/")
    async def home(request: Request) -> dict[str, str]:
        evaluation = await by_rule.check(request, key="x" * 100_000)
        seen.extend(evaluation.keys)
        return {}

    TestClient(app).get("/")
    assert [len(key) for key in seen] == [71]


@pytest.mark.parametrize("options", [{"cost": 5}, {"name": "x"}, {"key": "user | ip"}, {"message": "no"}])
def test_options_of_a_named_rule_belong_to_the_policy(gate, options):
    """An option of the policy can't be repeated on the route, where it would be ignored."""
    with pytest.raises(ConfigurationError, match="belongs to the policy"):
        RateLimit(policy=gate, rule="api", **options)


# Fields of the handler


@pytest.mark.parametrize("inner", [False, True])
def test_install_keeps_the_handlers_fields(inner):
    """A handler's own cache rule and quota stay, and its lists are joined with ours; each field comes once."""
    app = FastAPI()
    if inner:  # the middleware within has added its fields before
        policy = Policy.of(limits=[{"name": "site", "key": "ip", "limit": "fixed window 100/h"}])
        app.add_middleware(RateLimitMiddleware, policy=policy)
    install(app)

    @app.get("/own", dependencies=[Depends(RateLimit(RULE))])
    async def own() -> JSONResponse:
        headers = {
            "Cache-Control": "max-age=60",
            "Access-Control-Expose-Headers": "X-Total",
            "Vary": "Accept",
            "X-RateLimit-Limit": "7",
            "Retry-After": "3",
        }
        return JSONResponse({}, headers=headers)

    @app.get("/none", dependencies=[Depends(RateLimit(RULE))])
    async def none() -> JSONResponse:
        return JSONResponse({})

    client = TestClient(app)
    answer = client.get("/own", headers={"Origin": "https://shop.test"})
    names = [name for name, _ in answer.headers.multi_items()]
    assert len(names) == len(set(names))
    assert answer.headers["cache-control"] == "max-age=60"
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["x-ratelimit-limit"] == "7"
    assert "x-ratelimit-remaining" not in answer.headers or inner  # one family, one source
    assert answer.headers["vary"] == "Accept, Origin"
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert exposed[0] == "X-Total"
    assert {"RateLimit", "RateLimit-Policy"} < set(exposed)
    assert answer.headers["ratelimit-policy"].count(";q=") == 1 + inner
    plain = client.get("/none").headers
    assert plain["x-ratelimit-limit"] == "2"
    assert plain["ratelimit-policy"].count(";q=") == 1 + inner


def test_without_install_lists_of_other_dependencies_are_joined():
    """A dependency that exposes a field of its own is not overridden by the limit after it."""

    def exposes(response: Response) -> None:
        response.headers["Access-Control-Expose-Headers"] = "X-Total"
        response.headers["Vary"] = "Accept"

    app = FastAPI()
    app.get("/", dependencies=[Depends(exposes), Depends(RateLimit(RULE)), Depends(RateLimit("9/h"))])(nothing)
    answer = TestClient(app).get("/", headers={"Origin": "https://shop.test"})
    assert answer.headers["vary"] == "Accept, Origin"
    assert answer.headers["access-control-expose-headers"].startswith("X-Total, RateLimit-Policy")


@pytest.mark.parametrize("framework", ["starlette", "fastapi", "flask", "django"])
def test_without_its_framework_a_module_names_the_command_to_install_it(python, framework):
    """Where a framework is not installed, importing its module is a ConfigurationError with the command to install it."""
    done = python(
        f"""
        import sys
        from limitkeeper import ConfigurationError
        sys.modules[{framework!r}] = None
        try:
            import limitkeeper.web.{framework}
        except ConfigurationError as error:
            print(error)
        """
    )
    message = rf"limitkeeper\.web\.{framework} needs {framework}[\w.]*, which is not installed: pip install {framework}\n"
    assert re.fullmatch(message, done.stdout), done.stdout + done.stderr


def test_a_reload_without_a_rule_that_a_route_names(gate, caplog):
    """The old version of the rule still limits the route, with a log line about it; a version that has the rule replaces it."""
    app = FastAPI()
    install(app)
    by_rule = RateLimit(policy=gate, rule="api")

    @app.get("/")
    async def home(request: Request) -> dict[str, str]:
        await by_rule.check(request, key=request.query_params.get("user"))
        return {}

    client = TestClient(app)
    assert client.get("/").status_code == 200
    gate.reload(Policy.read("limits: [{name: site, key: ip, limit: 5/s}]"))
    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    assert [client.get("/?user=ann").status_code for _ in range(3)] == [200, 200, 429]
    assert [line.getMessage() for line in caplog.records if "old version" in line.getMessage()] == [
        "the policy 'limitkeeper' has no rule 'api'; it has: site; routes that name the rule are limited by its old version"
    ]
    gate.reload(Policy.read("limits: [{name: api, key: ip, limit: unlimited}]"))
    assert client.get("/").status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a_limit_is_one_whichever_others_were_evaluated(declared):
    """A limit of a route counts the same requests, also where other code checks another limit for some of them before."""
    app = FastAPI()
    sometimes, always = RateLimit("fixed window 100/h"), RateLimit("fixed window 2/h")

    async def check(request: Request) -> None:
        if "more" in request.query_params:
            await sometimes.check(request)
        if not declared:
            await always.check(request)

    app.get("/", dependencies=[Depends(check), *([Depends(always)] if declared else [])])(nothing)
    client = TestClient(app)
    assert [client.get(path).status_code for path in ("/", "/?more", "/", "/?more")] == [200, 200, 429, 429]
