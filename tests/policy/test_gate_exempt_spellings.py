"""An exemption holds for paths that are spelt as its template is; rules hold for every spelling."""

from __future__ import annotations

import pytest

from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.identity.paths import matches_exactly
from limitkeeper.policy.request_context import WrittenRequest

POLICY = """
exempt: [{path: /healthz}, {match: GET /static/**}, {path: "/Files/my%20file"}]
limits: [{name: all, key: ip, limit: fixed window 1/h}]
"""


def passes(path: str, method: str = "GET") -> bool:
    """Whether a second request for this path passes a limit of one."""
    with Gate(Policy.read(POLICY)) as gate:
        first, second = (gate.ask(WrittenRequest(method, path, peer="192.0.2.1")) for _ in range(2))
        return bool(first) and bool(second)


@pytest.mark.parametrize("path", ["/healthz", "/static", "/static/A.PNG", "/static/a/b", "/Files/my file"])
def test_what_is_spelt_as_the_exemption_is_exempt(path: str) -> None:
    """Below `**` any case is exempt, and a template is decoded once, as servers decode paths."""
    assert passes(path)


@pytest.mark.parametrize(
    "path",
    [
        "/HEALTHZ",
        "//healthz",
        "/healthz/",
        "/healthz//",
        "/STATIC/x",
        "/\u017ftatic/x",
        "//static/x",
        "/files/my file",
        "/healthz;x",
    ],
)
def test_other_spellings_are_limited(path: str) -> None:
    """A router that distinguishes them sends them to another handler."""
    assert not passes(path)


@pytest.mark.parametrize(
    ("template", "path", "expected"),
    [
        ("/a/*", "/a/b", True),
        ("/a/*", "/a/", False),
        ("/a/{id}", "/a/B", True),
        ("/a/{id}", "/A/b", False),
        ("/**", "/anything//at/all", True),
        ("/a/**", "/ab", False),
        ("/a/**", "/a/b/c/", True),
        ("/a/**", "/a//b", False),
        ("/a/**", "/a/b//c", False),
        ("/a", "/a/b", False),
    ],
)
def test_templates(template: str, path: str, expected: bool) -> None:
    """Open segments take any text that is not empty."""
    assert matches_exactly(template, path) is expected


def test_a_socket_with_trusted_proxies_has_one_key_for_requests_without_an_address() -> None:
    """A client that makes its forwarding header unreadable is limited all the same."""
    text = "identify: {ip: {client_ip: {trusted_proxies: [unix]}}}\nlimits: [{name: all, key: ip, limit: fixed window 1/h}]"
    with Gate(Policy.read(text)) as gate:
        asked = [gate.ask(WrittenRequest(headers={"x-forwarded-for": value}, peer=None)) for value in ("unknown", "x, y", "")]
        assert [bool(one) for one in asked] == [True, False, False]
