"""DeferredRequests: answers refused requests with 202 and a ticket, and runs them later, at a steady pace.

    deferred = DeferredRequests(Shaper("50/s", capacity=1000, workers=8))
    app = RateLimitMiddleware(deferred.asgi(inner), policy, handlers={"later": deferred.asgi_handler(inner)})

    POST /orders           202  Location: /deferred/9mX…    {"ticket": "9mX…", "status": "queued"}
    GET  /deferred/9mX…    202  while it is queued or runs, with Retry-After
    GET  /deferred/9mX…    the response to the request: its status, headers and body, for `keep` after it has ended

The request is read whole, at most `max_body` bytes, and handed to the application as it came; `is_reduced` is False there. Where
it is larger or incomplete, where the shaper's queue is full, and where the requests in it have `max_bytes` (those that are being
read included), it is refused, as without the handler; so is a request for the status path. One client (the refusing rule's key,
or an address where the rule has no key) has at most a quarter of the places and of the bytes, at least one request.
A ticket is 128 random bits: who has it may read the response.
A response of more than `max_body` bytes is a failure, and the application is told that its client has disconnected.
Results beyond `max_bytes` are dropped, the oldest first. Requests that are queued when the process ends are lost, and their
tickets are unknown then: defer only requests that may be sent again (with an idempotency key).
"""

from __future__ import annotations

import asyncio
import io
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ...clock import SYSTEM, Clock
from ...concurrency.paced_executor import Shaper
from ...errors import ConfigurationError, RateLimited
from ...fork import reset_after_fork
from ...policy.evaluation import Evaluation
from ...policy.request_context import RequestContext
from ...policy.waiting_requests import queue_client
from ...rate import Duration, duration_us
from ..headers import ASGIApp, AsgiRequestContext, Message, Receive, Scope, Send
from ..refusal_body import encode_json
from ..response_settlement import DEFERRED
from ..wsgi import (
    EVALUATION,
    HAS_RUN,
    Application,
    Environ,
    ExcInfo,
    StartResponse,
    Write,
    WsgiRequestContext,
    close_body,
    decode_path,
    status_line,
)
from .stale_cache import HeaderLines, Response, refusal_of, send_response

QUEUED, RUNNING, ENDED = "queued", "running", "ended"
#: What an entry takes besides its response.
ENTRY_SIZE = 512


@dataclass(slots=True)
class DeferredRequest:
    """A request, which takes `size` bytes. `response` is set when it has ended, at `ended_us`."""

    size: int
    client: str | None = None
    status: str = QUEUED
    response: Response | None = None
    ended_us: int = 0


class DeferredRequests:
    """Queues refused requests, answers 202 with a ticket, and runs them later at the pace of a shaper.

    `asgi`, `wsgi` add the status path to an application; `asgi_handler`, `wsgi_handler` make the degrade handlers of it.

    Args:
        shaper: runs the requests; its capacity bounds the queue.
        status_path: where clients ask for the state of a ticket: `GET /deferred/TICKET`.
        keep: how long a response is kept after it is ready.
        max_body: the largest body of a request or a response.
        max_bytes: the memory of all waiting requests, and of all responses.
        clock: for tests.
        make_ticket: makes the text of a ticket.
    """

    def __init__(
        self,
        shaper: Shaper,
        *,
        status_path: str = "/deferred",
        keep: Duration = "10min",
        max_body: int = 1 << 20,
        max_bytes: int = 64 << 20,
        clock: Clock = SYSTEM,
        make_ticket: Callable[[], str] = lambda: secrets.token_urlsafe(16),
    ) -> None:
        if not status_path.startswith("/") or status_path.endswith("/"):
            raise ConfigurationError(f"status_path: expected a path like /deferred, got {status_path!r}")
        if not 0 < max_body <= max_bytes:
            raise ConfigurationError(f"expected 0 < max_body ≤ max_bytes, got max_body={max_body!r}, max_bytes={max_bytes!r}")
        self.shaper, self.status_path, self.max_body, self.max_bytes = shaper, status_path, max_body, max_bytes
        self._keep_us, self._now_us, self._make_ticket = duration_us(keep), clock.now_us, make_ticket
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, DeferredRequest] = {}
        self._ended: OrderedDict[str, DeferredRequest] = OrderedDict()  # the oldest first
        self._open_bytes = self._bytes = 0
        self._clients: dict[str, tuple[int, int]] = {}  # requests that wait or run, and their bytes

    # Requests and tickets -------------------------------------------------------------------------------------------

    def reserve(self, size: int = 0, client: str | None = None) -> DeferredRequest | None:
        """Takes a place for a request of at most `size` bytes, before it is read. None: there is no room (for its client)."""
        entry = DeferredRequest(ENTRY_SIZE + size, client=client)
        places = None if self.shaper.capacity is None else max(1, self.shaper.capacity // 4)
        with self._lock:
            count, used = (0, 0) if client is None else self._clients.get(client, (0, 0))
            many = count > 0 and (used + entry.size > self.max_bytes // 4 or (places is not None and count >= places))
            if many or self._open_bytes + entry.size > self.max_bytes:
                return None
            self._count(entry, 1, entry.size)
        return entry

    def release(self, entry: DeferredRequest) -> None:
        """Gives the place of a request back."""
        with self._lock:
            self._count(entry, -1, -entry.size)

    def _count(self, entry: DeferredRequest, places: int, size: int) -> None:
        self._open_bytes += size
        if entry.client is not None:
            count, used = self._clients.get(entry.client, (0, 0))
            self._clients[entry.client] = (count + places, used + size)
            if count + places <= 0:
                del self._clients[entry.client]

    def accept(self, entry: DeferredRequest, run: Callable[[], Response], size: int, mount: str = "") -> Response | None:
        """Queues a request that has a place, of `size` bytes; the response with its ticket. None: the queue is full. `mount` is
        the path of the application at its server."""
        ticket = self._make_ticket()
        with self._lock:
            self._count(entry, 0, ENTRY_SIZE + size - entry.size)
            entry.size = ENTRY_SIZE + size
            self._open[ticket] = entry
        try:
            self.shaper.submit(self._run, ticket, entry, run)
        except BaseException as error:
            with self._lock:
                del self._open[ticket]
            self.release(entry)
            if isinstance(error, RateLimited):
                return None
            raise
        return self._pending(ticket, QUEUED, [("Location", f"{quote(self._status_path_at(mount))}/{ticket}")])

    def _status_path_at(self, mount: str) -> str:
        """The status path as clients write it; it may name the mount point already."""
        return self.status_path if self.status_path.startswith(mount + "/") else mount + self.status_path

    def _run(self, ticket: str, entry: DeferredRequest, run: Callable[[], Response]) -> None:
        entry.status = RUNNING
        try:
            response = with_own_length(run())
            if len(response[2]) > self.max_body:
                raise TooLarge
        except TooLarge:
            response = failed(f"the response has more than {self.max_body} bytes")
        except BaseException:
            self._end(ticket, entry, failed("the request failed"))
            raise
        self._end(ticket, entry, response)

    def _end(self, ticket: str, entry: DeferredRequest, response: Response) -> None:
        with self._lock:
            if self._open.pop(ticket, None) is not None:
                self._count(entry, -1, -entry.size)
            entry.status, entry.response, entry.ended_us = ENDED, response, self._now_us()
            entry.size = ENTRY_SIZE + len(response[2]) + sum([len(name) + len(value) for name, value in response[1]])
            self._ended[ticket] = entry
            self._bytes += entry.size
            self._drop_old()

    def _drop_old(self) -> None:
        before_us = self._now_us() - self._keep_us
        while self._ended:
            ticket, oldest = next(iter(self._ended.items()))
            if oldest.ended_us >= before_us and self._bytes <= self.max_bytes:
                return
            self._bytes -= oldest.size
            del self._ended[ticket]

    def has_status(self, path: str, mount: str = "") -> bool:
        """Whether a path is that of a ticket; it may begin with the mount point."""
        return path.rpartition("/")[0] in (self.status_path, mount + self.status_path)

    def find(self, path: str, mount: str = "") -> Response | None:
        """The response to a request for the status of a ticket; None: the path is no such request."""
        if not self.has_status(path, mount):
            return None
        ticket = path.rpartition("/")[2]
        with self._lock:
            self._drop_old()
            entry = self._open.get(ticket) or self._ended.get(ticket)
        if entry is None:
            return json_response(404, {"message": "unknown ticket, or its response is no longer kept"})
        return entry.response or self._pending(ticket, entry.status, [])

    def _pending(self, ticket: str, status: str, more: HeaderLines) -> Response:
        code, lines, content = json_response(202, {"ticket": ticket, "status": status})
        return code, [*lines, ("Retry-After", "1"), *more], content

    # ASGI -----------------------------------------------------------------------------------------------------------

    def asgi(self, app: ASGIApp) -> ASGIApp:
        async def with_status(scope: Scope, receive: Receive, send: Send) -> None:
            asked = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
            found = self.find(scope["path"], mount_of(scope)) if asked else None
            await (app(scope, receive, send) if found is None else send_response(found, scope, send))

        return with_status

    def asgi_handler(self, app: ASGIApp) -> ASGIApp:
        async def handler(scope: Scope, receive: Receive, send: Send) -> None:
            context, evaluation = AsgiRequestContext(scope), scope["limitkeeper"]
            size = sum([len(name) + len(value) for name, value in scope["headers"]]) + len(scope.get("query_string", b""))
            size += len(scope["path"])
            most = self.body_size(context.header("content-length"))
            fits = most <= self.max_body and not self.has_status(scope["path"], mount_of(scope))
            entry = self.reserve(size + most, client_of(evaluation, context)) if fits else None
            accepted = None if entry is None else await self.read_and_accept(entry, app, scope, receive, size)
            await send_response(accepted or refusal_of(evaluation, context), scope, send)

        return handler

    async def read_and_accept(
        self, entry: DeferredRequest, app: ASGIApp, scope: Scope, receive: Receive, size: int
    ) -> Response | None:
        content = None
        try:
            content = await read_body(receive, self.max_body)
        finally:
            if content is None:
                self.release(entry)
        if content is None:
            return None
        loop, sent = asyncio.get_running_loop(), content

        def run() -> Response:
            return asyncio.run_coroutine_threadsafe(call_asgi(app, scope, sent, self.max_body), loop).result()

        return self.accept(entry, run, size + len(sent), mount_of(scope))

    def body_size(self, length: str | None) -> int:
        """The most bytes that are read of a body whose Content-Length is this."""
        return int(length) if length and length.isdecimal() and len(length) < 12 else self.max_body

    # WSGI -----------------------------------------------------------------------------------------------------------

    def wsgi(self, app: Application) -> Application:
        def with_status(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            found = self.find(environ.get("PATH_INFO", "")) if environ["REQUEST_METHOD"] in ("GET", "HEAD") else None
            if found is None:
                return app(environ, start_response)
            status, lines, content = found
            start_response(status_line(status), lines)
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [content]

        return with_status

    def wsgi_handler(self, app: Application) -> Application:
        def handler(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            context, evaluation = WsgiRequestContext(environ), environ[EVALUATION]
            unfit = HAS_RUN in environ or self.has_status(environ.get("PATH_INFO", ""))
            sent = None if unfit else read_input(environ, self.max_body)
            accepted = None
            if sent is not None:
                size = environ_size(environ) + len(sent)
                entry = self.reserve(size, client_of(evaluation, context))
                run = lambda: call_wsgi(app, environ, sent, self.max_body)  # noqa: E731
                mount = decode_path(environ.get("SCRIPT_NAME", "")).rstrip("/")
                accepted = None if entry is None else self.accept(entry, run, size, mount)
            status, lines, content = accepted or refusal_of(evaluation, context)
            start_response(status_line(status), lines)
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [content]

        return handler


def mount_of(scope: Scope) -> str:
    """The path at which an ASGI application is mounted, which precedes its own paths."""
    return str(scope.get("root_path") or "").rstrip("/")


def client_of(evaluation: Evaluation, context: RequestContext) -> str | None:
    """Whose places a refused request takes: the key under the refusing rule, or its address."""
    assert evaluation.refusal is not None
    pairs = zip(evaluation.entries, evaluation.keys, strict=True)
    rule, key = next(((entry.compiled_rule, key) for entry, key in pairs if entry.rule is evaluation.refusal.rule), (None, None))
    return queue_client(evaluation, context, rule, key)


def json_response(status: int, value: dict[str, Any]) -> Response:
    content = encode_json(value)
    length = ("Content-Length", str(len(content)))
    return status, [("Content-Type", "application/json"), length, ("Cache-Control", "no-store")], content


def with_own_length(response: Response) -> Response:
    """A response whose Content-Length is that of its body. One to HEAD announces the length of another body, and its client asks
    for it with GET."""
    status, lines, content = response
    own = [(name, str(len(content)) if name.lower() == "content-length" else value) for name, value in lines]
    return status, own, content


def failed(message: str) -> Response:
    return json_response(500, {"status": "failed", "message": message})


async def read_body(receive: Receive, most: int) -> bytes | None:
    """The body of a request; None: it is too large, or the client has disconnected."""
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        content += message.get("body", b"")
        if len(content) > most:
            return None
        if not message.get("more_body", False):
            return bytes(content)


def read_input(environ: Environ, most: int) -> bytes | None:
    """The body of a request; None: it is too large, incomplete, or its length is not known."""
    length = environ.get("CONTENT_LENGTH") or ""
    stream: Any = environ["wsgi.input"]
    if not length and "HTTP_TRANSFER_ENCODING" in environ:
        if not environ.get("wsgi.input_terminated"):
            return None
        content = read_upto(stream, most + 1)
        return content if len(content) <= most else None
    if not (length or "0").isdecimal() or len(length) > 11 or int(length or 0) > most:
        return None
    content = read_upto(stream, int(length or 0))
    return content if len(content) == int(length or 0) else None


def read_upto(stream: Any, most: int) -> bytes:
    """At most so many bytes of a stream; fewer at its end, and where its client has disconnected."""
    content = bytearray()
    try:
        while len(content) < most and (chunk := stream.read(most - len(content))):
            content += chunk
    except OSError:
        return b""
    return bytes(content)


def environ_size(environ: Environ) -> int:
    """How many characters of an environ a client may have chosen."""
    return sum([len(value) for value in environ.values() if isinstance(value, str)])


class TooLarge(OSError):
    """A response has more bytes than are kept. For ASGI applications an OSError of `send` is a client that disconnected."""


async def call_asgi(app: ASGIApp, scope: Scope, content: bytes, most: int) -> Response:
    """The response of an ASGI application to a request that came earlier. Its client stays until the response has ended, so that
    frameworks which watch for a disconnection send the whole of it."""
    waiting: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    status, lines, body = 500, [], bytearray()
    ended = asyncio.Event()

    async def receive() -> Message:
        if not waiting:
            await ended.wait()
        return waiting.pop() if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, lines
        if len(body) > most:
            raise TooLarge
        if message["type"] == "http.response.start":
            status = message["status"]
            lines = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers") or ()]
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))
            if not message.get("more_body", False) or len(body) > most:
                ended.set()
            if len(body) > most:
                raise TooLarge

    try:
        await app({**scope, "extensions": {}, DEFERRED: True}, receive, send)
    except Exception:  # of frameworks that report the error of `send` in their own way, too
        if len(body) <= most:
            raise
    if len(body) > most:
        raise TooLarge
    return status, lines, bytes(body)


def call_wsgi(app: Application, environ: Environ, content: bytes, most: int) -> Response:
    """The response of a WSGI application to a request that came earlier."""
    started: list[tuple[str, HeaderLines]] = []
    body = bytearray()

    def write(data: bytes) -> None:
        body.extend(data)
        if len(body) > most:
            raise TooLarge

    def start_response(status: str, headers: HeaderLines, exc_info: ExcInfo | None = None) -> Write:
        started[:] = [(status, list(headers))]
        return write

    chunks = app({**environ, "wsgi.input": io.BytesIO(content), DEFERRED: True}, start_response)
    try:
        for chunk in chunks:
            write(chunk)
    finally:
        close_body(chunks)
    status, lines = started[0]
    return int(status[:3]), lines, bytes(body)
