"""The suite's app for plain WSGI and for Flask, minimal and real, behind the middleware or the extension.

`WsgiApp("flask")` is the app of the suite, `WsgiApp("flask", Waitress)` the same behind a real server.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, unquote

from app_under_test import Response
from asgi_loop import RAISED

from limitkeeper.web.wsgi import RateLimitMiddleware

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE"]
PIECES = (b"one", b"two", b"three")


def remaining(evaluation: Any) -> int | None:
    return None if evaluation is None or evaluation.decision is None else evaluation.decision.remaining


def cached(environ: Any, start_response: Any) -> list[bytes]:
    """The degrade handler: a WSGI app."""
    start_response("200 OK", [("Content-Type", "application/json")])
    return [b'{"cached": true}']


def plain(gate: Any, calls: list[str]) -> Any:
    """No framework at all. Its header list is the same one every time, as an app that saves allocations would have it."""
    headers = [("Content-Type", "application/json")]

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        calls.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        first, *rest = environ["PATH_INFO"].strip("/").split("/")
        if first == "raise":
            raise ValueError(RAISED)
        if first == "status":
            start_response(f"{rest[0]} So be it", [])
            return []
        start_response("200 OK", headers)
        if first == "stream":
            return iter(PIECES)
        if first == "big":
            return [b"x" * int(parse_qs(environ["QUERY_STRING"])["n"][0])]
        if first == "body":
            length = int(environ.get("CONTENT_LENGTH") or 0)
            return [json.dumps({"length": len(environ["wsgi.input"].read(length))}).encode()]
        found = {"path": environ["PATH_INFO"], "remaining": remaining(environ["limitkeeper.evaluation"])}
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else json.dumps(found).encode()]

    return RateLimitMiddleware(app, policy=gate)


def flask(gate: Any, calls: list[str], early: bool = True) -> Any:
    from flask import Flask, g, request
    from flask import Response as FlaskResponse

    from limitkeeper.web.flask import RateLimit

    app = Flask("shop")
    app.logger.disabled = True
    RateLimit(app, policy=gate, early=early)

    def noted() -> None:
        calls.append(f"{request.method} {request.path}")

    @app.route("/status/<int:code>", methods=METHODS)
    def status(code: int) -> Any:
        noted()
        return "", code

    @app.route("/stream")
    def stream() -> Any:
        noted()
        return FlaskResponse(iter(PIECES))

    @app.route("/big")
    def big() -> Any:
        noted()
        return "x" * int(request.args["n"])

    @app.route("/raise")
    def raises() -> Any:
        noted()
        raise ValueError(RAISED)

    @app.route("/body", methods=["POST"])
    async def body() -> Any:
        noted()
        return {"length": len(request.get_data())}

    @app.route("/", defaults={"rest": ""}, methods=METHODS)
    @app.route("/<path:rest>", methods=METHODS)
    def anything(rest: str) -> Any:
        noted()
        return {"path": request.path, "remaining": remaining(g.limitkeeper)}

    return app


def flask_late(gate: Any, calls: list[str]) -> Any:
    return flask(gate, calls, early=False)


def django(gate: Any, calls: list[str]) -> Any:
    from django_site import wsgi

    return wsgi(gate, calls)


def cached_view(*_: Any, **__: Any) -> Any:
    """The degrade handler as a Flask view."""
    return {"cached": True}


def cached_django(request: Any) -> Any:
    from django.http import JsonResponse

    return JsonResponse({"cached": True})


BUILDERS: dict[str, tuple[Callable[[Any, list[str]], Any], Any]] = {
    "plain": (plain, cached),
    "flask": (flask, cached_view),
    "flask-late": (flask_late, cached_view),
    "django": (django, cached_django),
}


class CountedInput(io.BytesIO):
    """A request's body that counts how much of it was read."""

    taken = 0

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        self.taken += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        found = super().readinto(buffer)
        self.taken += found
        return found


def environ_of(method: str, target: str, headers: list[tuple[str, str]] = [], body: bytes = b"", **more: Any) -> dict[str, Any]:  # noqa: B006
    """An environ as a server makes it; keywords are further keys."""
    path, _, query = target.partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote(path, "latin-1"),
        "QUERY_STRING": query,
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_HOST": "testserver",
        "REMOTE_ADDR": "127.0.0.1",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": CountedInput(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    if body:
        environ["CONTENT_LENGTH"] = str(len(body))
    seen: set[str] = set()
    for name, value in headers:
        key = "HTTP_" + name.upper().replace("-", "_")
        environ[key] = f"{environ[key]},{value}" if key in seen else value
        seen.add(key)
    return environ | more


class InProcess:
    """A WSGI app that runs here, called as a server would call it."""

    def __init__(self, app: Any, calls: list[str]) -> None:
        self.app = app
        self.calls = calls

    def request(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes, peer: str) -> Response:
        environ = environ_of(method, target, headers, body, REMOTE_ADDR=peer)
        answer: list[Any] = []
        written: list[bytes] = []

        def start_response(status: str, fields: list[tuple[str, str]], exc_info: Any = None) -> Any:
            assert not answer or exc_info, "start_response was called twice"
            answer[:] = [int(status[:3]), list(fields)]
            return written.append

        taken = environ["wsgi.input"]
        try:
            self.exhaust(self.app(environ, start_response), written)
        except ValueError as error:
            if str(error) != RAISED:
                raise
            return Response(500, [], b"Internal Server Error", taken.taken)
        return Response(answer[0], answer[1], b"" if method == "HEAD" else b"".join(written), taken.taken)

    @staticmethod
    def exhaust(chunks: Any, written: list[bytes]) -> None:
        try:
            written.extend(chunks)
        finally:
            if hasattr(chunks, "close"):
                chunks.close()

    def close(self) -> None:
        pass


class WsgiApp:
    """One of them, in process or behind a server (`server(app, calls)` makes it)."""

    kinds = frozenset({"http", "wsgi"})

    def __init__(self, framework: str, server: Callable[[Any, list[str]], Any] = InProcess) -> None:
        self.build, handler = BUILDERS[framework]
        self.handlers = {"cached": handler}
        self.server = server

    def make(self, gate: Any) -> Any:
        calls: list[str] = []
        return self.server(self.build(gate, calls), calls)


def chunks_of(*pieces: bytes) -> Iterator[bytes]:
    yield from pieces
