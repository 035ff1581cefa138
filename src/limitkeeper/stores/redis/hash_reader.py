"""Reads a whole hash of Redis over a connection of its own, with the topologies of RedisStore."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode, urlsplit

from ...clock import SYSTEM
from ...errors import ConfigurationError, StoreUnavailable
from ..urls import WRAPPING
from .address import read_url
from .command_routing import RoutedCommands
from .resp import require_hiredis
from .store import ROUTES
from .sync_connection import SyncPool


def address_only(url: str) -> str:
    """The URL of a store without the options of its wrappers (guard=, lease=, …)."""
    parts = urlsplit(url)
    left = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name not in WRAPPING]
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{urlencode(left)}" if left else "")


class RedisHash:
    """`read` returns all fields of a hash within `timeout_us`, or raises a StoreError. For one thread at a time."""

    def __init__(self, url: str, name: str, timeout_us: int = 1_000_000) -> None:
        try:
            require_hiredis()
        except ModuleNotFoundError:
            raise ConfigurationError("limits from a Redis hash need hiredis: pip install 'limitkeeper[redis]'") from None
        address = read_url(address_only(url))
        self.name = name
        self.timeout_us = timeout_us
        self._route = ROUTES[address.kind](address)
        self._pool = SyncPool(SYSTEM)

    def __str__(self) -> str:
        return f"{self._route.address}, hash {self.name!r}"

    def read(self) -> dict[bytes, bytes]:
        commands = RoutedCommands([["HGETALL", self.name]], self.name.encode())
        (reply,) = self._pool.run(self._route.query([commands]), SYSTEM.now_us() + self.timeout_us)
        if not isinstance(reply, list) or len(reply) % 2:
            raise StoreUnavailable(f"{self} gave an unexpected reply: {type(reply).__name__}")
        return dict(zip(reply[::2], reply[1::2], strict=True))

    def close(self) -> None:
        self._pool.close()
