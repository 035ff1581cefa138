"""Properties of a FairShare: guarantees in every interval, no starvation, lending, fairness; sync and async."""

from __future__ import annotations

import asyncio
import random

import pytest
from fair_share_traffic import admitted, arrivals, jain, max_min, per_second
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper.sharing import FairShare
from limitkeeper.testing import ManualClock

TENANTS = ("a", "b", "c", "d")
WEIGHTS = st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 9))
GUARANTEES = st.dictionaries(st.sampled_from(TENANTS[:3]), st.sampled_from(["5/s", "20/s", "30/s"]))
DEMANDS = st.fixed_dictionaries({}, optional={tenant: st.sampled_from([3.0, 25.0, 80.0, 600.0]) for tenant in TENANTS})


@effort(40)
@given(demands=DEMANDS, weights=WEIGHTS, guarantees=GUARANTEES, window=st.sampled_from([0.1, 0.5, 1.0]), seed=st.integers(0, 999))
def test_a_guarantee_is_a_token_bucket_of_its_own(demands, weights, guarantees, window, seed):
    """A guaranteed tenant gets every request that a token bucket of its guarantee and of one window admits."""
    if not demands:
        return
    asked = arrivals(demands, 5.0, random.Random(seed))
    found = set(admitted("100/s", demands, 5.0, seed, guarantees=guarantees, weights=weights, window=window))
    for tenant, rate in guarantees.items():
        per_second = float(rate.split("/")[0])
        size = level = max(2.0, per_second * window)
        before = 0.0
        for at in [at for at, name in asked if name == tenant]:
            level, before = min(size, level + per_second * (at - before)), at
            if abs(level - 1.0) < 1e-3:  # the clock counts whole microseconds: this request may find a token or not
                break
            if level > 1.0:
                level -= 1.0
                assert (at, tenant) in found


@effort(20)
@given(weights=WEIGHTS, guarantees=GUARANTEES, seed=st.integers(0, 999))
def test_no_tenant_starves(weights, guarantees, seed):
    """Beside floods of all others, a tenant without a guarantee gets its weighted share of what the guarantees leave."""
    demands = dict.fromkeys(TENANTS, 500.0)
    found = admitted("100/s", demands, 10.0, seed, guarantees=guarantees, weights=weights)
    rest = 100.0 - sum(float(rate.split("/")[0]) for rate in guarantees.values())
    shares = max_min(rest, demands, weights)
    for tenant in TENANTS:
        assert per_second(found, tenant, 10.0) >= 0.85 * shares[tenant] - 1.0


@effort(20)
@given(guarantees=GUARANTEES, seed=st.integers(0, 999))
def test_what_is_not_used_is_lent(guarantees, seed):
    """While the guaranteed tenants are silent, one other tenant is served at the whole capacity."""
    found = admitted("100/s", {"d": 400.0}, 10.0, seed, guarantees=guarantees)
    assert per_second(found, "d", 10.0) >= 99.0


@effort(10)
@given(overload=st.sampled_from([2, 10]), seed=st.integers(0, 999), weights=st.lists(st.integers(1, 5), min_size=10, max_size=10))
def test_overload_is_divided_by_weight(overload, seed, weights):
    """At 2 and 10 times the capacity, Jain's index of the tenants' rates per unit of weighted share is at least 0.985."""
    names = {f"t{number}": weight for number, weight in enumerate(weights)}
    demands = {name: 300.0 * overload * weight / sum(weights) for name, weight in names.items()}
    found = admitted("300/s", demands, 10.0, seed, weights=names)
    shares = max_min(300.0, demands, names)
    assert jain([per_second(found, name, 10.0) / shares[name] for name in names]) >= 0.985


@pytest.mark.parametrize("seed", range(3))
def test_async_calls_answer_as_sync_ones(seed):
    """On the same trace `ahit`, `apeek` and `arefund` give what `hit`, `peek` and `refund` give."""
    rng, clock = random.Random(seed), ManualClock(1000.0)
    options = {"guarantees": {"a": "20/s"}, "weights": {"b": 3}, "clock": clock}
    here, there = FairShare("90/s", **options), FairShare("90/s", **options)

    async def main() -> None:
        for _ in range(300):
            clock.advance(rng.choice([0.0, 0.001, 0.05]))
            call, tenant, cost = rng.choice(["hit", "hit", "peek", "refund"]), rng.choice(TENANTS), rng.randrange(12)
            assert getattr(here, call)(tenant, cost) == await getattr(there, f"a{call}")(tenant, cost)

    asyncio.run(main())


@pytest.mark.parametrize(("rate", "window"), [("30/min", "1s"), ("59/min", "1s"), ("5/s", "100ms")])
def test_a_guarantee_of_less_than_one_request_per_window_holds(rate, window):
    """A guarantee holds two requests at least: beside a flood of many tenants a tenant that sends one a second, or its guaranteed
    rate, gets all of it."""
    clock = ManualClock(1000.0)
    share = FairShare("10/s", guarantees={"acme": rate}, window=window, clock=clock)
    count, period = rate.split("/")
    per_us = int(count) / {"min": 60e6, "s": 1e6}[period]
    got = 0
    for number in range(120):
        for tenant in range(100):
            share.hit(f"t{number % 4}-{tenant}")
        got += share.hit("acme").allowed
        clock.advance(min(1.0, 1e-6 / per_us))
    assert got >= min(120, int(per_us * clock.now_us() - 1000e6 * per_us) - 2)
