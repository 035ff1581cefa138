"""Retry amplification: attempts per distinct request (client, method, path), counted in bounded memory."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from gates import MODES, asked, gate, key, policy, request, rule

from limitkeeper.algorithms.claim import Claim
from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.observe.metrics import METRICS
from limitkeeper.policy import Gate, Policy, PolicyError
from limitkeeper.policy.model import Cost, Exemption, Match, PenaltyBoxConfig, RetryAfter, RetryAmplification, Rule
from limitkeeper.policy.retry_amplification import REGISTERS
from limitkeeper.policy.settlement import refuse_response
from limitkeeper.stores.memory import MemoryStore
from limitkeeper.testing import ManualClock
from stand_ins import NOON

NAMED = {metric.name: metric for metric in METRICS}


def counting_gate(*rules: Rule, **said):
    """A gate with a fixed secret, so that the estimate is the same in every run."""
    counted = policy(*rules or (rule("all", "1000000/s"),), **{"retry_amplification": RetryAmplification(), **said})
    return Gate(counted, store=MemoryStore(clock=ManualClock(NOON)), secret=b"sixteen bytes...")


def ratio(g):
    counted = g.snapshot()
    return counted.attempts / counted.distinct_requests


@pytest.mark.parametrize("mode", MODES)
def test_repeated_requests_are_attempts_of_one(mode):
    """Three attempts of each request are a ratio of 3; another client, method or path is another request."""
    g = counting_gate()
    for _ in range(3):
        for peer in ("192.0.2.1", "192.0.2.2"):
            for line in ("GET /a", "POST /a", "GET /b"):
                asked(g, request(line, peer=peer), mode)
    assert g.snapshot().attempts == 18
    assert g.snapshot().distinct_requests == pytest.approx(6, rel=0.01)


def test_refused_requests_are_attempts():
    """Requests that a limit or the penalty box refuses are counted; exempt ones are not."""
    box = PenaltyBoxConfig(parse_limit("fixed window 3/min"), 60_000_000)
    g = counting_gate(rule("all", "fixed window 1/h"), penalty_box=box, exempt=(Exemption(match=(Match(path="/healthz"),)),))
    for _ in range(10):
        asked(g, request("GET /a"))
        asked(g, request("GET /healthz"))
    assert g.snapshot().penalty_box > 0
    assert (g.snapshot().attempts, g.snapshot().distinct_requests) == (10, 1)


@pytest.mark.parametrize("distinct", [10, 300, 5000])
def test_the_estimate_is_close_and_its_memory_bounded(distinct):
    """The estimate is within 8 % (six standard errors) of the true number, and takes 4 KiB however many requests there are."""
    g = counting_gate()
    for _ in range(2):
        for n in range(distinct):
            asked(g, request(f"GET /made-up/{n}"))
    assert g.snapshot().distinct_requests == pytest.approx(distinct, rel=0.08)
    assert ratio(g) == pytest.approx(2, rel=0.08)
    assert sys.getsizeof(g._attempts._registers) < 2 * REGISTERS


def test_a_repetition_in_another_window_is_a_request_of_its_own():
    """A client that polls once per window repeats nothing; the counters only grow."""
    g = counting_gate(retry_amplification=RetryAmplification(window_us=10_000_000))
    for _ in range(5):
        asked(g, request())
        g.clock.advance(10)
    assert (g.snapshot().attempts, g.snapshot().distinct_requests) == (5, 5)


def test_the_key_defines_a_client():
    """Users behind one address are clients of their own; requests without the key are not counted."""
    g = counting_gate(retry_amplification=RetryAmplification(key("user")))
    for user in ("ann", "bob", "ann"):
        asked(g, request(user=user))
    asked(g, request())
    asked(g, request("MESSAGE /chat", user="ann"))  # a message of a websocket repeats nothing
    assert g.snapshot().attempts == 3
    assert g.snapshot().distinct_requests == pytest.approx(2, rel=0.01)


def test_a_policy_without_it_counts_nothing():
    """No counter exists, and no series is exposed."""
    g = gate(rule("all", "1/h"))
    asked(g, request())
    asked(g, request())
    assert g._attempts is None
    assert (g.snapshot().attempts, g.snapshot().distinct_requests) == (None, None)
    assert NAMED["attempts"].collect([g.snapshot()]) == {}


def test_a_reload_keeps_the_counts():
    """Counters continue when the window changes, and when the rules change."""
    g = counting_gate()
    asked(g, request())
    g.reload(replace(g.policy, retry_amplification=RetryAmplification(window_us=5_000_000)))
    asked(g, request("GET /b"))
    g.reload(replace(g.policy, rules=()))
    asked(g, request("GET /b"))
    assert (g.snapshot().attempts, g.snapshot().distinct_requests) == (3, pytest.approx(2, rel=0.01))
    assert NAMED["attempts"].collect([g.snapshot()]) == {("limitkeeper",): 3}
    g.reload(replace(g.policy, retry_amplification=None))
    assert g.snapshot().attempts is None


def test_a_gate_of_one_rule_counts_no_request_twice():
    """A request is counted where it enters the policy, not again for a rule of a handler."""
    g = counting_gate(rule("all", "5/s"))
    asked(g, request())
    asked(g.for_rule("all"), request())
    assert g.snapshot().attempts == 1


def test_hits_of_single_rules_are_no_requests():
    """A hit of a rule under a given key has no client: no attempt is counted, and spread retries and the penalty box still
    apply."""
    box = PenaltyBoxConfig(parse_limit("fixed window 1/min"), 60_000_000)
    g = counting_gate(rule("all", "fixed window 1/min", retry_after=RetryAfter(60_000_000)), penalty_box=box)
    found = [g.hit_rule_nowait(g.compiled.rules[0], "key", 1) for _ in range(5)]
    assert [one.allowed for one in found] == [True] + [False] * 4
    assert {one.refusal.reason for one in found[1:]} == {"quota"}
    assert 60 <= found[1].refusal.retry_after == found[4].refusal.retry_after < 120
    assert g.snapshot().attempts == 0


def test_a_response_that_costs_too_much_is_one_attempt():
    """A request that is refused because of its response was counted when it arrived."""
    g = counting_gate(rule("all", "fixed window 2/min", cost=Cost("response", 1)))
    allowed = asked(g, request())
    refuse_response(g, allowed, g.store.decide([Claim(entry.named, "*", 3) for entry in allowed.entries]))
    assert (g.snapshot().attempts, g.snapshot().refused) == (1, 1)


@pytest.mark.parametrize("text", ["on", "true", "{}", "{key: ip}", "{window: 60s}"])
def test_it_is_read_from_a_file(text):
    """`on` is the default: clients by address, windows of a minute; `off` is none."""
    read = Policy.read(f"retry_amplification: {text}\nlimits: [{{name: a, limit: 5/s}}]")
    assert read.retry_amplification == RetryAmplification((("ip",),), 60_000_000)
    assert Policy.read("retry_amplification: off\nlimits: [{name: a, limit: 5/s}]").retry_amplification is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{key: usr}", "unknown identity 'usr'"),
        ("{key: everyone}", "with one key for all clients, requests of different clients would be taken for retries; write key"),
        ("{window: 2d}", "2d"),
    ],
)
def test_mistakes_are_named(text, message):
    """An unknown identity, one key for all, and a window that is too long are errors."""
    with pytest.raises(PolicyError, match=message):
        Policy.read(f"retry_amplification: {text}\nlimits: [{{name: a, limit: 5/s}}]")
