"""ASGI middleware: puts a policy in front of any ASGI app (Starlette, FastAPI, Litestar, Quart, Django).

    app = RateLimitMiddleware(app, policy=Policy.load("limitkeeper.yaml"))

An allowed request costs one decision and a `send` that adds the fields; its body is not touched. A refused request is answered
here: no handler is called and none of its body is read. `scope["limitkeeper"]` is the evaluation.

    http        evaluated when the request arrives; settled (costs by outcome or size) before the last byte is sent
    websocket   evaluated at the handshake, and for every message where a rule names MESSAGE: see asgi_websocket.py
    lifespan    a gate that was made here is closed with the app
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate, gate_of
from ..policy.model import Policy
from ..stores import Store
from .asgi_fast import (
    START,
    ASGIApp,
    AsgiRequestContext,
    HeaderSend,
    Message,
    Receive,
    Scope,
    Send,
    add_fields,
    admit,
    has_origin,
)
from .asgi_websocket import LimitedWebSocket, refuse_websocket
from .policy_flags import PolicyFlags
from .ratelimit_fields import fields
from .refusal_body import body
from .response_settlement import FAILED, GONE, UNKNOWN, Settlement, outcome_of


class RateLimitMiddleware:
    """`policy` is a Policy, the path of its file, or a Gate. `store` and `handlers` are for the gate that is made from it."""

    def __init__(
        self,
        app: ASGIApp,
        policy: Policy | str | Path | Gate,
        *,
        store: Store | None = None,
        handlers: Mapping[str, ASGIApp] | None = None,
    ) -> None:
        self.app = app
        self._gate_source = None if isinstance(policy, Gate) else (policy, store, handlers)
        self._open(policy if isinstance(policy, Gate) else gate_of(policy, store=store, handlers=handlers))

    def _open(self, gate: Gate) -> None:
        self.gate = gate
        self._ask_nowait = gate.ask_nowait
        self._flags = PolicyFlags(gate)
        self._closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind != "http":
            await (self._websocket if kind == "websocket" else self._lifespan)(scope, receive, send)
            return
        header_send = admit(self._ask_nowait, scope, send)
        if header_send is None:
            header_send = await self._admit_slowly(scope, receive, send)
            if header_send is None:
                return
        try:
            await self.app(scope, receive, header_send)
        except BaseException as error:
            header_send.ended(outcome_of(error) or GONE)
            raise
        header_send.ended(FAILED)

    async def _admit_slowly(self, scope: Scope, receive: Receive, send: Send) -> HeaderSend | None:
        """Slow path: a request that waits, is refused, or needs settlement. None: its response has been sent."""
        evaluation: Evaluation | None = scope["limitkeeper"]
        if evaluation is None:
            evaluation = scope["limitkeeper"] = await self.gate.aask(AsgiRequestContext(scope))
            evaluation.origin = has_origin(scope)
        if evaluation.needs_settlement and evaluation.allowed:
            await SettlingSend([evaluation], scope, send).run(self.app, scope, receive)
            return None
        evaluation.context = None  # no reference cycle: see `admit`
        if evaluation.allowed:
            return HeaderSend(evaluation, send)
        await refuse(evaluation, scope, receive, send)
        return None

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = AsgiRequestContext(scope)
        evaluation = self._ask_nowait(context)
        if evaluation is None:
            evaluation = await self.gate.aask(context)
        scope["limitkeeper"] = evaluation
        evaluation.origin = has_origin(scope)
        if not evaluation.allowed:
            await refuse_websocket(evaluation, context, scope, receive, send)
            return
        await LimitedWebSocket(self._flags, evaluation, scope, receive, send).run(self.app)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Closes a gate that was made here at shutdown, and opens it again at the next startup."""
        if scope["type"] != "lifespan" or self._gate_source is None:
            await self.app(scope, receive, send)
            return
        if self._closed:
            policy, store, handlers = self._gate_source
            self._open(gate_of(policy, store=store, handlers=handlers))

        async def closing_send(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                self._closed = True
                await self.gate.aclose()
            await send(message)

        await self.app(scope, receive, closing_send)


async def refuse(evaluation: Evaluation, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the response of the rule's degrade handler, or the refusal."""
    degrade = evaluation.degrade
    if degrade is not None:
        await degrade(scope, receive, HeaderSend(evaluation, send))
        return
    assert evaluation.refusal is not None
    kind, content = body(evaluation, AsgiRequestContext(scope).header("accept"))
    headers = [*fields(evaluation), (b"content-type", kind), (b"content-length", b"%d" % len(content))]
    await send({"type": START, "status": evaluation.refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


class DisconnectReceive:
    """A `receive` that records whether the client has disconnected."""

    __slots__ = ("disconnected", "receive")

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.disconnected = False

    async def __call__(self) -> Message:
        message = await self.receive()
        self.disconnected = self.disconnected or message["type"] == "http.disconnect"
        return message


class SettlingSend:
    """A `send` that reports the status and the size of the response to a Settlement, and settles before the last byte is sent.

    `start` returns the start message to send; by default with the fields of the first evaluation.
    """

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        scope: Scope,
        send: Send,
        start: Callable[[Message], Message] | None = None,
    ) -> None:
        self.settlement = Settlement(evaluations, head=scope["method"] == "HEAD")
        self.start = start
        self.send = send
        self.content_length: int | None = None

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        settlement = self.settlement
        if kind == START:
            settlement.respond(message["status"])
            self.content_length = content_length_of(message)
            message = self.start(message) if self.start is not None else add_fields(message, fields(settlement.evaluations[0]))
        elif kind == "http.response.body":
            settlement.size += len(message.get("body", b""))
            if not message.get("more_body", False):
                await settlement.asettle()
        elif kind in ("http.response.pathsend", "http.response.zerocopysend"):
            settlement.size += message.get("count") or 0
            if not message.get("more_body", False):
                settlement.size = self.content_length or settlement.size
                await settlement.asettle()
        await self.send(message)

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Calls the app and settles, however it ends."""
        watched = DisconnectReceive(receive)
        outcome = FAILED
        try:
            await app(scope, watched, self)
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self.settlement.respond(UNKNOWN if watched.disconnected else outcome)
            if not self.settlement.settled:
                # A task that is being cancelled can't await a store: another task completes the settlement.
                await asyncio.shield(asyncio.ensure_future(self.settlement.asettle()))


def content_length_of(message: Message) -> int | None:
    """The Content-Length of a response, for files that the server sends itself."""
    for name, value in message.get("headers") or ():
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None
