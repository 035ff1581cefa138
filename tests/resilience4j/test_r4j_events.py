"""The events of a RateLimiter, and which listeners get them."""

from datetime import UTC, datetime

import pytest

from limitkeeper import MemoryStore
from limitkeeper.resilience4j import EventType, RateLimiter, RateLimiterConfig, RateLimiterEvent, RequestNotPermitted
from limitkeeper.testing import ManualClock


@pytest.fixture
def clock():
    return ManualClock(1_700_000_000.25)


@pytest.fixture
def limiter(clock):
    return RateLimiter("backend", RateLimiterConfig(10, "1s", "200ms"), store=MemoryStore(clock=clock))


def test_success_failure_and_draining_are_events(limiter, clock):
    """Each with its type, the limiter's name, the permits, and the time of the store's clock."""
    received = []
    limiter.event_publisher.on_event(received.append)
    limiter.acquire_permission(4)
    limiter.drain_permissions()
    limiter.acquire_permission(3)
    limiter.reserve_permission(2)
    now = datetime(2023, 11, 14, 22, 13, 20, 250_000, tzinfo=UTC)
    assert received == [
        RateLimiterEvent(EventType.SUCCESSFUL_ACQUIRE, "backend", 4, now),
        RateLimiterEvent(EventType.DRAINED, "backend", 6, now),
        RateLimiterEvent(EventType.FAILED_ACQUIRE, "backend", 3, now),
        RateLimiterEvent(EventType.SUCCESSFUL_ACQUIRE, "backend", 2, now),
    ]


def test_the_types_are_called_as_in_resilience4j():
    """Their names and their values are the same text."""
    assert [str(kind) for kind in EventType] == ["SUCCESSFUL_ACQUIRE", "FAILED_ACQUIRE", "DRAINED"]


def test_success_is_an_event_after_the_wait(limiter, clock):
    """When the permission is available, not when it was reserved."""
    received = []
    limiter.drain_permissions()
    limiter.event_publisher.on_success(lambda event: received.append(event.creation_time.microsecond))
    limiter.acquire_permission(2)
    assert received == [450_000]


def test_each_kind_has_its_consumers(limiter):
    """A consumer gets its kinds of events, and calls can be chained."""
    received = {"ok": [], "no": [], "dry": []}
    publisher = limiter.event_publisher
    assert (
        publisher.on_success(received["ok"].append).on_failure(received["no"].append).on_drained(received["dry"].append)
        is publisher
    )
    limiter.acquire_permission(10)
    limiter.acquire_permission(3)
    limiter.drain_permissions()
    assert [[event.number_of_permits for event in events] for events in received.values()] == [[10], [3], [0]]


def test_requesting_more_than_the_capacity_is_a_failure_event(limiter):
    """Although it raises."""
    received = []
    limiter.event_publisher.on_failure(received.append)
    with pytest.raises(RequestNotPermitted):
        limiter.reserve_permission(11)
    assert [event.number_of_permits for event in received] == [11]


def test_a_consumer_that_fails_breaks_nothing(limiter, caplog):
    """The caller gets its permission, the next consumer its event."""
    received = []

    def broken(event):
        raise RuntimeError("consumer")

    limiter.event_publisher.on_success(broken).on_success(received.append)
    assert limiter.acquire_permission()
    assert limiter.reserve_permission() == 0
    assert len(received) == limiter.event_publisher.failures == 2
    assert "RuntimeError: consumer" in caplog.text


def test_a_consumer_can_be_removed(limiter):
    """From every kind that it was registered for."""
    received, others = [], []
    limiter.event_publisher.on_success(received.append).on_event(others.append).on_drained(received.append)
    limiter.event_publisher.remove(received.append)
    limiter.acquire_permission()
    limiter.drain_permissions()
    assert received == []
    assert len(others) == 2


def test_consumers_stay_when_the_limit_changes(limiter):
    """Consumers are registered for the name, not for a configuration."""
    received = []
    limiter.event_publisher.on_success(received.append)
    limiter.change_limit_for_period(5)
    limiter.acquire_permission()
    assert len(received) == 1
