"""Where state lives, and who makes read, decide, write one step."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from ..algorithms.claim import Claim, NamedLimit
from ..errors import ConfigurationError
from .contract import Store
from .memory import MemoryStore


def store_from_url(url: str) -> Store:
    """A store from configuration: "memory://", or "memory://?max_keys=50000"."""
    if not isinstance(url, str):
        raise ConfigurationError(f"a store's URL must be a text such as 'memory://', not {url!r}")
    parts = urlsplit(url)
    if parts.scheme != "memory":
        raise ConfigurationError(f"{url!r}: no store is called {parts.scheme!r}; there is memory://")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = {"max_keys"}
    if parts.netloc or parts.path.strip("/") or not set(options) <= known:
        raise ConfigurationError(f"{url!r}: memory:// takes only ?max_keys=…")
    for name, value in options.items():
        if not value.isdigit():
            raise ConfigurationError(f"{url!r}: {name} must be a whole number, not {value!r}")
    return MemoryStore(int(options.get("max_keys", 1_000_000)))


__all__ = ["Claim", "MemoryStore", "NamedLimit", "Store", "store_from_url"]
