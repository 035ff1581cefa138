"""Reads a whole hash of Redis over a connection of its own, with the topologies of RedisStore."""

from __future__ import annotations

from ...clock import SYSTEM, Clock
from ...errors import ConfigurationError
from .address import address_only, read_url
from .resp import require_hiredis
from .store import ROUTES
from .sync_connection import SyncPool


class RedisHash:
    """`read` returns all fields of a hash within `timeout_us`, or raises a StoreError. For one thread at a time."""

    def __init__(self, url: str, name: str, timeout_us: int = 1_000_000, clock: Clock = SYSTEM) -> None:
        try:
            require_hiredis()
        except ModuleNotFoundError:
            raise ConfigurationError("limits from a Redis hash need hiredis: pip install 'limitkeeper[redis]'") from None
        address = read_url(address_only(url))
        self.name = name
        self.timeout_us = timeout_us
        self._now_us = clock.now_us
        self._route = ROUTES[address.kind](address, clock)
        self._pool = SyncPool(clock)

    def read(self) -> dict[bytes, bytes]:
        name = self.name.encode()
        found = self._pool.run(self._route.read_hashes([name]), self._now_us() + self.timeout_us)
        return dict(found[name])

    def close(self) -> None:
        self._pool.close()
