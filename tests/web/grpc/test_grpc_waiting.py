"""gRPC calls that wait: in order, as long as their client is connected."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_shop import Client, Shop, details, gate, refusal, rule, serving

from limitkeeper import FixedWindow, SlidingWindowCounter, SlidingWindowLog, TokenBucket
from limitkeeper.clock import SYSTEM, steady_us
from limitkeeper.policy import WrittenRequest
from limitkeeper.policy.model import WAIT, OnRefusal
from limitkeeper.testing import ManualClock
from limitkeeper.web.grpc.interceptors import evaluate_for_thread, waiting_loop

KINDS = ("threads", "tasks", "mixed")
Code = grpc.StatusCode
PATIENT = OnRefusal(WAIT, 10_000_000, queue=2, per_client=2)


@pytest.fixture(params=KINDS)
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Shop, Client]]]:
    with ExitStack() as stack:

        def start(gate: Any, options: Any = None) -> tuple[Shop, Client]:
            shop = Shop()
            place = stack.enter_context(serving(request.param, shop, gate))
            return shop, Client(stack.enter_context(grpc.insecure_channel(place, options=options)))

        yield start


@pytest.mark.parametrize("limit", [TokenBucket("1/s burst 1"), SlidingWindowCounter("1/s")], ids=["reserving", "asking again"])
def test_a_call_waits_its_turn(serve, held, eventually, limit):
    """Where a rule waits, a call is held back until it may pass, and then served."""
    guarded = gate(rule(limit, on_refusal=PATIENT), clock=held, waiting_threads=2)
    shop, client = serve(guarded)
    client.pay("1")
    waiting = client.method("Pay").future("2")  # without a deadline
    eventually(lambda: guarded.snapshot().rules[0].waiting == 1 and held.sleeps)
    assert shop.calls == ["Pay"]
    held.advance(2)
    assert waiting.result(60) == "paid 2"
    assert guarded.snapshot().rules[0].waiting == 0


@pytest.mark.parametrize("serve", ["threads", "tasks"], indirect=True)  # grpc.aio does not notify threads of a disconnect
def test_a_client_that_goes_away_gives_its_place_back(serve, held, eventually):
    """Cancelled while it waits: none waits any more, nothing stays charged, and the next gets its start."""
    guarded = gate(rule(TokenBucket("1/s burst 1"), on_refusal=PATIENT), clock=held, waiting_threads=2)
    shop, client = serve(guarded)
    client.pay("1")
    first = client.method("Pay").future("2", timeout=60)
    eventually(lambda: guarded.snapshot().rules[0].waiting == 1)
    second = client.method("Pay").future("3", timeout=60)
    eventually(lambda: guarded.snapshot().rules[0].waiting == 2 == len(held.sleeps))
    first.cancel()
    eventually(lambda: guarded.snapshot().rules[0].waiting == 1 and len(held.sleeps) == 3)
    held.advance(1)
    assert second.result(60) == "paid 3"
    assert shop.read == [b"1", b"3"]
    held.advance(1)
    assert client.pay("4") == "paid 4"


def test_a_deadline_ends_the_waiting(serve, held, eventually):
    """A call whose deadline passes while it waits ends with DEADLINE_EXCEEDED, and its place is free again."""
    guarded = gate(rule(TokenBucket("1/s burst 1"), on_refusal=PATIENT), clock=held, waiting_threads=2)
    shop, client = serve(guarded)
    client.pay("1")
    late = client.method("Pay").future("2", timeout=0.5)
    eventually(lambda: guarded.snapshot().rules[0].waiting == 1 or late.done())
    assert late.code() is Code.DEADLINE_EXCEEDED
    eventually(lambda: guarded.snapshot().rules[0].waiting == 0)
    held.advance(1)
    assert client.pay("3") == "paid 3"
    assert shop.read == [b"1", b"3"]


@pytest.mark.parametrize("serve", ["threads", "mixed"], indirect=True)
def test_a_call_that_ends_before_it_waits_has_no_lookup_of_its_peer(serve, held, eventually):
    """Where a call is over before its place in the queue is looked up, by its address, the server survives and serves the
    next."""
    guarded = gate(rule(TokenBucket("1/s burst 1"), on_refusal=PATIENT), clock=held, waiting_threads=2)
    _, client = serve(guarded)
    client.pay("1")
    goes_on = threading.Event()
    waiting_loop().call_soon_threadsafe(goes_on.wait)
    for _ in range(8):
        assert refusal(lambda: client.pay("2", timeout=0.2)).code() is Code.DEADLINE_EXCEEDED
    goes_on.set()
    answered = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), waiting_loop())
    answered.result(60)
    eventually(lambda: guarded.snapshot().rules[0].waiting == 0)
    held.advance(1)
    assert client.pay("3") == "paid 3"


@pytest.mark.parametrize("steps", range(8))
def test_a_call_that_is_cancelled_when_its_turn_comes_holds_no_place(steps):
    """Whatever its evaluation has done when its thread stops waiting, a call is handed over, or holds no place."""
    running = rule(TokenBucket("100/s"), concurrent=SlidingWindowLog("1/min"))
    guarded = gate(running, clock=ManualClock())
    answer = Future()

    async def cancel_after() -> None:
        evaluating = asyncio.ensure_future(evaluate_for_thread(guarded, WrittenRequest("POST", "/"), answer))
        for _ in range(steps):
            await asyncio.sleep(0)
        answer.cancel()
        await evaluating

    asyncio.run(cancel_after())
    assert guarded.ask(WrittenRequest("POST", "/")).allowed is answer.cancelled()


def test_a_full_queue_is_unavailable(serve, held, eventually):
    """A call that finds the queue full is refused at once: the service is busy, with a delay and without quotas."""
    guarded = gate(rule(TokenBucket("1/s burst 1"), on_refusal=PATIENT), clock=held, waiting_threads=2)
    _, client = serve(guarded)
    client.pay("1")
    waiting = []
    for i in (1, 2):
        waiting.append(client.method("Pay").future("2", timeout=60))
        eventually(lambda many=i: guarded.snapshot().rules[0].waiting == many == len(held.sleeps))
    error = refusal(client.pay)
    assert (error.code(), details(error)["ErrorInfo"].reason) == (Code.UNAVAILABLE, "QUEUE_FULL")
    assert "QuotaFailure" not in details(error)
    held.advance(2)
    assert [call.result(60) for call in waiting] == ["paid 2", "paid 2"]


def test_messages_wait_too(serve, held, eventually):
    """A message that must wait holds its stream back, and is served in its turn."""
    messages = rule(FixedWindow("1/s"), "messages", methods=["MESSAGE"], on_refusal=PATIENT)
    guarded = gate(messages, clock=held)
    _, client = serve(guarded)
    responses = client.method("Chat")(iter("ab"), timeout=60)
    assert next(responses) == "you said a"
    eventually(lambda: guarded.snapshot().rules[0].waiting == 1 and held.sleeps)
    held.advance(1)
    assert list(responses) == ["you said b"]


RETRIES = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "99s", "maxBackoff": "99s",
"backoffMultiplier": 1, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}"""


def test_a_channel_with_a_retry_policy_retries_at_the_retry_time(serve):
    """The client library waits exactly the delay of the refusal, whatever its own backoff, and is then served."""
    guarded = gate(rule(TokenBucket("4/s burst 1")), store=None, clock=SYSTEM)
    shop, client = serve(guarded, options=[("grpc.service_config", RETRIES)])
    began_us, paid = steady_us(), 0
    while guarded.snapshot().rules[0].refused == 0:  # on a machine that stalls, the next turn may have come by itself
        paid += 1
        assert client.pay(str(paid)) == f"paid {paid}"
    assert 250_000 * (paid - 1) - 1000 <= steady_us() - began_us < 60_000_000
    assert shop.read == [str(number).encode() for number in range(1, paid + 1)]
