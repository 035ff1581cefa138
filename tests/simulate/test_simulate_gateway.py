"""Gateways in a simulation: the same decisions as the library, and what each kind of store admits."""

from __future__ import annotations

from random import Random

import pytest

from limitkeeper import LeasedStore, Limiter, MemoryStore, TokenBucket
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.simulate import Result, Scenario, Simulation
from limitkeeper.simulate.arrivals import arrival_times, user_numbers
from limitkeeper.simulate.event_loop import START_US
from limitkeeper.testing import ManualClock

ALGORITHMS = ("token bucket 5/s burst 10", "fixed window 5/s", "sliding window log 5/s", "sliding window counter 5/s")


def policy(limit: str, **rule: object) -> Policy:
    rules = [{"name": "all", "key": "user", "limit": limit, **rule}]
    return Policy.of(name="p", identify={"user": {"header": "X-User"}}, limits=rules)


def play(limit: str, rate: str = "1000/s", users: int = 1, duration: str = "3s", **gateway: object) -> Result:
    clients = {"all": {"arrivals": rate, "identities": {"user": "u{user}"}, "users": users}}
    rules = gateway.pop("policy", None) or policy(limit)
    return Simulation(Scenario.of(duration=duration, clients=clients, gateway={"policy": rules, **gateway})).run()


def decided_by_library(limit: str, scenario: Scenario) -> tuple[int, int]:
    """The same arrivals and users through a gate on a manual clock: (allowed, refused)."""
    client = scenario.clients[0]
    rng = Random(f"{scenario.seed} client {client.name}")
    users = user_numbers(client.users, client.zipf, Random(rng.random()))
    rng.random()
    times = arrival_times(client.profile, client.spacing, Random(rng.random()), START_US)
    clock = ManualClock()
    allowed = refused = 0
    gate = Gate(policy(limit), store=MemoryStore(clock=clock))
    for time in times:
        if time >= START_US + scenario.duration_us:
            return allowed, refused
        clock.advance((time - clock.now_us()) / 1e6)
        request = WrittenRequest("GET", "/", identities={"user": f"u{next(users)}"})
        if gate.ask(request):
            allowed += 1
        else:
            refused += 1
    raise AssertionError("the arrivals have no end")


@pytest.mark.parametrize("limit", ALGORITHMS)
def test_one_node_decides_as_the_library(limit):
    """One node on a store without latency admits and refuses exactly what a Gate does at the same times."""
    result = play(limit, "500/s", users=40)
    one = result.classes["all"]
    assert (one.ok, one.refused) == decided_by_library(limit, result.scenario)
    assert one.refused > 0


@pytest.mark.parametrize("limit", ALGORITHMS)
def test_a_trace_decides_as_the_library(limit):
    """A trace through a limiter admits exactly what Limiter.hit does at the same times."""
    scenario = Scenario.of(duration="3s", limit=limit, clients={"all": {"arrivals": "500/s", "users": {"count": 40, "zipf": 1}}})
    result = Simulation(scenario).run()
    client, clock = scenario.clients[0], ManualClock()
    limiter, rng = Limiter(limit, MemoryStore(clock=clock)), Random("1 client all")
    users = user_numbers(40, client.zipf, Random(rng.random()))
    times = arrival_times(client.profile, client.spacing, Random(rng.random()), START_US)
    expected = 0
    for _ in range(result.classes["all"].sent):
        clock.advance((next(times) - clock.now_us()) / 1e6)
        expected += bool(limiter.hit(f"all:{next(users)}"))
    assert result.classes["all"].ok == expected


def test_a_central_store_admits_no_more_than_the_limit():
    """Four nodes on one store 2 ms away admit burst + rate · T, and never more in any interval."""
    result = play("token bucket 100/s burst 50", nodes=4, store={"kind": "central", "latency": "2ms"})
    assert result.classes["all"].ok == pytest.approx(50 + 300, abs=1)
    assert result.admissions["all"].excess == 0


def test_stores_of_their_own_admit_the_limit_times_the_nodes():
    """Four nodes that count apart admit four times the limit: three bursts and three rates too many."""
    result = play("token bucket 100/s burst 50", nodes=4, store={"kind": "per-node"})
    assert result.classes["all"].ok == pytest.approx(4 * (50 + 300), abs=4)
    assert result.admissions["all"].excess == pytest.approx(3 * (50 + 300), abs=10)


def test_leases_stay_within_their_bound():
    """Four leased nodes exceed the limit by no more than over_admission says, and wait less often than on a central store."""
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
