"""Parsers of a policy's short texts: the value of each valid text, the error of each invalid one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import FixedWindow, TokenBucket
from limitkeeper.policy.compiled_rule import join_key
from limitkeeper.policy.model import Match, OnFailure, OnRefusal
from limitkeeper.policy.path_matcher import PathMatcher, matching
from limitkeeper.policy.reading import value_parsers
from limitkeeper.policy.reading.diagnostics import ParseError, did_you_mean, nearest
from limitkeeper.policy.reading.semantic_checks import covers

VALID: list[tuple[Any, str, Any]] = [
    (value_parsers.parse_alternatives, "user", ("user",)),
    (value_parsers.parse_alternatives, " user|ip ", ("user", "ip")),
    (value_parsers.parse_alternatives, "a | b | c-d.e", ("a", "b", "c-d.e")),
    (value_parsers.parse_limits, "5/s", (TokenBucket("5/s"),)),
    (value_parsers.parse_limits, "Unlimited", ()),
    (value_parsers.parse_limits, " token  bucket 5/s ;fixed window 9/min", (TokenBucket("5/s"), FixedWindow("9/min"))),
    (value_parsers.parse_match, "POST /checkout", Match(frozenset({"POST"}), "/checkout")),
    (value_parsers.parse_match, "get,  head  /x/**", Match(frozenset({"GET", "HEAD"}), "/x/**")),
    (value_parsers.parse_match, "/", Match(path="/")),
    (value_parsers.parse_match, "M-SEARCH /x", Match(frozenset({"M-SEARCH"}), "/x")),
    (value_parsers.parse_host, "API.Example.COM.", "api.example.com"),
    (value_parsers.parse_host, "*.example.com", "*.example.com"),
    (value_parsers.parse_network, "10.0.0.0/8", "10.0.0.0/8"),
    (value_parsers.parse_network, "192.0.2.7", "192.0.2.7/32"),
    (value_parsers.parse_network, "2001:DB8::/32", "2001:db8::/32"),
    (value_parsers.parse_on_refusal, "reject", OnRefusal("reject")),
    (value_parsers.parse_on_refusal, "Shadow", OnRefusal("shadow")),
    (value_parsers.parse_on_refusal, "wait up to 200ms", OnRefusal("wait", 200_000)),
    (value_parsers.parse_on_refusal, "wait up to 1 minute queue 5", OnRefusal("wait", 60_000_000, 5)),
    (value_parsers.parse_on_refusal, "degrade cached", OnRefusal("degrade", handler="cached")),
    (value_parsers.parse_on_refusal, "degrade a.b:c.d", OnRefusal("degrade", handler="a.b:c.d")),
    (value_parsers.parse_on_failure, "open", OnFailure("open")),
    (value_parsers.parse_on_failure, "local", OnFailure("local", "1")),
    (value_parsers.parse_on_failure, "local 1/4", OnFailure("local", "1/4")),
    (value_parsers.parse_on_failure, "local 4", OnFailure("local", "4")),
    (value_parsers.parse_percent, "80%", 0.8),
    (value_parsers.parse_percent, "99.5 %", 0.995),
    (value_parsers.parse_percent, "100%", 1.0),
    (value_parsers.parse_size, "1kB", 1000),
    (value_parsers.parse_size, "4 KiB", 4096),
    (value_parsers.parse_size, "512", 512),
    (value_parsers.parse_statuses, "401", (401, 401)),
    (value_parsers.parse_statuses, "4XX", (400, 499)),
    (value_parsers.parse_statuses, "500-503", (500, 503)),
    (value_parsers.parse_message, "Again in {retry_after}s, {not one}", "Again in {retry_after}s, {not one}"),
    (value_parsers.parse_import_string, "a.b:c", "a.b:c"),
    (value_parsers.parse_store_url, "memory://", "memory://"),
    (value_parsers.parse_store_url, "unix:///run/redis.sock", "unix:///run/redis.sock"),
    (value_parsers.parse_store_url, "sharded+redis://a,b/0?lease=50&guard=open", "sharded+redis://a,b/0?lease=50&guard=open"),
]


@pytest.mark.parametrize(("parse", "text", "value"), VALID, ids=[f"{text}" for _, text, _ in VALID])
def test_a_valid_text_is_parsed(parse, text, value):
    """Each text gives its value."""
    assert parse(text) == value


REJECTED: list[tuple[Any, str, str, str | None]] = [
    (value_parsers.parse_alternatives, "user |", "one side of a '|' is empty", "|"),
    (value_parsers.parse_alternatives, "user | user", "'user' is listed twice", "user"),
    (value_parsers.parse_alternatives, "user or ip", "write 'user | ip'", "user or ip"),
    (value_parsers.parse_alternatives, "a | everyone", "write 'everyone' alone", "everyone"),
    (value_parsers.parse_alternatives, "user + ip", "[user, ip]", "user + ip"),
    (value_parsers.parse_limits, "5/s; tokn bucket 9/s", "did you mean 'token bucket'?", "tokn bucket"),
    (value_parsers.parse_limits, "none", "write unlimited", "none"),
    (value_parsers.parse_limits, "unlimited 5/s", "'unlimited' can't be combined", "unlimited"),
    (value_parsers.parse_limits, "token bucket 5/moon", "unknown unit 'moon'", "token bucket 5/moon"),
    (value_parsers.parse_limits, "5/s bursts 10", "unknown option 'bursts'", "bursts 10"),
    (value_parsers.parse_limits, "token bucket 5/s burst 10 burst 11", "duplicate option", "token bucket 5/s burst 10 burst 11"),
    (value_parsers.parse_limits, "token bucket 5", "expected a rate", None),
    (value_parsers.parse_match, "", "expected a match", None),
    (value_parsers.parse_match, "GET/x", "separate methods and path with a space", "GET"),
    (value_parsers.parse_match, "api.example.com/x", "a path begins with '/'", "api.example.com"),
    (value_parsers.parse_match, "GET /a b", "contains a space", "/a b"),
    (value_parsers.parse_match, "/a/{b}/../c", "'..'", ".."),
    (value_parsers.parse_match, "/{}", "is not a valid capture", "{}"),
    (value_parsers.parse_path, "/a#b", "never has a '#'", "#"),
    (value_parsers.parse_host, "https://x.example", "expected a host", None),
    (value_parsers.parse_host, "a b", "expected a host", None),
    (value_parsers.parse_network, "10.0.0.0/99", "expected an address or a network", None),
    (value_parsers.parse_network, "localhost", "expected an address or a network", None),
    (value_parsers.parse_trusted_proxy, "::/0", "trusts every client", None),
    (value_parsers.parse_on_refusal, "", "unknown action", None),
    (value_parsers.parse_on_refusal, "wait 200ms", "write wait up to 200ms", None),
    (value_parsers.parse_on_refusal, "wait up to", "the wait has no time limit", None),
    (value_parsers.parse_on_refusal, "wait up to 200ms queue 0", "from 1 to 100000", None),
    (value_parsers.parse_on_refusal, "wait up to 0s", "not between 0 and 60s", None),
    (value_parsers.parse_on_refusal, "wait up to 1s and more", "can't parse", None),
    (value_parsers.parse_on_refusal, "degrade a b", "needs one handler", None),
    (value_parsers.parse_on_refusal, "degrade :b", "is not an import string", None),
    (value_parsers.parse_on_failure, "local 0", "is not a share", None),
    (value_parsers.parse_on_failure, "opne", "did you mean 'open'?", None),
    (value_parsers.parse_percent, "0%", "not between 1% and 100%", None),
    (value_parsers.parse_percent, "eighty", "write it like 80%", None),
    (value_parsers.parse_size, "0kB", "not between", None),
    (value_parsers.parse_statuses, "499-400", "expected a status", None),
    (value_parsers.parse_statuses, "600", "expected a status", None),
    (value_parsers.parse_message, "{retry_afte}", "did you mean 'retry_after'?", "{retry_afte}"),
    (value_parsers.parse_rule_name, "", "1 to 64 characters", None),
    (value_parsers.parse_rule_name, " a", "begins or ends with a space", None),
    (value_parsers.parse_rule_name, "a\\b", "write 'ab'", "\\"),
    (value_parsers.parse_rule_name, "日本", "write 'rule'", "日"),
    (value_parsers.parse_header_name, "X Tenant", "is not a valid header name", None),
    (value_parsers.parse_import_string, "shop", "is not an import string", None),
    (value_parsers.parse_store_url, "redis://host:port/0", "write it like", None),
    (value_parsers.parse_store_url, "memory://host", "no host and no path", None),
    (value_parsers.parse_store_url, "shared://limits", "three slashes", None),
    (value_parsers.parse_store_url, "redis://h?budgett=3", "did you mean budget=?", None),
    (value_parsers.parse_redis_url, "memory://", "expected the URL of a Redis server", None),
]


@pytest.mark.parametrize(("parse", "text", "message", "part"), REJECTED, ids=[f"{text}" for _, text, _, _ in REJECTED])
def test_an_invalid_text_is_an_error(parse, text, message, part):
    """Each text gives a message and a suggestion, and the span of the part that is wrong."""
    with pytest.raises(ParseError) as caught:
        parse(text)
    error = caught.value
    assert message in f"{error.message}; {error.suggestion}"
    if part is not None:
        assert error.span is not None
        start, length = error.span
        assert text[start : start + length] == part


PARSERS = (
    *(
        value_parsers.parse_alternatives,
        value_parsers.parse_on_refusal,
        value_parsers.parse_on_failure,
        value_parsers.parse_percent,
        value_parsers.parse_size,
        value_parsers.parse_statuses,
        value_parsers.parse_message,
    ),
    *(
        value_parsers.parse_rule_name,
        value_parsers.parse_import_string,
        value_parsers.parse_header_name,
        value_parsers.parse_identity_name,
        value_parsers.parse_value,
        value_parsers.parse_limits,
    ),
    *(
        value_parsers.parse_match,
        value_parsers.parse_host,
        value_parsers.parse_network,
        value_parsers.parse_trusted_proxy,
        value_parsers.parse_store_url,
        value_parsers.parse_redis_url,
    ),
)


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@given(text=st.one_of(st.text(), st.text("ab0159/%*{}|;:. -wituprsdegca")))
def test_any_text_is_parsed_or_rejected(parse, text):
    """No parser raises anything but ParseError, and its span lies within the text."""
    try:
        parse(text)
    except ParseError as error:
        part = error.span
    else:
        return
    if part is not None:
        assert 0 <= part[0] <= len(text)
        assert part[1] >= 1


def test_an_unknown_word_gets_the_nearest_known_one_as_suggestion():
    """Suggestions ignore case, and are given only for similar words."""
    assert nearest("Tenent", ["user", "tenant"]) == "tenant"
    assert nearest("xyzzy", ["user", "tenant"]) is None
    assert nearest("x" * 1000, ["user"]) is None
    assert did_you_mean("xyzzy", ["user", "ip"]) == "write one of user, ip"


def test_override_keys_are_joined_as_the_gate_joins_them():
    """The key of an override equals the gate's key of the same parts."""
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


def matches(match: Match, request: tuple[str, list[str], str]) -> bool:
    method, segments, host = request
    return any(matching(PathMatcher([[match]]).walk(segments)[0], method, (host,)))


@given(wide=MATCHES, narrow=MATCHES, requests=st.lists(REQUEST, min_size=5, max_size=20))
def test_a_covering_match_matches_all_requests(wide, narrow, requests):
    """A rule is called unreachable only if the exemption matches every request that the rule matches."""
    if covers(wide, narrow):
        assert all(matches(wide, request) for request in requests if matches(narrow, request))
