"""The Python clients, over both protocols, sync and async, against a running service."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import pytest
from running import Running

from limitkeeper.errors import ConfigurationError, StoreTimeout, StoreUnavailable
from limitkeeper.service.app import RequestError
from limitkeeper.service.client import AsyncClient, Client
from servers.valkey import free_port

pytestmark = pytest.mark.server
TOKEN = "right" * 4
KEYS = (f"user:{number}" for number in count())


class Adapter:
    """An AsyncClient called as a Client is, on a loop of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(*args, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **options: self.loop.run_until_complete(getattr(self.client, name)(*args, **options))

    def close(self) -> None:
        self.aclose()
        self.loop.close()


@pytest.fixture(params=["http", "redis"])
def url(request: pytest.FixtureRequest, service: Running) -> str:
    return f"http://127.0.0.1:{service.http}" if request.param == "http" else f"redis://127.0.0.1:{service.resp}"


@pytest.fixture(params=[Client, Adapter], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(url: str, kind: Any) -> Iterator[Any]:
    made = kind(url, timeout=30)
    yield made
    made.close()


def test_checks(client):
    """Three pass, the fourth is refused with its retry time; many are decided in order."""
    key, other = next(KEYS), next(KEYS)
    first = client.check("checkout", key)
    assert (first.allowed, first.limit, first.remaining, first.retry_after, first.name) == (True, 3, 2, 0.0, "checkout")
    assert 3590 < first.reset_after <= 3600
    found = client.check_many([("checkout", key), ("checkout", key, 2), ("checkout", other, 3)])
    assert [(one.allowed, one.remaining) for one in found] == [(True, 1), (False, 1), (True, 0)]
    assert 3500 < found[1].retry_after <= 3600
    assert client.check("checkout", key, 4).retry_after == float("inf")


def test_inspect_refund_and_reset(client):
    """The remaining units are shown without a charge; units go back; a reset key is new."""
    key = next(KEYS)
    client.check("checkout", key, 3)
    assert client.inspect("checkout", key).remaining == 0
    assert client.refund("checkout", key, 2) is True
    assert (client.inspect("checkout", key).remaining, client.inspect("checkout", key).limit) == (2, 3)
    client.reset("checkout", key)
    assert client.inspect("checkout", key).remaining == 3
    odd = next(KEYS) + "/a b?ü"
    client.check("checkout", odd)
    assert client.inspect("checkout", odd).remaining == 2


def test_reservations(client):
    """An estimate is charged, the actual cost settled once; one that does not fit is falsy and has no token."""
    key = next(KEYS)
    reserved = client.reserve("tokens", key, 600)
    assert reserved
    assert client.inspect("tokens", key).remaining == 400
    assert [client.settle(reserved.token, 100), client.settle(reserved.token, 50)] == [True, False]
    assert client.inspect("tokens", key).remaining == 900
    refused = client.reserve("tokens", key, 1000)
    assert not refused
    assert refused.token == ""
    later = client.reserve("tokens", key, 901, max_wait=3600)
    assert 3500 < later.decision.wait <= 3600


def test_mistakes(client):
    """The caller's mistakes are errors with the service's message."""
    with pytest.raises(RequestError, match="unknown limit 'nothing'; the policy 'served' has: checkout"):
        client.check("nothing", "42")
    with pytest.raises(RequestError, match="cost"):
        client.check("checkout", "42", -1)
    with pytest.raises(RequestError, match="token"):
        client.settle("made up", 1)
    with pytest.raises(RequestError, match="no tiers"):
        client.check("checkout", "42", tier="pro")


@pytest.mark.parametrize("scheme", ["http", "redis"])
def test_a_service_that_is_not_there(scheme, kind):
    """Its address is in the message, its password is not."""
    made = kind(f"{scheme}://:secret@127.0.0.1:{free_port()}", timeout=5, retries=0)
    with pytest.raises(StoreUnavailable, match=r"…@127\.0\.0\.1"):
        made.check("checkout", "42")
    made.close()


def test_the_other_port_of_the_service(kind, service):
    """A client of one protocol on the port of the other: the error says so."""
    for url, remedy in (
        (f"http://127.0.0.1:{service.resp}", r"is this its HTTP port \(7070\)\?"),
        (f"redis://127.0.0.1:{service.http}", "it speaks HTTP: write http://, or its Redis port"),
    ):
        made = kind(url, timeout=30, retries=0)
        with pytest.raises(StoreUnavailable, match=remedy):
            made.check("checkout", "42")
        made.close()


@pytest.fixture
def deaf() -> Iterator[tuple[int, list[bytes]]]:
    """The port of a server that closes every connection after its first bytes, and these."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        received: list[bytes] = []

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if not (data := connection.recv(65536)):
                        return
                    received.append(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], received
        socket.create_connection(listener.getsockname()).close()
        thread.join()


@pytest.mark.parametrize("scheme", ["http", "redis"])
def test_only_what_can_be_repeated_is_sent_again(scheme, kind, deaf):
    """A check whose answer is lost is sent once, since it may have been charged; an inspection is sent again."""
    port, received = deaf
    made = kind(f"{scheme}://127.0.0.1:{port}", timeout=30, retries=2)
    with pytest.raises(StoreUnavailable):
        made.check("checkout", "42")
    assert len(received) == 1
    with pytest.raises(StoreUnavailable):
        made.inspect("checkout", "42")
    assert len(received) == 4
    made.close()


@pytest.mark.parametrize("scheme", ["http", "redis"])
def test_a_service_that_does_not_answer(scheme, kind):
    """The call ends after the timeout."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        made = kind(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05, retries=0)
        with pytest.raises(StoreTimeout):
            made.check("checkout", "42")
        made.close()


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[]", b"null", b'{"error": "no"}', b"[" * 100_000, b'{"limit": 1e400}'])
def test_an_answer_of_another_server(kind, body):
    """The page of a proxy, with status 200, is a service that can't be asked: programs decide then what to do."""
    with http_answers(body) as url:
        client = kind(url, timeout=30)
        calls = (
            lambda: client.check("checkout", "u"),
            lambda: client.check_many([("checkout", "u")]),
            lambda: client.reserve("checkout", "u", 1),
            lambda: client.settle("token", 1),
            lambda: client.inspect("checkout", "u"),
        )
        for call in calls:
            with pytest.raises(StoreUnavailable, match="limitkeeper service"):
                call()
        client.close()


@contextmanager
def http_answers(body: bytes) -> Iterator[str]:
    """The URL of a server that answers every request with this body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_token(kind, policy_file):
    """It is presented; a wrong one is a ConfigurationError."""
    with Running(policy=policy_file, environment={"LIMITKEEPER_TOKEN": TOKEN}) as service:
        for place in (f"http://127.0.0.1:{service.http}", f"redis://127.0.0.1:{service.resp}"):
            made = kind(place, token=TOKEN, timeout=30)
            assert made.check("checkout", "42")
            made.close()
            made = kind(place, token="wrong", timeout=30)
            with pytest.raises(ConfigurationError, match="the service refused access"):
                made.check("checkout", "42")
            made.close()


def test_another_scheme():
    """The message names the right form."""
    with pytest.raises(ConfigurationError, match="expected http://host:7070 or redis://host:7071"):
        Client("ftp://host")


def test_both_clients_have_the_same_methods():
    """With the same arguments; written twice, for the types."""
    for name, method in vars(Client).items():
        if not name.startswith("_") and name != "close":
            twin = getattr(AsyncClient, name)
            assert inspect.signature(method) == inspect.signature(twin), name
            assert inspect.iscoroutinefunction(twin)
