"""The policy file of a plan passes `policy check`, and enforces the plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.plan import capacity, make_plan, policy_text
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.policy.reading.load import examine
from limitkeeper.testing import ManualClock

SOURCE = capacity(pods=10, concurrency=40, p95="800ms")


def checked(plan, folder):
    """The policy of a plan, whose file has neither errors nor warnings."""
    file = folder / "planned.yaml"
    file.write_text(policy_text(plan))
    policy, context = examine(file)
    assert policy is not None, context.diagnostics()
    assert [one for one in context.diagnostics() if one.severity != "note"] == []
    return policy


def limits_of(policy):
    return {rule.name: [str(limit) for limit in rule.limit] for rule in policy.rules if isinstance(rule.limit, tuple)}


def test_the_plan_of_the_source_document_is_a_valid_policy(tmp_path):
    """Capacity 350/s, partners 200/s, the public 150/s, and 5/s for each user of POST /checkout."""
    plan = make_plan(SOURCE, split_by="partner=200,public=rest", per_key={"user": 5}, match=["POST /checkout"], name="checkout")
    policy = checked(plan, tmp_path)
    assert (policy.name, policy.instances, policy.safe_concurrency) == ("checkout", 10, 40)
    assert limits_of(policy) == {
        "capacity": ["token bucket 350/s burst 120"],
        "share-partner": ["token bucket 200/s burst 68"],
        "share-public": ["token bucket 150/s burst 51"],
        "per-user": ["token bucket 5/s burst 10"],
        "per-address": ["token bucket 5/s burst 10"],
    }


def test_tiers_endpoints_tenants_and_internal_jobs_have_rules(tmp_path):
    """Every part of a plan has a rule, and endpoints have their own match."""
    plan = make_plan(
        SOURCE,
        split_by={"partner": "40%", "mobile": "30%", "public": "rest"},
        endpoints="POST /checkout=100,GET /products/**=rest",
        per_key={"user": "free=5,pro=20", "tenant": 50, "partner": 100},
        internal=20,
    )
    policy = checked(plan, tmp_path)
    names = [rule.name for rule in policy.rules]
    assert names[:2] == ["capacity", "internal"]
    assert {"share-mobile", "endpoint-1-post-checkout", "endpoint-2-get-products", "per-user", "per-tenant", "per-partner"} <= {
        *names
    }
    tiers = next(rule.limit for rule in policy.rules if rule.name == "per-user")
    assert [(name, str(limits[0])) for name, limits in tiers.limits] == [
        ("free", "token bucket 5/s burst 10"),
        ("pro", "token bucket 20/s burst 40"),
    ]


def test_the_written_shares_hold_when_all_classes_flood(tmp_path):
    """In four seconds of 500 partner and 500 public requests per second, each class gets its rate and burst, and no more."""
    policy = checked(make_plan(SOURCE, split_by="partner=200,public=rest"), tmp_path)
    clock = ManualClock()
    gate = Gate(policy, store=MemoryStore(clock=clock))
    admitted = {"partner": 0, "public": 0}
    for _ in range(2000):
        for name, headers in (("partner", {"X-Api-Key": "k"}), ("public", {})):
            admitted[name] += gate.ask(WrittenRequest("POST", "/checkout", headers=headers)).allowed
        clock.advance(0.002)
    assert admitted["partner"] in range(800, 800 + 68 + 1)
    assert admitted["public"] in range(600, 600 + 51 + 1)


def test_oversubscribed_shares_are_named_in_the_file(tmp_path):
    """A comment in the policy states that the shares exceed the limit, which still holds for all together."""
    plan = make_plan(SOURCE, split_by="partner=300,public=200", oversubscription=1.5)
    checked(plan, tmp_path)
    assert "OVER-SUBSCRIBED on request: all shares add up to 500 RPS" in policy_text(plan)
    assert "token bucket 350/s" in policy_text(plan)


names = st.one_of(
    st.text("aB1-_. \"'{}:#é", min_size=1, max_size=5), st.sampled_from(["ip", "plan", "user", "rest", "on", "null"])
)


@settings(max_examples=40)
@given(st.dictionaries(names, st.integers(1, 100), min_size=1, max_size=3), st.sampled_from(["5", "a=1,b=2", "0.25"]))
def test_whatever_shares_are_called_the_file_is_valid(shares, per_user):
    """Names of shares are text from outside: the policy is valid, or the name is refused."""
    try:
        text = policy_text(make_plan(SOURCE, split_by=shares, per_key={"user": per_user}))
    except ConfigurationError:
        return
    Policy.read(text)


def test_two_classes_without_an_identity_are_refused():
    """Only one class can be the rest."""
    with pytest.raises(ConfigurationError, match="public and others are both"):
        policy_text(make_plan(SOURCE, split_by="public=100,others=rest"))


def test_unknown_keys_and_plans_are_refused():
    """Limits per key are for users, tenants and partners; plans have plain names."""
    with pytest.raises(ConfigurationError, match="unknown key 'planet'"):
        make_plan(SOURCE, per_key={"planet": 5})
    with pytest.raises(ConfigurationError, match="no name of a plan"):
        make_plan(SOURCE, per_key={"user": "a{}=5"})
    with pytest.raises(ConfigurationError, match="burst must be at least 1"):
        make_plan(SOURCE, burst=0)


@pytest.mark.parametrize("options", [{"match": ["nonsense"]}, {"endpoints": {"GET /a b": "60%", "GET /b": "rest"}}])
def test_what_no_policy_accepts_as_a_match_is_refused(options):
    """With the remedy, before a file is written."""
    with pytest.raises(ConfigurationError, match=r"'.*' does not match requests: .*; write"):
        make_plan(SOURCE, **options)


def test_a_partner_behind_one_address_is_not_limited_as_a_user(tmp_path):
    """The limit of an address is for clients without an identity; a partner's users keep theirs."""
    plan = make_plan(SOURCE, split_by="partner=200,public=rest", per_key={"user": 5})
    with Gate(checked(plan, tmp_path), store=MemoryStore(clock=ManualClock())) as gate:

        def admitted(**headers: str) -> int:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            return sum(gate.ask(WrittenRequest("POST", "/", headers=given)).allowed for _ in range(30))

        assert [admitted(X_Api_Key="acme"), admitted(X_Api_Key="acme", X_User="42"), admitted()] == [30, 10, 10]
