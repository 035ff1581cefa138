"""Options of limits on single handlers: limits and messages from a callable, identities, field names, methods, exemptions,
listeners of refusals, and the switch."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from functools import partial
from typing import Any

import httpx
import pytest
from django.utils.safestring import SafeString
from fastapi import Depends, FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.routing import Route
from starlette_client import TestClient

from limitkeeper import ConfigurationError, FixedWindow, InvalidLimit, Limiter, MemoryStore
from limitkeeper.observe.events import Event
from limitkeeper.policy import Gate, Policy, RequestContext, WrittenRequest
from limitkeeper.testing import ManualClock
from limitkeeper.web import fastapi, flask, starlette
from limitkeeper.web.asgi import RateLimitMiddleware as AsgiMiddleware
from limitkeeper.web.handler_limit import MAX_CHOICES
from limitkeeper.web.wsgi import RateLimitMiddleware as WsgiMiddleware

PLANS = {"pro": "fixed window 3/min", "free": "fixed window 1/min", "staff": "unlimited", "closed": "blocked"}


def plan_limit(request: Any) -> str | None:
    return PLANS.get(request.headers.get("X-Plan", ""))


class FlaskSite:
    """One view under a limit, in Flask."""

    def __init__(self, limit: Any, store: MemoryStore, enabled: bool = True, **options: Any) -> None:
        app = Flask("options")
        limits = flask.RateLimit(app, store=store, enabled=enabled)
        app.route("/", methods=["GET", "POST", "PUT"])(limits.limit(limit, **options)(lambda: "done"))
        app.testing = True
        self.client = app.test_client()

    def statuses(self, count: int, method: str = "GET", **headers: str) -> list[int]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return [self.client.open("/", method=method, headers=named).status_code for _ in range(count)]

    def answer(self, **headers: str) -> tuple[dict[str, str], Any]:
        """The header fields and the JSON of a response."""
        answer = self.client.get("/", headers=headers)
        return {name.lower(): value for name, value in answer.headers}, answer.get_json(silent=True)


class FastApiSite:
    """One route under a limit, in FastAPI."""

    def __init__(self, limit: Any, store: MemoryStore, enabled: bool = True, **options: Any) -> None:
        self.app = FastAPI()
        fastapi.install(self.app)
        dependencies = [Depends(fastapi.RateLimit(limit, store=store, enabled=enabled, **options))]
        self.app.add_api_route("/", lambda: "done", methods=["GET", "POST", "PUT"], dependencies=dependencies)

    def statuses(self, count: int, method: str = "GET", **headers: str) -> list[int]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}

        async def send() -> list[int]:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as http:
                return [(await http.request(method, "/", headers=named)).status_code for _ in range(count)]

        return asyncio.run(send())

    def answer(self, **headers: str) -> tuple[dict[str, str], Any]:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as http:
                return await http.get("/", headers=headers)

        answer = asyncio.run(send())
        return dict(answer.headers), answer.json()


@pytest.fixture(params=[FlaskSite, FastApiSite], ids=["flask", "fastapi"])
def site(request, store):
    """Makes a site with one limit."""
    return lambda limit, **options: request.param(limit, store, **options)


def test_a_callable_chooses_the_limit_of_a_request(site, clock):
    """The callable returns the limit of the request; None and "unlimited" limit nothing, "blocked" refuses everything."""
    shop = site(plan_limit, key=lambda request: request.headers.get("X-User"))
    assert shop.statuses(4, X_User="ann", X_Plan="pro") == [200, 200, 200, 429]
    assert shop.statuses(2, X_User="ben", X_Plan="free") == [200, 429]
    assert shop.statuses(9, X_User="cid", X_Plan="staff") == shop.statuses(9, X_User="cid") == [200] * 9
    assert shop.statuses(1, X_User="dan", X_Plan="closed") == [429]
    clock.advance(60)
    assert shop.statuses(2, X_User="ben", X_Plan="free") == [200, 429]


def test_limits_of_a_callable_count_together(site):
    """A user who moves to a larger limit has used there what was used under the smaller one."""
    shop = site(plan_limit)
    assert shop.statuses(2, X_Plan="free") == [200, 429]
    assert shop.statuses(3, X_Plan="pro") == [200, 200, 429]


@pytest.mark.parametrize("returned", [5, ["5/s"], b"5/s"], ids=repr)
def test_a_callable_must_return_a_limit(store, returned):
    """Another value than a limit, text or None is an error of the application, which names the callable."""
    with pytest.raises(ConfigurationError, match=r"expected a limit such as '5/s'.* from .*test_declared_limit_options:.*lambda"):
        FlaskSite(lambda request: returned, store).statuses(1)


def test_an_invalid_text_of_a_callable_is_an_error(store):
    """Text that is no limit is an error with its remedy, not an unlimited request."""
    with pytest.raises((ConfigurationError, InvalidLimit), match="5 a second"):
        FlaskSite(lambda request: "5 a second", store).statuses(1)


def test_a_callable_may_return_a_limit_object(site):
    """A Limit is accepted as its text is."""
    assert site(lambda request: FixedWindow("2/min")).statuses(3) == [200, 200, 429]


def test_the_limits_of_a_callable_are_bounded(store):
    """A callable that returns another limit for each client is found by the number of its limits."""
    numbers = iter(range(1, MAX_CHOICES + 3))
    shop = FlaskSite(lambda request: f"{next(numbers)}/s", store)
    assert shop.statuses(MAX_CHOICES) == [200] * MAX_CHOICES
    with pytest.raises(ConfigurationError, match=f"more than {MAX_CHOICES} different limits"):
        shop.statuses(1)


def test_wrong_parameters_are_found_at_the_declaration(store):
    """A callable limit or exemption that can't be given the request is an error where it is declared."""
    with pytest.raises(ConfigurationError, match=r"can't be called with \(request\)"):
        FlaskSite(lambda: "5/s", store)
    with pytest.raises(ConfigurationError, match=r"can't be called with \(request\)"):
        FastApiSite("5/s", store, exempt_when=lambda: True)


def test_methods_that_are_not_named_are_not_limited(site):
    """`methods` names those that the limit applies to."""
    shop = site("fixed window 1/min", methods=["POST"])
    assert shop.statuses(3, "GET") == [200] * 3
    assert shop.statuses(2, "POST") == [200, 429]
    with pytest.raises(ConfigurationError, match="methods= or match=, got both"):
        site("1/min", methods=["POST"], match="POST /")


def test_methods_count_together_or_each_on_its_own(site):
    """The methods of one handler share a limit; with `per_method` each has its own."""
    together = site("fixed window 2/min", name="together")
    assert together.statuses(1, "GET") + together.statuses(2, "POST") == [200, 200, 429]
    apart = site("fixed window 2/min", name="apart", per_method=True)
    assert apart.statuses(3, "GET") == apart.statuses(3, "POST") == [200, 200, 429]


def test_exempt_when_decides_for_each_request(site):
    """Requests for which `exempt_when` is true are neither limited nor counted."""
    shop = site("fixed window 1/min", exempt_when=lambda request: request.headers.get("X-Probe") == "secret")
    assert shop.statuses(5, X_Probe="secret") == [200] * 5
    assert shop.statuses(2, X_Probe="guess") == [200, 429]
    assert shop.statuses(1, X_Probe="secret") == [200]


def test_where_exempt_when_raises_the_limit_applies(site):
    """An exemption that raises exempts nothing."""
    assert site("fixed window 1/min", exempt_when=lambda request: 1 / 0).statuses(2) == [200, 429]


def test_a_listener_receives_refusals_only(site):
    """`on_breach` is called once for each refusal, with an event that has the decision."""
    heard: list[Event] = []
    assert site("fixed window 2/min", on_breach=heard.append).statuses(4) == [200, 200, 429, 429]
    assert [event.kind for event in heard] == ["refused", "refused"]


def test_a_disabled_limit_limits_nothing(site, store):
    """With enabled=False every request passes, without fields, and nothing is stored."""
    assert site("fixed window 1/min", enabled=False).statuses(5) == [200] * 5
    assert len(store) == 0


def test_flask_is_disabled_by_its_configuration():
    """LIMITKEEPER_ENABLED = False turns off the policy and the limits of views."""
    app = Flask("options")
    app.config.update(LIMITKEEPER_ENABLED=False, LIMITKEEPER_CLIENT_IP={"trusted_proxies": ["10.0.0.0/8"]})
    limits = flask.RateLimit(app, store=MemoryStore(clock=ManualClock()))
    app.get("/")(limits.limit("1/min")(lambda: "done"))
    answers = [app.test_client().get("/") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert not any("ratelimit" in name.lower() for answer in answers for name, _ in answer.headers)


def test_the_refusal_is_in_the_openapi_description():
    """REFUSAL_RESPONSES describes the 429 of every route, with Retry-After and the body that is sent."""
    app = FastAPI(responses=fastapi.REFUSAL_RESPONSES)
    fastapi.install(app)
    limit = fastapi.RateLimit("1/min", store=MemoryStore(clock=ManualClock()))
    app.get("/", dependencies=[Depends(limit)])(lambda: "done")
    described = app.openapi()["paths"]["/"]["get"]["responses"]["429"]
    assert "Retry-After" in described["headers"]
    schema = described["content"]["application/json"]["schema"]

    async def refused() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://shop.test") as http:
            await http.get("/")
            return await http.get("/")

    body = asyncio.run(refused()).json()
    assert set(body) == set(schema["properties"]) == set(schema["required"])
    assert body["code"] == schema["properties"]["code"]["const"]


# Messages ---------------------------------------------------------------------------------------------------------------


def polite(refusal: Any, request: Any) -> str:
    return f"{request.headers['X-Name']}, wait {refusal.retry_after} s: {refusal.limit} a minute."


def test_a_callable_makes_the_message(site):
    """`message` gets the refusal and the request, and its text is in the body."""
    shop = site("fixed window 1/min", message=polite)
    shop.statuses(1)
    fields, body = shop.answer(**{"X-Name": "Ann"})
    assert body == {"code": "RATE_LIMITED", "message": f"Ann, wait {fields['retry-after']} s: 1 a minute."}


class Wording(StrEnum):
    SLOWLY = "Slowly, please."


@pytest.mark.parametrize("text", [Wording.SLOWLY, SafeString("Slowly, please.")], ids=["enum", "SafeString"])
def test_a_message_may_be_of_a_subclass_of_str(site, text):
    """A member of an enum, and what Django's templates render, are texts."""
    shop = site("fixed window 1/min", message=lambda refusal, request: text)
    shop.statuses(1)
    assert shop.answer()[1]["message"] == "Slowly, please."


@pytest.mark.parametrize("message", [lambda refusal, request: 1 / 0, lambda refusal, request: None], ids=["raises", "None"])
def test_a_message_that_fails_is_the_default_one(site, message, caplog):
    """Where the callable raises or returns no text, the default is sent, and the log names the callable."""
    shop = site("fixed window 1/min", message=message)
    shop.statuses(1)
    assert shop.answer()[1]["message"].startswith("Too many requests. Retry after ")


def test_the_parameters_of_a_message_are_checked(store):
    """A message that can't be given refusal and request is an error where it is declared."""
    with pytest.raises(ConfigurationError, match=r"message: .* can't be called with \(refusal, request\)"):
        FlaskSite("1/min", store, message=lambda: "no")


def policy_message(refusal: Any, context: RequestContext) -> str:
    return f"{context.path}: {refusal.rule.name}"


def test_a_policy_names_the_callable_of_its_message(store):
    """`message: {call: …}` in a policy imports the callable, which is given the RequestContext; for a capacity too."""
    text = """
limits:
  - {name: api, key: ip, limit: fixed window 1/min, message: {call: "test_declared_limit_options:policy_message"}}
  - name: all
    match: GET /all
    key: ip
    capacity: 1/s
    message: {call: "test_declared_limit_options:policy_message"}
"""
    gate = Gate(Policy.read(text), store=store)
    gate.ask(WrittenRequest("GET", "/a"))
    refused = gate.ask(WrittenRequest("GET", "/b"))
    assert refused.refusal is not None
    assert refused.refusal.message == "/b: api"
    roomy = Gate(Policy.read(text.replace("fixed window 1/min", "unlimited")), store=store)
    answers = [roomy.ask(WrittenRequest("GET", "/all")) for _ in range(9)]
    assert answers[-1].refusal is not None
    assert answers[-1].refusal.message == "/all: all"
    with pytest.raises(ConfigurationError, match="has no 'missing'"):
        Gate(Policy.read(text.replace("policy_message", "missing")))


# Fields -----------------------------------------------------------------------------------------------------------------

NAMES = {"limit": "X-Quota", "remaining": "X-Quota-Left", "reset": "X-Quota-Reset", "retry_after": "X-Retry-In"}


def test_fields_have_other_names(site):
    """`headers: {names: …}` renames the X- fields and Retry-After, also where they are exposed to pages."""
    shop = site("fixed window 1/min", headers={"wire": "none", "reset": "delta", "names": NAMES})
    fields, _ = shop.answer(Origin="http://page.test")
    assert (fields["x-quota"], fields["x-quota-left"]) == ("1", "0")
    assert fields["access-control-expose-headers"] == "X-Quota, X-Quota-Left, X-Quota-Reset"
    refused, _ = shop.answer(Origin="http://page.test")
    assert refused["x-retry-in"] == refused["x-quota-reset"]
    assert refused["access-control-expose-headers"] == "X-Quota, X-Quota-Left, X-Quota-Reset, X-Retry-In"
    assert not {"retry-after", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"} & {*fields, *refused}


def test_names_of_one_policy_do_not_change_another(site):
    """Only responses of the policy with names have them."""
    site("9/min", headers={"names": NAMES}).statuses(1)
    fields, _ = site("8/min").answer()
    assert (fields["x-ratelimit-limit"], "x-quota" in fields) == ("8", False)


@pytest.mark.parametrize("framework", ["asgi", "wsgi"])
def test_a_field_of_the_application_stays(framework, store):
    """A renamed field that the application sets itself is not sent twice; text keeps the spelling of the policy."""
    policy = Policy.of(headers={"wire": "none", "names": NAMES}, limits=[{"name": "a", "key": "ip", "limit": "5/min"}])
    sent = []
    if framework == "wsgi":

        def start(status: str, headers: list[tuple[str, str]], *_: Any) -> Any:
            sent.extend(headers)

        def app(environ: Any, start_response: Any) -> list[bytes]:
            start_response("200 OK", [("X-Quota-Left", "77")] if environ["PATH_INFO"] == "/own" else [])
            return []

        limited = WsgiMiddleware(app, Gate(policy, store=store))
        limited({"REQUEST_METHOD": "GET", "PATH_INFO": "/own", "REMOTE_ADDR": "192.0.2.1"}, start)
        assert [value for name, value in sent if name.lower() == "x-quota-left"] == ["77"]
        sent.clear()
        limited({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}, start)
        assert ("X-Quota-Left", "3") in sent
        return

    async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-quota-left", b"77")]})

    async def send(message: Any) -> None:
        sent.extend(message["headers"])

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("192.0.2.1", 1)}
    asyncio.run(AsgiMiddleware(asgi_app, Gate(policy, store=store))(scope, None, send))  # type: ignore[arg-type]
    assert [value for name, value in sent if name == b"x-quota-left"] == [b"77"]


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ({"remaining": "bad name"}, "'bad name' is not a valid header name"),
        ({"remaining": "x" * 61}, "at most 60 characters"),
        ({"left": "X"}, "unknown field 'left' in names"),
        ({"limit": "X-A", "remaining": "x-a"}, "'limit' and 'remaining' have the same name"),
    ],
)
def test_invalid_names_are_errors(names, error):
    """Names are valid field names, and differ."""
    with pytest.raises(ConfigurationError, match=error):
        Policy.of(headers={"names": names}, limits=[])


# Identities -------------------------------------------------------------------------------------------------------------


def test_identities_without_a_policy(site):
    """`identify` defines identities for `key`; host, method and route need no definition."""
    shop = site("fixed window 1/min", key=["tenant", "method"], identify={"tenant": {"header": "X-Tenant"}})
    assert shop.statuses(2, X_Tenant="acme") == [200, 429]
    assert shop.statuses(1, X_Tenant="bolt") == shop.statuses(1, "POST", X_Tenant="acme") == [200]


def test_one_limit_counts_by_route(store):
    """Views that share a limit by `name` count separately where the key has the route: the template, not the path."""
    app = Flask("options")
    by_route = flask.RateLimit(app, store=store).limit("fixed window 1/min", key=["ip", "route"], name="api")
    app.get("/a/<n>", endpoint="a")(by_route(lambda n: n))
    app.get("/b", endpoint="b")(by_route(lambda: "b"))
    client = app.test_client()
    assert [client.get(path).status_code for path in ("/a/1", "/a/2", "/b", "/b")] == [200, 429, 200, 429]


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("key_func", "write key="),
        ("error_message", "write message="),
        ("exempt_wen", "did you mean 'exempt_when'"),
        ("per", "write key="),
        ("xyz", "expected one of exempt_when, "),
    ],
)
def test_unknown_options_are_named(store, option, remedy):
    """An option that does not exist is an error with the name that it has here."""
    with pytest.raises(ConfigurationError, match=f"unknown option '{option}'.*{remedy}"):
        FlaskSite("1/min", store, **{option: None})


def test_wrong_uses_of_a_dependency_name_the_right_form(store):
    """A RateLimit without Depends is an error where the route is declared; as a parameter's default, at the first request."""
    with pytest.raises(ConfigurationError, match=r"wrap it in Depends"):
        FastAPI().get("/", dependencies=[fastapi.RateLimit("1/min")])(lambda: "done")  # type: ignore[list-item]

    shop = FastApiSite("1/min", store)
    shop.app = FastAPI()

    @shop.app.get("/")
    async def handler(limit: Any = fastapi.RateLimit("1/min")) -> None: ...  # noqa: B008

    with pytest.raises(ConfigurationError, match=r"expected Depends\(RateLimit"):
        shop.statuses(1)


def test_variables_belong_into_policies():
    """A URL with a variable, which only policy files replace, is an error with the reason."""
    with pytest.raises(ConfigurationError, match=r"write os.environ\['REDIS_URL'\]"):
        Limiter("5/s", store="${REDIS_URL}")


def test_limits_follow_a_reload_of_the_policy_whose_identities_they_use(store, caplog):
    """A view's limit has the identities of the policy in force, and keeps its state; where one that it needs is gone, the old
    one.
    """
    identify = {"user": {"header": "X-User"}, "ip": {"client_ip": {"trusted_proxies": ["127.0.0.0/8"]}}}
    gate = Gate(Policy.of(identify=identify), store=store)
    app = Flask("reloaded")
    limits = flask.RateLimit(app, gate)
    app.get("/user", endpoint="user")(limits.limit("fixed window 1/min", key="user")(lambda: "done"))
    app.get("/ip", endpoint="ip")(limits.limit("fixed window 1/min", name="by-ip")(lambda: "done"))

    def status(path: str, **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return app.test_client().get(path, headers=named).status_code

    assert [status("/user", X_User="ann"), status("/ip", X_Forwarded_For="192.0.2.1")] == [200, 200]
    gate.reload(Policy.of(identify={"user": {"header": "X-Account"}}))
    assert [status("/user", X_Account=name) for name in ("ann", "ben")] == [429, 200]
    assert [status("/ip", X_Forwarded_For=f"192.0.2.{n}") for n in (1, 2)] == [200, 429]
    gate.reload(Policy.of())
    assert [status("/user", X_Account=name) for name in ("ann", "eve")] == [429, 200]
    assert "keeps the identities" in caplog.text


@pytest.mark.parametrize("site", [FlaskSite, FastApiSite])
def test_a_limit_from_a_callable_gives_no_warning(store, site, caplog):
    """Also where the callable returns no limit; the same limit without a callable gives one."""
    assert site(plan_limit, store).statuses(1, X_Plan="staff") == [200]
    assert "limits nothing" not in caplog.text
    site("unlimited", store)
    assert "limits nothing" in caplog.text


def no_parameter():
    return {}


def one_parameter(id: int):
    return {}


async def awaited(request):
    return {}


def served_by_fastapi(handler):
    app = FastAPI()
    app.get("/{id}")(fastapi.limit(handler))


def served_by_starlette(handler):
    app = Starlette(routes=[Route("/{id}", starlette.limit(handler))])
    TestClient(app).get("/3")


def served_by_flask(handler, path="/<id>"):
    app = Flask("bare")
    app.testing = True
    app.get(path)(flask.RateLimit(app).limit(handler))
    app.test_client().get("/3")


@pytest.mark.parametrize("handler", [no_parameter, one_parameter, awaited])
@pytest.mark.parametrize("serve", [served_by_fastapi, served_by_starlette, served_by_flask, partial(served_by_flask, path="/3")])
def test_a_decorator_without_parentheses_is_an_error(serve, handler):
    """Whether the handler could choose a limit, by its parameters, or not."""
    with pytest.raises(ConfigurationError, match=r'write @limit\("5/s burst 10"\), with parentheses'):
        serve(handler)


@pytest.mark.parametrize("named", [False, True])
def test_an_async_key_without_text_is_no_key(store, named):
    """Where a key is "", the client's address counts, or the key of the rule that is named: no count for all such clients."""

    async def user(request: Any) -> str:
        return request.headers.get("X-User", "")

    gate = Gate(Policy.of(limits=[{"name": "own", "key": "ip", "limit": "fixed window 1/min"}]), store=store)
    rule: Any = {"policy": gate, "rule": "own"} if named else {"limit": "fixed window 1/min", "store": store}
    app = FastAPI()
    app.get("/", dependencies=[Depends(fastapi.RateLimit(**rule, key=user))])(lambda: "done")

    async def status(address: str) -> int:
        transport = httpx.ASGITransport(app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return (await client.get("/")).status_code

    assert [asyncio.run(status(address)) for address in ("192.0.2.1", "192.0.2.1", "192.0.2.2")] == [200, 429, 200]
