"""Any ASGI app behind a policy: Starlette, FastAPI, Litestar, Quart, Django.

    app = RateLimitMiddleware(app, policy=Policy.load("limitkeeper.yaml"))

A request that passes costs one decision and a `send` that adds the fields; nothing of its body is touched. A refused one is
answered here: no handler is called, no byte of its body is read. `scope["limitkeeper"]` is what was decided.

    http        asked when the request comes; settled (costs by outcome or size) before the last byte of the response goes
    websocket   asked at the handshake, and for every message where a rule names MESSAGE: see asgi_socket.py
    lifespan    a gate that was made here is closed with the app
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate, gate_of
from ..policy.model import Policy
from ..stores import Store
from .asgi_fast import START, AsgiRequestContext, HeaderSend, admitted, begun, has_origin
from .asgi_websocket import LimitedWebSocket, refuse_socket
from .headers import body, fields
from .response_settlement import FAILED, GONE, UNKNOWN, outcome

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


class RateLimitMiddleware:
    """`policy` is a Policy, the path of its file, or a ready Gate. `store` and `handlers` go to the gate that is made of it."""

    def __init__(
        self,
        app: ASGIApp,
        policy: Policy | str | Path | Gate,
        *,
        store: Store | None = None,
        handlers: Mapping[str, ASGIApp] | None = None,
    ) -> None:
        self.app = app
        self._made_of = None if isinstance(policy, Gate) else (policy, store, handlers)
        self._open(policy if isinstance(policy, Gate) else gate_of(policy, store=store, handlers=handlers))

    def _open(self, gate: Gate) -> None:
        self.gate = gate
        self._quick = gate.quick
        self._closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind != "http":
            await (self._socket if kind == "websocket" else self._lifespan)(scope, receive, send)
            return
        sending = admitted(self._quick, scope, send)
        if sending is None:
            await self._unusual(scope, receive, send)
            return
        try:
            await self.app(scope, receive, sending)
        except BaseException as error:
            sending.ended(outcome(error) or GONE)
            raise
        sending.ended(FAILED)

    async def _unusual(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that must be waited for, that is refused, or that owes something when its response is known."""
        passage = scope["limitkeeper"]
        if passage is None:
            passage = scope["limitkeeper"] = await self.gate.aask(AsgiRequestContext(scope))
            passage.origin = has_origin(scope)
        if passage.owes and passage.allowed:
            await SettlingSend(passage, send).run(self.app, scope, receive)
            return
        passage.facts = None  # no circle: see `admitted`
        if not passage.allowed:
            await refuse(passage, scope, receive, send)
        else:
            sending = HeaderSend(passage, send)
            try:
                await self.app(scope, receive, sending)
            except BaseException as error:
                sending.ended(outcome(error) or GONE)
                raise
            sending.ended(FAILED)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        facts = AsgiRequestContext(scope)
        passage = self._quick(facts)
        if passage is None:
            passage = await self.gate.aask(facts)
        scope["limitkeeper"] = passage
        passage.origin = has_origin(scope)
        if not passage.allowed:
            await refuse_socket(passage, facts, scope, receive, send)
            return
        await LimitedWebSocket(self.gate, passage, scope, receive, send).run(self.app)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A gate that was made here ends with the app, and begins again with it."""
        if scope["type"] != "lifespan" or self._made_of is None:
            await self.app(scope, receive, send)
            return
        if self._closed:
            policy, store, handlers = self._made_of
            self._open(gate_of(policy, store=store, handlers=handlers))

        async def closing(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                self._closed = True
                await self.gate.aclose()
            await send(message)

        await self.app(scope, receive, closing)


async def refuse(passage: Evaluation, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers instead of the handler: with the rule's degrade handler, or with why and when to come back."""
    degrade = passage.degrade
    if degrade is not None:
        await degrade(scope, receive, HeaderSend(passage, send))
        return
    assert passage.refusal is not None
    kind, content = body(passage, AsgiRequestContext(scope).header("accept"))
    told = [*fields(passage), (b"content-type", kind), (b"content-length", b"%d" % len(content))]
    await send({"type": START, "status": passage.refusal.status, "headers": told})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


class Listening:
    """A `receive` that notes whether the client has disconnected."""

    __slots__ = ("gone", "receive")

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.gone = False

    async def __call__(self) -> Message:
        message = await self.receive()
        self.gone = self.gone or message["type"] == "http.disconnect"
        return message


class SettlingSend:
    """A `send` for a passage that is settled when its response is known: which status, how many bytes."""

    def __init__(self, passage: Evaluation, send: Send) -> None:
        self.passage = passage
        self.send = send
        self.status = 0
        self.size = 0
        self.declared: int | None = None
        self.head = False
        self.settled = False

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == START:
            self.status = message["status"]
            self.declared = declared(message)
            message = begun(self.passage, message)
        elif kind == "http.response.body":
            self.size += len(message.get("body", b""))
            if not message.get("more_body", False):
                await self.settle()
        elif kind in ("http.response.pathsend", "http.response.zerocopysend"):
            self.size += message.get("count") or 0
            if not message.get("more_body", False):
                self.size = self.declared or self.size
                await self.settle()
        await self.send(message)

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """The app, and what it owes, however it ends."""
        self.head = scope["method"] == "HEAD"
        listening = Listening(receive)
        try:
            await app(scope, listening, self)
        except BaseException as error:
            self.ended(UNKNOWN if listening.gone else outcome(error))
            raise
        else:
            self.ended(UNKNOWN if listening.gone else FAILED)
        finally:
            if not self.settled:
                # Whoever is being cancelled can't wait for a store: this is finished for it.
                await asyncio.shield(asyncio.ensure_future(self.settle()))

    def ended(self, status: int) -> None:
        """The handler is done: unless its response had begun, this is what became of it."""
        if not self.status:
            self.status = status
            self.passage.responded(status or GONE)

    async def settle(self) -> None:
        if not self.settled:
            self.settled = True
            await self.passage.adone(self.status, 0 if self.head else self.size)
            self.passage.facts = None


def declared(message: Message) -> int | None:
    """The size that a response says it has, for those who hand a file to the server."""
    for name, value in message.get("headers") or ():
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None
