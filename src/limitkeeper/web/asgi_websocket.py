"""Websockets behind a policy: asked at the handshake, which counts as a GET, and for each message where a rule names MESSAGE.

A refused handshake is answered like any request where the server can (`websocket.http.response`), otherwise it is closed before
it was accepted, which servers tell as 403. A message that is refused closes the connection with 1013, "try again later"; one that
has to wait is not handed on before its turn, so whoever sends too fast is slowed down by the connection itself. An app that gives
up waiting for it finds it when it asks again. What the client said about itself in the handshake holds for all its messages.

The outcome of a handshake is 101, or the status with which the app denied it; 403 where it closed without a word, 500 where it
raised, unknown where the client disconnected before. A degrade handler answers requests: a handshake beyond its rule is refused,
and told when to come back.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate
from ..policy.model import Policy
from .asgi_fast import AsgiRequestContext
from .headers import body, fields, merge
from .response_settlement import GONE, UNKNOWN, outcome

#: RFC 6455's registry: "Try Again Later".
TRY_LATER = 1013
#: A close frame holds so many bytes besides its code.
REASON = 123
MESSAGE = "MESSAGE"
#: Outcomes of a handshake: accepted, or closed before that.
ACCEPTED, CLOSED = 101, 403


async def refuse_socket(passage: Evaluation, facts: AsgiRequestContext, scope: Any, receive: Any, send: Any) -> None:
    """Answers a handshake that does not pass."""
    assert passage.refusal is not None
    await receive()  # websocket.connect: nothing may be sent before it
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": TRY_LATER, "reason": reason(passage)})
        return
    kind, content = body(passage, facts.header("accept"))
    headers = [*fields(passage), (b"content-type", kind), (b"content-length", b"%d" % len(content))]
    if passage.degrade is not None and passage.refusal.retry_after is not None:
        headers += [(b"retry-after", b"%d" % passage.refusal.retry_after), (b"cache-control", b"no-store")]
    await send({"type": "websocket.http.response.start", "status": passage.refusal.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": content})


def reason(passage: Evaluation) -> str:
    """Why, in what fits into a close frame."""
    assert passage.refusal is not None
    return passage.refusal.message.encode()[:REASON].decode(errors="ignore")


def counts_messages(policy: Policy) -> bool:
    return any(MESSAGE in match.methods for rule in policy.rules for match in rule.match)


class LimitedWebSocket:
    """One open connection: its `receive` asks the gate for every message, its `send` says nothing more once it was closed."""

    def __init__(self, gate: Gate, passage: Evaluation, scope: Any, receive: Any, send: Any) -> None:
        self.gate = gate
        self.passage = passage
        self.scope = scope
        self._receive = receive
        self._send = send
        self._policy: Policy | None = None
        self._counts = False
        self._held: deque[Any] = deque()
        self.status = 0
        self.closed = False
        self.gone = False
        self.size = 0

    async def run(self, app: Any) -> None:
        ending = CLOSED
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            ending = outcome(error)
            if not self.status:
                self.passage.responded(GONE if self.gone else ending or GONE)
            raise
        finally:
            if self.passage.owes:
                await self.passage.adone(self.status or (UNKNOWN if self.gone else ending), self.size)
            self.passage.facts = None  # they hold the scope, which holds the passage

    async def receive(self) -> Any:
        message = self._held.popleft() if self._held else await self._receive()
        self.gone = self.gone or message["type"] == "websocket.disconnect"
        if message["type"] != "websocket.receive" or not self.counts():
            return message
        if self.closed:
            return {"type": "websocket.disconnect", "code": TRY_LATER, "reason": ""}
        facts = AsgiRequestContext(self.scope, MESSAGE)
        try:
            passage = self.gate.quick(facts)
            if passage is None:
                passage = await self.gate.aask(facts)
        except BaseException:  # whoever waited for it gave up: it comes first the next time
            self._held.appendleft(message)
            raise
        if passage.owes:
            await passage.adone(200)
        return message if passage.allowed else await self.close(passage)

    def counts(self) -> bool:
        """Whether any rule means messages; looked up again when the policy was reloaded."""
        policy = self.gate.policy
        if policy is not self._policy:
            self._policy, self._counts = policy, counts_messages(policy)
        return self._counts

    async def close(self, passage: Evaluation) -> Any:
        """Ends the connection, and tells the app that it has ended."""
        said = reason(passage)
        self.closed = True
        await self._send({"type": "websocket.close", "code": TRY_LATER, "reason": said})
        return {"type": "websocket.disconnect", "code": TRY_LATER, "reason": said}

    async def send(self, message: Any) -> None:
        kind = message["type"]
        if self.closed:
            return
        if kind == "websocket.send":
            text = message.get("text")
            self.size += len(message.get("bytes") or b"") if text is None else len(text.encode("utf-8", "replace"))
        elif self.status == 0 and kind in ("websocket.accept", "websocket.http.response.start"):
            self.began(message.get("status", ACCEPTED))
            message = {**message, "headers": merge(list(message.get("headers") or ()), fields(self.passage))}
        elif kind == "websocket.close":
            self.began(CLOSED)
        await self._send(message)

    def began(self, status: int) -> None:
        """How the handshake ended, which is said once."""
        if self.status == 0:
            self.status = status
            self.passage.responded(status)
