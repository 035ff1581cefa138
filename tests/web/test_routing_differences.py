"""A rule matches the paths that the application routes: each framework's own router against ours, behind each real server.

Every handler answers with its route, and every route has a rule of the same name. Whatever a client writes as its target: when
the handler of a route has answered, the rule of that route has limited the request, and no exemption of another path applied.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import hypercorn.asyncio
import pytest
from routed_apps import ASGI, ROUTES, WSGI, targets
from servers_asgi import Hypercorn, Uvicorn
from servers_wsgi import Waitress

import limitkeeper
from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.wsgi import RateLimitMiddleware as WsgiMiddleware

pytestmark = pytest.mark.slow
NUMBER = 3000


def policy() -> Policy:
    limits = [{"name": name, "match": path, "limit": "9999999/s"} for name, path in ROUTES.items() if name != "healthz"]
    return Policy.of(exempt=[{"path": "/healthz"}], limits=limits)


class UvicornH11(Uvicorn):
    """uvicorn with its other parser."""

    def __init__(self, app, calls):
        super().__init__(app, calls, http="h11")


class HypercornWsgi(Hypercorn):
    """hypercorn with a WSGI application."""

    def _serve(self, app):
        asyncio.set_event_loop(self.loop)
        trigger = self.stop.wait
        self.loop.run_until_complete(hypercorn.asyncio.serve(app, self.config, shutdown_trigger=trigger, mode="wsgi"))
        self.loop.close()


class RawClient:
    """Sends request lines as they are, and reads (route, names of the rules) of the response; None: it was not served."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.socket: socket.socket | None = None

    def ask(self, target: str, *headers: str) -> tuple[str, set[str]] | None:
        lines = [f"GET {target} HTTP/1.1", "Host: localhost", *headers, "", ""]
        for _ in range(2):
            if self.socket is None:
                self.socket = socket.create_connection(("127.0.0.1", self.port), 30)
                self.socket.settimeout(30)
            try:
                self.socket.sendall("\r\n".join(lines).encode("latin-1"))
                return self.read()
            except OSError:
                self.close()
        return None

    def read(self) -> tuple[str, set[str]] | None:
        assert self.socket is not None
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.more()
        head, _, content = data.partition(b"\r\n\r\n")
        fields = head.decode("latin-1").lower().split("\r\n")
        lengths = [int(field.split(":")[1]) for field in fields if field.startswith("content-length:")]
        chunked = "transfer-encoding: chunked" in fields
        while chunked and not content.endswith(b"0\r\n\r\n"):
            content += self.more()
        if not (lengths or chunked) or "connection: close" in fields:
            self.close()
        while self.socket is not None and lengths and len(content) < lengths[0]:
            content += self.more()
        found = re.search(rb"route=(\w+)", content)
        rules = "".join([field for field in fields if field.startswith("ratelimit-policy:")])
        return None if found is None else (found[1].decode(), set(re.findall(r'"(\w+)"', rules)))

    def more(self) -> bytes:
        assert self.socket is not None
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionResetError
        return data

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket = None


def check(port: int, seed: int, *headers: str, mount: str = "") -> None:
    """Compares the routes of many targets with the rules that limited them."""
    served: dict[str, int] = {}
    number = NUMBER // 5 if mount else NUMBER
    wrong = []
    with closing(RawClient(port)) as client:
        for target in targets(number, seed):
            answer = client.ask(mount + target, *headers)
            if answer is None:
                continue
            route, rules = answer
            served[route] = served.get(route, 0) + 1
            if route != "healthz" and route not in rules:
                wrong.append((target, route, rules))
    assert not wrong, wrong[:20]
    assert sum(served.values()) > number / 50, served
    if not mount:  # of a fifth of the targets, each route need not be met
        assert {"checkout", "search", "tenant"} <= set(served)


@pytest.mark.parametrize("server", [Uvicorn, UvicornH11, Hypercorn])
@pytest.mark.parametrize("framework", ASGI)
def test_asgi_behind_servers(framework, server):
    """No target reaches a route past its rule: every ASGI framework, behind uvicorn and hypercorn."""
    with (
        Gate(policy(), store=MemoryStore()) as gate,
        closing(server(RateLimitMiddleware(ASGI[framework](), gate), [])) as running,
    ):
        check(running.port, 1)


@pytest.mark.parametrize("server", [Waitress, HypercornWsgi])
@pytest.mark.parametrize("framework", WSGI)
def test_wsgi_behind_servers(framework, server):
    """No target reaches a route past its rule: every WSGI framework, behind waitress and hypercorn."""
    with Gate(policy(), store=MemoryStore()) as gate, closing(server(WsgiMiddleware(WSGI[framework](), gate), [])) as running:
        check(running.port, 2)


APPS = {
    "gthread": """
from test_routing_differences import WSGI, WsgiMiddleware, policy
app = WsgiMiddleware(WSGI["{framework}"](), policy())
""",
    "asgi": """
from test_routing_differences import ASGI, RateLimitMiddleware, policy
app = RateLimitMiddleware(ASGI["{framework}"](), policy())
""",
}


@contextmanager
def gunicorn(framework: str, folder: Path, worker: str = "gthread"):
    """The port of a gunicorn that trusts loopback, as it does by default."""
    (folder / "routed.py").write_text(APPS[worker].format(framework=framework))
    path = [Path(limitkeeper.__path__[0]).parent, Path(__file__).parent, Path(__file__).parents[1], folder]
    listener = socket.create_server(("127.0.0.1", 0))
    command = [
        sys.executable,
        "-m",
        "gunicorn",
        "--worker-class",
        worker,
        "--threads",
        "2",
        "--bind",
        f"fd://{listener.fileno()}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "routed:app"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
            pass_fds=[listener.fileno()],
            stdout=log,
            stderr=log,
        )
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.close()
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize("framework", WSGI)
def test_wsgi_behind_gunicorn(framework, tmp_path):
    """No target reaches a route past its rule behind gunicorn, with or without a mount point that the client has chosen."""
    with gunicorn(framework, tmp_path) as port:
        check(port, 3)
        for mount in ("/zz", "/search", "/t/a/x", "/healthz", "/"):
            check(port, 4, f"SCRIPT_NAME: {mount}", mount=mount)


@pytest.mark.parametrize("framework", ASGI)
def test_asgi_behind_gunicorn(framework, tmp_path):
    """The same for gunicorn's worker for ASGI, in which such a header changes nothing."""
    with gunicorn(framework, tmp_path, "asgi") as port:
        check(port, 5)
        check(port, 6, "SCRIPT_NAME: /t/a/x")
