"""The ASGI middleware's behaviour towards apps and servers: nothing of theirs is changed, read, blocked or kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from asgi_loop import Exchange, InProcess, Lifespan, scope_of, used
from servers_asgi import Uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.asgi import RateLimitMiddleware
from stand_ins import WrappedStore, driven

ONE = "limits: [{name: api, key: ip, limit: fixed window 5/min}]"
LOGIN = "limits: [{name: login, key: ip, limit: fixed window 2/min, charge: {status: [401]}}]"
BYTES = "limits: [{name: bytes, key: ip, limit: fixed window 100/min, cost: {response: 1kB, estimate: 1}}]"


@pytest.fixture
def gate(store: MemoryStore) -> Gate:
    return Gate(Policy.read(ONE), store=store)


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b"hello"})


def ask(app: Any, path: str = "/", body: bytes = b"", headers: Any = (), **scope: Any) -> Any:
    """One request, as a server makes it; the exchange with all its messages."""

    async def main() -> Exchange:
        exchange = Exchange(body)
        await app(scope_of("GET", path, headers, "192.0.2.1", **scope), exchange.receive, exchange.send)
        return exchange

    return driven(main())


def test_messages_of_the_app_are_not_changed(gate):
    """An app may send the same start message every time: our fields never pile up in it."""
    start = {"type": "http.response.start", "status": 200, "headers": ((b"x-own", b"1"),)}

    async def thrifty(scope: Any, receive: Any, send: Any) -> None:
        await send(start)
        await send({"type": "http.response.body"})

    app = RateLimitMiddleware(thrifty, policy=gate)
    counts = [len(ask(app).messages[0]["headers"]) for _ in range(3)]
    assert counts == [6, 6, 6]
    assert start["headers"] == ((b"x-own", b"1"),)


def test_other_messages_pass_untouched(gate):
    """Early hints, trailers, files passed to the server: any message but the start of a response passes unchanged."""
    hints = {"type": "http.response.early_hint", "links": [b"</a.css>; rel=preload"]}
    file = {"type": "http.response.pathsend", "path": "/etc/hosts"}
    trailers = {"type": "http.response.trailers", "headers": [(b"x", b"1")]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(hints)
        await send({"type": "http.response.start", "status": 200, "headers": [], "trailers": True})
        await send(file)
        await send(trailers)

    sent = ask(RateLimitMiddleware(app, policy=gate)).messages
    assert [sent[0], *sent[2:]] == [hints, file, trailers]
    assert sent[1]["trailers"] is True
    assert (b"x-ratelimit-remaining", b"4") in sent[1]["headers"]


def test_fields_of_the_handler_are_kept(gate):
    """Fields that a response already has stay; exposed names are joined."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"X-RateLimit-Limit", b"7"), (b"access-control-expose-headers", b"X-Own")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    received = [
        (name.lower(), value)
        for name, value in ask(RateLimitMiddleware(app, policy=gate), headers=[("Origin", "https://shop.test")]).messages[0][
            "headers"
        ]
    ]
    assert [value for name, value in received if name == b"x-ratelimit-limit"] == [b"7"]
    exposed = [value for name, value in received if name == b"access-control-expose-headers"]
    assert len(exposed) == 1
    assert exposed[0].startswith(b"X-Own, RateLimit")


def test_a_refusal_reads_nothing(gate):
    """A refused request costs no `receive`, and its answer is two messages."""
    app = RateLimitMiddleware(hello, policy=gate)
    for _ in range(5):
        ask(app)
    refused = ask(app, body=b"x" * 100_000)
    assert refused.read == 0
    assert [message["type"] for message in refused.messages] == ["http.response.start", "http.response.body"]


def test_the_connection_survives_a_refusal(gate):
    """Over one connection of a real server: refused with its body unread, the next request on it is answered."""
    running = Uvicorn(RateLimitMiddleware(hello, policy=gate), [])
    try:
        for _ in range(5):
            assert running.request("POST", "/", [], b"", "").status == 200
        kept = running.connection().sock
        for _ in range(3):
            assert running.request("POST", "/", [], b"x" * 300_000, "").status == 429
        assert running.connection().sock is kept
    finally:
        running.close()


def test_the_decision_is_in_the_scope(gate):
    """`scope["limitkeeper"]` is the evaluation; what servers keep in `state` is untouched."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["limitkeeper"], scope["state"]))
        await hello(scope, receive, send)

    state = {"pool": object()}
    ask(RateLimitMiddleware(app, policy=gate), state=state)
    evaluation, kept = seen[0]
    assert kept is state
    assert (evaluation.allowed, evaluation.decision.remaining, evaluation.keys) == (True, 4, ["192.0.2.1"])


@pytest.mark.parametrize("path", ["/api/items", "/items"])
def test_mount_points_are_part_of_the_path(store, path):
    """Rules match the whole path, whether a server leaves the mount point in `path` or takes it out."""
    gate = Gate(Policy.read("limits: [{name: items, match: /api/items, key: ip, limit: fixed window 1/min}]"), store=store)
    app = RateLimitMiddleware(hello, policy=gate)
    assert ask(app, path, root_path="/api").response("GET").status == 200
    assert ask(app, path, root_path="/api").response("GET").status == 429
    assert ask(app, "/apiitems", root_path="").response("GET").status == 200


def test_mounted_apps(store):
    """Around a mounted app the middleware limits that app alone, by the whole path."""
    gate = Gate(Policy.read("limits: [{name: items, match: /shop/items, key: ip, limit: fixed window 1/min}]"), store=store)

    async def home(request: Any) -> PlainTextResponse:
        return PlainTextResponse(request.url.path)

    inner = Starlette(routes=[Route("/items", home)], middleware=[Middleware(RateLimitMiddleware, policy=gate)])
    running = InProcess(Starlette(routes=[Mount("/shop", inner), Route("/items", home)]), [])
    try:
        answers = [running.request("GET", path, [], b"", "192.0.2.1").status for path in ("/shop/items", "/shop/items", "/items")]
    finally:
        running.close()
    assert answers == [200, 429, 200]


def test_background_tasks_run(gate):
    """A background task runs after its response, as without the middleware."""
    done = threading.Event()

    async def home(request: Any) -> PlainTextResponse:
        return PlainTextResponse("hello", background=BackgroundTask(done.set))

    app = Starlette(routes=[Route("/", home)], middleware=[Middleware(RateLimitMiddleware, policy=gate)])
    assert ask(app).response("GET").body == b"hello"
    assert done.is_set()


def test_exceptions_pass_through(gate):
    """An exception of an app reaches the server unchanged, and is counted as a 500."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ask(RateLimitMiddleware(app, policy=gate))
    assert gate.snapshot().rules[0].statuses == {"5xx": 1}


def test_a_gate_of_its_own_ends_with_the_app(tmp_path):
    """A gate that the middleware made is closed with the app, and made anew when it starts again; a given one is left alone."""
    file = tmp_path / "limitkeeper.yaml"
    file.write_text(ONE)
    app = RateLimitMiddleware(Starlette(routes=[]), policy=str(file))
    gates = []

    async def life() -> None:
        lifespan = Lifespan(app)
        await lifespan.start()
        gates.append(app.gate)
        await lifespan.stop()

    driven(life())
    driven(life())
    assert gates[0] is not gates[1]
    given = Gate(Policy.read(ONE), store=MemoryStore())
    app = RateLimitMiddleware(Starlette(routes=[]), policy=given)
    driven(life())
    assert gates[2] is given


def test_a_policy_that_is_none():
    """Anything but a policy is an error that names the right types."""
    with pytest.raises(ConfigurationError, match="expected a Policy"):
        RateLimitMiddleware(hello, policy=42)  # type: ignore[arg-type]


class Sentinel:
    """Something that can be watched going away."""


@pytest.mark.parametrize("policy", [ONE, LOGIN, BYTES, ONE.replace("5/min", "1/min")], ids=["hit", "outcome", "size", "refused"])
def test_nothing_waits_for_the_garbage_collector(store, policy):
    """A request is freed when it is over: the decision in its scope makes no reference cycle."""
    app = RateLimitMiddleware(hello, policy=Gate(Policy.read(policy), store=store))
    ask(app)
    gc.collect()
    gc.disable()
    try:
        sentinel = Sentinel()
        watched = weakref.ref(sentinel)
        ask(app, state={"sentinel": sentinel})
        del sentinel
        assert watched() is None
    finally:
        gc.enable()


# Settlement --------------------------------------------------------------------------------------------------------


def test_sizes_are_settled_before_the_last_byte(store):
    """A response's size is settled before its last byte is sent: a client that has read the end finds it charged."""
    gate = Gate(Policy.read(BYTES), store=store)
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"x" * 4000, "more_body": True})
        await send({"type": "http.response.body", "body": b"x" * 5000})
        seen.append(used(gate))

    ask(RateLimitMiddleware(app, policy=gate))
    assert seen == [9]


@pytest.mark.parametrize(
    "message",
    [
        {"type": "http.response.pathsend", "path": "/somewhere"},
        {"type": "http.response.zerocopysend", "file": 3, "count": 7500},
    ],
)
def test_files_passed_to_the_server_cost_their_length(store, message):
    """Where the server sends a file itself, its size is that of Content-Length (or the count)."""
    gate = Gate(Policy.read(BYTES), store=store)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"7500")] if "path" in message else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(message)

    ask(RateLimitMiddleware(app, policy=gate))
    assert used(gate) == 8


def test_a_handler_that_raises_owes_as_a_500(store):
    """An exception is settled as a 500 when the response had not begun, else with its status."""
    gate = Gate(Policy.read(LOGIN), store=store)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 401})
        raise KeyError("mine")

    limited = RateLimitMiddleware(app, policy=gate)
    for path, charged in (("/", 0), ("/begun", 1), ("/", 1)):
        with pytest.raises(KeyError):
            ask(limited, path)
        assert used(gate) == charged


@pytest.mark.parametrize("far", [True, False])
def test_a_client_that_goes_away_is_settled(store, far):
    """A request that is cancelled while its handler works stays charged: its outcome is unknown."""
    gate = Gate(Policy.read(LOGIN.replace("limits:", "budget: 60s\nlimits:")), store=WrappedStore(store) if far else store)
    waiting = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        waiting.set()
        await asyncio.sleep(60)

    async def main() -> None:
        exchange = Exchange(b"")
        request = RateLimitMiddleware(app, policy=gate)(scope_of("GET", "/", [], "192.0.2.1"), exchange.receive, exchange.send)
        task = asyncio.create_task(request)
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert left() == 1
        assert gate.snapshot().rules[0].given_back == 0

    def left() -> int:
        entry = gate.compiled.rules[0].default_entries[0]
        return store.decide_one(entry.named, "192.0.2.1", 0, 0, False).remaining  # type: ignore[no-any-return]

    driven(main())


def test_a_stream_that_the_client_leaves(store):
    """A streamed response whose client disconnects is settled with the sent bytes."""
    gate = Gate(Policy.read(BYTES), store=store)

    async def endless() -> Any:
        while True:
            yield b"x" * 1000
            await asyncio.sleep(0)

    async def home(request: Any) -> StreamingResponse:
        return StreamingResponse(endless())

    async def main() -> None:
        sent = 0
        left = asyncio.Event()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal sent
            sent += len(message.get("body", b""))
            if sent >= 5000:
                left.set()

        app = RateLimitMiddleware(Starlette(routes=[Route("/", home)]), policy=gate)
        scope = scope_of("GET", "/", [], "192.0.2.1")
        scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}
        await app(scope, receive, send)

    driven(main())
    assert used(gate) >= 5


# Never a blocking call -----------------------------------------------------------------------------------------------


class FarStore(WrappedStore):
    """A store that must be awaited: a blocking call of it is an error."""

    def decide(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("a blocking call on the loop")

    give_back = decide

    async def adecide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Any:
        await asyncio.sleep(0.001)
        return self.inner.decide(claims, max_wait_us, **options)

    async def agive_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        await asyncio.sleep(0.001)
        return self.inner.give_back(claims, charged_at)


@pytest.mark.parametrize("policy", [ONE, LOGIN, BYTES], ids=["hit", "outcome", "size"])
def test_the_loop_is_never_blocked(store, policy):
    """A remote store is only ever awaited, for the decision and for the settlement."""
    gate = Gate(Policy.read(policy.replace("limits:", "budget: 60s\nlimits:")), store=FarStore(store))
    answer = ask(RateLimitMiddleware(hello, policy=gate)).response("GET")
    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.field("x-ratelimit-remaining") is not None
