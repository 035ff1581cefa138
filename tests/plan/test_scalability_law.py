"""The universal scalability law: fitted exactly to synthetic data, closely to noisy data; knee and peak by search."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import ConfigurationError
from limitkeeper.plan import Scalability, fit_scalability

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@given(st.floats(0.1, 1000), st.floats(0, 0.5), st.floats(0, 0.01))
def test_synthetic_data_is_fitted_exactly(rate, contention, coherency):
    """Without noise the three parameters come back, and the curve with them."""
    law = Scalability(rate, contention, coherency, 0.0)
    found = fit_scalability([(n, law.throughput(n)) for n in LOADS])
    assert math.isclose(found.rate_of_one, rate, rel_tol=1e-6)
    assert math.isclose(found.contention, contention, rel_tol=1e-4, abs_tol=1e-6)
    assert math.isclose(found.coherency, coherency, rel_tol=1e-4, abs_tol=1e-7)
    assert found.error < 1e-6


def test_noise_of_five_percent_moves_the_peak_little():
    """With 5 % noise the fitted peak throughput is within 10 % of the true one."""
    law, draw = Scalability(20.0, 0.03, 0.0002, 0.0), random.Random(3)
    found = fit_scalability([(n, law.throughput(n) * draw.uniform(0.95, 1.05)) for n in LOADS for _ in range(4)])
    assert math.isclose(found.peak_throughput, law.peak_throughput, rel_tol=0.1)
    assert 0.01 < found.error < 0.05


def test_peak_and_knee_are_where_a_search_finds_them():
    """The peak maximises X(N), the knee X(N) / R(N) = X² / N."""
    law = Scalability(20.0, 0.03, 0.0002, 0.0)
    numbers = [n / 100 for n in range(100, 20_000)]
    assert math.isclose(max(numbers, key=law.throughput), law.peak_concurrency, abs_tol=0.02)
    assert math.isclose(max(numbers, key=lambda n: law.throughput(n) ** 2 / n), law.knee_concurrency, abs_tol=0.02)


def test_a_linear_system_has_no_peak():
    """Without contention the throughput grows without bound; with contention alone it approaches one."""
    linear = fit_scalability([(n, 5.0 * n) for n in LOADS])
    assert linear.peak_throughput == math.inf or linear.peak_throughput > 5.0 * 256 * 100
    amdahl = Scalability(10.0, 0.1, 0.0, 0.0)
    assert (amdahl.peak_throughput, amdahl.knee_concurrency) == (100.0, 9.0)


@pytest.mark.parametrize(
    "points", [[], [(1, 1), (2, 2)], [(1, 1), (1, 2), (1, 3)], [(0, 1), (1, 1), (2, 2)], [(1, 0), (2, 1), (3, 1)]]
)
def test_too_few_loads_are_refused(points):
    """Three parameters need three different concurrencies, and positive numbers."""
    with pytest.raises(ConfigurationError, match="at least three loads"):
        fit_scalability(points)
