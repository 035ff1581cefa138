"""URLs of stores, looked at without making the store: nothing is connected, no file is made."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigurationError
from ...stores.urls import REDIS, WRAPPERS, WRAPPING, maker_of, masked, number, only, options_of
from .parse_context import ParseError, nearest


def store_url(text: str) -> str:
    """A store's URL, looked at without making the store."""
    try:
        parts = urlsplit(text)
        maker_of(parts.scheme, text)
        options = options_of(parts.query, text)
        _options_hold(parts, options, text)
    except (ConfigurationError, ValueError) as error:
        said = str(error).removeprefix(f"{masked(text)}: ")
        message, _, remedy = said.rpartition("; ")
        raise ParseError(message or said, remedy if message else "write it like redis://localhost:6379 or memory://") from None
    return text


def redis_url(text: str) -> str:
    """The URL of a server that has hashes."""
    if not text.startswith(("redis", "valkey", "unix")):
        raise ParseError(f"{masked(text)[1:-1]!r} is no Redis server", "write it like redis://localhost:6379")
    return store_url(text)


def _options_hold(parts: Any, options: dict[str, str], text: str) -> None:
    for wrapper, more in WRAPPERS.items():
        alone = next((name for name in more if name in options and wrapper not in options), None)
        if alone is not None:
            raise ConfigurationError(f"{alone}= belongs to {wrapper}=; write {wrapper}=… too, or leave it out")
    rest = {name: value for name, value in options.items() if name not in WRAPPING}
    if parts.scheme == "memory":
        if parts.netloc or parts.path.strip("/"):
            raise ConfigurationError("memory:// has no host and no path; it takes only ?max_keys=…")
        only(rest, ("max_keys",), text)
    elif parts.scheme == "shared":
        if parts.netloc or len(parts.path) < 2:
            raise ConfigurationError(
                "a shared store has no path; write the file's whole path after three slashes: shared:///run/app/limits"
            )
        only(rest, ("max_keys", "log_entries"), text)
    else:
        for name in rest:
            meant = nearest(name, WRAPPING, 0.75)
            if meant is not None:
                raise ConfigurationError(f"no option is called {name!r}; did you mean {meant}=?")
    if parts.scheme not in ("memory", "shared") and "unix" not in parts.scheme and not parts.netloc:
        raise ConfigurationError(f"{parts.scheme}:// has no host; write it like redis://localhost:6379")
    if parts.netloc:
        _ = parts.hostname, parts.port if "," not in parts.netloc else None
    for name in ("max_keys", "log_entries", *(("lease",) if options.get("lease") != "auto" else ())):
        if name in options:
            number(name, options[name], text)
    if parts.scheme in REDIS:
        from ...stores.redis.address import read_url
        from ...stores.redis.hash_reader import address_only

        read_url(address_only(text))
