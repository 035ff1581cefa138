"""Requests that several rules delay: no other request waits for them, each pace holds, and refunded starts are used."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from gates import asked, gate, key, request, rule

from limitkeeper.policy.explain import RequestExplanation
from limitkeeper.policy.model import WAIT, Charge, Once, OnRefusal
from limitkeeper.testing import ManualClock
from virtual_time import VirtualClock

PACED = ["leaky bucket queue 10/s capacity 50", "token bucket 10/s burst 1", "sliding window log 1 per 100 ms"]
START = 1000


def waiting(seconds, places=100):
    return OnRefusal(WAIT, wait_us=round(seconds * 1e6), queue=places, per_client=places)


async def settled():
    for _ in range(100):
        await asyncio.sleep(0)


def starts(g, clock, arrivals, ended=None):
    """When each request starts, in seconds; None where it is refused. `arrivals` are times and users; a response of status
    `ended` follows each start after 50 ms."""

    async def one(at, user):
        await clock.at(round((START + at) * 1e6))
        evaluation = await g.aask(request(user=user))
        began = clock.now_us() / 1e6 - START
        if ended is not None and evaluation.allowed:
            await clock.at(clock.now_us() + 50_000)
            await evaluation.asettle(ended)
        return round(began, 3) if evaluation.allowed else None

    async def main():
        tasks = [asyncio.ensure_future(one(at, user)) for at, user in arrivals]
        await settled()
        await clock.run_until((START + 60) * 1_000_000, settled)
        return [task.result() for task in tasks]

    return asyncio.run(main())


@pytest.mark.parametrize("text", PACED)
def test_a_request_delayed_by_its_own_rule_delays_no_other_in_a_shared_one(text):
    """Requests that their user's rule delays, and that come while a shared pace refuses too, take no later start of that pace."""
    clock = VirtualClock(START)
    g = gate(
        rule("mine", "token bucket 1/s burst 1", key=key("user"), on_refusal=waiting(10)),
        rule("all", text, on_refusal=waiting(10)),
        clock=clock,
    )
    others = [(0.005 + 0.2 * i, f"u{i}") for i in range(40)]
    found = starts(g, clock, [*((0.01 * i, "busy") for i in range(9)), *others])
    assert found[:9] == pytest.approx([0, 1, 2, 3, 4, 5, 6, 7, 8], abs=0.3)
    assert max(began - at for began, (at, _) in zip(found[9:], others, strict=True)) < 0.3


@pytest.mark.parametrize("text", PACED)
def test_a_rule_that_delays_longer_is_waited_for_before_a_pace(text):
    """Requests whose start has come at a pace, and that a full window refuses then, do not start all at once when it ends."""
    clock = VirtualClock(START)
    g = gate(rule("pace", text, on_refusal=waiting(10)), rule("window", "fixed window 5/2s", on_refusal=waiting(10)), clock=clock)
    found = starts(g, clock, [(0, "a")] * 25)
    assert None not in found
    assert min(after - before for before, after in pairwise(found)) >= 0.099


@pytest.mark.parametrize("text", ["token bucket 1/s burst 1", "leaky bucket 1/s capacity 1", "sliding window log 1/s"])
def test_a_waiting_request_moves_up_when_an_outcome_does_not_count(text):
    """The refund of a request that has started is the start of the next one that waits."""
    clock = VirtualClock(START)
    g = gate(rule("failed", text, on_refusal=waiting(20), charge=Charge(statuses=((401, 401),))), clock=clock)
    found = starts(g, clock, [(0.01 * i, "a") for i in range(10)], ended=200)
    assert found == [round(0.05 * i, 3) for i in range(10)]


def test_a_waiting_request_moves_up_when_a_start_is_given_back():
    """A request that is refused at its start, by another rule that does not wait, leaves the start to the next one."""
    clock = VirtualClock(START)
    rejects = rule("other", "fixed window 1/2s", key=key("user"))
    g = gate(rule("all", "token bucket 1/s burst 1", on_refusal=waiting(20)), rejects, clock=clock)
    ask = g.aask

    async def overtaken(context):
        waits = asyncio.ensure_future(ask(context))
        await asyncio.sleep(0)
        if context.header("user") == "second":  # its window is used up while it waits
            g.hit_rule_nowait(g.compiled.rules_by_name["other"], "second", 1)
        return await waits

    g.aask = overtaken
    found = starts(g, clock, [(0, "first"), (0.1, "second"), (0.2, "third"), (0.3, "fourth")])
    assert found == [0, None, 1, 2]


def test_a_queue_that_is_polled_is_not_full():
    """A leaky bucket queue beside a limit that can't reserve refuses what does not start at once: 429, not 503."""
    g = gate(
        rule("queue", "leaky bucket queue 1/s", on_refusal=waiting(3)),
        rule("counter", "sliding window counter 1/6s", on_refusal=waiting(1)),
        clock=ManualClock(START),
    )
    assert asked(g, request()).allowed
    refused = asked(g, request())
    assert (refused.refusal.status, g.snapshot().rules[0].queue_full) == (429, 0)


def test_a_repetition_does_not_change_how_a_wait_is_explained():
    """The retry is explained as it is sent, also where a rule that can't reserve has a repetition that is not charged."""
    clock = ManualClock(60 * START)
    counted = rule("once", "sliding window counter 9/min", once=Once("idempotency-key"))
    g = gate(rule("all", "fixed window 1/10s", on_refusal=waiting(2)), counted, clock=clock)
    again = request(**{"idempotency-key": "k"})
    assert asked(g, again).allowed
    explained = RequestExplanation(g.policy, again, g.explain(again)).text()
    refused = asked(g, request(**{"idempotency-key": "k"}))
    assert explained.endswith(f"retry in {refused.refusal.retry_after} s")
