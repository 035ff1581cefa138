"""Options of limits on single handlers: limits from a callable, methods, exemptions, listeners of refusals, and the switch."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from flask import Flask

from limitkeeper import ConfigurationError, FixedWindow, InvalidLimit, MemoryStore
from limitkeeper.observe.events import Event
from limitkeeper.testing import ManualClock
from limitkeeper.web import fastapi, flask
from limitkeeper.web.handler_limit import MAX_CHOICES

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


def test_a_listener_hears_of_refusals_only(site):
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
