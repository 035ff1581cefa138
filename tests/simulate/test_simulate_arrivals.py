"""Arrivals: rates over time, users, and clients that retry."""

from __future__ import annotations

from collections import Counter
from itertools import islice, takewhile
from random import Random

import pytest

from limitkeeper.policy import Policy
from limitkeeper.simulate import Scenario, Simulation
from limitkeeper.simulate.arrivals import arrival_times, flash_crowd, on_off, user_numbers
from limitkeeper.simulate.calls import Backoff

END = 100_000_000
RULE = {"name": "all", "key": "user", "limit": "10/s burst 10"}


def counted(profile, spacing="constant", seed=1):
    """Arrivals in each of the first hundred seconds."""
    times = takewhile(lambda time: time < END, arrival_times(profile, spacing, Random(seed), 0))
    counts = Counter(time // 1_000_000 for time in times)
    return [counts[second] for second in range(100)]


def test_constant_spacing_is_exact():
    """50/s at constant spacing are 50 in every second."""
    assert set(counted([(0.0, 50.0)])[1:]) == {50}


def test_a_ramp_sends_the_area_under_its_line():
    """From 0/s to 100/s in 50 s are 2500 arrivals, and then 100 in every second."""
    counts = counted([(0.0, 0.0), (50.0, 100.0)])
    assert sum(counts[:50]) == pytest.approx(2500, abs=2)
    assert set(counts[51:]) <= {99, 100, 101}


def test_poisson_arrivals_on_a_ramp_have_the_same_mean():
    """Random arrivals on a ramp are as many as the area under it, within four standard deviations."""
    counts = counted([(0.0, 0.0), (50.0, 400.0)], "poisson")
    assert abs(sum(counts[:50]) - 10_000) < 400


def test_on_and_off_phases_alternate():
    """On for 10 s, off for 30 s: nothing arrives in the off phases."""
    counts = counted(on_off(100.0, 10.0, 30.0, 100.0))
    assert set(counts[1:10]) <= {99, 100, 101}
    assert set(counts[11:40]) == {0}
    assert sum(counts[40:50]) == pytest.approx(1000, abs=2)


def test_a_flash_crowd_rises_and_halves():
    """A flash crowd reaches its peak after the rise and is half of it a half-life later."""
    counts = counted(flash_crowd(0.0, 10.0, 1000.0, 5.0, 20.0))
    assert sum(counts[:10]) == 0
    assert counts[14] > 850
    assert counts[35] == pytest.approx(500, rel=0.06)


def test_users_follow_zipf():
    """With s = 1 the first of 100 users has twice the share of the second; with s = 0 all have the same."""
    drawn = Counter(islice(user_numbers(100, 1.0, Random(2)), 200_000))
    assert drawn[0] / drawn[1] == pytest.approx(2.0, rel=0.05)
    uniform = Counter(islice(user_numbers(10, 0.0, Random(2)), 50_000))
    assert max(uniform.values()) / min(uniform.values()) < 1.1


def limited(**client: object):
    """One client class through a policy of 10/s with a burst of 10, for 20 s."""
    policy = Policy.of(name="p", identify={"user": {"header": "X-User"}}, limits=[RULE])
    clients = {"all": {"identities": {"user": "u"}, **client}}
    return Simulation(Scenario.of(duration="20s", clients=clients, gateway={"policy": policy})).run()


def test_a_client_that_obeys_retry_after_gets_through():
    """A lone client that obeys Retry-After needs at most two attempts per request, one with short waits of its own many."""
    loop = {"arrivals": {"loop": 1}, "attempts": 100, "retry_refused": True, "backoff": {"first": "2ms", "most": "2ms"}}
    patient, hasty = limited(**loop).classes["all"], limited(**loop, obey_retry_after=False).classes["all"]
    assert patient.ok == pytest.approx(10 * 20 + 10, abs=2)
    assert patient.attempts <= 2 * patient.sent
    assert hasty.attempts > 10 * patient.attempts


def test_a_stuck_loop_sends_again_at_once():
    """A loop without a pause sends as fast as it is answered: 2 senders with 10 ms each are 200/s, refused or not."""
    result = limited(arrivals={"loop": 2, "pause": "10ms"})
    one = result.classes["all"]
    assert one.sent == pytest.approx(4000, abs=4)
    assert one.ok == pytest.approx(10 * 20 + 10, abs=1)


def test_jitter_spreads_retries():
    """Clients that are refused together come back together without jitter, and spread out with it."""

    rng = Random(3)
    assert len({Backoff(100_000, 2.0, 1_000_000, False).delay_us(2, rng) for _ in range(50)}) == 1
    delays = {Backoff(100_000, 2.0, 1_000_000, True).delay_us(2, rng) for _ in range(50)}
    assert len(delays) > 40
    assert max(delays) <= 200_000
