"""The flash sale: without limits one client harms all others, with limits no other client is affected."""

from __future__ import annotations

import pytest
from scaled_flash_sale import FOLDER, play, scaled

from limitkeeper import LeasedStore, MemoryStore, TokenBucket
from limitkeeper.plan import Slo, capacity
from limitkeeper.policy import Policy
from limitkeeper.simulate import Result, Scenario, Simulation

pytestmark = pytest.mark.untraced


@pytest.fixture(scope="module")
def without() -> Result:
    return play("without_limits")


def test_without_limits_the_cascade_appears(without):
    """Pools saturate, calls time out, retries more than double the attempts, and orders are written twice or in doubt."""
    order = without.services["order"]
    assert order.most_in_use == len(order.pods) * order.concurrency
    to_order = next(call for call in without.calls if call.name == "gateway → order")
    assert to_order.timeouts > 100
    assert to_order.attempts > 2 * to_order.calls
    partner = without.classes["partner"]
    assert partner.attempts > 2 * partner.sent
    assert partner.duplicates + partner.inconsistent > 0


def test_without_limits_unrelated_endpoints_fail(without):
    """Clients that mostly read products lose most of their requests once the partner's loop is at its height."""
    late = [row for row in without.series if row["time"] > 32]
    assert sum(row["public.failed"] for row in late) > sum(row["public.ok"] for row in late)


@pytest.mark.parametrize("name", ["layer_1", "layers_1_2_3"])
def test_with_limits_all_others_are_served(name):
    """The partner is held at its rate and burst, and the objectives hold for all others, who are not refused."""
    result = play(name)
    partner, public = result.classes["partner"], result.classes["public"]
    time = 30.0  # of the partner's traffic
    assert result.admissions["partner"].admitted <= 20 + 10 * time
    assert result.admissions["partner"].excess == 0
    assert partner.refused > 0.9 * partner.sent
    assert public.refused <= 0.001 * public.sent
    assert all(check.met for check in result.slo_checks("public"))
    assert public.ok >= 0.98 * public.sent


def test_one_looping_user_is_bound_by_its_own_limit():
    """The binding key: one looping user by checkout 5/s burst 10, many users of one partner by the partner's limit."""
    one, many = play("one_looping_user"), play("layer_1")
    assert one.classes["partner"].rules.most_common(1)[0][0] == "checkout"
    assert one.admissions["partner"].admitted <= 10 + 5 * 30
    assert many.classes["partner"].rules.most_common(1)[0][0] == "partner"


def test_idempotency_keys_prevent_orders_that_are_written_twice():
    """With idempotency keys the same overload writes no order twice."""
    assert not any(one.idempotency_key for one in Scenario.load(FOLDER / "without_limits.yaml").clients)
    scenario = scaled("without_limits", duration="25s")
    clients = tuple(type(one)(**{**vars(one), "idempotency_key": True}) for one in scenario.clients)
    result = Simulation(Scenario(**{**vars(scenario), "clients": clients})).run()
    assert sum(one.duplicates for one in result.classes.values()) == 0


def test_ten_pods_of_forty_hold_the_slo_at_350():
    """At 350 RPS through 10 × 40 slots of 0.8 s the objectives hold; at 600 RPS the queue and p99 grow."""
    calm = Simulation(Scenario.load(FOLDER / "capacity_350.yaml")).run()
    over = Simulation(Scenario.load(FOLDER / "capacity_600.yaml")).run()
    assert all(check.met for check in calm.slo_checks("public"))
    assert not any(check.met for check in over.slo_checks("public"))
    assert over.series[-1]["order.waiting"] > over.series[20]["order.waiting"] > 0
    assert over.services["order"].most_in_use == 400


def test_a_limit_keeps_the_requests_in_progress_below_the_slots():
    """600 RPS offered to a limit of 350/s: at most 400 are in progress, an output of the run, and no request waits."""
    result = Simulation(Scenario.load(FOLDER / "capacity_600_limited.yaml")).run()
    assert result.services["order"].most_in_use <= 400
    assert result.peak("order.waiting") == 0
    assert all(check.met for check in result.slo_checks("public"))


def test_the_planners_recommendation_meets_its_slo():
    """The planner's recommendation for 10 pods of 40 and a p95 of 800 ms meets that objective under twice the load."""
    plan = capacity(pods=10, concurrency=40, p95="800ms")
    limit = f"token bucket {int(plan.limit)}/s burst {400 - int(plan.limit * plan.p95)}"
    policy = Policy.of(name="p", limits=[{"name": "all", "key": "everyone", "limit": limit}])
    scenario = Scenario.of(
        duration="20s",
        slo="p95=800ms,p99=2s",
        clients={"public": {"arrivals": "1000/s", "timeout": "60s"}},
        gateway={"policy": policy, "concurrency": 100_000, "calls": [{"to": "order", "timeout": "60s"}]},
        services={"order": {"pods": 10, "concurrency": 40, "time": {"p50": "250ms", "p95": "800ms", "max": "2s"}}},
    )
    result = Simulation(scenario).run()
    checks = Slo.of("p95=800ms,p99=2s").check(result.classes["public"].percentile)
    assert result.classes["public"].ok / 20 == pytest.approx(350, rel=0.05)
    assert all(check.measured <= 1.05 * check.objective for check in checks)  # p95 is drawn, so half of the runs are above it


def test_two_regions_stay_within_the_bound_of_their_leases():
    """Two regions 80 ms apart exceed their common limit by at most the figure on the page about regions: 500."""
    result = Simulation(Scenario.load(FOLDER / "two_regions.yaml")).run()
    bound = LeasedStore(MemoryStore(), life="1s").over_admission(TokenBucket("500/s burst 500"), nodes=2)
    assert bound == 500
    assert 0 < result.admissions["tenant"].excess <= bound
    assert result.classes["acme"].percentile(95) < 0.08


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("layer_1", "layers_1_2")), "layers_1_2_3"]
)
def test_the_flash_sale_at_full_size_with_limits(name):
    """At 20 000 RPS the partner gets at most 400 + 200·T, and the objectives hold for all others."""
    result = Simulation(Scenario.load(FOLDER / f"{name}.yaml")).run()
    assert result.admissions["partner"].admitted <= 400 + 200 * 90
    assert result.admissions["partner"].excess == 0
    assert all(check.met for check in result.slo_checks("public"))
    assert result.classes["public"].ok >= 0.98 * result.classes["public"].sent


@pytest.mark.slow
def test_the_flash_sale_at_full_size_without_limits():
    """At 20 000 RPS retries make 40 000 to 65 000 attempts per second, and most requests of all others fail."""
    result = Simulation(Scenario.load(FOLDER / "without_limits.yaml")).run()
    highest = max(row["public.attempts"] + row["partner.attempts"] for row in result.series)
    assert 40_000 <= highest <= 65_000
    late = [row for row in result.series if row["time"] > 60]
    assert sum(row["public.failed"] for row in late) > sum(row["public.ok"] for row in late)


@pytest.mark.soak
def test_one_looping_user_at_full_size():
    """At 20 000 RPS for one user, the user's checkout limit binds: 10 + 5·T."""
    result = Simulation(Scenario.load(FOLDER / "one_looping_user.yaml")).run()
    assert result.admissions["partner"].admitted <= 10 + 5 * 90
