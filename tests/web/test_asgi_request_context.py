"""The RequestContext of an ASGI scope."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from asgi_loop import scope_of

from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.request_context import PARAMETERS
from limitkeeper.web.asgi import AsgiRequestContext, HeaderSend


def facts(*headers: tuple[str, str], target: str = "/", **more: Any) -> AsgiRequestContext:
    return AsgiRequestContext(scope_of("GET", target, list(headers), "192.0.2.1", **more))


@pytest.mark.parametrize(
    ("root", "path", "whole"),
    [
        ("", "/cart", "/cart"),
        ("/shop", "/cart", "/shop/cart"),
        ("/shop", "/shop/cart", "/shop/cart"),
        ("/shop/", "/shop/cart", "/shop/cart"),
        ("/shop", "/shop", "/shop"),
        ("/shop", "/shopping", "/shop/shopping"),
        ("/shop", "/other/shop/cart", "/shop/other/shop/cart"),
        ("/shop", "/cafe/cart", "/shop/cafe/cart"),
    ],
)
def test_a_path_has_its_mount_point_once(root, path, whole):
    """Servers and frameworks differ in whether the path has its mount point in front already: rules see it once."""
    assert facts(target=path, root_path=root).path == whole


def test_lines_of_a_header_are_joined():
    """Several lines are one value, in their order; cookies have a separator of their own."""
    context = facts(("X-A", "1"), ("Cookie", "a=1"), ("X-B", "x"), ("X-A", "2"), ("X-A", "3"), ("Cookie", "b=2"))
    assert (context.header("x-a"), context.header("cookie"), context.header("x-b"), context.header("x-c")) == (
        "1, 2, 3",
        "a=1; b=2",
        "x",
        None,
    )


def test_a_query_gives_its_first_value():
    """Empty values are values, the first of several counts, and parameters after the thousandth are not read."""
    context = facts(target="/?a=1&a=2&b=&c=%C3%A9")
    assert [context.query(name) for name in "abcd"] == ["1", "", "é", None]
    many = facts(target="/?" + "x=1&" * (PARAMETERS - 1) + "y=2&z=3")
    assert (many.query("y"), many.query("z")) == ("2", None)


def test_a_scope_may_leave_things_out():
    """No query, no client, no mount point, no method: a minimal handshake is still a GET of an unknown client."""
    context = AsgiRequestContext({"type": "websocket", "path": "/", "headers": []})
    assert (context.method, context.path, context.query("a"), context.peer(), context.certificate()) == (
        "GET",
        "/",
        None,
        None,
        None,
    )
    assert context.differs("query", "a") is False
    assert (context.identities, context.captured) == ({}, {})


@pytest.mark.parametrize(("client", "peer"), [(("192.0.2.7", 1), "192.0.2.7"), (("", 0), None), (None, None), ((None, 0), None)])
def test_a_socket_without_an_address_is_nobodys(client, peer):
    """Where the server has no address, none is invented."""
    assert facts(client=client).peer() == peer


def test_any_mapping_is_a_scope():
    """A framework may pass on a mapping of its own, and finds it again in the facts."""
    scope = MappingProxyType(scope_of("GET", "/x?a=1", [("X-A", "1")], "192.0.2.1"))
    context = AsgiRequestContext(scope)
    assert (context.path, context.query("a"), context.header("x-a"), context.peer()) == ("/x", "1", "1", "192.0.2.1")
    assert context.raw is scope


NAMED = {"client_cert_name": "CN=billing", "client_cert_san": ("billing.test",)}


@pytest.mark.parametrize(
    ("extensions", "context"),
    [
        (None, None),
        ({}, None),
        ({"tls": {}}, None),
        ({"tls": {"client_cert_name": "", "client_cert_error": None}}, None),
        ({"tls": {**NAMED, "client_cert_error": "expired"}}, None),
        ({"tls": {**NAMED, "client_cert_error": None}}, {"subject": "CN=billing", "san": ["billing.test"]}),
        ({"tls": {"client_cert_name": "CN=x"}}, {"subject": "CN=x", "san": []}),
        ({"tls": {"client_cert_name": "CN=x", "client_cert_san": None}}, {"subject": "CN=x", "san": []}),
    ],
)
def test_only_a_certificate_that_was_verified_names_its_bearer(extensions, context):
    """A certificate counts when the server declares it verified; one with an error, or without a name, does not."""
    assert facts(extensions=extensions).certificate() == context


@pytest.fixture
def gate_and_passage(store: Any) -> Any:
    gate = Gate(Policy.read("limits: [{name: api, key: ip, limit: fixed window 5/min}]"), store=store)
    return gate, gate.ask(facts())


def test_a_start_is_counted_once(gate_and_passage):
    """However many starts an app sends, the first one is the response, and later failures change nothing."""
    gate, evaluation = gate_and_passage
    sent: list[Any] = []
    sending = HeaderSend(evaluation, sent.append)
    start = {"type": "http.response.start", "status": 200, "headers": [(b"x" * 80, b"1"), (b"y" * 63, b"2")]}
    for _ in range(2):
        sending(start)
    sending.ended(500)
    assert gate.snapshot().rules[0].statuses == {"2xx": 1}
    assert [len(message["headers"]) for message in sent] == [7, 2]
    assert sent[1] is start


def test_a_failure_is_counted_once(gate_and_passage):
    """A handler that raised before its response is a 500, once."""
    gate, evaluation = gate_and_passage
    sending = HeaderSend(evaluation, print)
    sending.ended(500)
    sending.ended(500)
    assert gate.snapshot().rules[0].statuses == {"5xx": 1}
