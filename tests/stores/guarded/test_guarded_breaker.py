"""The breaker alone: a pure state machine, with time and random numbers as arguments."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import ConfigurationError
from limitkeeper.stores.guarded.breaker import CLOSED, HALF_OPEN, LEAST_US, OPEN, Breaker


class Always(Random):
    """A random generator that always returns the same number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


def made(chance: float = 0.5, failures: int = 3, ratio: float = 0.9) -> Breaker:
    return Breaker(Always(chance), failures, ratio, first_us=100_000, most_us=1_000_000, ramp_us=1_000_000)


def opened(breaker: Breaker, now_us: int = 0) -> Breaker:
    while not breaker.record_failure(now_us):
        pass
    return breaker


def test_failures_in_a_row_open_it():
    """The third failure in a row opens a breaker of three, and the second does not."""
    breaker = made()
    assert [breaker.record_failure(0) for _ in range(3)] == [False, False, True]
    assert (breaker.state, breaker.closed) == (OPEN, False)


def test_a_success_in_between_starts_the_row_again():
    """Failures that are not in a row do not add up to one."""
    breaker = made(ratio=1.0)
    for _ in range(20):
        assert breaker.record_failure(0) is False
        assert breaker.record_failure(0) is False
        breaker.streak += 1
    assert breaker.state == CLOSED


def test_a_ratio_of_failures_opens_it_without_any_row():
    """When every other call fails, a ratio of 0.4 opens it, and a ratio of 0.6 never does."""

    def alternate(ratio: float) -> int | None:
        breaker = made(failures=1000, ratio=ratio)
        for number in range(200):
            if breaker.record_failure(0):
                return number
            breaker.streak += 1
        return None

    assert alternate(0.4) is not None
    assert alternate(0.6) is None


def test_rare_failures_never_open_it():
    """One failure in fifty calls is no outage, for however long."""
    breaker = made(failures=2, ratio=0.5)
    for _ in range(1000):
        assert breaker.record_failure(0) is False
        breaker.streak += 49


@pytest.mark.parametrize("chance", [0.0, 0.25, 1.0])
def test_probes_come_at_doubling_bounds_times_chance(chance):
    """The n-th delay is chance × min(most, first · 2^n), and at least a millisecond."""
    breaker, now, delays = opened(made(chance)), 0, []
    for _ in range(6):
        delays.append(breaker.probe_at_us - now)
        now = breaker.probe_at_us
        assert breaker.begin_probe()
        breaker.probe_failed(now)
    bounds = [100_000, 200_000, 400_000, 800_000, 1_000_000, 1_000_000]
    assert delays == [max(LEAST_US, int(chance * bound)) for bound in bounds]


def test_many_breakers_do_not_probe_together():
    """Of a thousand breakers that opened at one moment, no hundredth of the first 100 ms sees more than 30 probes."""
    moments = [opened(Breaker(Random(seed), 1, 1.0, 100_000, 1_000_000, 1_000_000)).probe_at_us for seed in range(1000)]
    assert max(sum(at <= moment < at + 1_000 for moment in moments) for at in range(0, 100_000, 1_000)) <= 30
    assert min(moments) < 5_000
    assert max(moments) > 95_000


def test_there_is_one_probe_at_a_time():
    """A second probe does not begin while one is in progress."""
    breaker = opened(made())
    assert breaker.begin_probe() is True
    assert breaker.begin_probe() is False
    breaker.probe_failed(0)
    assert breaker.begin_probe() is True


def test_closed_there_is_nothing_to_probe():
    """Only an open breaker is probed."""
    assert made().begin_probe() is False


def test_an_answered_probe_lets_callers_through_bit_by_bit():
    """Half open, the part of callers that is let through grows from none to all over the ramp."""
    breaker = opened(Breaker(Random(1), 1, 1.0, 1000, 1000, ramp_us=1_000_000))
    breaker.begin_probe()
    breaker.probe_succeeded(0)
    assert breaker.state == HALF_OPEN
    parts = [sum(breaker.lets_through(at) for _ in range(1000)) for at in (0, 100_000, 500_000, 900_000, 1_000_000)]
    assert parts[0] == 0
    assert parts == sorted(parts)
    assert 60 <= parts[1] <= 140
    assert 450 <= parts[2] <= 550
    assert parts[4] == 1000


def test_after_the_ramp_it_is_closed_and_has_forgotten():
    """Closed again, it takes as many failures as before to open it, and backoff starts again."""
    breaker = opened(made())
    for _ in range(4):
        breaker.probe_failed(0)
    breaker.probe_succeeded(0)
    assert breaker.close_after_ramp(999_999) is False
    assert breaker.close_after_ramp(1_000_000) is True
    assert breaker.state == CLOSED
    assert [breaker.record_failure(2_000_000) for _ in range(3)] == [False, False, True]
    assert breaker.probe_at_us == 2_000_000 + 50_000


def test_one_failure_while_half_open_opens_it_again_and_goes_on_backing_off():
    """A server that answers probes and fails its callers is not called for longer each time."""
    breaker, waits = opened(made()), []
    for now in range(0, 4_000_000, 1_000_000):
        breaker.probe_succeeded(now)
        assert breaker.record_failure(now) is True
        waits.append(breaker.probe_at_us - now)
    assert waits == [100_000, 200_000, 400_000, 500_000]


def test_a_failure_among_successes_while_half_open_does_not_open_it_again():
    """A store that answers most callers is left after the ramp, although a few time out in it."""
    breaker = opened(made())
    breaker.probe_succeeded(0)
    for now in range(0, 1_000_000, 100_000):
        breaker.streak += 10
        assert breaker.record_failure(now) is False
    assert breaker.close_after_ramp(1_000_000) is True


def test_a_late_failure_changes_nothing_once_it_is_open():
    """Calls under way that fail after it opened do not move the next probe."""
    breaker = opened(made())
    probe_at = breaker.probe_at_us
    assert breaker.record_failure(77) is False
    assert breaker.probe_at_us == probe_at


@given(st.lists(st.sampled_from(["ok", "fail", "probe ok", "probe fail", "wait"]), max_size=60), st.integers(0, 1000))
def test_it_is_always_in_one_of_its_states_and_probes_only_when_it_may(steps, seed):
    """On any course of events: `closed` agrees with the state, open lets no caller through, and a probe is always ahead."""
    breaker, now = Breaker(Random(seed), 2, 0.5, 1000, 8000, 10_000), 0
    for step in steps:
        now += 500
        if step == "ok" and (breaker.closed or breaker.lets_through(now)):
            breaker.streak += 1
        elif step == "fail" and (breaker.closed or breaker.lets_through(now)):
            breaker.record_failure(now)
        elif step.startswith("probe") and breaker.begin_probe():
            breaker.probe_succeeded(now) if step == "probe ok" else breaker.probe_failed(now)
        elif step == "wait":
            breaker.close_after_ramp(now)
        assert breaker.state in (CLOSED, OPEN, HALF_OPEN)
        assert breaker.closed == (breaker.state == CLOSED)
        if breaker.state == OPEN:
            assert not breaker.lets_through(now)
            assert breaker.until_probe_us(now) >= 1


@pytest.mark.parametrize(("failures", "ratio"), [(0, 0.5), (True, 0.5), (1.5, 0.5), (5, 0), (5, 1.5), (5, -1)])
def test_a_breaker_with_invalid_settings_is_an_error(failures, ratio):
    """Failures are counted in whole numbers from one, a ratio lies between 0 and 1."""
    with pytest.raises(ConfigurationError, match=r"failures|ratio"):
        made(failures=failures, ratio=ratio)
