"""RateLimiterRegistry: named RateLimiters, each created once from a shared configuration, over one store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

from ..errors import ConfigurationError
from ..observe.events import ADDED, REMOVED, REPLACED
from ..registry import DEFAULT, Change, Entries
from ..stores import Store
from .config import RateLimiterConfig
from .rate_limiter import RateLimiter

Consumer = Callable[[Change], object]
Configs = RateLimiterConfig | Mapping[str, RateLimiterConfig]


class RegistryEventPublisher:
    """Registers consumers of a registry's events. A consumer gets a Change: `limiter` (the name), `entry` and `replaced`."""

    def __init__(self, registry: RateLimiterRegistry) -> None:
        self._events = registry.events

    def on_entry_added(self, consumer: Consumer) -> Self:
        return self._on(ADDED, consumer)

    def on_entry_removed(self, consumer: Consumer) -> Self:
        return self._on(REMOVED, consumer)

    def on_entry_replaced(self, consumer: Consumer) -> Self:
        return self._on(REPLACED, consumer)

    def _on(self, kind: str, consumer: Consumer) -> Self:
        self._events.on(kind, consumer)  # type: ignore[arg-type]  # a registry sends only Changes
        return self


class RateLimiterRegistry(Entries[RateLimiter, RateLimiterConfig]):
    """Named RateLimiters. `configs` is the default configuration, or a mapping of names to configurations.

    `tags` are given to every RateLimiter; its own tags take precedence. find, remove, replace, add_configuration and the rest are
    those of every registry; only the name "default" is reserved here, as in Resilience4j.
    """

    def __init__(
        self, configs: Configs | None = None, *, store: Store | str | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        given = dict(configs) if isinstance(configs, Mapping) else {} if configs is None else {DEFAULT: configs}
        super().__init__({DEFAULT: RateLimiterConfig(), **given}, store)
        self.tags = dict(tags or {})

    @classmethod
    def of(
        cls, configs: Configs, *, store: Store | str | None = None, tags: Mapping[str, str] | None = None
    ) -> RateLimiterRegistry:
        return cls(configs, store=store, tags=tags)

    @classmethod
    def of_defaults(cls, *, store: Store | str | None = None, tags: Mapping[str, str] | None = None) -> RateLimiterRegistry:
        return cls(store=store, tags=tags)

    def rate_limiter(
        self,
        name: str,
        config: RateLimiterConfig | str | Callable[[], RateLimiterConfig] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> RateLimiter:
        """The RateLimiter of that name; if there is none yet, it is created from a configuration, the name of a shared one, or a
        function that returns one."""

        def create() -> RateLimiter:
            return RateLimiter(name, self._config(config), store=self.store, tags={**self.tags, **(tags or {})})

        return self.get_or_create(name, create)

    def all_rate_limiters(self) -> list[RateLimiter]:
        return list(self.values())

    @property
    def default_config(self) -> RateLimiterConfig:
        return self.configuration(DEFAULT)

    @property
    def event_publisher(self) -> RegistryEventPublisher:
        return RegistryEventPublisher(self)

    def add_configuration(self, name: str, configuration: RateLimiterConfig) -> None:
        """Shares a configuration under a name; "default" is reserved."""
        super().add_configuration(_not_default(name), configuration)

    def remove_configuration(self, name: str) -> RateLimiterConfig | None:
        """Removes a configuration and returns it; None when there was none."""
        return super().remove_configuration(_not_default(name))

    def _config(self, config: RateLimiterConfig | str | Callable[[], RateLimiterConfig] | None) -> RateLimiterConfig:
        if config is None or isinstance(config, str):
            return self.configuration(DEFAULT if config is None else config)
        return config() if callable(config) else config

    def _check_configuration(self, name: str, configuration: RateLimiterConfig) -> RateLimiterConfig:
        if not isinstance(configuration, RateLimiterConfig):
            raise ConfigurationError(f"{name!r}: expected a RateLimiterConfig, got {configuration!r}")
        return configuration

    def _check_entry(self, name: str, entry: RateLimiter) -> RateLimiter:
        if not isinstance(entry, RateLimiter):
            raise ConfigurationError(f"{name!r}: expected a RateLimiter, got {entry!r}")
        if entry.name != name:
            raise ConfigurationError(f"expected a RateLimiter called {name!r}, got {entry.name!r}; create it with that name")
        return entry


def _not_default(name: str) -> str:
    if name == DEFAULT:
        raise ConfigurationError("'default' is reserved for the default configuration: give it when the registry is created")
    return name
