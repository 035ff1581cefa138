"""Penalties that grow: a client that is refused too often again is refused for longer."""

from __future__ import annotations

import pytest
from gates import MODES, asked, gate, key, passes, request, rule

from limitkeeper import MemoryStore, TokenBucket
from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.policy import Policy, PolicyError
from limitkeeper.policy.explain import RequestExplanation
from limitkeeper.policy.model import Exemption, PenaltyBoxConfig, When
from limitkeeper.policy.penalty_box import sweep

MINUTE, HOUR, DAY = 60, 3600, 86_400
STEPS = PenaltyBoxConfig(parse_limit("fixed window 2/s"), MINUTE * 10**6, key("ip"), (HOUR * 10**6, DAY * 10**6))


def growing_gate(**said):
    return gate(rule("all", "fixed window 1/s", key=key("ip")), penalty_box=STEPS, **said)


def penalty(g, peer="192.0.2.7", mode="ask"):
    """Sends until the penalty box refuses; the penalty in seconds."""
    for _ in range(20):
        found = asked(g, request(peer=peer), mode)
        if not found.allowed and found.refusal.reason == "penalty box":
            return found.refusal.retry_after
    raise AssertionError("the penalty box did not refuse")


@pytest.mark.parametrize("mode", MODES)
def test_penalties_grow(mode):
    """The first penalty lasts a minute, the second an hour, the third and every further one a day."""
    g = growing_gate()
    for expected in (MINUTE, HOUR, DAY, DAY):
        assert penalty(g, mode=mode) == expected
        g.clock.advance(expected - 0.000001)
        assert not asked(g, request(), mode).allowed
        g.clock.advance(0.000001)
        assert asked(g, request(), mode).allowed


def test_a_client_that_behaves_begins_again():
    """An offence is remembered for a day, the longest step, after its penalty has ended; then the first step is due again."""
    g = growing_gate()
    assert penalty(g) == MINUTE
    g.clock.advance(MINUTE + DAY - 1)
    assert penalty(g) == HOUR
    g.clock.advance(HOUR + DAY)
    assert penalty(g) == MINUTE


def test_each_client_has_its_own_steps():
    """The offences of one client do not lengthen the penalty of another one."""
    g = growing_gate()
    assert penalty(g) == MINUTE
    g.clock.advance(MINUTE)
    assert penalty(g) == HOUR
    assert penalty(g, "192.0.2.8") == MINUTE


def test_requests_under_way_are_no_second_offence():
    """Refusals that are counted after the client was put into the box, because they were under way, do not raise its step."""
    g = growing_gate()
    refused = [found for found in (asked(g, request()) for _ in range(3)) if not found.allowed]
    late = refused[0]
    late.context = request()
    late.compiled = g.compiled
    begun = [g._penalty_box.count(late, late.decision)[1] for _ in range(50)]
    assert begun == [True] + [False] * 49
    assert asked(g, request()).refusal.retry_after == MINUTE


def test_the_memory_of_offences_is_bounded(monkeypatch):
    """A flood of offenders fills the memory: those in it keep their steps, others begin with the first step each time."""
    monkeypatch.setattr("limitkeeper.policy.penalty_box.MAX_CLIENTS", 3)
    g = growing_gate()
    for host in range(3):
        assert penalty(g, f"192.0.2.{host}") == MINUTE
    g.clock.advance(MINUTE)
    for _ in range(3):
        assert penalty(g, "192.0.2.9") == MINUTE
        g.clock.advance(MINUTE)
    assert len(g._penalty_box._offences) == 3
    for host in range(3):
        assert penalty(g, f"192.0.2.{host}") == HOUR
    g.clock.advance(2 * DAY)
    assert penalty(g, "192.0.2.9") == MINUTE  # expired entries make room
    g.clock.advance(MINUTE)
    assert penalty(g, "192.0.2.9") == HOUR


def test_one_step_remembers_nothing():
    """A penalty box with one duration keeps no offences."""
    g = gate(rule("all", "fixed window 1/s", key=key("ip")), penalty_box=PenaltyBoxConfig(parse_limit("2/s"), MINUTE * 10**6))
    for _ in range(3):
        assert penalty(g) == MINUTE
        g.clock.advance(MINUTE)
    assert not g._penalty_box._offences
    assert passes(g, 1) == [True]


def test_steps_are_read_from_a_file():
    """`for` is a duration or a list of durations."""
    read = Policy.read("penalty_box: {after: 100/min, for: [1min, 1h, 1d]}\nlimits: [{name: a, limit: 5/s}]")
    steps = (HOUR * 10**6, DAY * 10**6)
    assert read.penalty_box == PenaltyBoxConfig(TokenBucket("100/min"), MINUTE * 10**6, then_us=steps)
    one = Policy.read("penalty_box: {after: 100/min, for: 1min}\nlimits: [{name: a, limit: 5/s}]")
    assert one.penalty_box == PenaltyBoxConfig(TokenBucket("100/min"), MINUTE * 10**6)


def test_steps_must_grow():
    """A step that is not longer than the one before is an error that names both."""
    with pytest.raises(PolicyError, match=r"a penalty of 60 s does not grow: the one before it is 60 s; write longer"):
        Policy.read("penalty_box: {after: 100/min, for: [1min, 60s]}\nlimits: [{name: a, limit: 5/s}]")


def test_the_retry_of_one_user_is_not_that_of_another_at_the_same_address():
    """A client that shares an address with another one whose daily quota is used up is sent the end of the penalty."""
    shared = gate(rule("daily", "fixed window 1/day", key=key("user")), penalty_box=STEPS)
    for _ in range(4):
        ann = asked(shared, request(user="ann"))
    assert ann.refusal.retry_after > HOUR
    bob = asked(shared, request(user="bob"))
    assert (bob.refusal.reason, bob.refusal.retry_after) == ("penalty box", MINUTE)
    shared.clock.advance(MINUTE)
    assert asked(shared, request(user="bob")).allowed


@pytest.mark.parametrize("said", [{"when": When(absent=("partner",))}, {"exempt": True}], ids=["when", "exempt"])
def test_the_box_names_no_retry_of_a_rule_that_does_not_apply(said):
    """A request that a rule does not limit is sent the end of the penalty, though others of its key are refused for longer."""
    exempt = (Exemption(when=When(present=("partner",)), rules=("daily",)),) if said.pop("exempt", False) else ()
    shared = gate(rule("daily", "fixed window 1/day", key=key("ip"), **said), penalty_box=STEPS, exempt=exempt)
    for _ in range(5):
        ann = asked(shared, request())
    assert ann.refusal.retry_after > HOUR
    partner = asked(shared, request(partner="acme"))
    assert (partner.refusal.reason, partner.refusal.retry_after) == ("penalty box", MINUTE)
    shared.clock.advance(MINUTE)
    assert asked(shared, request(partner="acme")).allowed


def test_the_box_names_the_longest_retry_of_a_rule():
    """Of a rule with several limits that refuse, the box remembers the longest retry: a client that waits so long is admitted."""
    short = PenaltyBoxConfig(parse_limit("fixed window 2/s"), MINUTE * 10**6, key("ip"))
    g = gate(rule("all", "fixed window 5/h; fixed window 5/s", key=key("ip")), penalty_box=short)
    wait = penalty(g)
    assert wait == HOUR
    g.clock.advance(wait)
    assert asked(g, request()).allowed


def test_a_sweep_while_threads_add():
    """Entries that other threads add during a sweep do not interrupt it, and are kept."""
    entries = dict.fromkeys(range(1000), True)

    def is_over(value):
        entries[len(entries) + 1000] = False  # as another thread may do here
        return value

    sweep(entries, is_over)
    assert set(entries.values()) == {False}


def test_explain_names_the_penalty():
    """`explain` shows that the penalty box refuses, and its retry time, as the response does; it counts nothing."""
    g = growing_gate()
    penalty(g)
    counted = g.snapshot()
    explained = RequestExplanation(g.policy, request(), g.explain(request()))
    assert explained.text().splitlines()[-1] == "→ refused by the penalty box with 429: retry in 60 s"
    assert (explained.as_dict()["allowed"], explained.as_dict()["penalty"]) == (False, 60)
    assert g.snapshot() == counted
    other = request(peer="192.0.2.8")
    assert RequestExplanation(g.policy, other, g.explain(other)).text().endswith("→ allowed")
    g.clock.advance(MINUTE)
    assert RequestExplanation(g.policy, request(), g.explain(request())).text().endswith("→ allowed")


def test_refusals_of_other_clients_box_no_further_client():
    """When more clients are refused than are counted, a further client is refused by its limits alone."""
    g = growing_gate()
    g._penalty_box._store = MemoryStore(10, g.clock)
    for client in range(2000):
        passes(g, 2, peer=f"192.0.{client >> 8}.{client & 255}")
    for client in range(100):
        assert passes(g, 2, peer=f"198.51.100.{client}") == [True, False]
        assert asked(g, request(peer=f"198.51.100.{client}")).refusal.reason == "quota"
