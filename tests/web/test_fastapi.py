"""Limits as FastAPI dependencies: per client, with the middleware's fields and bodies, and never counted twice by accident."""

import re
from functools import partial
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Request, Response, WebSocket
from fastapi.responses import PlainTextResponse
from starlette.websockets import WebSocketDisconnect
from starlette_client import TestClient

from limitkeeper import ConfigurationError, LimitkeeperError, MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.model import DEGRADE, OnRefusal
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.fastapi import CurrentEvaluation, RateLimit, TooManyRequests, install


def client(app: FastAPI, address: str = "192.0.2.1") -> TestClient:
    return TestClient(app, client=(address, 50000))


def shop(store: MemoryStore, *, installed: bool = True, **words: Any) -> FastAPI:
    """A shop whose checkout has a limit of its own."""
    app = FastAPI()
    if installed:
        install(app)
    message = "Too many checkout attempts. Retry after {retry_after}s."
    limit = RateLimit("5/s burst 10", message=message, store=store, **words)

    @app.post("/checkout", dependencies=[Depends(limit)])
    async def checkout() -> dict[str, str]:
        return {"order": "placed"}

    @app.get("/products")
    async def products() -> list[str]:
        return ["tea"]

    return app


def test_the_eleventh_checkout(store, clock):
    """The eleventh checkout is refused with the seed's exact text and fields, and passes after the retry time."""
    http = client(shop(store))
    for left in range(9, -1, -1):
        answer = http.post("/checkout")
        assert answer.status_code == 200
        assert (answer.headers["x-ratelimit-remaining"], "retry-after" in answer.headers) == (str(left), False)
    refused = http.post("/checkout")
    assert refused.status_code == 429
    assert refused.content == b'{"code":"RATE_LIMITED","message":"Too many checkout attempts. Retry after 1s."}'
    assert (refused.headers["retry-after"], refused.headers["content-type"]) == ("1", "application/json")
    assert (refused.headers["x-ratelimit-limit"], refused.headers["x-ratelimit-remaining"]) == ("10", "0")
    assert refused.headers["cache-control"] == "no-store"
    clock.advance(1)
    assert http.post("/checkout").status_code == 200


def test_clients_do_not_share(store):
    """By default every client has a limit of its own."""
    app = shop(store)
    for _ in range(10):
        client(app).post("/checkout")
    assert client(app).post("/checkout").status_code == 429
    assert client(app, "192.0.2.2").post("/checkout").status_code == 200


def test_other_routes_are_not_limited(store):
    """A route without the dependency is not limited."""
    http = client(shop(store))
    for _ in range(12):
        http.post("/checkout")
    answer = http.get("/products")
    assert answer.status_code == 200
    assert "ratelimit" not in answer.headers


def test_without_install(store):
    """Without `install` a refusal comes in FastAPI's own envelope, with all fields; dicts have the fields too."""
    http = client(shop(store, installed=False))
    assert re.fullmatch(r'"checkout-[0-9a-f]{8}";r=9;t=2', http.post("/checkout").headers["ratelimit"])
    for _ in range(9):
        http.post("/checkout")
    refused = http.post("/checkout")
    assert refused.status_code == 429
    assert refused.json() == {"detail": {"code": "RATE_LIMITED", "message": "Too many checkout attempts. Retry after 1s."}}
    assert refused.headers["retry-after"] == "1"


def test_fields_on_responses_of_the_handlers_own(store):
    """With `install`, a response that the handler made itself carries the fields as well."""
    app = FastAPI()
    install(app)

    @app.get("/", dependencies=[Depends(RateLimit("5/s", store=store))])
    async def home() -> Response:
        return PlainTextResponse("hello", headers={"X-Own": "1"})

    answer = client(app).get("/")
    assert (answer.headers["x-ratelimit-remaining"], answer.headers["x-own"]) == ("4", "1")


def test_a_key_by_a_callable(store):
    """A callable that gets the request identifies the client; None means the client's address."""
    app = FastAPI()
    install(app)

    def user(request: Request) -> str | None:
        return request.headers.get("x-user")

    @app.get("/", dependencies=[Depends(RateLimit("1/min", key=user, store=store))])
    async def home() -> dict[str, str]:
        return {}

    http = client(app)
    assert [http.get("/", headers={"X-User": "ada"}).status_code for _ in range(2)] == [200, 429]
    assert http.get("/", headers={"X-User": "ben"}).status_code == 200
    assert [http.get("/").status_code for _ in range(2)] == [200, 429]


def test_a_key_that_is_awaited(store):
    """The callable may be a coroutine function: it looks the user up, say."""
    app = FastAPI()
    install(app)

    async def user(request: Request) -> int:
        return len(request.headers["x-user"])

    @app.get("/", dependencies=[Depends(RateLimit("1/min", key=user, store=store))])
    async def home() -> dict[str, str]:
        return {}

    http = client(app)
    answers = [http.get("/", headers={"X-User": name}).status_code for name in ("ada", "ben", "eva-maria")]
    assert answers == [200, 429, 200]


def test_a_key_from_another_dependency(store):
    """A user's dependency may call the limit, with a key from other dependencies."""
    app = FastAPI()
    install(app)
    limit = RateLimit("1/min", store=store)

    async def user(request: Request) -> str:
        return request.headers["x-user"]

    async def limited(request: Request, name: Annotated[str, Depends(user)]) -> None:
        await limit.check(request, key=name)

    @app.get("/", dependencies=[Depends(limited)])
    async def home() -> dict[str, str]:
        return {}

    http = client(app)
    assert [http.get("/", headers={"X-User": name}).status_code for name in ("ada", "ben", "ada")] == [200, 200, 429]


def test_routes_count_for_themselves_and_names_are_shared(store):
    """A limit without a name counts for each of its routes; one with a name is one limit for all of them."""
    app = FastAPI()
    router = APIRouter(dependencies=[Depends(RateLimit("1/min", store=store))])
    named = APIRouter(prefix="/named", dependencies=[Depends(RateLimit("1/min", name="both", store=store))])
    for one in (router, named):

        @one.get("/a")
        async def a() -> dict[str, str]:
            return {}

        @one.get("/b")
        async def b() -> dict[str, str]:
            return {}

    app.include_router(router)
    app.include_router(named)
    http = client(app)
    assert [http.get(path).status_code for path in ("/a", "/b", "/a", "/b")] == [200, 200, 429, 429]
    assert [http.get(path).status_code for path in ("/named/a", "/named/b")] == [200, 429]


@pytest.mark.parametrize("installed", [True, False])
def test_several_limits_on_a_route(store, clock, installed):
    """An app's limit and a route's both decide, both are in the fields, and the tighter one gives the X- fields."""
    app = FastAPI(dependencies=[Depends(RateLimit("100/h", store=store))])
    if installed:
        install(app)

    @app.get("/", dependencies=[Depends(RateLimit("2/min", store=store))])
    async def home() -> dict[str, str]:
        return {}

    http = client(app)
    answer = http.get("/")
    assert answer.headers["x-ratelimit-limit"] == "2"
    received = sorted(answer.headers["ratelimit-policy"].split(", "))
    assert [re.sub("-[0-9a-f]{8}", "", one) for one in received] == ['"home";q=100;w=3600', '"home.2";q=2;w=60']
    assert [http.get("/").status_code for _ in range(2)] == [200, 429]
    clock.advance(60)
    assert http.get("/").status_code == 200


POLICY = """
limits:
  - {name: checkout, match: POST /checkout, key: ip, limit: fixed window 3/min}
  - {name: search, match: GET /search, key: ip, limit: fixed window 9/min}
"""


def policy_app(gate: Gate, *, middleware: bool) -> FastAPI:
    app = FastAPI()
    install(app)
    if middleware:
        app.add_middleware(RateLimitMiddleware, policy=gate)

    @app.post("/checkout", dependencies=[Depends(RateLimit(policy=gate, rule="checkout"))])
    @app.post("/express", dependencies=[Depends(RateLimit(policy=gate, rule="checkout"))])
    async def checkout(evaluation: CurrentEvaluation) -> dict[str, Any]:
        assert evaluation is not None
        assert evaluation.decision is not None
        return {"remaining": evaluation.decision.remaining}

    return app


@pytest.mark.parametrize("middleware", [True, False])
def test_a_rule_of_a_policy(store, middleware):
    """A rule that is named on a route holds there; where the middleware has evaluated it already, it is not counted twice."""
    gate = Gate(Policy.read(POLICY), store=store)
    http = client(policy_app(gate, middleware=middleware))
    assert http.post("/checkout").json() == {"remaining": 2}
    assert http.post("/express").status_code == 200
    assert http.post("/checkout").headers["x-ratelimit-remaining"] == "0"
    assert [http.post(path).status_code for path in ("/checkout", "/express")] == [429, 429]
    rules = {rule.name: (rule.passed, rule.refused) for rule in gate.snapshot().rules}
    assert rules == {"checkout": (3, 2), "search": (0, 0)}


def test_a_rule_follows_its_policy(store):
    """When the policy is reloaded, the rule on the route is the new one, with its state."""
    gate = Gate(Policy.read(POLICY), store=store)
    http = client(policy_app(gate, middleware=False))
    for _ in range(3):
        http.post("/express")
    assert http.post("/express").status_code == 429
    gate.reload(Policy.read(POLICY.replace("3/min", "5/min")))
    assert [http.post("/express").status_code for _ in range(3)] == [200, 200, 429]


def test_charge_by_outcome(store):
    """Failed logins count, successful ones do not; that needs `install`, and the error names it."""

    def app() -> FastAPI:
        made = FastAPI()

        @made.post("/login", dependencies=[Depends(RateLimit("2/min", charge={"status": [401]}, store=store))])
        async def login(password: str, response: Response) -> dict[str, str]:
            response.status_code = 200 if password == "right" else 401
            return {}

        return made

    with pytest.raises(ConfigurationError, match=r"install\(app\)"):
        client(app()).post("/login?password=right")
    installed = app()
    install(installed)
    http = client(installed, "192.0.2.7")
    tries = ["right"] * 4 + ["wrong", "right", "wrong", "right"]
    assert [http.post(f"/login?password={word}").status_code for word in tries] == [200] * 4 + [401, 200, 401, 429]


def test_degrade(store):
    """A refused request may get a cheaper response."""

    async def cached(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("yesterday's")(scope, receive, send)

    app = FastAPI()
    install(app)

    @app.get("/", dependencies=[Depends(RateLimit("1/min", on_refusal=OnRefusal(DEGRADE, handler=cached), store=store))])
    async def home() -> str:
        return "today's"

    http = client(app)
    assert [http.get("/").text for _ in range(2)] == ['"today\'s"', "yesterday's"]


def test_without_install_a_rule_that_degrades_refuses_with_a_retry_time(store):
    """No degrade handler is called then: the response is a refusal with its fields."""
    app = FastAPI()
    degrade = OnRefusal(DEGRADE, handler=PlainTextResponse("yesterday's"))

    @app.get("/", dependencies=[Depends(RateLimit("1/min", on_refusal=degrade, store=store))])
    async def home() -> str:
        return "today's"

    http = client(app)
    refused = [http.get("/") for _ in range(2)][1]
    assert refused.status_code == 429
    assert (refused.headers["retry-after"], refused.headers["cache-control"]) == ("60", "no-store")


@pytest.mark.parametrize("handled", [429, TooManyRequests, None])
def test_a_refusal_by_other_code_than_the_degrade_handler_has_a_retry_time(store, handled):
    """For a rule that degrades: an exception handler of the application, or one that is mounted under that with `install`."""
    degrade = OnRefusal(DEGRADE, handler=PlainTextResponse("yesterday's"))
    app, inner = FastAPI(), FastAPI()
    install(app)
    if handled is None:
        app.mount("/inner", inner)
    else:
        app.add_exception_handler(handled, lambda request, refused: PlainTextResponse("busy", 429))

    @(app if handled else inner).get("/", dependencies=[Depends(RateLimit("1/min", on_refusal=degrade, store=store))])
    async def home() -> str:
        return "today's"

    http = client(app)
    refused = [http.get("/" if handled else "/inner/") for _ in range(2)][1]
    assert (refused.status_code, refused.text == "busy") == (429, handled is not None)
    assert (refused.headers["retry-after"], refused.headers["cache-control"]) == ("60", "no-store")


def test_websockets(store):
    """On a websocket route the dependency refuses the handshake."""
    app = FastAPI()

    @app.websocket("/ws", dependencies=[Depends(RateLimit("1/min", store=store))])
    async def chat(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    http = client(app)
    with http.websocket_connect("/ws") as socket:
        assert socket.receive_text() == "hello"
    with pytest.raises(WebSocketDisconnect) as refused, http.websocket_connect("/ws"):
        pass
    assert refused.value.code == 1013


def test_settlement_of_websockets(store):
    """After `install`, a handshake is settled as a request is: outcomes that do not count are refunded, and places given back."""
    app = FastAPI()
    install(app)
    limits = [RateLimit("fixed window 1/h", charge={"status": [401]}, store=store), RateLimit("9/h", concurrent=1, store=store)]

    @app.websocket("/ws", dependencies=[Depends(limit) for limit in limits])
    async def chat(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())
        await socket.close()

    http = client(app)
    for _ in range(2):
        with http.websocket_connect("/ws") as socket:
            with pytest.raises(WebSocketDisconnect), http.websocket_connect("/ws"):
                pass
            socket.send_text("hello")
            assert socket.receive_text() == "hello"
            socket.receive()


def test_messages_of_a_long_connection_are_not_kept(store):
    """A limit that a handler checks for each message of a websocket keeps no evaluation of earlier messages."""
    app, talk = FastAPI(), RateLimit("fixed window 9/min", store=store)
    install(app)

    @app.websocket("/ws")
    async def chat(socket: WebSocket) -> None:
        await socket.accept()
        while True:
            await socket.receive_text()
            await talk.check(socket)
            await socket.send_json(len(socket.scope["limitkeeper.evaluations"].all))

    with client(app).websocket_connect("/ws") as socket:
        for _ in range(9):
            socket.send_text("hello")
            assert socket.receive_json() == 0
        socket.send_text("hello")
        with pytest.raises(WebSocketDisconnect) as refused:
            socket.receive_json()
        assert refused.value.code == 1013


@pytest.mark.parametrize("first", [False, True])
def test_a_handler_for_refusals_of_ones_own(store, first):
    """An app may have its own response to refusals, registered before or after `install`; the fields are added."""
    app = shop(store, installed=not first)

    @app.exception_handler(TooManyRequests)
    async def busy(request: Request, refused: TooManyRequests) -> Response:
        assert refused.evaluation.refusal is not None
        return PlainTextResponse(f"busy for {refused.evaluation.refusal.retry_after}", 503, {"Cache-Control": "max-age=1"})

    install(app)
    http = client(app)
    for _ in range(10):
        http.post("/checkout")
    answer = http.post("/checkout")
    assert (answer.status_code, answer.text) == (503, "busy for 1")
    assert (answer.headers["retry-after"], answer.headers["x-ratelimit-remaining"]) == ("1", "0")
    assert answer.headers["cache-control"] == "max-age=1"


def test_mistakes_are_errors_at_the_declaration(store):
    """An invalid limit is an error when it is written, not at the first request."""
    for wrong in ({}, {"limit": "5/s", "policy": Policy.read(POLICY), "rule": "checkout"}, {"policy": Policy.read(POLICY)}):
        with pytest.raises(ConfigurationError, match="RateLimit"):
            RateLimit(**wrong)
    with pytest.raises(ConfigurationError, match="no rule 'chekout'; it has: checkout, search"):
        RateLimit(policy=Policy.read(POLICY), rule="chekout")
    with pytest.raises(LimitkeeperError):
        RateLimit("5 per fortnight")
    with pytest.raises(LimitkeeperError):
        RateLimit("5/s", colour="blue")


def test_a_store_by_its_url():
    """A store may be named by its URL."""
    app = FastAPI()

    @app.get("/", dependencies=[Depends(RateLimit("1/min", store="memory://"))])
    async def home() -> dict[str, str]:
        return {}

    assert [client(app).get("/").status_code for _ in range(2)] == [200, 429]


def test_what_has_no_name_is_counted_by_its_route(store):
    """A partial or an object as an endpoint has one limit per route, whatever the client puts into its path."""

    async def item_of(kind: str, item: str) -> str:
        return kind + item

    class View:
        async def __call__(self, item: str) -> str:
            return item

    app = FastAPI()
    limit = RateLimit("fixed window 2/min", store=store)
    for path, view in (("/a/{item}", partial(item_of, "a")), ("/b/{item}", partial(item_of, "b")), ("/c/{item}", View())):
        app.get(path, dependencies=[Depends(limit)])(view)
    asking = client(app)
    for route in "abc":
        assert [asking.get(f"/{route}/{item}").status_code for item in ("1", "2", "3", '"')] == [200, 200, 429, 429]


def test_a_rule_of_another_host_was_not_evaluated(store):
    """A named rule that the middleware left out because of its host is evaluated by the dependency."""
    gate = Gate(Policy.read("limits: [{name: api, match: {host: api.example}, key: ip, limit: fixed window 1/min}]"), store=store)
    app = FastAPI()
    app.add_middleware(RateLimitMiddleware, policy=gate)
    app.get("/", dependencies=[Depends(RateLimit(policy=gate, rule="api"))])(lambda: "")
    assert [client(app).get("/", headers={"Host": "www.example"}).status_code for _ in range(2)] == [200, 429]
    store.clock.advance(60)
    assert [client(app).get("/", headers={"Host": "api.example"}).status_code for _ in range(2)] == [200, 429]


def listing(app: FastAPI, path: str, limit: RateLimit) -> None:
    async def index() -> list[str]:
        return []

    app.get(path, dependencies=[Depends(limit)])(index)


async def prüfen() -> list[str]:
    return []


def test_routes_that_one_function_made_do_not_share(store):
    """Endpoints of one name on one store, one endpoint on several routes, foreign letters: each route counts for itself."""
    app, once = FastAPI(), RateLimit("fixed window 1/min", store=store)
    listing(app, "/users", RateLimit("fixed window 1/min", store=store))
    listing(app, "/orders", RateLimit("fixed window 1/min", store=store))
    app.get("/old", dependencies=[Depends(once)])(prüfen)
    app.get("/new", dependencies=[Depends(once)])(prüfen)
    app.post("/new", dependencies=[Depends(once)])(prüfen)
    for method, path in (("GET", "/users"), ("GET", "/orders"), ("GET", "/old"), ("GET", "/new"), ("POST", "/new")):
        assert [client(app).request(method, path).status_code for _ in range(2)] == [200, 429], path


def test_places_that_include_one_router_do_not_share(store):
    """Nor do routers whose routes have the same paths, where the key has the route."""
    app, router = FastAPI(), APIRouter()
    each = RateLimit("fixed window 1/min", name="each", key=["ip", "route"], store=store)
    router.get("/{item}", dependencies=[Depends(RateLimit("fixed window 1/min", store=store))])(prüfen)
    for prefix in ("/v1", "/v2"):
        app.include_router(router, prefix=prefix)
    for prefix in ("/users", "/orders"):
        other = APIRouter()
        other.get("/")(prüfen)
        app.include_router(other, prefix=prefix, dependencies=[Depends(each)])
    for path in ("/v1/7", "/v2/7", "/users/", "/orders/"):
        assert [client(app).get(path).status_code for _ in range(2)] == [200, 429], path


async def plain() -> str:
    return ""


def test_an_endpoint_on_one_route_has_its_own_name(store):
    """Where the endpoint names its route, that is the limit's name."""
    app = FastAPI()
    app.get("/plain", dependencies=[Depends(RateLimit("5/s", store=store))])(plain)
    assert client(app).get("/plain").headers["ratelimit"].startswith('"plain-')


def test_head_weighs_nothing_in_a_dependency(store):
    """A cost by size is that of the sent bytes."""
    app = FastAPI()
    install(app)
    limit = RateLimit("fixed window 100/min", cost={"response": "1B", "estimate": 1}, store=store)

    @app.api_route("/export", methods=["GET", "HEAD"], dependencies=[Depends(limit)])
    async def export() -> Response:
        return PlainTextResponse("x" * 50)

    http = client(app)
    assert http.head("/export").status_code == 200
    assert http.get("/export").headers["x-ratelimit-remaining"] == "50"
    assert http.get("/export").headers["x-ratelimit-remaining"] == "0"
