"""The simulator's services against the formulas of queueing theory, with fixed seeds."""

from __future__ import annotations

from itertools import pairwise
from math import factorial, log
from random import Random

import pytest

from limitkeeper.simulate import Result, Scenario, Simulation
from limitkeeper.simulate.arrivals import arrival_times


def run(rate: str, duration: str, seed: int = 1, **service: object) -> Result:
    """Poisson arrivals at one service."""
    scenario = Scenario.of(
        seed=seed,
        duration=duration,
        interval="100s",
        clients={"all": {"arrivals": rate, "timeout": "1h"}},
        gateway={"concurrency": 1_000_000, "calls": [{"to": "server", "timeout": "1h"}]},
        services={"server": service},
    )
    return Simulation(scenario).run()


def mean_wait(result: Result, service_s: float) -> float:
    samples = result.classes["all"].samples
    return samples.total / samples.count - service_s


def erlang_c(servers: int, load: float) -> float:
    """The probability that an arrival of M/M/c waits; `load` is λ / μ."""
    last = load**servers / factorial(servers) * servers / (servers - load)
    return last / (sum(load**n / factorial(n) for n in range(servers)) + last)


@pytest.mark.parametrize(("servers", "rate"), [(1, 60), (4, 300)])
def test_waits_of_m_m_c_are_those_of_the_formula(servers, rate):
    """The mean wait in M/M/c is C(c, λ/μ) / (cμ − λ), within 15 % over four seeds."""
    mu = 100.0
    expected = erlang_c(servers, rate / mu) / (servers * mu - rate)
    means = [mean_wait(run(f"{rate}/s", "50s", seed, concurrency=servers, time={"mean": "10ms"}), 0.01) for seed in range(4)]
    assert sum(means) / 4 == pytest.approx(expected, rel=0.15)


def test_waits_of_m_d_1_are_half_of_those_of_m_m_1():
    """The mean wait in M/D/1 is ρ / (2μ(1 − ρ)), within 15 % over four seeds."""
    means = [mean_wait(run("70/s", "50s", seed, concurrency=1, time="10ms"), 0.01) for seed in range(4)]
    assert sum(means) / 4 == pytest.approx(0.7 / (2 * 100 * 0.3), rel=0.15)


def test_requests_in_progress_obey_little():
    """The mean number in progress is the arrival rate times the mean time (Little's law)."""
    result = run("50/s", "200s", concurrency=100, time={"mean": "400ms"})
    in_use = [row["server.in use"] for row in result.series]
    assert result.classes["all"].samples.total / 200 == pytest.approx(50 * 0.4, rel=0.05)
    assert max(in_use) < 45


def test_service_times_meet_their_percentiles():
    """A distribution from percentiles has these percentiles."""
    result = run("100/s", "100s", concurrency=10_000, time={"p50": "200ms", "p95": "600ms", "p99": "1500ms"})
    samples = result.classes["all"].samples
    for percent, expected in ((50, 0.2), (95, 0.6), (99, 1.5)):
        assert samples.percentile(percent) == pytest.approx(expected, rel=0.12)


def test_a_pool_that_slows_has_the_throughput_of_the_scalability_law():
    """A saturated pool of n serves n / (t · (1 + σ(n − 1) + κn(n − 1))) requests per second."""
    result = run("2000/s", "5s", concurrency=50, time="10ms", queue=10, slows={"contention": 0.02, "coherency": 0.001})
    expected = 50 / (0.01 * (1 + 0.02 * 49 + 0.001 * 50 * 49))
    assert result.classes["all"].ok / 5 == pytest.approx(expected, rel=0.05)


def test_a_run_repeats_exactly():
    """The same seed gives the same run to the last digit, another seed another one."""
    first, second, other = (run("80/s", "20s", seed, concurrency=1, time={"mean": "10ms"}).as_dict() for seed in (3, 3, 4))
    assert first == second
    assert first["series"] != other["series"]


def test_exponential_arrivals_have_exponential_gaps():
    """Half of the gaps of Poisson arrivals are shorter than ln 2 times the mean."""

    times = arrival_times([(0.0, 100.0)], "poisson", Random(5), 0)
    moments = [next(times) for _ in range(20_001)]
    gaps = [b - a for a, b in pairwise(moments)]
    assert sum(gap < log(2) * 10_000 for gap in gaps) / 20_000 == pytest.approx(0.5, abs=0.02)
