"""How requests end behind the ASGI middleware, over local and remote stores: counted once, settled by the sent bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi_loop import Exchange, Lifespan, scope_of, used
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from starlette_client import TestClient

from limitkeeper import MemoryStore
from limitkeeper.algorithms.claim import Claim
from limitkeeper.policy import Evaluation, Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.asgi import RateLimitMiddleware
from stand_ins import WrappedStore, driven

ONE = "limits: [{name: api, key: ip, limit: fixed window 5/min}]"
LOGIN = "limits: [{name: login, key: ip, limit: fixed window 5/min, charge: {status: [401]}}]"
BYTES = "limits: [{name: bytes, key: ip, limit: fixed window 100/min, cost: {response: 1kB, estimate: 1}}]"


@pytest.fixture(params=[True, False], ids=["near", "far"])
def gate_of(request: pytest.FixtureRequest, store: MemoryStore) -> Any:
    def build(text: str) -> Gate:
        return Gate(Policy.read(f"budget: 10s\n{text}"), store=WrappedStore(store, local=request.param), clock=store.clock)

    return build


def asked(
    gate: Gate, app: Any, method: str = "GET", gone: asyncio.Event | None = None, left: bool = False, **scope: Any
) -> Exchange:
    """One request to an app behind a gate; `error` is what reaches the server. `left`: its client has disconnected already."""

    async def main() -> Exchange:
        exchange = Exchange(b"")
        if left:
            exchange.over.set()
        said = scope_of(method, "/", [], "192.0.2.1", **scope)
        task = asyncio.ensure_future(RateLimitMiddleware(app, policy=gate)(said, exchange.receive, exchange.send))
        if gone is not None:
            await gone.wait()
            task.cancel()
        (exchange.error,) = await asyncio.gather(task, return_exceptions=True)
        return exchange

    return driven(main())


def saying(*messages: dict[str, Any]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    return app


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(size: int = 0, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"x" * size, "more_body": more}


@pytest.mark.parametrize("text", [ONE, LOGIN])
def test_a_handler_that_raises_is_counted_as_500(gate_of, text):
    """A response that never began is a 500 in the numbers; one that had begun keeps its status."""
    gate = gate_of(text)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["query_string"]:
            await send(start(403))
        raise ValueError("mine")

    for query, statuses in ((b"", {"5xx": 1}), (b"x", {"5xx": 1, "4xx": 1})):
        assert str(asked(gate, app, query_string=query).error) == "mine"
        assert gate.snapshot().rules[0].statuses == statuses


def test_a_response_whose_start_was_never_sent_is_a_500(gate_of):
    """The start of a response whose size is charged waits for its first part; if the application raises before it, the server
    answers 500, and that is the outcome."""
    gate = gate_of(BYTES.replace("[{", "[{name: failed, key: ip, limit: 5/min, charge: {status: [5xx]}}, {"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(200))
        raise ValueError("mine")

    exchange = asked(gate, app)
    assert (str(exchange.error), exchange.messages, used(gate)) == ("mine", [], 1)
    assert gate.snapshot().rules[0].statuses == {"5xx": 1}


@pytest.mark.parametrize("text", [LOGIN, "limits: [{name: running, key: ip, concurrent: 5}]"])
def test_the_start_of_a_stream_is_sent_at_once(gate_of, text):
    """A stream whose size is not charged begins when its application sends its start, not with its first part."""
    begun = asyncio.Event()
    went: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start())
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        async def send(message: Any) -> None:
            went.append(message["type"])

        said = scope_of("GET", "/", [], "192.0.2.1")
        task = asyncio.ensure_future(RateLimitMiddleware(app, policy=gate_of(text))(said, Exchange(b"").receive, send))
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    driven(main())
    assert went == ["http.response.start"]


@pytest.mark.parametrize("text", [ONE, LOGIN])
def test_a_client_that_went_away_is_counted_as_such(gate_of, text):
    """A request that is cancelled before its response is neither a success nor the application's error, and stays charged."""
    gate = gate_of(text)

    called = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.set()
        await asyncio.Event().wait()

    asked(gate, app, gone=called)
    assert gate.snapshot().rules[0].statuses == {"4xx": 1}
    assert used(gate) == 1


@pytest.mark.parametrize("ending", ["returns", "raises", "answers 200", "answers 401"])
def test_a_client_that_disconnects_is_charged_unless_its_outcome_is_known(gate_of, ending):
    """A handler that ends without a response because its client has disconnected gives nothing back: a failed login would be
    free. A response that was started is known, and counts by its status."""
    gate = gate_of(LOGIN)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if ending == "raises":
            raise OSError("the client has disconnected")
        if ending.startswith("answers"):
            await send(start(int(ending[-3:])))
            await send(body())

    asked(gate, app, left=True)
    assert used(gate) == (0 if ending == "answers 200" else 1)
    assert gate.snapshot().rules[0].statuses == ({"2xx": 1} if ending == "answers 200" else {"4xx": 1})


def test_a_handler_that_raises_is_known_to_have_failed(gate_of):
    """An exception while the client is connected is a 500, which gives back what only a 401 is charged for."""
    gate = gate_of(LOGIN)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("mine")

    asked(gate, app)
    assert used(gate) == 0


def test_an_estimate_stays_charged_where_the_size_is_unknown(gate_of):
    """A client that disconnects before its response does not get the estimate of its size back."""
    gate = gate_of(BYTES.replace("estimate: 1", "estimate: 7"))
    called = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.set()
        await asyncio.Event().wait()

    asked(gate, app, gone=called)
    assert used(gate) == 7


@pytest.mark.parametrize("text", [ONE, LOGIN])
def test_an_app_without_a_response_has_failed(gate_of, text):
    """Servers answer 500 for an app that returned without a response, and so it is counted, once."""
    gate = gate_of(text)
    asked(gate, saying())
    asked(gate, saying(start(), body()))
    assert gate.snapshot().rules[0].statuses == {"5xx": 1, "2xx": 1}


def test_a_response_to_head_has_no_size(gate_of):
    """The body that an app sends to HEAD is dropped, so it costs nothing; to GET it does."""
    gate = gate_of(BYTES)
    app = saying(start(), body(4_000, True), body(3_500))
    asked(gate, app, "HEAD")
    assert used(gate) == 0
    asked(gate, app)
    assert used(gate) == 8


def test_a_message_without_a_body_weighs_nothing(gate_of):
    """The end of a response may come without a byte."""
    gate = gate_of(BYTES)
    asked(gate, saying(start(), {"type": "http.response.body"}))
    assert used(gate) == 0


def test_a_refusal_to_head_has_no_body(gate_of):
    """HEAD is refused with the length of the answer, and without a byte of it."""
    gate = gate_of(ONE.replace("5/min", "1/min"))
    app = saying(start(), body())
    asked(gate, app)
    received, sent = asked(gate, app, "HEAD").messages
    assert (received["status"], sent["body"]) == (429, b"")
    assert int(dict(received["headers"])[b"content-length"]) == len(asked(gate, app).messages[1]["body"])


def test_a_handler_finds_what_was_decided(gate_of):
    """`scope["limitkeeper"]` is the evaluation of the request, with a local store or a remote one."""
    found = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(scope["limitkeeper"])

    asked(gate_of(ONE), app)
    assert [evaluation.decision.remaining for evaluation in found] == [4]


def test_hints_before_a_response_settle_nothing(gate_of):
    """Only the end of a response determines its outcome."""
    gate = gate_of(LOGIN)
    asked(gate, saying({"type": "http.response.early_hint", "links": []}, start(401), body()))
    assert (used(gate), gate.snapshot().rules[0].given_back) == (1, 0)


@pytest.mark.parametrize(
    ("headers", "kilobytes"),
    [
        ([(b"x-number", b"999000"), (b"content-length", b"2000"), (b"etag", b"7")], 2),
        ([(b"content-length", b"many"), (b"content-length", b"3000")], 3),
        ([(b"content-length", b"")], 0),
        ([], 0),
    ],
)
def test_a_file_has_the_size_that_its_response_declares(gate_of, headers, kilobytes):
    """Where the server sends a file itself, its Content-Length is its size, and no other length is."""
    gate = gate_of(BYTES)
    exchange = asked(gate, saying(start(200, *headers), {"type": "http.response.pathsend", "path": "/x"}))
    assert [message["type"] for message in exchange.messages] == ["http.response.start", "http.response.pathsend"]
    assert used(gate) == kilobytes


def test_a_socket_is_let_in_by_any_store(gate_of):
    """A handshake waits for a remote store like a request does, and the handler finds its decision."""
    found = []

    async def talk(socket: WebSocket) -> None:
        found.append(socket.scope["limitkeeper"])
        await socket.accept()
        await socket.close()

    app = RateLimitMiddleware(Starlette(routes=[WebSocketRoute("/", talk)]), policy=gate_of(ONE))
    with TestClient(app).websocket_connect("/"):
        pass
    (evaluation,) = found
    assert isinstance(evaluation, Evaluation)
    assert evaluation.decision.remaining == 4


def test_other_protocols_are_not_the_middlewares(gate_of):
    """A scope that is no request, socket or lifespan goes to the app as it is."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    for policy in (gate_of(ONE), Policy.read(ONE)):
        driven(RateLimitMiddleware(app, policy=policy)({"type": "smtp"}, "receive", "send"))
    assert seen == [({"type": "smtp"}, "receive", "send")] * 2


class Table:
    """Overrides that record whether they were closed."""

    closed = 0

    def get(self, key: str) -> None:
        return None

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("end", ["complete", "failed"])
@pytest.mark.parametrize("own", [True, False], ids=["policy", "gate"])
def test_a_gate_ends_with_the_app_that_made_it(own, end):
    """Resources that the middleware opened are closed when the app has shut down, not before; a given gate is left alone."""
    table = Table()
    policy = Policy.of(limits=[{"name": "api", "key": "ip", "limit": "fixed window 5/min"}])
    (one,) = policy.rules
    object.__setattr__(one, "overrides", table)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.shutdown":
                await send({"type": f"{kind}.{end}"})
                return
            await send({"type": f"{kind}.complete"})

    async def main() -> None:
        lifespan = Lifespan(RateLimitMiddleware(app, policy=policy if own else Gate(policy)))
        await lifespan.start()
        assert table.closed == 0
        await lifespan.said.put({"type": "lifespan.shutdown"})
        await lifespan.task
        assert (await lifespan.received.get())["type"] == f"lifespan.shutdown.{end}"
        assert table.closed == (1 if own else 0)

    driven(main())


def test_parts_of_a_file_add_up(gate_of):
    """A file that is passed to the server in parts costs all of them, with or without a declared length."""
    part = {"type": "http.response.zerocopysend", "file": 3, "count": 2_000}
    for headers in ((), ((b"content-length", b"6000"),)):
        gate = gate_of(BYTES)
        gate.store.reset([Claim(gate.compiled.rules[0].default_entries[0].named, "192.0.2.1", 1)])
        asked(gate, saying(start(200, *headers), {**part, "more_body": True}, {**part, "more_body": True}, part))
        assert used(gate) == 6
