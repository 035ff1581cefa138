"""Percentiles: nearest rank and interpolation against Python's statistics, and the sketch within its error."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import ConfigurationError
from limitkeeper.plan import LatencySamples, Slo, interpolated, nearest_rank

samples = st.lists(st.floats(0, 1e4, allow_subnormal=False), min_size=2, max_size=300)


def test_the_table_of_the_source_document(hundred):
    """p50, p95 and p99 of the hundred requests are 200 ms, 600 ms and 1.5 s by nearest rank; interpolation differs."""
    found = LatencySamples(hundred)
    assert [found.percentile(p) for p in (50, 95, 99)] == [0.2, 0.6, 1.5]
    assert [round(interpolated(sorted(hundred), p), 6) for p in (50, 95, 99)] == [0.4, 0.645, 1.535]


@given(samples, st.integers(1, 99))
def test_interpolation_agrees_with_statistics(values, percent):
    """`interpolated` is statistics.quantiles with the inclusive method."""
    expected = statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
    assert math.isclose(interpolated(sorted(values), percent), expected, rel_tol=1e-9, abs_tol=1e-9)


@given(samples, st.integers(1, 1000).map(lambda n: n / 10))
def test_nearest_rank_is_the_smallest_sample_that_covers(values, percent):
    """At least p % of the samples are at most the percentile, and fewer are at most any smaller sample."""
    found = nearest_rank(sorted(values), percent)
    need = round(percent * 10) * len(values)
    assert found in values
    assert sum(one <= found for one in values) * 1000 >= need
    assert all(sum(one <= lower for one in values) * 1000 < need for lower in values if lower < found)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=99).filter(lambda values: len(values) % 2))
def test_the_median_of_an_odd_number_is_its_middle(values):
    """p50 by nearest rank is statistics.median_low."""
    assert nearest_rank(sorted(values), 50) == statistics.median_low(values)


def test_the_sketch_takes_over_when_memory_ends_and_keeps_its_error():
    """Beyond `keep` samples a sketch answers, within 1 % of the exact percentiles of 20 000 samples."""
    draw = random.Random(7)
    values = [draw.lognormvariate(-1.5, 0.8) for _ in range(20_000)]
    exact, sketched = LatencySamples(values), LatencySamples(values, keep=1000)
    assert exact.exact
    assert not sketched.exact
    assert sketched.error == 0.01
    for percent in (1, 50, 95, 99, 99.9):
        assert math.isclose(sketched.percentile(percent), exact.percentile(percent), rel_tol=0.0101)
    assert (sketched.count, sketched.longest) == (exact.count, exact.longest)
    assert math.isclose(sketched.mean, exact.mean)


def test_samples_beyond_an_objective_are_counted(hundred):
    """The 5 s sample is the one that exceeds 2 s."""
    assert LatencySamples(hundred).above(2.0) == 1
    assert LatencySamples(hundred, keep=10).above(2.0) is None


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_latency_is_a_finite_number(value):
    """Negative and endless latencies are refused."""
    with pytest.raises(ValueError, match="at least 0"):
        LatencySamples([value])


def test_percentiles_are_between_0_and_100():
    """p0 and p101 are no percentiles, and no samples have none."""
    for percent in (0, 101):
        with pytest.raises(ConfigurationError, match="above 0 and at most 100"):
            LatencySamples([1.0]).percentile(percent)
    with pytest.raises(ConfigurationError, match="no samples"):
        LatencySamples().percentile(50)


def test_objectives_are_checked_by_percentile(hundred):
    """The hundred requests meet p95 ≤ 800 ms and p99 ≤ 2 s, and break p99 ≤ 1 s."""
    found = LatencySamples(hundred)
    assert [check.met for check in Slo.of("p95=800ms,p99=2s").check(found.percentile)] == [True, True]
    broken = Slo.of({"p99": 1.0}).check(found.percentile)[0]
    assert str(broken) == "p99 1.5 s > 1 s"


@pytest.mark.parametrize(
    ("text", "message"),
    [("95=1s", "no percentile"), ("p0=1s", "greater than 0"), ("p95=0s", "greater than 0"), ("p95=2s,p99=1s", "can't be below")],
)
def test_contradicting_objectives_are_refused(text, message):
    """An SLO names percentiles with latencies that rise with them."""
    with pytest.raises(ConfigurationError, match=message):
        Slo.of(text)
