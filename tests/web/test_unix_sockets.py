"""Behind a proxy over a UNIX socket: the other end has no address, and clients must not share a limit because of that."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import waitress
from waitress import wasyncore

from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.callback_errors import CallbackErrors
from limitkeeper.policy.identity import client_ip
from limitkeeper.policy.request_context import WrittenRequest
from limitkeeper.testing import ManualClock
from limitkeeper.web.wsgi import RateLimitMiddleware, WsgiRequestContext

POLICY = """
identify: {{ip: {{client_ip: {{trusted_proxies: [{trusted}]}}}}}}
limits: [{{name: api, key: ip, limit: fixed window 1/h}}]
"""


class Connection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


def ask(path: str, client: str) -> int:
    """The status for a client whose address the proxy reports."""
    connection = Connection(path)
    connection.request("GET", "/", headers={"Host": "shop", "X-Forwarded-For": client})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.fixture
def waitress_serves(store: MemoryStore):
    """A policy behind waitress, which calls the other end of a UNIX socket localhost."""
    running = []

    def serve(trusted: str) -> str:
        def app(environ, start_response):
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]

        limited = RateLimitMiddleware(app, policy=Gate(Policy.read(POLICY.format(trusted=trusted)), store=store))
        folder = TemporaryDirectory()
        path = str(Path(folder.name) / "s")
        channels: dict[int, object] = {}
        server = waitress.create_server(limited, unix_socket=path, map=channels, clear_untrusted_proxy_headers=False)
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, channels, thread, folder))
        return path

    yield serve
    for server, channels, thread, folder in running:
        with suppress(OSError):  # the loop may run the function, and close the trigger, before it is pulled
            server.trigger.pull_trigger(lambda: wasyncore.close_all(channels))  # noqa: B023 — run before the next one
        thread.join(10)
        server.task_dispatcher.shutdown()
        folder.cleanup()


def test_clients_behind_a_socket_do_not_share(waitress_serves):
    """Where the socket's proxy is trusted, each client that it reports has a limit of its own."""
    path = waitress_serves("unix")
    assert [ask(path, client) for client in ("192.0.2.1", "192.0.2.2", "192.0.2.1")] == [200, 200, 429]


def test_clients_behind_an_unknown_socket_share(waitress_serves, monkeypatch, caplog):
    """Where it is not, a client's own headers are not trusted: all share one key, and a log line has the remedy."""
    monkeypatch.setattr(client_ip, "unknown_peers", CallbackErrors(every_us=1 << 62))
    path = waitress_serves("10.0.0.0/8")
    assert [ask(path, f"192.0.2.{number}") for number in range(3)] == [200, 429, 429]
    assert client_ip.unknown_peers.count == 3
    assert sum(record.message.count("trusted_proxies: [unix]") for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("written", "limited"),
    [("key: ip", True), ("key: user | ip", True), ("key: ip, unidentified: skip", False), ("key: user", False)],
)
def test_only_limits_by_address_are_shared_by_default(written, limited):
    """A rule whose key has an address applies to clients that have none, unless it has `skip`; other keys are skipped."""
    gate = Gate(
        Policy.read(f"identify: {{user: {{header: X-User}}}}\nlimits: [{{name: api, {written}, limit: fixed window 1/h}}]")
    )
    assert [bool(gate.ask(WrittenRequest(peer=None))) for _ in range(2)] == [True, not limited]


def test_no_unknown_client_is_put_into_the_penalty_box():
    """They share limits, but not the penalties: one of them would refuse all others."""
    text = "penalty_box: {after: 1/min, for: 1h}\nlimits: [{name: api, key: ip, limit: fixed window 1/min}]"
    clock = ManualClock()
    gate = Gate(Policy.read(text), store=MemoryStore(clock=clock))
    assert [bool(gate.ask(WrittenRequest(peer=None))) for _ in range(9)] == [True] + [False] * 8
    clock.advance(60)
    assert gate.ask(WrittenRequest(peer=None))


@pytest.mark.parametrize(("received", "peer"), [("localhost", None), ("<local>", None), ("", None), ("127.0.0.1", "127.0.0.1")])
def test_what_servers_call_a_socket_is_no_address(received, peer):
    """Names for the other end of a UNIX socket are no peer; an address of this machine is one."""
    assert WsgiRequestContext({"REQUEST_METHOD": "GET", "REMOTE_ADDR": received}).peer() == peer
