"""Capacity from numbers: the figures of the source document to the digit, and impossible numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import ConfigurationError
from limitkeeper.plan import Capacity, capacity, make_plan

SEED = {"pods": 10, "concurrency": 40, "p95": "800ms"}


def test_the_numbers_of_the_source_document():
    """10 pods of 40 at a p95 of 800 ms: 400 concurrent, 500 RPS, 350 RPS with the margin 0.7, 450 RPS with one pod less."""
    found = capacity(**SEED)
    assert found.total_concurrency == 400
    assert found.ceiling == 500
    assert found.limit == 350
    assert found.one_pod_down == 450
    assert found.band() == (250, 400)
    assert found.warnings() == []
    text = " ".join(found.reasons())
    assert "250 RPS to 400 RPS" in text
    assert "300 RPS to 400 RPS" in text


def test_the_split_of_the_source_document():
    """350 RPS are 200 for partners and 150 for the public, and each user has 5 with a burst of 10."""
    plan = make_plan(capacity(**SEED), split_by="partner=200,public=rest", per_key={"user": 5})
    assert [(share.name, share.rate) for share in plan.classes.shares] == [("partner", 200), ("public", 150)]
    assert plan.per_key[0].tiers == (("", Fraction(5)),)
    assert plan.key_burst(Fraction(5)) == 10
    assert plan.burst == 120  # 400 slots, of which 350 RPS × 0.8 s use 280


def test_a_share_for_internal_jobs_is_taken_first():
    """The part of internal jobs is not split among clients."""
    plan = make_plan(capacity(**SEED), internal="10%", split_by="partner=200,public=rest")
    assert (plan.internal, plan.external) == (35, 315)
    assert plan.classes.shares[1].rate == 115
    with pytest.raises(ConfigurationError, match="the whole limit"):
        make_plan(capacity(**SEED), internal=350)


@pytest.mark.parametrize(("margin", "limit", "warned"), [(0.5, 250, False), (0.8, 400, False), (0.45, 225, True), (1, 500, True)])
def test_a_margin_outside_the_band_is_warned_about(margin, limit, warned):
    """Margins from 0.5 to 0.8 are usual; others are computed with a warning."""
    found = capacity(**SEED, margin=margin)
    assert found.limit == limit
    assert any("margin" in warning for warning in found.warnings()) == warned


def test_the_lowest_ceiling_is_named():
    """Of the service, the inventory database, Postgres writes and the payment quota, the lowest one is the ceiling."""
    parts = {"inventory database": "120@300ms", "Postgres writes": "100@50ms x4", "payment quota": "450"}
    found = capacity(**SEED, dependencies=parts)
    assert [(one.name, one.rate) for one in found.ceilings] == [
        ("inventory database", 400),
        ("payment quota", 450),
        ("service", 500),
        ("Postgres writes", 500),
    ]
    assert found.limit == 280
    assert "The lowest ceiling is that of inventory database: 120 / 300 ms = 400 RPS" in " ".join(found.reasons())


def test_pools_name_the_binding_resource_and_ask_for_a_measurement():
    """Of 50 threads and 20 connections the connections are the limit, and neither number gives 40."""
    text = " ".join(capacity(**SEED, threads=50, db_pool=20).reasons())
    assert "the 20 database connections bind first: 40 at once fit only while each holds one for at most 50% of its time" in text
    assert "do not give 40: measure it" in text
    assert capacity(pods=10, p95="800ms", threads=50, db_pool=20).concurrency == 20


def test_littles_law_with_the_mean_is_printed_beside():
    """A mean of 320 ms gives 1250 RPS by Little's law, with 40 % of the slots busy at the ceiling of p95."""
    found = capacity(**SEED, mean="320ms")
    assert found.little == 1250
    assert "gives 1,250 RPS" in " ".join(found.reasons())
    assert "40% of the slots" in " ".join(found.reasons())


def test_a_burst_above_the_safe_concurrency_is_warned_about():
    """A burst is at most 40 × 10 pods, also that of a share."""
    source = capacity(**SEED)
    assert make_plan(source, burst=400, split_by="partner=200 burst 400,public=rest").warnings() == []
    assert "10 × 40 = 400" in make_plan(source, burst=401).warnings()[0]
    assert "partner" in make_plan(source, split_by="partner=200 burst 500,public=rest").warnings()[0]


def test_one_pod_less_below_the_limit_is_warned_about():
    """With two pods and the margin 0.7, the remaining pod can't serve the limit."""
    assert any("one pod down" in warning for warning in capacity(pods=2, concurrency=40, p95="800ms").warnings())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p95": 0}, "p95 must be greater than 0"),
        ({"p95": "-1s"}, "expected a duration"),
        ({"p95": "fast"}, "unknown unit"),
        ({"margin": 1.2}, "margin must be at most 1"),
        ({"margin": 0}, "margin must be greater than 0"),
        ({"margin": "most"}, "margin must be a number"),
        ({"pods": 0}, "pods must be greater than 0"),
        ({"pods": 2.5}, "pods must be a whole number"),
        ({"concurrency": None}, "concurrency is missing"),
        ({"threads": 30}, "exceeds the 30 threads"),
        ({"dependencies": {"db": "much"}}, "dependency 'db'"),
        ({"p95": "400d", "pods": 1, "concurrency": 1}, "below one request per hour"),
    ],
)
def test_impossible_numbers_are_refused_by_name(change, message):
    """Each impossible number is an error that names the right form."""
    with pytest.raises(ConfigurationError, match=message):
        capacity(**{**SEED, **change})


@given(
    pods=st.integers(1, 500),
    concurrency=st.integers(1, 500),
    p95=st.integers(1, 60_000),
    margin=st.integers(1, 100).map(lambda n: Fraction(n, 100)),
)
def test_the_limit_never_exceeds_margin_times_ceiling(pods, concurrency, p95, margin):
    """The limit is rounded down, by less than one request per second, and burst and rate fit into the slots."""
    found = Capacity(pods, concurrency, Fraction(p95, 1000), margin)
    exact = margin * pods * concurrency * 1000 / p95
    assert 0 <= exact - found.limit < 1
    assert found.burst == 1 or found.limit * found.p95 + found.burst <= found.total_concurrency
