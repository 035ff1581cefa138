"""Websockets behind a policy: the handshake and the messages, in process and behind real servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import websockets.asyncio.client
import websockets.exceptions
from servers_asgi import Hypercorn, Uvicorn
from signed_tokens import SECRET, token
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from starlette_client import TestClient

from limitkeeper import MemoryStore, RedisStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.identity.jwt import Jwt, Verifier
from limitkeeper.web.asgi import RateLimitMiddleware
from stand_ins import WrappedStore

CONNECT = "limits: [{name: connect, match: GET /chat, key: ip, limit: fixed window 2/h}]"
MESSAGES = "limits: [{name: talk, match: MESSAGE /chat, key: ip, limit: fixed window 3/h, message: Slow down.}]"


def chat(gate: Gate, log: list[str] | None = None) -> RateLimitMiddleware:
    """Echoes everything; records how the connection ended."""
    noted = [] if log is None else log

    async def talk(socket: WebSocket) -> None:
        await socket.accept(headers=[(b"x-own", b"1")])
        try:
            while True:
                await socket.send_text(await socket.receive_text())
        except WebSocketDisconnect as end:
            noted.append(f"{end.code} {end.reason}")
            await socket.close()  # one message too many, as apps may send it

    return RateLimitMiddleware(Starlette(routes=[WebSocketRoute("/chat", talk)]), policy=gate)


@pytest.fixture
def gate_of(store: MemoryStore) -> Any:
    return lambda text: Gate(Policy.read(text), store=store)


def test_a_handshake_is_a_get(gate_of):
    """A handshake counts as a GET, has what is left, and is refused like any request where the server can."""
    http = TestClient(chat(gate_of(CONNECT)), client=("192.0.2.1", 1))
    for left in ("1", "0"):
        with http.websocket_connect("/chat") as socket:
            socket.send_text("hello")
            assert socket.receive_text() == "hello"
            received = dict(socket.extra_headers)
            assert (received[b"x-own"], received[b"x-ratelimit-remaining"]) == (b"1", left.encode())
    with pytest.raises(Exception) as refused, http.websocket_connect("/chat"):
        pass
    response = refused.value
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3600"
    assert response.json()["code"] == "RATE_LIMITED"


def test_a_server_without_denial_responses(gate_of):
    """Where the server can't send a response instead, the connection is closed before it was accepted, with 1013."""
    app = chat(gate_of(CONNECT.replace("2/h", "1/h")))

    async def connect() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        came = [{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000}]

        async def receive() -> dict[str, Any]:
            return came.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/chat", "headers": [], "query_string": b"", "client": ("192.0.2.1", 1)}
        await app(scope, receive, send)
        return sent

    assert asyncio.run(connect())[0]["type"] == "websocket.accept"
    message = "Too many requests. Retry after 3600s."
    assert asyncio.run(connect()) == [{"type": "websocket.close", "code": 1013, "reason": message}]


def test_messages_are_counted_where_a_rule_names_them(gate_of):
    """A message beyond the limit closes the connection with 1013; the app gets a disconnect, and its later messages are
    dropped."""
    log: list[str] = []
    http = TestClient(chat(gate_of(MESSAGES), log), client=("192.0.2.1", 1))
    with http.websocket_connect("/chat") as socket:
        for word in ("one", "two", "three"):
            socket.send_text(word)
            assert socket.receive_text() == word
        socket.send_text("four")
        with pytest.raises(WebSocketDisconnect) as end:
            socket.receive_text()
    assert (end.value.code, end.value.reason) == (1013, "Slow down.")
    assert log == ["1013 Slow down."]


@pytest.mark.parametrize("hello", [{"text": "ä" * 1000}, {"bytes": b"x" * 2000}])
def test_messages_are_charged_their_size(gate_of, hello):
    """A cost by size charges each message its own bytes."""
    text = MESSAGES.replace("3/h", "4/h").replace("message:", "cost: {response: 1kB}, message:")
    heard: list[str] = []

    async def listener(scope: Any, receive: Any, send: Any) -> None:
        while "websocket.disconnect" not in heard:
            heard.append((await receive())["type"])

    came = [{"type": "websocket.connect"}, *[{"type": "websocket.receive", **hello}] * 4]

    async def receive() -> Any:
        return came.pop(0)

    async def send(message: Any) -> None:
        pass

    scope = {"type": "websocket", "path": "/chat", "headers": [], "query_string": b"", "client": ("192.0.2.1", 1)}
    asyncio.run(RateLimitMiddleware(listener, policy=gate_of(text))(scope, receive, send))
    assert heard == ["websocket.connect", *["websocket.receive"] * 2, "websocket.disconnect"]


def test_nothing_is_said_after_the_end(gate_of):
    """Once a connection was closed by the limit, the app's messages are dropped and every receive returns the disconnect."""
    went: list[Any] = []
    heard: list[str] = []

    async def stubborn(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        for _ in range(4):
            heard.append((await receive())["type"])
            await send({"type": "websocket.send", "text": "and another thing"})
        await send({"type": "websocket.close"})

    came = [{"type": "websocket.connect"}, *[{"type": "websocket.receive", "text": "x"}] * 4]

    async def receive() -> Any:
        return came.pop(0)

    async def send(message: Any) -> None:
        went.append(message["type"])

    scope = {"type": "websocket", "path": "/chat", "headers": [], "query_string": b"", "client": ("192.0.2.1", 1)}
    asyncio.run(RateLimitMiddleware(stubborn, policy=gate_of(MESSAGES.replace("3/h", "1/h")))(scope, receive, send))
    assert went == ["websocket.accept", "websocket.send", "websocket.close"]
    assert heard == ["websocket.receive", *["websocket.disconnect"] * 3]


@pytest.mark.parametrize("error", [OSError("disconnected"), RuntimeError("closed before")])
def test_a_message_too_many_of_a_client_that_has_disconnected(gate_of, error):
    """An app gets the disconnect also where the server raises, since the connection that the limit closes was closed before."""
    log: list[str] = []
    came = [{"type": "websocket.connect"}, *[{"type": "websocket.receive", "text": "x"}] * 4]

    async def receive() -> Any:
        return came.pop(0)

    async def send(message: Any) -> None:
        if message["type"] == "websocket.close":
            raise error

    scope = {"type": "websocket", "path": "/chat", "headers": [], "query_string": b"", "client": ("192.0.2.1", 1)}
    asyncio.run(chat(gate_of(MESSAGES), log)(scope, receive, send))
    assert log == ["1013 Slow down."]


def test_messages_keep_the_identity_of_their_handshake(store, clock):
    """A token that expires while its connection is open leaves the limit, the tier and the penalty box of its user in force."""
    verifier = Verifier(SECRET, ("HS256",), now_us=clock.now_us)
    identify = {"user": Jwt("sub", verifier), "plan": Jwt("plan", verifier, "free")}
    limit = {"by": "plan", "free": "fixed window 1000/h", "trial": "fixed window 3/h"}
    rule = {"name": "talk", "match": "MESSAGE /chat", "key": "user", "limit": limit, "message": "Slow down."}
    gate = Gate(Policy.of(identify=identify, limits=[rule]), store=store)
    log: list[str] = []
    http = TestClient(chat(gate, log), client=("192.0.2.1", 1))
    expires = int(clock.now_us() / 1e6) + 60
    with http.websocket_connect("/chat", headers=token(sub="ann", plan="trial", exp=expires)) as socket:
        clock.advance(61)
        for _ in range(3):
            socket.send_text("x")
            assert socket.receive_text() == "x"
        socket.send_text("x")
        with pytest.raises(WebSocketDisconnect):
            socket.receive_text()
    assert log == ["1013 Slow down."]


def test_messages_are_free_unless_named(gate_of):
    """A rule for all methods applies to handshakes, never to messages."""
    http = TestClient(chat(gate_of("limits: [{name: api, key: ip, limit: fixed window 2/h}]")))
    with http.websocket_connect("/chat") as socket:
        for _ in range(10):
            socket.send_text("hello")
            assert socket.receive_text() == "hello"


def test_messages_that_wait(gate_of, clock):
    """A rule that waits holds a message back until its start: the connection itself slows the client down."""
    policy = "limits: [{name: talk, match: MESSAGE /chat, key: ip, limit: token bucket 10/s burst 1, on_refusal: wait up to 1s}]"
    gate = gate_of(policy)
    before = clock.now_us()
    with TestClient(chat(gate)).websocket_connect("/chat") as socket:
        for _ in range(4):
            socket.send_text("hello")
            assert socket.receive_text() == "hello"
    assert clock.now_us() - before == 300_000
    assert gate.snapshot().rules[0].waited == 3


def test_a_long_reason_fits(gate_of):
    """A close frame holds 123 bytes of reason: a longer one is cut between characters."""
    gate = gate_of(MESSAGES.replace("Slow down.", "ü" * 100).replace("3/h", "1/h"))
    with TestClient(chat(gate)).websocket_connect("/chat") as socket:
        socket.send_text("one")
        assert socket.receive_text() == "one"
        socket.send_text("two")
        with pytest.raises(WebSocketDisconnect) as end:
            socket.receive_text()
    assert end.value.reason == "ü" * 61


def test_a_reload_counts_messages(gate_of):
    """A policy that names messages from now on applies to open connections."""
    gate = gate_of("limits: [{name: other, match: /other, key: ip, limit: fixed window 1/h}]")
    with TestClient(chat(gate)).websocket_connect("/chat") as socket:
        socket.send_text("free")
        assert socket.receive_text() == "free"
        gate.reload(Policy.read(MESSAGES.replace("3/h", "1/h")))
        socket.send_text("one")
        assert socket.receive_text() == "one"
        socket.send_text("two")
        with pytest.raises(WebSocketDisconnect):
            socket.receive_text()


def test_outcomes_of_connections(gate_of):
    """A charge by outcome is settled when the connection ends: one that was accepted is a 101."""
    gate = gate_of("limits: [{name: failed, match: /chat, key: ip, limit: fixed window 2/h, charge: {status: [403]}}]")
    for _ in range(4):
        with TestClient(chat(gate)).websocket_connect("/chat") as socket:
            socket.send_text("hello")
            socket.receive_text()
    assert gate.snapshot().rules[0].given_back == 4


@pytest.mark.parametrize("server", [Uvicorn, Hypercorn])
def test_behind_a_server(server, gate_of):
    """Over the wire: the third handshake is a 429 with its fields and body, the fourth message closes with 1013."""
    running = server(chat(gate_of(CONNECT[:-1] + MESSAGES.partition("[")[2].join((", ", "")))), [])

    async def talk() -> tuple[int, int]:
        url = f"ws://127.0.0.1:{running.port}/chat"
        connect = websockets.asyncio.client.connect
        async with connect(url) as first:
            for word in ("one", "two", "three"):
                await first.send(word)
                assert await first.recv() == word
            await first.send("four")
            with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
                await first.recv()
        async with connect(url) as second:
            assert second.response is not None
            assert second.response.headers["X-RateLimit-Remaining"] == "0"
        with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
            async with connect(url):
                pass
        response = refused.value.response
        assert response.headers["Retry-After"].isdigit()
        assert json.loads(response.body)["code"] == "RATE_LIMITED"
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, response.status_code

    try:
        assert asyncio.run(talk()) == (1013, 429)
    finally:
        running.close()


@pytest.mark.parametrize("iterations", range(1, 12))
def test_a_cancelled_receive_loses_no_message(iterations):
    """An app that stops waiting while a remote store settles a message gets it on its next call."""
    text = "budget: 60s\nlimits: [{name: talk, match: MESSAGE /chat, key: ip, limit: 100/s, charge: {status: [401]}}]"
    gate = Gate(Policy.read(text), store=WrappedStore(MemoryStore()))
    came: list[Any] = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "a"}]
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        first = asyncio.ensure_future(receive())
        for _ in range(iterations):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        message = await receive() if first.cancelled() else first.result()
        got.append(message.get("text"))

    async def receive() -> Any:
        return came.pop(0) if came else {"type": "websocket.disconnect"}

    async def send(message: Any) -> None: ...

    scope = {"type": "websocket", "path": "/chat", "headers": [], "query_string": b"", "client": ("192.0.2.1", 50000)}
    asyncio.run(RateLimitMiddleware(app, gate)(scope, receive, send))
    assert got == ["a"]


@pytest.mark.parametrize("cost", [1, {"response": "1B"}])
def test_a_message_is_charged_once_however_often_its_app_stops_waiting(cost, valkey):
    """A store that is deciding about a message goes on when the app cancels its `receive`; the next one has that decision."""
    name, sent = f"chat {cost}", "abcdefghijkl"
    rule = {"name": "talk", "match": "MESSAGE /chat", "key": "ip", "limit": "fixed window 1000/30 days", "cost": cost}
    came: list[Any] = [{"type": "websocket.receive", "text": letter} for letter in sent]
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for iterations in range(len(sent)):
            for _ in range(3):
                attempt = asyncio.ensure_future(receive())
                for _ in range(iterations):
                    await asyncio.sleep(0)
                attempt.cancel()
                await asyncio.wait({attempt})
                if not attempt.cancelled():
                    break
            got.append((await receive() if attempt.cancelled() else attempt.result())["text"])

    async def receive() -> Any:
        return came.pop(0)

    async def send(message: Any) -> None: ...

    async def left() -> int:
        async with RedisStore(valkey.url) as store:
            gate = Gate(Policy.of(name=name, limits=[rule], budget="60s"), store=store)
            scope = {"type": "websocket", "path": "/chat", "headers": [], "query_string": b"", "client": ("192.0.2.1", 50000)}
            await RateLimitMiddleware(app, gate)(scope, receive, send)
            named = gate.compiled.rules[0].default_entries[0].named
            return (await store.adecide_one(named, "192.0.2.1", 0, 0, False)).remaining

    assert asyncio.run(left()) == 1000 - len(sent)
    assert "".join(got) == sent


def test_each_message_goes_to_one_receive_also_after_an_error(valkey):
    """Two tasks that receive get different messages; an evaluation that fails is the error of one `receive`."""
    rule = {"name": "talk", "match": "MESSAGE /chat", "key": "ip", "limit": "fixed window 1000/30 days"}
    came: list[Any] = [{"type": "websocket.receive", "text": letter} for letter in "abcdef"]
    got: list[str] = []

    async def fail(*call: Any) -> None:
        raise ZeroDivisionError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pair = await asyncio.gather(receive(), receive())
        evaluate = receive.__self__._evaluate
        receive.__self__._evaluate = fail
        with pytest.raises(ZeroDivisionError):
            await receive()
        receive.__self__._evaluate = evaluate
        got.extend(one["text"] for one in [*pair, await receive(), await receive()])

    async def receive() -> Any:
        return came.pop(0)

    async def send(message: Any) -> None: ...

    async def main() -> None:
        async with RedisStore(valkey.url) as store:
            gate = Gate(Policy.of(name="pairs", limits=[rule], budget="60s"), store=store)
            scope = {"type": "websocket", "path": "/chat", "headers": [], "query_string": b"", "client": ("192.0.2.1", 50000)}
            await RateLimitMiddleware(app, gate)(scope, receive, send)

    asyncio.run(main())
    assert (sorted(got[:2]), got[2:]) == (["a", "b"], ["d", "e"])
