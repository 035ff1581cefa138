"""Identities: each kind gives its value, its default or None, for any client text."""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limitkeeper import MemoryStore
from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.callback_errors import CallbackErrors
from limitkeeper.policy.identity.client_ip import ClientIp
from limitkeeper.policy.identity.host_names_and_patterns import host_of, host_pattern, patterns_of
from limitkeeper.policy.identity.identify import SEVERAL, Called, Captured, Certificate, Cookie, Header, Network, Query
from limitkeeper.policy.identity.key_and_cache_bounds import HASHED, MAX_KEY_LENGTH, hash_long, remember
from limitkeeper.policy.request_context import WrittenRequest

STEADY = settings(deadline=None, suppress_health_check=list(HealthCheck))


def with_header(**headers: str) -> WrittenRequest:
    return WrittenRequest(headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_a_header_is_found_whatever_the_case_of_its_name():
    """The name is case-insensitive; the value is stripped of spaces."""
    assert Header("X-Tenant").of(with_header(x_tenant=" Acme ")) == "Acme"
    assert Header("x-TENANT") == Header("X-Tenant")


@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_an_empty_value_is_no_value(value):
    """A blank value counts as absent."""
    facts = WrittenRequest(headers={"X-Tenant": value, "Cookie": f"sid={value}"}, query={"key": value})
    for identity in (Header("X-Tenant"), Query("key"), Cookie("sid")):
        assert identity.of(facts) is None
    assert Header("X-Tenant", default="nobody").of(facts) == "nobody"


def test_a_query_parameter_and_a_captured_part_are_found():
    """Query parameters by their exact name; parts of the path by the template's."""
    facts = WrittenRequest(query={"api_key": "k1"})
    facts.captured = {"order_id": "42"}
    assert (Query("api_key").of(facts), Query("API_KEY").of(facts)) == ("k1", None)
    assert (Captured("order_id").of(facts), Captured("other", "none").of(facts)) == ("42", "none")


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("sid=abc", "abc"),
        ("a=1; sid=abc; b=2", "abc"),
        ("a=1;sid=abc", "abc"),
        ('sid="abc"', "abc"),
        ("sid=abc=def==", "abc=def=="),
        ("sid=first; sid=second", "several values"),
        ("a=1; sid=abc,def", "abc"),
        ("xsid=no; sid=abc", "abc"),
        ("xsid=no", None),
        ("SID=no", None),
        ("sid", None),
        ("sid=", None),
        ("", None),
        (";;;===;", None),
        ("a=1 sid=abc", "several values"),
        ("a sid=abc; b=2", "several values"),
        ("a=1 sid=abc; sid=def", "several values"),
        (" sid=abc", "abc"),
    ],
)
def test_a_cookie_is_found_among_others(header, value):
    """The one of its exact name; several that differ give SEVERAL."""
    assert Cookie("sid").of(WrittenRequest(headers={"Cookie": header})) == value


@STEADY
@given(st.text(max_size=200), st.text(min_size=1, max_size=5))
def test_no_cookie_header_breaks_its_reader(header, name):
    """Any text in the header, any searched name: a value or nothing."""
    if name.strip():
        found = Cookie(name).of(WrittenRequest(headers={"Cookie": header}))
        assert found in (None, SEVERAL) or found.strip('" ') in header


def test_a_certificate_names_its_bearer():
    """The first alternative name, or the subject; None without a certificate."""
    facts = WrittenRequest(certificate={"subject": "CN=billing", "san": ["", "spiffe://shop/billing", "billing.internal"]})
    assert Certificate("san").of(facts) == "spiffe://shop/billing"
    assert Certificate("subject").of(facts) == "CN=billing"
    assert Certificate("san", default="stranger").of(WrittenRequest()) == "stranger"
    assert Certificate("san").of(WrittenRequest(certificate={"san": [], "subject": 7})) is None


def test_a_callback_identifies():
    """Strings and integers count; the callback gets the request context."""
    assert Called(lambda facts: facts.header("x-user")).of(with_header(x_user="ann")) == "ann"
    assert Called(lambda facts: 42).of(WrittenRequest()) == "42"
    assert Called(lambda facts: None, default="all").of(WrittenRequest()) == "all"


class Marked(str):
    """A text whose methods return its own class, as those of markupsafe's Markup do."""

    def strip(self, chars: str | None = None) -> Marked:
        return Marked(super().strip(chars))


def test_a_callback_may_return_a_subclass_of_str():
    """Its text is a key as any other."""
    limits = [{"name": "a", "key": "user", "limit": "1/h"}]
    gate = Gate(Policy.of(identify={"user": {"call": lambda facts: Marked("ann")}}, limits=limits), store=MemoryStore())
    assert [gate.ask(WrittenRequest()).allowed for _ in range(2)] == [True, False]


@pytest.mark.parametrize("answer", [True, 1.5, ["ann"], b"ann", ZeroDivisionError])
def test_a_failing_callback_counts_as_absent(answer, caplog):
    """It is logged once per interval, with the lines that raised, and counted each time; the identity has its default."""

    def vip_of(facts):
        if isinstance(answer, type):
            raise answer(facts.path)
        return answer

    identity = Called(vip_of, default="nobody")
    with caplog.at_level(logging.WARNING, logger="limitkeeper"):
        assert [identity.of(WrittenRequest(path="/secret-key-42")) for _ in range(50)] == ["nobody"] * 50
    assert len(caplog.records) == 1
    assert "vip_of" in caplog.text
    assert ("raise answer(facts.path)" in caplog.text) == isinstance(answer, type)
    assert "secret-key-42" not in caplog.text
    assert identity.errors.count == 50


def test_complaints_count_what_was_not_logged(caplog):
    """After the interval one line has the number of errors that were not logged."""
    errors = CallbackErrors(every_us=0)
    errors.report("first")
    errors.every_us = 60_000_000
    errors.report("silent")
    errors.report("silent")
    errors.every_us = 0
    errors.report("again")
    assert [record.getMessage() for record in caplog.records] == ["first", "again (2 more since the last line)"]


async def soon(facts):
    return "ann"


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Header(""), "expected a name"),
        (lambda: Query("  "), "expected a name"),
        (lambda: Cookie(7), "expected a name"),
        (lambda: Certificate("serial"), "expected san or subject"),
        (lambda: Called("shop:vip"), "write package.module:function"),
        (lambda: Called(soon), "is async"),
        (lambda: Network(ClientIp(), (("office", ("10.0.0.5/8",)),)), "write 10.0.0.0/8"),
    ],
)
def test_a_wrong_argument_is_an_error(make, remedy):
    """The constructor raises it, not the first request."""
    with pytest.raises(ConfigurationError, match=remedy):
        make()


CLASSES = (("office", ("10.0.0.0/8", "2001:db8::/32")), ("internal", ("10.1.0.0/16",)))


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("10.1.2.3", "internal"),
        ("10.2.2.3", "office"),
        ("::ffff:10.1.2.3", "internal"),
        ("2001:db8::1", "office"),
        ("8.8.8.8", "public"),
        ("testclient", "public"),
        (None, "public"),
    ],
)
def test_the_narrowest_network_gives_the_class(peer, name):
    """Of several networks that hold an address the one with the longest prefix decides, in whatever order they are written."""
    for classes in (CLASSES, CLASSES[::-1]):
        identity = Network(ClientIp(), classes, default="public")
        assert [identity.of(WrittenRequest(peer=peer)) for _ in range(2)] == [name, name]


def test_a_class_can_not_be_claimed():
    """A client that writes an inside address into a header stays outside; behind a trusted proxy it has the proxy's reported
    address.
    """
    facts = WrittenRequest(peer="8.8.8.8", headers={"X-Forwarded-For": "10.1.2.3"})
    assert Network(ClientIp(), CLASSES, "public").of(facts) == "public"
    behind = Network(ClientIp(("172.16.0.0/12",)), CLASSES, "public")
    assert behind.of(WrittenRequest(peer="172.16.0.1", headers={"X-Forwarded-For": "10.1.2.3, 8.8.8.8"})) == "public"
    assert behind.of(WrittenRequest(peer="172.16.0.1", headers={"X-Forwarded-For": "8.8.8.8, 10.1.2.3"})) == "internal"


# Length and hashing of values


def test_a_long_value_is_hashed():
    """A megabyte in a header takes 71 characters in the store, and is still one key per value."""
    bomb = "x" * 1_000_000
    keys = {identity.of(WrittenRequest(headers={"X-Key": bomb}, query={"k": bomb})) for identity in (Header("X-Key"), Query("k"))}
    assert keys == {hash_long(bomb)}
    assert hash_long(bomb).startswith(HASHED)
    assert len(hash_long(bomb)) == 71
    assert hash_long(bomb) != hash_long(bomb + "y")
    assert hash_long(hash_long(bomb)) != hash_long(bomb)  # a client that sends the hash of another key is not that other client


@STEADY
@given(st.text(max_size=400), st.text(max_size=400))
def test_two_values_never_share_a_key(one, other):
    """Hashed or not, and also when a value looks like a hash."""
    assert (hash_long(one) == hash_long(other)) == (one == other)
    assert len(hash_long(one)) <= MAX_KEY_LENGTH
    assert hash_long(hash_long(one)) != hash_long(one) or hash_long(one) == one


def test_keys_may_hold_any_character():
    """Control characters, line breaks and lone surrogates are kept as they are: stores take any text."""
    for value in ("a\r\nX-Evil: 1", "\x00", "\ud800", "💧", "%0d%0a"):
        assert Header("X-Key").of(WrittenRequest(headers={"X-Key": f"k{value}k"})) == f"k{value}k"
    assert hash_long("\ud800" * 300).startswith(HASHED)


def test_a_cache_drops_its_oldest_entries():
    """A full cache drops an eighth; the newest entries stay."""
    table: dict[int, int] = {}
    for n in range(1_000):
        remember(table, n, n, 64)
        assert min(n + 1, 56) <= len(table) <= 64
    assert list(table)[-1] == 999
    assert min(table) > 900


# Hosts


@pytest.mark.parametrize(
    ("value", "host"),
    [
        (None, ""),
        ("", ""),
        ("Shop.Example.COM", "shop.example.com"),
        ("shop.example.com:8443", "shop.example.com"),
        ("shop.example.com.", "shop.example.com"),
        ("shop.example.com.:80", "shop.example.com"),
        ("localhost:", "localhost"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("a.example, b.example", ""),
        ("shop.example.com/evil", ""),
        ("user@shop.example.com", ""),
        ("shop..example.com", ""),
        (".example.com", ""),
        ("shop.example.com:port", ""),
        ("shop.example.com:65535", "shop.example.com"),
        ("shop.example.com:123456", ""),
        ("\u00fc" * 70 + ".example", ""),
        ("shop.example.com:\u0663", ""),
        (" shop.example.com ", "shop.example.com"),
        ("B\u00dcCHER.example", "xn--bcher-kva.example"),
        ("a" * 253, "a" * 253),
        ("shop.example.com\r\nX: 1", ""),
        ("[::1", ""),
        ("-x.example", ""),
        ("a" * 254, ""),
        ("a" * 1_000_000, ""),
    ],
)
def test_a_host_has_one_spelling(value, host):
    """Lower case, no port, no last dot; an invalid host is empty."""
    assert host_of(value) == host


@STEADY
@given(st.text(max_size=300))
def test_any_text_is_a_host_or_nothing(value):
    """Nothing is raised, and a host stays what it is."""
    host = host_of(value)
    assert host_of(host) == host


@pytest.mark.parametrize(
    ("pattern", "host", "meant"),
    [
        ("shop.example.com", "shop.example.com", True),
        ("shop.example.com", "example.com", False),
        ("*.example.com", "shop.example.com", True),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "evilexample.com", False),
        ("*.example.com", "", False),
        ("*.Example.com.", "shop.example.com", True),
        (" shop.example.com ", "shop.example.com", True),
    ],
)
def test_a_star_stands_for_every_host_below(pattern, host, meant):
    """`*.example.com` matches subdomains of example.com, not itself and not its siblings."""
    assert (host_pattern(pattern) in patterns_of(host)) is meant


@pytest.mark.parametrize("pattern", ["*", "*.", "a.*.com", "**.example.com", "shop example", "http://shop.example"])
def test_an_invalid_pattern_is_an_error(pattern):
    """The message names the right form."""
    with pytest.raises(ConfigurationError, match=r"write shop\.example\.com, or \*\.example\.com"):
        host_pattern(pattern)
