"""Websockets behind a policy: evaluated at the handshake, which is a GET, and for each message where a rule names MESSAGE.

A refused handshake is answered like any request where the server can (`websocket.http.response`); otherwise it is closed before
it is accepted, which servers report as 403. A refused message closes the connection with 1013, "try again later". A message that
has to wait is not received before its turn, so that backpressure slows down a fast sender; if the app cancels its `receive`, the
next one returns that message. Messages have the identity of their handshake.

The outcome of a handshake is 101, or the status with which the app denied it; 403 where it closed or returned without accepting,
500 where it raised, unknown where the client disconnected before. A degrade handler answers requests only: a handshake that its
rule refuses is refused, with Retry-After.
"""

from __future__ import annotations

from collections import deque

from ..policy.evaluation import Evaluation
from .asgi_fast import ASGIApp, AsgiRequestContext, Message, Receive, Scope, Send, add_fields
from .policy_flags import MESSAGE, PolicyFlags
from .ratelimit_fields import fields
from .refusal_body import body
from .response_settlement import UNKNOWN, Settlement, outcome_of

#: The close code "Try Again Later" of RFC 6455's registry.
TRY_AGAIN_LATER = 1013
#: The most bytes of a close frame's reason.
MAX_REASON = 123
#: Outcomes of a handshake: accepted, or closed before that.
ACCEPTED, CLOSED = 101, 403


async def refuse_websocket(
    evaluation: Evaluation, context: AsgiRequestContext, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers a refused handshake."""
    assert evaluation.refusal is not None
    await receive()  # websocket.connect: nothing may be sent before it
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": close_reason(evaluation)})
        return
    kind, content = body(evaluation, context.header("accept"))
    headers = [*fields(evaluation), (b"content-type", kind), (b"content-length", b"%d" % len(content))]
    if evaluation.degrade is not None and evaluation.refusal.retry_after is not None:
        headers += [(b"retry-after", b"%d" % evaluation.refusal.retry_after), (b"cache-control", b"no-store")]
    await send({"type": "websocket.http.response.start", "status": evaluation.refusal.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": content})


def close_reason(evaluation: Evaluation) -> str:
    """The message of a refusal, cut to fit into a close frame."""
    assert evaluation.refusal is not None
    return evaluation.refusal.message.encode()[:MAX_REASON].decode(errors="ignore")


class LimitedWebSocket:
    """One accepted handshake: `receive` evaluates every message, `send` counts bytes and drops what follows a refusal's close."""

    def __init__(self, flags: PolicyFlags, evaluation: Evaluation, scope: Scope, receive: Receive, send: Send) -> None:
        self.flags = flags
        self.gate = flags.gate
        self.evaluation = evaluation
        self.settlement = Settlement([evaluation])
        self.scope = scope
        self._receive = receive
        self._send = send
        self._undelivered: deque[Message] = deque()
        self.closed = False
        self.disconnected = False

    async def run(self, app: ASGIApp) -> None:
        outcome = CLOSED
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self.settlement.respond(UNKNOWN if self.disconnected else outcome)
            await self.settlement.asettle()

    async def receive(self) -> Message:
        message = self._undelivered.popleft() if self._undelivered else await self._receive()
        self.disconnected = self.disconnected or message["type"] == "websocket.disconnect"
        if message["type"] != "websocket.receive" or not self.flags.limits_messages:
            return message
        if self.closed:
            return {"type": "websocket.disconnect", "code": TRY_AGAIN_LATER, "reason": ""}
        context = AsgiRequestContext(self.scope, MESSAGE)
        try:
            evaluation = self.gate.ask_nowait(context)
            if evaluation is None:
                evaluation = await self.gate.aask(context)
        except BaseException:  # the app stopped waiting: its next `receive` returns this message first
            self._undelivered.appendleft(message)
            raise
        await evaluation.asettle(200)
        return message if evaluation.allowed else await self.close(evaluation)

    async def close(self, evaluation: Evaluation) -> Message:
        """Closes the connection, and returns the disconnect message for the app."""
        reason = close_reason(evaluation)
        self.closed = True
        await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason})
        return {"type": "websocket.disconnect", "code": TRY_AGAIN_LATER, "reason": reason}

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if self.closed:
            return
        if kind == "websocket.send":
            text = message.get("text")
            data = message.get("bytes") or b"" if text is None else text.encode("utf-8", "replace")
            self.settlement.size += len(data)
        elif kind in ("websocket.accept", "websocket.http.response.start") and not self.settlement.counted:
            self.settlement.respond(message.get("status", ACCEPTED))
            message = add_fields(message, fields(self.evaluation))
        elif kind == "websocket.close":
            self.settlement.respond(CLOSED)
        await self._send(message)
