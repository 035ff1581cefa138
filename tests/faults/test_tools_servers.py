"""The servers of the fault tests: clocks that step, processes that freeze, other versions."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import redis

from servers.faketime import FaketimeValkey, Skew
from servers.valkey import version_of
from servers.versions import program_of


def test_a_servers_clock_steps_while_it_runs(needs_faketime):
    """TIME, and TIME inside a script, follow an hour ahead and an hour back, on the same connection."""
    with FaketimeValkey() as server, server.client() as client:
        for hours in (1, -1, 0):
            server.set_clock(hours * 3600)
            for said in (client.time(), client.eval("return redis.call('TIME')", 0)):
                assert abs(int(said[0]) - time.time() - hours * 3600) < 2


def test_a_step_is_from_where_the_clock_is(needs_faketime):
    """Steps add up, fractions included."""
    with FaketimeValkey() as server, server.client() as client:
        server.step(10.5)
        server.step(-4)
        seconds, micros = client.time()
        assert abs(seconds + micros / 1e6 - time.time() - 6.5) < 0.5


def test_keys_expire_on_a_jump_ahead(needs_faketime):
    """A key of five seconds is gone after a jump of ten, and lives on after a jump back."""
    with FaketimeValkey() as server, server.client() as client:
        client.set("k", "v", px=5000)
        server.set_clock(-3600)
        assert client.pttl("k") > 3_600_000
        server.set_clock(10)
        assert client.get("k") is None


def test_a_clients_clock_can_be_off(needs_faketime):
    """A process under a skew of five seconds sees another time of day and the same monotonic clock."""
    skew = Skew(5)
    try:
        code = "import time; print(time.time(), time.monotonic())"
        run = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **skew.env}, capture_output=True, text=True, timeout=20
        )
        wall, monotonic = map(float, run.stdout.split())
        assert 3 < wall - time.time() < 5.5
        assert abs(monotonic - time.monotonic()) < 3
    finally:
        skew.close()


def test_a_frozen_server_accepts_and_never_answers(server):
    """A stopped process keeps its connections open and sends nothing until it is continued."""
    with server.client(socket_timeout=0.1, retry=None) as client:
        client.ping()
        server.freeze()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.thaw()
        assert client.ping()


def test_a_killed_server_comes_back_empty(server):
    """After `kill` and `start` the server is on the same port and empty."""
    with server.client() as client:
        client.set("k", "v")
    server.kill()
    with server.client(retry=None) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    server.start()
    with server.client() as client:
        assert client.get("k") is None


def test_another_version_runs_scripts(other_server):
    """Each other server that is installed starts, reports its name, and runs a script on its own time."""
    assert version_of(other_server.program)
    with other_server.client() as client:
        assert int(client.eval("return redis.call('TIME')[1]", 0)) > 1_700_000_000


def test_a_version_that_is_not_there_is_not_made_up(monkeypatch):
    """A program that does not run, or is of another version, is not taken for the requested one."""
    monkeypatch.setenv("LIMITKEEPER_TEST_REDIS_SERVER", "/nowhere/redis-server")
    assert program_of("named") is None
    monkeypatch.setenv("LIMITKEEPER_TEST_REDIS_6_2", sys.executable)
    assert program_of("redis-6.2") != sys.executable
