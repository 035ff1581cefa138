"""The admin port: AdminRouter over HTTP, and /v1/events, the status as server-sent events every INTERVAL seconds."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Coroutine
from typing import Any

from .access import INSPECT, Access, Token
from .admin_routes import AdminRouter, shows_keys
from .app import Application
from .connections import Listener
from .http import FULL, HttpConnection
from .http_routes import Request, Response, error_response
from .settings import Settings

INTERVAL = 0.5
#: The most open event streams of a worker.
MAX_STREAMS = 64
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"


class AdminConnection(HttpConnection):
    """One client of the admin port."""

    router: AdminRouter  # type: ignore[assignment]

    def answer(self, request: Request | Response) -> bytes | Coroutine[Any, Any, bytes]:
        if not isinstance(request, Request) or request.url.partition(b"?")[0] != b"/v1/events" or request.method != b"GET":
            return super().answer(request)
        refused, token = self.router.refuse(request, INSPECT)
        if refused is None and self.router.streams >= MAX_STREAMS:
            refused = error_response(503, "too_many", f"there are {MAX_STREAMS} event streams; close one")
        if refused is not None:
            return self._encode(request, refused)
        stream = self._stream(token, shows_keys(request, token))
        self.router.streams += 1  # now: others may arrive before its task begins
        return stream

    async def _stream(self, token: Token, keys: bool) -> bytes:
        """Sends the status until the client goes, or does not read, or the service drains."""
        try:
            self.transport.write(STREAM)
            while not (self.transport.is_closing() or self.unread or self.listener.draining):
                self.transport.write(b"data: %b\n\n" % json.dumps(await self.router.status(token, keys)).encode())
                await asyncio.sleep(INTERVAL)
        finally:
            self.router.streams -= 1
        self.closing = True
        return b""


class AdminListener(Listener):
    """The admin port of one worker. `folder` holds the sockets by which workers ask each other."""

    def __init__(self, app: Application, settings: Settings, folder: str | None) -> None:
        self.router = AdminRouter(app, Access(settings), folder)
        super().__init__(settings, lambda listener: AdminConnection(self.router, listener), FULL)  # type: ignore[arg-type]

    async def start(self, bound: socket.socket, tls: ssl.SSLContext | None) -> None:
        await self.router.peers.start()
        await super().start(bound, tls)

    async def drain(self, timeout: float) -> None:
        self.router.load.stop()
        await super().drain(timeout)
        self.router.peers.close()
