"""Unexpected methods: whatever method a request names, the rules apply as to the proper spelling."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_loop import Exchange, scope_of
from django.test import RequestFactory
from django_asgi import configure
from wsgi_apps import environ_of

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.web.asgi import RateLimitMiddleware as Asgi
from limitkeeper.web.django.middleware import DjangoRequestContext
from limitkeeper.web.wsgi import RateLimitMiddleware as Wsgi
from stand_ins import driven

POLICY = """
limits:
  - {name: login, match: POST /login, key: ip, limit: fixed window 2/min}
  - {name: all, match: /all, key: ip, limit: fixed window 2/min}
"""


@pytest.fixture
def gate(store: MemoryStore) -> Gate:
    return Gate(Policy.read(POLICY), store=store)


def asgi(gate: Gate, method: str, path: str) -> int:
    """The status of one request to an ASGI app that accepts any method."""

    async def hello(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> int:
        exchange = Exchange(b"")
        await Asgi(hello, gate)(scope_of(method, path, [], "192.0.2.1"), exchange.receive, exchange.send)
        return exchange.messages[0]["status"]

    return driven(main())


def wsgi(gate: Gate, method: str, path: str) -> int:
    seen: list[str] = []

    def hello(environ, start_response):
        start_response("200 OK", [])
        return []

    list(Wsgi(hello, gate)(environ_of(method, path), lambda status, headers, *more: seen.append(status)))
    return int(seen[0][:3])


@pytest.mark.parametrize("ask", [asgi, wsgi])
def test_a_method_in_lower_case_is_the_method(gate, ask):
    """Frameworks take `post` for POST, so the rules for POST apply."""
    assert [ask(gate, word, "/login") for word in ("post", "Post", "POST", "pOST")] == [200, 200, 429, 429]


@pytest.mark.parametrize("ask", [asgi, wsgi])
def test_no_request_passes_for_a_message(gate, ask):
    """A rule without methods does not apply to the messages of a websocket; an HTTP request of that name is none."""
    assert [ask(gate, word, "/all") for word in ("MESSAGE", "message", "Message", "MESSAGE")] == [200, 200, 429, 429]


def test_a_method_named_message_is_a_request_in_django_too():
    """Django's name of the method is read in the same way."""
    configure()
    assert DjangoRequestContext(RequestFactory().generic("MESSAGE", "/all")).method == "message"
    assert DjangoRequestContext(RequestFactory().generic("post", "/login")).method == "POST"
