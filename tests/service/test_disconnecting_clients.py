"""Clients that disconnect: their places are free again, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from limitkeeper.policy import Gate, Policy
from limitkeeper.service.app import Application
from limitkeeper.service.serve import http_listener
from limitkeeper.service.settings import load
from limitkeeper.stores import MemoryStore

SLOW = {"name": "slow", "match": "GET /slow", "key": "ip", "limit": "token bucket 2/min burst 1", "on_refusal": "wait up to 60s"}
BODY = b'{"request": {"method": "GET", "path": "/slow", "client": "192.0.2.1"}}'
ASKED = b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


def reset(sock: socket.socket) -> None:
    """Ends a connection with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def end(sock: socket.socket) -> None:
    sock.close()


def close_its_side(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("pipelined", [1, 2])
@pytest.mark.parametrize("leave", [reset, end, close_its_side])
def test_a_client_that_leaves_while_it_waits_leaves_the_queue(leave, pipelined):
    """Its place is free again, and its charge is given back; also when it has sent more, which is not read."""

    async def main() -> None:
        gate = Gate(Policy.of(name="waiting", limits=[SLOW]), store=MemoryStore())
        app, rule = Application(gate, secret=b"s" * 16), gate.compiled.rules_by_name["slow"]
        listener = http_listener(app, load({}, {}), None)
        with socket.create_server(("127.0.0.1", 0)) as bound, socket.create_connection(bound.getsockname()) as sock:
            bound.setblocking(False)
            await listener.start(bound, None)
            sock.sendall(ASKED * (1 + pipelined))  # the first one is allowed
            await until(lambda: len(rule.waiting.requests) == 1)
            leave(sock)
            await until(lambda: not rule.waiting.requests)
            named = rule.default_entries[0].named
            await until(lambda: gate.store.decide_one(named, "192.0.2.1", 1, 0, False).retry_us < 31_000_000)
            listener.stop_accepting()
            await listener.drain(30)
            assert not listener.connections
            assert not listener.tasks
            assert not app.leaving

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in time")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc here")
def test_no_descriptor_is_left(service):
    """Of clients that end or break their connections, in the middle of requests too."""
    descriptors = f"/proc/{service.process.pid}/fd"
    assert service.client.get("/healthz").status_code == 200
    assert service.redis.ping()
    before = len(os.listdir(descriptors))
    for number in range(60):
        sock = service.raw(service.http if number % 2 else service.resp)
        sock.sendall((b"", b"*3\r\n$6\r\nLK.", b"POST /v1/check HTTP/1.1\r\nContent-Le", ASKED)[number % 4])
        (reset if number % 3 else end)(sock)
    last = time.monotonic() + 30
    while len(os.listdir(descriptors)) > before:
        assert time.monotonic() < last
        time.sleep(0.05)


def test_large_replies_are_sent_as_they_are_read(service):
    """A client that requests 64 MB in one read of the service and does not read the replies costs less memory; then it gets
    all."""
    size = 200_000
    command = b"*2\r\n$4\r\nECHO\r\n$%d\r\n%b\r\n" % (size, b"x" * size)
    with service.raw(service.resp) as sock:
        sock.setblocking(False)
        sent, stuck = 0, time.monotonic() + 2
        while sent < 320 * len(command) and time.monotonic() < stuck:
            at = sent % len(command)
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(command[at:])
                stuck = time.monotonic() + 2
        assert resident_kib(service.process.pid) < 200_000
        assert service.redis.ping()
        sock.setblocking(True)
        wanted = (sent // len(command)) * (size + len(b"$200000\r\n\r\n"))
        while wanted > 0:
            wanted -= len(sock.recv(1 << 20))


def resident_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
