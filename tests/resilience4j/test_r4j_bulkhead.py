"""Resilience4j's bulkhead: its names, defaults, events and registry."""

from __future__ import annotations

import asyncio

import pytest

from limitkeeper.errors import ConfigurationError, InvalidLimit
from limitkeeper.resilience4j import Bulkhead, BulkheadConfig, BulkheadEventType, BulkheadFull, BulkheadRegistry


def test_defaults():
    """By default 25 calls run and none waits."""
    bulkhead = Bulkhead.of_defaults("backend")
    assert bulkhead.bulkhead_config == BulkheadConfig.of_defaults() == BulkheadConfig(25, 0)
    assert [bulkhead.try_acquire_permission() for _ in range(26)] == [True] * 25 + [False]
    assert bulkhead.metrics.available_concurrent_calls == 0
    assert bulkhead.metrics.max_allowed_concurrent_calls == 25


def test_permissions():
    """acquire_permission raises BulkheadFull when there is none; release_permission and on_complete give one back."""
    bulkhead = Bulkhead.of("backend", BulkheadConfig(max_concurrent_calls=1))
    bulkhead.acquire_permission()
    with pytest.raises(BulkheadFull, match="'backend'"):
        bulkhead.acquire_permission()
    bulkhead.release_permission()
    asyncio.run(bulkhead.acquire_permission_async())
    bulkhead.on_complete()
    assert bulkhead.metrics.available_concurrent_calls == 1


def test_waiting(clock):
    """A call waits up to max_wait_duration."""
    bulkhead = Bulkhead("backend", BulkheadConfig(1, "500ms"), clock=clock)
    bulkhead.acquire_permission()
    began_us = clock.now_us()
    assert not bulkhead.try_acquire_permission()
    assert clock.now_us() - began_us == 500_000


def test_decorated_calls_and_events():
    """Decorated and executed calls are permitted and finished; a release without a call is no event."""
    bulkhead, heard = Bulkhead("backend", BulkheadConfig(1)), []
    bulkhead.event_publisher.on_event(lambda event: heard.append((event.event_type, event.bulkhead_name)))

    @bulkhead.decorate
    async def fetch(x):
        with pytest.raises(BulkheadFull):
            bulkhead.execute(abs, -1)
        return x

    assert asyncio.run(fetch(3)) == 3
    assert bulkhead.execute(abs, -2) == 2
    bulkhead.acquire_permission()
    bulkhead.release_permission()
    permitted, rejected, finished = BulkheadEventType
    assert [kind for kind, _ in heard] == [permitted, rejected, finished, permitted, finished, permitted]
    assert {name for _, name in heard} == {"backend"}


def test_changed_configuration():
    """change_config takes effect while calls run."""
    bulkhead = Bulkhead("backend", BulkheadConfig(2))
    bulkhead.acquire_permission()
    bulkhead.acquire_permission()
    bulkhead.change_config(bulkhead.bulkhead_config.replace(max_concurrent_calls=1))
    bulkhead.on_complete()
    assert not bulkhead.try_acquire_permission()
    bulkhead.on_complete()
    assert bulkhead.try_acquire_permission()


def test_registry():
    """A registry creates each bulkhead once, from the default or a shared configuration."""
    registry = BulkheadRegistry({"default": BulkheadConfig(5), "small": BulkheadConfig(1)}, tags={"team": "a"})
    backend = registry.bulkhead("backend", tags={"zone": "1"})
    assert registry.bulkhead("backend") is backend
    assert backend.max_concurrent == 5
    assert backend.tags == {"team": "a", "zone": "1"}
    assert registry.bulkhead("other", "small").max_concurrent == 1
    assert registry.bulkhead("third", BulkheadConfig(7)).max_concurrent == 7
    assert {one.name for one in registry.all_bulkheads()} == {"backend", "other", "third"}
    with pytest.raises(ConfigurationError):
        registry.bulkhead("fourth", "huge")
    with pytest.raises(ConfigurationError, match="expected a BulkheadConfig"):
        BulkheadRegistry({"default": 5})


@pytest.mark.parametrize("options", [{"max_concurrent_calls": 0}, {"max_wait_duration": -1}])
def test_invalid_configurations(options):
    """Sizes start at 1, waits at 0."""
    with pytest.raises(InvalidLimit):
        BulkheadConfig(**options)
