"""Several workers: each exposes its own numbers, as the documentation shows, and together they are all requests."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path

import pytest

import limitkeeper
from servers.valkey import free_port

ROOT = Path(__file__).parents[2]
APP = """
from limitkeeper import SharedStore
from limitkeeper.observe.prometheus import LimitkeeperCollector
from limitkeeper.policy import Gate, Policy
from limitkeeper.web.wsgi import RateLimitMiddleware

policy = Policy.of(name="shop", limits=[{"name": "all", "limit": "fixed window 20/h"}])
gate = Gate(policy, store=SharedStore("limits", timeout=60))
LimitkeeperCollector(gate)


def hello(environ, start_response):
    start_response("200 OK", [("content-type", "text/plain")])
    return [b"hello"]


app = RateLimitMiddleware(hello, policy=gate)
"""


def received(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except (OSError, HTTPException):
        return 0, ""


def free_ports(count: int) -> range:
    """Ports in a row that are free, below those that the system gives to servers of other tests."""
    while True:
        first = random.randrange(20_000, 30_000)
        try:
            with ExitStack() as taken:
                for port in range(first, first + count):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
                return range(first, first + count)
        except OSError:
            continue


def answering(ports: range, count: int) -> list[int]:
    """The first `count` ports that answer."""
    end = time.monotonic() + 90
    while True:
        found = [port for port in ports if received(f"http://127.0.0.1:{port}/metrics")[0] == 200]
        if len(found) >= count:
            return found
        assert time.monotonic() < end, f"only {found} of {ports} answer"
        time.sleep(0.05)


@pytest.mark.skipif(os.name == "nt", reason="gunicorn needs fork")
def test_each_worker_has_a_port_of_its_own(tmp_path):
    """gunicorn with the settings of the page: two workers on one shared limit; their scrapes add up to what was sent."""
    page = (ROOT / "docs" / "observability.md").read_text()
    settings = re.search(r"```python\n# gunicorn\.conf\.py\n(.+?)```", page, re.S)[1]
    port, ports = free_port(), free_ports(8)
    (tmp_path / "gunicorn.conf.py").write_text(settings.replace("range(9200, 9232)", repr(ports)))
    (tmp_path / "shop.py").write_text(APP)
    command = [sys.executable, "-m", "gunicorn", "shop:app", "-w", "2", "-b", f"127.0.0.1:{port}", "--log-level", "error"]
    environment = {**os.environ, "PYTHONPATH": str(Path(limitkeeper.__path__[0]).parent)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:
        answering(range(port, port + 1), 1)
        one, other = answering(ports, 2)
        before = int(scraped(one) + scraped(other))
        statuses = [received(f"http://127.0.0.1:{port}/")[0] for _ in range(30)]
        assert (statuses.count(200), statuses.count(429)) == (20 - before, 10 + before)
        assert scraped(one) + scraped(other) == 30 + before
    finally:
        process.terminate()
        process.wait(60)


def scraped(port: int) -> float:
    """The number of requests that this worker has handled."""
    _, text = received(f"http://127.0.0.1:{port}/metrics")
    return sum(
        float(value) for value in re.findall(r'^limitkeeper_requests_total\{outcome="\w+",policy="shop"\} (\S+)$', text, re.M)
    )
