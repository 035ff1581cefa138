"""Spend guards: a budget for the fleet, an alert at its mark, a hard stop, and the remaining budget in metrics."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from limitkeeper import ConfigurationError, InvalidCost, MemoryStore, RateLimited, RedisStore, StoreUnavailable
from limitkeeper.client import BudgetSpent, SpendGuard
from limitkeeper.observe.prometheus import LimitkeeperCollector
from limitkeeper.testing import ManualClock, use_clock
from stand_ins import NOON


class Spent:
    """Spends on a guard, sync or async."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, guard, amount, used=None, error=None):
        def body(charge):
            if used is not None:
                charge.settle(used)
            if error is not None:
                raise error

        async def main():
            async with guard.spend(amount) as charge:
                body(charge)

        if self.kind == "async":
            asyncio.run(main())
        else:
            with guard.spend(amount) as charge:
                body(charge)


@pytest.fixture(params=["sync", "async"])
def spend(request):
    return Spent(request.param)


def test_the_hard_stop(spend, store, clock):
    """Calls are refused once the budget is spent, until the next day begins at 00:00 UTC."""
    guard = SpendGuard("1.00", store=store)
    for _ in range(4):
        spend(guard, "0.25")
    assert guard.remaining == 0
    with pytest.raises(BudgetSpent, match="the budget 'spend' is spent; it starts again in 43200 s") as caught:
        spend(guard, "0.01")
    assert isinstance(caught.value, RateLimited)
    clock.advance(43_200)
    assert guard.remaining == 1
    spend(guard, "1")
    with pytest.raises(BudgetSpent, match="smaller than this one call"):
        spend(guard, "1.01")


def test_settling_gives_back_or_charges_more(spend, store):
    """What is settled below the estimate is given back, above it is charged, and an exception gives all back."""
    guard = SpendGuard(1000, unit=1, store=store)
    spend(guard, 500, used=100)
    spend(guard, 500, used=600)
    with pytest.raises(KeyError):
        spend(guard, 300, error=KeyError())
    spend(guard, 300)
    with pytest.raises(BudgetSpent):
        spend(guard, 1)


def test_one_budget_for_the_fleet(spend, store):
    """Guards of one name on one store have one budget; the alert is published once, by the process that crosses the mark."""
    fleet = [SpendGuard(100, unit=1, store=store, name="llm") for _ in range(3)]
    alerts, refused = [], []
    for number, guard in enumerate(fleet):
        guard.events.on("alert", lambda event, number=number: alerts.append((number, event.limiter)))
        guard.events.on("refused", lambda event: refused.append(event.cost))
    for i in range(79):
        spend(fleet[i % 3], 1)
    assert alerts == []
    spend(fleet[1], 1)
    assert alerts == [(1, "llm")]
    for i in range(20):
        spend(fleet[i % 3], 1)
    assert alerts == [(1, "llm")]
    for guard in fleet:
        with pytest.raises(BudgetSpent):
            spend(guard, 1)
    assert refused == [1, 1, 1]


def test_a_new_window_alerts_again(spend, store, clock):
    """The alert comes once in every window."""
    guard, alerts = SpendGuard(10, per="1h", unit=1, store=store), []
    guard.events.on("alert", alerts.append)
    for _ in range(3):
        for _ in range(10):
            spend(guard, 1)
        clock.advance(3600)
    assert len(alerts) == 3


def test_a_budget_on_redis(valkey, spend):
    """On a server the budget is that of all processes that use it."""
    with RedisStore(valkey.url, prefix=f"spend-{spend.kind}:", timeout="60s") as store:
        guards = [SpendGuard(10, unit=1, store=store, name="shared") for _ in range(2)]
        for i in range(10):
            spend(guards[i % 2], 1)
        with pytest.raises(BudgetSpent):
            spend(guards[0], 1)


def test_the_budget_in_metrics(store):
    """Amount, what is left, alerts and refusals are metrics of the guard."""
    guard = SpendGuard("2.50", store=store, name="llm")
    with guard.spend("2.25"):
        pass
    with pytest.raises(BudgetSpent):
        guard.reserve("1")
    registry = CollectorRegistry()
    LimitkeeperCollector(guard, registry=registry)
    text = generate_latest(registry).decode()
    for line in ("amount 2.5", "remaining 0.25", "alerts_total 1.0", "refused_total 1.0"):
        name, value = line.split()
        assert f'limitkeeper_budget_{name}{{budget="llm"}} {value}' in text


@given(st.lists(st.decimals("0.0001", "0.4", places=4), max_size=30))
def test_the_sum_never_exceeds_the_budget(amounts):
    """Whatever is requested, the admitted estimates together are at most the budget, to the last unit."""
    guard, spent = SpendGuard("1", store=MemoryStore(clock=ManualClock(NOON))), Decimal(0)
    for amount in amounts:
        try:
            guard.reserve(amount)
            spent += amount
        except BudgetSpent:
            assert spent + amount > 1
    assert spent <= 1
    assert guard.remaining == 1 - spent


@pytest.mark.parametrize("amount", [0.1, -1, "-0.5", "ten", True, None, "NaN", "Infinity"])
def test_amounts_are_exact(store, amount):
    """A float, a negative amount or no number at all is an error that names the right form."""
    with pytest.raises(InvalidCost, match=r"write '0\.02'"):
        SpendGuard("1", store=store).reserve(amount)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpendGuard("0.00001"), "whole units of '0.0001'"),
        (lambda: SpendGuard(10**9, unit="0.01"), "choose another unit"),
        (lambda: SpendGuard("1", unit=0), "unit must be more than 0"),
        (lambda: SpendGuard("1", alert=80), "between 0 and 1, got 80"),
    ],
)
def test_bad_budgets(make, message):
    """A budget that cannot be counted is an error with the remedy."""
    with pytest.raises(ConfigurationError, match=message):
        make()


class AlertFails(MemoryStore):
    """A store whose first decision about the alert ends with an exception."""

    local = False
    error: BaseException | None = None

    def fail_once(self, named):
        error = self.error
        if named.limiter == "spend.alert" and error is not None:
            self.error = None
            raise error

    def decide_one(self, named, *args):
        self.fail_once(named)
        return super().decide_one(named, *args)

    async def adecide_one(self, named, *args):
        self.fail_once(named)
        return super().decide_one(named, *args)


def test_a_store_that_fails_at_the_alert_delays_it(spend):
    """The call whose alert fails has its charge and continues; the next call publishes the alert."""
    store = AlertFails(clock=ManualClock(NOON))
    guard, alerts = SpendGuard("10", unit="1", store=store), []
    guard.events.on("alert", alerts.append)
    store.error = StoreUnavailable("no reply")
    spend(guard, "8")
    assert (guard.remaining, alerts) == (2, [])
    spend(guard, "1")
    assert (guard.remaining, len(alerts)) == (1, 1)


def test_a_call_that_is_interrupted_at_the_alert_spends_nothing(spend):
    """Its caller has no charge to settle, so the amount is given back."""
    store = AlertFails(clock=ManualClock(NOON))
    guard = SpendGuard("10", unit="1", store=store)
    store.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        spend(guard, "8")
    spend(guard, "10")


def test_a_guard_of_a_module_follows_the_clock_of_a_test(spend):
    """A guard that was made before `use_clock` has a new budget, and an alert, on each day of that clock."""
    guard, alerts = SpendGuard("10", unit="1"), []
    guard.events.on("alert", alerts.append)
    with use_clock(clock := ManualClock(NOON)):
        for days in (1, 2):
            spend(guard, "9")
            assert (guard.remaining, len(alerts)) == (1, days)
            clock.advance(86_400)
            assert guard.remaining == 10
