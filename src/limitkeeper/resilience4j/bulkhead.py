"""Bulkhead, BulkheadConfig and BulkheadRegistry: Resilience4j's names over `limitkeeper.concurrency.Bulkhead`.

Waiters are always served in order (fairCallHandlingEnabled). Their number is not bounded, as there; `max_wait_duration` bounds
their wait. A bulkhead belongs to one process and needs no store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ParamSpec, Self, TypeVar

from ..clock import SYSTEM, Clock
from ..concurrency import bulkhead
from ..errors import BulkheadFull, ConfigurationError
from ..observe.events import ALLOWED, FINISHED, REFUSED, Event
from ..rate import Duration, duration_us
from ..registry import DEFAULT, Entries

P = ParamSpec("P")
R = TypeVar("R")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class BulkheadConfig:
    """`max_concurrent_calls` run at a time; another call waits up to `max_wait_duration`."""

    max_concurrent_calls: int = 25
    max_wait_duration: Duration = 0

    def __post_init__(self) -> None:
        bulkhead.checked_size(self.max_concurrent_calls, "max_concurrent_calls", 1)
        duration_us(self.max_wait_duration)

    @classmethod
    def of_defaults(cls) -> BulkheadConfig:
        """25 calls, without waiting."""
        return cls()

    def replace(self, **changes: Any) -> BulkheadConfig:
        """A copy with changes."""
        return replace(self, **changes)


class BulkheadEventType(StrEnum):
    """The kinds of events."""

    CALL_PERMITTED = "CALL_PERMITTED"
    CALL_REJECTED = "CALL_REJECTED"
    CALL_FINISHED = "CALL_FINISHED"


_TYPES = {
    ALLOWED: BulkheadEventType.CALL_PERMITTED,
    REFUSED: BulkheadEventType.CALL_REJECTED,
    FINISHED: BulkheadEventType.CALL_FINISHED,
}


@dataclass(frozen=True, slots=True)
class BulkheadEvent:
    """One event of one bulkhead."""

    event_type: BulkheadEventType
    bulkhead_name: str
    creation_time: datetime


Consumer = Callable[[BulkheadEvent], object]


class BulkheadEventPublisher:
    """Registers consumers: `publisher.on_call_rejected(warn).on_call_finished(count)`."""

    def __init__(self, source: bulkhead.Bulkhead, clock: Clock) -> None:
        self._source, self._clock = source, clock

    def on_call_permitted(self, consumer: Consumer) -> Self:
        return self._on(ALLOWED, consumer)

    def on_call_rejected(self, consumer: Consumer) -> Self:
        return self._on(REFUSED, consumer)

    def on_call_finished(self, consumer: Consumer) -> Self:
        return self._on(FINISHED, consumer)

    def on_event(self, consumer: Consumer) -> Self:
        """Every kind."""
        return self.on_call_permitted(consumer).on_call_rejected(consumer).on_call_finished(consumer)

    def _on(self, kind: str, consumer: Consumer) -> Self:
        def listener(event: Event) -> None:
            created = _EPOCH + timedelta(microseconds=self._clock.now_us())
            consumer(BulkheadEvent(_TYPES[event.kind], event.limiter, created))

        self._source.events.on(kind, listener)
        return self


@dataclass(frozen=True, slots=True)
class BulkheadMetrics:
    """Live numbers of one bulkhead."""

    _source: bulkhead.Bulkhead

    @property
    def available_concurrent_calls(self) -> int:
        return max(0, self._source.max_concurrent - self._source.in_use)

    @property
    def max_allowed_concurrent_calls(self) -> int:
        return self._source.max_concurrent


class Bulkhead(bulkhead.Bulkhead):
    """A bulkhead under Resilience4j's names. A refused call raises `BulkheadFull` (there: BulkheadFullException)."""

    __slots__ = ("_config", "tags")

    def __init__(
        self,
        name: str,
        config: BulkheadConfig | None = None,
        *,
        tags: Mapping[str, str] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._config = config or BulkheadConfig()
        super().__init__(self._config.max_concurrent_calls, None, self._config.max_wait_duration, name=name, clock=clock)
        self.tags = MappingProxyType(dict(tags or {}))

    @classmethod
    def of(cls, name: str, config: BulkheadConfig | Callable[[], BulkheadConfig]) -> Bulkhead:
        return cls(name, config() if callable(config) else config)

    @classmethod
    def of_defaults(cls, name: str) -> Bulkhead:
        return cls(name)

    @property
    def bulkhead_config(self) -> BulkheadConfig:
        return self._config

    @property
    def metrics(self) -> BulkheadMetrics:
        return BulkheadMetrics(self)

    @property
    def event_publisher(self) -> BulkheadEventPublisher:
        return BulkheadEventPublisher(self, self._clock)

    def change_config(self, config: BulkheadConfig) -> None:
        """Changes size and wait while in use. Calls that wait now keep their wait."""
        self._config, self._timeout = config, duration_us(config.max_wait_duration) / 1e6
        self.resize(config.max_concurrent_calls)

    def try_acquire_permission(self) -> bool:
        """Takes a permission, waiting up to `max_wait_duration`; False if there is none."""
        try:
            self.acquire()
        except BulkheadFull:
            return False
        return True

    def acquire_permission(self) -> None:
        """As `try_acquire_permission`; raises `BulkheadFull` if there is none."""
        self.acquire()

    async def acquire_permission_async(self) -> None:
        await self.aacquire()

    def release_permission(self) -> None:
        """Gives back a permission whose call was not made: not an event."""
        self._release()

    def on_complete(self) -> None:
        """Gives back the permission of a call that has ended."""
        self.release()

    def decorate(self, function: Callable[P, R]) -> Callable[P, R]:
        """A function, or coroutine function, that holds a permission during every call."""
        return self.limit(function)

    def execute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a function within a permission; of a coroutine function it returns the coroutine."""
        return self.limit(function)(*args, **kwargs)


class BulkheadRegistry(Entries[Bulkhead, BulkheadConfig]):
    """Named bulkheads, each created once. `configs` is the default configuration, or a mapping of names to configurations."""

    def __init__(
        self, configs: BulkheadConfig | Mapping[str, BulkheadConfig] | None = None, *, tags: Mapping[str, str] | None = None
    ) -> None:
        given = dict(configs) if isinstance(configs, Mapping) else {} if configs is None else {DEFAULT: configs}
        super().__init__({DEFAULT: BulkheadConfig(), **given})
        self.tags = dict(tags or {})

    @classmethod
    def of(cls, configs: BulkheadConfig | Mapping[str, BulkheadConfig]) -> BulkheadRegistry:
        return cls(configs)

    @classmethod
    def of_defaults(cls) -> BulkheadRegistry:
        return cls()

    def bulkhead(self, name: str, config: BulkheadConfig | str = DEFAULT, tags: Mapping[str, str] | None = None) -> Bulkhead:
        """The bulkhead of that name; if there is none yet, it is created from a configuration or the name of a shared one."""

        def create() -> Bulkhead:
            found = self.configuration(config) if isinstance(config, str) else config
            return Bulkhead(name, found, tags={**self.tags, **(tags or {})})

        return self.get_or_create(name, create)

    def all_bulkheads(self) -> list[Bulkhead]:
        return list(self.values())

    def _check_configuration(self, name: str, configuration: BulkheadConfig) -> BulkheadConfig:
        if not isinstance(configuration, BulkheadConfig):
            raise ConfigurationError(f"{name!r}: expected a BulkheadConfig, got {configuration!r}")
        return configuration

    def _check_entry(self, name: str, entry: Bulkhead) -> Bulkhead:
        if not isinstance(entry, Bulkhead) or entry.name != name:
            raise ConfigurationError(f"expected a Bulkhead called {name!r}, got {entry!r}; create it with that name")
        return entry
