"""A gate over a remote store: the same answers in both modes, and the immediate ones without a call of the store."""

from __future__ import annotations

import pytest
from gates import asked, key, passes, policy, request, rule

from limitkeeper import LeasedStore, MemoryStore, SlidingWindowLog, StoreUnavailable
from limitkeeper.algorithms.claim import Claim
from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.policy import Gate
from limitkeeper.policy.model import (
    CLOSED,
    LOCAL,
    SHADOW,
    WAIT,
    Charge,
    Cost,
    Exemption,
    Match,
    Once,
    OnFailure,
    OnRefusal,
    PenaltyBoxConfig,
)
from limitkeeper.testing import ManualClock
from stand_ins import WrappedStore

FAR = ("ask", "aask")
ONCE = Once("idempotency-key")
HEALTH = Exemption(match=(Match(path="/healthz"),))


def far_gate(*rules, **said):
    """A gate whose store is remote, and can be made to fail."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock))
    return Gate(policy(*rules, budget_us=10_000_000, **said), store=store, clock=clock), store


def leased_gate(*rules, **said):
    """A gate over leases of a remote store."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock))
    said["budget_us"] = 10_000_000
    return Gate(policy(*rules, **said), store=LeasedStore(store, lease=10, life="1min"), clock=clock), store


@pytest.mark.parametrize("mode", [*FAR, "quick"])
def test_a_request_without_a_limit_does_not_call_the_store(mode):
    """Exempt, or matched by no rule: a remote store is not called."""
    g, store = far_gate(rule("user", "1/s", key=key("user")), exempt=(HEALTH,))
    for line, said in (("GET /healthz", {"user": "a"}), ("GET /x", {})):
        evaluation = asked(g, request(line, **said), mode)
        assert (evaluation.allowed, evaluation.decision, evaluation.context) == (True, None, None)
    assert store.calls == []
    tally = g.snapshot()
    assert (tally.requests, tally.allowed, tally.exempt, tally.unlimited) == (2, 2, 1, 1)


@pytest.mark.parametrize("mode", [*FAR, "quick"])
def test_a_client_in_the_penalty_box_does_not_call_the_store(mode):
    """A request of a client in the penalty box calls no remote store, in any mode."""
    g, store = far_gate(
        rule("user", "1/h", key=key("user")), penalty_box=PenaltyBoxConfig(parse_limit("1/h"), 60_000_000, key("user"))
    )
    assert passes(g, 3, user="a") == [True, False, False]
    del store.calls[:]
    assert asked(g, request(user="a"), mode).refusal.reason == "penalty box"
    assert store.calls == []


@pytest.mark.parametrize("mode", FAR)
def test_a_far_store_makes_marks_and_shadows_too(mode):
    """Charging once and rules in shadow work over a remote store as over a local one."""
    shadowed = rule("strict", "fixed window 1/h", on_refusal=OnRefusal(SHADOW))
    g, _ = far_gate(rule("pay", "fixed window 2/h", key=key("user"), once=ONCE), shadowed)
    said = {"user": "a", "idempotency-key": "k"}
    answers = [asked(g, request(**said), mode) for _ in range(4)]
    assert [(answer.allowed, answer.shadows) for answer in answers] == [(True, ())] + [(True, ("strict",))] * 3
    assert passes(g, 2, mode=mode, user="a") == [True, False]
    pay, strict = g.snapshot().rules
    assert (pay.replayed, strict.passed, strict.shadow_refused) == (3, 1, 4)


@pytest.mark.parametrize("mode", FAR)
def test_a_failure_is_counted_as_the_request_that_it_was(mode):
    """Requests decided without their store are counted; admission by a share counts as its rule's."""
    open_, local, closed, outcome = OnFailure(), OnFailure(LOCAL, "1/2"), OnFailure(CLOSED), Charge(((401, 401),))
    g, store = far_gate(
        rule("open", "1/h", key=key("user"), on_failure=open_, charge=outcome),
        rule("local", "fixed window 4/h", key=key("tenant"), on_failure=local, charge=outcome),
        rule("closed", "1/h", key=key("partner"), on_failure=closed),
    )
    store.failing = {"decide"}
    free = asked(g, request(user="a"), mode)
    assert (free.allowed, free.decision, free.entries, free.needs_settlement, free.context) == (True, None, [], False, None)
    shared = [asked(g, request(user="a", tenant="t"), mode) for _ in range(3)]
    assert [(one.allowed, one.decision.limit, one.decision.remaining, one.needs_settlement) for one in shared] == [
        (True, 2, 1, True),
        (True, 2, 0, True),
        (False, 2, 0, False),
    ]
    assert shared[2].refusal.rule.name == "local"
    assert not asked(g, request(partner="p"), mode)
    tally = g.snapshot()
    assert (tally.requests, tally.allowed, tally.refused) == (5, 3, 2)
    assert [(one.name, one.passed, one.refused) for one in tally.rules] == [("open", 0, 0), ("local", 2, 1), ("closed", 0, 1)]


# Leases -----------------------------------------------------------------------------------------------------------------


def test_a_lease_passes_and_refuses_at_once():
    """While a lease lasts `quick` answers without the store, yes and no; without one it returns None and changes nothing."""
    g, store = leased_gate(rule("user", "token bucket 1/h burst 10", key=key("user")))
    assert g.ask_nowait(request(user="a")) is None
    assert g.ask(request(user="a"))
    del store.calls[:]
    answers = [g.ask_nowait(request(user="a")) for _ in range(9)]
    assert [answer.decision.remaining for answer in answers] == list(range(8, -1, -1))
    assert store.calls == []
    assert not g.ask(request(user="a"))
    refused = g.ask_nowait(request(user="a"))
    assert (refused.allowed, refused.refusal.retry_after) == (False, 3600)
    assert g.snapshot().requests == 12


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([rule("a", "9/h"), rule("b", "9/h", key=key("user"))], {"user": "u"}),
        ([rule("a", "9/s", charge=Charge(((401, 401),)))], {}),
        ([rule("a", "9/s"), rule("b", "9/s", on_refusal=OnRefusal(SHADOW))], {}),
        ([rule("a", "9/s", once=ONCE)], {"idempotency-key": "k"}),
    ],
    ids=["two limits", "by outcome", "shadow", "once"],
)
def test_what_needs_the_store_is_not_answered_by_a_lease(rules, said):
    """Several limits, outcomes, shadows and marks need the store: `quick` returns None and changes nothing."""
    g, _ = leased_gate(*rules)
    assert g.ask(request())
    assert g.ask(request(**said))
    requests = g.snapshot().requests
    assert g.ask_nowait(request(**said)) is None
    assert g.snapshot().requests == requests


def test_a_request_that_would_wait_is_not_refused_at_once():
    """Where a lease is exhausted, `quick` leaves a rule that waits to the methods that can wait."""
    one = rule("all", "token bucket 1/h burst 10", on_refusal=OnRefusal(WAIT, wait_us=1))
    g, _ = leased_gate(one)
    assert passes(g, 11) == [True] * 10 + [False]
    (entry,) = g.compiled.rules[0].default_entries
    assert not g.store.hit_nowait(entry.named, "*", 1)
    assert g.ask_nowait(request()) is None


@pytest.mark.parametrize(("action", "passed"), [("open", True), (CLOSED, False)])
def test_a_store_known_to_be_dead_is_answered_at_once(action, passed):
    """While a dead store is not called, `quick` answers by the rule's `on_failure`."""
    g, store = far_gate(rule("all", "9/s", on_failure=OnFailure(action)))
    store.failing = {"decide"}
    while g.ask_nowait(request()) is None:
        g.ask(request())
    answer = asked(g, request(), "quick")
    assert (answer.allowed, answer.decision) == (passed, None)
    assert passed or answer.refusal.reason == "store"


@pytest.mark.parametrize("action", ["open", CLOSED, LOCAL])
def test_a_store_that_fails_is_not_explained_as_a_refusal(action):
    """The remaining part of a limit is not known then: the explanation is an error that names the rule's `on_failure`."""
    g, store = far_gate(rule("all", "9/s", on_failure=OnFailure(action)))
    store.failing = {"decide"}
    with pytest.raises(StoreUnavailable, match=f"could not be asked; on_failure of 'all' is {action}"):
        g.explain(request())


@pytest.mark.parametrize("verb", ["decide", "decide_many"])
@pytest.mark.parametrize("mode", [*FAR, "quick"])
def test_a_store_near_by_that_fails_opens_no_rule_that_charges_once(mode, verb):
    """Where a local store can't look up a repetition, a closed rule refuses it."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock), local=True)
    g = Gate(policy(rule("pay", "1/h", once=ONCE, on_failure=OnFailure(CLOSED))), store=store)
    said = {"idempotency-key": "k"}
    assert passes(g, 2, mode=mode, **said) == [True, True]
    store.failing = {verb}
    answer = asked(g, request(**said), mode)
    assert (answer.allowed, answer.refusal.status, answer.refusal.reason) == (False, 503, "store")
    assert g.snapshot().rules[0].failed_closed == 1


@pytest.mark.parametrize("mode", [*FAR, "quick"])
def test_a_failing_local_store_of_a_shadow_fails_no_request(mode):
    """A rule in shadow whose store fails admits, and counts nothing."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock), local=True)
    g = Gate(policy(rule("all", "9/h"), rule("strict", "1/h", on_refusal=OnRefusal(SHADOW))), store=store)
    store.failing = {"decide_many"}
    answer = asked(g, request(), mode)
    assert (answer.allowed, answer.shadows, answer.decision.remaining) == (True, (), 8)
    assert [(one.passed, one.shadow_refused) for one in g.snapshot().rules] == [(1, 0), (0, 0)]


@pytest.mark.parametrize("mode", FAR)
def test_a_local_share_of_requests_at_a_time(mode):
    """While the store fails, a place in the local share is given back when its request ends, in whatever way."""
    busy = rule("busy", (), concurrent=SlidingWindowLog("4/h"), key=key("user"), on_failure=OnFailure(LOCAL, "1/2"))
    g, store = far_gate(busy, rule("rate", "fixed window 100/h", on_failure=OnFailure(LOCAL, "1/2")))
    store.failing = {"decide", "decide_one"}
    for outcome in (200, 500, 0):
        running = [asked(g, request(user="a"), mode) for _ in range(2)]
        assert [one.allowed for one in running] == [True, True]
        assert asked(g, request(user="a"), mode).refusal.reason == "concurrent"
        for one in running:
            one.settle(outcome)
            one.settle(outcome)  # once
    assert "give_back" not in store.calls


@pytest.mark.parametrize("mode", FAR)
def test_a_local_share_is_settled_by_outcome_and_size(mode):
    """While the store fails, an outcome that does not count is refunded to the share, and a size is settled there."""
    half = OnFailure(LOCAL, "1/2")
    login = rule("login", "fixed window 4/h", key=key("user"), on_failure=half, charge=Charge(((401, 401),)))
    size = rule("size", "fixed window 40/h", on_failure=half, cost=Cost("response", 5))
    g, store = far_gate(login, size)
    store.failing = {"decide", "decide_one"}
    for outcome, weight, left in ((200, 1, (2, 19)), (500, 3, (2, 16)), (401, 1, (1, 15)), (0, 0, (0, 10)), (200, 1, (0, 10))):
        one = asked(g, request(user="a"), mode)
        one.settle(outcome, weight)
        shares = g._on_failure._share("1/2")
        asks = [([Claim(entry.named, own, 0)], 0, False) for entry, own in zip(one.entries, one.keys, strict=True)]
        assert tuple(shares.decide(*ask).remaining for ask in asks) == left
    assert one.refusal.rule.name == "login"
    assert "give_back" not in store.calls
    assert g.snapshot().rules[0].given_back == 2
