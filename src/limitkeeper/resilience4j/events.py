"""Events of a RateLimiter under Resilience4j's names. Consumers can't change an answer, nor break a caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Self

from ..clock import Clock
from ..observe.events import Event, Publisher

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class EventType(StrEnum):
    """The kinds of events."""

    SUCCESSFUL_ACQUIRE = "SUCCESSFUL_ACQUIRE"
    FAILED_ACQUIRE = "FAILED_ACQUIRE"
    DRAINED = "DRAINED"


@dataclass(frozen=True, slots=True)
class RateLimiterEvent:
    """One event; `number_of_permits` were requested, or drained. `creation_time` is the store's clock, in UTC."""

    event_type: EventType
    rate_limiter_name: str
    number_of_permits: int
    creation_time: datetime


Consumer = Callable[[RateLimiterEvent], object]


@dataclass(frozen=True)
class _ConsumerListener:
    """Calls a consumer with a RateLimiterEvent; equal for equal consumers, so that it can be removed."""

    consumer: Consumer
    clock: Clock

    def __call__(self, event: Event) -> None:
        created = _EPOCH + timedelta(microseconds=self.clock.now_us())
        self.consumer(RateLimiterEvent(EventType(event.kind), event.limiter, event.cost, created))


class EventPublisher(Publisher):
    """Registers consumers: `publisher.on_success(count).on_failure(warn)`. `failures` counts consumers that raised."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(tuple(EventType))
        self._clock = clock

    def on_success(self, consumer: Consumer) -> Self:
        return self._on(EventType.SUCCESSFUL_ACQUIRE, consumer)

    def on_failure(self, consumer: Consumer) -> Self:
        return self._on(EventType.FAILED_ACQUIRE, consumer)

    def on_drained(self, consumer: Consumer) -> Self:
        return self._on(EventType.DRAINED, consumer)

    def on_event(self, consumer: Consumer) -> Self:
        """Every kind."""
        return self._on("*", consumer)

    def remove(self, consumer: Consumer) -> Self:
        """Removes a consumer from every kind."""
        self.off("*", _ConsumerListener(consumer, self._clock))
        return self

    def _on(self, kind: str, consumer: Consumer) -> Self:
        self.on(kind, _ConsumerListener(consumer, self._clock))
        return self
