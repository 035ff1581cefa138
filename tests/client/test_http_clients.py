"""Outgoing calls through every HTTP client, sync and async, against a real server: the same cases for all."""

from __future__ import annotations

import gzip
import importlib
import random
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import format_datetime

import httpx
import pytest
from client_kinds import KINDS, HttpxKind, Parts
from http_server import Answer, ScriptedServer

from limitkeeper import ConfigurationError, MemoryStore, RateLimited
from limitkeeper.client import ClientClosed, ClientLimits, RetriesExhausted, Retry, Throttled
from limitkeeper.client.httpx import RateLimitTransport
from limitkeeper.concurrency import Dependencies, DependencyCap
from stand_ins import NOON

OK = Answer(200, body=b"ok")
#: The first retry is spread over this many seconds.
SPREAD = 0.5


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def limits_of(clock):
    """Makes limits on the manual clock, with seeded randomness."""

    def make(limits=None, **options):
        store = MemoryStore(clock=clock) if limits is not None and not isinstance(limits, Dependencies) else None
        return ClientLimits(limits, store, clock=clock, random=random.Random(7).random, **options)

    return make


def http_date(seconds):
    return format_datetime(datetime.fromtimestamp(seconds, UTC), usegmt=True)


def test_a_refused_get_returns_after_the_retry_after_of_the_server(kind, clock, limits_of):
    """A GET that is refused with Retry-After is sent again after that time, plus a random part of the spread."""
    with ScriptedServer([Answer(429, {"Retry-After": "3"}), OK]) as server:
        assert kind.call(limits_of(), "GET", server.url) == (200, b"ok")
    assert len(server.seen) == 2
    assert 3 <= clock.now_us() / 1e6 - NOON <= 3 + SPREAD


@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [
        ({"Retry-After": "-5"}, 0, SPREAD),  # not a number of seconds: ignored
        ({"Retry-After": "soon"}, 0, SPREAD),
        ({"Retry-After": ""}, 0, SPREAD),
        ({"Retry-After": http_date(NOON - 3600), "Date": http_date(NOON)}, 0, SPREAD),  # in the past
        ({"Retry-After": http_date(NOON + 4), "Date": http_date(NOON)}, 4, 4 + SPREAD),
        ({"Retry-After": http_date(NOON + 86404), "Date": http_date(NOON + 86400)}, 4, 4 + SPREAD),  # its clock is a day ahead
        ({"Retry-After": http_date(NOON - 86396), "Date": http_date(NOON - 86400)}, 4, 4 + SPREAD),  # a day behind
        ({"Retry-After": http_date(NOON + 4), "Date": "yesterday"}, 4, 4 + SPREAD),  # our own clock instead
        ({"Retry-After": "2.5"}, 2.5, 2.5 + SPREAD),
        ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5, 1.5 + SPREAD),
        ({"RateLimit": '"burst";r=0;t=6'}, 6, 6 + SPREAD),
        ({"RateLimit": '"burst";r=0;t=6', "Retry-After": "8"}, 8, 8 + SPREAD),  # Retry-After takes precedence
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(NOON) + 6)}, 6, 6 + SPREAD),
        ({"RateLimit": '"burst;r=0;t=6', "RateLimit-Policy": "=;,"}, 0, SPREAD),  # malformed
    ],
)
def test_waits_for_the_fields_of_a_server(clock, limits_of, fields, least, most):
    """Every form of Retry-After and of the quota fields has a defined wait; malformed or past ones wait for the backoff alone."""
    with ScriptedServer([Answer(429, fields), OK]) as server:
        assert HttpxKind().call(limits_of(), "GET", server.url)[0] == 200
    assert least <= clock.now_us() / 1e6 - NOON <= most


def test_a_huge_retry_after_gives_up_at_once(kind, clock, limits_of):
    """A wait beyond the total time is not begun: the exception has the response, and the host is blocked for an hour at most."""
    limits = limits_of(total="60s")
    with ScriptedServer([Answer(503, {"Retry-After": "99999999999"}, b"later"), OK]) as server:
        with pytest.raises(RetriesExhausted, match="no time is left") as caught:
            kind.call(limits, "GET", server.url)
        assert (caught.value.status, caught.value.reason, caught.value.attempts) == (503, "time", 1)
        assert kind.body(caught.value.response) == b"later"
        with pytest.raises(RateLimited, match=r"127\.0\.0\.1"):
            kind.call(limits, "GET", server.url)
        assert len(server.seen) == 1
        assert clock.now_us() == NOON * 1e6
        clock.advance(3600)
        assert kind.call(limits, "GET", server.url)[0] == 200


def test_unsafe_requests_are_not_repeated(kind, limits_of):
    """A refused POST is returned as it is; with an Idempotency-Key it is repeated, and a stream never is."""
    with ScriptedServer([Answer(503, body=b"busy")]) as server:
        assert kind.call(limits_of(), "POST", server.url, body=b"order") == (503, b"busy")
        assert len(server.seen) == 1
        with pytest.raises(RetriesExhausted):
            kind.call(limits_of(retry=Retry(attempts=2)), "POST", server.url, body=b"order", headers={"Idempotency-Key": "k1"})
        assert [seen.body for seen in server.seen] == [b"order"] * 3
        assert kind.call(limits_of(), "PUT", server.url, body=Parts(b"or", b"der")) == (503, b"busy")
        assert len(server.seen) == 4
        assert server.seen[-1].body == b"order"


@pytest.mark.parametrize(
    ("method", "marked", "times"), [("POST", True, 2), ("GET", False, 1), ("PATCH", None, 1), ("DELETE", None, 2)]
)
def test_marked_requests(limits_of, method, marked, times):
    """A request of httpx states whether it may be repeated; otherwise its method decides."""
    options = {} if marked is None else {"marked": marked}
    with ScriptedServer([Answer(503), OK]) as server:
        HttpxKind().call(limits_of(), method, server.url, **options)
    assert len(server.seen) == times


def test_the_last_response_is_in_the_exception(kind, clock, limits_of):
    """After the last attempt the exception has the number of attempts, the reason, and the last response with its body."""
    answers, message = [Answer(503, body=b"one"), Answer(429, body=b"two"), Answer(503, body=b"three")], "no attempt is left"
    with ScriptedServer(answers) as server, pytest.raises(RetriesExhausted, match=message) as caught:
        kind.call(limits_of(retry=Retry(attempts=3)), "GET", server.url)
    assert str(caught.value).startswith("'127.0.0.1' refused 3 attempts, the last with status 503")
    assert caught.value.attempts == 3
    assert kind.body(caught.value.response) == b"three"
    assert clock.now_us() / 1e6 - NOON <= SPREAD + 2 * SPREAD


def refusal_of(answer, kind, limits):
    """The body of the last response that a client gets from a server that always refuses."""
    with ScriptedServer([answer]) as server, pytest.raises(RetriesExhausted) as caught:
        kind.call(limits, "GET", server.url)
    return kind.body(caught.value.response)


def test_a_refusal_without_end(kind, limits_of):
    """Of the body of a refusal 64 KiB are read, compressed or not, whatever the server sends."""
    many = (b"x" * 65536,) * 8
    for headers, size in ({}, 65536), ({"Content-Encoding": "gzip"}, 0):
        assert len(refusal_of(Answer(503, headers, chunks=many), kind, limits_of(retry=Retry(attempts=2)))) == size


@pytest.mark.parametrize("times", [1, 2])
def test_a_compressed_refusal_expands_no_further(kind, limits_of, times):
    """Of a body that expands a thousandfold, or a millionfold, at most 64 KiB are kept; a short one is read."""
    short, long = b"busy", bytes(10_000_000)
    for _ in range(times):
        short, long = gzip.compress(short), gzip.compress(long)
    headers, limits = {"Content-Encoding": ", ".join(["gzip"] * times)}, limits_of(retry=Retry(attempts=2))
    assert len(refusal_of(Answer(503, headers, long), kind, limits)) <= 65536
    if times == 1:
        assert refusal_of(Answer(503, headers, short), kind, limits) == b"busy"


def test_a_refusal_of_unknown_length(kind, limits_of):
    """The body of a refusal is there also without a Content-Length."""
    assert refusal_of(Answer(503, chunks=(b"on", b"e")), kind, limits_of(retry=Retry(attempts=2))) == b"one"


def test_a_refusal_that_comes_slowly(kind):
    """A refusal whose body comes byte by byte does not hold the call longer than its total time."""

    def drip(server):
        connection = server.accept()[0]
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(600):
                connection.sendall(b"x")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(RetriesExhausted, match="time"):
            kind.call(ClientLimits(total="500ms", retry=Retry(base="10s")), "GET", f"http://127.0.0.1:{server.getsockname()[1]}")
    assert time.monotonic() - began < 10


def test_reset_connections(kind, limits_of):
    """A connection that the server resets is a failure: a GET is repeated, and the client's own exception is raised in the
    end."""
    with ScriptedServer([Answer(reset=True), Answer(reset=True), OK]) as server:
        assert kind.call(limits_of(), "GET", server.url) == (200, b"ok")
    with ScriptedServer([Answer(reset=True)]) as server:
        with pytest.raises(kind.failures) as caught:
            kind.call(limits_of(retry=Retry(attempts=3)), "GET", server.url)
        assert caught.value.__notes__ == ["limitkeeper: gave up after 3 attempts (attempts)"]
        asked = len(server.seen)
        with pytest.raises(kind.failures):
            kind.call(limits_of(), "POST", server.url)
        assert len(server.seen) == asked + 1


def test_dns_failures(kind, limits_of):
    """A host that does not resolve is a failure: repeated, and then the client's own exception."""
    with pytest.raises(kind.failures) as caught:
        kind.call(limits_of(retry=Retry(attempts=2)), "GET", "http://no-such-host.invalid/")
    assert "gave up after 2 attempts" in caught.value.__notes__[0]


def test_the_quota_is_learned(kind, clock, limits_of):
    """When the server announces that nothing is left, the next call waits for its reset."""
    limits = limits_of()
    with ScriptedServer(
        [Answer(200, {"X-RateLimit-Limit": "9", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "7"}), OK]
    ) as server:
        kind.call(limits, "GET", server.url)
        assert clock.now_us() == NOON * 1e6
        assert [(one.limit, one.remaining, one.reset_us) for one in limits.quotas("127.0.0.1")] == [(9, 0, 7_000_000)]
        kind.call(limits, "GET", server.url)
    assert clock.now_us() == (NOON + 7) * 1e6


def test_own_limits_pace_the_calls(kind, clock, limits_of):
    """Ten calls at "token bucket 5/s burst 1" start 200 ms apart, whatever the server would take."""
    limits = limits_of("token bucket 5/s burst 1")
    with ScriptedServer([OK]) as server:
        for number in range(10):
            kind.call(limits, "GET", server.url)
            assert clock.now_us() == NOON * 1e6 + number * 200_000


def test_a_wait_that_is_too_long_is_refused_at_once(kind, clock, limits_of):
    """A call whose start is later than the total time raises RateLimited, and is not sent."""
    limits = limits_of("1/min", total="10s")
    with ScriptedServer([OK]) as server:
        kind.call(limits, "GET", server.url)
        with pytest.raises(RateLimited):
            kind.call(limits, "GET", server.url)
    assert len(server.seen) == 1
    assert clock.now_us() == NOON * 1e6


def test_the_retry_budget(kind, limits_of):
    """All calls to a host share one token bucket of retries; when it is empty, a refused call gives up at once."""
    limits = limits_of(retry=Retry(attempts=10, budget="1/h burst 3"))
    with ScriptedServer([Answer(503)]) as server:
        for sent, reason in ((4, "budget"), (5, "budget")):
            with pytest.raises(RetriesExhausted) as caught:
                kind.call(limits, "GET", server.url)
            assert (len(server.seen), caught.value.reason) == (sent, reason)


def test_adaptive_throttling(kind, limits_of):
    """While a server rejects everything, most calls are not sent; some still are, to detect its recovery."""
    limits = limits_of(retry=None, throttle=2)
    with ScriptedServer([Answer(503)]) as server:
        throttled = 0
        for _ in range(60):
            try:
                assert kind.call(limits, "GET", server.url)[0] == 503
            except Throttled:
                throttled += 1
    assert throttled + len(server.seen) == 60
    assert 1 <= len(server.seen) <= 15


def test_the_caps_of_dependencies(kind, clock):
    """The same transports enforce the caps of `Dependencies` by host name, and give every place back."""
    store = MemoryStore(clock=clock)
    cap = DependencyCap("2/s", concurrent=1, max_waiting=0, timeout="2s", hosts=("127.0.0.1",))
    dependencies = Dependencies({"inventory": cap}, store)
    limits = ClientLimits(dependencies, retry=Retry(attempts=2), random=random.Random(1).random)
    with ScriptedServer([OK, OK, OK, Answer(503)]) as server:
        for _ in range(3):
            kind.call(limits, "GET", server.url)
        assert clock.now_us() == (NOON + 1) * 1e6
        with pytest.raises(RetriesExhausted):
            kind.call(limits, "GET", server.url)
    assert dependencies["inventory"].bulkhead.in_use == 0


@pytest.mark.parametrize("name", ["httpx", "httpx-async"])
def test_one_quota_through_a_server(valkey, name):
    """Clients whose limits are on one server, by its URL, have one rate: their sixth call starts a second after the first."""
    kind, url = KINDS[name], f"{valkey.url}?timeout=60s&prefix=clients-{name}:"
    clients = [ClientLimits("5/s", store=url) for _ in range(2)]
    begun, moments = time.monotonic(), []
    with ScriptedServer(lambda seen: moments.append(time.monotonic()) or OK) as server:
        for i in range(7):
            assert kind.call(clients[i % 2], "GET", server.url)[0] == 200
    assert moments[5] - begun > 0.99
    for limits in clients:
        limits.close()


@pytest.mark.parametrize("library", ["httpx", "httpx2", "requests", "aiohttp"])
def test_a_missing_library(monkeypatch, library):
    """Without its library a translator names the extra to install."""
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"limitkeeper.client.{library}")
    with pytest.raises(ConfigurationError, match=rf"pip install 'limitkeeper\[{library}\]'"):
        importlib.import_module(f"limitkeeper.client.{library}")


def test_limits_that_a_transport_made_are_closed_with_it():
    """A transport closes limits that it has made of a rate; limits that were given stay open for others."""
    limits, answer = ClientLimits("10/s"), httpx.MockTransport(lambda request: httpx.Response(200))
    for given in (limits, "10/s"):
        transport = RateLimitTransport(given, answer)
        with httpx.Client(transport=transport) as client:
            assert client.get("http://api/").status_code == 200
        assert transport.limits._closed == (given != limits)


def test_closed_limits_send_nothing(kind, limits_of):
    """After `close` a call raises ClientClosed, and the server sees nothing."""
    limits = limits_of("10/s")
    limits.close()
    with ScriptedServer([OK]) as server, pytest.raises(ClientClosed):
        kind.call(limits, "GET", server.url)
    assert server.seen == []
