"""Which rule answers for a refused request, with which message, and which rules count it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from gates import MODES, asked, gate, key, passes, policy, request, rule

from limitkeeper import MemoryStore
from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.decision import Decision
from limitkeeper.errors import StoreError
from limitkeeper.policy import Gate
from limitkeeper.policy.model import (
    BLOCKED,
    CLOSED,
    DEGRADE,
    WAIT,
    Answer,
    Charge,
    Cost,
    Exemption,
    OnFailure,
    OnRefusal,
    PenaltyBoxConfig,
)
from limitkeeper.policy.refusal import seconds
from limitkeeper.testing import ManualClock
from stand_ins import WrappedStore

NEVER = "This request costs more than its limit ever allows."


def last_of(times, *rules, **said):
    """The last of so many equal requests of one client."""
    g = gate(*rules, **said)
    return [asked(g, request()) for _ in range(times)][-1].refusal


# The deciding rule --------------------------------------------------------------------------------------------------------


def test_a_rule_that_admits_does_not_answer():
    """However important a rule is, a rule that refused answers."""
    loud = rule("loud", "9/s", priority=9, answer=Answer(503, "loud"))
    refusal = last_of(2, loud, rule("all", "1/s", answer=Answer(message="all")))
    assert (refusal.rule.name, refusal.status, refusal.message, refusal.violated) == ("all", 429, "all", ("all",))


def test_among_equals_the_longest_wait_answers_and_never_is_longest():
    """Of rules with one priority the one with the longest wait answers; never is the longest."""
    short, long = rule("short", "fixed window 1/min"), rule("long", "fixed window 1/h")
    assert last_of(2, short, long).rule.name == last_of(2, long, short).rule.name == "long"
    never = rule("never", "5/s", cost=Cost(units=6))
    for rules in ([never, long], [long, never]):
        refusal = last_of(1, *rules)
        assert (refusal.rule.name, refusal.retry_after) == ("never", None)


def test_among_equals_a_refusal_precedes_a_degraded_response():
    """A handler may run the application, which the other rule refuses; a higher priority lets it answer."""
    degrades = OnRefusal(DEGRADE, handler=print)
    total, search = rule("total", "fixed window 1/min"), rule("search", "fixed window 1/h", on_refusal=degrades)
    assert [last_of(2, *rules).rule.name for rules in ([total, search], [search, total])] == ["total", "total"]
    assert last_of(2, total, replace(search, priority=1)).rule.name == "search"


def test_a_blocked_key_gets_no_degraded_response():
    """Requests of a key that the policy or an operator blocks are refused; a rule that blocks all keys may degrade."""
    degrades = OnRefusal(DEGRADE, handler=print)
    some = rule("some", "1/h", key=key("user"), override=(("eve", BLOCKED),), on_refusal=degrades)
    g = gate(some)
    g.operator_overrides.put("some", "mallory", "blocked")
    asked_by = {name: asked(g, request(user=name)) for name in ("eve", "mallory")}
    assert [(one.refusal.status, one.degrade) for one in asked_by.values()] == [(429, None)] * 2
    assert passes(g, 2, user="ann") == [True, False]
    assert asked(g, request(user="ann")).degrade is print
    assert [one.degraded for one in g.snapshot().rules] == [2]
    assert asked(gate(replace(some, limit=BLOCKED, override=())), request(user="ann")).degrade is print


@pytest.mark.parametrize(
    ("said", "received"),
    [
        (None, NEVER),
        ("Retry after {retry_after}s.", NEVER),
        ("No more than {limit}, {rule}.", "No more than 5, all."),
        ("No.", "No."),
    ],
)
def test_a_message_with_an_unknown_time_is_not_sent(said, received):
    """A request that can never pass gets no retry time."""
    assert last_of(1, rule("all", "5/s", cost=Cost(units=6), answer=Answer(message=said))).message == received


@pytest.mark.parametrize(
    ("us", "received"), [(0, 0), (1, 1), (1_000_000, 1), (1_000_001, 2), (3_600_000_000, 3600), (3_600_000_001, 3601)]
)
def test_seconds_are_rounded_up(us, received):
    """A microsecond too early is too early."""
    assert seconds(us) == received


def test_every_reason_has_its_message():
    """Without a message of its own a rule has one with the reason and the retry time."""
    waits = OnRefusal(WAIT, wait_us=10_000_000, queue=0)
    assert last_of(2, rule("all", "1/s")).message == "Too many requests. Retry after 1s."
    full = last_of(2, rule("all", "1/s", on_refusal=waits))
    assert (full.reason, full.status, full.message) == ("queue full", 503, "Too many requests are waiting. Retry after 1s.")
    shut = last_of(3, rule("all", "1/h"), penalty_box=PenaltyBoxConfig(parse_limit("fixed window 1/h"), 60_000_000))
    assert shut.message.startswith("Too many requests. Retry after ")
    shut = last_of(4, rule("all", "1/h"), penalty_box=PenaltyBoxConfig(parse_limit("fixed window 1/h"), 60_000_000))
    assert shut.message == "Too many refused requests. Retry after 3600s."


def test_what_can_never_pass_finds_no_queue_full():
    """A request that would wait for ever is refused for its cost, not for a full queue."""
    waits = OnRefusal(WAIT, wait_us=10_000_000, queue=0)
    refusal = last_of(1, rule("all", "5/s", cost=Cost(units=6), on_refusal=waits))
    assert (refusal.reason, refusal.status, refusal.message) == ("quota", 429, NEVER)


# Counters ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_limits_of_one_rule_refuse_once(mode):
    """A rule that refuses by both of its limits has refused once, and so has its offender."""
    g = gate(rule("two", "token bucket 1/h burst 1; fixed window 1/h"), rule("one", "fixed window 1/h"))
    assert passes(g, 2, mode=mode) == [True, False]
    tally = g.snapshot()
    assert [one.refused for one in tally.rules] == [1, 1]
    assert sorted((one.rule, one.count) for one in tally.offenders) == [("one", 1), ("two", 1)]


def test_the_rule_that_degrades_counts_it():
    """Of several rules the one whose handler answers is the one that degraded."""
    plain, other = rule("plain", "9/s"), rule("other", "1/h")
    cheap = rule("cheap", "1/h", priority=1, on_refusal=OnRefusal(DEGRADE, handler=print))
    g = gate(plain, other, cheap)
    assert passes(g, 3) == [True, False, False]
    assert [one.degraded for one in g.snapshot().rules] == [0, 0, 2]


# Penalty box -------------------------------------------------------------------------------------------------------------


def shut_out_gate(**said):
    """A gate that puts user a into the penalty box, whose requests were refused twice."""
    g = gate(
        rule("all", "1/h", key=key("user")),
        penalty_box=PenaltyBoxConfig(parse_limit("fixed window 1/h"), 60_000_000, key("user")),
        **said,
    )
    assert passes(g, 3, user="a") == [True, False, False]
    assert g.snapshot().penalty_box_clients == 1
    return g


def test_exempt_requests_pass_the_penalty_box():
    """A request exempt by a header passes; one exempt from some rules is refused like any other."""
    probe = Exemption(headers=(("x-probe", "s3cret"),))
    assert passes(shut_out_gate(exempt=(probe,)), 2, user="a", **{"X-Probe": "s3cret"}) == [True, True]
    some = Exemption(headers=(("x-probe", "s3cret"),), rules=("all",))
    g = shut_out_gate(exempt=(some,))
    assert asked(g, request(user="a", **{"X-Probe": "s3cret"})).refusal.reason == "penalty box"


def test_refusals_without_a_key_box_no_client():
    """Where the key of the penalty box is absent, refusals count for no client."""
    said = PenaltyBoxConfig(parse_limit("fixed window 1/h"), 60_000_000, key("user"))
    g = gate(rule("all", "fixed window 1/h"), penalty_box=said)
    assert passes(g, 5) == [True] + [False] * 4
    assert asked(g, request()).refusal.reason == "quota"
    assert g.snapshot().penalty_box_clients == 0


# A store that fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "received"), [(None, 503), (429, 503), (418, 503), (501, 503), (500, 500), (502, 502), (503, 503), (504, 504)]
)
def test_a_closed_rule_answers_with_a_server_error(status, received):
    """The rule's status is kept where it is a server error; a client error is replaced."""
    store = WrappedStore(MemoryStore(clock=ManualClock(0)), local=True)
    g = Gate(policy(rule("all", "1/s", on_failure=OnFailure(CLOSED), answer=Answer(status))), store=store)
    store.failing = {"decide"}
    refusal = asked(g, request()).refusal
    assert (refusal.status, refusal.retry_after, refusal.retry_us) == (received, 1, 1_000_000)
    assert refusal.message == "The limit could not be checked. Retry after 1s."
    assert refusal.violated == ("all",)


@pytest.mark.parametrize(
    ("left_us", "told_us", "received"), [(7_300_000, 7_300_000, 8), (1, 1, 1), (0, 1_000_000, 1), (-1, 1_000_000, 1)]
)
def test_a_closed_rule_has_the_time_of_the_next_probe_as_its_retry(left_us, told_us, received):
    """Retry-After of a dead store is the time to the next probe; where that is unknown, a second."""
    g = gate(rule("all", "9/s", on_failure=OnFailure(CLOSED)))
    guards_word = Decision(False, 9, 0, left_us, left_us, 0, 0, "all")
    refusal = g._on_failure.answer(g, asked(g, request()), guards_word).refusal
    assert (refusal.retry_us, refusal.retry_after, refusal.reason) == (told_us, received, "store")


def test_listeners_receive_the_error():
    """Where the store itself raises, the event carries the error; a guard's answer is no error."""
    for local in (True, False):
        clock = ManualClock(1000)
        store = WrappedStore(MemoryStore(clock=clock), local=local)
        g = Gate(policy(rule("all", "1/s"), budget_us=10_000_000), store=store, clock=clock)
        heard = []
        g.events.on("store failed", heard.append)
        store.failing = {"decide"}
        assert asked(g, request())
        (event,) = heard
        assert isinstance(event.error, StoreError) if local else event.error is None


@pytest.mark.parametrize("mode", ["ask", "aask"])
@pytest.mark.parametrize("local", [True, False], ids=["near", "far"])
def test_what_can_not_be_settled_stays_charged(local, mode, caplog):
    """A store that fails when a charge goes back breaks no response; it is logged, and the charge stays."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock), local=local)
    login = rule("login", "fixed window 1/h", charge=Charge(((401, 401),)))
    g = Gate(policy(login, budget_us=10_000_000), store=store, clock=clock)
    answer = asked(g, request(), mode)
    store.failing = {"give_back"}
    if mode == "aask":
        asyncio.run(answer.asettle(200))
    else:
        answer.settle(200)
    assert not answer.needs_settlement
    assert not asked(g, request(), mode)
    if local:  # a guard reports its store itself
        assert "settling with the store of 'limitkeeper' failed: give_back: nobody answers" in caplog.text
