"""Registry: named limiters, each created once from a shared configuration, over one store.

    registry = Registry("100/s", configurations={"slow": "1/s burst 5"})
    api = registry.limiter("api")                 # default configuration; every caller gets this object
    mail = registry.limiter("mail", "slow")       # shared configuration
    registry.replace("api", "50/s")               # another rate under the same name: the keys' state stays

A limiter has its registry name, and state belongs to that name in the store: it outlives the limiter, and a limiter of another
rate under the same name reads it.

The first caller of a name runs its factory; other callers of that name wait for it, other names do not. Reading never waits.
Rejected: one lock for all names (a slow factory would block every other name), and weak references to entries (an entry without
a caller would lose its counters).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from .algorithms import ALGORITHMS
from .algorithms.limit_parser import named_limits
from .errors import ConfigurationError
from .fork import reset_after_fork
from .limiter import AsyncLimiter, Limiter, Limits
from .observe.events import ADDED, REMOVED, REPLACED, Event, Publisher
from .stores import Store
from .stores.urls import open_store

__all__ = ["Change", "Entries", "Registry"]

AnyLimiter = Limiter | AsyncLimiter
Configuration = Limits | Callable[[], Limits]
E = TypeVar("E")
C = TypeVar("C")
#: The name of the configuration that is used when none is named.
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Change(Event):
    """A change of the name `limiter`: `entry` was added or removed; `replaced` is the entry before it."""

    entry: Any = None
    replaced: Any = None


class _NameLock:
    """Lets one thread at a time change a name; `creating` while its factory runs."""

    __slots__ = ("creating", "lock", "users")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.creating = False
        self.users = 0


class Entries(Generic[E, C]):
    """The base of every registry: entries by name, configurations by name, one store, and events for changes.

    Reading never waits. Changes of one name are made, and published, one after the other.
    """

    def __init__(self, configurations: Mapping[str, C], store: Store | str | None = None) -> None:
        self._owns_store = store is None or isinstance(store, str)
        self.store = open_store(store)
        self.events = Publisher((ADDED, REPLACED, REMOVED))
        self._entries: dict[str, E] = {}
        self._configurations = {
            check_name(name): self._check_configuration(name, configuration) for name, configuration in configurations.items()
        }
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._name_locks: dict[str, _NameLock] = {}

    # What each kind of registry defines ------------------------------------------------------------------------

    def _check_configuration(self, name: str, configuration: C) -> C:
        raise NotImplementedError

    def _check_entry(self, name: str, entry: E) -> E:
        raise NotImplementedError

    # Reading ---------------------------------------------------------------------------------------------------

    def find(self, name: str) -> E | None:
        """The entry of a name, or None."""
        return self._entries.get(name)

    def __getitem__(self, name: str) -> E:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """The names in order of addition, of a copy: the registry may change meanwhile."""
        return iter(self._copy())

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> KeysView[str]:
        """The names, of a copy."""
        return self._copy().keys()

    def values(self) -> ValuesView[E]:
        """The entries, of a copy."""
        return self._copy().values()

    def items(self) -> ItemsView[str, E]:
        """Names and entries, of a copy."""
        return self._copy().items()

    def _copy(self) -> dict[str, E]:
        with self._lock:
            return dict(self._entries)

    # Changing --------------------------------------------------------------------------------------------------

    def get_or_create(self, name: str, factory: Callable[[], E]) -> E:
        """The entry of a name; when there is none, `factory` creates it. It runs once, however many threads call."""
        found = self._entries.get(check_name(name))
        if found is not None:
            return found
        with self._exclusive(name) as lock:
            found = self._entries.get(name)
            if found is None:
                lock.creating = True
                try:
                    found = self._check_entry(name, factory())
                finally:
                    lock.creating = False
                self._put(ADDED, name, found, None)
            return found

    def add(self, name: str, entry: E) -> None:
        """Adds an entry under a name that is free."""
        with self._exclusive(check_name(name)):
            if name in self._entries:
                raise ConfigurationError(f"{name!r} is taken; use replace({name!r}, …) to replace its entry")
            self._put(ADDED, name, self._check_entry(name, entry), None)

    def replace(self, name: str, entry: E) -> E | None:
        """Replaces the entry of a name and returns the one before; None, and no change, when the name is free."""
        with self._exclusive(check_name(name)):
            before = self._entries.get(name)
            if before is not None:
                self._put(REPLACED, name, self._check_entry(name, entry), before)
            return before

    def remove(self, name: str) -> E | None:
        """Removes an entry and returns it; None when there was none. The state of its keys stays in the store."""
        with self._exclusive(check_name(name)):
            with self._lock:
                before = self._entries.pop(name, None)
            if before is not None:
                self.events.send(Change(REMOVED, name, entry=before))
            return before

    def _put(self, kind: str, name: str, entry: E, before: E | None) -> None:
        with self._lock:
            self._entries[name] = entry
        self.events.send(Change(kind, name, entry=entry, replaced=before))

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[_NameLock]:
        """Locks a name against other changes. The lock object lives as long as threads use it."""
        with self._lock:
            lock = self._name_locks.setdefault(name, _NameLock())
            lock.users += 1
        try:
            with lock.lock:
                if lock.creating:  # re-entered by the factory's own thread
                    raise ConfigurationError(f"the factory of {name!r} asks the registry for {name!r}; create it there instead")
                yield lock
        finally:
            with self._lock:
                lock.users -= 1
                if not lock.users:
                    self._name_locks.pop(name, None)

    # Configurations --------------------------------------------------------------------------------------------

    @property
    def configurations(self) -> dict[str, C]:
        """The shared configurations by name, as a copy."""
        with self._lock:
            return dict(self._configurations)

    def configuration(self, name: str = DEFAULT) -> C:
        """A shared configuration."""
        try:
            return self._configurations[name]
        except KeyError:
            known = ", ".join(self._configurations) or "none"
            raise ConfigurationError(
                f"no configuration is called {name!r} (known: {known}); add_configuration({name!r}, …) first"
            ) from None

    def add_configuration(self, name: str, configuration: C) -> None:
        """Shares a configuration under a name; entries created earlier keep theirs."""
        checked = self._check_configuration(check_name(name), configuration)
        with self._lock:
            self._configurations[name] = checked

    def remove_configuration(self, name: str) -> C | None:
        """Removes a configuration and returns it; None when there was none. Entries created from it stay."""
        with self._lock:
            return self._configurations.pop(name, None)

    # Closing ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the store if this registry opened it."""
        if self._owns_store:
            self.store.close()

    async def aclose(self) -> None:
        if self._owns_store:
            await self.store.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


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


def check_name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a name in a registry must be a non-empty string, got {name!r}")
    return name


def _looks_like_limits(text: str) -> bool:
    words = " ".join(text.lower().split())
    return words[:1].isdigit() or words.startswith(tuple(f"{kind} " for kind in ALGORITHMS))
