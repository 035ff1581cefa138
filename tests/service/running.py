"""A service in a process of its own, as `limitkeeper serve` runs it, on free ports."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import redis

import limitkeeper

POLICY = """
name: served
identify:
  user: {header: X-User}
  ip: {client_ip: {trusted_proxies: [127.0.0.0/8]}}
limits:
  - {name: checkout, match: POST /checkout, key: user | ip, limit: fixed window 3/h align first}
  - {name: tokens, match: POST /llm, key: user, limit: token bucket 1/h burst 1000}
  - {name: plenty, match: GET /plenty, key: user, limit: fixed window 100000/h align first}
  - {name: dark, match: GET /dark, key: user, limit: fixed window 1/h align first, on_refusal: shadow}
  - {name: waits, match: GET /waits, key: user, limit: token bucket 5/s burst 1, on_refusal: wait up to 5s}
"""


class Running:
    """`http` and `resp` are its ports; `end` stops it and returns its exit code and its further output."""

    def __init__(self, *arguments: str, policy: str | Path, environment: dict[str, str] | None = None) -> None:
        paths = str(Path(limitkeeper.__path__[0]).parent)
        ports = [] if "--http" in arguments else ["--http", "127.0.0.1:0", "--resp", "127.0.0.1:0"]
        ports += [] if "--admin" in arguments else ["--admin", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "limitkeeper", "serve", str(policy), *ports, *arguments],
            env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.printed = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if line == "\n" and "http" in self.printed:
                break
        self.http = self._port("http")
        self.resp = self._port("resp")
        self.admin = f"http://127.0.0.1:{self._port('admin')}" if re.search("^  admin ", self.printed, re.M) else ""
        token = (environment or {}).get("LIMITKEEPER_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.http}", headers=headers, timeout=30)
        self.redis = redis.Redis(port=self.resp, password=token, socket_timeout=30)

    def _port(self, name: str) -> int:
        found = re.search(rf"^  {name} .*:(\d+)$", self.printed, re.M)
        assert found is not None, self.printed
        return int(found[1])

    def post(self, path: str, **fields: object) -> httpx.Response:
        return self.client.post(path, json=fields)

    def hit(self, limit: str, key: str, *more: object) -> list[int]:
        return self.redis.execute_command("LK.HIT", limit, key, *more)  # type: ignore[no-any-return]

    def raw(self, port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=30)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.client.close()
        self.redis.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, rest

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.end()


def read_all(sock: socket.socket) -> bytes:
    """The bytes until the other side closes."""
    found = b""
    try:
        while data := sock.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found
