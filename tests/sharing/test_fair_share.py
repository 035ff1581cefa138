"""FairShare: one capacity, guarantees, and weighted max-min shares of the rest."""

from __future__ import annotations

import random
from math import inf

import pytest
from fair_share_traffic import admitted, jain, max_min, per_second
from hypothesis import example, given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import InvalidCost, InvalidLimit
from limitkeeper.errors import ConfigurationError
from limitkeeper.sharing import FairShare
from limitkeeper.stores import MemoryStore, ShardedStore
from limitkeeper.testing import ManualClock

TENANTS = ("a", "b", "c", "d")


def make(clock: ManualClock, total: str = "100/s", **options) -> FairShare:
    return FairShare(total, clock=clock, **options)


@pytest.mark.parametrize("flood", [{"other": 5000.0}, {"other": 5000.0, "public": 3000.0}, {f"t{i}": 300.0 for i in range(20)}])
def test_a_guaranteed_tenant_gets_its_demand_whatever_others_send(flood):
    """A partner that requests 150/s of its guaranteed 200/s gets at least 0.95 of it under each flood."""
    found = admitted("350/s", {"partner": 150.0, **flood}, guarantees={"partner": "200/s"})
    asked = 150.0
    assert per_second(found, "partner") >= 0.95 * asked


@pytest.mark.parametrize("overload", [2, 10])
def test_equal_tenants_get_equal_shares(overload):
    """At 2 and 10 times the capacity, Jain's index of 20 tenants with different demands is at least 0.99."""
    demands = {f"t{i}": 350 * overload / 20 * (0.6 + i * 0.04) for i in range(20)}
    found = admitted("350/s", demands)
    shares = max_min(350.0, demands, {})
    assert jain([per_second(found, tenant) / shares[tenant] for tenant in demands]) >= 0.99


@effort(30)
@given(
    demands=st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([5.0, 20.0, 90.0, 300.0]), min_size=1),
    weights=st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 5)),
    seed=st.integers(0, 1000),
)
def test_shares_are_weighted_max_min(demands, weights, seed):
    """Over 20 s every tenant gets its weighted max-min share of the capacity, less 10 % and a few requests for chance."""
    found = admitted("100/s", demands, seed=seed, weights=weights)
    for tenant, share in max_min(100.0, demands, weights).items():
        assert per_second(found, tenant) >= 0.9 * share - 1.5, (tenant, share)


@effort(40)
@given(
    demands=st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([5.0, 60.0, 400.0]), min_size=1),
    guarantees=st.dictionaries(st.sampled_from(TENANTS[:2]), st.sampled_from(["10/s", "40/s"])),
    window=st.sampled_from(["200ms", "1s"]),
    seed=st.integers(0, 1000),
)
def test_the_bound_and_the_guarantees_hold_in_every_interval(demands, guarantees, window, seed):
    """Any interval T admits at most C·T + B + the saved guarantees; a guaranteed tenant that requests more gets g · (T −
    window)."""
    found = admitted("100/s", demands, 6.0, seed, guarantees=guarantees, window=window)
    saved = {"200ms": 0.2, "1s": 1.0}[window]
    promised = {tenant: float(rate.split("/")[0]) for tenant, rate in guarantees.items()}
    most = max(2.0, 100 * saved) + sum(promised.values()) * saved
    rng = random.Random(seed)
    for _ in range(200):
        start, end = sorted((rng.uniform(0, 6), rng.uniform(0, 6)))
        inside = [tenant for at, tenant in found if start <= at <= end]
        assert len(inside) <= 100 * (end - start) + most + 1
        for tenant, rate in promised.items():
            if demands.get(tenant, 0.0) >= 3 * rate:
                assert inside.count(tenant) >= rate * (end - start - saved) - 1


@effort(60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 40), st.integers(0, 300_000)), min_size=1, max_size=60),
    guarantees=st.dictionaries(st.sampled_from(TENANTS), st.sampled_from(["7/s", "20/s"])),
    weights=st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 4)),
    rate=st.sampled_from(["90/s", "97/s", "9999/min", "1000000/min"]),
)
@example([(tenant, 16667, 50_000) for tenant in "bdbdbd"] * 5 + [("b", 25000, 0)], {}, {"b": 3}, "1000000/min")
def test_a_refused_call_is_admitted_when_it_was_promised(steps, guarantees, weights, rate):
    """With no other traffic the same call is refused 1 µs before `retry_after` and admitted at it."""
    clock = ManualClock(50.0)
    share = make(clock, rate, guarantees=guarantees, weights=weights)
    for tenant, cost, pause_us in steps:
        clock.advance(pause_us / 1e6)
        decision = share.hit(tenant, cost)
        assert decision.remaining <= decision.limit
        if not decision and decision.retry_after < inf:
            clock.advance((decision.retry_us - 1) / 1e6)
            assert decision.retry_us == 1 or not share.peek(tenant, cost)
            clock.advance(1e-6)
            assert share.peek(tenant, cost)


def test_an_idle_capacity_is_lent_to_other_tenants(clock):
    """A tenant alone is served at the whole capacity, though another has a guarantee of half of it."""
    found = admitted("100/s", {"alone": 1000.0}, guarantees={"absent": "50/s"})
    assert per_second(found, "alone") >= 100


def test_a_peek_stores_nothing_and_a_refund_gives_back(clock):
    """A peek changes nothing; a refund makes room for the same cost again."""
    share = make(clock)
    assert share.peek("a", 50) == share.peek("a", 50)
    first = share.hit("a", 50)
    assert first.allowed
    assert not share.hit("a", 50)
    share.refund("a", 50)
    assert share.hit("a", 50) == first


def test_a_refund_goes_to_the_guarantee_when_there_is_no_backlog(clock):
    """The guarantee's part of a charge is given back to it."""
    share = make(clock, guarantees={"a": "60/s"})
    assert share.hit("a", 60).allowed
    share.refund("a", 60)
    assert share.hit("a", 60).remaining == 50


def test_more_than_can_ever_fit_is_never(clock):
    """A cost above the largest that could pass is refused for good."""
    share = make(clock, guarantees={"a": "80/s"})
    assert share.hit("b", 51).retry_after == inf
    assert share.hit("a", 80).allowed
    assert share.limit_of("a") == 80
    assert share.limit_of("b") == 50


def test_only_tenants_with_a_backlog_are_kept(clock):
    """Memory is bounded by the capacity, however many tenants there are."""
    share = make(clock, "1000/s")
    for i in range(20_000):
        share.hit(f"tenant {i}")
        clock.advance(0.0005)
    assert len(share._backend.queue.tenants) <= 2720
    assert len(share._backend.queue.heap) <= 2720
    clock.advance(10)
    assert share.hit("x").allowed
    assert len(share._backend.queue.tenants) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guarantees": {"a": "60/s", "b": "50/s"}}, "110/s, more than the capacity of 100/s"),
        ({"weights": {"a": 0}}, "the weight of 'a' must be a whole number from 1 to 1000, got 0"),
        ({"weights": {"a": 1.5}}, "got 1.5"),
        ({"window": "1us"}, "window must be at least 1 ms"),
        ({"guarantees": {"a": "many"}}, "expected a rate, got 'many'"),
    ],
)
def test_what_can_not_be_shared_is_an_error(options, message):
    """Guarantees above the capacity, and invalid weights and windows, are errors that name the mistake."""
    with pytest.raises(InvalidLimit, match=message):
        FairShare("100/s", **options)


@pytest.mark.parametrize("cost", [-1, 1.5, True, "1"])
def test_a_wrong_cost_or_tenant_is_an_error(clock, cost):
    """Costs are whole numbers from 0, tenants are strings."""
    with pytest.raises(InvalidCost):
        make(clock).hit("a", cost)
    with pytest.raises(TypeError, match="a tenant must be a string"):
        make(clock).hit(7)


def test_a_store_that_keeps_no_capacity_is_an_error(clock):
    """Several stores have no common order of decisions: a ShardedStore is refused when it is given."""
    with pytest.raises(ConfigurationError, match="a MemoryStore, a SharedStore or a RedisStore, not in"):
        FairShare("100/s", store=ShardedStore({"a": MemoryStore(clock=clock), "b": MemoryStore(clock=clock)}))


def test_fair_shares_of_one_name_on_one_store_share_a_capacity(clock):
    """On one MemoryStore the same name and rates are one capacity; other rates are another."""
    store = MemoryStore(clock=clock)
    first, second, other = (FairShare(total, store=store, name="x") for total in ("100/s", "100/s", "200/s"))
    assert first.hit("a", 50).allowed
    assert not second.hit("a").allowed
    assert other.hit("a", 100).allowed


def test_a_cost_of_nothing_is_never_refused(clock):
    """A tenant that holds more than its share, because others came, is refused one unit, and a cost of 0 is allowed."""
    share = make(clock)
    for tenant in TENANTS:
        while share.hit(tenant):
            pass
    assert not share.hit("a")
    assert share.hit("a", 0).allowed
    assert share.peek("a", 0).retry_after == 0.0


@pytest.mark.parametrize("in_store", [False, True])
def test_a_clock_that_goes_back_blocks_no_tenant(in_store):
    """After a step of an hour back a refused tenant is admitted at `retry_after`, and nothing is granted by the step."""
    clock = ManualClock(10_000.0)
    share = FairShare("10/s", store=MemoryStore(clock=clock)) if in_store else make(clock, "10/s")
    assert sum(share.hit("a").allowed for _ in range(20)) == 5
    clock.advance(-3600)
    refused = share.hit("a")
    assert not refused
    clock.advance(refused.retry_after)
    assert share.hit("a").allowed
