"""ASGI middleware: puts a policy in front of any ASGI app (Starlette, FastAPI, Litestar, Quart, Django).

    app = RateLimitMiddleware(app, policy=Policy.load("limitkeeper.yaml"))

An allowed request costs one decision and a `send` that adds the fields; its body is not touched. A refused request is answered
here: no handler is called, and its body is read only for an identity from it. `scope["limitkeeper"]` is the evaluation.

    http        evaluated when the request arrives; settled (costs by outcome or size) before the last byte is sent
    websocket   evaluated at the handshake, which is a GET, and for every message where a rule names MESSAGE
    lifespan    a gate that was made here is closed with the app

Plain Python: compiled coroutines are slower (0.7 µs a request). What a request calls here is compiled: the end of headers.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate, gate_of
from ..policy.identity.body import BODY, MAX_BODY, BodyNeeded, announced_size, check_size
from ..policy.model import Policy
from ..policy.path_matcher import MESSAGE
from ..stores import Store
from .headers import ASGIApp, AsgiRequestContext, HeaderSend, Message, Receive, Scope, Send, add_fields, admit, fields, has_origin
from .refusal_body import body
from .response_settlement import (
    DEGRADED,
    EVALUATED,
    EVALUATIONS,
    FAILED,
    GONE,
    UNKNOWN,
    Settlement,
    as_received,
    byte_length,
    is_cancelled,
    outcome_after,
    outcome_of,
    shutdown_after_requests,
)

T = TypeVar("T")

#: The close code "Try Again Later" of RFC 6455's registry, and the most bytes of a close frame's reason.
TRY_AGAIN_LATER, MAX_REASON = 1013, 123
#: How many bytes of a body are read while its request waits, to notice that its client disconnects: these of each request, and
#: beyond them so many of one request and of all requests of this process together, until their applications have read them or
#: they end. A client that sent more is not noticed.
MIN_READ_AHEAD, MAX_READ_AHEAD, TOTAL_READ_AHEAD = 1 << 16, 1 << 24, 1 << 26
#: How many bytes a message takes besides its body.
MESSAGE_SIZE = 512
#: Outcomes of a websocket's handshake: accepted, or closed before that.
ACCEPTED, CLOSED = 101, 403


class RateLimitMiddleware:
    """ASGI middleware that evaluates a policy before every request and websocket.

    `policy` is a `Policy`, the path of its file, or a `Gate` (which has its store and handlers already); `store` replaces the
    policy's store; `handlers` are the ASGI applications that `on_refusal: degrade NAME` names.
    """

    def __init__(
        self,
        app: ASGIApp,
        policy: Policy | str | Path | Gate,
        *,
        store: Store | None = None,
        handlers: Mapping[str, ASGIApp] | None = None,
    ) -> None:
        self.app = app
        self._gate_source = (policy, store, handlers)
        self._open()

    def _open(self) -> None:
        policy, store, handlers = self._gate_source
        self.gate = policy if isinstance(policy, Gate) else gate_of(policy, store=store, handlers=handlers)
        self._ask_nowait = self.gate.ask_nowait
        self._closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind != "http":
            await (self._websocket if kind == "websocket" else self._lifespan)(scope, receive, send)
            return
        try:
            header_send = admit(self._ask_nowait, scope, send)
        except BodyNeeded:
            receive = await read_body(scope, receive)
            header_send = admit(self._ask_nowait, scope, send)
        if header_send is None:
            admitted = await self._admit_slowly(scope, receive, send)
            if admitted is None:
                return
            header_send, receive = admitted
        try:
            await self.app(scope, receive, header_send)
        except BaseException as error:
            header_send.ended(outcome_of(error) or GONE)
            raise
        header_send.ended(FAILED)

    async def _admit_slowly(self, scope: Scope, receive: Receive, send: Send) -> tuple[HeaderSend, Receive] | None:
        """Slow path: a request that waits, is refused, or needs settlement. None: it is over."""
        evaluation: Evaluation | None = scope["limitkeeper"]
        if evaluation is None:
            evaluation, receive = await ask_connected(self.gate, AsgiRequestContext(scope), receive)
            if evaluation is None:
                return None
            scope["limitkeeper"] = evaluation
            evaluation.origin = has_origin(scope)
        if evaluation.needs_settlement and evaluation.allowed:
            await SettlingSend([evaluation], scope, send).run(self.app, scope, receive)
            return None
        evaluation.context = None  # no reference cycle: see `admit`
        if evaluation.allowed:
            return HeaderSend(evaluation, send), receive
        await refuse(evaluation, scope, receive, send)
        return None

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = AsgiRequestContext(scope)
        evaluation = self._ask_nowait(context)
        if evaluation is None:
            evaluation, receive = await ask_connected(self.gate, context, receive)
            if evaluation is None:
                return
        scope["limitkeeper"] = evaluation
        evaluation.origin = has_origin(scope)
        if not evaluation.allowed:
            await refuse_websocket(evaluation, scope, receive, send)
            return
        await LimitedWebSocket(self.gate, evaluation, scope, receive, send).run(self.app)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Closes a gate that was made here at shutdown, and opens it again at the next startup. The application shuts down when
        the requests are settled that the server has cancelled."""
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        own = self.gate is not self._gate_source[0]
        if own and self._closed:
            self._open()

        async def closing_send(message: Message) -> None:
            if own and message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                self._closed = True
                await self.gate.aclose()
            await send(message)

        await self.app(scope, shutdown_after_requests(receive), closing_send)


async def ask_connected(
    gate: Gate, context: AsgiRequestContext, receive: Receive, is_read: bool = False
) -> tuple[Evaluation | None, Receive]:
    """Evaluates a request, and stops when its client disconnects while it waits: the evaluation is then None, and its place in
    the queue is given back. Returns with it the `receive` of the application, which first has what was read meanwhile.
    `is_read`: the body was read before."""
    if not gate.compiled.waits:
        return await gate.aask(context), receive
    # A remote store has answered after the budget: what takes longer waits.
    delay = 0.0 if gate.store.local else gate.policy.budget_us / 1e6
    return await while_connected(gate.aask(context), settle_unknown, receive, delay, is_read)


async def settle_unknown(evaluation: Evaluation) -> None:
    """Ends the evaluation of a request that is not handled: it was allowed when its client disconnected."""
    await evaluation.asettle(UNKNOWN)


async def while_connected(
    awaited: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]], receive: Receive, delay: float, is_read: bool = False
) -> tuple[T | None, Receive]:
    """The result of what a request waits for, and the `receive` of the application. Where the client disconnects meanwhile, the
    wait is cancelled and the result is None; `undo` is called with a result that came at this moment. What takes less than
    `delay` is not watched."""
    ahead = ReadAhead(receive, is_read)
    asking = asyncio.ensure_future(awaited)
    reading = asyncio.ensure_future(ahead.read(delay))
    goes_on = False
    try:
        await asyncio.wait({asking, reading}, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        await asyncio.wait({reading})
        goes_on = asking.done() and (reading.cancelled() or reading.exception() is not None)
    finally:  # also where this task is cancelled
        if not goes_on:
            await asyncio.shield(asyncio.ensure_future(leave(asking, reading, undo)))
        ahead.end_with(asyncio.current_task())
    return asking.result() if goes_on else None, ahead.receive


async def leave(asking: asyncio.Task[T], reading: asyncio.Task[None], undo: Callable[[T], Awaitable[None]]) -> None:
    """Ends the wait of a request that is not handled."""
    asking.cancel()
    reading.cancel()
    await asyncio.wait([asking, reading])
    if not asking.cancelled() and asking.exception() is None:
        await undo(asking.result())


def receive_after(read: deque[Message], receive: Receive) -> Receive:
    """A `receive` that first has the messages that were read already."""

    async def receive_again() -> Message:
        return read.popleft() if read else await receive()

    return receive_again


async def read_body(scope: Scope, receive: Receive) -> Receive:
    """Reads the body into the scope for an identity from it (None: larger than MAX_BODY, or its client disconnected). Returns the
    `receive` of the application, which has it again."""
    scope[BODY] = None
    length = AsgiRequestContext(scope).header("content-length") or ""
    if length.isdecimal() and announced_size(length) > MAX_BODY:
        return receive
    found = bytearray()
    message: Message = {"type": "http.request", "more_body": True}
    while message.get("more_body", False) and len(found) <= MAX_BODY:
        message = await receive()
        found += message.get("body", b"")
    more = message.get("more_body", False) or message["type"] != "http.request"  # or the client has disconnected
    read: deque[Message] = deque([{"type": "http.request", "body": bytes(found), "more_body": more}])
    if message["type"] != "http.request":
        read.append(message)
    elif not message.get("more_body", False):
        scope[BODY] = check_size(bytes(found))
    return receive_after(read, receive)


#: Bytes that requests of this process have read ahead beyond MIN_READ_AHEAD, and their applications have not.
read_bytes = 0


class ReadAhead:
    """The messages of a client that are read while its request waits; `receive` is that of the application, which has them first.

    What the application does not read is counted until the request ends: it is in memory as long.

    A `receive` that is under way when the wait ends is not cancelled, but left to the application: that of another middleware
    (Starlette's BaseHTTPMiddleware) would lose its message, a part of the body. After the whole body (`is_read`) it is cancelled:
    what follows is the disconnection, which a response awaits with the server's own `receive`, and hypercorn reports once."""

    def __init__(self, receive: Receive, is_read: bool) -> None:
        self._receive = receive
        self._is_read = is_read
        self._read: deque[Message] = deque()
        self._size = 0
        self._under_way: asyncio.Future[Message] | None = None

    def _count(self, size: int) -> None:
        """Adds to the size of the messages that are kept here."""
        global read_bytes
        before = max(0, self._size - MIN_READ_AHEAD)
        self._size += size
        read_bytes += max(0, self._size - MIN_READ_AHEAD) - before

    async def read(self, delay: float) -> None:
        """Reads until the client disconnects, and returns then. What is beyond the bounds is left to the application."""
        try:
            await asyncio.sleep(delay)
            while self._size <= MIN_READ_AHEAD or (self._size <= MAX_READ_AHEAD and read_bytes <= TOTAL_READ_AHEAD):
                self._under_way = asyncio.ensure_future(self._receive())
                message = await self._next(self._under_way)
                self._read.append(message)
                self._count(size_ahead(message))
                if message["type"].endswith(".disconnect"):
                    return
                self._is_read = message["type"] == "http.request" and not message.get("more_body", False)
            await asyncio.Event().wait()
        finally:
            if self._is_read and self._under_way is not None and self._under_way.cancel():
                self._under_way = None

    async def _next(self, under_way: asyncio.Future[Message]) -> Message:
        """The message of a `receive` that is under way; it stays so where this one is cancelled. At once where it is there:
        Starlette's `is_disconnected` does not wait."""
        if not under_way.done():
            await asyncio.wait({under_way})
        self._under_way = None
        return under_way.result()

    async def receive(self) -> Message:
        if self._read:
            self._count(-size_ahead(self._read[0]))
            return self._read.popleft()
        return await (self._receive() if self._under_way is None else self._next(self._under_way))

    def end_with(self, task: asyncio.Task[Any] | None) -> None:
        """At the end of the request's task, drops what was not read, and cancels a `receive` that is still under way."""
        if task is not None and (self._under_way is not None or self._read):
            task.add_done_callback(self._end)

    def _end(self, _: asyncio.Task[Any]) -> None:
        self._count(-self._size)
        self._read.clear()
        if self._under_way is not None:
            self._under_way.cancel()


def size_ahead(message: Message) -> int:
    return len(message.get("body", b"")) + MESSAGE_SIZE


async def refuse(evaluation: Evaluation, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the response of the rule's degrade handler, or the refusal."""
    degrade = evaluation.degrade
    if degrade is not None:
        scope["limitkeeper"], scope[DEGRADED] = evaluation, True  # an evaluation within may have taken its place
        await degrade(scope, receive, HeaderSend(evaluation, send))
        return
    start, content = refusal_response(evaluation, scope)
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


def refusal_response(evaluation: Evaluation, scope: Scope) -> tuple[dict[str, Any], bytes]:
    """Status and headers of a refusal, and its body."""
    assert evaluation.refusal is not None
    kind, content = body(evaluation, AsgiRequestContext(scope).header("accept"))
    headers = [*fields(evaluation), (b"content-type", kind), (b"content-length", b"%d" % len(content))]
    return {"status": evaluation.refusal.status, "headers": headers}, content


async def disconnected() -> Message:
    """The `receive` of a degrade handler after the application has run: it may have read the body, so there is none to read."""
    return {"type": "http.disconnect"}


class SettlingSend:
    """A `send` that reports the status and the size of the response to a Settlement, and settles before the last byte is sent.

    `start` returns the start message to send; by default with the fields of the first evaluation. Without a Content-Length it is
    sent with the first part of the body, if a rule charges its size. Where the size is known then and can't be afforded, the
    refusal is sent instead.
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
        self.scope = scope
        self.before: Scope = dict(scope)
        self.content_length: int | None = None
        self.held: Message | None = None
        self.disconnected = self.refused = False

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        settlement = self.settlement
        if kind == "http.response.start":
            lengths = [
                value for name, value in message.get("headers") or () if name.lower() == b"content-length" and value.isdigit()
            ]
            self.content_length = int(lengths[0]) if lengths else None
            if self.content_length is None and settlement.costs_by_size:
                self.held = message
            else:
                await self.send_start(message, {})
            return
        if self.held is not None and kind != "http.response.early_hint":
            await self.send_start(self.held, message)
        if self.refused:
            return
        if kind == "http.response.body":
            settlement.size += byte_length(message.get("body", b""))
            if not message.get("more_body", False):
                await settlement.asettle()
        elif kind in ("http.response.pathsend", "http.response.zerocopysend"):
            settlement.size += message.get("count") or 0
            if not message.get("more_body", False):
                settlement.size = self.content_length or settlement.size
                await settlement.asettle()
        await self.send(message)

    async def send_start(self, start: Message, first: Message) -> None:
        """Sends the start of the response, or the refusal, before the first part of its body."""
        self.held = None
        self.settlement.respond(outcome_after(self.disconnected or is_cancelled(), start["status"]))
        size = self.content_length
        if size is None:  # the first part of a stream is the least that it costs
            size = byte_length(first.get("body", b"")) + (first.get("count") or 0)
        if start["status"] in (204, 304):
            size = 0
        refusing = await self.settlement.aafford(size) if size else None
        if refusing is not None:
            self.refused = True
            await refuse(refusing, self.scope_again(refusing), disconnected, self.send)
            return
        evaluations = self.settlement.evaluations
        await self.send(self.start(start) if self.start is not None else add_fields(start, fields(evaluations[0])))

    def scope_again(self, refusing: Evaluation) -> Scope:
        """The scope for a degrade handler, which may run the application again: this limit, and those of routes that have
        admitted the request, are not evaluated again. What it sends is marked in this scope too, where a StaleCache looks."""
        self.scope[DEGRADED] = True
        known = self.scope.get(EVALUATIONS)
        pairs = zip(known.all, known.limits, strict=True) if known is not None else ()
        limits = [limit for evaluation, limit in pairs if evaluation.allowed or evaluation is refusing]
        return {**as_received(self.before, self.scope), EVALUATED: (*self.scope.get(EVALUATED, ()), *limits)}

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Calls the app and settles, however it ends."""

        async def watched() -> Message:
            message = await receive()
            self.disconnected = self.disconnected or message["type"] == "http.disconnect"
            return message

        await self.settlement.run(lambda: app(scope, watched, self), FAILED, lambda: self.disconnected)


# Websockets ------------------------------------------------------------------------------------------------------


async def refuse_websocket(evaluation: Evaluation, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a refused handshake like any request where the server can (`websocket.http.response`); otherwise closes it before
    it is accepted, which servers report as 403. A degrade handler answers requests only: its rule refuses, with Retry-After."""
    assert evaluation.refusal is not None
    await receive()  # websocket.connect: nothing may be sent before it
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": close_reason(evaluation)})
        return
    evaluation.declined = True
    start, content = refusal_response(evaluation, scope)
    await send({"type": "websocket.http.response.start", **start})
    await send({"type": "websocket.http.response.body", "body": content})


def close_reason(evaluation: Evaluation) -> str:
    """The message of a refusal, cut to fit into a close frame."""
    assert evaluation.refusal is not None
    return evaluation.refusal.message.encode()[:MAX_REASON].decode(errors="ignore")


def message_size(message: Message) -> int:
    """The bytes of a message that was sent or received."""
    text: str | None = message.get("text")
    return byte_length(message.get("bytes") or b"" if text is None else text)


class SettlingWebSocket:
    """`send` and `receive` of one websocket that report the outcome of its handshake, and the bytes sent, to a Settlement.

    `start` returns the message that accepts or denies the handshake; by default with the fields of the first evaluation.
    Outcomes: 101, the status with which the app denied it, 403 (closed, or returned without accepting), 500 (raised), unknown
    (the client disconnected). What follows a refusal's close is dropped.
    """

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        scope: Scope,
        receive: Receive,
        send: Send,
        start: Callable[[Message], Message] | None = None,
    ) -> None:
        self.settlement = Settlement(evaluations)
        self.start = start
        self.scope = scope
        self._receive = receive
        self._send = send
        self.closed = False
        self.disconnected = False

    async def run(self, app: ASGIApp) -> None:
        await self.settlement.run(lambda: app(self.scope, self.receive, self.send), CLOSED, lambda: self.disconnected)

    async def receive(self) -> Message:
        message = await self._receive()
        self.disconnected = self.disconnected or message["type"] == "websocket.disconnect"
        return message

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if self.closed:
            return
        if kind == "websocket.send":
            self.settlement.size += message_size(message)
        elif kind in ("websocket.accept", "websocket.http.response.start") and not self.settlement.counted:
            self.settlement.respond(outcome_after(self.disconnected, message.get("status", ACCEPTED)))
            evaluations = self.settlement.evaluations
            message = self.start(message) if self.start is not None else add_fields(message, fields(evaluations[0]))
        elif kind == "websocket.close":
            self.settlement.respond(outcome_after(self.disconnected, CLOSED))
        await self._send(message)


class LimitedWebSocket(SettlingWebSocket):
    """One accepted handshake: `receive` evaluates every message.

    A refused message closes the connection with 1013. A message that has to wait is not received before its turn, so that
    backpressure slows down a fast sender. Messages have the identity of their handshake.
    """

    def __init__(self, gate: Gate, evaluation: Evaluation, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__([evaluation], scope, receive, send)
        self.gate = gate
        self._undelivered: deque[asyncio.Task[tuple[Message, Evaluation]]] = deque()
        self._identities = gate.message_identities(AsgiRequestContext(scope, MESSAGE))

    async def run(self, app: ASGIApp) -> None:
        try:
            await super().run(app)
        finally:
            for evaluating in self._undelivered:
                evaluating.cancel()

    async def receive(self) -> Message:
        evaluating = self._undelivered.popleft() if self._undelivered else None
        if evaluating is None:
            message = await super().receive()
            if message["type"] != "websocket.receive" or not self.gate.compiled.limits_messages:
                return message
            if self.closed:
                return {"type": "websocket.disconnect", "code": TRY_AGAIN_LATER, "reason": ""}
            context = AsgiRequestContext(self.scope, MESSAGE)
            context.identities = self._identities
            found = self.gate.ask_nowait(context)
            if found is not None and not found.needs_settlement:
                return message if found.allowed else await self.close(found)
            evaluating = asyncio.ensure_future(self._evaluate(message, context, found))
        try:
            message, evaluation = await asyncio.shield(evaluating)
        except asyncio.CancelledError:  # the app stopped waiting: its next `receive` returns this message, which is charged once
            self._undelivered.appendleft(evaluating)
            raise
        return message if evaluation.allowed else await self.close(evaluation)

    async def _evaluate(
        self, message: Message, context: AsgiRequestContext, found: Evaluation | None
    ) -> tuple[Message, Evaluation]:
        evaluation = await self.gate.aask(context) if found is None else found
        await evaluation.asettle(200, message_size(message))
        return message, evaluation

    async def close(self, evaluation: Evaluation) -> Message:
        """Closes the connection, and returns the disconnect message for the app."""
        reason = close_reason(evaluation)
        self.closed = True
        with suppress(Exception):  # servers raise where the client has disconnected, or the app has closed the connection
            await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason})
        return {"type": "websocket.disconnect", "code": TRY_AGAIN_LATER, "reason": reason}
