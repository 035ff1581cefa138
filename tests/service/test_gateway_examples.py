"""Runs the configurations of examples/gateways in the real gateways."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import ExitStack

import pytest
from gateway_servers import Client, application, each_gateway, gateway, need, wait_until, with_ports
from running import Running
from test_gateway_config import EXAMPLE, POLICY, ROOT

from limitkeeper.policy import Policy
from limitkeeper.service.gateway_config import WRITERS, Gateway
from servers.valkey import free_port

EXAMPLES = ROOT / "examples" / "gateways"
pytestmark = pytest.mark.server


@pytest.mark.parametrize(("name", "file"), [("nginx", "nginx.conf"), ("caddy", "Caddyfile"), ("envoy", "envoy.yaml")])
def test_the_examples_are_what_the_command_prints(name, file):
    """For the service's example policy, with the default addresses."""
    made = WRITERS[name](Gateway.of(Policy.load(EXAMPLE), "127.0.0.1:7070", "127.0.0.1:8080", "127.0.0.1:8000"))
    assert (EXAMPLES / file).read_text() == made


def test_the_examples_of_the_rate_limit_filter_are_those_of_its_page():
    """The page about Envoy has them in full; test_envoy_real.py runs them."""
    limits, envoy = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "service-envoy.md").read_text(), re.S)
    assert (EXAMPLES / "envoy-rate-limit.yaml").read_text() == envoy
    assert (EXAMPLES / "envoy-rate-limit-limits.yaml").read_text() == limits


@need("traefik")
def test_traefik(tmp_path):
    """With a token: 200s, 429 with all fields, the connection's address as the client's, and requests that pass when the service
    is late or down."""
    token = "0123456789abcdef"
    (tmp_path / "limitkeeper.yaml").write_text(POLICY)
    listen, internal = free_port(), free_port()
    static = with_ports((EXAMPLES / "traefik" / "traefik.yml").read_text(), {8000: listen, 8001: internal})
    routes = (EXAMPLES / "traefik" / "routes.yml").read_text().replace('Token: ""', f"Token: {token}")
    environment = {"LIMITKEEPER_TOKEN": token}
    with application() as app, Running(policy=tmp_path / "limitkeeper.yaml", environment=environment) as service:
        routes = with_ports(routes, {7070: service.http, 8080: app, 8001: internal})
        (tmp_path / "routes.yml").write_text(routes.replace("250ms", "10s").replace("100ms", "10s"))  # for a busy machine
        with gateway("traefik", tmp_path, static, listen) as client:
            wait_until(lambda: client.send("GET", "/").status == 200)  # its routes are read after it listens
            answers = [client.send("POST", "/checkout", X_User="42") for _ in range(4)]
            assert [one.status for one in answers] == [200, 200, 200, 429]
            assert 0 < int(answers[-1].headers["Retry-After"]) <= 3600
            assert answers[-1].headers["RateLimit"].startswith('"checkout";r=0;t=')
            assert answers[-1].headers["Cache-Control"] == "no-store"
            if sys.platform == "linux":
                other = Client(listen, "127.0.0.9")
                spoofed = [other.send("POST", "/checkout", X_Forwarded_For=f"192.0.2.{one}").status for one in range(4)]
                assert spoofed == [200, 200, 200, 429]
            os.kill(service.process.pid, signal.SIGSTOP)
            assert client.statuses(1, "POST", "/checkout", X_User="42") == [200]
            os.kill(service.process.pid, signal.SIGCONT)
            service.end()
            assert client.statuses(2, "POST", "/checkout", X_User="42") == [200, 200]


@pytest.mark.slow
@each_gateway("nginx", "envoy")
def test_home_nodes(name, tmp_path):
    """With three nodes each user is counted on one of them, whole, and the users are spread over them."""
    (tmp_path / "limitkeeper.yaml").write_text(POLICY)
    example = (EXAMPLES / {"nginx": "nginx-home-nodes.conf", "envoy": "envoy-home-nodes.yaml"}[name]).read_text()
    with ExitStack() as stack:
        app = stack.enter_context(application())
        nodes = [stack.enter_context(Running(policy=tmp_path / "limitkeeper.yaml")) for _ in range(3)]
        listen = free_port()
        ports = {8000: listen, 8080: app, 7070: nodes[0].http, 7170: nodes[1].http, 7270: nodes[2].http}
        ports |= {8001: free_port()} if name == "envoy" else {}
        client = stack.enter_context(gateway(name, tmp_path, with_ports(example, ports), listen))
        users = [f"user{number}" for number in range(16)]
        for user in users:
            assert client.statuses(4, "POST", "/checkout", X_User=user) == [200, 200, 200, 429]
        left = [[node.redis.execute_command("LK.PEEK", "checkout", f"user:{user}")[2] for node in nodes] for user in users]
        assert all(sorted(one) == [0, 3, 3] for one in left)
        assert len({one.index(0) for one in left}) > 1
        assert client.statuses(4, "POST", "/checkout") == [200, 200, 200, 429]  # by the address
        nodes[left[0].index(0)].end()  # the next node on the ring takes its keys, which restart there
        assert client.statuses(4, "POST", "/checkout", X_User=users[0]) == [200, 200, 200, 429]
