"""The compiled hot paths answer as the general ones: the same bytes, the same state, the same counters, for any bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper.policy import Gate, Policy
from limitkeeper.service.app import Application
from limitkeeper.service.connections import Listener
from limitkeeper.service.http import CONTINUE, FULL, HttpConnection, Router
from limitkeeper.service.http import encoded as encoded_response
from limitkeeper.service.http_fast import FastChecks
from limitkeeper.service.resp import Commands, encoded, failed
from limitkeeper.service.resp_fast import FastHits
from limitkeeper.service.settings import load
from limitkeeper.stores import MemoryStore
from limitkeeper.testing import ManualClock

TOKEN = "0123456789abcdef"
LIMITS = [
    {"name": "few", "key": "ip", "limit": "token bucket 7 per 3 seconds burst 3"},
    {"name": "two", "key": "ip", "limit": "fixed window 2/min; fixed window 9/h"},
    {"name": "plans", "key": "ip", "limit": {"by": "plan", "pro": "10/min", "default": "2/min"}},
    {"name": "dark", "key": "ip", "limit": "1/min", "on_refusal": "shadow"},
    {"name": "loud", "key": "ip", "limit": "5/min", "alert": 0.5},
    {"name": "special", "key": "ip", "limit": "3/min", "override": {"a": "1/min", "user:1": "unlimited"}},
]
POLICY = Policy.of(name="fast", identify={"plan": {"header": "X-Plan"}}, limits=LIMITS)


class Transport:
    """Keeps the written bytes."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> Any:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


class Side:
    """A connection to an application of its own; `fast` or not."""

    def __init__(self, protocol: str, fast: bool, token: str | None = None) -> None:
        self.clock = ManualClock(start=1_000_000.0)
        self.gate = Gate(POLICY, store=MemoryStore(clock=self.clock), clock=self.clock, secret=b"s" * 16)
        self.rules = self.gate.compiled.rules
        app = Application(self.gate, secret=b"s" * 16)
        values = load({} if token is None else {"token": token}, {})
        make = Commands(app).connection if protocol == "resp" else lambda one: HttpConnection(Router(app, token), one)
        listener = Listener(values, make, FULL)
        listener.date = b"Sun, 06 Nov 1994 08:49:37 GMT"
        self.connection = make(listener)
        self.transport = Transport()
        self.connection.connection_made(self.transport)
        if protocol == "resp":
            self.connection.fast = FastHits(app, encoded, failed) if fast else None
        else:
            given = None if token is None else token.encode()
            self.connection.fast = FastChecks(app, given, 32_768, 262_144, encoded_response) if fast else None

    def receive(self, pieces: list[bytes]) -> tuple[Any, ...]:
        """The written bytes, and the resulting state."""
        for piece in pieces:
            self.connection.data_received(piece)
        shown = self.gate.snapshot()
        counts = [(rule.name, rule.passed, rule.refused, rule.shadow_refused, rule.near, rule.alerts) for rule in self.rules]
        totals = (shown.requests, shown.allowed, shown.refused, self.gate._latency and sum(self.gate._latency))
        written = self.transport.written.replace(CONTINUE, b"")  # not sent while requests before it wait
        return written, self.connection.closing, self.connection.partial, counts, totals


def pieces_of(data: bytes, cuts: list[float]) -> list[bytes]:
    places = sorted({0, len(data), *[round(cut * len(data)) for cut in cuts]})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def changed(data: bytes, changes: list[tuple[float, int]]) -> bytes:
    made = bytearray(data)
    for place, byte in changes if made else ():
        made[min(len(made) - 1, int(place * len(made)))] = byte
    return bytes(made)


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


KEYS = st.sampled_from(
    [b"a", b"user:1", b"", b"\xff\xfe", "ключ".encode(), b"x" * 70, b"x" * 300, b"x" * 1200, b"sha256:" + b"0" * 64]
)
NAMES = st.sampled_from([b"few", b"few", b"few", b"two", b"plans", b"dark", b"loud", b"special", b"none", b"\xff"])
NUMBERS = st.sampled_from([b"0", b"1", b"2", b"3", b"00001", b"-1", b"4.0", b"", b"9" * 15, b"9" * 16, b"9" * 19, b"x"])
COMMANDS = st.one_of(
    st.builds(command, st.sampled_from([b"LK.HIT", b"LK.HIT", b"lk.hit", b"LK.PEEK"]), NAMES, KEYS),
    st.builds(command, st.just(b"LK.HIT"), NAMES, KEYS, NUMBERS),
    st.builds(command, st.just(b"LK.HIT"), st.just(b"plans"), KEYS, st.just(b"TIER"), st.sampled_from([b"pro", b"none"])),
    st.builds(command, st.just(b"CL.THROTTLE"), KEYS, st.just(b"2"), st.just(b"3"), st.just(b"60")),
    st.builds(command, st.just(b"CL.THROTTLE"), KEYS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from(
        [command(b"PING"), b"PING\r\n", command(b"MULTI"), command(b"EXEC"), b"*0\r\n", b"\r\n", b"*3\r\n$6\r\nLK.HIT\r\n"]
    ),
)
CUTS = st.lists(st.floats(0, 1), max_size=3)
CHANGES = st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=1)


@given(st.lists(COMMANDS, max_size=12), CUTS, CHANGES)
@effort(120)
def test_commands_are_answered_as_by_the_general_path(commands, cuts, changes):
    """In any pieces, with errors and options among them, and with a byte changed."""
    pieces = pieces_of(changed(b"".join(commands), changes), cuts)
    assert Side("resp", True).receive(pieces) == Side("resp", False).receive(pieces)


TEXTS = st.sampled_from(
    [b'"few"', b'"few"', b'"two"', b'"plans"', b'"dark"', b'"none"', b'"f\\u0065w"', b"1", b"null", b'"special"']
)
VALUES = st.sampled_from(
    [b'"a"', b'"user:1"', b'""', b'"\xc3\xa9"', b'"\xff"', b'"a\\"b"', b'"' + b"x" * 300 + b'"', b"42", b"null", b'"\x7f"']
)
COSTS = st.sampled_from(
    [
        b"",
        b', "cost": 1',
        b',"cost":2 ',
        b', "cost": 0',
        b', "cost": 01',
        b', "cost": 1.0',
        b', "cost": -1',
        b', "cost": 1e0',
        b', "cost": "1"',
        b', "cost": 1, "cost": 2',
        b', "tier": "pro"',
        b', "key": "b"',
        b",",
        b', "cost": 9999999999999999',
    ]
)
SPACE = st.sampled_from([b"", b"", b" ", b"\n\t", b"\r\n", b"\x0b"])
HITS = st.builds(
    lambda a, n, k, c, b: b'%b{"limit":%b%b, "key"%b:%b%b}%b' % (a, b, n, b, k, c, a), SPACE, TEXTS, VALUES, COSTS, SPACE
)
BODIES = st.one_of(
    HITS,
    HITS,
    st.builds(lambda a, some: b'{"checks"%b: [%b]}' % (a, b",".join(some)), SPACE, st.lists(HITS, max_size=4)),
    st.sampled_from(
        [b"", b"{}", b"[]", b'{"checks": {}}', b'{"checks": [{}]}', b'{"request": {"method": "GET", "path": "/"}}', b"{"]
    ),
)
FIELDS = st.sampled_from(
    [
        *(
            b"Host: a\r\n",
            b"Content-Type: application/json\r\n",
            b"User-Agent: x\r\n",
            b"Accept: */*\r\n",
            b"Connection: keep-alive\r\n",
        ),
        *(
            b"Connection: close\r\n",
            b"Origin: http://a\r\n",
            b"Expect: 100-continue\r\n",
            b"Content-Length: 3\r\n",
            b" folded\r\n",
        ),
        *(b"Transfer-Encoding: chunked\r\n", b"X-Limitkeeper-Token: x\r\n", b"Authorization: Bearer %b\r\n" % TOKEN.encode()),
        *(
            b"Authorization: Bearer no\r\n",
            b"Name :x\r\n",
            b"X: \xe9\r\n",
            b"X: a\tb\r\n",
            b"Upgrade: h2c\r\n",
            b"no colon\r\n",
            b"X:\r\n",
        ),
        b"Proxy-Connection: close\r\n",
    ]
)
LINES = st.sampled_from(
    [b"POST /v1/check HTTP/1.1\r\n"] * 8
    + [
        b"POST /v1/check HTTP/1.0\r\n",
        b"POST /v1/check?a HTTP/1.1\r\n",
        b"GET /v1/check HTTP/1.1\r\n",
        b"POST /v1/reset HTTP/1.1\r\n",
    ]
)


@st.composite
def requests(draw: Any) -> bytes:
    body = draw(BODIES)
    length = draw(
        st.sampled_from(
            [b"Content-Length: %d\r\n", b"content-length:%d\r\n", b"CONTENT-LENGTH: %d \r\n", b"Content-Length: 0%d\r\n"]
        )
    )
    before, after = draw(st.lists(FIELDS, max_size=2)), draw(st.lists(FIELDS, max_size=1))
    return draw(LINES) + b"".join(before) + length % len(body) + b"".join(after) + b"\r\n" + body


@pytest.mark.parametrize("token", [None, TOKEN])
@given(data=st.lists(requests(), max_size=5), cuts=CUTS, changes=CHANGES)
@effort(120)
def test_requests_are_answered_as_by_the_general_path(token, data, cuts, changes):
    """Also where httptools refuses them, or reads them in an unexpected way."""
    pieces = pieces_of(changed(b"".join(data), changes), cuts)
    assert Side("http", True, token).receive(pieces) == Side("http", False, token).receive(pieces)


def test_a_plain_request_takes_the_fast_path():
    """Otherwise the tests above would compare the general path with itself."""

    class Unused(Exception):
        pass

    def unused(data: bytes) -> None:
        raise Unused

    body = b'{"limit": "few", "key": "user:1", "cost": 2}'
    sent = {
        "resp": command(b"LK.HIT", b"few", b"user:1") + command(b"LK.HIT", b"few", b"user:1", b"2"),
        "http": b"POST /v1/check HTTP/1.1\r\nHost: a\r\nAccept: */*\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body),
    }
    for protocol, data in sent.items():
        side = Side(protocol, True)
        side.connection.receive = unused  # type: ignore[method-assign]
        assert side.receive([data])[0]
        with pytest.raises(Unused):
            side.receive([b"PING\r\n"])
