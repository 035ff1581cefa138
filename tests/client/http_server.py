"""A real HTTP server on loopback that answers by a script and records the requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """One answer. `reset` closes the connection instead, without a response."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    reset: bool = False
    chunks: tuple[bytes, ...] = ()  # sent one after the other, without a length; None of them: `body`
    cut: bool = False  # the connection ends before the body does


@dataclass
class Seen:
    """One received request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class ScriptedServer:
    """`answers` is a list that is used up (the last one stays), or a function of the request."""

    def __init__(self, answers: list[Answer] | Callable[[Seen], Answer]) -> None:
        self.answers = answers
        self.seen: list[Seen] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, seen: Seen) -> Answer:
        with self._lock:
            self.seen.append(seen)
            if callable(self.answers):
                return self.answers(seen)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                if self.headers.get("transfer-encoding") == "chunked":
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size + 2)[:-2]
                    self.rfile.readline()
                headers = {name.lower(): value for name, value in self.headers.items()}
                self.reply(outer.answer(Seen(self.command, self.path, headers, body)))

            def reply(self, answer: Answer) -> None:
                if answer.reset:
                    self.close_connection = True
                    return
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.chunks or answer.cut:
                    self.send_header("transfer-encoding", "chunked")
                else:
                    self.send_header("content-length", str(len(answer.body)))
                self.end_headers()
                for chunk in answer.chunks:
                    self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                    self.wfile.flush()
                if answer.cut:
                    self.close_connection = True
                elif answer.chunks:
                    self.wfile.write(b"0\r\n\r\n")
                elif self.command != "HEAD":
                    self.wfile.write(answer.body)

            def log_message(self, *_: Any) -> None:
                pass

        for method in ("GET", "HEAD", "PATCH", "POST", "PUT", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.handle_any)
        return Handler
