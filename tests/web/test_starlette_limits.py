"""Limits as decorators of Starlette's endpoints: per client, with the middleware's fields and bodies, never counted twice."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.convertors import CONVERTOR_TYPES, Convertor
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException, WebSocketException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocketDisconnect
from starlette_client import TestClient

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.fastapi import RateLimit
from limitkeeper.web.starlette import limit

MESSAGE = "Too many checkout attempts. Retry after {retry_after}s."


def client(app: Any, address: str = "192.0.2.1") -> TestClient:
    return TestClient(app, client=(address, 50000), raise_server_exceptions=False)


def one(endpoint: Any, path: str = "/checkout", **more: Any) -> Starlette:
    return Starlette(routes=[Route(path, endpoint, methods=["GET", "POST"])], **more)


async def ok(request: Any) -> Any:
    return PlainTextResponse("ok")


def test_the_eleventh_checkout_of_an_endpoint(store, clock):
    """The eleventh checkout is refused with the usual text and fields, the handler is not called, and after the wait it
    passes."""
    calls = []

    @limit("5/s burst 10", message=MESSAGE, store=store)
    async def checkout(request: Any) -> Any:
        calls.append(request.scope["limitkeeper"].decision.remaining)
        return JSONResponse({"order": "placed"})

    http = client(one(checkout))
    for left in range(9, -1, -1):
        answer = http.post("/checkout")
        assert (answer.status_code, answer.headers["x-ratelimit-remaining"]) == (200, str(left))
    refused = http.post("/checkout")
    assert refused.status_code == 429
    assert refused.content == b'{"code":"RATE_LIMITED","message":"Too many checkout attempts. Retry after 1s."}'
    assert (refused.headers["retry-after"], refused.headers["content-type"]) == ("1", "application/json")
    assert calls == list(range(9, -1, -1))
    clock.advance(1)
    assert http.post("/checkout").status_code == 200


def test_each_client_and_each_endpoint_has_its_own(store):
    """Clients do not share a limit, and neither do two endpoints, on one store."""

    @limit("fixed window 1/min", store=store)
    async def first(request: Any) -> Any:
        return await ok(request)

    @limit("fixed window 1/min", store=store)
    async def second(request: Any) -> Any:
        return await ok(request)

    app = Starlette(routes=[Route("/first", first), Mount("/sub", routes=[Route("/second", second)])])
    for address in ("192.0.2.1", "192.0.2.2"):
        for path in ("/first", "/sub/second"):
            assert [client(app, address).get(path).status_code for _ in range(2)] == [200, 429]


def test_a_name_is_one_limit_wherever_it_stands(store):
    """Endpoints with limits of one name and store share one limit."""
    routes = [
        Route(path, limit("fixed window 2/min", name="shared", store=store)(endpoint))
        for path, endpoint in (("/a", ok), ("/b", lambda request: PlainTextResponse("ok")))
    ]
    http = client(Starlette(routes=routes))
    assert [http.get(path).status_code for path in ("/a", "/b", "/a", "/b")] == [200, 200, 429, 429]


def test_a_plain_function_runs_beside_the_loop(store):
    """An endpoint that is no coroutine still runs in a thread of its own, after it was admitted."""
    ran = []

    @limit("fixed window 1/min", store=store)
    def slow(request: Any) -> Any:
        ran.append(threading.current_thread())
        return PlainTextResponse("ok")

    @limit("fixed window 9/min", store=store)
    async def quick(request: Any) -> Any:
        ran.append(threading.current_thread())
        return PlainTextResponse("ok")

    with client(Starlette(routes=[Route("/slow", slow), Route("/quick", quick)])) as http:
        assert [http.get(path).status_code for path in ("/slow", "/slow", "/quick")] == [200, 429, 200]
    assert len(ran) == 2
    assert ran[0] is not ran[1]


class Greeting:
    async def __call__(self, request: Request) -> Response:
        return PlainTextResponse("hello")


@pytest.mark.parametrize("endpoint", [Greeting(), partial(ok)], ids=["object", "partial"])
def test_an_endpoint_without_a_name(store, endpoint):
    """An object with an async `__call__`, or a partial of an async function, is awaited, and counted by its route."""
    limited = limit("fixed window 2/min", store=store)(endpoint)
    http = client(Starlette(routes=[Route("/a", limited), Route("/b", limited)]))
    for path in ("/a", "/b"):
        assert [http.get(path).status_code for _ in range(3)] == [200, 200, 429]


def test_methods_of_an_endpoint(store):
    """Methods of an HTTPEndpoint have limits of their own; the others have none."""

    class Orders(HTTPEndpoint):
        @limit("fixed window 1/min", store=store)
        async def get(self, request: Any) -> Any:
            return PlainTextResponse("list")

        @limit("fixed window 2/min", store=store)
        def post(self, request: Any) -> Any:
            return PlainTextResponse("made")

        async def delete(self, request: Any) -> Any:
            return PlainTextResponse("gone")

    http = client(Starlette(routes=[Route("/orders", Orders)]))
    assert [http.get("/orders").status_code for _ in range(2)] == [200, 429]
    assert [http.post("/orders").status_code for _ in range(3)] == [200, 200, 429]
    assert "x-ratelimit-limit" not in http.delete("/orders").headers


def key_of(request: Any) -> Any:
    return request.headers.get("x-user")


async def key_looked_up(request: Any) -> Any:
    return request.headers.get("x-user")


@pytest.mark.parametrize("key", [key_of, key_looked_up])
def test_a_key_is_made_from_the_request(store, key):
    """A callable identifies the client, awaited where necessary; without a value the address does."""

    @limit("fixed window 1/min", key=key, store=store)
    async def checkout(request: Any) -> Any:
        return await ok(request)

    http = client(one(checkout))
    for user in ({"x-user": "ann"}, {"x-user": "zoë".encode()}, {}):
        assert [http.post("/checkout", headers=user).status_code for _ in range(2)] == [200, 429]


class Word(Convertor[int]):
    regex = "[^/]+"

    def convert(self, value: str) -> int:
        return {"seven": 7}.get(value) or int(value)

    def to_string(self, value: int) -> str:
        return str(value)


def starlette_route(**options: Any) -> Any:
    return Starlette(routes=[Route("/orders/{order:word}", limit("fixed window 1/min", **options)(ok))])


def fastapi_route(**options: Any) -> Any:
    app = FastAPI()
    app.get("/orders/{order:word}", dependencies=[Depends(RateLimit("fixed window 1/min", **options))])(lambda: "ok")
    return app


@pytest.mark.parametrize("app", [starlette_route, fastapi_route])
def test_a_key_from_the_path_is_the_value_that_the_router_has_converted(store, app, monkeypatch):
    """Values that a convertor of the path takes for one value are one key of a route's limit."""
    monkeypatch.setitem(CONVERTOR_TYPES, "word", Word())
    http = client(app(key="order", identify={"order": {"path": "order"}}, match="/orders/{order}", store=store))
    statuses = [http.get(f"/orders/{value}").status_code for value in ("seven", "7", "07", "+7", "8")]
    assert statuses == [200, 429, 429, 429, 200]


def test_several_limits_of_one_endpoint(store):
    """All are named in the fields of one line each, the tightest decides, and a refusal names them too."""

    @limit("fixed window 5/min", store=store)
    @limit("fixed window 2/min", store=store)
    async def checkout(request: Any) -> Any:
        return await ok(request)

    http = client(one(checkout))
    answer = http.post("/checkout")
    assert [line.count(";r=") for line in answer.headers.get_list("ratelimit")] == [2]
    assert answer.headers["x-ratelimit-limit"] == "2"
    assert http.post("/checkout").status_code == 200
    refused = http.post("/checkout")
    assert (refused.status_code, refused.headers["x-ratelimit-limit"]) == (429, "2")
    assert [http.post("/checkout").status_code for _ in range(3)] == [429, 429, 429]
    assert http.post("/checkout").headers["x-ratelimit-limit"] == "5"


def test_a_rule_that_the_middleware_evaluated_is_not_evaluated_again(store):
    """A rule of a policy holds on the route; under the policy's middleware it counts once; its events are the policy's."""
    gate = Gate(Policy.read("limits: [{name: api, match: /api, key: ip, limit: fixed window 2/min}]"), store=store)
    refusals = []
    gate.events.on("refused", refusals.append)
    named = limit(policy=gate, rule="api")(ok)
    app = RateLimitMiddleware(Starlette(routes=[Route("/api", named), Route("/other", named)]), policy=gate)
    assert [client(app).get(path).status_code for path in ("/api", "/other", "/other", "/api")] == [200, 200, 429, 429]
    assert len(refusals) == 2
    received = gate.snapshot()
    assert [(rule.passed, rule.refused) for rule in received.rules] == [(2, 2)]
    assert received.requests == 4
    assert sum(offender.count for offender in received.offenders) == 2


def test_what_the_outcome_decides_is_settled(store):
    """Only failed logins count, whether the endpoint answers or raises; and a streamed body is charged by its size."""

    @limit("fixed window 2/min", charge={"status": [401]}, store=store)
    async def login(request: Any) -> Any:
        if request.query_params["how"] == "raised":
            raise HTTPException(401)
        return PlainTextResponse("", int(request.query_params["how"]))

    @limit("fixed window 10/min", cost={"response": "1kB", "estimate": 1}, store=store)
    async def export(request: Any) -> Any:
        return StreamingResponse(iter([b"x" * 1000] * 7))

    http = client(Starlette(routes=[Route("/login", login), Route("/export", export)]))
    outcomes = [http.get("/login", params={"how": how}).status_code for how in ("200", "200", "200", "401", "raised", "200")]
    assert outcomes == [200, 200, 200, 401, 401, 429]
    assert len(http.get("/export").content) == 7000
    assert http.get("/export").headers["x-ratelimit-remaining"] == "2"
    assert http.get("/export").status_code == 429


def test_a_response_of_unknown_size_costs_its_estimate(store):
    """An exception handler makes the response to an endpoint that raises: its size is not known here."""

    @limit("fixed window 5/min", cost={"response": "1kB", "estimate": 2}, store=store)
    async def missing(request: Any) -> Any:
        raise HTTPException(404)

    http = client(one(missing))
    assert [http.get("/checkout").status_code for _ in range(3)] == [404, 404, 429]


@pytest.mark.parametrize("options", [{}, {"charge": {"status": [401]}}, {"cost": {"response": "1kB"}}], ids=str)
def test_a_decorator_above_the_limit_may_change_the_response(store, options):
    """The return value of a limit is the endpoint's response for the code around it, also where the limit is settled."""

    @limit("fixed window 2/min", name="outer", store=MemoryStore(), **options)
    @limit("fixed window 1/min", store=store, **options)
    async def login(request: Any) -> Any:
        return PlainTextResponse("who?", 200)

    async def tagged(request: Any) -> Any:
        response = await login(request)
        assert isinstance(response, Response)
        response.headers["X-Tag"] = f"was {response.status_code}"
        response.set_cookie("seen", "yes")
        response.status_code = 401 if response.status_code == 200 else response.status_code
        return response

    http = client(Starlette(routes=[Route("/login", tagged)]))
    first, second = [http.get("/login") for _ in range(2)]
    assert (first.status_code, first.text, first.headers["x-tag"], first.cookies["seen"]) == (401, "who?", "was 200", "yes")
    assert (second.status_code, second.headers["x-tag"]) == (429, "was 429")


def test_a_failing_endpoint_is_counted_as_such(store):
    """An endpoint that raises counts as a 500."""
    gate = Gate(Policy.read("limits: [{name: api, key: ip, limit: fixed window 2/min}]"), store=store)

    @limit(policy=gate, rule="api")
    async def broken(request: Any) -> Any:
        raise ValueError("no")

    assert client(one(broken)).get("/checkout").status_code == 500
    assert gate.snapshot().rules[0].statuses["5xx"] == 1


def test_sockets_are_limited_at_the_handshake(store):
    """A websocket endpoint that is over its limit is closed before it is accepted, with the code for a later retry."""

    @limit("fixed window 1/min", store=store)
    async def chat(websocket: Any) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    http = client(Starlette(routes=[WebSocketRoute("/chat", chat)]))
    with http.websocket_connect("/chat") as socket:
        assert socket.receive_text() == "hello"
    with pytest.raises(WebSocketDisconnect) as closed, http.websocket_connect("/chat"):
        pass
    assert closed.value.code == 1013


def denied(http: TestClient) -> int:
    """The status, or the close code, with which a handshake is denied."""
    with pytest.raises(WebSocketDisconnect) as closed, http.websocket_connect("/login"):
        pass
    return getattr(closed.value, "status_code", None) or closed.value.code


async def close(websocket: Any) -> None:
    await websocket.close(1008)


async def deny(websocket: Any) -> None:
    await websocket.send_denial_response(PlainTextResponse("no", 401))


async def refuse(websocket: Any) -> None:
    raise WebSocketException(1008)


@pytest.mark.parametrize(("login", "code"), [(close, 1008), (deny, 401), (refuse, 1008)])
def test_a_denied_handshake_of_an_endpoint_counts(store, login, code):
    """Where failed logins count, a handshake that the endpoint denies is one, however it does so."""
    login = limit("fixed window 2/h", charge={"status": [401, 403]}, store=store)(login)
    http = client(Starlette(routes=[WebSocketRoute("/login", login)]))
    assert [denied(http) for _ in range(3)] == [code, code, 1013]


def test_bytes_of_a_websocket_endpoint(store):
    """A cost by response size counts the bytes that a websocket endpoint sends."""

    @limit("fixed window 10/h", cost={"response": "1kB", "estimate": 1}, store=store)
    async def feed(websocket: Any) -> None:
        await websocket.accept()
        await websocket.send_text("x" * 9_500)
        await websocket.close()

    http = client(Starlette(routes=[WebSocketRoute("/login", feed)]))
    with http.websocket_connect("/login") as socket:
        assert len(socket.receive_text()) == 9_500
        socket.receive()
    assert denied(http) == 1013


def cached(scope: Any, receive: Any, send: Any) -> Any:
    return PlainTextResponse("from yesterday")(scope, receive, send)


def test_a_rule_may_degrade_to_another_app(store):
    """A client over the limit may get a cheaper response instead of a refusal, with the fields."""

    @limit("fixed window 1/min", on_refusal=f"degrade {__name__}:cached", store=store)
    async def prices(request: Any) -> Any:
        return PlainTextResponse("fresh")

    http = client(one(prices))
    assert [http.get("/checkout").text for _ in range(3)] == ["fresh", "from yesterday", "from yesterday"]
    assert http.get("/checkout").headers["x-ratelimit-remaining"] == "0"


def test_an_endpoints_own_quota_fields_stay(store):
    """Fields that a handler wrote itself stay; a response that is any ASGI app gets the fields as well."""

    @limit("fixed window 9/min", store=store)
    async def knows(request: Any) -> Any:
        return PlainTextResponse("ok", headers={"X-RateLimit-Limit": "7"})

    @limit("fixed window 9/min", store=store)
    async def app(request: Any) -> Any:
        return cached

    http = client(Starlette(routes=[Route("/knows", knows), Route("/app", app)]))
    assert http.get("/knows").headers.get_list("x-ratelimit-limit") == ["7"]
    assert http.get("/app").headers["x-ratelimit-remaining"] == "8"


@pytest.mark.parametrize("options", [{}, {"charge": {"status": [200]}}])
def test_a_response_that_is_sent_twice_has_the_fields_of_each_request(store, options):
    """One object for all requests: no client is sent the quota of another, whether the limit is settled or not."""
    same = PlainTextResponse("ok", headers={"X-Own": "kept"})
    assert same.headers["x-own"] == "kept"

    @limit("fixed window 9/min", store=store, **options)
    async def endpoint(request: Any) -> Any:
        return same

    app, before = one(endpoint), list(same.raw_headers)
    answers = [client(app, address).get("/checkout").headers for address in ("192.0.2.1", "192.0.2.1", "192.0.2.2")]
    assert [(one["x-ratelimit-remaining"], one["x-own"]) for one in answers] == [("8", "kept"), ("7", "kept"), ("8", "kept")]
    assert same.raw_headers == before


def test_mistakes_are_errors_at_the_decorator(store):
    """No limit, a misspelt one, a class, something that is no endpoint: each error names the right form."""
    with pytest.raises(ConfigurationError, match='write @limit\\("5/s burst 10"\\)'):
        limit()
    with pytest.raises(ConfigurationError):
        limit("5 per fortnite")
    with pytest.raises(ConfigurationError, match=r"^@limit\('5/s'\): key: expected a key, got 5; write it like"):
        limit("5/s", key=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'user'"):
        limit("5/s", key="user")
    with pytest.raises(ConfigurationError, match="a store or its URL, got store=7"):
        limit("5/s", store=7)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="put it on its methods"):
        limit("5/s")(HTTPEndpoint)
    with pytest.raises(ConfigurationError, match="has no rule 'chekout'; it has: api"):
        limit(policy=Policy.read("limits: [{name: api, key: ip, limit: 5/s}]"), rule="chekout")

    async def answers_a_dict(request: Any) -> Any:
        return {"not": "a response"}

    app = one(limit("5/s", store=store)(answers_a_dict))
    with pytest.raises(ConfigurationError, match="expected a Response from an endpoint under @limit, got dict"):
        TestClient(app).get("/checkout")
    with pytest.raises(ConfigurationError, match=r"given a request: answers_a_dict\(request\)"):
        limit("5/s", store=MemoryStore())(answers_a_dict)("nobody").send(None)


def listing(store: MemoryStore) -> Any:
    @limit("fixed window 1/min", store=store)
    async def index(request: Any) -> Any:
        return PlainTextResponse("")

    return index


def test_endpoints_that_one_function_made_do_not_share(store):
    """Endpoints of one name are distinguished by their place in the code, whatever is in their paths."""
    app = Starlette(routes=[Route("/users/{id}", listing(store)), Route("/orders/{id}", listing(store))])
    for path in ("/users/1", "/orders/1"):
        assert [client(app).get(path).status_code for _ in range(2)] == [200, 429]
    assert client(app).get("/orders/2").status_code == 429
