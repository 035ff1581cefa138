"""Gateways in a simulation: the same decisions as the library, and the admitted requests of each kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from random import Random

import pytest

from limitkeeper import Decision, LeasedStore, Limit, Limiter, MemoryStore, TokenBucket
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.simulate import Result, Scenario, Simulation, single_limiter_run
from limitkeeper.simulate.arrivals import arrival_times, user_numbers
from limitkeeper.simulate.event_loop import START_US
from limitkeeper.simulate.gateway import Gateway
from limitkeeper.testing import ManualClock

ALGORITHMS = ("token bucket 5/s burst 10", "fixed window 5/s", "sliding window log 5/s", "sliding window counter 5/s")


def policy(limit: str, **rule: object) -> Policy:
    rules = [{"name": "all", "key": "user", "limit": limit, **rule}]
    return Policy.of(name="p", identify={"user": {"header": "X-User"}}, limits=rules)


def play(limit: str, rate: str = "1000/s", users: int = 1, duration: str = "3s", **gateway: object) -> Result:
    clients = {"all": {"arrivals": rate, "identities": {"user": "u{user}"}, "users": users}}
    rules = gateway.pop("policy", None) or policy(limit)
    return Simulation(Scenario.of(duration=duration, clients=clients, gateway={"policy": rules, **gateway})).run()


#: The time, the key, and the decision.
Answer = tuple[int, str, bool, int, float]


def answer(time_us: int, key: str, decision: Decision) -> Answer:
    assert decision.retry_after is not None
    return time_us, key, decision.allowed, decision.remaining, decision.retry_after


def arrivals(scenario: Scenario, endpoints: bool) -> Iterator[tuple[int, int]]:
    """The times and users of a scenario's only client, drawn as the simulation draws them."""
    client = scenario.clients[0]
    rng = Random(f"{scenario.seed} client {client.name}")
    users = user_numbers(client.users, client.zipf, Random(rng.random()))
    if endpoints:
        rng.random()
    times = arrival_times(client.profile, client.spacing, Random(rng.random()), START_US)
    return zip(takewhile(lambda time: time < START_US + scenario.duration_us, times), users, strict=False)


@pytest.mark.parametrize("limit", ALGORITHMS)
def test_one_node_decides_as_the_library(limit, monkeypatch):
    """One node on a store without latency gives, decision by decision, the answers of a Gate at the same times."""
    simulated: list[Answer] = []
    decided = Gateway._decided

    def recorded(self, request, reply, evaluation):
        simulated.append(answer(self.loop.now, evaluation.keys[0], evaluation.decision))
        decided(self, request, reply, evaluation)

    monkeypatch.setattr(Gateway, "_decided", recorded)
    scenario = play(limit, "500/s", users=40).scenario
    clock, expected = ManualClock(), []
    gate = Gate(policy(limit), store=MemoryStore(clock=clock))
    for time, user in arrivals(scenario, endpoints=True):
        clock.advance((time - clock.now_us()) / 1e6)
        evaluation = gate.ask(WrittenRequest("GET", "/", identities={"user": f"u{user}"}))
        expected.append(answer(time, evaluation.keys[0], evaluation.decision))
    assert simulated == expected
    assert {allowed for _, _, allowed, _, _ in expected} == {True, False}


@pytest.mark.parametrize("limit", ALGORITHMS)
def test_a_trace_decides_as_the_library(limit, monkeypatch):
    """A trace through a limiter gives, decision by decision, the answers of Limiter.hit at the same times."""
    simulated: list[Answer] = []

    class RecordedLimiter:
        def __init__(self, limit: Limit, store: MemoryStore) -> None:
            self.limiter, self.clock = Limiter(limit, store), store.clock

        def hit(self, key: str) -> Decision:
            decision = self.limiter.hit(key)
            simulated.append(answer(self.clock.now_us(), key, decision))
            return decision

    monkeypatch.setattr(single_limiter_run, "Limiter", RecordedLimiter)
    scenario = Scenario.of(duration="3s", limit=limit, clients={"all": {"arrivals": "500/s", "users": {"count": 40, "zipf": 1}}})
    Simulation(scenario).run()
    clock, expected = ManualClock(), []
    limiter = Limiter(limit, MemoryStore(clock=clock))
    for time, user in arrivals(scenario, endpoints=False):
        clock.advance((time - clock.now_us()) / 1e6)
        expected.append(answer(time, f"all:{user}", limiter.hit(f"all:{user}")))
    assert simulated == expected
    assert {allowed for _, _, allowed, _, _ in expected} == {True, False}


def test_a_central_store_admits_no_more_than_the_limit():
    """Four nodes on one store 2 ms away admit burst + rate · T, and never more in any interval."""
    result = play("token bucket 100/s burst 50", nodes=4, store={"kind": "central", "latency": "2ms"})
    assert result.classes["all"].ok == pytest.approx(50 + 300, abs=1)
    assert result.admissions["all"].excess == 0


def test_stores_of_their_own_admit_the_limit_times_the_nodes():
    """Four nodes that count separately admit four times the limit: three bursts and three rates too many."""
    result = play("token bucket 100/s burst 50", nodes=4, store={"kind": "per-node"})
    assert result.classes["all"].ok == pytest.approx(4 * (50 + 300), abs=4)
    assert result.admissions["all"].excess == pytest.approx(3 * (50 + 300), abs=10)


def test_leases_stay_within_their_bound():
    """Four leased nodes exceed the limit by at most over_admission, and wait less often than on a central store."""
    limit, store = "token bucket 200/s burst 100", {"kind": "leased", "latency": "20ms", "life": "200ms"}
    result = play(limit, nodes=4, store=store)
    bound = LeasedStore(MemoryStore(), life="200ms").over_admission(TokenBucket("200/s burst 100"), nodes=4)
    assert 0.9 * (100 + 600) <= result.classes["all"].ok <= 100 + 600 + bound
    assert result.admissions["all"].excess <= bound
    assert result.classes["all"].percentile(50) < 0.02


def test_shards_are_exact():
    """A store of four shards admits what one store does, for every user."""
    sharded = play("token bucket 10/s burst 10", users=30, nodes=3, store={"kind": "sharded", "latency": "1ms"})
    central = play("token bucket 10/s burst 10", users=30, nodes=3, store={"kind": "central", "latency": "1ms"})
    assert sharded.classes["all"].ok == central.classes["all"].ok
    assert sharded.admissions["all"].excess == 0


def test_a_crashed_node_forgets_what_it_counted():
    """A node with a store of its own admits a second burst after a crash; the others take its requests meanwhile."""
    store = {"kind": "per-node"}
    calm = play("token bucket 10/s burst 100", nodes=2, store=store)
    crashed = play("token bucket 10/s burst 100", nodes=2, store=store, faults=[{"at": "1s", "down": "500ms", "node": 0}])
    assert crashed.classes["all"].ok - calm.classes["all"].ok == pytest.approx(100 - 5, abs=3)
    assert crashed.classes["all"].failed == 0


@pytest.mark.parametrize(("mode", "admitted"), [("open", 1000), ("closed", 0)])
def test_a_failed_store_is_answered_by_the_rule(mode, admitted):
    """While the store is down for a second, a rule that fails open admits everything, one that fails closed nothing."""
    rules = policy("token bucket 10/s burst 10", on_failure=mode)
    faults = [{"at": "1s", "down": "1s", "loses": False}]
    result = play("", policy=rules, store={"kind": "central", "latency": "1ms"}, faults=faults)
    within = sum(row["all.ok"] for row in result.series[1:2])
    assert within == pytest.approx(admitted, rel=0.1, abs=15)


def test_a_skewed_clock_moves_the_windows_of_its_node():
    """Nodes with stores of their own and clocks half a window apart begin their fixed windows at other times."""
    result = play("fixed window 100/s", nodes=2, store={"kind": "per-node"}, skew=["0s", "500ms"])
    assert result.classes["all"].ok > 2 * 3 * 100
