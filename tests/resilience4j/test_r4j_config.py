"""RateLimiterConfig: its defaults, its checks, and its durations."""

import copy
import dataclasses
import pickle
from datetime import timedelta

import pytest

from limitkeeper import InvalidLimit, TokenBucket
from limitkeeper.resilience4j import Outcome, RateLimiterConfig


def test_the_defaults_are_those_of_resilience4j():
    """50 per 500 ns, waiting up to 5 s; capacity and start follow the limit; nothing drains."""
    config = RateLimiterConfig.of_defaults()
    assert config == RateLimiterConfig() == RateLimiterConfig(50, "500ns", "5s", 50, 50, None)
    assert repr(config) == (
        "RateLimiterConfig(limit_for_period=50, limit_refresh_period='500ns', timeout_duration='5s', "
        "permit_capacity=50, initial_permits=50, drain_permissions_on_result=None)"
    )


@pytest.mark.parametrize(
    ("limit", "period", "text"),
    [
        (50, "500ns", "100/us"),
        (7, "333ns", "7000/333us"),
        (3, "1ns", "3000/us"),
        (1, "1500 nanoseconds", "2/3us"),
        (10, 1, "10/s"),
        (10, "1 s", "10/s"),
        (10, 0.25, "10/250ms"),
        (10, timedelta(milliseconds=250), "10/250ms"),
        (10, "minute", "10/min"),
        (10, 5e-07, "20/us"),
    ],
)
def test_count_and_period_become_whole_microseconds_exactly(limit, period, text):
    """Both are multiplied by the same number, so the rate is the same rate."""
    assert str(RateLimiterConfig(limit, period).limit.rate) == text


def test_a_config_is_a_token_bucket():
    """Capacity is its burst, the permissions at the start are its initial."""
    config = RateLimiterConfig(10, "1s", permit_capacity=30, initial_permits=2)
    assert config.limit == TokenBucket("10/s burst 30 initial 2")


@pytest.mark.parametrize(("given", "capacity"), [(None, 10), (0, 10), (9, 10), (10, 10), (11, 11)])
def test_the_capacity_is_never_below_the_limit(given, capacity):
    """permit_capacity = max(given, limit_for_period)."""
    assert RateLimiterConfig(10, "1s", permit_capacity=given).permit_capacity == capacity


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"limit_for_period": 0}, "limit_for_period=0 must be between 1"),
        ({"limit_for_period": -1}, "limit_for_period=-1"),
        ({"limit_for_period": 1.5}, "limit_for_period=1.5 must be a whole number"),
        ({"limit_for_period": True}, "limit_for_period=True"),
        ({"limit_for_period": 10**9 + 1}, "between 1 and 1000000000"),
        ({"limit_refresh_period": 0}, "limit_refresh_period=0 must be at least '1ns'"),
        ({"limit_refresh_period": "0.5ns"}, "must be at least '1ns'"),
        ({"limit_refresh_period": timedelta(seconds=-1)}, "must be at least '1ns'"),
        ({"limit_refresh_period": "1.5ns"}, "must be whole nanoseconds; round it to '2ns'"),
        ({"limit_refresh_period": "soon"}, "limit_refresh_period='soon'"),
        ({"limit_refresh_period": None}, "limit_refresh_period=None"),
        ({"limit_refresh_period": "401d"}, "400 days"),
        ({"timeout_duration": -1}, "timeout_duration=-1: must not be negative"),
        ({"timeout_duration": timedelta(seconds=-1)}, "must not be negative"),
        ({"timeout_duration": float("inf")}, "timeout_duration=inf"),
        ({"timeout_duration": None}, "timeout_duration=None"),
        ({"permit_capacity": -1}, "permit_capacity=-1"),
        ({"permit_capacity": 2.0}, "permit_capacity=2.0"),
        ({"initial_permits": -1}, "initial_permits=-1"),
        ({"initial_permits": 51}, "initial_permits=51 must be at most the permit_capacity, 50"),
        ({"limit_for_period": 10**9, "limit_refresh_period": "7ns"}, "write at most 1000000 per 7ns"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(wrong, message):
    """The message has the field, the given value and the right form."""
    with pytest.raises(InvalidLimit) as caught:
        RateLimiterConfig(**wrong)
    assert message in str(caught.value)


def test_a_large_count_fits_when_the_fraction_reduces():
    """10^9 per 12.5 µs are 2·10^9 per 25 µs, beyond the largest count; it is the same as 8·10^7 per 1 µs."""
    assert str(RateLimiterConfig(10**9, "12500ns").limit.rate) == "80000000/us"


def test_the_predicate_must_be_a_function():
    """Anything else is a TypeError."""
    with pytest.raises(TypeError, match="function of an Outcome"):
        RateLimiterConfig(drain_permissions_on_result=True)


@pytest.mark.parametrize(
    ("given", "shown", "microseconds"),
    [
        (0, "0s", 0),
        ("100ms", "100ms", 100_000),
        (0.1 + 0.2, "300000001ns", 300_001),
        ("1ns", "1ns", 1),
        (timedelta(minutes=2), "2min", 120_000_000),
        ("1d", "1d", 86_400_000_000),
    ],
)
def test_a_timeout_is_rounded_up_to_the_clocks_microseconds(given, shown, microseconds):
    """Durations are read back as text; a wait of less than a microsecond is a whole one."""
    config = RateLimiterConfig(timeout_duration=given)
    assert (config.timeout_duration, config.timeout_us) == (shown, microseconds)


def test_a_very_long_timeout_is_as_good_as_none():
    """A thousand years fit."""
    assert RateLimiterConfig(timeout_duration="365000d").timeout > timedelta(days=365 * 100)


def test_equal_configs_are_equal_however_they_were_written():
    """Spelling does not matter, meaning does; equal ones hash alike."""
    one, other = RateLimiterConfig(10, "1s", "1min"), RateLimiterConfig(10, 1, timedelta(seconds=60), permit_capacity=3)
    assert one == other
    assert hash(one) == hash(other)
    assert one != RateLimiterConfig(11, "1s", "1min")


def test_a_config_is_frozen():
    """A changed one is another one."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        RateLimiterConfig().limit_for_period = 3


def test_a_changed_copy_follows_its_defaults():
    """A default value is computed again; a given one stays."""
    config = RateLimiterConfig(10, "1s")
    assert config.replace(limit_for_period=20) == RateLimiterConfig(20, "1s")
    given = RateLimiterConfig(10, "1s", permit_capacity=15, initial_permits=1)
    assert given.replace(limit_for_period=12) == RateLimiterConfig(12, "1s", permit_capacity=15, initial_permits=1)
    assert dataclasses.replace(config, timeout_duration=0) == RateLimiterConfig(10, "1s", 0)


def test_a_config_can_be_copied_and_pickled():
    """Also by the given values, not only by the resulting ones."""
    config = RateLimiterConfig(10, "1s")
    for same in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert same == config
        assert same.replace(limit_for_period=20).permit_capacity == 20


def test_an_outcome_is_a_result_or_an_error():
    """The arguments of the predicate."""
    assert Outcome(result=5) == (5, None)
    assert Outcome(error=KeyError).result is None
