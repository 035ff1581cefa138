"""Real ASGI servers on loopback, each in a thread of this process, on a port that was free; and plain HTTP over a socket."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import threading
from typing import Any

import hypercorn.asyncio
import uvicorn
import uvloop
from app_under_test import Response, until
from hypercorn.config import Config


class Wire:
    """Speaks HTTP to a port, byte for byte as given: http.client normalizes no path. One connection per thread, kept."""

    calls: list[str]
    port: int
    #: Statuses after which a server may close without notice: after an error, or when a request's body was not read.
    hangs_up: frozenset[int] = frozenset({500})

    def __init__(self) -> None:
        self.local = threading.local()
        self.opened: list[http.client.HTTPConnection] = []

    def connection(self) -> http.client.HTTPConnection:
        if not hasattr(self.local, "connection"):
            self.local.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
            self.opened.append(self.local.connection)
        return self.local.connection  # type: ignore[no-any-return]

    def request(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes, peer: str) -> Response:
        """One request. A server may close a used connection (an app left a body unread) just when the next one comes: like any
        client, this one then repeats it once on a new connection."""
        used = self.connection().sock is not None
        try:
            return self.once(method, target, headers, body)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            self.connection().close()
            if not used:
                raise
            return self.once(method, target, headers, body)

    def once(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Response:
        connection = self.connection()
        connection.putrequest(method, target, skip_host=any(name == "Host" for name, _ in headers), skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        if body or method == "POST":
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        answer = connection.getresponse()
        response = Response(answer.status, answer.getheaders(), answer.read())
        if response.status in self.hangs_up:
            connection.close()
        return response

    def hang_up(self) -> None:
        for connection in self.opened:
            connection.close()


class Uvicorn(Wire):
    """uvicorn on uvloop and httptools. By default it would trust X-Forwarded-For from 127.0.0.1."""

    def __init__(self, app: Any, calls: list[str], **options: Any) -> None:
        super().__init__()
        self.calls = calls
        usual = {"log_config": None, "access_log": False, "proxy_headers": False, "http": "httptools"}
        config = uvicorn.Config(app, host="127.0.0.1", port=0, loop="uvloop", **(usual | options))
        self.server = uvicorn.Server(config)
        logging.getLogger("uvicorn.error").disabled = True
        self.listener = config.bind_socket()
        self.port = int(self.listener.getsockname()[1])
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        until(lambda: self.server.started or not self.thread.is_alive(), "uvicorn did not start")
        assert self.thread.is_alive()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.server.serve(sockets=[self.listener]))

    def close(self) -> None:
        self.hang_up()
        self.server.should_exit = True
        self.thread.join(60)
        self.listener.close()
        assert not self.thread.is_alive()


class Hypercorn(Wire):
    """hypercorn on asyncio's own loop."""

    hangs_up = frozenset({429, 500, 503})

    def __init__(self, app: Any, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self.config = Config()
        self.config.bind = [f"fd://{listener.detach()}"]
        self.config.errorlog = None
        self.config.graceful_timeout = 1
        self.loop = asyncio.new_event_loop()
        self.stop = asyncio.Event()
        self.thread = threading.Thread(target=self._serve, args=(app,), daemon=True)
        self.thread.start()
        until(self.answers, "hypercorn did not start")

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 0.2).close()
        except OSError:
            return False
        return True

    def _serve(self, app: Any) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(hypercorn.asyncio.serve(app, self.config, shutdown_trigger=self.stop.wait))
        self.loop.close()

    def close(self) -> None:
        self.hang_up()
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(60)
        assert not self.thread.is_alive()
