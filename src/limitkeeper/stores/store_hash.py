"""Store hashes: a few short texts by field, kept beside the limits of a store and shared by all its users (`Store.open_hash`).

    memory    a dict of the store; changes are announced to this process
    shared    a JSON file beside the store's file: written under a lock, replaced as a whole
    redis     a Redis hash under the store's prefix (redis/server_store.py)

For overrides and the audit log of operators: at most some hundred fields, which change rarely and are read as a whole. `polled`:
other processes write it too, so a user reads it again at intervals. `quick`: reading waits for nothing outside this host.
Rejected: a cell of the store, whose size is fixed, and a protocol among the replicas, which library users are no part of.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .contract import Store


class StoreHash(Protocol):
    """`read` returns all fields, `write` sets one, or removes it (None). Both raise a StoreError when the store fails."""

    polled: bool
    quick: bool

    def read(self) -> dict[str, str]: ...

    def write(self, field: str, value: str | None) -> None: ...


class Listener(Protocol):
    def refresh(self) -> None: ...


class MemoryHash:
    """A hash of one process. `listeners` are refreshed after every change."""

    polled, quick = False, True

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}
        self.listeners: WeakValueDictionary[int, Listener] = WeakValueDictionary()  # by id

    def read(self) -> dict[str, str]:
        return dict(self._fields)

    def write(self, field: str, value: str | None) -> None:
        if value is None:
            self._fields.pop(field, None)
        else:
            self._fields[field] = value
        for reference in list(self.listeners.valuerefs()):  # taken at once: other threads may add some
            listener = reference()
            if listener is not None:
                listener.refresh()


_hashes: WeakKeyDictionary[Store, dict[str, MemoryHash]] = WeakKeyDictionary()


def memory_hash(store: Store, name: str) -> MemoryHash:
    """The hash of this name that belongs to a store of this process."""
    return _hashes.setdefault(store, {}).setdefault(name, MemoryHash())


class FileHash:
    """A hash beside the file of a SharedStore."""

    polled, quick = True, True

    def __init__(self, path: str, name: str) -> None:
        self._path = f"{path}.{quote(name, safe='')}.json"
        self._read: tuple[str, dict[str, str]] = ("", {})  # the last text, and its fields

    def read(self) -> dict[str, str]:
        try:
            with open(self._path, encoding="utf-8") as file:  # its times are too coarse to tell whether it has changed
                text = file.read()
            if text != self._read[0]:
                self._read = text, json.loads(text)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise StoreUnavailable(f"{self._path}: can't read it: {error}") from None
        return dict(self._read[1])

    def write(self, field: str, value: str | None) -> None:
        try:
            with self._locked():
                fields = {name: text for name, text in self.read().items() if name != field}
                if value is not None:
                    fields[field] = value
                draft = f"{self._path}.{os.getpid()}"
                with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                    json.dump(fields, file)
                    file.flush()
                    os.fsync(file.fileno())  # an empty file after a power failure could not be read
                os.replace(draft, self._path)
        except OSError as error:
            raise StoreUnavailable(f"{self._path}: can't write it: {error}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl

        with open(os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT, 0o600), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by the death of its holder
            yield
