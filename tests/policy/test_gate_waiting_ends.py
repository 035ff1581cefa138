"""How the wait of a request ends otherwise: by an exception of a signal handler, or because the store fails."""

from __future__ import annotations

import itertools

import pytest
from gates import asked, gate, policy, request, rule

from interrupts import interrupted_at
from limitkeeper import MemoryStore, StoreUnavailable
from limitkeeper.policy import Gate
from limitkeeper.policy.model import CLOSED, OPEN, WAIT, OnFailure, OnRefusal
from limitkeeper.testing import ManualClock
from stand_ins import WrappedStore

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
