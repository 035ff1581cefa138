"""A watched policy behind real servers: all forked workers load a new file, and SIGHUP reaches a server in its event loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import limitkeeper
from servers.valkey import free_port

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

POLICY = "limits:\n  - {{name: api, key: ip, limit: fixed window {count}/h}}\n"

WSGI = """
import os, time
from limitkeeper.policy.gate import Gate
from limitkeeper.web.wsgi import RateLimitMiddleware

def app(environ, start_response):
    time.sleep(0.01)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]

gate = Gate("limitkeeper.yaml")
gate.watch("20ms")
app = RateLimitMiddleware(app, policy=gate)
"""

ASGI = """
from limitkeeper.policy.gate import Gate
from limitkeeper.web.asgi import RateLimitMiddleware

async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

gate = Gate("limitkeeper.yaml")
gate.watch("1h")
app = RateLimitMiddleware(app, policy=gate)
"""


@contextmanager
def served(folder: Path, source: str, *command: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of an application in a folder, and its address."""
    (folder / "served.py").write_text(source)
    (folder / "limitkeeper.yaml").write_text(POLICY.format(count=100_000))
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": f"{os.path.dirname(limitkeeper.__path__[0])}{os.pathsep}{folder}"}
    words = [word.format(port=port) for word in command]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield process, f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(60)


def limits_seen(url: str, wanted: str, workers: int, log: Path) -> None:
    """Sends requests until so many workers have answered under the expected limit, and none under another since."""
    found: dict[str, str] = {}
    end = time.monotonic() + 90
    while len(found) < workers or set(found.values()) != {wanted}:
        assert time.monotonic() < end, (found, log.read_text())
        with ThreadPoolExecutor(6) as executor:  # so many at once that no worker alone takes them all
            for answer in executor.map(asked, [url] * 6):
                if answer is None:
                    time.sleep(0.02)
                else:
                    found[answer.text] = answer.headers["x-ratelimit-limit"]


def asked(url: str) -> httpx.Response | None:
    """A response; None while no server listens yet."""
    try:
        return httpx.get(url, headers={"Connection": "close"})
    except httpx.TransportError:
        return None


def test_every_forked_worker_loads_a_new_file(tmp_path):
    """gunicorn loads the application once and forks: each of its workers continues the watch."""
    words = ["gunicorn", "--preload", "-w", "2", "--threads", "2", "-b", "127.0.0.1:{port}", "served:app"]
    with served(tmp_path, WSGI, *words) as (_, url):
        limits_seen(url, "100000", 2, tmp_path / "log")
        (tmp_path / "limitkeeper.yaml").write_text(POLICY.format(count=200_000))
        limits_seen(url, "200000", 2, tmp_path / "log")


def test_sighup_reaches_a_server_in_its_loop(tmp_path):
    """uvicorn, a watch with an interval of an hour, a signal: the next request is decided by the new file."""
    with served(tmp_path, ASGI, "uvicorn", "--port", "{port}", "--log-level", "warning", "served:app") as (process, url):
        limits_seen(url, "100000", 1, tmp_path / "log")
        (tmp_path / "limitkeeper.yaml").write_text(POLICY.format(count=200_000))
        process.send_signal(signal.SIGHUP)
        limits_seen(url, "200000", 1, tmp_path / "log")
        assert process.poll() is None
