"""The proxy applies its faults to a plain socket, and changes nothing without a fault."""

from __future__ import annotations

import socket
import time

import pytest

PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


@pytest.fixture
def line(network):
    with socket.create_connection(("127.0.0.1", network.port), 30) as raw:
        yield raw


def pinged(raw, within=30.0):
    """The answer to a PING, and the seconds that it took."""
    begun = time.monotonic()
    raw.settimeout(within)
    raw.sendall(PING)
    said = b""
    while len(said) < len(PONG):
        piece = raw.recv(64)
        if not piece:
            break
        said += piece
    return said, time.monotonic() - begun


def quickest(raw, within):
    """The seconds of a PING that took less than that, or of the quickest of many: a busy machine is late now and then."""
    took = [pinged(raw)[1]]
    while min(took) >= within and len(took) < 100:
        took.append(pinged(raw)[1])
    return min(took)


def test_a_healthy_network_passes_everything_on(line):
    """Without a fault it answers as the server does, in well under the latency that it can add."""
    assert pinged(line)[0] == PONG
    assert quickest(line, 0.04) < 0.04


def test_large_answers_come_whole(network, valkey):
    """A megabyte passes both ways unchanged."""
    import redis

    with redis.Redis(port=network.port) as through:
        blob = bytes(range(256)) * 4096
        through.set("tools:blob", blob, px=5000)
        assert through.get("tools:blob") == blob


def test_latency_is_added_each_way(network, line):
    """With 40 ms each way, a round trip takes 80 ms and not much more."""
    network.latency = 0.04
    assert pinged(line)[0] == PONG
    assert 0.08 <= quickest(line, 0.12) < 0.12


def test_latency_delays_and_does_not_limit(network, line):
    """Ten commands sent at once over 40 ms each way take one round trip, not ten."""
    network.latency = 0.04
    took = [1.0]
    while min(took) >= 0.16 and len(took) < 50:
        begun = time.monotonic()
        line.sendall(PING * 10)
        said = b""
        while len(said) < 10 * len(PONG):
            said += line.recv(4096)
        assert said == PONG * 10
        took.append(time.monotonic() - begun)
    assert 0.08 <= min(took) < 0.16


def test_a_trickle_comes_byte_by_byte(network, line):
    """At 100 bytes a second, the seven bytes of an answer take 70 ms."""
    network.trickle = 100
    said, took = pinged(line)
    assert said == PONG
    assert took >= 0.07


def test_silence_takes_everything_and_answers_nothing(network, line):
    """A black hole accepts connections and bytes, and never answers; held bytes arrive when it is over."""
    network.silent = True
    with pytest.raises(TimeoutError):
        pinged(line, within=0.1)
    with socket.create_connection(("127.0.0.1", network.port), 30) as another, pytest.raises(TimeoutError):
        pinged(another, within=0.1)
    network.heal()
    line.settimeout(30)
    assert line.recv(64) == PONG


def test_a_reset_ends_every_connection_with_an_error(network, line):
    """After a reset the client's next read fails with a connection reset, and a new connection works."""
    assert pinged(line)[0] == PONG
    network.reset()
    with pytest.raises(ConnectionResetError):
        pinged(line)
    with socket.create_connection(("127.0.0.1", network.port), 30) as fresh:
        assert pinged(fresh)[0] == PONG


def test_a_half_closed_connection_ends_what_is_read(network, line):
    """After a half-close the client reads an orderly end, and may still write."""
    assert pinged(line)[0] == PONG
    network.half_close()
    assert line.recv(64) == b""
    line.sendall(PING)


def test_a_refusing_proxy_keeps_open_connections(network, line):
    """New connections are refused while the open one continues, until it accepts again."""
    assert pinged(line)[0] == PONG
    network.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", network.port), 30)
    assert pinged(line)[0] == PONG
    network.heal()
    with socket.create_connection(("127.0.0.1", network.port), 30) as fresh:
        assert pinged(fresh)[0] == PONG


def test_a_dead_server_is_a_closed_connection(server):
    """When the server behind it dies, the client's connection ends; when the server is back, a new connection works."""
    from servers.proxy import Proxy

    with Proxy(server.port) as network:
        with socket.create_connection(("127.0.0.1", network.port), 30) as raw:
            assert pinged(raw)[0] == PONG
            server.kill()
            raw.settimeout(30)
            assert raw.recv(64) == b""
        server.start()
        with socket.create_connection(("127.0.0.1", network.port), 30) as fresh:
            assert pinged(fresh)[0] == PONG


def test_connections_are_counted(network, line, eventually):
    """It counts accepted and open connections."""
    assert pinged(line)[0] == PONG
    assert (network.accepted, network.open) == (1, 1)
    line.close()
    eventually(lambda: network.open == 0)
