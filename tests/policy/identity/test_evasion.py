"""Evasion of rules through a gate: encoded paths, spoofed hosts, forged addresses and tokens do not get a new limit."""

from __future__ import annotations

import jwt
import pytest

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy, WrittenRequest
from limitkeeper.policy.gate import Gate
from limitkeeper.testing import ManualClock
from limitkeeper.web.asgi import AsgiRequestContext

SECRET = "a shared secret of at least 32 bytes"
POLICY = f"""
identify:
  ip:   {{client_ip: {{trusted_proxies: [10.0.0.0/8]}}}}
  user: {{jwt: {{claim: sub, key: "{SECRET}", algorithms: [HS256]}}}}
  key:  {{header: X-Api-Key}}
exempt:
  - path: /healthz
  - {{match: GET /metrics, network: 10.1.0.0/16}}
limits:
  - {{name: checkout, match: POST /checkout, key: ip, limit: fixed window 3/min}}
  - {{name: admin, match: {{host: admin.example.com}}, key: ip, limit: fixed window 2/min}}
  - {{name: api, match: /api/**, key: user | ip, limit: fixed window 3/min}}
  - {{name: keyed, match: /keyed, key: key, limit: fixed window 1/min}}
"""


@pytest.fixture
def gate():
    with Gate(Policy.read(POLICY), store=MemoryStore(clock=ManualClock())) as gate:
        yield gate


def passed(gate: Gate, requests: list[WrittenRequest]) -> int:
    return sum(bool(gate.ask(request)) for request in requests)


DISGUISES = [
    "/checkout",
    "//checkout",
    "/Checkout",
    "/CHECKOUT/",
    "/./checkout",
    "/shop/../checkout",
    "/%63heckout",
    "/%2563heckout",
    "%2Fcheckout",
    "/checkout%00",
    "/checkout;jsessionid=9",
    "\\checkout",
    "/..;/checkout",
    "/checkout%20",
    "/checkout%3Fx",
]


def test_no_spelling_of_a_path_has_a_limit_of_its_own(gate):
    """Fifteen encodings of one path share its limit of three."""
    assert passed(gate, [WrittenRequest("POST", path) for path in DISGUISES]) == 3


def test_no_spoofed_chain_makes_a_new_client(gate):
    """One client behind an honest proxy is one client, whatever it writes in front of what the proxy appends."""
    chains = [f"{n}.{n}.{n}.{n}, 203.0.113.9" for n in range(1, 20)] + [
        "10.0.0.1, 203.0.113.9",
        "unknown, 203.0.113.9",
        "203.0.113.9",
    ]
    requests = [WrittenRequest("POST", "/checkout", peer="10.0.0.2", headers={"X-Forwarded-For": chain}) for chain in chains]
    assert passed(gate, requests) == 3


def test_no_header_helps_without_a_proxy(gate):
    """Headers of a client that connects directly are ignored."""
    requests = [
        WrittenRequest("POST", "/checkout", peer="203.0.113.9", headers={"X-Forwarded-For": f"{n}.1.1.1"}) for n in range(20)
    ]
    assert passed(gate, requests) == 3


def test_no_rotation_within_a_network_makes_a_new_client(gate):
    """Twenty addresses of one /64 are one client; another /64 is another."""
    rotating = [WrittenRequest("POST", "/checkout", peer=f"2001:db8:1:2:{n:x}::{n:x}") for n in range(20)]
    assert passed(gate, rotating) == 3
    assert passed(gate, [WrittenRequest("POST", "/checkout", peer="2001:db8:1:3::1")]) == 1


def test_no_spelling_of_a_host_has_a_limit_of_its_own(gate):
    """Case, port and a last dot are the same host."""
    hosts = ["admin.example.com", "ADMIN.example.com", "admin.example.com:443", "admin.example.com.", "Admin.Example.Com.:80"]
    assert passed(gate, [WrittenRequest("GET", "/", headers={"Host": host}) for host in hosts]) == 2


def test_a_host_that_can_not_be_read_slips_past_no_rule(gate):
    """An application may take the first of two hosts, or what precedes a colon; so rules for both apply."""
    hosts = ["admin.example.com:x", "admin.example.com, b.example", "admin.example.com:80:80", "admin.example.com/x", "@"]
    assert passed(gate, [WrittenRequest("GET", "/", headers={"Host": host}) for host in hosts]) == 2
    assert passed(gate, [WrittenRequest("GET", "/", headers={"Host": "www.example.com"})] * 5) == 5
    assert passed(gate, [WrittenRequest("GET", "/")] * 5) == 5


def test_no_forged_token_makes_a_new_user(gate):
    """Requests with foreign or expired tokens are counted by their address."""
    forged = [jwt.encode({"sub": f"user{n}"}, f"another secret, number {n}, of 32 bytes", algorithm="HS256") for n in range(10)]
    forged += [jwt.encode({"sub": f"user{n}", "exp": 1}, SECRET, algorithm="HS256") for n in range(10)]
    assert passed(gate, [WrittenRequest("GET", "/api/x", headers={"Authorization": f"Bearer {token}"}) for token in forged]) == 3
    honest = jwt.encode({"sub": "ann"}, SECRET, algorithm="HS256")
    assert passed(gate, [WrittenRequest("GET", "/api/x", headers={"Authorization": f"Bearer {honest}"})] * 5) == 3


@pytest.mark.parametrize("more", ["Bearer x", "x" * 9000, "Bearer x, Bearer y", ",", ""])
def test_a_second_line_does_not_hide_a_token(gate, more):
    """An application may take the first of several Authorization lines, or the last: the token in it counts either way."""
    honest = "Bearer " + jwt.encode({"sub": "ann"}, SECRET, algorithm="HS256")
    for lines in ([honest, more], [more, honest], [more, honest, more]):
        facts = WrittenRequest("GET", "/api/x", headers={"Authorization": ", ".join(lines)})
        assert [one.key for one in gate.explain(facts) if one.rule.name == "api"] == ["user:ann"]


def test_what_is_exempt_can_not_be_claimed(gate):
    """A path next to an exempt one, and an address in a header, are not exempt."""
    beside = ["/healthz/../checkout", "/healthz%2f..%2fcheckout", "/healthz;/../checkout", "/healthz/..;/checkout"]
    assert passed(gate, [WrittenRequest("POST", path) for path in beside * 3]) == 3
    assert passed(gate, [WrittenRequest("GET", "/healthz")] * 10) == 10


def test_a_header_bomb_is_one_short_key(gate):
    """A megabyte of key is one client with one small entry in the store."""
    bomb = WrittenRequest("GET", "/keyed", headers={"X-Api-Key": "x" * 1_000_000})
    assert passed(gate, [bomb] * 3) == 1
    evaluation = gate.ask(bomb)
    assert [len(key) for key in evaluation.keys] == [71]


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\x00b", "a\u2028b", "\ud800", "%0d%0aX-Evil: 1"])
def test_no_key_can_inject_anything(gate, value):
    """A key with line breaks, NUL or lone surrogates is counted like any other."""
    facts = WrittenRequest("GET", "/keyed", headers={"X-Api-Key": value})
    assert passed(gate, [facts] * 3) == 1
    refusal = gate.ask(facts).refusal
    assert refusal is not None
    assert value not in refusal.message


SPELLINGS = [
    "sid=ab1",
    "sid =ab1",
    "sid\t= ab1",
    'sid="ab1"',
    'sid="\\141b\\061"',
    'x=1; sid ="a\\b1"',
    "sid=%61b1",
    "\tsid=ab1 ",
]


@pytest.mark.parametrize("cookies", SPELLINGS)
def test_no_spelling_of_a_cookie_makes_a_new_session(cookies):
    """A session that applications read from a cookie is the same for the rules, however the cookie is written."""
    from starlette.requests import cookie_parser

    policy = Policy.read("identify: {s: {cookie: sid}}\nlimits: [{name: s, key: s, limit: 1/s}]")
    assert cookie_parser(cookies)["sid"] in ("ab1", "%61b1")
    assert policy.identify["s"].of(WrittenRequest(headers={"Cookie": cookies})) == "ab1"


UNCLEAR = [
    "x=1,sid={}",
    "x=1;, sid={}",
    "\xa0sid={}",
    "x=1;\x85sid={}",
    'x="a; sid={}; b"',
    'x="a\\"; sid={}; b"',
    'x="a\\; sid={}; b"',
    "sid=a {}",
    'sid="{}',
    'sid={}"x',
]


@pytest.mark.parametrize("cookies", UNCLEAR)
def test_a_cookie_that_some_applications_do_not_see_makes_no_new_session(cookies):
    """The client of an application that finds no session in it would otherwise be new with every request."""
    from werkzeug.sansio.http import parse_cookie

    policy = Policy.read("identify: {s: {cookie: sid}}\nlimits: [{name: s, key: s | ip, limit: fixed window 2/min}]")
    gate = Gate(policy, store=MemoryStore(clock=ManualClock()))
    requests = [WrittenRequest(headers={"Cookie": cookies.format(n)}) for n in range(4)]
    assert [parse_cookie(request.header("cookie")).get("sid") for request in requests] == [None] * 4
    assert passed(gate, requests) == 2


@pytest.mark.parametrize("between", ["\t", "  ", " \t "])
def test_no_space_hides_a_token(gate, between):
    """Applications that split the header find the token after a tab; so do the rules."""
    token = jwt.encode({"sub": "ann"}, SECRET, algorithm="HS256")
    facts = WrittenRequest("GET", "/api/x", headers={"Authorization": f"Bearer{between}{token} "})
    assert [one.key for one in gate.explain(facts) if one.rule.name == "api"] == ["user:ann"]


TEMPLATES = [
    ("/my%20file", ["/my file", "/My%20File/", "/my%2520file"]),
    ("/caf%C3%A9", ["/café", "/CAF%C3%89"]),
    ("/café", ["/café", "/caf%c3%a9"]),
    ("/a//b", ["/a/b", "//a//b"]),
    ("/a%2Fb/{id}", ["/a/b/7", "/a%2fb/7"]),
]


@pytest.mark.parametrize(("template", "paths"), TEMPLATES)
def test_a_template_is_spelt_as_requests_are(template, paths):
    """Encoded, accented or with a slash too many: a rule's path is normalized like the paths of requests."""
    with Gate(
        Policy.of(limits=[{"name": "x", "match": f"GET {template}", "key": "ip", "limit": "1/s"}]), store=MemoryStore()
    ) as gate:
        for path in paths:
            facts = WrittenRequest("GET", path)
            assert [one.applies for one in gate.explain(facts)] == [True], path
            assert facts.captured.get("id", "7") == "7"


def test_no_empty_parameter_hides_another():
    """`?key&key=x` has two values: an application may take the second, so it does not go past a rule as if there were none."""
    policy = Policy.read("identify: {k: {query: key}}\nlimits: [{name: k, key: k, limit: 1/s, cost: {query: n, max: 9}}]")
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"key&key=x&n&n=5"}
    assert policy.identify["k"].of(AsgiRequestContext(scope)) == "several values"
    with Gate(policy, store=MemoryStore()) as gate:
        assert gate.explain(AsgiRequestContext(scope))[0].cost == 9
