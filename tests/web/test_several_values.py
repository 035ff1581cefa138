"""A client that sends several values under one name is one client, whichever of them its application takes."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_loop import Exchange, scope_of
from django.core.handlers.wsgi import WSGIRequest
from django_asgi import configure
from wsgi_apps import environ_of

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.identity.identify import SEVERAL
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.wsgi import WsgiRequestContext
from stand_ins import driven

POLICY = """
identify:
  partner: {header: X-Api-Key}
  key:     {query: api_key}
  session: {cookie: sid}
limits:
  - {name: partner, match: /header, key: partner, limit: fixed window 2/min}
  - {name: key, match: /query, key: key, limit: fixed window 2/min}
  - {name: session, match: /cookie, key: session, limit: fixed window 2/min}
"""
MANY = b"x=1&" * 1000


@pytest.fixture
def gate(store: MemoryStore) -> Gate:
    return Gate(Policy.read(POLICY), store=store)


def statuses(gate: Gate, path: str, sent: list[tuple[list[tuple[bytes, bytes]], bytes]]) -> list[int]:
    """The statuses of requests with these headers and queries."""

    async def hello(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> list[int]:
        found = []
        for headers, query in sent:
            exchange = Exchange(b"")
            scope = scope_of("GET", path, [], "192.0.2.1")
            scope.update(headers=headers, query_string=query)
            await RateLimitMiddleware(hello, gate)(scope, exchange.receive, exchange.send)
            found.append(exchange.messages[0]["status"])
        return found

    return driven(main())


@pytest.mark.parametrize("order", [1, -1])
def test_a_second_header_makes_no_new_client(gate, order):
    """However the second line varies, before or behind the real one, all of them are one client."""
    pairs = [[(b"x-api-key", b"real"), (b"x-api-key", b"%d" % n)][::order] for n in range(5)]
    assert statuses(gate, "/header", [(pair, b"") for pair in pairs]) == [200, 200, 429, 429, 429]
    one = [([(b"x-api-key", b"Acme, Inc. %d" % n)], b"") for n in range(3)]
    same = [([(b"x-api-key", b"twice"), (b"x-api-key", b"twice")], b"")]
    assert statuses(gate, "/header", one + same) == [200] * 4


def test_a_repeated_header_line_makes_no_new_client(gate):
    """However often a line is repeated, its client is the one that sends it once."""
    lines = [[(b"x-api-key", b"real")] * n for n in (1, 2, 3, 150)]
    assert statuses(gate, "/header", [(each, b"") for each in lines]) == [200, 200, 429, 429]


@pytest.mark.parametrize("query", [b"api_key=real&api_key=%d", b"api_key=%d&api_key=real", MANY + b"api_key=%d"])
def test_a_second_parameter_makes_no_new_client(gate, query):
    """Neither a second value nor a thousand parameters before it make a client another, or unidentified."""
    assert statuses(gate, "/query", [([], query % n) for n in range(4)]) == [200, 200, 429, 429]
    assert statuses(gate, "/query", [([], b"api_key=%d&x=1" % n) for n in range(4)]) == [200] * 4


@pytest.mark.parametrize("cookie", [b"sid=real; sid=%d", b"sid=%d; a=b; sid=real"])
def test_a_second_cookie_makes_no_new_client(gate, cookie):
    """One application takes the first cookie of a name, another the last."""
    assert statuses(gate, "/cookie", [([(b"cookie", cookie % n)], b"") for n in range(4)]) == [200, 200, 429, 429]
    assert statuses(gate, "/cookie", [([(b"cookie", b"sid=%d; a=b; sid=%d" % (n, n))], b"") for n in range(4)]) == [200] * 4


def test_wsgi_sees_several_parameters_too(gate):
    """The same behind WSGI, where lines of a header are one line for all readers."""
    answers = []
    for n in range(3):
        environ = {**environ_of("GET", "/query"), "QUERY_STRING": f"api_key={n}&api_key=real"}
        answers.append(bool(gate.ask(WsgiRequestContext(environ))))
    assert answers == [True, True, False]


def test_of_two_costs_the_larger_one_is_charged(store):
    """A small cost beside a large one reduces nothing, whichever the application takes."""
    cost = "{name: all, key: ip, limit: fixed window 100/min, cost: {%s: %s, max: 50}}"
    for kind, name, sent in (
        ("header", "X-Cost", [([(b"x-cost", b"1"), (b"x-cost", b"40")], b"")]),
        ("query", "n", [([], b"n=1&n=40")]),
    ):
        gate = Gate(Policy.read(f"name: {kind}\nlimits: [{cost % (kind, name)}]"), store=store)
        assert statuses(gate, "/", sent * 3) == [200, 200, 429]


def test_a_charset_makes_no_new_client(gate):
    """Django reads a query in the charset of the Content-Type: in UTF-7 or ISO-2022 an API key has any number of spellings."""
    configure()
    kinds = ["text/plain; charset=utf-7", "text/plain; charset=iso2022_jp", "text/plain; charset=UTF-8", ""]
    queries = ["api_key=+AGE-bc", "api_key=a%1b%28%42bc", "api_key=abc", "api_key=abc"]
    pairs = zip(kinds, queries, strict=True)
    environs = [{**environ_of("GET", f"/query?{query}"), "CONTENT_TYPE": kind} for kind, query in pairs]
    assert [WSGIRequest(environ).GET["api_key"] for environ in environs] == ["abc"] * 4
    identity = gate.policy.identify["key"]
    assert [identity.of(WsgiRequestContext(environ)) for environ in environs] == [SEVERAL, SEVERAL, "abc", "abc"]
    environs[0]["QUERY_STRING"] = ""
    assert identity.of(WsgiRequestContext(environs[0])) is None
