"""Named limiters, made once, from shared and named configurations, over one store.

    registry = Registry("100/s", configurations={"slow": "1/s burst 5"})
    api = registry.limiter("api")                 # by the default configuration; every caller gets this object
    mail = registry.limiter("mail", "slow")       # by a shared one
    registry.replace("api", "50/s")               # another rate under the same name: the keys' state stays

A limiter is called by its name in the registry, and state belongs to that name in the store: it outlives the limiter, and a
limiter of another rate under the same name reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..algorithms import ALGORITHMS
from ..algorithms.limit_parser import named_limits
from ..errors import ConfigurationError
from ..limiter import AsyncLimiter, Limiter, Limits
from ..stores import Store
from .entries import DEFAULT, Entries, checked_name

AnyLimiter = Limiter | AsyncLimiter
Configuration = Limits | Callable[[], Limits]


class Registry(Entries[AnyLimiter, Limits]):
    """Named limiters. A configuration is limits, as `Limiter` takes them; `default` is the one of whoever names none.

    Where a configuration is asked for, give the name of a shared one, limits of its own, or a function that returns limits
    (it is called only when the limiter has to be made).
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
                raise ConfigurationError("the default configuration is given twice; say it once")
            given[DEFAULT] = default
        super().__init__(given, store)

    def limiter(self, name: str, configuration: Configuration | None = None) -> Limiter:
        """The limiter of that name, made by its configuration if it is not there yet."""
        found = self.get_or_create(name, lambda: Limiter(self._limits(configuration), self.store, name))
        if not isinstance(found, Limiter):
            raise ConfigurationError(f"{name!r} is an AsyncLimiter; ask for async_limiter({name!r})")
        return found

    def async_limiter(self, name: str, configuration: Configuration | None = None) -> AsyncLimiter:
        """The same for asyncio. A name is of one colour; two registries over one store share state between colours."""
        found = self.get_or_create(name, lambda: AsyncLimiter(self._limits(configuration), self.store, name))
        if not isinstance(found, AsyncLimiter):
            raise ConfigurationError(f"{name!r} is a Limiter; ask for limiter({name!r})")
        return found

    def add(self, name: str, entry: AnyLimiter | Configuration) -> None:
        """Puts a limiter under a name that is free: a finished one that is called so, or one made by a configuration."""
        super().add(name, self._made(name, entry, Limiter))

    def replace(self, name: str, entry: AnyLimiter | Configuration) -> AnyLimiter | None:
        """Puts another limiter under a name that is taken, and returns the one before; None (and no change) when it is free.

        Given a configuration, the new limiter is of the old one's colour. One limit of the same algorithm reads the state
        that the old one wrote.
        """
        with self._alone(checked_name(name)):
            before = self._entries.get(name)
            return None if before is None else super().replace(name, self._made(name, entry, type(before)))

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """For dashboards, as plain data: name -> its limits as text, and what it counted."""
        return {
            name: {
                "limits": {part: str(limit) for part, limit in limiter.limits.items()},
                "stats": limiter.stats()._asdict(),
            }
            for name, limiter in self.items()
        }

    def _made(self, name: str, entry: AnyLimiter | Configuration, kind: type[AnyLimiter]) -> AnyLimiter:
        return entry if isinstance(entry, AnyLimiter) else kind(self._limits(entry), self.store, checked_name(name))

    def _limits(self, configuration: Configuration | None) -> Limits:
        if configuration is None:
            configuration = DEFAULT
        if isinstance(configuration, str):
            if configuration in self._configurations or not _reads_as_limits(configuration):
                return self.configuration(configuration)
            return configuration
        return configuration() if callable(configuration) else configuration

    def _checked_configuration(self, name: str, configuration: Limits) -> Limits:
        if _reads_as_limits(name):
            raise ConfigurationError(f"{name!r} reads as a limit; give the configuration a name that does not")
        named_limits(configuration, name)
        return configuration

    def _checked_entry(self, name: str, entry: AnyLimiter) -> AnyLimiter:
        if not isinstance(entry, AnyLimiter):
            raise ConfigurationError(f"{name!r}: {entry!r} is no limiter; the factory must return a Limiter or an AsyncLimiter")
        if entry.name != name:
            raise ConfigurationError(f"this limiter is called {entry.name!r}, not {name!r}; make it with name={name!r}")
        return entry


def _reads_as_limits(text: str) -> bool:
    words = " ".join(text.lower().split())
    return words[:1].isdigit() or words.startswith(tuple(f"{kind} " for kind in ALGORITHMS))
