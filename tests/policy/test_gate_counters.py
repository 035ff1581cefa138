"""A gate's counters: durations, admitted requests, and nothing counts twice."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from gates import MODES, asked, gate, key, passes, request, rule

from limitkeeper.clock import steady_us
from limitkeeper.policy.model import SHADOW, WAIT, Capacity, Charge, OnRefusal, Tiers
from limitkeeper.policy.refusal import Refusal
from limitkeeper.rate import Rate
from limitkeeper.testing import ManualClock


@pytest.mark.parametrize("ago_us", [-1_000, *range(9), 40, 300, 600, 1_700, 9_000, 30_000, 300_000, 1_500_000])
def test_a_decision_is_counted_in_the_bucket_of_its_time(ago_us):
    """A decision is in the first bucket whose end it does not exceed, and in the sum with its time; time never goes back."""
    g = gate(rule("all", "9/s"))
    evaluation = asked(g, request())
    for _ in range(20):
        before = g.snapshot().decisions
        evaluation.began_us = steady_us() - ago_us
        g._count_refused(evaluation, Refusal("quota", 429, 1, ""))
        after = g.snapshot().decisions
        took_us = after.sum - before.sum
        assert took_us >= max(0, ago_us)
        counted = [new - old for new, old in zip(after.counts, before.counts, strict=True)]
        assert (counted.index(1), sum(counted)) == (bisect_left(after.bounds, took_us), 1)


@pytest.mark.parametrize("ago_ms", [-1_000, 0, 7, 70, 700, 900, 2_500, 9_000, 60_000])
def test_a_response_is_counted_in_the_bucket_of_its_time(ago_ms):
    """Response times go by the request's whole time, once for every rule, whatever the number of its limits."""
    g = gate(rule("two", "token bucket 9/s burst 9; fixed window 9/min"), rule("one", "9/s"))
    evaluation = asked(g, request())
    assert [received.responses.sum for received in g.snapshot().rules] == [0, 0]
    evaluation.began_us = steady_us() - ago_ms * 1_000
    evaluation.count_response(200)
    for received in g.snapshot().rules:
        assert (received.responses.count, received.statuses) == (1, {"2xx": 1})
        assert received.responses.counts.index(1) == bisect_left(received.responses.bounds, received.responses.sum)
        assert received.responses.sum >= ago_ms


@pytest.mark.parametrize(
    ("status", "family"), [(100, "1xx"), (199, "1xx"), (599, "5xx"), (0, "0xx"), (99, "0xx"), (600, "0xx"), (99_999, "0xx")]
)
def test_a_status_that_is_none_has_a_family_of_its_own(status, family):
    """Whatever status an application returns is counted, and breaks nothing."""
    g = gate(rule("all", "9/s"))
    asked(g, request()).count_response(status)
    assert g.snapshot().rules[0].statuses == {family: 1}


@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_waiting_is_no_time_of_the_decision(mode):
    """The time that a request waited for its turn is not counted as the gate's."""
    begun_us = steady_us()
    g = gate(rule("all", "1/h burst 1", on_refusal=OnRefusal(WAIT, wait_us=7_200_000_000)), clock=ManualClock(1000))
    assert asked(g, request(), mode)
    assert asked(g, request(), mode).wait_us == 3_600_000_000
    decisions = g.snapshot().decisions
    assert decisions.count == 2
    assert 0 <= decisions.sum <= steady_us() - begun_us


def test_a_rule_with_two_limits_is_near_once():
    """A pass that leaves little of both limits of a rule is one pass near its end."""
    g = gate(rule("all", "token bucket 1/h burst 5; fixed window 5/h"), rule("other", "fixed window 5/h"))
    assert passes(g, 5) == [True] * 5
    assert [received.near for received in g.snapshot().rules] == [1, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("said", [{"on_refusal": OnRefusal(SHADOW)}, {"charge": Charge(((401, 401),))}])
def test_an_unlimited_tier_owes_nothing(said, mode):
    """Where a rule sets no limit, the request is as free as without the rule: no decision, no settlement."""
    g = gate(rule("all", Tiers("plan", (("gold", ()),), ()), **said))
    evaluation = asked(g, request(plan="gold"), mode)
    assert (evaluation.allowed, evaluation.needs_settlement, evaluation.decision, evaluation.shadows) == (True, False, None, ())
    tally = g.snapshot()
    assert (tally.requests, tally.unlimited, tally.exempt, tally.rules[0].passed) == (1, 1, 0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_responses_are_counted_under_every_rule_that_passed_the_request(mode):
    """Also under one with a capacity, and one in shadow mode; not under one that would have refused."""
    shadow = OnRefusal(SHADOW)
    g = gate(
        rule("limit", "5/h"),
        rule("capacity", (), key=key("user"), capacity=Capacity(Rate(10, 1_000_000))),
        rule("wide", "5/h", on_refusal=shadow),
        rule("narrow", "1/h burst 1", on_refusal=shadow),
        rule("narrow capacity", (), key=key("user"), capacity=Capacity(Rate(1, 1_000_000), 1_000_000), on_refusal=shadow),
    )
    for _ in range(3):
        asked(g, request(user="ann"), mode).count_response(200)
    for one in g.snapshot().rules:
        assert one.passed + one.shadow_refused == 3
        assert one.statuses.get("2xx", 0) == one.responses.count == one.passed
    assert [one.passed < 3 for one in g.snapshot().rules] == [False, False, False, True, True]


def test_an_alert_is_logged(caplog):
    """The log shows that a key crossed its mark, but not the key."""
    g = gate(rule("units", "fixed window 10/day", alert=0.8))
    passes(g, 10)
    assert [record.getMessage() for record in caplog.records] == ["units: a key has used 8 of 10"]
