"""Made-up paths, hosts and methods cost little: plans are shared, the cache is bounded in bytes, hosts are indexed."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import pytest
from gates import asked, gate, key, request, rule

from limitkeeper.policy import WrittenRequest
from limitkeeper.policy.compiled_policy import CACHE_BYTES, MAX_UNSURE
from limitkeeper.policy.identity.identify import Captured
from limitkeeper.policy.identity.paths import MAX_PATH
from limitkeeper.policy.model import Exemption, Match
from operations import operations


def labels(g, facts):
    return [entry.label for entry in asked(g, facts, "quick").entries]


def hosts_gate(number, **said):
    """A gate with so many rules for the same paths, one for each host, one for all subdomains and one for any host."""
    rules = [rule(f"h{i}", "9999999/s", match=(Match(path="/x/**", host=f"h{i}.example.com"),)) for i in range(number)]
    below = rule("below", "9999999/s", match=(Match(path="/x/**", host="*.example.com"),))
    return gate(*rules, below, rule("any", "9999999/s"), **said)


# Shared plans ---------------------------------------------------------------------------------------------------------


def test_paths_of_one_shape_share_their_plan():
    """A path adds its text to the cache; rules, hosts and plans are those of all paths that match the same rules."""
    g = hosts_gate(100)
    for i in range(300):
        assert labels(g, request(f"GET /x/{i}/{i}", host="h7.example.com")) == ["h7", "below", "any"]
    assert len(g.compiled.shapes) == 1
    assert len({id(match) for match in g.compiled.cached_paths["GET"].values()}) == 1


def test_methods_that_no_rule_names_share_their_paths():
    """Made-up methods have one plan, which a cached path of any of them has too; named ones have their own."""
    g = gate(rule("all", "9999/s"), rule("post", "9999/s", match=(Match(frozenset({"POST", "PURGE"}), "/x"),)))
    for method in ("GET", "PUT", *(f"M{i}" for i in range(500))):
        assert labels(g, request(f"{method} /x")) == ["all"]
    assert labels(g, request("POST /x")) == labels(g, request("PURGE /x")) == ["all", "post"]
    assert len(g.compiled.shapes) == 3
    assert sum(len(paths) for paths in {id(paths): paths for paths in g.compiled.cached_paths.values()}.values()) == 3


def test_a_message_is_no_made_up_method():
    """A rule without methods limits requests of every method, and no message of a connection."""
    g = gate(rule("all", "9999/s"))
    assert labels(g, request("PURGE /x")) == ["all"]
    assert labels(g, request("MESSAGE /x")) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 1000])
def test_a_flood_of_paths_stays_within_the_bound(number):
    """6000 paths never seen, with keys of their own in them, take no more bytes than the cache may have, for any number of
    rules by host; the right rules apply before, meanwhile and afterwards."""
    order = rule("order", "9999999/s", match=(Match(path="/x/{order}/{item}"),), key=key("order"))
    g = hosts_gate(number, identify={"order": Captured("order")})
    g = gate(*g.policy.rules, order, identify={"order": Captured("order")})
    expected = ["h0", "below", "any", "order"]
    context = WrittenRequest("GET", "/x/1/2", headers={"host": "h0.example.com"})
    assert [rule.name for rule in g.compiled.match(context).rules] == expected
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(6000):
            context = WrittenRequest("GET", f"/x/{i}/{'é' * (i % 200 + 1)}", headers={"host": "h0.example.com"})
            matched = g.compiled.match(context)
            assert context.captured["order"] == str(i)
            assert g.compiled.cached_bytes <= CACHE_BYTES
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [rule.name for rule in matched.rules] == expected
    assert grown <= 1.5 * CACHE_BYTES


@pytest.mark.slow
def test_captured_segments_are_counted():
    """Where hundreds of rules name a segment, each in its own way, fewer paths are cached."""
    g = gate(*[rule(f"r{i}", "9999/s", match=(Match(path=f"/x/{{name{i}}}"),)) for i in range(300)])
    g.compiled.match(request("GET /x/0"))
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(900):
            g.compiled.match(request(f"GET /x/{i}"))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown <= 1.5 * CACHE_BYTES


def test_hosts_and_methods_fill_no_memory():
    """Made-up hosts and methods, readable or not, on made-up paths: the caches keep their bound."""
    g = hosts_gate(300)
    for i in range(8000):
        host = (f"h{i % 300}.example.com", f"made-up-{i}.example.com", f"h{i % 300}.example.com:x", f"{i}@{i}")[i % 4]
        g.compiled.match(WrittenRequest(f"M{i}", f"/x/{i}", headers={"host": host}))
        assert g.compiled.cached_bytes <= CACHE_BYTES
    assert sum(map(sys.getsizeof, g.compiled.cached_hosts)) <= CACHE_BYTES


# The cost of a path never seen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["h7.example.com", *(pytest.param(host, marks=pytest.mark.slow) for host in ("evil.org", "h7.example.com:x", None))]
)
def test_a_path_never_seen_costs_the_same_for_any_number_of_hosts(host):
    """Finding the rules of a new path takes as many operations with 5000 rules by host as with ten, readable host or not."""
    took = []
    for number in (10, 5000):
        g = hosts_gate(number)
        contexts = [WrittenRequest("GET", f"/x/{i}/y", headers={"host": host} if host else {}) for i in range(20)]
        g.compiled.match(contexts.pop())
        took.append(min(operations(g.compiled.match, context) for context in contexts))
    assert took[1] <= took[0] + 10


def test_a_path_never_seen_costs_the_same_for_any_number_of_exempt_hosts():
    """Whether a path is spelt as an exemption spells it is found once for each of their paths, not for each of their hosts: with
    2000 exemptions by host it takes as many operations as with ten. A path that is spelt in another way is not exempt."""
    took = []
    for number in (10, 2000):
        exempt = [Exemption(match=(Match(path="/x/**", host=f"h{i}.example.com"),)) for i in range(number)]
        g = gate(rule("any", "9999999/s"), exempt=tuple(exempt))
        paths = ("/x/{}/y", "/X/{};a", "/x/{}" + LONG)
        host = {"host": "h7.example.com"}
        contexts = [[WrittenRequest("GET", one.format(i), headers=host) for i in range(10)] for one in paths]
        for some in contexts:
            g.compiled.match(some.pop())
        took.append([min(operations(g.compiled.match, context) for context in some) for some in contexts])
        exempted = [g.compiled.match(some.pop()).exempt for some in contexts]
        assert exempted == [True, False, False]
    assert all(many <= few + 10 for few, many in zip(*took, strict=True)), took


def test_an_unreadable_host_meets_the_rules_that_it_names_and_a_bounded_number_of_others():
    """Of 5000 rules by host, those apply whose host is written in the header, in whatever way, and the policy's first ones."""
    g = hosts_gate(5000)
    odd = (
        "h4321.example.com:x",
        "a.example, h4321.example.com",
        "h4321.example.com@",
        "h4321.example.com:80:80",
        "h4321.example.com/",
    )
    for host in (*odd, "h4321.example.com:" + "9" * 60_000, "h4321.example.com," * 3000):
        found = labels(g, request("GET /x/1", host=host))
        assert "h4321" in found
        assert found[-2:] == ["below", "any"]
        assert len(found) <= MAX_UNSURE + 3
    long = "s" * 400 + ".example.com"
    assert "below" in labels(g, request("GET /x/1", host=long))
    assert "below" in labels(g, request("GET /x/1", host=long + ":" + "x" * 9000))


# Paths that are too long ------------------------------------------------------------------------------------------------


LONG = "y" * 2 * MAX_PATH


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/files/{LONG}", {"rest", "file", "version", "any"}),
        (f"/files/{LONG}/versions", {"rest", "file", "version", "any"}),
        ("/files/" + "y/" * MAX_PATH, {"rest", "any"}),
        (f"/open/{LONG}", {"any"}),
        (f"/{LONG}", {"checkout", "rest", "file", "version", "top", "any"}),
        ("/a/.." * MAX_PATH + "/checkout", {"checkout", "rest", "file", "version", "top", "any"}),
        ("/" * 2 * MAX_PATH + "checkout", {"checkout", "rest", "file", "version", "top", "any"}),
        ("/%2e" * MAX_PATH + "/checkout", {"checkout", "rest", "file", "version", "top", "any"}),
        ("x" * 2 * MAX_PATH, {"checkout", "rest", "file", "version", "top", "any"}),
    ],
    ids=range(9),
)
def test_a_path_that_is_too_long_is_limited_by_all_that_it_may_be(path, expected):
    """A path of which only the beginning is read is limited by every rule that it may match, and never exempt."""
    paths = {
        "rest": "/files/**",
        "file": "/files/{name}",
        "version": "/files/{name}/versions",
        "top": "/{top}",
        "checkout": "/checkout",
    }
    rules = [rule(name, "9999/s", match=(Match(path=path),)) for name, path in paths.items()]
    g = gate(*rules, rule("any", "9999/s"), exempt=(Exemption(match=(Match(path="/open/**"),)),))
    found = set(labels(g, request(f"GET {path}")))
    assert found - {"top"} == expected - {"top"}
    assert found >= expected
    assert labels(g, request("GET /open/" + "y" * 100)) == []


def test_a_path_that_is_too_long_meets_a_bounded_number_of_rules():
    """Where thousands of rules may match, the rules of its prefix and the policy's first ones apply."""
    rules = [rule(f"r{i}", "9999/s", match=(Match(path=f"/a/r{i}"),)) for i in range(1000)]
    g = gate(*rules, rule("below", "9999/s", match=(Match(path="/a/**"),)))
    found = labels(g, request("GET /a/" + LONG))
    assert found[-1] == "below"
    assert len(found) == MAX_UNSURE


def test_depth_costs_nothing():
    """Of a deep path only as many segments are split as the deepest rule has."""
    g = hosts_gate(3)
    g.compiled.match(request("GET /x/1"))
    shallow = operations(g.compiled.match, request("GET /x/" + "a" * (MAX_PATH - 8)))
    assert operations(g.compiled.match, request("GET /x/" + "a/" * (MAX_PATH // 2 - 8) + "a")) <= shallow + 20
    assert sys.getsizeof(g.compiled.matcher.segments_of("/x" + "/a" * 4000)) < 200
