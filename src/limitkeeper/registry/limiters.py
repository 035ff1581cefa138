"""Registry: named limiters, each created once from a shared configuration, over one store.

    registry = Registry("100/s", configurations={"slow": "1/s burst 5"})
    api = registry.limiter("api")                 # default configuration; every caller gets this object
    mail = registry.limiter("mail", "slow")       # shared configuration
    registry.replace("api", "50/s")               # another rate under the same name: the keys' state stays

A limiter has its registry name, and state belongs to that name in the store: it outlives the limiter, and a limiter of another
rate under the same name reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..algorithms import ALGORITHMS
from ..algorithms.limit_parser import named_limits
from ..errors import ConfigurationError
from ..limiter import AsyncLimiter, Limiter, Limits
from ..stores import Store
from .entries import DEFAULT, Entries, check_name

AnyLimiter = Limiter | AsyncLimiter
Configuration = Limits | Callable[[], Limits]


class Registry(Entries[AnyLimiter, Limits]):
    """Named limiters. A configuration is limits, as `Limiter` takes them; `default` is used when none is named.

    A configuration argument is the name of a shared one, limits, or a function that returns limits (called only when the limiter
    has to be created).
    """

    def __init__(
        self,
        default: Limits | None = None,
        *,
        configurations: Mapping[str, Limits] | None = None,
        store: Store | str | None = None,
    ) -> None:
        given = dict(configurations or {})
        if default is not None:
            if DEFAULT in given:
                raise ConfigurationError("the default configuration is given twice; give it once")
            given[DEFAULT] = default
        super().__init__(given, store)

    def limiter(self, name: str, configuration: Configuration | None = None) -> Limiter:
        """The limiter of that name, created from its configuration if there is none yet."""
        found = self.get_or_create(name, lambda: Limiter(self._limits(configuration), self.store, name))
        if not isinstance(found, Limiter):
            raise ConfigurationError(f"{name!r} is an AsyncLimiter; use async_limiter({name!r})")
        return found

    def async_limiter(self, name: str, configuration: Configuration | None = None) -> AsyncLimiter:
        """The same for asyncio. A name is sync or async; two registries over one store share state between the two."""
        found = self.get_or_create(name, lambda: AsyncLimiter(self._limits(configuration), self.store, name))
        if not isinstance(found, AsyncLimiter):
            raise ConfigurationError(f"{name!r} is a Limiter; use limiter({name!r})")
        return found

    def add(self, name: str, entry: AnyLimiter | Configuration) -> None:
        """Adds a limiter under a name that is free: one that has this name, or one created from a configuration."""
        super().add(name, self._create(name, entry, Limiter))

    def replace(self, name: str, entry: AnyLimiter | Configuration) -> AnyLimiter | None:
        """Replaces the limiter of a name and returns the one before; None, and no change, when the name is free.

        From a configuration, the new limiter is sync or async as the old one was. One limit of the same algorithm reads the
        state that the old one wrote.
        """
        with self._exclusive(check_name(name)):
            before = self._entries.get(name)
            return None if before is None else super().replace(name, self._create(name, entry, type(before)))

    def snapshot(self) -> dict[str, dict[str, dict[str, str] | dict[str, int]]]:
        """For dashboards, as plain data: name -> its limits as text, and its counters."""
        return {
            name: {
                "limits": {part: str(limit) for part, limit in limiter.limits.items()},
                "stats": limiter.stats()._asdict(),
            }
            for name, limiter in self.items()
        }

    def _create(self, name: str, entry: AnyLimiter | Configuration, kind: type[AnyLimiter]) -> AnyLimiter:
        return entry if isinstance(entry, AnyLimiter) else kind(self._limits(entry), self.store, check_name(name))

    def _limits(self, configuration: Configuration | None) -> Limits:
        if configuration is None:
            return self.configuration()
        if isinstance(configuration, str):
            shared = configuration in self._configurations or not _looks_like_limits(configuration)
            return self.configuration(configuration) if shared else configuration
        return configuration() if callable(configuration) else configuration

    def _check_configuration(self, name: str, configuration: Limits) -> Limits:
        if _looks_like_limits(name):
            raise ConfigurationError(f"{name!r} reads as a limit; choose another name for the configuration")
        named_limits(configuration, name)
        return configuration

    def _check_entry(self, name: str, entry: AnyLimiter) -> AnyLimiter:
        if not isinstance(entry, AnyLimiter):
            raise ConfigurationError(f"{name!r}: the factory must return a Limiter or an AsyncLimiter, got {entry!r}")
        if entry.name != name:
            raise ConfigurationError(f"expected a limiter called {name!r}, got {entry.name!r}; create it with name={name!r}")
        return entry


def _looks_like_limits(text: str) -> bool:
    words = " ".join(text.lower().split())
    return words[:1].isdigit() or words.startswith(tuple(f"{kind} " for kind in ALGORITHMS))
