"""LLM calls: requests and tokens per minute together, estimates that are settled, streams, for both wire formats."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import zlib
from decimal import Decimal

import httpx
import pytest
from client_kinds import CONTEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_server import LLMServer
from token_limits import Tokens

from effort import scaled
from limitkeeper import AsyncLimiter, ConfigurationError, FixedWindow, MemoryStore, RedisStore, SlidingWindowLog
from limitkeeper.client import BudgetSpent, ClientLimits, Retry, SpendGuard, TokenMeter
from limitkeeper.client import httpx as our_httpx
from limitkeeper.client.llm import MAX_BODY, MAX_LINE
from limitkeeper.concurrency import Dependencies
from stand_ins import NOON

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def request(path, stream=False, **more):
    question = {"model": "m", "max_tokens": 300, "stream": stream, **more}
    if path == "/v1/chat/completions" and stream:
        question["stream_options"] = {"include_usage": True}
    text = "hello " * 40
    return question | ({"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]})


def sync_call(limits, url, body, read=True):
    transport = our_httpx.RateLimitTransport(limits, httpx.HTTPTransport(verify=CONTEXT))
    with httpx.Client(transport=transport, trust_env=False) as client, client.stream("POST", url, json=body) as response:
        return response.read() if read else next(response.iter_raw())


def async_call(limits, url, body, read=True):
    async def main():
        transport = our_httpx.AsyncRateLimitTransport(limits, httpx.AsyncHTTPTransport(verify=CONTEXT))
        client = httpx.AsyncClient(transport=transport, trust_env=False)
        async with client, client.stream("POST", url, json=body) as response:
            return await response.aread() if read else await anext(response.aiter_raw())

    return asyncio.run(main())


@pytest.fixture(params=[sync_call, async_call], ids=["sync", "async"])
def call(request):
    return request.param


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
def test_the_usage_of_a_response_is_settled(call, clock, path, stream):
    """A call reserves its estimate, and the usage that the response reports stays charged."""
    tokens = Tokens(clock)
    with LLMServer(clock, compress=True) as server:
        for number in (1, 2):
            call(tokens.limits, server.url + path, request(path, stream))
            used = sum(map(sum, server.answered))
            assert tokens.left() == {"requests": 100 - number, "tokens": 10000 - used}


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_not_read_to_its_end_keeps_the_estimate(call, clock, path):
    """A stream that the caller closes early has used an unknown number of tokens: the estimate stays charged."""
    tokens = Tokens(clock)
    body = request(path, stream=True)
    with LLMServer(clock) as server:
        call(tokens.limits, server.url + path, body, read=False)
        size = len(server.seen[0].body)
    assert tokens.left()["tokens"] == 10000 - (-(-size // 4) + 300)


def test_a_response_without_usage_keeps_the_estimate(call, clock):
    """An OpenAI stream without the usage option reports no usage: the estimate stays charged."""
    tokens = Tokens(clock)
    body = request("/v1/chat/completions", stream=True)
    del body["stream_options"]
    with LLMServer(clock) as server:
        call(tokens.limits, server.url + "/v1/chat/completions", body)
        size = len(server.seen[0].body)
    assert tokens.left()["tokens"] == 10000 - (-(-size // 4) + 300)


def test_requests_and_tokens_per_minute_together(call, clock):
    """Forty calls stay under both quotas of a server that enforces them: none is refused, and tokens are the binding limit."""
    tokens = Tokens(clock, {"requests": "20/min", "tokens": "2000/min"}, total="1h")
    with LLMServer(clock, requests=20, tokens=2000) as server:
        for _ in range(40):
            call(tokens.limits, server.url + "/v1/messages", request("/v1/messages"))
    assert (server.refused, len(server.answered)) == (0, 40)
    used = sum(map(sum, server.answered))
    minutes = (clock.now_us() / 1e6 - NOON) / 60
    assert used / 2000 - 1 <= minutes <= used / 2000 * 1.5  # the reserve of an estimate costs some of the rate


def test_a_refused_call_costs_no_tokens(call, clock):
    """A refusal by the server gives the tokens back and keeps the request; the retry after its time is charged once."""
    tokens = Tokens(clock, retry=Retry(methods={"POST"}), total="5min", random=lambda: 0.0)
    with LLMServer(clock, requests=1) as server:
        call(tokens.limits, server.url + "/v1/messages", request("/v1/messages"))
        clock.advance(30)  # 30 s of the server's window are left
        call(tokens.limits, server.url + "/v1/messages", request("/v1/messages"))
    assert server.refused == 1
    assert clock.now_us() / 1e6 - NOON >= 60
    assert tokens.left() == {"requests": 98, "tokens": 10000 - sum(server.answered[1])}


def test_a_call_that_was_never_sent_costs_nothing(call, clock):
    """A connection that is refused gives everything back, the request too."""
    tokens = Tokens(clock, retry=None)
    with pytest.raises(httpx.ConnectError):
        call(tokens.limits, "http://127.0.0.1:9/v1/messages", request("/v1/messages"))
    assert tokens.left() == {"requests": 100, "tokens": 10000}


def test_input_and_output_tokens_apart(call, clock):
    """Providers with separate quotas for input and output have a limit for each."""
    tokens = Tokens(clock, {"input_tokens": SlidingWindowLog("1000/min"), "output_tokens": SlidingWindowLog("1000/min")})
    with LLMServer(clock) as server:
        call(tokens.limits, server.url + "/v1/messages", request("/v1/messages"))
    assert tokens.left() == {"input_tokens": 1000 - server.answered[0][0], "output_tokens": 1000 - 40}


def test_money_per_day(call, clock):
    """A spend guard reserves the estimated price and settles the real one; its hard stop sends nothing."""
    guard = SpendGuard("0.02", store=MemoryStore(clock=clock), unit="0.000001")
    tokens = Tokens(clock, spend=guard, meter=TokenMeter(prices=("3", "15")))
    with LLMServer(clock) as server:
        call(tokens.limits, server.url + "/v1/messages", request("/v1/messages"))
        used, written = server.answered[0]
        with guard.spend(0):
            pass
        cost = (Decimal(used) * 3 + Decimal(written) * 15) / 1_000_000
        with contextlib.suppress(BudgetSpent):
            while True:
                call(tokens.limits, server.url + "/v1/messages", request("/v1/messages"))
    spent = len(server.answered) * cost
    assert Decimal("0.02") - Decimal("0.006") < spent <= Decimal("0.02")


class Cut(httpx.AsyncBaseTransport):
    """Cancels the task of a call when `at` comes: the header of its response, or the end of its body."""

    at = ""

    def __init__(self, transport):
        self.transport = transport

    async def handle_async_request(self, request):
        response = await self.transport.handle_async_request(request)
        if self.at == "header":
            asyncio.current_task().cancel()
        if self.at == "end":
            stream, self.at = response.stream, ""
            response.stream = CutStream(stream)
        return response

    async def aclose(self):
        await self.transport.aclose()


class CutStream(httpx.AsyncByteStream):
    def __init__(self, stream):
        self.stream = stream

    def __aiter__(self):
        return self.stream.__aiter__()

    async def aclose(self):
        await self.stream.aclose()
        asyncio.current_task().cancel()


DAY = {"requests": FixedWindow("100/d"), "tokens": FixedWindow("10000/d")}


def test_a_call_that_is_cancelled_while_it_settles_settles_all_that_it_holds(valkey, clock):
    """A task that is cancelled at the end of a response settles its budget, and its limits too."""

    async def main(url):
        store = RedisStore(valkey.url, prefix="cancelled-settle")
        guard = SpendGuard("1", store=store, unit="0.000001", name="money")
        limits = ClientLimits(DAY, store, "llm", meter=TokenMeter(prices=("3", "15")), spend=guard)
        cut = Cut(httpx.AsyncHTTPTransport(verify=CONTEXT))
        cut.at = "end"
        async with httpx.AsyncClient(transport=our_httpx.AsyncRateLimitTransport(limits, cut), trust_env=False) as client:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(client.post(url + "/v1/messages", json=request("/v1/messages", stream=True)))
        peeked = await AsyncLimiter(DAY, store, "llm").peek("127.0.0.1", cost=0)
        spent = await AsyncLimiter({"money": guard.limit}, store, "money").peek("money", cost=0)
        await store.aclose()
        return [one.limit - one.remaining for one in peeked.decisions], spent.limit - spent.remaining

    with LLMServer(clock) as server:
        settled, spent = asyncio.run(main(server.url))
    used, written = server.answered[0]
    assert (settled, spent) == ([1, used + written], 3 * used + 15 * written)


def test_a_call_that_is_cancelled_while_it_settles_frees_its_connection(valkey, clock):
    """A refused response whose task is cancelled before it is read keeps no connection of the client's pool."""

    async def main(url):
        store = RedisStore(valkey.url, prefix="cancelled-refusal")
        limits = ClientLimits(DAY, store, "llm", meter=TokenMeter(), retry=None)
        cut = Cut(httpx.AsyncHTTPTransport(verify=CONTEXT, limits=httpx.Limits(max_connections=1)))
        async with httpx.AsyncClient(transport=our_httpx.AsyncRateLimitTransport(limits, cut), trust_env=False) as client:
            await client.post(url + "/v1/messages", json=request("/v1/messages"))
            cut.at = "header"
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(client.post(url + "/v1/messages", json=request("/v1/messages")))
            cut.at = ""
            refused = await client.post(url + "/v1/messages", json=request("/v1/messages"), timeout=httpx.Timeout(60, pool=1))
        await store.aclose()
        return refused.status_code

    with LLMServer(clock, requests=1) as server:
        assert asyncio.run(main(server.url)) == 429


def test_a_response_that_was_read_already(clock):
    """A response of a cache or a test, which has no stream to follow, is settled at once."""
    tokens = Tokens(clock)
    answer = httpx.MockTransport(lambda request: httpx.Response(200, json={"usage": {"input_tokens": 5, "output_tokens": 7}}))
    with httpx.Client(transport=our_httpx.RateLimitTransport(tokens.limits, answer)) as client:
        client.post("http://127.0.0.1/v1/messages", json=request("/v1/messages"))
    assert tokens.left()["tokens"] == 10000 - 12


# Estimates and readers


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", (0, 0)),
        (b'{"max_tokens": 7}', (5, 7)),
        (b'{"max_completion_tokens": 7, "n": 3}', (9, 21)),
        (b'{"max_output_tokens": 9}', (6, 9)),
        (b"not json", (2, 50)),
        (b'{"max_tokens": -7}', (5, 50)),
        (b'{"max_tokens": true}', (5, 50)),
        (b"[" * 4000, (1000, 50)),
        (b'{"max_tokens": 7, "x": "' + b"y" * (1 << 20), (262150, 50)),
    ],
)
def test_the_rule_of_the_estimate(body, expected):
    """The estimate is a quarter of the body's bytes and the bound of the output, or the default, whatever the body holds."""
    amounts = TokenMeter(default_output=50).estimate(body)
    assert (amounts["input_tokens"], amounts["output_tokens"]) == expected
    assert amounts["tokens"] == sum(expected)


def test_an_estimate_of_ones_own():
    """A function of the body, such as a tokenizer, replaces the rule for the input."""
    assert TokenMeter(estimate=lambda body: 3).estimate(b'{"max_tokens": 7}')["tokens"] == 10


def read(body, content_type="application/json", encoding="", size=None):
    reader = TokenMeter().reader(content_type, encoding)
    for start in range(0, len(body), size or max(1, len(body))):  # all at once, or in parts
        reader.feed(body[start : start + (size or len(body))])
    found = reader.used(complete=True)
    return None if found is None else found["tokens"]


USAGE = json.dumps({"usage": {"prompt_tokens": 5, "completion_tokens": 7}}).encode()


@settings(max_examples=scaled(100))
@given(st.integers(1, 40), st.sampled_from(["", "gzip", "deflate"]))
def test_chunks_of_any_size(size, encoding):
    """The usage is found however the body is split, plain or compressed."""
    pack = {"": bytes, "gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    stream = b"event: x\r\ndata: {}\r\n\r\ndata: " + USAGE + b"\r\n\r\ndata: [DONE]\r\n\r\n"
    assert read(pack(USAGE), encoding=encoding, size=size) == 12
    assert read(pack(stream), "text/event-stream; charset=utf-8", encoding, size) == 12


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"usage": 5}',
        b'{"usage": {"prompt_tokens": -5}}',
        b'{"usage": {"prompt_tokens": 1e99}}',
        b'{"usage": {"prompt_tokens": ' + b"9" * 5000 + b"}}",
        b"[" * 100_000,
        b'{"usage": {"prompt_tokens": 5}}' + b" " * MAX_BODY,
        b"\xff\xfe",
    ],
)
def test_bodies_without_a_usage(body):
    """A body that is malformed, implausible or too large gives no usage, and the estimate stays."""
    assert read(body) is None


def test_a_reader_keeps_a_bounded_part():
    """Lines without end, and compressed bodies that expand without end, are not kept; the stream can still be read."""
    reader = TokenMeter().reader("text/event-stream", "")
    for _ in range(100):
        reader.feed(b"x" * MAX_LINE)
        assert len(reader._kept) <= MAX_LINE
    reader.feed(b"\ndata: " + USAGE + b"\n")
    assert reader.used(complete=True)["tokens"] == 12
    assert read(b"not gzip", encoding="gzip") is None
    assert read(USAGE, encoding="br") is None
    bomb = TokenMeter().reader("text/event-stream", "gzip")
    bomb.feed(gzip.compress((b"x" * 999 + b"\n") * 10_000))
    assert bomb._inflatable > -2 * MAX_LINE
    assert bomb.used(complete=True) is None


def test_a_limit_that_the_meter_does_not_measure_is_an_error():
    """Such a limit would count calls, and leave the tokens unlimited."""
    with pytest.raises(
        ConfigurationError, match="nothing called 'tpm'; name it one of input_tokens, output_tokens, requests, tokens"
    ):
        ClientLimits({"requests": "10/min", "tpm": "50/min"}, meter=TokenMeter())


def test_dependencies_with_a_meter():
    """The names of dependencies are not units of a meter: both may be given."""
    limits = ClientLimits(Dependencies({"llm": "10/s"}), meter=TokenMeter(), spend=SpendGuard("1"))
    assert limits.waiting() == 0


@pytest.mark.parametrize("prices", ["3", ("3",), {"input": "3"}, 3, "315", ("3", "15", "1")])
def test_prices_are_two(prices):
    """Other types are refused with a message that names the right form."""
    with pytest.raises(ConfigurationError, match=r"prices: expected two prices \(input, output\), got "):
        TokenMeter(prices=prices)
