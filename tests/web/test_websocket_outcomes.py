"""The outcomes of a handshake and of a message in other cases: denied, broken, abandoned, degraded."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.testing import ManualClock
from limitkeeper.web.asgi import RateLimitMiddleware

CONNECT: dict[str, Any] = {"type": "websocket.connect"}
SCOPE = {"type": "websocket", "path": "/chat", "headers": [], "query_string": b"", "client": ("192.0.2.1", 1)}
SCOPE["extensions"] = {"websocket.http.response": {}}


def text(word: str) -> dict[str, Any]:
    return {"type": "websocket.receive", "text": word}


def connect(app: Any, *came: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that an app sends to its server, for these received ones."""
    went: list[dict[str, Any]] = []

    async def run() -> None:
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in (CONNECT, *came):
            queue.put_nowait(message)

        async def send(message: Any) -> None:
            went.append(message)

        await asyncio.wait_for(app(dict(SCOPE), queue.get, send), 5)

    asyncio.run(run())
    return went


def gate_of(rule: str, store: Any = None) -> Gate:
    return Gate(Policy.read(f"limits: [{{name: chat, key: ip, {rule}}}]"), store=store or MemoryStore(clock=ManualClock()))


async def denies(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.http.response.start", "status": 401, "headers": [(b"x-own", b"1")]})
    await send({"type": "websocket.http.response.body", "body": b"who are you?"})


def test_a_denied_handshake_is_its_status():
    """Where failed logins count, a handshake that the app denies with 401 is one; the denial has the fields of its limit."""
    gate = gate_of("limit: fixed window 2/h, charge: {status: [401]}")
    app = RateLimitMiddleware(denies, policy=gate)
    answers = [connect(app)[0] for _ in range(3)]
    assert [answer["status"] for answer in answers] == [401, 401, 429]
    assert dict(answers[0]["headers"]) | {b"x-own": b"1", b"x-ratelimit-remaining": b"1"} == dict(answers[0]["headers"])
    assert gate.snapshot().rules[0].statuses == {"4xx": 2}


def test_a_handshake_that_breaks():
    """An app that raises before it accepted is settled as a 500; one that is cancelled is unknown and stays charged."""

    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("no database")

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    gate = gate_of("limit: fixed window 2/h, charge: {status: [500]}")
    with pytest.raises(RuntimeError):
        connect(RateLimitMiddleware(breaks, policy=gate))
    with pytest.raises(asyncio.CancelledError):
        connect(RateLimitMiddleware(hangs, policy=gate))
    rule = gate.snapshot().rules[0]
    assert (rule.statuses, rule.passed, rule.given_back) == ({"5xx": 1, "4xx": 1}, 2, 0)


@pytest.mark.parametrize("raises", [True, False])
def test_a_client_that_disconnects_before_the_handshake_stays_charged(raises):
    """Whether the app would have denied it is unknown: it is no 403, and no 500, that gives the charge back."""

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "websocket.disconnect":
            pass
        if raises:
            raise RuntimeError("disconnected")

    gate = gate_of("limit: fixed window 2/h, charge: {status: [401]}")
    with pytest.raises(RuntimeError) if raises else nullcontext():
        connect(RateLimitMiddleware(reads, policy=gate), {"type": "websocket.disconnect", "code": 1001})
    assert gate.snapshot().rules[0].given_back == 0


def test_a_message_that_was_given_up_is_not_lost():
    """An app that stops waiting for a message which is still delayed finds it at its next call."""
    heard: list[str] = []

    async def impatient(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while heard[-1:] != ["three"]:
            try:
                heard.append((await asyncio.wait_for(receive(), 0.02))["text"])
            except TimeoutError:
                heard.append("…")

    gate = gate_of("match: MESSAGE /chat, limit: token bucket 10/s burst 1, on_refusal: wait up to 2s", MemoryStore())
    connect(RateLimitMiddleware(impatient, policy=gate), text("one"), text("two"), text("three"))
    assert [word for word in heard if word != "…"] == ["one", "two", "three"]
    assert "…" in heard
    assert gate.snapshot().rules[0].waiting == 0


def test_a_handshake_is_not_degraded():
    """A degrade handler answers requests; a handshake beyond its rule is refused, with its retry time."""

    async def accepts(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})

    gate = Gate(
        Policy.read("limits: [{name: chat, key: ip, limit: fixed window 1/h, on_refusal: degrade cheaper}]"),
        store=MemoryStore(clock=ManualClock()),
        handlers={"cheaper": denies},
    )
    app = RateLimitMiddleware(accepts, policy=gate)
    assert connect(app)[0]["type"] == "websocket.accept"
    refused = connect(app)[0]
    assert refused["status"] == 429
    assert [value for name, value in refused["headers"] if name == b"retry-after"] == [b"3600"]


def test_text_costs_its_bytes():
    """The messages of a connection cost their bytes, of text those on the wire."""

    async def speaks(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "é" * 10})
        await send({"type": "websocket.send", "bytes": b"12345"})

    gate = gate_of("limit: fixed window 1000/h, cost: {response: 1B}")
    app = RateLimitMiddleware(speaks, policy=gate)
    connect(app)
    left = dict(connect(app)[0]["headers"])[b"x-ratelimit-remaining"]
    assert int(left) == 1000 - 25 - 1  # the first one's bytes, and the estimate of the second
