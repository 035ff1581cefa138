"""The service beside Valkey, uvicorn and grpcio: one core for the server, another one for the load.

A response per CPU second of the server (all its threads) is the figure, since other load on the machine affects it little;
responses per second stand in the table. The cases take turns in slices of a third of a second; a ratio is the median of the
ratios of a round. 64 connections, 1000 keys; the load generator is compiled (load.pyx), for gRPC it is grpcio's client.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from built import built
from redis_sync import MINIMAL
from report import Section, Table, number
from service_peers import METHOD
from timing import Effort

HERE = Path(__file__).resolve().parent
CONNECTIONS, DEPTH, CHECKS = 64, 16, 100
KEYS = [b"user:%d" % n for n in range(1000)]
POLICY = """
name: bench
limits:
  - {name: api, match: GET /api, key: ip, limit: token bucket 1000000/s burst 1000000}
  - {name: slow, match: GET /slow, key: ip, limit: token bucket 10/day}
"""
ENVOY = """
domain: bench
descriptors:
  - {key: user, rate_limit: {unit: second, requests_per_unit: 1000000}}
"""
MILLION = 1_000_000


class Server:
    """A process that prints its ports; `pids` are those whose CPU time counts."""

    def __init__(self, *command: str, pattern: str = r"(\d+)") -> None:
        path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", path)}
        self.process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        printed = ""
        for line in self.process.stdout:
            printed += line
            if re.search(pattern, printed):
                break
        self.printed = printed

    def port(self, pattern: str = r"(\d+)") -> int:
        found = re.search(pattern, self.printed, re.M)
        if found is None:
            raise RuntimeError(f"the server did not begin: {self.printed[-200:]}")
        return int(found[1])

    def pids(self) -> list[int]:
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def cpu(self) -> float:
        """Seconds of CPU time used so far (the clock of a process, by its id; Linux)."""
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.pids())

    def resident(self) -> int:
        """Bytes in memory."""
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids()) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.communicate()


def service(folder: Path, *arguments: str, grpc: bool = False) -> Server:
    (folder / "bench.yaml").write_text(POLICY)
    (folder / "envoy.yaml").write_text(ENVOY)
    envoy = ("--envoy", str(folder / "envoy.yaml"), "--grpc", "127.0.0.1:0") if grpc else ()
    ports = ("--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", *envoy)
    return Server("-m", "limitkeeper", "serve", str(folder / "bench.yaml"), *ports, *arguments, pattern="resp .*\n[^$]*\n\n")


class ValkeyServer(Server):
    """Valkey; its process is not Python."""

    def __init__(self) -> None:
        from servers.valkey import Valkey

        self.valkey = Valkey()
        assert self.valkey.process is not None
        self.process = self.valkey.process  # type: ignore[assignment]
        with self.valkey.client() as client:
            for key in KEYS:
                client.set(key, b"1000000")
            self.sha: str = client.script_load(MINIMAL)

    def __exit__(self, *exc: object) -> None:
        self.valkey.close()


@dataclass
class Case:
    """Requests to one port of one server; each response is so many decisions. `found` has (per second, per CPU second)."""

    name: str
    server: Server
    port: int
    requests: list[bytes]
    each: int = 1
    found: list[tuple[float, float]] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    lines: int = 0

    def connect(self, generator: Any) -> None:
        self.sockets = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(CONNECTIONS)]
        for one in self.sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets[0].sendall(self.requests[0])
        time.sleep(0.2)
        answer = self.sockets[0].recv(1 << 20)
        if answer.startswith(b"-") or b"\n-" in answer or (answer.startswith(b"HTTP") and b" 200 " not in answer):
            raise RuntimeError(f"{self.name}: answered {answer[:200]!r}")
        self.lines = answer.count(b"\n")
        self.run(generator, 0.3)

    def run(self, generator: Any, seconds: float, rate: float = 0, latencies: list[float] | None = None) -> tuple[float, float]:
        used = self.server.cpu()
        answered, took = generator.run(self.sockets, self.requests, self.lines, seconds, rate, latencies)
        return answered * self.each / took, answered * self.each / (self.server.cpu() - used)


def resp(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def post(body: bytes) -> bytes:
    fields = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    return b"POST /v1/check HTTP/1.1\r\n%b\r\n%b" % (fields, body)


def pipelined(requests: list[bytes]) -> list[bytes]:
    return [b"".join(requests[at : at + DEPTH]) for at in range(0, len(requests) - DEPTH, DEPTH)]


def check(key: bytes) -> bytes:
    return b'{"limit": "api", "key": "%b"}' % key


def many_checks(at: int) -> bytes:
    return b'{"checks": [%b]}' % b", ".join([check(key) for key in KEYS[at : at + CHECKS]])


def cases(own: Server, valkey: ValkeyServer, asgi: Server) -> list[Case]:
    hits = [resp(b"LK.HIT", b"api", key) for key in KEYS]
    gets = [resp(b"GET", key) for key in KEYS]
    scripts = [resp(b"EVALSHA", valkey.sha.encode(), b"1", b"m:" + key, b"1", b"1000000") for key in KEYS]
    rates = [resp(b"CL.THROTTLE", key, b"999999", b"1000000", b"1") for key in KEYS]
    own_resp, own_http, theirs = own.port(r"resp .*:(\d+)"), own.port(r"http .*:(\d+)"), valkey.valkey.port
    many = [post(many_checks(at)) for at in range(0, len(KEYS), CHECKS)]
    return [
        Case("Valkey, GET", valkey, theirs, gets),
        Case("RESP, LK.HIT", own, own_resp, hits),
        Case("RESP, CL.THROTTLE", own, own_resp, rates),
        Case("Valkey, minimal script", valkey, theirs, scripts),
        Case("Valkey, minimal script, pipeline 16", valkey, theirs, pipelined(scripts), DEPTH),
        Case("RESP, LK.HIT, pipeline 16", own, own_resp, pipelined(hits), DEPTH),
        Case("uvicorn, bare ASGI", asgi, asgi.port(), [post(check(key)) for key in KEYS]),
        Case("HTTP, check", own, own_http, [post(check(key)) for key in KEYS]),
        Case("HTTP, 100 checks in a body", own, own_http, many, CHECKS),
    ]


# Figures ---------------------------------------------------------------------------------------------------------------


def take_turns(found: list[Case], generator: Any, rounds: int, seconds: float, note: Callable[[str], None]) -> None:
    for case in found:
        case.connect(generator)
    for turn in range(rounds):
        note(f"round {turn + 1} of {rounds}, {len(found)} cases")
        for case in found if turn % 2 else found[::-1]:
            case.found.append(case.run(generator, seconds))


def ratio(a: Case, b: Case) -> float:
    """Responses per CPU second of one server to those of another."""
    return median(mine[1] / other[1] for mine, other in zip(a.found, b.found, strict=True))


def judge(section: Section, found: list[Case]) -> None:
    by_name = {case.name: case for case in found}

    def compare(name: str, peer: str, goal: float | None, label: str) -> None:
        section.figure(f"{label}, per CPU second", ratio(by_name[name], by_name[peer]), goal, "×", at_least=True)

    compare("RESP, LK.HIT", "Valkey, GET", 0.9, "RESP, one LK.HIT per round trip / Valkey, GET")
    compare("RESP, LK.HIT", "Valkey, minimal script", 1.5, "RESP, one LK.HIT per round trip / Valkey, minimal script")
    pipeline = ", pipeline 16"
    compare(f"RESP, LK.HIT{pipeline}", f"Valkey, minimal script{pipeline}", 4, "RESP, pipeline of 16 / Valkey, minimal script")
    compare("HTTP, check", "uvicorn, bare ASGI", 4, "HTTP, one check / uvicorn and a bare ASGI app")
    many = by_name["HTTP, 100 checks in a body"]
    each = median(one[1] for one in many.found)
    section.figure("HTTP, 100 checks in a body: decisions per CPU second", each, 700_000, "", at_least=True)
    compare(many.name, "HTTP, check", 5, "HTTP, 100 checks in a body / one check: decisions")
    table = Table(("64 connections", "decisions/s", "µs of CPU each"))
    table.rows = [
        (case.name, number(median(one[0] for one in case.found), ""), f"{1e6 / median(one[1] for one in case.found):.2f}")
        for case in found
    ]
    section.details.append(table)


def latencies(section: Section, found: list[Case], generator: Any, seconds: float) -> None:
    table = Table(("at half load", "requests/s", "p50", "p99"))
    for case in found:
        rate = median(one[0] for one in case.found) / 2
        took: list[float] = []
        case.run(generator, seconds, rate, took)
        cuts = quantiles(took, n=100)
        table.rows.append((case.name, number(rate, ""), f"{cuts[49] * 1e6:.0f} µs", f"{cuts[98] * 1e6:.0f} µs"))
    section.details.append(table)


async def call(port: int, data: bytes, seconds: float) -> int:
    """How many calls were answered to 64 that are always under way."""
    import grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method, end, answered = channel.unary_unary(METHOD), time.perf_counter() + seconds, 0

        async def caller() -> None:
            nonlocal answered
            while time.perf_counter() < end:
                await method(data, wait_for_ready=True)
                answered += 1

        await asyncio.gather(*[caller() for _ in range(CONNECTIONS)])
    return answered


def envoy(section: Section, own: Server, hello: Server, rounds: int) -> None:
    from limitkeeper.service.envoy_messages import RateLimitRequest

    request = RateLimitRequest(domain="bench")
    request.descriptors.add().entries.add(key=b"user", value=b"user:1")
    data, found = request.SerializeToString(), []
    for turn in range(rounds + 1):
        per_cpu = []
        for server, port in ((own, own.port(r"grpc .*:(\d+)")), (hello, hello.port())):
            used = server.cpu()
            answered = asyncio.run(call(port, data, 0.7))
            per_cpu.append(answered / (server.cpu() - used))
        if turn:
            found.append(per_cpu)
    label = "Envoy's rate limit service / a grpcio.aio method that returns a constant, per CPU second"
    section.figure(label, median(a / b for a, b in found), 0.8, "×", at_least=True)
    table = Table(("gRPC", "µs of CPU each"))
    table.rows = [(name, f"{1e6 / median(one[i] for one in found):.1f}") for i, name in enumerate(("Envoy RLS", "hello world"))]
    section.details.append(table)


class Pair(Server):
    """Two independent services."""

    def __init__(self, *servers: Server) -> None:
        self.servers = servers

    def pids(self) -> list[int]:
        return [pid for server in self.servers for pid in server.pids()]


def workers(section: Section, folder: Path, generator: Any, rounds: int, note: Callable[[str], None]) -> None:
    """Two processes wake up more often for the same requests, so each iteration of their loops answers fewer: two independent
    services show how much of the difference that is."""
    hits = [resp(b"LK.HIT", b"api", key) for key in KEYS]
    with ExitStack() as stack:
        one, two, *apart = [stack.enter_context(service(folder, "--workers", count)) for count in ("1", "2", "1", "1")]
        found = [Case(name, server, server.port(r"resp .*:(\d+)"), hits) for name, server in (("1", one), ("2", two))]
        halves = [Case("half", server, server.port(r"resp .*:(\d+)"), hits) for server in apart]
        both = Case("apart", Pair(*apart), 0, hits)
        for case in (*found, *halves):
            case.connect(generator)
        both.sockets = [sock for half in halves for sock in half.sockets[: CONNECTIONS // 2]]
        both.lines = halves[0].lines
        for turn in range(rounds):
            note(f"round {turn + 1} of {rounds}, 1 and 2 workers")
            for case in (*found, both) if turn % 2 else (both, *found[::-1]):
                case.found.append(case.run(generator, 0.4))
        label = "RESP, 2 workers on a shared file / 1 worker in memory: decisions per CPU second"
        section.figure(label, ratio(found[1], found[0]), 0.85, "×", at_least=True)
        label = "RESP, 2 workers on a shared file / 2 services in memory that share nothing: decisions per CPU second"
        section.figure(label, ratio(found[1], both), 0.85, "×", at_least=True)
        label = "RESP, 2 services in memory that share nothing / 1: decisions per CPU second"
        section.figure(label, ratio(both, found[0]), None, "×", at_least=True)


def memory(section: Section, folder: Path) -> None:
    with service(folder) as server, socket.create_connection(("127.0.0.1", server.port(r"resp .*:(\d+)"))) as sock:
        for at in range(0, MILLION, 1000):
            sock.sendall(b"".join([resp(b"LK.HIT", b"slow", b"user:%d" % key) for key in range(at, at + 1000)]))
            lines = 0
            while lines < 6000:
                lines += sock.recv(1 << 20).count(b"\n")
        section.figure("memory of the service after 1 M keys", server.resident() / 1e6, 150, "MB")


def starting(section: Section, folder: Path) -> None:
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        with service(folder):
            took.append(time.perf_counter() - begun)
    section.figure("from the command to the printed addresses", min(took), 1, "s")


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section("Service", __doc__.split("\n\n")[1].replace("\n", " "))
    allowed = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        generator = built("load", name)
        stack.callback(os.sched_setaffinity, 0, allowed)
        starting(section, folder)
        os.sched_setaffinity(0, {min(allowed)})
        own, valkey = stack.enter_context(service(folder)), stack.enter_context(ValkeyServer())
        over_grpc = stack.enter_context(service(folder, grpc=True))
        asgi, hello = [stack.enter_context(Server(str(HERE / "service_peers.py"), kind)) for kind in ("asgi", "grpc")]
        os.sched_setaffinity(0, {max(allowed)})
        found = cases(own, valkey, asgi)
        take_turns(found, generator, effort.pick(9, 3), 0.3, note)
        judge(section, found)
        note("latency at half load")
        by_name = {case.name: case for case in found}
        picked = [by_name[name] for name in ("Valkey, GET", "RESP, LK.HIT", "HTTP, check")]
        latencies(section, picked, generator, effort.pick(2, 1))
        note("gRPC")
        envoy(section, over_grpc, hello, effort.pick(3, 2))
        os.sched_setaffinity(0, allowed)
        note("two workers")
        workers(section, folder, generator, effort.pick(7, 3), note)
        note("a million keys")
        memory(section, folder)
    return section
