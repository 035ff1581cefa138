"""The words of a policy, one by one: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import FixedWindow, TokenBucket
from limitkeeper.policy.compiled_policy import join_key
from limitkeeper.policy.model import Match, OnFailure, OnRefusal
from limitkeeper.policy.path_matcher import PathMatcher
from limitkeeper.policy.reading import limit_parser, route_parser, store_url, value_parsers
from limitkeeper.policy.reading.parse_context import ParseError, did_you_mean, nearest
from limitkeeper.policy.reading.unreachable import covers

MEANINGS: list[tuple[Any, str, Any]] = [
    (value_parsers.alternatives, "user", ("user",)),
    (value_parsers.alternatives, " user|ip ", ("user", "ip")),
    (value_parsers.alternatives, "a | b | c-d.e", ("a", "b", "c-d.e")),
    (limit_parser.limits, "5/s", (TokenBucket("5/s"),)),
    (limit_parser.limits, "Unlimited", ()),
    (limit_parser.limits, " token  bucket 5/s ;fixed window 9/min", (TokenBucket("5/s"), FixedWindow("9/min"))),
    (route_parser.match, "POST /checkout", Match(frozenset({"POST"}), "/checkout")),
    (route_parser.match, "get,  head  /x/**", Match(frozenset({"GET", "HEAD"}), "/x/**")),
    (route_parser.match, "/", Match(path="/")),
    (route_parser.match, "M-SEARCH /x", Match(frozenset({"M-SEARCH"}), "/x")),
    (route_parser.host, "API.Example.COM.", "api.example.com"),
    (route_parser.host, "*.example.com", "*.example.com"),
    (route_parser.network, "10.0.0.0/8", "10.0.0.0/8"),
    (route_parser.network, "192.0.2.7", "192.0.2.7/32"),
    (route_parser.network, "2001:DB8::/32", "2001:db8::/32"),
    (value_parsers.on_refusal, "reject", OnRefusal("reject")),
    (value_parsers.on_refusal, "Shadow", OnRefusal("shadow")),
    (value_parsers.on_refusal, "wait up to 200ms", OnRefusal("wait", 200_000)),
    (value_parsers.on_refusal, "wait up to 1 minute queue 5", OnRefusal("wait", 60_000_000, 5)),
    (value_parsers.on_refusal, "degrade cached", OnRefusal("degrade", handler="cached")),
    (value_parsers.on_refusal, "degrade a.b:c.d", OnRefusal("degrade", handler="a.b:c.d")),
    (value_parsers.on_failure, "open", OnFailure("open")),
    (value_parsers.on_failure, "local", OnFailure("local", "1")),
    (value_parsers.on_failure, "local 1/4", OnFailure("local", "1/4")),
    (value_parsers.on_failure, "local 4", OnFailure("local", "4")),
    (value_parsers.percent, "80%", 0.8),
    (value_parsers.percent, "99.5 %", 0.995),
    (value_parsers.percent, "100%", 1.0),
    (value_parsers.size, "1kB", 1000),
    (value_parsers.size, "4 KiB", 4096),
    (value_parsers.size, "512", 512),
    (value_parsers.statuses, "401", (401, 401)),
    (value_parsers.statuses, "4XX", (400, 499)),
    (value_parsers.statuses, "500-503", (500, 503)),
    (value_parsers.told, "Again in {retry_after}s, {not one}", "Again in {retry_after}s, {not one}"),
    (value_parsers.call, "a.b:c", "a.b:c"),
    (store_url.store_url, "memory://", "memory://"),
    (store_url.store_url, "unix:///run/redis.sock", "unix:///run/redis.sock"),
    (store_url.store_url, "sharded+redis://a,b/0?lease=50&guard=open", "sharded+redis://a,b/0?lease=50&guard=open"),
]


@pytest.mark.parametrize(("read", "text", "meaning"), MEANINGS, ids=[f"{text}" for _, text, _ in MEANINGS])
def test_what_a_word_means(read, text, meaning):
    """Each text is the value beside it."""
    assert read(text) == meaning


NONSENSE: list[tuple[Any, str, str, str | None]] = [
    (value_parsers.alternatives, "user |", "nothing stands on one side of a '|'", "|"),
    (value_parsers.alternatives, "user | user", "'user' stands twice", "user"),
    (value_parsers.alternatives, "user or ip", "write 'user | ip'", "user or ip"),
    (value_parsers.alternatives, "a | everyone", "'everyone' stands alone", "everyone"),
    (value_parsers.alternatives, "user + ip", "[user, ip]", "user + ip"),
    (limit_parser.limits, "5/s; tokn bucket 9/s", "did you mean 'token bucket'?", "tokn bucket"),
    (limit_parser.limits, "none", "write unlimited", "none"),
    (limit_parser.limits, "unlimited 5/s", "'unlimited' stands alone", "unlimited"),
    (limit_parser.limits, "token bucket 5/month", "has no fixed length", "token bucket 5/month"),
    (limit_parser.limits, "5/s bursts 10", "'bursts' does not belong here", "bursts 10"),
    (limit_parser.limits, "token bucket 5/s burst 10 burst 11", "said twice", "token bucket 5/s burst 10 burst 11"),
    (limit_parser.limits, "token bucket 5", "is not a rate", None),
    (route_parser.match, "", "nothing stands here", None),
    (route_parser.match, "GET/x", "take methods and path apart with a space", "GET"),
    (route_parser.match, "api.example.com/x", "a path begins with '/'", "api.example.com"),
    (route_parser.match, "GET /a b", "a space in it", "/a b"),
    (route_parser.match, "/a/{b}/../c", "'..'", ".."),
    (route_parser.match, "/{}", "has no name", "{}"),
    (route_parser.path, "/a#b", "no request's path has a '#'", "#"),
    (route_parser.host, "https://x.example", "more than a host", None),
    (route_parser.host, "a b", "is no host", None),
    (route_parser.network, "10.0.0.0/99", "no address and no network", None),
    (route_parser.network, "localhost", "no address and no network", None),
    (route_parser.proxies, "::/0", "trusts everybody", None),
    (value_parsers.on_refusal, "", "nothing that can happen", None),
    (value_parsers.on_refusal, "wait 200ms", "write wait up to 200ms", None),
    (value_parsers.on_refusal, "wait up to", "a wait without a time has no end", None),
    (value_parsers.on_refusal, "wait up to 200ms queue 0", "not from 1 to 100000", None),
    (value_parsers.on_refusal, "wait up to 0s", "not between 0 and 60s", None),
    (value_parsers.on_refusal, "wait up to 1s and more", "is not understood", None),
    (value_parsers.on_refusal, "degrade a b", "has no handler", None),
    (value_parsers.on_refusal, "degrade :b", "names nothing to call", None),
    (value_parsers.on_failure, "local 0", "is no share", None),
    (value_parsers.on_failure, "opne", "did you mean 'open'?", None),
    (value_parsers.percent, "0%", "not between 1% and 100%", None),
    (value_parsers.percent, "eighty", "write it like 80%", None),
    (value_parsers.size, "0kB", "not between", None),
    (value_parsers.statuses, "499-400", "is no status", None),
    (value_parsers.statuses, "600", "is no status", None),
    (value_parsers.told, "{retry_afte}", "did you mean 'retry_after'?", "{retry_afte}"),
    (value_parsers.title, "", "1 to 64 characters", None),
    (value_parsers.title, " a", "begins or ends with a space", None),
    (value_parsers.title, "a\\b", "write 'ab'", "\\"),
    (value_parsers.title, "日本", "write 'rule'", "日"),
    (value_parsers.header_name, "X Tenant", "can't be the name of a header", None),
    (value_parsers.call, "shop", "names nothing to call", None),
    (store_url.store_url, "redis://host:port/0", "write it like", None),
    (store_url.store_url, "memory://host", "no host and no path", None),
    (store_url.store_url, "shared://limits", "three slashes", None),
    (store_url.store_url, "redis://h?budgett=3", "did you mean budget=?", None),
    (store_url.store_url, "limitkeeper://h", "not there yet", None),
    (store_url.redis_url, "memory://", "is no Redis server", None),
]


@pytest.mark.parametrize(("read", "text", "told", "part"), NONSENSE, ids=[f"{text}" for _, text, _, _ in NONSENSE])
def test_what_is_said_of_nonsense(read, text, told, part):
    """Each text is refused with a reason and a remedy, at the part that is wrong."""
    with pytest.raises(ParseError) as caught:
        read(text)
    wrong = caught.value
    said = f"{wrong.message}; {wrong.suggestion}"
    assert told in said
    if part is not None:
        assert wrong.part is not None
        start, length = wrong.part
        assert text[start : start + length] == part


READERS = (
    *(
        value_parsers.alternatives,
        value_parsers.on_refusal,
        value_parsers.on_failure,
        value_parsers.percent,
        value_parsers.size,
        value_parsers.statuses,
        value_parsers.told,
    ),
    *(
        value_parsers.title,
        value_parsers.call,
        value_parsers.header_name,
        value_parsers.identity_name,
        value_parsers.value,
        limit_parser.limits,
    ),
    *(
        route_parser.match,
        route_parser.host,
        route_parser.network,
        route_parser.proxies,
        store_url.store_url,
        store_url.redis_url,
    ),
)


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@given(text=st.one_of(st.text(), st.text("ab0159/%*{}|;:. -wituprsdegca")))
def test_any_text_is_read_or_refused(read, text):
    """No reader raises anything but Wrong, and its part lies within the text."""
    try:
        read(text)
    except ParseError as wrong:
        part = wrong.part
    else:
        return
    if part is not None:
        assert 0 <= part[0] <= len(text)
        assert part[1] >= 1


def test_a_word_nobody_knows_gets_the_nearest_one():
    """Suggestions do not mind case, and are not made where nothing is near."""
    assert nearest("Tenent", ["user", "tenant"]) == "tenant"
    assert nearest("xyzzy", ["user", "tenant"]) is None
    assert nearest("x" * 1000, ["user"]) is None
    assert did_you_mean("xyzzy", ["user", "ip"]) == "write one of user, ip"


def test_override_keys_are_joined_as_the_gate_joins_them():
    """The key of an override is what the gate makes of the same parts."""
    from limitkeeper.policy import Policy

    said = {"key": ["a|b", None, "-"], "limit": "5/s"}
    policy = Policy.of(
        identify={name: {"header": name} for name in "xyz"},
        limits=[{"name": "a", "key": ["x", "y", "z"], "limit": "1/s", "override": [said]}],
    )
    assert policy.rules[0].override[0][0] == join_key(["a|b", None, "-"]) == "a%7Cb|-|%2D"


SEGMENTS = st.lists(st.sampled_from(["a", "b", "*", "{x}"]), max_size=3)
PATH = st.builds(lambda parts, rest: "/" + "/".join([*parts, *rest]), SEGMENTS, st.sampled_from([[], ["**"]]))
METHODS = st.sampled_from(["GET", "POST", "HEAD", "PUT", "MESSAGE"])
MATCHES = st.builds(Match, st.frozensets(METHODS), st.one_of(st.just(""), PATH), st.sampled_from(["", "h"]))
REQUEST = st.tuples(METHODS, st.lists(st.sampled_from("abc"), max_size=4), st.sampled_from("hi"))


def means(match: Match, request: tuple[str, list[str], str]) -> bool:
    method, segments, host = request
    hits, _ = PathMatcher([[match]]).find(method, "/" + "/".join(segments))
    return bool(hits) and match.host in ("", host)


@given(wide=MATCHES, narrow=MATCHES, requests=st.lists(REQUEST, min_size=5, max_size=20))
def test_what_covers_a_match_means_all_of_its_requests(wide, narrow, requests):
    """A rule is called unreachable only if the exemption's match means every request that the rule's does."""
    if covers(wide, narrow):
        assert all(means(wide, request) for request in requests if means(narrow, request))
