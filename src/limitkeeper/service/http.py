"""HTTP: an asyncio.Protocol over httptools' parser. http_routes.py has the routes.

A request that needs no waiting is answered in the turn of the loop in which it arrives. Rejected: an ASGI server and framework,
which cost 5 to 8 times as much as a check (measured on one core: uvicorn 13 k/s, such a protocol 59 to 69 k/s).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import httptools

from ..limiter_base import COMPILED
from .app import Application
from .connections import Connection, Listener
from .http_fast import FastChecks
from .http_routes import Headers, Request, Response, Router, error_response, failure

#: Most requests of one connection that wait behind others.
MAX_WAITING = 1000
REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HEAD = b"HTTP/1.1 %d %b\r\ndate: %b\r\ncontent-length: %d\r\n"
JSON = b"content-type: application/json\r\n"
UNREADABLE = Request(b"GET", b"/", [], b"", False, False, None)
FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


class HttpConnection(Connection):
    """Parses the requests of one client and encodes their responses."""

    def __init__(self, router: Router, listener: Listener) -> None:
        super().__init__(listener)
        self.router = router
        self.parser = httptools.HttpRequestParser(self)
        self._max_headers, self._max_body = listener.settings.max_headers, listener.settings.max_body
        if COMPILED and type(router) is Router and type(router.app) is Application:  # others may restrict what a client does
            self.fast = FastChecks(router.app, router.token, self._max_headers, self._max_body, encoded)
        self._received = self._header_size = self._body_size = 0
        self._began = self._failed = False
        self._url = b""
        self._headers: Headers = []
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._peer = transport.get_extra_info("peername")
        super().connection_made(transport)

    # Parsing ---------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        if self._failed:
            return
        self._began = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is spoken here: the request is answered, and the connection closed
        except httptools.HttpParserError:
            self._fail(400, "the request is not valid HTTP/1.1")
        if self.partial and not self._began:  # the parser keeps a header until it is complete
            self._received += len(data)
            if self._received > self._max_headers + self._max_body:
                self._fail(413, "the request is too large")
        if self.pending:
            self._read_or_wait()
        elif self.waiting:
            self.work()

    def on_message_begin(self) -> None:
        self.partial = self._began = True
        self.since = self.listener.tick
        self._received = self._header_size = self._body_size = 0
        self._url, self._headers, self._body = b"", [], []

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._header_size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_size += len(name) + len(value) + 4
        if self._header_size > self._max_headers:
            self._fail(431, f"request line and headers are larger than {self._max_headers} bytes")
        self._headers.append((name.lower(), value))
        if len(name) == 14 and name.lower() == b"content-length" and (len(value) > 12 or int(value) > self._max_body):
            self._count_body(self._max_body + 1)
        elif (
            len(name) == 6
            and name.lower() == b"expect"
            and value.lower() == b"100-continue"
            and not (self._failed or self.waiting or self.pending)
        ):
            self.queued = True
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._count_body(len(body))

    def _count_body(self, more: int) -> None:
        self._body_size += more
        if self._body_size > self._max_body:
            self._fail(413, f"the body is larger than {self._max_body} bytes")

    def on_message_complete(self) -> None:
        if self._failed:
            return
        self.partial = False
        parser, body = self.parser, self._body
        keep_alive = parser.should_keep_alive() and not parser.should_upgrade()
        self.waiting.append(
            Request(
                parser.get_method(), self._url, self._headers, b"".join(body) if body else b"",
                keep_alive, parser.get_http_version() == "1.0", self._peer,
            )
        )  # fmt: skip
        if len(self.waiting) > MAX_WAITING:
            self._fail(400, f"more than {MAX_WAITING} requests are waiting on this connection")

    # Answering -------------------------------------------------------------------------------------------------

    def answer(self, request: Request | Response) -> bytes | Coroutine[Any, Any, bytes]:
        if not isinstance(request, Request):  # what was no request that can be read
            return self._encode(UNREADABLE, request)
        found = self.router.respond(request)
        return self._encode(request, found) if isinstance(found, tuple) else self._encode_later(request, found)

    async def _encode_later(self, request: Request, found: Coroutine[Any, Any, Response]) -> bytes:
        return self._encode(request, await found)

    def can_leave(self) -> bool:
        return self.task in self.router.app.leaving

    def failure(self, request: Request, error: Exception) -> bytes:
        return self._encode(request, failure(error))

    def _encode(self, request: Request, response: Response) -> bytes:
        more = b""
        if not request.keep_alive or (self.listener.draining and not self.waiting):
            more, self.closing = b"connection: close\r\n", True
        elif request.old:
            more = b"connection: keep-alive\r\n"
        return encoded(response, self.listener.date, more, request.method != b"HEAD")

    def _fail(self, status: int, message: str) -> None:
        """Reads no more of what is no request; answers the requests before it, and then this, and closes the connection."""
        if not self._failed:
            self._failed, self.partial = True, False
            self.listener.malformed += 1
            self.waiting.append(error_response(status, "invalid", message))

    def expire(self) -> None:
        if self.partial and not self.unread:
            self._fail(408, "the request did not arrive in time")
            self.work()
        else:
            self.abort()


def encoded(response: Response, date: bytes, more: bytes = b"", with_body: bool = True) -> bytes:
    """The bytes of a response; `more` are further lines of its header."""
    status, body, fields = response
    is_json = not fields or fields[-1][0] != b"content-type"
    if is_json:
        body += b"\n"  # for terminals
        more = JSON + more
    head = HEAD % (status, REASONS.get(status, b"-"), date, len(body)) + b"".join([b"%b: %b\r\n" % field for field in fields])
    return head + more + b"\r\n" + (body if with_body else b"")
