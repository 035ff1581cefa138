"""A store hash (stores/store_hash.py) in Redis, over the connections of a RedisStore: `limitkeeper:=overrides:shop`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .command_routing import RoutedCommand
from .key_names import key_bytes, key_text
from .resp import Command

if TYPE_CHECKING:
    from .store import RedisStore

#: Its own budget: that of a decision may be a few milliseconds, and no caller waits for this.
BUDGET_US = 1_000_000


class RedisStoreHash:
    """One Redis hash. No digest of a limit begins with "=", so no limit's key has this name."""

    polled, quick = True, False

    def __init__(self, store: RedisStore, name: str) -> None:
        self._store = store
        self._key = store.names.start + b"=" + key_bytes(name)

    def read(self) -> dict[str, str]:
        store = self._store
        found = store.pool.run(store.route.read_hashes([self._key]), store._now_us() + BUDGET_US)
        return {key_text(field): key_text(value) for field, value in found[self._key].items()}

    def write(self, field: str, value: str | None) -> None:
        store, name = self._store, key_bytes(field)
        command: Command = ["HDEL", self._key, name] if value is None else ["HSET", self._key, name, key_bytes(value)]
        store.pool.run(store.route.query([RoutedCommand(command, self._key)]), store._now_us() + BUDGET_US)
