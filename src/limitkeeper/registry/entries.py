"""Entries under names: made once, changed one after the other, told to whoever listens.

Whoever asks first for a name makes what stands there; the others wait for that name only, and a factory runs once. Reading
never waits. Configurations are kept beside the entries, under names of their own.

Rejected: one lock for all names (a slow factory would hold up every other name), and weak references to entries (one that
nobody holds just now would lose its counters).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from typing import Generic, Self, TypeVar

from ..errors import ConfigurationError
from ..fork import reset_after_fork
from ..observe.events import ADDED, REMOVED, REPLACED
from ..stores import MemoryStore, Store, store_from_url
from .changes import Change, Changes

E = TypeVar("E")
C = TypeVar("C")
#: The configuration of whoever names none.
DEFAULT = "default"


class _Door:
    """Lets one thread at a time change what stands under a name."""

    __slots__ = ("lock", "making", "users")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.making = False
        self.users = 0


class Entries(Generic[E, C]):
    """What every registry is: entries under names, configurations under names, one store, and events for changes.

    Reading never waits. Changes of one name are made, and told, one after the other.
    """

    def __init__(self, configurations: Mapping[str, C], store: Store | str | None = None) -> None:
        self._owns = store is None or isinstance(store, str)
        self.store: Store = _opened(store)
        self.events = Changes((ADDED, REPLACED, REMOVED))
        self._entries: dict[str, E] = {}
        self._configurations: dict[str, C] = {}
        for name, configuration in configurations.items():
            self._configurations[checked_name(name)] = self._checked_configuration(name, configuration)
        self._reset_after_fork()
        reset_after_fork(self)

    # What every kind of registry says for itself ---------------------------------------------------------------

    def _checked_configuration(self, name: str, configuration: C) -> C:
        raise NotImplementedError

    def _checked_entry(self, name: str, entry: E) -> E:
        raise NotImplementedError

    # Reading ---------------------------------------------------------------------------------------------------

    def find(self, name: str) -> E | None:
        """What stands under a name, or None."""
        return self._entries.get(name)

    def __getitem__(self, name: str) -> E:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they came; changes meanwhile do no harm."""
        return iter(self._copy())

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> KeysView[str]:
        """The names, of a copy."""
        return self._copy().keys()

    def values(self) -> ValuesView[E]:
        """What stands under them, of a copy."""
        return self._copy().values()

    def items(self) -> ItemsView[str, E]:
        """Both, of a copy."""
        return self._copy().items()

    def _copy(self) -> dict[str, E]:
        with self._lock:
            return dict(self._entries)

    # Changing --------------------------------------------------------------------------------------------------

    def get_or_create(self, name: str, factory: Callable[[], E]) -> E:
        """What stands under a name; when nothing does, what `factory` makes. It runs once, whoever else asks meanwhile."""
        found = self._entries.get(checked_name(name))
        if found is not None:
            return found
        with self._alone(name) as door:
            found = self._entries.get(name)
            if found is None:
                door.making = True
                try:
                    found = self._checked_entry(name, factory())
                finally:
                    door.making = False
                self._put(ADDED, name, found, None)
            return found

    def add(self, name: str, entry: E) -> None:
        """Puts an entry under a name that is free."""
        with self._alone(checked_name(name)):
            if name in self._entries:
                raise ConfigurationError(f"{name!r} is taken; use replace({name!r}, …) to put something else there")
            self._put(ADDED, name, self._checked_entry(name, entry), None)

    def replace(self, name: str, entry: E) -> E | None:
        """Puts another entry under a name that is taken, and returns the one before; None (and no change) when it is free."""
        with self._alone(checked_name(name)):
            before = self._entries.get(name)
            if before is not None:
                self._put(REPLACED, name, self._checked_entry(name, entry), before)
            return before

    def remove(self, name: str) -> E | None:
        """Takes an entry away and returns it; None when there was none. The state of its keys stays in the store."""
        with self._alone(checked_name(name)):
            with self._lock:
                before = self._entries.pop(name, None)
            if before is not None:
                self.events.tell(Change(REMOVED, name, entry=before))
            return before

    def _put(self, kind: str, name: str, entry: E, before: E | None) -> None:
        with self._lock:
            self._entries[name] = entry
        self.events.tell(Change(kind, name, entry=entry, replaced=before))

    @contextmanager
    def _alone(self, name: str) -> Iterator[_Door]:
        """Nobody else changes this name meanwhile. A door is kept only while somebody stands at it."""
        with self._lock:
            door = self._doors.setdefault(name, _Door())
            door.users += 1
        try:
            with door.lock:
                if door.making:  # the same thread again: the factory itself came back
                    raise ConfigurationError(f"the factory of {name!r} asks the registry for {name!r}; let it make it instead")
                yield door
        finally:
            with self._lock:
                door.users -= 1
                if not door.users:
                    self._doors.pop(name, None)

    def _reset_after_fork(self) -> None:
        """Locks that nobody holds: at the start, and in the child of a fork."""
        self._lock = threading.Lock()
        self._doors: dict[str, _Door] = {}

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
        """Shares a configuration under a name, from now on; what was made by it before stays as it is."""
        checked = self._checked_configuration(checked_name(name), configuration)
        with self._lock:
            self._configurations[name] = checked

    def remove_configuration(self, name: str) -> C | None:
        """Takes a configuration away and returns it; None when there was none. What was made by it stays."""
        with self._lock:
            return self._configurations.pop(name, None)

    # Closing ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the store, if this registry made it."""
        if self._owns:
            self.store.close()

    async def aclose(self) -> None:
        if self._owns:
            await self.store.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def _opened(store: Store | str | None) -> Store:
    if store is None:
        return MemoryStore()
    if isinstance(store, str):
        return store_from_url(store)
    if not isinstance(store, Store):
        raise ConfigurationError(f"store must be a store or a URL such as 'memory://', not {store!r}")
    return store


def checked_name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a name in a registry must be a text, not {name!r}")
    return name
