"""A hash in Redis, read whole: over a connection of its own, with the routes of the store (single, Sentinel, Cluster, TLS)."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode, urlsplit

from ...errors import ConfigurationError, StoreUnavailable
from ..urls import WRAPPING
from .address import read_url
from .key_scan import sent
from .resp import required
from .script_call import RoutedCommands
from .store import ROUTES
from .sync_connection import SyncPool, now_us


def address_only(url: str) -> str:
    """The URL of a store without what is wrapped around it there (guard=, lease=, …), which means nothing here."""
    parts = urlsplit(url)
    left = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name not in WRAPPING]
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{urlencode(left)}" if left else "")


class RedisHash:
    """`read` gives all fields of a hash within `timeout_us`, or raises a StoreError. For one thread at a time."""

    def __init__(self, url: str, name: str, timeout_us: int = 1_000_000) -> None:
        try:
            required()
        except ModuleNotFoundError:
            raise ConfigurationError("limits from a Redis hash need hiredis: pip install 'limitkeeper[redis]'") from None
        address = read_url(address_only(url))
        self.name = name
        self.timeout_us = timeout_us
        self.route = ROUTES[address.kind](address)
        self.links = SyncPool()

    def __str__(self) -> str:
        return f"{self.route.address}, hash {self.name!r}"

    def read(self) -> dict[bytes, bytes]:
        errand = RoutedCommands([["HGETALL", self.name]], self.name.encode())
        (told,) = self.links.run(sent(self.route, [errand]), now_us() + self.timeout_us)
        if not isinstance(told, list) or len(told) % 2:
            raise StoreUnavailable(f"{self} answered what no Redis would: {type(told).__name__}")
        return dict(zip(told[::2], told[1::2], strict=True))

    def close(self) -> None:
        self.links.close()
