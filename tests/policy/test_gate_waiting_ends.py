"""How the wait of a request ends otherwise: by an exception of a signal handler, a store that fails, or a cancellation."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from gates import asked, gate, policy, request, rule

from interrupts import interrupted_at
from limitkeeper import MemoryStore, SlidingWindowLog, StoreUnavailable
from limitkeeper.algorithms.claim import Claim
from limitkeeper.policy import Gate
from limitkeeper.policy.model import CLOSED, OPEN, WAIT, OnFailure, OnRefusal
from limitkeeper.rate import Rate
from limitkeeper.testing import ManualClock
from stand_ins import HeldClock, WrappedStore

LONG = OnRefusal(WAIT, wait_us=60_000_000)
WAITS = OnRefusal(WAIT, wait_us=2_000_000, queue=2, per_client=2)


@pytest.mark.parametrize("text", ["1/s burst 1", "sliding window counter 1/s"])
def test_a_request_that_a_signal_interrupts_leaves_its_place_and_its_thread(text):
    """At whatever moment the handler raises: as many requests may wait afterwards as before."""
    for moment in itertools.count(1):
        g = gate(rule("all", text, on_refusal=WAITS))
        asked(g, request())
        interrupted = interrupted_at(moment, lambda gate=g: asked(gate, request()))
        assert g.snapshot().rules[0].waiting == 0, moment
        g.clock.advance(10)
        assert [asked(g, request()).allowed for _ in range(3)] == [True] * 3, moment
        if not interrupted:
            break


class FailsLater(WrappedStore):
    """A remote store that fails once a time has come."""

    fails_at_us = 1 << 62

    def decide(self, *args, **options):
        if self.clock.now_us() >= self.fails_at_us:
            raise StoreUnavailable("decide: no answer")
        return super().decide(*args, **options)


@pytest.mark.parametrize(("action", "allowed"), [(OPEN, True), (CLOSED, False)])
def test_a_store_that_fails_while_a_request_waits_by_asking_again_is_answered_by_on_failure(action, allowed):
    """When the request asks next, and not after the rest of its wait."""
    clock = ManualClock(1000)
    store = FailsLater(MemoryStore(clock=clock))
    g = Gate(
        policy(rule("all", "sliding window counter 1 per 400 ms", on_refusal=WAITS, on_failure=OnFailure(action))),
        store=store,
        clock=clock,
    )
    assert asked(g, request())
    began_us = clock.now_us()
    store.fails_at_us = began_us + 1
    answer = asked(g, request())
    assert (answer.allowed, answer.decision) == (allowed, None)
    assert answer.wait_us == clock.now_us() - began_us <= 800_000
    assert len(store.calls) == 3  # those that it answered


class AnswersLater(WrappedStore):
    """A remote store whose replies take some iterations of the loop."""

    def answers_within(self, budget_us):
        return True

    async def adecide(self, *args, **options):
        decision = self.decide(*args, **options)
        for _ in range(3):
            await asyncio.sleep(0)
        return decision


@pytest.mark.parametrize("iterations", range(30))
def test_a_cancelled_request_leaves_the_queue_also_beside_requests_at_a_time(iterations):
    """Before, while and after the remote store decides: no place and no start is left to it, and it counts as no refusal."""
    at_a_time = rule("running", (), concurrent=SlidingWindowLog(Rate(5, 60_000_000)))

    async def main():
        clock = HeldClock(1000)
        store = AnswersLater(MemoryStore(clock=clock))
        g = Gate(policy(rule("all", "1/min burst 1", on_refusal=LONG), at_a_time), store=store, clock=clock)
        assert (await g.aask(request())).allowed
        asking = asyncio.ensure_future(g.aask(request()))
        for _ in range(iterations):
            await asyncio.sleep(0)
        asking.cancel()
        for _ in range(60):
            await asyncio.sleep(0)
        assert asking.cancelled()
        counts = g.snapshot().rules[0]
        assert (counts.waiting, counts.refused) == (0, 0)
        claims = [Claim(one.default_entries[0].named, "*", 0) for one in g.compiled.rules]
        left = (await g.store.adecide(claims, commit=False)).decisions
        assert [part.remaining for part in left] == [0, 4]
        assert left[0].reset_after == 60.0

    asyncio.run(main())
