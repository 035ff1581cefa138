"""Features of a policy two at a time: each works as it does alone."""

from __future__ import annotations

import asyncio
import threading

import pytest
from gates import asked

from limitkeeper import ConfigurationError, MemoryStore, StoreUnavailable
from limitkeeper.policy import Policy, WrittenRequest
from limitkeeper.policy.gate import Gate
from limitkeeper.testing import ManualClock
from stand_ins import WrappedStore

MODES = ("ask", "aask")


def gate_of(text: str, store: MemoryStore | None = None) -> Gate:
    return Gate(Policy.read(text), store=MemoryStore(clock=ManualClock(1_000_000)) if store is None else store)


def received(gate: Gate, facts: WrittenRequest, mode: str = "ask"):
    return asyncio.run(gate.aask(facts)) if mode == "aask" else gate.ask(facts)


TENANTS = """
identify: {tenant: {path: tenant_id}}
penalty_box: {after: fixed window 2/min, for: 60s, key: [tenant, ip]}
limits: [{name: tenant, match: "/t/{tenant_id}/**", key: tenant, limit: fixed window 3/min}]
"""


@pytest.mark.parametrize("mode", MODES)
def test_shutting_out_by_a_part_of_the_path_leaves_the_other_rules_as_they_are(mode):
    """While a client is in the penalty box, keys from the path still exist: it stays out, and others are limited as before."""
    gate = gate_of(TENANTS)
    answers = [received(gate, WrittenRequest("GET", "/t/one/x", peer="192.0.2.1"), mode) for _ in range(8)]
    assert [answer.allowed for answer in answers] == [True] * 3 + [False] * 5
    assert answers[-1].refusal.reason == "penalty box"
    others = [received(gate, WrittenRequest("GET", "/t/two/x", peer="192.0.2.2"), mode).allowed for _ in range(5)]
    assert others == [True] * 3 + [False] * 2


BYTES = "limits: [{name: bytes, key: ip, limit: fixed window 100/day, cost: {response: 1kB}, alert: 80%}]"


@pytest.mark.parametrize("mode", MODES)
def test_a_response_that_crosses_the_mark_alerts(mode):
    """Spending that is known when the response has ended causes an alert when it crosses the mark: once."""
    gate, heard = gate_of(BYTES), []
    gate.events.on("alert", heard.append)
    alerts = []
    for _ in range(20):
        evaluation = received(gate, WrittenRequest(), mode)
        if evaluation.allowed:
            asyncio.run(evaluation.asettle(200, 7_000)) if mode == "aask" else evaluation.settle(200, 7_000)
        alerts.append(gate.snapshot().rules[0].alerts)
    assert alerts == [0] * 11 + [1] * 9  # 12 × 7 kB
    assert len(heard) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_response_of_known_size_that_crosses_the_mark_alerts(mode):
    """A size that is charged before the response is sent alerts as one that is charged afterwards: once."""
    gate = gate_of(BYTES)
    alerts = []
    for _ in range(14):
        evaluation = received(gate, WrittenRequest(), mode)
        assert asyncio.run(evaluation.aafford(200, 7_000)) if mode == "aask" else evaluation.afford(200, 7_000)
        asyncio.run(evaluation.asettle(200, 7_000)) if mode == "aask" else evaluation.settle(200, 7_000)
        alerts.append(gate.snapshot().rules[0].alerts)
    assert alerts == [0] * 11 + [1] * 3  # 12 × 7 kB


def test_a_rule_without_a_mark_does_not_alert_of_a_response_of_known_size():
    """No alert level is no level of 0."""
    gate = gate_of(BYTES.replace(", alert: 80%", ""))
    assert gate.ask(WrittenRequest()).afford(200, 90_000)
    assert gate.snapshot().rules[0].alerts == 0


def test_a_request_that_crosses_the_mark_alerts_once_with_its_response():
    """A mark that the estimate crossed causes no second alert when the rest is charged."""
    gate = gate_of(BYTES.replace("{response: 1kB}", "{response: 1kB, estimate: 80}"))
    gate.ask(WrittenRequest()).settle(200, 90_000)
    assert gate.snapshot().rules[0].alerts == 1


LOGIN = "{name: login, key: ip, limit: fixed window 5/min, charge: {status: [401]}, on_refusal: shadow}"


@pytest.mark.parametrize("more", ["", ", {name: all, limit: 1000/s}"], ids=["alone", "beside another"])
@pytest.mark.parametrize("mode", MODES)
def test_a_rule_in_shadow_counts_what_it_will_count_in_earnest(mode, more):
    """Outcomes that do not count go back in shadow too: only failed logins would have been refused."""
    gate = gate_of(f"limits: [{LOGIN}{more}]")
    for status in [200] * 20 + [401] * 7:
        evaluation = received(gate, WrittenRequest(), mode)
        assert evaluation.needs_settlement
        asyncio.run(evaluation.asettle(status)) if mode == "aask" else evaluation.settle(status)
    tally = gate.snapshot().rules[0]
    assert (tally.passed, tally.shadow_refused, tally.given_back) == (25, 2, 20)


def test_a_function_that_judges_outcomes_is_given_the_facts_in_shadow_too():
    """Where only a rule in shadow applies, its function still gets the outcome's request."""
    seen = []
    rule = {"name": "a", "key": "ip", "limit": "5/min", "on_refusal": "shadow", "charge": lambda s, f: seen.append((s, f.path))}
    with Gate(Policy.of(limits=[rule]), store=MemoryStore()) as gate:
        gate.ask(WrittenRequest("GET", "/x")).settle(404)
    assert seen == [(404, "/x")]


class Broken(MemoryStore):
    """A local store that has stopped answering."""

    def decide(self, *args, **kwargs):
        raise StoreUnavailable("gone")


@pytest.mark.parametrize("mode", MODES)
def test_a_repetition_that_can_not_be_looked_up_is_answered_by_its_on_failure(mode):
    """A rule that is closed when the store fails is closed to requests with an idempotency key too."""
    gate = gate_of("limits: [{name: a, key: ip, limit: 5/min, once: Idempotency-Key, on_failure: closed}]", Broken())
    evaluation = received(gate, WrittenRequest(headers={"Idempotency-Key": "k"}), mode)
    assert (evaluation.allowed, evaluation.refusal.reason) == (False, "store")
    assert gate.snapshot().rules[0].failed_closed == 1


def test_what_was_charged_in_one_store_goes_back_to_it():
    """A version with another store does not forgive clients what the old one had charged."""
    said = 'name: a\nstore: "memory://{}"\nlimits: [{{name: x, key: ip, limit: fixed window 5/day, charge: {{status: [401]}}}}]'
    with Gate(Policy.read(said.format(""))) as gate:
        old = [gate.ask(WrittenRequest()) for _ in range(5)]
        gate.reload(Policy.read(said.format("?max_keys=1000")))
        for _ in range(5):
            gate.ask(WrittenRequest()).settle(401)
        for evaluation in old:
            evaluation.settle(200)
        assert not gate.ask(WrittenRequest()).allowed
        gate.reload(Policy.read(said.format("")))
        assert gate.ask(WrittenRequest()).allowed


def client_of(facts):
    """The application's value of the client's address."""
    return facts.header("x-client")


def test_an_address_from_the_application_is_matched_against_networks():
    """`ip: {call: …}` is the client's address for classes, exemptions and overrides, not only for keys."""
    policy = Policy.of(
        identify={
            "ip": {"call": client_of},
            "user": {"call": lambda facts: facts.header("user")},
            "class": {"network": {"inside": ["10.0.0.0/8"]}, "default": "outside"},
        },
        exempt=[{"network": "10.9.0.0/16"}],
        limits=[
            {"name": "a", "key": "user | ip", "when": {"class": "outside"}, "limit": "5/s", "override": {"192.0.2.9": "9/s"}}
        ],
    )
    with Gate(policy, store=MemoryStore()) as gate:

        def status_of(client, peer="10.9.0.1", **headers):
            (one,) = gate.explain(WrittenRequest(peer=peer, headers={"X-Client": client, **headers}))
            return one.reason or str(one.entries[0].named.limit)

        assert status_of("192.0.2.1") == "token bucket 5/s burst 5"
        assert status_of("192.0.2.9") == "token bucket 9/s burst 9"
        assert status_of("192.0.2.1", user="192.0.2.9") == "token bucket 5/s burst 5"  # no client gets another one's address
        assert status_of("10.1.0.1") == "class is inside, not outside"
        assert status_of("10.9.0.7", peer="192.0.2.1") == "the request is exempt"


def test_a_function_that_would_have_to_be_awaited_is_refused_when_the_gate_is_made():
    """A decision does not await a coroutine, in whichever field; a handler may be one."""

    async def later(*args):
        return 1

    for said in ({"cost": later}, {"charge": later}, {"cost": {"call": "asyncio:sleep"}}):
        with pytest.raises(ConfigurationError, match="is async, and a decision can't await"):
            Gate(Policy.of(limits=[{"name": "a", "key": "ip", "limit": "5/s", **said}]), store=MemoryStore())
    Gate(Policy.of(limits=[{"name": "a", "key": "ip", "limit": "5/s", "on_refusal": later}]), store=MemoryStore()).close()


def test_versions_that_come_at_once_follow_each_other():
    """Many threads reload: in the end policy and store belong to one version, and all reloads were counted."""
    versions = [
        Policy.read(f"store: memory://?max_keys={n}\nlimits: [{{name: a, key: ip, limit: {n}/s}}]") for n in range(100, 104)
    ]
    with Gate(versions[0]) as gate:
        threads = [threading.Thread(target=lambda v=v: [gate.reload(v) for _ in range(20)]) for v in versions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gate.snapshot().reloads == 80
        assert gate.store is gate.compiled.store is gate._opened.store


def test_what_ends_after_a_reload_is_counted():
    """Requests that began with a version before are part of the sum, however many versions came since."""
    text = "limits: [{name: a, key: ip, limit: 5/min, charge: {status: [401]}}]"
    gate = gate_of(text)
    begun = []
    for _ in range(20):
        begun.append(gate.ask(WrittenRequest(peer=f"192.0.2.{len(begun)}")))
        gate.reload(Policy.read(text))
    for evaluation in begun[-8:]:
        evaluation.settle(200)
    tally = gate.snapshot().rules[0]
    assert (tally.passed, tally.given_back) == (20, 8)
    assert gate.compiled.rules[0].predecessors[0].predecessors == []


def test_an_override_may_be_said_of_one_identity_only():
    """A user named like a partner has the partner's limit only where the override does not name the identity."""
    policy = Policy.of(
        identify={"partner": {"header": "X-Key"}, "user": {"header": "X-User"}},
        limits=[{"name": "a", "key": "partner | user", "limit": "5/s", "override": {"partner:acme": "9/s", "initech": "8/s"}}],
    )
    with Gate(policy, store=MemoryStore()) as gate:

        def most(**headers):
            return gate.explain(WrittenRequest(headers={f"x-{name}": value for name, value in headers.items()}))[0].decision.limit

        assert (most(key="acme"), most(user="acme")) == (9, 5)
        assert (most(key="initech"), most(user="initech")) == (8, 8)


@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_a_store_that_fails_leaves_nothing_of_a_rule_in_shadow_to_settle(mode):
    """A charge that was never made is not given back, whatever the response is."""
    store = WrappedStore(MemoryStore(clock=ManualClock(0)), local=mode == "ask")
    said = {"key": "ip", "limit": "fixed window 5/min", "charge": {"status": [401]}}
    policy = Policy.of(budget="10s", limits=[{"name": "real", **said}, {"name": "trial", **said, "on_refusal": "shadow"}])
    with Gate(policy, store=store, clock=store.clock) as gate:
        for failing in ({"decide"}, {"decide_many"}, set()):
            store.failing = failing
            evaluation = asked(gate, WrittenRequest("GET", "/", peer="10.0.0.1"), mode)
            assert evaluation.allowed
            evaluation.settle(200)
        assert {compiled_rule.name: compiled_rule.given_back for compiled_rule in gate.compiled.rules} == {"real": 2, "trial": 1}


@pytest.mark.parametrize(("charge", "wait"), [("", 60), (", charge: {status: 4xx}", 3), (", concurrent: 1", 60)])
def test_the_retry_of_a_response_refused_by_its_size_holds_for_all_limits(charge, wait):
    """The same request passes after the retry: other limits, which this request has used up, count; refunded charges do not."""
    requests = "{name: requests, key: ip, limit: token bucket 1/min burst 2" + charge + "}"
    size = "{name: bytes, key: ip, limit: token bucket 10/s burst 100, cost: {response: 1kB, estimate: 1}}"
    gate = gate_of(f"limits: [{requests}, {size}]")
    first = gate.ask(WrittenRequest())
    assert first.afford(200, 60_000)
    first.settle(200, 60_000)
    second = gate.ask(WrittenRequest())
    assert not second.afford(200, 60_000)
    assert second.refusal.retry_after == wait
    gate.clock.advance(wait)
    last = gate.ask(WrittenRequest())
    assert last.allowed
    assert last.afford(200, 60_000)
