"""A real server under load: the same app behind an inline dict bucket and behind limitkeeper, each in a process of its own.

Each server keeps to one core and the load generator to another. The load is wrk's where it is found (or at $WRK), otherwise that
of a client of our own: a few keep-alive connections, written and read in turns. A slice is about a second; of the ratios of
neighbouring slices the median counts. Beside requests per second stands requests per second of the server's own CPU time, which
other load on the machine affects less.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from report import Section, Table, number
from timing import Effort

HERE = Path(__file__).resolve().parent
CONNECTIONS = 16
APPS = ("inline", "inline, the same fields", "limitkeeper", "limitkeeper, fields near the end", "bare")
REQUEST = b"GET /products/17 HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Tenant: acme\r\nX-User: u42\r\n\r\n"


def core(index: int) -> set[int]:
    """The first core for servers, the last for the load generator."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[index]}


class Server:
    """One uvicorn in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        command = [sys.executable, str(HERE / "web_server.py"), name]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        received = self.process.stdout.readline()
        if not received.strip().isdigit():
            raise RuntimeError(f"the server {name!r} did not begin")
        self.port = int(received)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.communicate()

    def cpu(self) -> float:
        """Seconds of CPU time that the server has used (the clock of a process, by its id; Linux)."""
        return time.clock_gettime((~self.process.pid << 3) | 2)


def by_wrk(wrk: str, port: int, seconds: float) -> int:
    """The number of answered requests."""
    command = [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", f"http://127.0.0.1:{port}/products/17"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) requests in", done.stdout)
    if found is None or "Non-2xx" in done.stdout:
        raise RuntimeError(f"wrk said: {done.stdout[-200:]}")
    return int(found[1])


def by_hand(port: int, seconds: float) -> int:
    """The same with a few sockets: all are written, then all are read."""
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    answered, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for one in sockets:
            one.sendall(REQUEST)
        for one in sockets:
            got = one.recv(65536)
            while not got.endswith(b"\r\n\r\nok"):
                got += one.recv(65536)
            if not got.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"answered {got[:30]!r}")
        answered += len(sockets)
    for one in sockets:
        one.close()
    return answered


def load(port: int, seconds: float) -> int:
    wrk = os.environ.get("WRK") or shutil.which("wrk")
    return by_wrk(wrk, port, seconds) if wrk else by_hand(port, seconds)


def slices(servers: list[Server], rounds: int, seconds: float, note: Callable[[str], None]) -> dict[str, list[Any]]:
    """(requests per second, requests per second of CPU) of every server, in turns; every other round the other way round."""
    found: dict[str, list[Any]] = {server.name: [] for server in servers}
    for server in servers:
        load(server.port, 0.3)
    for turn in range(rounds):
        note(f"served, round {turn + 1} of {rounds}")
        for server in servers if turn % 2 else reversed(servers):
            begun, used = time.perf_counter(), server.cpu()
            answered = load(server.port, seconds)
            found[server.name].append((answered / (time.perf_counter() - begun), answered / (server.cpu() - used)))
    return found


def ratio(found: dict[str, list[Any]], more: str, less: str, which: int) -> float:
    return median(a[which] / b[which] for a, b in zip(found[more], found[less], strict=True))


def served(section: Section, effort: Effort, note: Callable[[str], None], failed: dict[str, str]) -> None:
    """Adds the figures of a real server to a section."""
    if not hasattr(os, "sched_setaffinity"):
        failed["a real server"] = "processes can't be kept to cores here"
        return
    allowed = os.sched_getaffinity(0)
    try:
        with ExitStack() as stack:
            os.sched_setaffinity(0, core(0))
            servers = [stack.enter_context(Server(name)) for name in APPS]
            os.sched_setaffinity(0, allowed)
            os.sched_setaffinity(0, core(-1))
            found = slices(servers, effort.pick(12, 3), 1.0, note)
    except Exception as error:
        failed["a real server"] = f"{type(error).__name__}: {error}"
        return
    finally:
        os.sched_setaffinity(0, allowed)
    asker = "wrk" if os.environ.get("WRK") or shutil.which("wrk") else "a client of our own"
    section.figure(
        f"uvicorn + {asker}: requests/s, limitkeeper / inline dict bucket",
        ratio(found, "limitkeeper", "inline", 0),
        0.97,
        "×",
        at_least=True,
    )
    section.figure(
        f"uvicorn + {asker}: requests/s, limitkeeper with fields only near the end / inline dict bucket",
        ratio(found, APPS[3], "inline", 0),
        None,
        "×",
    )
    for less, said in (("inline", "inline dict bucket"), (APPS[1], "the same that sends the same fields"), ("bare", "bare app")):
        section.figure(f"requests per CPU second, limitkeeper / {said}", ratio(found, "limitkeeper", less, 1), None, "×")
    table = Table(("served by uvicorn", "requests/s", "µs of CPU each"))
    table.rows = [
        (name, number(median(one[0] for one in took), ""), f"{1e6 / median(one[1] for one in took):.1f}")
        for name, took in found.items()
    ]
    section.details.append(table)
