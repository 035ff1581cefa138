"""Events beyond a limit, and after the response: refusals, shadow, idempotency, settlement, the penalty box."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from gates import MODES, asked, gate, key, passes, request, rule

from limitkeeper import MemoryStore
from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.policy import WrittenRequest
from limitkeeper.policy.callback_errors import CallbackErrors
from limitkeeper.policy.model import (
    BLOCKED,
    DEGRADE,
    SHADOW,
    Answer,
    Charge,
    Cost,
    Exemption,
    Match,
    Once,
    OnRefusal,
    PenaltyBoxConfig,
)
from limitkeeper.testing import ManualClock, unlimited


@pytest.mark.parametrize("mode", MODES)
def test_the_retry_time_of_a_refusal_is_exact(mode):
    """Waiting exactly Retry-After seconds is enough, one second less is not, for every rule at once."""
    g = gate(rule("a", "token bucket 7/min burst 2"), rule("b", "fixed window 3 per 10 s"), rule("c", "sliding window log 4/min"))
    for _ in range(40):
        answer = asked(g, request(), mode)
        if answer.allowed:
            continue
        wait = answer.refusal.retry_after
        if wait > 1:
            g.clock.advance(wait - 1)
            assert not asked(g, request(), mode).allowed
            g.clock.advance(1)
        else:
            g.clock.advance(wait)
        assert asked(g, request(), mode).allowed


def test_the_highest_priority_answers_with_the_longest_wait():
    """Status, message and action are the most important rule's; Retry-After is the longest of all that refuse."""
    g = gate(
        rule("slow", "fixed window 1/min", answer=Answer(message="slow")),
        rule("loud", "1/s", priority=5, answer=Answer(503, "loud {retry_after} {limit} {remaining} {rule}")),
    )
    asked(g, request())
    refusal = asked(g, request()).refusal
    assert (refusal.rule.name, refusal.status, refusal.message) == ("loud", 503, "loud 60 1 0 loud")
    assert refusal.violated == ("slow", "loud")


def test_what_can_never_pass_has_no_retry():
    """A cost above the limit is refused for good, with a message for that."""
    g = gate(rule("all", "5/s", cost=Cost(units=6)))
    refusal = asked(g, request()).refusal
    assert refusal.retry_after is None
    assert "more than its limit" in refusal.message


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_in_shadow_counts_and_lets_pass(mode):
    """A shadow rule refuses nothing, charges nothing of the others, and reports what it would have refused."""
    g = gate(rule("all", "5/s"), rule("strict", "2/s", on_refusal=OnRefusal(SHADOW)))
    heard = []
    g.events.on("shadow", heard.append)
    answers = [asked(g, request(), mode) for _ in range(6)]
    assert [a.allowed for a in answers] == [True] * 5 + [False]
    assert [a.shadows for a in answers] == [()] * 2 + [("strict",)] * 3 + [()]
    assert [e.label for e in answers[0].entries] == ["all"]
    strict = g.snapshot().rules[1]
    assert (strict.passed, strict.shadow_refused, strict.refused) == (2, 3, 0)
    assert len(heard) == 3


def test_a_refused_request_spends_nothing_of_a_shadow():
    """What the real rules refuse never reaches a rule in shadow."""
    g = gate(rule("all", "1/s"), rule("strict", "5/s", on_refusal=OnRefusal(SHADOW)))
    passes(g, 4)
    assert g.snapshot().rules[1].passed == 1


def test_degrading_names_its_handler():
    """A refusal that degrades is no response, and carries the handler that answers instead."""

    def stale():
        return "stale"

    g = gate(rule("all", "1/s", on_refusal=OnRefusal(DEGRADE, handler=stale)))
    passes(g, 1)
    answer = asked(g, request())
    assert not answer.allowed
    assert answer.degrade is stale
    assert g.snapshot().rules[0].degraded == 1


# Costs and outcomes from requests and functions ----------------------------------------------------------------------------


def broken(*said):
    raise RuntimeError("no idea")


@pytest.mark.parametrize("source", ["header", "query"])
def test_no_client_can_set_its_cost_to_zero(source):
    """A cost of 0 in a request counts as 1, unless the rule's own default is 0."""
    for units, passed in ((1, 2), (0, 5)):
        g = gate(rule("all", "2/s", cost=Cost(source, units, "n")))
        facts = [WrittenRequest(headers={"n": zero}, query={"n": zero}) for zero in ("0", "00", "0", "0", "0")]
        assert sum(bool(g.ask(one)) for one in facts) == passed


def test_functions_that_raise_break_no_request(caplog, monkeypatch):
    """A cost that can't be determined is the default, an unknown outcome counts; both are logged."""
    for module in ("request_cost", "settlement"):
        monkeypatch.setattr(f"limitkeeper.policy.{module}.callback_errors", CallbackErrors())
    g = gate(rule("all", "2/h", cost=Cost("call", call=broken), charge=Charge(call=broken)))
    for _ in range(2):
        asked(g, request()).settle(200)
    assert passes(g, 1) == [False]
    lines = [record.getMessage().splitlines() for record in caplog.records]
    assert all(found[-1].strip() == 'raise RuntimeError("no idea")' for found in lines)
    assert sorted(found[0].partition("raised ")[2] for found in lines) == [
        "RuntimeError: the request costs 1",
        "RuntimeError: the request counts",
    ]


# Once ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_repetitions_are_charged_once(mode):
    """Requests with one idempotency key are charged once; another key, another client or none are charged each."""
    g = gate(rule("pay", "2/s", key=key("user"), once=Once("idempotency-key")))
    said = {"idempotency-key": "k1", "user": "a"}
    assert passes(g, 5, mode=mode, **said) == [True] * 5
    assert passes(g, 2, mode=mode, user="a") == [True, False]
    assert not asked(g, request(**{"idempotency-key": "k2", "user": "a"}), mode).allowed
    assert asked(g, request(**{"idempotency-key": "k1", "user": "b"}), mode).decision.remaining == 1
    assert g.snapshot().rules[0].replayed == 4


def test_a_refused_request_leaves_no_mark():
    """The retry of a refused request is charged like a first one."""
    g = gate(rule("pay", "1/s", once=Once("idempotency-key")))
    passes(g, 1)
    assert passes(g, 1, **{"idempotency-key": "k"}) == [False]
    g.clock.advance(1)
    assert passes(g, 1, **{"idempotency-key": "k"}) == [True]
    assert passes(g, 1) == [False]


def test_repeating_has_an_end():
    """Beyond its replays a repetition is charged, so one idempotency key does not open the gate for good."""
    g = gate(rule("pay", "1/s burst 2", once=Once("idempotency-key", replays=3)))
    assert passes(g, 8, **{"idempotency-key": "k"}) == [True] * 5 + [False] * 3


# Settling ------------------------------------------------------------------------------------------------------------


def settle(evaluation, status, size=0, mode="ask"):
    if mode == "aask":
        asyncio.run(evaluation.asettle(status, size))
    else:
        evaluation.settle(status, size)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "text", ["token bucket 3/min", "fixed window 3/min", "sliding window log 3/min", "sliding window counter 3/min"]
)
def test_only_outcomes_that_count_are_charged(text, mode):
    """Only failed logins use up the limit; a success takes its charge back, exactly."""
    g = gate(rule("login", text, charge=Charge(((401, 401), (403, 403)))))
    for status in (200, 200, 200, 200, 401, 401, 302, 403):
        answer = asked(g, request(), mode)
        assert answer.allowed
        assert answer.needs_settlement
        settle(answer, status, mode=mode)
        settle(answer, 401, mode=mode)  # the first outcome counts
        settle(answer, 200, mode=mode)
    assert not asked(g, request(), mode).allowed
    assert g.snapshot().rules[0].given_back == 5


def test_many_at_once_can_not_pass_on_one_allowance():
    """A request is charged until its outcome is known: guessing in parallel does not evade the limit."""
    g = gate(rule("login", "fixed window 2/min", charge=Charge(((401, 401),))))
    assert passes(g, 3) == [True, True, False]


@pytest.mark.parametrize("mode", MODES)
def test_costs_by_the_size_of_the_response(mode):
    """An estimate is charged first, and the actual size in the end; a bucket goes into debt for the rest."""
    g = gate(rule("bytes", "token bucket 1/s burst 100", cost=Cost("response", 10, per=1000)))
    answer = asked(g, request(), mode)
    assert answer.decision.remaining == 90
    settle(answer, 200, 2_001, mode)
    assert asked(g, request(), mode).decision.remaining == 97 - 10
    settle(asked(g, request(), mode), 200, 200_000, mode)
    refused = asked(g, request(), mode)
    assert not refused.allowed
    assert refused.refusal.retry_after > 100


def test_a_callable_decides_which_outcomes_count():
    """`charge` may be a function of the status and the facts."""
    g = gate(rule("all", "1/min", charge=Charge(call=lambda status, facts: facts.path == "/x")))
    settle(asked(g, request("GET /y")), 200)
    last = asked(g, request("GET /x"))
    assert last.allowed
    settle(last, 200)
    assert passes(g, 1) == [False]


# Alerts, penalty box ----------------------------------------------------------------------------------------------------


def test_spending_alerts_once_when_it_crosses_the_mark():
    """At 80 % of a day's units there is one alert, whatever the step over the mark."""
    g = gate(rule("units", "fixed window 100/day", key=key("user"), cost=Cost("header", 1, "x-cost"), alert=0.8))
    heard = []
    g.events.on("alert", heard.append)
    for cost in ("79", "1", "5", "10"):
        asked(g, request(user="a", **{"X-Cost": cost}))
    asked(g, request(user="b", **{"X-Cost": "85"}))
    assert [event.key for event in heard] == [("a",), ("b",)]
    assert g.snapshot().rules[0].alerts == 2


def shut_out_gate(**said):
    return gate(
        rule("user", "1/s", key=key("user|ip")),
        penalty_box=PenaltyBoxConfig(parse_limit("fixed window 3/min"), 60_000_000, key("user|ip")),
        exempt=(Exemption(match=(Match(path="/healthz"),)),),
        **said,
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_is_refused_too_often_is_put_into_the_penalty_box(mode):
    """After so many refusals a client is refused without a call of the store, for a while, and other clients are not."""
    g = shut_out_gate()
    heard = []
    g.events.on("penalty box", heard.append)
    assert passes(g, 5, mode=mode, user="a") == [True] + [False] * 4
    assert len(heard) == 1
    asked_before = g.snapshot().rules[0].refused
    answer = asked(g, request(user="a"), mode)
    assert (answer.refusal.reason, answer.refusal.retry_after, answer.refusal.status) == ("penalty box", 60, 429)
    assert answer.decision is None
    assert g.snapshot().rules[0].refused == asked_before
    assert asked(g, request(user="b"), mode).allowed
    assert asked(g, request("GET /healthz", user="a"), mode).allowed
    assert (g.snapshot().penalty_box, g.snapshot().penalty_box_clients) == (1, 1)
    g.clock.advance(59.999999)
    assert asked(g, request(user="a"), mode).refusal.retry_after == 1
    g.clock.advance(0.000001)
    assert g.snapshot().penalty_box_clients == 0
    assert asked(g, request(user="a"), mode).allowed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "limit", ["1/s", "fixed window 1/min", "1/h", "sliding window log 2 per 7 s", "token bucket 7/min burst 2"]
)
@pytest.mark.parametrize("penalty", [1, 10, 90])
def test_the_retry_of_every_refusal_with_a_penalty_box_is_true(mode, limit, penalty):
    """Each refusal, by a rule, by the rule that puts its client into the box and by the box itself: the same request is refused a
    microsecond before its retry, and allowed at it."""
    box = PenaltyBoxConfig(parse_limit("fixed window 2/day"), penalty * 1_000_000, key("user"))
    for number in range(1, 6):
        for early in (0, 1):
            g = gate(rule("user", limit, key=key("user")), penalty_box=box)
            refused = [one for one in (asked(g, request(user="a"), mode) for _ in range(number + 2)) if not one.allowed]
            refusal = refused[-1].refusal
            assert refusal.retry_after == -(-refusal.retry_us // 1_000_000)
            g.clock.advance((refusal.retry_us - early) / 1e6)
            assert asked(g, request(user="a"), mode).allowed == (not early), (number, refusal)


def test_the_penalty_box_has_the_retry_of_the_rules_that_apply():
    """A route whose rule refused this client before has the rule's retry; one whose rule did not, the end of the penalty."""
    g = gate(
        rule("day", "fixed window 1/day", key=key("user"), match=(Match(path="/day"),)),
        rule("second", "1/s", key=key("user"), match=(Match(path="/second"),)),
        penalty_box=PenaltyBoxConfig(parse_limit("fixed window 3/min"), 10_000_000, key("user")),
    )
    assert passes(g, 2, "GET /day", user="a") == [True, False]
    assert passes(g, 4, "GET /second", user="a") == [True, False, False, False]
    lasts = {path: asked(g, request(f"GET {path}", user="a")).refusal for path in ("/day", "/second", "/other")}
    assert {one.reason for one in lasts.values()} == {"penalty box"}
    assert {path: one.retry_after for path, one in lasts.items()} == {"/day": 43_200, "/second": 10, "/other": 10}
    g.clock.advance(10)
    assert passes(g, 1, "GET /second", user="a") == [True]
    g.clock.advance(43_190)
    assert passes(g, 1, "GET /day", user="a") == [True]


def test_a_blocked_key_has_no_retry_in_the_penalty_box_either():
    """Its client's other requests are told the end of the penalty; those of the blocked key nothing, since it stays blocked."""
    g = gate(
        rule("user", "5/s", key=key("user"), override=(("evil", BLOCKED),)),
        penalty_box=PenaltyBoxConfig(parse_limit("fixed window 2/min"), 60_000_000, key("ip")),
    )
    found = [asked(g, request(user="evil")).refusal for _ in range(6)]
    assert {(one.reason, one.retry_after) for one in found} == {("blocked", None)}
    boxed = asked(g, request(user="good")).refusal
    assert (boxed.reason, boxed.retry_after) == ("penalty box", 60)


def test_a_key_that_an_operator_blocks_while_its_client_is_in_the_penalty_box_has_no_retry():
    """The first key of a rule that is blocked at run time is refused as any blocked key."""
    g = gate(
        rule("user", "1/s burst 1", key=key("user")), penalty_box=PenaltyBoxConfig(parse_limit("fixed window 2/min"), 60_000_000)
    )
    assert [asked(g, request(user="evil")).allowed for _ in range(5)] == [True] + [False] * 4
    assert asked(g, request(user="evil")).refusal.reason == "penalty box"
    g.operator_overrides.put("user", "evil", "blocked")
    blocked = asked(g, request(user="evil")).refusal
    assert (blocked.reason, blocked.retry_after) == ("blocked", None)


def test_limiting_turned_off_ignores_the_penalty_box():
    """Inside `unlimited()` a client in the penalty box passes too."""
    g = shut_out_gate()
    passes(g, 6, user="a")
    with unlimited():
        assert passes(g, 2, user="a") == [True, True]
    assert passes(g, 1, user="a") == [False]


# Numbers -----------------------------------------------------------------------------------------------------------------


def test_the_tally_adds_up():
    """Requests are allowed or refused; rules count their results; offenders are listed without their keys."""
    g = gate(rule("user", "5/s", key=key("user")), rule("shop", "fixed window 8/min"))
    for user in "aaaaaaabbb":
        evaluation = asked(g, request(user=user))
        if evaluation:
            evaluation.count_response(200)
    asked(g, request("GET /x"))  # no user: only the shop's limit
    t = g.snapshot()
    assert (t.requests, t.allowed, t.refused, t.unlimited, t.exempt) == (11, 8, 3, 0, 0)
    user, shop = t.rules
    assert (user.passed, user.refused, shop.passed, shop.refused) == (8, 2, 8, 1)
    assert user.responses.count == 8
    assert user.statuses == {"2xx": 8}
    assert t.decisions.count == 11
    assert (t.offenders[0].rule, t.offenders[0].count) == ("user", 2)
    assert all(o.key not in "ab" for o in t.offenders)


def test_near_the_limit_is_counted():
    """A pass with less than a fifth left counts as near."""
    g = gate(rule("all", "fixed window 10/min"))
    passes(g, 12)
    assert g.snapshot().rules[0].near == 2


def test_listeners_receive_refusals():
    """A listener gets the evaluation, with keys and refusal; without one nothing is made."""
    g = gate(rule("user", "1/s", key=key("user")))
    passes(g, 2, user="a")
    heard = []
    g.events.on("refused", heard.append)
    passes(g, 1, user="a")
    (event,) = heard
    assert (event.kind, event.limiter, event.key) == ("refused", "limitkeeper", ("a",))
    assert event.decision.refusal.violated == ("user",)


def test_explain_charges_nothing_and_shows_why():
    """The result of every rule, without a charge."""
    store = MemoryStore(clock=ManualClock(0))
    g = gate(
        rule("user", "2/s", key=key("user")),
        rule("checkout", "2/s", match=(Match(frozenset({"POST"}), "/checkout"),)),
        store=store,
    )
    for _ in range(3):
        user, checkout = g.explain(request(user="a"))
        assert user.applies
        assert (user.key, user.decision.remaining) == ("a", 2)
        assert not checkout.applies
        assert "match" in checkout.reason
    assert "no part of its key" in g.explain(request())[0].reason
    assert len(store) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_passage_leaves_no_circle_behind(mode):
    """A request that keeps its evaluation is freed at once: nothing is left to the garbage collector."""

    class Request(dict):
        pass

    g = gate(
        rule("user", "2/min", key=key("user")),
        rule("login", "9/min", key=key("tenant"), charge=Charge(((401, 401),))),
        penalty_box=PenaltyBoxConfig(parse_limit("fixed window 2/min"), 60_000_000, key("user")),
    )
    gc.collect()
    gc.disable()
    try:
        for said in [{"user": "a"}] * 6 + [{"tenant": "t"}, {}]:
            facts = request(**said)
            facts.raw = Request()
            evaluation = facts.raw["evaluation"] = asked(g, facts, mode)
            gone = weakref.ref(facts.raw)
            settle(evaluation, 200, mode=mode)
            del facts, evaluation
            assert gone() is None, said
    finally:
        gc.enable()


def test_a_memory_full_of_those_shut_out_is_not_searched_for_every_refusal(monkeypatch):
    """When the penalty box is full, others are refused by their limits; expired entries make room."""
    monkeypatch.setattr("limitkeeper.policy.penalty_box.MAX_CLIENTS", 3)
    g = gate(
        rule("all", "fixed window 1/h", key=key("ip")), penalty_box=PenaltyBoxConfig(parse_limit("fixed window 1/5s"), 10_000_000)
    )
    for host in range(5):
        assert passes(g, 4, peer=f"192.0.2.{host}") == [True, False, False, False]
    assert (len(g._penalty_box), g.snapshot().penalty_box) == (3, 3)
    searched = g._penalty_box._until
    assert passes(g, 20, peer="192.0.2.4") == [False] * 20
    assert g._penalty_box._until is searched
    g.clock.advance(10)
    assert passes(g, 3, peer="192.0.2.4") == [False] * 3
    assert (len(g._penalty_box), g.snapshot().penalty_box) == (1, 4)
