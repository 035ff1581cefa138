"""Reading any part of a request is linear in its size, and capped: operations and bytes are counted, not time."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy
from limitkeeper.testing import ManualClock
from limitkeeper.web.headers import AsgiRequestContext, body
from limitkeeper.web.wsgi import WsgiRequestContext
from operations import operations

POLICY = """
identify:
  ip: {client_ip: {trusted_proxies: [10.0.0.0/8]}}
  forwarded: {client_ip: {trusted_proxies: [10.0.0.0/8], header: Forwarded}}
  header: {header: X-Key}
  cookie: {cookie: sid}
  query: {query: k}
  order: {path: order}
exempt:
  - {path: /open/**, header: {X-Secret: s3cret}}
limits:
  - {name: ip, key: ip, limit: 9999999/s, cost: {query: n, max: 9}}
  - {name: forwarded, key: forwarded, limit: 9999999/s, cost: {header: X-Cost, max: 9}}
  - {name: header, key: header, limit: 9999999/s, once: Idempotency-Key}
  - {name: cookie, key: cookie, limit: 9999999/s}
  - {name: query, key: query, limit: 9999999/s}
  - {name: order, match: "/orders/{order}/**", key: order, limit: 9999999/s}
  - {name: host, match: {host: "*.example.com"}, limit: 9999999/s}
  - {name: full, key: header, limit: 1/d, on_refusal: shadow}
"""
HEADERS = ("x-forwarded-for", "forwarded", "x-key", "cookie", "x-cost", "idempotency-key", "host", "x-secret", "accept")
PARTS = (*HEADERS, "path", "query", "method")
#: Texts that clients repeat to make reading slow.
UNITS = (
    "a",
    "/",
    "a/",
    "%",
    "%41",
    "%25",
    "/..",
    "a/../",
    ";",
    "; ",
    "&",
    "=",
    "k=1&",
    "%6b=1&",
    "sid=1;",
    "sid=",
    "\\",
    '"',
    " ",
    ",",
)
UNITS += (
    "1.2.3.4,",
    "10.0.0.1,",
    "for=10.0.0.1,",
    'for="',
    "for=1;",
    ".",
    "a.",
    "[",
    ":",
    "::",
    "\xe9",
    "\x80",
    "+",
    "q=0.1,",
    "_",
    "9",
    "0",
)
#: Operations for a request of any size, and for each of its bytes; likewise bytes allocated at a time.
OPERATIONS, PER_BYTE = 25_000, 8
BYTES, BYTES_PER_BYTE = 200_000, 40
#: Above this size, nothing costs more operations.
CAP = 70_000


def scope_of(parts: dict[str, str]) -> dict[str, object]:
    headers = [(name.encode(), parts[name].encode("latin-1")) for name in HEADERS if name in parts]
    return {
        "type": "http",
        "method": parts.get("method", "GET"),
        "path": parts.get("path", "/orders/7/pay"),
        "query_string": parts.get("query", "n=1&k=2").encode("latin-1"),
        "headers": headers,
        "client": ("10.0.0.9", 1),
    }


def environ_of(parts: dict[str, str]) -> dict[str, object]:
    environ = {f"HTTP_{name.upper().replace('-', '_')}": parts[name] for name in HEADERS if name in parts}
    request = {"REQUEST_METHOD": parts.get("method", "GET"), "PATH_INFO": parts.get("path", "/orders/7/pay")}
    return {**environ, **request, "QUERY_STRING": parts.get("query", "n=1&k=2"), "REMOTE_ADDR": "10.0.0.9"}


@pytest.fixture(scope="module")
def gate():
    with Gate(Policy.read(POLICY), store=MemoryStore(clock=ManualClock())) as gate:
        yield gate


@pytest.fixture(scope="module")
def refusal():
    """A refused evaluation, whose body depends on the client's Accept."""
    policy = Policy.of(limits=[{"name": "a", "limit": "1/d", "message": "no"}])
    with Gate(policy, store=MemoryStore(clock=ManualClock())) as gate:
        gate.ask(AsgiRequestContext(scope_of({})))
        yield gate.ask(AsgiRequestContext(scope_of({})))


def evaluate(gate, refusal, kind, parts):
    context = AsgiRequestContext(scope_of(parts)) if kind == "asgi" else WsgiRequestContext(environ_of(parts))
    evaluation = gate.ask(context)
    assert {"ip", "forwarded"} <= {entry.label for entry in evaluation.entries}
    body(refusal, parts.get("accept"))


def built(part: str, units: list[str], size: int, end: str = "") -> dict[str, str]:
    """A part of so many characters; `end` is where a pattern fails after it has matched all the rest."""
    unit = "".join(units)
    text = (unit * (size // len(unit) + 1))[: size - len(end)] + end
    return {part: ("/" if size % 2 else "/orders/") + text if part == "path" and size % 5 else text}


def allocated(call, *args) -> int:
    tracemalloc.start()
    try:
        call(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@effort(60)
@given(
    part=st.sampled_from(PARTS),
    units=st.lists(st.sampled_from(UNITS), min_size=1, max_size=3),
    size=st.sampled_from([100, 1001, 9000, 40_001]),
    kind=st.sampled_from(["asgi", "wsgi"]),
)
def test_operations_and_bytes_are_linear(gate, refusal, part, units, size, kind):
    """For any part of a request and any repeated text, its evaluation takes at most so many operations and bytes."""
    parts = built(part, units, size)
    assert operations(evaluate, gate, refusal, kind, parts) <= OPERATIONS + PER_BYTE * size
    assert allocated(evaluate, gate, refusal, kind, parts) <= BYTES + BYTES_PER_BYTE * size


@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
@pytest.mark.parametrize("part", PARTS)
def test_operations_are_capped(gate, refusal, part, kind):
    """Beyond a size that servers accept, a longer request takes no more operations, and a megabyte no noticeable time."""
    for unit in UNITS:
        took = [operations(evaluate, gate, refusal, kind, built(part, [unit], size)) for size in (CAP, 4 * CAP)]
        assert took[1] <= took[0] + 2000, unit


@pytest.mark.untraced
@pytest.mark.parametrize("part", PARTS)
def test_no_pattern_backtracks(gate, refusal, part):
    """A text that matches nearly to its end fails at once, without minutes of backtracking: within the bound, and in a
    megabyte."""
    sizes = {"path": 8002, "query": 16_000, "cookie": 4000, "host": 250, "forwarded": 1000, "x-forwarded-for": 1000}
    for unit in UNITS:
        for end in ("x", "%", "/", " ", "="):
            for size in (sizes.get(part, 60_000), 60_000, 1_000_000):
                began = time.process_time()
                evaluate(gate, refusal, "asgi", built(part, [unit], size, end))
                assert time.process_time() - began < 5, (unit, end, size)


@pytest.mark.parametrize("part", ["x-forwarded-for", "host", "cookie", "x-key"])
def test_repeated_lines_are_linear(gate, part):
    """Thousands of lines of one header cost as much as their bytes."""
    lines = [(part.encode(), b"10.0.0.%d" % number) for number in range(4000)]
    scope = {**scope_of({}), "headers": [(b"x-other", b"1"), *lines, (b"x-key", b"last")]}
    assert operations(gate.ask, AsgiRequestContext(scope)) <= OPERATIONS + PER_BYTE * 4000 * 8
    context = AsgiRequestContext(scope)
    assert (context.header("x-other"), context.header("x-none")) == ("1", None)
    assert context.header("x-key").endswith("last")
    assert len(context.header(part)) >= 4000 * 8
    assert (context.differs("header", part), context.differs("header", "x-other")) == (True, False)
