"""A path that servers may read in two ways is limited under both, and exempt only where both are."""

from __future__ import annotations

import pytest

from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.testing import ManualClock

TENANT = {"name": "tenant", "match": "/{tenant}", "limit": "fixed window 1/min"}
SEARCH = {"name": "search", "match": "/search/**", "limit": "fixed window 1/min"}


@pytest.fixture
def gate():
    policy = Policy.of(exempt=[{"path": "/healthz"}], limits=[SEARCH, TENANT])
    return Gate(policy, store=MemoryStore(clock=ManualClock()))


def answers(gate, path, times):
    return [gate.ask(WrittenRequest("GET", path)).allowed for _ in range(times)]


@pytest.mark.parametrize(
    "path", ["/search/x", "/search/../x/y", "/search/%2e%2e/x/y", "/search/../healthz", "/a%2Fb", "/search/..;/healthz"]
)
def test_no_reading_slips_past(gate, path):
    """An application may route /search/../x to its search: the rule for /search/** applies, and nothing is exempt by it."""
    assert answers(gate, path, 2) == [True, False]


def test_no_second_reading_exempts():
    """An application that resolves /open/../search finds its search: the exempt path before it does not exempt it."""
    policy = Policy.of(exempt=[{"path": "/open/**"}], limits=[SEARCH])
    gate = Gate(policy, store=MemoryStore(clock=ManualClock()))
    assert answers(gate, "/open/../search/x", 2) == [True, False]
    assert answers(gate, "/open/search/x", 2) == [True, True]


def test_what_has_one_meaning_is_exempt(gate):
    """An exempt path that is spelt as the exemption is."""
    assert answers(gate, "/healthz", 3) == [True] * 3


def test_the_key_file_of_a_policy_is_known_to_it(tmp_path):
    """A policy lists the other files that it was read from, so that they are watched too."""
    (tmp_path / "secret").write_bytes(b"s" * 32)
    (tmp_path / "p.yaml").write_text(
        "identify: {user: {jwt: {claim: sub, key_file: secret, algorithms: [HS256]}}}\nlimits: [{name: a, key: user, limit: 1/s}]"
    )
    assert Policy.load(tmp_path / "p.yaml").files == (tmp_path / "secret",)


@pytest.mark.parametrize("between", ["\0", "|", " ", "\0\0"])
def test_no_path_is_taken_for_another_with_a_mount_point(between):
    """A client that may choose its mount point can't request a path whose plan is then found for another request."""
    gate = Gate(Policy.of(limits=[{"name": "checkout", "match": "/checkout", "limit": "9/s"}]), store=MemoryStore())
    assert not gate.ask(WrittenRequest(path=f"/zz/checkout{between}/checkout")).entries
    mounted = WrittenRequest(path="/zz/checkout")
    mounted.routed = "/checkout"
    assert [entry.label for entry in gate.ask(mounted).entries] == ["checkout"]


@pytest.mark.parametrize("path", ["/orders//a#b/pay", "/orders//a?b/pay", "/orders//a\\b/pay", "/orders/a#b//pay//"])
def test_repeated_slashes_hide_no_odd_segment(path):
    """Litestar routes `/orders//a%23b/pay` to /orders/{order}/pay, with the order a#b: its rule applies."""
    limits = [{"name": "order", "match": "/orders/{order}/pay", "limit": "fixed window 1/min"}]
    gate = Gate(Policy.of(limits=limits), store=MemoryStore(clock=ManualClock()))
    assert answers(gate, path, 2) == [True, False]
