"""Many clients at a time, and clients over TLS."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import redis
from running import Running, read_all

import limitkeeper


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_mutual_tls(policy_file, certificates):
    """Both ports speak TLS, and only to clients whose certificate the authority has signed."""
    files = {name: str(certificates / name) for name in ("ca.pem", "client.pem", "client.key")}
    options = ("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key"))
    with Running(*options, "--tls-client-ca", files["ca.pem"], policy=policy_file) as service:
        context = ssl.create_default_context(cafile=files["ca.pem"])
        with httpx.Client(verify=context, timeout=60) as stranger, pytest.raises(httpx.TransportError):
            stranger.get(f"https://127.0.0.1:{service.http}/healthz")
        context.load_cert_chain(files["client.pem"], files["client.key"])
        with httpx.Client(verify=context, timeout=60) as client:
            assert client.get(f"https://127.0.0.1:{service.http}/healthz").status_code == 200
        tls = {
            "ssl": True,
            "ssl_ca_certs": files["ca.pem"],
            "ssl_certfile": files["client.pem"],
            "ssl_keyfile": files["client.key"],
        }
        with redis.Redis(host="127.0.0.1", port=service.resp, **tls) as client:
            assert client.execute_command("LK.HIT", "plenty", "tls")[0] == 1


def test_hundreds_of_idle_connections_and_one_too_many(policy_file):
    """500 idle connections delay no other client; beyond `max-connections` a client gets an error and is closed, and others are
    served again once some have left."""
    with Running("--max-connections", "251", policy=policy_file) as service:
        assert service.hit("plenty", "many")[0] == 1
        assert service.client.get("/healthz").status_code == 200
        sockets = [service.raw(service.resp if number % 2 else service.http) for number in range(500)]
        assert service.hit("plenty", "many")[0] == 1
        with service.raw(service.resp) as sock:
            assert read_all(sock) == b"-ERR max number of clients reached\r\n"
        with service.raw(service.http) as sock:
            assert read_all(sock).startswith(b"HTTP/1.1 503 ")
        for sock in sockets:
            sock.close()
        while True:
            with service.raw(service.resp) as sock:
                sock.sendall(b"PING\r\nQUIT\r\n")
                if read_all(sock).startswith(b"+PONG"):
                    break
        assert service.client.get("/healthz").status_code == 200


def test_a_port_never_takes_the_descriptors_of_the_others(policy_file):
    """Where the system allows few open files, each port accepts fewer connections: health checks are answered in a flood."""
    command = "ulimit -n 184 && exec " + shlex.join([sys.executable, "-m", "limitkeeper", "serve", str(policy_file)])
    paths = str(Path(limitkeeper.__path__[0]).parent)
    with subprocess.Popen(
        ["sh", "-c", command],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            printed = "".join(iter(process.stdout.readline, "\n"))
            http, resp, _ = map(int, re.findall(r":(\d+)$", printed, re.M))
            sockets = [socket.create_connection(("127.0.0.1", resp), timeout=60) for _ in range(200)]
            assert read_all(sockets[-1]) == b"-ERR max number of clients reached\r\n"
            sockets[0].sendall(b"PING\r\n")
            assert sockets[0].recv(100) == b"+PONG\r\n"
            assert httpx.get(f"http://127.0.0.1:{http}/healthz", timeout=60).status_code == 200
            for sock in sockets:
                sock.close()
        finally:
            process.kill()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_clients_that_begin_no_handshake_count_too(policy_file, certificates):
    """Over TLS a client counts from when it connects: silent ones take no more than `max-connections`, and give that back."""
    options = ("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key"))
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with Running(*options, "--max-connections", "20", "--request-timeout", "1h", policy=policy_file) as service:
        silent = [service.raw(service.http) for _ in range(21)]
        assert read_all(silent[-1]) == b""
        with context.wrap_socket(service.raw(service.resp), server_hostname="127.0.0.1") as other:
            other.sendall(b"PING\r\n")
            assert other.recv(100) == b"+PONG\r\n"
        for sock in silent[:10]:
            sock.close()
        for _ in range(100):
            try:
                with httpx.Client(verify=context, timeout=60) as client:
                    assert client.get(f"https://127.0.0.1:{service.http}/healthz").status_code == 200
                break
            except httpx.TransportError:  # those that were closed still count
                time.sleep(0.1)
        else:
            pytest.fail("the places of closed connections are not given back")
        for sock in silent:
            sock.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_idle_clients_of_tls_do_not_delay_the_shutdown(policy_file, certificates):
    """A pool of connections, which reads only when it is used, does not answer the end of TLS; the service ends all the same, and
    sooner than the 30 s for which Python would wait for that answer."""
    options = ("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key"))
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with Running(*options, "--drain-timeout", "1h", policy=policy_file) as service:
        pooled = [
            context.wrap_socket(service.raw(port), server_hostname="127.0.0.1")
            for port in (service.http, service.resp)
            for _ in range(2)
        ]
        for sock in pooled[2:]:
            sock.sendall(b"PING\r\n")
            assert sock.recv(100) == b"+PONG\r\n"
        begun = time.monotonic()
        assert service.end()[0] == 0
        assert time.monotonic() - begun < 15
        assert pooled[-1].recv(100) == b""
        for sock in pooled:
            sock.close()


@pytest.mark.slow
def test_thousands_of_idle_connections_cost_little(policy_file):
    """10 000 connections, or as many as this machine lets one process open: others are answered, and memory stays small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))  # of the service, which raises it
    try:
        with Running(policy=policy_file) as service:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            count = min(10_000, (hard - 500) // 3 * 2)  # a third of the service's is for its third port
            sockets = [service.raw(service.resp if number % 2 else service.http) for number in range(count)]
            assert service.hit("plenty", "many")[0] == 1
            assert service.client.get("/healthz").status_code == 200
            sockets[-1].sendall(b"PING\r\n")
            assert sockets[-1].recv(100) == b"+PONG\r\n"
            with open(f"/proc/{service.process.pid}/status") as status:
                resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
            assert resident < 300_000  # KiB
            for sock in sockets:
                sock.close()
            assert service.end()[0] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
