"""The Envoy rate limit service over gRPC, by a grpcio client, against `limitkeeper serve`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from running import POLICY, Running
from test_serve import children, command, wait_for

from effort import scaled
from limitkeeper.service.envoy_messages import HealthCheckRequest, HealthCheckResponse, RateLimitRequest, RateLimitResponse
from servers.valkey import Valkey

LIMITS = """
domain: shop
descriptors:
  - {key: user, rate_limit: {unit: year, requests_per_unit: 3}}
"""
METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
OK, OVER_LIMIT = 1, 2


@pytest.fixture
def limits(tmp_path: Path) -> Path:
    (tmp_path / "limitkeeper.yaml").write_text(POLICY)
    (tmp_path / "envoy.yaml").write_text(LIMITS)
    return tmp_path / "envoy.yaml"


def serving(limits: Path, *arguments: str, **more: Any) -> Running:
    grpc_port = ("--grpc", "127.0.0.1:0", "--envoy", str(limits))
    return Running(*grpc_port, *arguments, policy=limits.with_name("limitkeeper.yaml"), **more)


@pytest.fixture
def service(limits: Path) -> Iterator[Running]:
    with serving(limits) as running:
        yield running


class Client:
    """A channel to the service; `codes` are the overall codes of a number of requests."""

    def __init__(self, service: Running, *options: tuple[str, Any]) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{service._port('grpc')}", options)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.channel.close()

    def call(self, data: bytes, method: str = METHOD, **more: Any) -> bytes:
        return self.channel.unary_unary(method)(data, wait_for_ready=True, timeout=30, **more)  # type: ignore[no-any-return]

    def codes(self, user: str, times: int, **more: Any) -> list[int]:
        request = RateLimitRequest(domain="shop")
        request.descriptors.add().entries.add(key=b"user", value=user.encode())
        data = request.SerializeToString()
        return [RateLimitResponse.FromString(self.call(data, **more)).overall_code for _ in range(times)]

    def health(self, name: str = "") -> int:
        data = HealthCheckRequest(service=name).SerializeToString()
        return HealthCheckResponse.FromString(self.call(data, "/grpc.health.v1.Health/Check")).status  # type: ignore[no-any-return]


@pytest.mark.server
def test_random_bytes_are_refused_and_harm_no_other(service):
    """Changed messages are answered, or are an invalid argument; the service keeps running."""
    chance = random.Random(12)
    whole = RateLimitRequest(domain="shop", hits_addend=1)
    whole.descriptors.add().entries.add(key=b"user", value=b"fuzz")
    whole.descriptors.add(limit={"requests_per_unit": 5, "unit": 1}, hits_addend={"value": 1}).entries.add(key=b"a", value=b"b")
    codes = set()
    with Client(service) as client:
        for _ in range(scaled(300)):
            data = bytearray(whole.SerializeToString())
            for _ in range(chance.randrange(1, 4)):
                place = chance.randrange(len(data))
                data[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
            try:
                RateLimitResponse.FromString(client.call(bytes(data)))
            except grpc.RpcError as error:
                codes.add(error.code())
        assert codes <= {grpc.StatusCode.INVALID_ARGUMENT}
        assert client.codes("after", 1) == [OK]


@pytest.mark.server
def test_calls_errors_and_health(service):
    """Decisions, errors as gRPC status codes, and the standard health service."""
    with Client(service) as client:
        assert client.codes("a", 4) == [OK, OK, OK, OVER_LIMIT]
        for data, message in ((b"\xff", "parsing"), (b"", "domain: expected a string")):
            with pytest.raises(grpc.RpcError, match=message) as caught:
                client.call(data)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert client.health() == client.health("envoy.service.ratelimit.v3.RateLimitService") == 1
        with pytest.raises(grpc.RpcError) as caught:
            client.health("other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as caught:
            client.call(b"x" * 300_000)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.codes("b", 1) == [OK]


@pytest.mark.server
def test_on_redis_and_without_it(limits):
    """Decisions are awaited and exact across services; a store that fails is UNAVAILABLE, and Envoy's failure mode decides."""
    limits.with_name("limitkeeper.yaml").write_text(POLICY + "budget: 30s\n")
    valkey = Valkey()
    try:
        with (
            serving(limits, "--store", f"{valkey.url}?timeout=30s") as service,
            serving(limits, "--store", f"{valkey.url}?timeout=30s") as other,
            Client(service) as client,
            Client(other) as second,
        ):
            assert client.codes("a", 2) + second.codes("a", 2) == [OK, OK, OK, OVER_LIMIT]
            valkey.process.kill()
            valkey.process.wait()
            with pytest.raises(grpc.RpcError) as caught:
                client.codes("a", 1)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the store could not be asked" in caught.value.details()
    finally:
        valkey.close()


@pytest.mark.server
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_mutual_tls(limits, certificates):
    """The certificates of the other ports; a client without one is refused."""
    files = certificates
    options = [
        f"--tls-{name}={files / file}" for name, file in (("cert", "server.pem"), ("key", "server.key"), ("client-ca", "ca.pem"))
    ]
    with serving(limits, *options) as service:
        authority, key, chain = ((files / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem"))
        place = f"127.0.0.1:{service._port('grpc')}"
        with grpc.secure_channel(place, grpc.ssl_channel_credentials(authority, key, chain)) as channel:
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", wait_for_ready=True, timeout=30) == b"\x08\x01"
        with grpc.secure_channel(place, grpc.ssl_channel_credentials(authority)) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30)


@pytest.mark.server
def test_a_watcher_of_the_health_sees_the_end(service):
    """SIGTERM: not serving, then the port is closed and the exit code is 0."""
    with Client(service) as client:
        client.health()
        found = client.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60)
        assert HealthCheckResponse.FromString(next(found)).status == 1
        service.process.send_signal(signal.SIGTERM)
        assert HealthCheckResponse.FromString(next(found)).status == 2
        assert service.end(0)[0] == 0  # no second signal: it could meet the interpreter at its end


@pytest.mark.server
def test_the_token_is_required(limits):
    """As `authorization: Bearer …` in the metadata."""
    token = "0123456789abcdef"
    with serving(limits, environment={"LIMITKEEPER_TOKEN": token}) as service, Client(service) as client:
        for metadata in ((), (("authorization", "Bearer other"),)):
            with pytest.raises(grpc.RpcError) as caught:
                client.codes("a", 1, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert client.codes("a", 1, metadata=(("authorization", f"Bearer {token}"),)) == [OK]


@pytest.mark.slow
@pytest.mark.server
def test_a_changed_file_is_reloaded_and_one_with_errors_is_not(service, limits):
    """State is kept; SIGHUP is not needed."""
    with Client(service) as client:
        assert client.codes("a", 4)[-1] == OVER_LIMIT
        limits.write_text("domain: [")
        time.sleep(0.1)
        assert client.codes("a", 1) == [OVER_LIMIT]
        limits.write_text(LIMITS.replace("3}", "1000000}"))
        deadline = time.monotonic() + 60
        while client.codes("a", 1) == [OVER_LIMIT]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        limits.write_text(LIMITS.replace("3}", "1}"))
        while client.codes("a", 1) == [OK]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.server
def test_files_of_a_folder_are_added_and_renamed(limits, tmp_path):
    """A new file limits its domain, and changes are loaded also when the first file has another name."""
    folder = tmp_path / "domains"
    folder.mkdir()
    other = folder / "b.yaml"
    other.write_text(LIMITS.replace("shop", "other"))
    arguments = ("--grpc", "127.0.0.1:0", "--envoy", str(folder))
    with Running(*arguments, policy=limits.with_name("limitkeeper.yaml")) as service, Client(service) as client:
        assert client.codes("a", 4) == [OK] * 4  # no such domain
        os.replace(limits, folder / "c.yaml")
        deadline = time.monotonic() + 60
        while client.codes("a", 1) == [OK]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.replace(other, folder / "d.yaml")
        (folder / "c.yaml").write_text(LIMITS.replace("3}", "1000000}"))
        while client.codes("a", 1) == [OVER_LIMIT]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.server
def test_workers_share_the_port_and_exact_limits(limits):
    """Each connection goes to one of them."""
    with serving(limits, "--workers", "2") as service:
        codes = []
        for number in range(8):
            with Client(service, ("grpc.use_local_subchannel_pool", 1), ("number", number)) as client:
                codes += client.codes("a", 1)
        assert sorted(codes) == [OK] * 3 + [OVER_LIMIT] * 5


@pytest.mark.slow
@pytest.mark.server
def test_the_port_is_served_only_with_a_file_and_only_once(limits, service):
    """Another service can't take the same port, and `--check` counts the domains."""
    port = service._port("grpc")
    places = ("--http", "127.0.0.1:0", "--resp", "off", "--grpc", f"127.0.0.1:{port}", "--envoy", str(limits))
    busy = command(*places)
    assert (busy.returncode, f"grpc: can't bind 127.0.0.1:{port}" in busy.stderr) == (2, True)
    assert f"{limits}: 1 domain, no errors" in command(*places, "--check").stdout
    assert "needs gRPC; set --grpc HOST:PORT" in command("--envoy", str(limits), "--grpc", "off").stderr
    limits.write_text("domain: shop\nlimits: []\n")
    wrong = command(*places)
    assert (wrong.returncode, "unknown field 'limits' in domain" in wrong.stderr) == (1, True)
    with Running(policy=limits.with_name("limitkeeper.yaml")) as plain:
        assert "grpc" not in plain.printed


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.untraced
def test_a_killed_worker_is_replaced_while_the_file_has_errors(limits):
    """By one with the limits that the parent has read; counts are kept."""
    with serving(limits, "--workers", "2", "--watch", "off") as service:
        with Client(service) as client:
            assert client.codes("a", 3) == [OK] * 3
        limits.write_text("domain: [")
        wait_for(lambda: len(children(service.process.pid)) == 2)
        killed = set(children(service.process.pid))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(set(children(service.process.pid)) - killed) == 2)  # a dying worker resets what it has accepted
        with Client(service) as client:
            assert client.codes("a", 2) + client.codes("b", 1) == [OVER_LIMIT, OVER_LIMIT, OK]
