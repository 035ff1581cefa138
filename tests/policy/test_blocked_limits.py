"""A limit of 0 in a policy ("blocked", "0/s") refuses every request, for ever, and asks no store."""

from __future__ import annotations

import pytest

from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy, PolicyError
from limitkeeper.policy.model import BLOCKED
from limitkeeper.policy.one_line_request import WrittenRequest
from limitkeeper.policy.reading.load import examine
from limitkeeper.testing import ManualClock


def gate(rule: str) -> Gate:
    text = f"identify: {{plan: {{header: X-Plan, default: free}}, user: {{header: X-User}}}}\nlimits: [{rule}]"
    return Gate(Policy.read(text), store=MemoryStore(clock=ManualClock()))


@pytest.mark.parametrize("text", ["blocked", "0/s", "0 per minute", "fixed window 0/min", "0 / 5 min", "Blocked"])
def test_a_rule_of_zero_refuses_every_request(text):
    """The rule refuses with 429 and never says when to retry; the store stays empty."""
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


def test_checks_know_that_a_blocked_limit_has_no_size():
    """A cost of any size is no error under a limit of 0, and shadow mode is an error."""
    policy = Policy.of(limits=[{"name": "a", "key": "ip", "limit": "0/s", "cost": 5}])
    assert str(policy.rules[0].limit[0]) == "blocked"
    with pytest.raises(PolicyError, match="a blocked key is refused at once"):
        Policy.of(limits=[{"name": "a", "key": "ip", "limit": "0/s", "on_refusal": "shadow"}])


def test_a_blocked_rule_cuts_no_burst(tmp_path):
    """`check` does not say that a rule which refuses everything cuts the burst of another one to 1."""
    path = tmp_path / "policy.yaml"
    path.write_text("limits: [{name: closed, key: ip, limit: 0/s}, {name: open, key: ip, limit: 5/s burst 10}]\n")
    assert not examine(path)[1].diagnostics()
