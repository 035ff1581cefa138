"""`limitkeeper serve` as a program: its output, its end, reloads, and the state that several workers share."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import redis
from running import POLICY, Running, read_all

import limitkeeper
from limitkeeper.errors import ConfigurationError
from limitkeeper.service.serve import bind
from limitkeeper.service.settings import Address

EXAMPLE = Path(__file__).parents[2] / "examples" / "service" / "limitkeeper.yaml"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = str(Path(limitkeeper.__path__[0]).parent)
    return subprocess.run(
        [sys.executable, "-m", "limitkeeper", "serve", *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


# Starting


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_it_prints_the_addresses_and_a_command_that_is_allowed_then_refused():
    """As `make serve` starts it; SIGTERM ends it with exit code 0."""
    with Running(policy=EXAMPLE) as service:
        shown = service.client.get("/v1/limits").json()  # it serves by now: its output is complete
        printed = ""
        while not (line := re.search(r"^curl .*$", printed, re.M)):
            printed += service.process.stdout.readline()
        done = subprocess.run(["sh", "-c", line[0]], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["200", "429"], done
        assert shown["limits"][0]["name"] == "checkout"
        assert service.end()[0] == 0


def test_check_prints_settings_and_policy():
    """With the source of each setting, without starting anything."""
    done = command(str(EXAMPLE), "--check", "--workers", "3", LIMITKEEPER_TOKEN="0123456789abcdef", LIMITKEEPER_HTTP="")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^workers +3 +--workers$", done.stdout, re.M)
    assert re.search(r"^token +\(16 characters\) +LIMITKEEPER_TOKEN$", done.stdout, re.M)
    assert re.search(r"^http +127.0.0.1:7070 +default$", done.stdout, re.M)
    assert done.stdout.endswith(f"{EXAMPLE}: 4 limits, no errors\n")
    assert command("--check").stdout.endswith("no policy file (limitkeeper.yaml not found here): 0 limits, no errors\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--store", "foo://x"), "unknown scheme 'foo'"),
        (("--store", "redis://h:99999"), "port: expected a number"),
        (("--store", "shared:///nowhere/at/all"), "there is no folder '/nowhere/at' that can be written to"),
        (("--http", "off", "--resp", "off"), "no port is served; set http or resp, or grpc with envoy"),
        (("--http", "[::1"), r"or [::1]:7070, or off, got '[::1'"),
        (("--tls-cert", str(EXAMPLE), "--tls-key", str(EXAMPLE)), f"tls: can't load {EXAMPLE}, {EXAMPLE}: "),
    ],
)
def test_check_finds_what_would_not_start(options, message):
    """A wrong store, no port, an address without its bracket, files that are no certificates."""
    done = command(str(EXAMPLE), "--check", *options)
    assert (done.returncode, message in done.stderr) == (2, True), done


def test_a_store_that_can_not_be_opened_ends_it_before_workers_start():
    """Once, in one line; not in every worker again and again."""
    done = command(str(EXAMPLE), "--workers", "2", "--store", "shared:///nowhere/at/all")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_addresses_are_printed_when_every_port_answers(policy_file, tmp_path, workers):
    """gRPC too, whose sockets the workers bind; and a signal that comes at once finds its handler: the exit code is 0."""
    envoy = tmp_path / "envoy.yaml"
    envoy.write_text("domain: a\ndescriptors: [{key: b, rate_limit: {unit: second, requests_per_unit: 1}}]\n")
    options = ("--workers", workers, "--envoy", str(envoy), "--grpc", "127.0.0.1:0")
    with Running(*options, policy=policy_file) as service:
        ports = [int(port) for port in re.findall(r"^  \w+ +\S+:(\d+)$", service.printed, re.M)]
        assert len(ports) == 4
        assert all(can_connect(port) for port in ports)
        assert service.end(signal.SIGTERM)[0] == 0


def test_no_test_uses_the_default_ports():
    """A service started without any address has free ports: another program may have the default ones."""
    with subprocess.Popen(
        [sys.executable, "-m", "limitkeeper", "serve", str(EXAMPLE)],
        env={**os.environ, "PYTHONPATH": str(Path(limitkeeper.__path__[0]).parent)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        printed = "".join(iter(process.stdout.readline, "\n"))
        process.terminate()
    assert len(re.findall(r"127\.0\.0\.1:\d+$", printed, re.M)) == 3
    assert not re.search(r":707\d$", printed, re.M)


def test_a_port_that_is_kept_but_not_yet_listened_on_is_taken():
    """gRPC workers listen on their own sockets, some time after the parent has bound the port."""
    with bind("grpc", Address("127.0.0.1", 0), listen=False) as kept:
        with pytest.raises(ConfigurationError, match="grpc: can't bind"):
            bind("grpc", Address(*kept.getsockname()))
        with bind("grpc", Address(*kept.getsockname()), listen=False):
            pass  # a socket of this user with SO_REUSEPORT, as a worker has, may share it


def test_errors_end_it_before_it_serves(tmp_path):
    """A wide open port, a taken port, a policy with errors: exit codes 2, 2 and 1, with the remedy."""
    wide = command(str(EXAMPLE), "--http", "0.0.0.0:0")
    assert (wide.returncode, "a token is required" in wide.stderr) == (2, True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        busy = command(str(EXAMPLE), "--http", place)
    assert (busy.returncode, f"http: can't bind {place}" in busy.stderr) == (2, True)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("limits:\n  - {name: a, limit: 5 per fortnight}\n")
    bad = command(str(wrong))
    assert (bad.returncode, "wrong.yaml:2" in bad.stderr) == (1, True)


def test_without_a_policy_file_the_output_has_the_searched_paths(tmp_path):
    """The searched paths, and the limits that work without a file."""
    with contextlib.chdir(tmp_path), Running(policy="") as service:
        assert "1 worker\nno policy file (limitkeeper.yaml not found here): only CL.THROTTLE has limits\n" in service.printed
        assert service.redis.execute_command("CL.THROTTLE", "a", 1, 1, 60)[0] == 0


@pytest.mark.parametrize("more", [(), ("--check",)])
def test_a_missing_package_is_one_line_before_anything_is_served(tmp_path, more):
    """It names the package and the command that installs it; without HTTP the package is not needed."""
    (tmp_path / "httptools.py").write_text("raise ModuleNotFoundError(\"No module named 'httptools'\", name='httptools')")
    paths = os.pathsep.join([str(tmp_path), str(Path(limitkeeper.__path__[0]).parent)])
    done = command(str(EXAMPLE), "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", *more, PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "limitkeeper: the service needs httptools; pip install 'limitkeeper[service]'\n"
    assert command(str(EXAMPLE), "--http", "off", "--admin", "off", "--check", PYTHONPATH=paths).returncode == 0


# Ending


def test_a_drain_loses_no_accepted_request(policy_file):
    """Clients that send one request after the other while SIGTERM arrives get an answer to each, or a closed connection before
    they have sent anything of it."""
    with Running(policy=policy_file) as service:
        lost: list[Exception] = []
        answered = Counter[str]()

        def client(name: str, ask) -> None:
            try:
                while True:
                    ask()
                    answered[name] += 1
            except (httpx.ConnectError, redis.ConnectionError, httpx.RemoteProtocolError, httpx.ReadError) as error:
                if not isinstance(error, httpx.ConnectError):
                    lost.append(error)

        base = f"http://127.0.0.1:{service.http}"
        pool = httpx.Client(base_url=base, timeout=60)
        threads = [
            threading.Thread(target=client, args=("http", lambda: pool.post("/v1/check", json={"limit": "plenty", "key": "a"})))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        while answered["http"] < 20:
            time.sleep(0.01)
        code, _ = service.end()
        for thread in threads:
            thread.join(60)
        pool.close()
        assert code == 0
        assert lost == []


def test_a_request_that_waits_is_answered_while_draining(policy_file):
    """It was accepted, so it gets its turn."""
    with Running(policy=policy_file) as service:
        with service.raw(service.http) as sock:
            body = b'{"request": {"method": "GET", "path": "/waits", "headers": {"X-User": "drain"}}}'
            request = b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            sock.sendall(request * 2)
            answers = sock.recv(65536)  # the first one is allowed: both have arrived
            service.process.send_signal(signal.SIGTERM)
            answers += read_all(sock)
        assert answers.count(b"HTTP/1.1 200") == 2, answers
        assert service.end(0)[0] == 0


# Reloading


def test_a_changed_policy_is_in_force_without_a_restart(tmp_path):
    """Counts are kept; a version with errors is refused."""
    path = tmp_path / "limitkeeper.yaml"
    path.write_text(POLICY)
    with Running(policy=path) as service:
        service.hit("checkout", "a")
        path.write_text(POLICY.replace("3/h", "5/h"))
        service.process.send_signal(signal.SIGHUP)
        wait_for(lambda: service.hit("dark", "a") and service.redis.execute_command("LK.PEEK", "checkout", "a")[1] == 5)
        assert service.redis.execute_command("LK.PEEK", "checkout", "a")[2] == 4
        path.write_text("limits: nonsense")
        service.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert service.hit("checkout", "a")[1] == 5


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_hang_up_reloads_also_without_a_watch(tmp_path, workers):
    """And ends no worker."""
    path = tmp_path / "limitkeeper.yaml"
    path.write_text(POLICY)
    with Running("--watch", "off", "--workers", workers, policy=path) as service:
        path.write_text(POLICY.replace("3/h", "5/h"))

        def reloaded() -> bool:
            service.process.send_signal(signal.SIGHUP)  # again: a worker that is starting ignores it
            return service.redis.execute_command("LK.PEEK", "checkout", "a")[1] == 5

        wait_for(reloaded)


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.02)


# Workers


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc here")


@needs_proc
@pytest.mark.slow
def test_several_workers_share_exact_limits(policy_file):
    """100 000 are allowed to 8 connections of two workers in pipelines; of 100 800 hits exactly 800 are refused."""
    with Running("--workers", "2", policy=policy_file) as service:
        wait_for(lambda: len(children(service.process.pid)) == 2)
        counts = Counter[int]()
        lock = threading.Lock()

        def client() -> None:
            connection = redis.Redis(port=service.resp, socket_timeout=60)
            for _ in range(14):
                pipe = connection.pipeline(transaction=False)
                for _ in range(900):
                    pipe.execute_command("LK.HIT", "plenty", "shared")
                found = Counter(one[0] for one in pipe.execute())
                with lock:
                    counts.update(found)
            connection.close()

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert counts == {1: 100_000, 0: 800}
        assert service.end()[0] == 0


@needs_proc
def test_killing_a_worker_loses_no_count_and_no_reservation(policy_file):
    """The next worker continues with the same state; a reservation of the dead one is settled by another, once."""
    with Running("--workers", "2", policy=policy_file) as service:
        wait_for(lambda: len(children(service.process.pid)) == 2)
        assert [service.hit("checkout", "kill")[2] for _ in range(2)] == [2, 1]
        *_, token = service.redis.execute_command("LK.RESERVE", "tokens", "kill", 600)
        before = children(service.process.pid)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(children(service.process.pid)) == 2 and not set(before) & set(children(service.process.pid)))
        service.redis.close()
        assert service.hit("checkout", "kill")[:3] == [1, 3, 0]
        assert service.hit("checkout", "kill")[0] == 0
        assert service.redis.execute_command("LK.SETTLE", token, 100) == 1
        assert service.redis.execute_command("LK.SETTLE", token, 100) == 0
        assert service.redis.execute_command("LK.PEEK", "tokens", "kill")[2] == 900
        code, printed = service.end()
        assert code == 0
        assert printed.count("another one is started") == 2


@needs_proc
def test_workers_end_with_their_parent(policy_file):
    """Also when it was killed: otherwise they would keep the ports, and the next service could not start."""
    with Running("--workers", "2", policy=policy_file) as service:
        workers = children(service.process.pid)
        folder = Path(shared_file(service)[0]).parent
        service.process.kill()
        service.process.wait()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        assert not can_connect(service.http)
        assert not folder.exists()


@needs_proc
def test_several_workers_refuse_new_connections_while_they_drain(tmp_path):
    """No process keeps the port open for connections that are never answered."""
    path = tmp_path / "limitkeeper.yaml"
    path.write_text(POLICY + "  - {name: long, match: GET /long, key: user, limit: 1/min burst 1, on_refusal: wait up to 60s}\n")

    def requests(place: str) -> bytes:
        body = b'{"request": {"method": "GET", "path": "%b", "headers": {"X-User": "many"}}}' % place.encode()
        return 2 * (b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    with (
        Running("--workers", "2", "--drain-timeout", "100s", policy=path) as service,
        service.raw(service.http) as long,
        service.raw(service.http) as short,
    ):
        found = {}
        for sock, place in ((long, "/long"), (short, "/waits")):
            sock.sendall(requests(place))
            found[sock] = sock.recv(65536)  # the first one is allowed: all have arrived
        service.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not can_connect(service.http))
        while found[short].count(b"HTTP/1.1 200") < 2:
            received = short.recv(65536)
            assert received, found[short]
            found[short] += received
        long.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            found[long] += long.recv(65536) or b"closed"
        assert found[long].count(b"HTTP/1.1 200") == 1, "it was refused only when all were answered"
        assert b"closed" not in found[long]


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionRefusedError:
        return False
    return True


@needs_proc
def test_a_new_worker_has_the_policy_of_now(tmp_path):
    """Not the one that the service was started with; and that one only while the file has errors."""
    path = tmp_path / "limitkeeper.yaml"
    path.write_text(POLICY)
    with Running("--workers", "2", "--watch", "off", policy=path) as service:
        wait_for(lambda: len(children(service.process.pid)) == 2)
        for text, limit in ((POLICY.replace("3/h", "5/h"), 5), ("limits: nonsense", 3)):
            path.write_text(text)
            before = children(service.process.pid)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            wait_for(  # both of them: the next round kills what it finds
                lambda: len(now := children(service.process.pid)) == 2 and not set(before) & set(now)  # noqa: B023
            )
            service.redis.close()
            assert service.hit("checkout", f"key {limit}")[1] == limit


@needs_proc
@pytest.mark.parametrize("memory_first", [True, False])
def test_workers_share_the_store_that_a_reload_names(tmp_path, memory_first):
    """Also where it is memory://, or was; and a worker that replaces another has the same one."""
    path = tmp_path / "limitkeeper.yaml"
    stores = ["memory://", f"shared://{tmp_path}/limits"]
    before, after = stores if memory_first else reversed(stores)
    path.write_text(f"store: {before}\n{POLICY}")

    def admitted(service: Running, key: str) -> int:
        found = 0
        for _ in range(12):  # each connection has a worker
            service.redis.close()
            found += service.hit("checkout", key)[0]
        return found

    with Running("--workers", "2", "--watch", "off", policy=path) as service:
        path.write_text(f"store: {after}\n{POLICY}")
        assert httpx.post(f"{service.admin}/v1/reload", timeout=60).json()["reloaded"]
        assert admitted(service, "reloaded") == 3
        first = children(service.process.pid)[0]
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: len(now := children(service.process.pid)) == 2 and first not in now)
        assert admitted(service, "replaced") == 3


@needs_proc
def test_the_shared_file_is_removed_at_the_end(policy_file):
    """A memory store of several workers lives in a file of its own."""
    with Running("--workers", "2", policy=policy_file) as service:
        service.hit("plenty", "a")
        path = shared_file(service)
        assert path is not None
        assert Path(path[0]).exists()
        service.end()
        assert not Path(path[0]).parent.exists()


def shared_file(service: Running) -> re.Match[str] | None:
    return re.search(r"/\S*/limitkeeper-\w+/limits", Path(f"/proc/{children(service.process.pid)[0]}/maps").read_text())
