"""A limit of 0 in a policy ("blocked", "0/s") refuses every request, for ever, without a call of the store."""

from __future__ import annotations

import pytest

from limitkeeper import MemoryStore
from limitkeeper.algorithms.claim import Claim
from limitkeeper.policy import Gate, Policy, PolicyError
from limitkeeper.policy.explain import RequestExplanation
from limitkeeper.policy.model import BLOCKED
from limitkeeper.policy.one_line_request import WrittenRequest
from limitkeeper.policy.reading.load import examine
from limitkeeper.testing import ManualClock


def gate(rule: str) -> Gate:
    text = f"identify: {{plan: {{header: X-Plan, default: free}}, user: {{header: X-User}}}}\nlimits: [{rule}]"
    return Gate(Policy.read(text), store=MemoryStore(clock=ManualClock()))


@pytest.mark.parametrize("text", ["blocked", "0/s", "0 per minute", "fixed window 0/min", "0 / 5 min", "Blocked"])
def test_a_rule_of_zero_refuses_every_request(text):
    """The rule refuses with 429 and without a retry time; the store stays empty."""
    closed = gate(f"{{name: beta, match: GET /beta, key: ip, limit: {text}}}")
    for _ in range(2):
        asked = closed.ask(WrittenRequest("GET", "/beta"))
        assert (asked.allowed, asked.refusal.status, asked.refusal.retry_after) == (False, 429, None)
    assert closed.ask(WrittenRequest("GET", "/")).allowed
    assert len(closed.store) == 0


def test_a_tier_and_an_override_can_be_blocked():
    """A tier or a key with a limit of 0 is refused; others have the rule's own limit."""
    tiers = gate("{name: api, key: ip, limit: {by: plan, free: 0/s, pro: 5/s}}")
    assert not tiers.ask(WrittenRequest("GET", "/"))
    assert tiers.ask(WrittenRequest("GET", "/", headers={"X-Plan": "pro"})).allowed
    override = gate("{name: api, key: user, limit: 5/s, override: {eve: blocked, ann: 9/s}}")
    allowed = [override.ask(WrittenRequest("GET", "/", headers={"X-User": user})).allowed for user in ("eve", "ann", "ben")]
    assert allowed == [False, True, True]


def test_other_rules_are_not_charged_for_a_blocked_request():
    """A request that one rule blocks costs nothing under the others."""
    both = gate("{name: all, key: ip, limit: fixed window 1/min}, {name: beta, match: GET /beta, key: ip, limit: 0/s}")
    assert [both.ask(WrittenRequest("GET", path)).allowed for path in ("/beta", "/beta", "/", "/")] == [False, False, True, False]


def test_the_value_is_the_same_however_it_is_written():
    """Every spelling of a limit of 0 reads as the same limits."""
    assert Policy.of(limits=[{"name": "a", "limit": "0/s"}]).rules[0].limit == BLOCKED
    assert Policy.of(limits=[{"name": "a", "limit": "blocked"}]) == Policy.of(limits=[{"name": "a", "limit": "0 per day"}])


def test_checks_treat_a_blocked_limit_as_without_a_size():
    """A cost of any size is no error under a limit of 0, and shadow mode is an error."""
    policy = Policy.of(limits=[{"name": "a", "key": "ip", "limit": "0/s", "cost": 5}])
    assert str(policy.rules[0].limit[0]) == "blocked"
    with pytest.raises(PolicyError, match="a blocked key is refused at once"):
        Policy.of(limits=[{"name": "a", "key": "ip", "limit": "0/s", "on_refusal": "shadow"}])


def test_a_blocked_rule_cuts_no_burst(tmp_path):
    """`check` has no warning that a rule which refuses everything cuts the burst of another one to 1."""
    path = tmp_path / "policy.yaml"
    path.write_text("limits: [{name: closed, key: ip, limit: 0/s}, {name: open, key: ip, limit: 5/s burst 10}]\n")
    assert not examine(path)[1].diagnostics()


def test_a_key_of_a_blocked_rule_can_have_a_rate():
    """A rate alone, in the file or by an operator, is a token bucket where the rule blocks; blocked tiers name no algorithm."""
    closed = gate("{name: beta, key: user, limit: blocked, override: {ann: 1/s}}")
    closed.operator_overrides.put("beta", "ben", "2/s")
    allowed = [closed.ask(WrittenRequest("GET", "/", headers={"X-User": user})).allowed for user in ("ann", "ann", "ben", "eve")]
    assert allowed == [True, False, True, False]
    tiers = Policy.read(
        "identify: {plan: {header: X-Plan, default: free}}\n"
        "limits: [{name: a, key: ip, limit: {by: plan, free: 0/s, pro: fixed window 5/min}, override: {10.0.0.1: 9/min}}]"
    )
    assert str(tiers.rules[0].override[0][1][0]) == "fixed window 9/min"


@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        ("{name: a, key: ip, limit: fixed window 1/d, status: 503}, {name: b, key: ip, limit: blocked}", "b with 429"),
        ("{name: a, key: ip, capacity: 1/d, cost: 2}, {name: b, key: ip, limit: fixed window 1/d}", "b with 429"),
    ],
)
def test_an_explanation_names_the_rule_that_refuses(rules, verdict):
    """A blocked key is refused by its rule alone, and a capacity refuses only what the limits allow."""
    asked = gate(rules)
    asked.store.decide([Claim(one.named, "127.0.0.1") for rule in asked.compiled.rules for one in rule.default_entries], 0)
    request = WrittenRequest("GET", "/", peer="127.0.0.1")
    text = RequestExplanation(asked.policy, request, asked.explain(request)).text()
    refusal = asked.ask(WrittenRequest("GET", "/", peer="127.0.0.1")).refusal
    assert f"refused by {verdict}:" in text
    assert f"{refusal.rule.name} with {refusal.status}" == verdict


def test_an_explanation_shows_a_key_that_an_operator_blocks():
    """A key is refused with 429 also where its rule is in shadow mode or counts requests at a time."""
    for rule in ("{name: a, key: ip, limit: 5/s, on_refusal: shadow}", "{name: a, key: ip, concurrent: 3}"):
        asked = gate(rule)
        asked.operator_overrides.put("a", "*", "blocked")
        request = WrittenRequest("GET", "/")
        assert "refused by a with 429: never" in RequestExplanation(asked.policy, request, asked.explain(request)).text()
        assert asked.ask(WrittenRequest("GET", "/")).refusal.status == 429


@pytest.mark.parametrize("limit", ["[blocked, 5/s]", "[5/s, 0/s]", "[0/s, 0/s]"])
def test_a_list_with_a_blocked_limit_is_blocked(limit):
    """Limits of a list are charged together, and nothing passes a limit of 0: in a rule, in a tier and of a key."""
    rules = [
        f"{{name: a, key: ip, limit: {limit}}}",
        f"{{name: a, key: ip, limit: {{by: plan, free: {limit}}}}}",
        f"{{name: a, key: ip, limit: 9/s, override: {{10.0.0.1: {limit}}}}}",
    ]
    for rule in rules:
        assert not gate(rule).ask(WrittenRequest("GET", "/", peer="10.0.0.1")).allowed


@pytest.mark.parametrize("value", ["0/s", "fixed window 0/min", "blocked", "0", ["5/s", "blocked"], ("0/s",)])
def test_a_limit_of_zero_at_run_time(value):
    """The application and operators block a key with the syntax of the file."""
    rule = {"name": "a", "key": "ip", "limit": "9/s", "overrides": {"call": lambda key: value}}
    asked = Gate(Policy.of(limits=[rule]), store=MemoryStore(clock=ManualClock()))
    assert not asked.ask(WrittenRequest("GET", "/")).allowed
    if isinstance(value, str):
        operated = gate("{name: a, key: ip, limit: 9/s}")
        operated.operator_overrides.put("a", "*", value)
        assert not operated.ask(WrittenRequest("GET", "/")).allowed
