"""gRPC calls behind a gate: the same cases for servers of threads, of tasks, and of both."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_shop import Client, Shop, details, gate, refusal, rule, serving, threads, trailing
from signed_tokens import SECRET, token

from limitkeeper import FixedWindow, MemoryStore, TokenBucket
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.identity.identify import Header
from limitkeeper.policy.identity.jwt import Jwt, Verifier
from limitkeeper.policy.model import (
    CLOSED,
    DEGRADE,
    Answer,
    Charge,
    Cost,
    Headers,
    OnFailure,
    OnRefusal,
    PenaltyBoxConfig,
    RetryAfter,
)
from limitkeeper.testing import ManualClock
from limitkeeper.web.grpc import RateLimitInterceptor
from limitkeeper.web.grpc.call import HandlerContext
from stand_ins import WrappedStore

KINDS = ("threads", "tasks", "writing", "mixed")
Code = grpc.StatusCode


@pytest.fixture(params=KINDS)
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Shop, Client]]]:
    """Serves the shop behind a gate."""
    with ExitStack() as stack:

        def start(gate: Any, options: Any = None) -> tuple[Shop, Client]:
            shop = Shop()
            place = stack.enter_context(serving(request.param, shop, gate))
            channel = stack.enter_context(grpc.insecure_channel(place, options=options))
            return shop, Client(channel)

        yield start


def test_calls_that_pass_have_what_is_left(serve, clock):
    """A call within its limit is served as usual; its initial metadata contain what is left."""
    _, client = serve(gate(rule(TokenBucket("5/s burst 10")), clock=clock))
    response, call = client.method("Pay").with_call("7", timeout=60)
    assert response == "paid 7"
    received = dict(call.initial_metadata())
    assert received["ratelimit-policy"] == '"api";q=10;w=2'
    assert "vary" not in received  # of HTTP caches
    assert received["ratelimit"] == '"api";r=9;t=2'
    assert (received["x-ratelimit-limit"], received["x-ratelimit-remaining"]) == ("10", "9")
    assert "retry-after" not in received
    assert client.list(3) == ["item 0", "item 1", "item 2"]
    assert client.upload("a", "b") == "a+b"
    assert client.chat("a", "b") == ["you said a", "you said b"]


def test_a_refused_call_has_the_exact_retry_time(serve, clock):
    """RESOURCE_EXHAUSTED with the delay to the microsecond, the rule, and the fields of HTTP; message and handler untouched."""
    words = Answer(message="Too many payments. Retry after {retry_after}s.")
    shop, client = serve(gate(rule(TokenBucket("3/s burst 1"), "payments", answer=words), clock=clock))
    client.pay()
    error = refusal(client.pay)
    assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, "Too many payments. Retry after 1s.")
    found = details(error)
    assert found["RetryInfo"].retry_delay.ToMicroseconds() == 333_334
    assert (found["ErrorInfo"].reason, found["ErrorInfo"].domain) == ("RATE_LIMITED", "limitkeeper")
    assert dict(found["ErrorInfo"].metadata) == {"rule": "payments", "limit": "1", "remaining": "0"}
    assert [violation.subject for violation in found["QuotaFailure"].violations] == ["payments"]
    received = trailing(error)
    assert (received["retry-after"], received["grpc-retry-pushback-ms"]) == ("1", "334")
    assert (received["ratelimit"], received["ratelimit-policy"]) == ('"payments";r=0;t=1', '"payments";q=1;w=1')
    assert "cache-control" not in received
    assert (shop.read, shop.calls) == ([b"1"], ["Pay"])
    clock.advance(0.333_334)
    assert client.pay() == "paid 1"


@pytest.mark.parametrize("letter", ["a", "ü", "☃"])
def test_a_long_story_still_arrives(serve, clock, letter):
    """However many limits refuse, with however long messages: a client accepts 8 KiB of metadata, and gets the retry time."""
    words = Answer(message=letter * 2000)
    rules = [rule(FixedWindow("1/h"), f"{i}-{'x' * 60}", answer=words) for i in range(40)]
    _, client = serve(gate(*rules, clock=clock))
    client.pay()
    error = refusal(client.pay)
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert set(error.details()) == {letter}
    found = details(error)
    assert found["RetryInfo"].retry_delay.ToSeconds() == 3600
    assert len(found["QuotaFailure"].violations) == 10


def test_every_shape_of_call_is_refused_before_its_handler(serve, clock):
    """Streams in either direction are refused at their start, nothing deserialised and no handler called."""
    shop, client = serve(gate(rule(FixedWindow("1/h")), clock=clock))
    client.pay()
    for call in client.all_shapes():
        assert refusal(call).code() is Code.RESOURCE_EXHAUSTED
    assert (shop.read, shop.calls) == ([b"1"], ["Pay"])


def test_rules_match_paths_of_methods(serve, clock):
    """A rule for one method leaves the others alone; its path is "/package.Service/Method"."""
    _, client = serve(gate(rule(FixedWindow("1/h"), match="/shop.Shop/Pay", methods=["POST"]), clock=clock))
    client.pay()
    assert refusal(client.pay).code() is Code.RESOURCE_EXHAUSTED
    assert client.list(1) == ["item 0"]


def test_metadata_identify_callers(serve, clock):
    """Metadata are headers: one caller's limit is not another's. Binary metadata are not."""
    identify = {"tenant": Header("x-tenant"), "secret": Header("x-secret-bin")}
    rules = [rule(FixedWindow("1/h"), key=(("tenant",),)), rule(FixedWindow("1/h"), "binary", key=(("secret",),))]
    _, client = serve(gate(*rules, clock=clock, identify=identify))
    for tenant in ("acme", "apex"):
        client.pay(metadata=(("x-tenant", tenant), ("x-secret-bin", b"1")))
    assert refusal(lambda: client.pay(metadata=(("x-tenant", "acme"),))).code() is Code.RESOURCE_EXHAUSTED
    client.pay()


def test_the_peer_is_the_client(serve, clock):
    """Callers are distinguished by the address of their connection."""
    shop, client = serve(gate(rule(FixedWindow("5/h"), key=(("ip",),)), clock=clock))
    client.pay()
    assert shop.evaluations[0].keys == ["127.0.0.1"]


def test_messages_of_a_stream_are_limited_where_a_rule_names_them(serve, clock):
    """A rule for MESSAGE admits so many messages, and ends the stream at the next, undeserialised."""
    guarded = gate(rule(FixedWindow("3/h"), "messages", "/shop.Shop/Chat", ["MESSAGE"]), clock=clock)
    shop, client = serve(guarded)
    assert client.chat("a", "b") == ["you said a", "you said b"]
    found = []

    def listen() -> None:
        for response in client.method("Chat")(iter("cde"), timeout=60):
            found.append(response)  # noqa: PERF402 — what came before the end stays

    error = refusal(listen)
    assert (error.code(), trailing(error)["retry-after"]) == (Code.RESOURCE_EXHAUSTED, "3600")
    assert found == ["you said c"]
    assert shop.read == [b"a", b"b", b"c"]
    assert client.upload("x", "y", "z", "u") == "x+y+z+u"
    (tally,) = guarded.snapshot().rules
    assert (tally.passed, tally.refused) == (3, 1)


@pytest.mark.parametrize("serve", ["mixed"], indirect=True)
def test_a_refusal_follows_a_response_that_is_still_on_its_way(serve, clock, monkeypatch):
    """A client gets the responses before it, and then the status; `abort`, which fails while one is being sent, is not called."""
    monkeypatch.setattr(HandlerContext, "abort", lambda *arguments: pytest.fail("a response may still be on its way"))
    guarded = gate(rule(FixedWindow("2/h"), "messages", methods=["MESSAGE"]), clock=clock)
    _, client = serve(guarded)
    responses = client.method("Chat")(iter("abc"), timeout=60)
    assert [next(responses), next(responses)] == ["you said a", "you said b"]
    error = refusal(lambda: next(responses))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert trailing(error)["retry-after"] == "3600"


def test_messages_keep_the_identity_of_their_call(serve, clock):
    """A token that expires while its stream is open leaves the limit of its user in force."""
    identify = {"user": Jwt("sub", Verifier(SECRET, ("HS256",), now_us=clock.now_us))}
    talk = {"name": "talk", "match": "MESSAGE /shop.Shop/Chat", "key": "user", "limit": "fixed window 2/h"}
    _, client = serve(Gate(Policy.of(identify=identify, limits=[talk]), store=MemoryStore(clock=clock)))
    header = token(sub="ann", exp=int(clock.now_us() / 1e6) + 60)["Authorization"]
    words: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    words.put("a")
    answers = client.method("Chat")(iter(words.get, None), metadata=(("authorization", header),), timeout=60)
    assert next(answers) == "you said a"
    clock.advance(61)
    for word in "bc":
        words.put(word)
    assert next(answers) == "you said b"
    assert refusal(lambda: next(answers)).code() is Code.RESOURCE_EXHAUSTED
    words.put(None)


def test_a_degrade_handler_answers_instead(serve, clock, request):
    """Where a rule degrades, a behaviour of the same shape answers; the status is OK and there is no retry time."""
    in_threads = request.node.callspec.params["serve"] in ("threads", "mixed")

    def cheap(request: str, context: Any) -> str:
        return f"later {request}"

    async def acheap(request: str, context: Any) -> str:
        return f"later {request}"

    degrade = OnRefusal(DEGRADE, handler=cheap if in_threads else acheap)
    shop, client = serve(gate(rule(FixedWindow("1/h"), on_refusal=degrade), clock=clock))
    assert client.pay("1") == "paid 1"
    response, call = client.method("Pay").with_call("2", timeout=60)
    assert (response, shop.calls) == ("later 2", ["Pay"])
    assert "retry-after" not in dict(call.initial_metadata())
    assert dict(call.initial_metadata())["ratelimit"] == '"api";r=0;t=3600'


def test_current_is_the_passage_of_the_call(serve, clock):
    """In a handler, and in every step of a stream, `current()` is its evaluation."""
    shop, client = serve(gate(rule(FixedWindow("5/h")), clock=clock))
    client.pay()
    client.list(2)
    first, *rest = shop.evaluations
    assert first.decision.remaining == 4
    assert len(rest) == 3
    assert {id(evaluation) for evaluation in rest} == {id(rest[0])}
    assert rest[0].decision.remaining == 3


def test_only_outcomes_that_count_are_charged(serve, clock):
    """charge: 401 gives back calls with another status: a successful call costs nothing, an unauthenticated one does."""
    guarded = gate(rule(FixedWindow("2/h"), charge=Charge(((401, 401),))), clock=clock)
    _, client = serve(guarded)
    for _ in range(5):
        client.pay()
    for _ in range(2):
        assert refusal(lambda: client.pay("stranger")).code() is Code.UNAUTHENTICATED
    assert refusal(client.pay).code() is Code.RESOURCE_EXHAUSTED


def test_outcomes_are_counted_as_http_statuses(serve, clock):
    """The status of handlers is counted by its class in HTTP: OK, an abort, a set code, an exception."""
    guarded = gate(rule(FixedWindow("100/h")), clock=clock)
    _, client = serve(guarded)
    client.pay()
    client.list(2)
    assert refusal(lambda: client.pay("stranger")).code() is Code.UNAUTHENTICATED
    assert refusal(lambda: client.pay("nothing")).code() is Code.NOT_FOUND
    assert refusal(lambda: client.pay("fail")).code() is Code.UNKNOWN
    (tally,) = guarded.snapshot().rules
    assert tally.statuses == {"2xx": 2, "4xx": 2, "5xx": 1}


def test_the_size_of_responses_can_be_the_cost(serve, clock):
    """cost: response charges the serialised bytes of all responses when they are known."""
    guarded = gate(rule(FixedWindow("100/h"), cost=Cost("response", per=1)), clock=clock)
    _, client = serve(guarded)
    client.list(5)  # five times "item n"
    _, call = client.method("Pay").with_call("", timeout=60)  # "paid "
    assert dict(call.initial_metadata())["x-ratelimit-remaining"] == str(100 - 35)
    _, call = client.method("Pay").with_call("", timeout=60)
    assert dict(call.initial_metadata())["x-ratelimit-remaining"] == str(100 - 40)


def test_a_response_whose_outcome_does_not_count_is_sent_whatever_its_size(serve, clock):
    """A rule that charges failed calls refuses no response to a successful one."""
    counted = rule(FixedWindow("3/h"), cost=Cost("response", per=1), charge=Charge(((401, 401),)))
    _, client = serve(gate(counted, clock=clock))
    assert [client.pay("a bicycle") for _ in range(4)] == ["paid a bicycle"] * 4


def test_a_handlers_own_metadata_stay(serve, clock):
    """A handler's own metadata arrive together with ours."""
    _, client = serve(gate(rule(FixedWindow("5/h")), clock=clock))
    _, call = client.method("Pay").with_call("metadata", timeout=60)
    first = dict(call.initial_metadata())
    assert (first["x-shop"], first["x-ratelimit-remaining"]) == ("open", "4")
    assert dict(call.trailing_metadata())["x-till"] == "7"


def test_silence_on_success_sends_nothing(serve, clock):
    """With success: a call that passes always has metadata of ours."""
    _, client = serve(gate(rule(FixedWindow("5/h")), clock=clock, headers=Headers(success="never")))
    _, call = client.method("Pay").with_call("1", timeout=60)
    assert not [name for name, _ in call.initial_metadata() if "ratelimit" in name]


def test_a_call_that_can_never_pass_must_not_be_retried(serve, clock):
    """A cost above the limit gets no RetryInfo, and a pushback that stops the client's retries."""
    _, client = serve(gate(rule(FixedWindow("5/h"), cost=Cost(units=6)), clock=clock))
    error = refusal(client.pay)
    assert "RetryInfo" not in details(error)
    assert "retry-after" not in trailing(error)
    assert trailing(error)["grpc-retry-pushback-ms"] == "-1"


def test_a_store_that_fails_closed_is_unavailable(serve, store):
    """Where the service is at fault the status is UNAVAILABLE, with a delay and without quotas."""
    failing = WrappedStore(store, local=True)
    failing.failing = {"decide", "decide_one"}
    _, client = serve(gate(rule(FixedWindow("5/h"), on_failure=OnFailure(CLOSED)), store=failing))
    error = refusal(client.pay)
    assert error.code() is Code.UNAVAILABLE
    assert set(details(error)) == {"RetryInfo", "ErrorInfo"}
    assert details(error)["ErrorInfo"].reason == "STORE_UNAVAILABLE"


def test_spread_retries_reach_the_client(serve, clock):
    """RetryInfo and the pushback carry the spread moment, which is never earlier than the exact one."""
    guarded = gate(rule(FixedWindow("1/min"), retry_after=RetryAfter(3600_000_000)), clock=clock)
    _, client = serve(guarded)
    client.pay()
    error = refusal(client.pay)
    delay_us = details(error)["RetryInfo"].retry_delay.ToMicroseconds()
    assert 60_000_000 <= delay_us < 3660_000_000
    assert delay_us > 60_000_000  # one in 3.6 billion would be exact
    sent = trailing(error)
    assert sent["grpc-retry-pushback-ms"] == str(-(-delay_us // 1000))
    assert int(sent["retry-after"]) == delay_us // 1_000_000
    assert error.details() == f"Too many requests. Retry after {delay_us // 1_000_000}s."


def test_a_client_in_the_penalty_box_is_refused(serve, clock):
    """A client that is refused too often is refused without a call of the store, until its time is over."""
    shut = PenaltyBoxConfig(FixedWindow("2/min"), 60_000_000)
    guarded = gate(rule(FixedWindow("1/h"), key=(("ip",),)), clock=clock, penalty_box=shut)
    _, client = serve(guarded)
    client.pay()
    for _ in range(3):
        assert details(refusal(client.pay))["ErrorInfo"].reason == "RATE_LIMITED"
    error = refusal(client.pay)
    assert (error.code(), details(error)["ErrorInfo"].reason) == (Code.RESOURCE_EXHAUSTED, "PENALTY_BOX")
    assert details(error)["RetryInfo"].retry_delay.seconds == 3600


def test_what_cannot_be_read_ends_as_without_a_guard(serve, clock):
    """A message that can't be deserialised is an internal error, a method without a handler is unimplemented."""
    shop, client = serve(gate(rule(FixedWindow("5/h")), clock=clock))
    error = refusal(lambda: client.pay("rubbish"))
    assert (error.code(), error.details()) == (Code.INTERNAL, "Exception deserializing request!")
    assert refusal(lambda: client.method("Steal")("x", timeout=60)).code() is Code.UNIMPLEMENTED
    assert shop.calls == []


def test_a_reload_holds_from_the_next_call_on(serve, clock):
    """A new version of the policy is followed, its rules for messages too."""
    guarded = gate(rule(FixedWindow("100/h")), clock=clock)
    _, client = serve(guarded)
    client.chat("a", "b")
    guarded.reload(gate(rule(FixedWindow("1/h"), "messages", methods=["MESSAGE"]), clock=clock).policy)
    assert refusal(lambda: client.chat("a", "b")).code() is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("serve", [kind for kind in KINDS if kind != "mixed"], indirect=True)
def test_a_client_that_leaves_a_stream_is_settled(serve, eventually):
    """A stream that its client abandons is counted and settled as cancelled by the client.

    (grpc.aio never releases a plain generator whose client is gone, guarded or not.)"""
    guarded = gate(rule(FixedWindow("1000000/h"), charge=Charge(((499, 499),))), clock=ManualClock(0))
    _, client = serve(guarded)
    stream = client.method("List")("2000", timeout=60)
    assert next(stream) == "item 0"
    stream.cancel()
    eventually(lambda: guarded.snapshot().rules[0].statuses == {"4xx": 1})
    assert guarded.snapshot().rules[0].given_back == 0


class UntilOver(grpc.ServerInterceptor):
    """Holds a call back until its client has disconnected."""

    def __init__(self, eventually: Any) -> None:
        self.eventually = eventually
        self.responses: list[Any] = []

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)

        def respond(request: bytes, context: Any) -> Any:
            self.eventually(lambda: not context.is_active())
            self.responses.append(handler.unary_unary(request, context))
            return b""

        return grpc.unary_unary_rpc_method_handler(respond)


def test_a_call_that_is_over_before_its_evaluation_is_not_handled(clock, eventually):
    """It may have no address any more: no handler runs, and no key is charged, nor that of clients without an address."""
    guarded = gate(rule(FixedWindow("1/h"), key=(("ip",),)), clock=clock)
    shop, held_back = Shop(), UntilOver(eventually)
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[held_back, RateLimitInterceptor(guarded)])
    server.add_generic_rpc_handlers((shop.handlers(threads(shop)),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert refusal(lambda: Client(channel).pay("1", timeout=1)).code() is Code.DEADLINE_EXCEEDED
        eventually(lambda: held_back.responses == [b""])
    server.stop(None).wait(60)
    assert (shop.calls, guarded.snapshot().requests) == ([], 0)
