"""Percent-encoding of paths as clients sent them: from gateways, in described requests, in one line, and in logs."""

from __future__ import annotations

import json

import pytest

from limitkeeper import MemoryStore
from limitkeeper.plan.log_replay import outcomes
from limitkeeper.plan.request_log import LogEntry
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.one_line_request import parse_request
from limitkeeper.service.app import Application
from limitkeeper.service.http_routes import Request, Router
from limitkeeper.testing import ManualClock

POLICY = Policy.of(
    identify={"person": {"path": "person"}},
    exempt=[{"path": "/people/ré%20al"}],
    limits=[{"name": "person", "match": "/people/{person}", "key": "person", "limit": "fixed window 2/h"}],
)


class Asked:
    """A service of its own; `times` sends requests until one is refused, and returns how many were admitted (at most 5)."""

    def __init__(self, way: str) -> None:
        self.gate = Gate(POLICY, store=MemoryStore(clock=ManualClock()))
        self.ask = getattr(self, way)
        self.router = Router(Application(self.gate, secret=b"s" * 16))

    def times(self, path: str | bytes) -> int:
        return next((n for n in range(5) if not self.ask(path if isinstance(path, bytes) else path.encode())), 5)

    def respond(self, method: bytes, url: bytes, *headers: tuple[bytes, bytes], body: bytes = b"") -> bool:
        return self.router.respond(Request(method, url, [*headers], body, True, False, ("127.0.0.1", 1)))[0] == 200

    def auth(self, path: bytes) -> bool:
        return self.respond(b"GET", b"/auth", (b"x-forwarded-uri", path))

    def auth_path(self, path: bytes) -> bool:
        return self.respond(b"GET", b"/auth/path" + path)

    def described(self, path: bytes) -> bool:
        body = {"request": {"method": "GET", "path": path.decode("utf-8", "surrogateescape")}}
        return self.respond(b"POST", b"/v1/check", body=json.dumps(body).encode())

    def line(self, path: bytes) -> bool:
        return self.gate.ask(parse_request(f"GET {path.decode()}", POLICY)).allowed

    def log(self, path: bytes) -> bool:
        return not any(refused for _, _, refused in outcomes(self.gate, LogEntry(0.0, None, 200, "GET", path.decode(), "", {})))


@pytest.fixture(params=["auth", "auth_path", "described", "line", "log"])
def asked(request):
    return Asked(request.param)


def test_an_encoded_slash_slips_past_no_rule(asked):
    """An application may route /people/a%2Fb to /people/{person}, and another to /people/a/b: the rule applies."""
    assert asked.times("/people/a%2Fb") == 2
    assert asked.times("/people/a%2fb") == 0


def test_each_encoded_value_has_a_key_of_its_own(asked):
    """As decoded: clients that have to encode their values do not share one key."""
    assert [asked.times(path) for path in ("/people/bob%40x.org", "/people/bob@x.org", "/people/ann%40x.org")] == [2, 0, 2]
    assert [asked.times(path) for path in ("/people/J%C3%B6rg", "/people/Ji%C5%99%C3%AD")] == [2, 2]


@pytest.mark.parametrize("way", ["auth", "auth_path"])
def test_bytes_beyond_ascii_are_those_that_they_encode(way):
    """A gateway may pass on unencoded characters, also half of a character."""
    asked = Asked(way)
    assert [asked.times(path) for path in ("/people/J%C3%B6rg", "/people/Jörg".encode(), b"/people/J%C3\xb6rg")] == [2, 0, 0]


def test_an_exempt_path_may_be_encoded(asked):
    """It is spelt as the exemption is, once decoded."""
    assert asked.times("/people/r%C3%A9%20al") == 5
