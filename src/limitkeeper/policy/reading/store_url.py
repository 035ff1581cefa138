"""Checks the URL of a store without creating the store: nothing is connected and no file is created."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from ...errors import ConfigurationError
from ...stores.urls import REDIS, WRAPPERS, WRAPPING, maker_of, masked, number, only, options_of
from .parse_context import ParseError, nearest
from .validators import split_remedy


def parse_store_url(text: str) -> str:
    """The URL of a store."""
    try:
        parts = urlsplit(text)
        maker_of(parts.scheme, text)
        _check_options(parts, options_of(parts.query, text), text)
    except (ConfigurationError, ValueError) as error:
        message, remedy = split_remedy(str(error).removeprefix(f"{masked(text)}: "))
        raise ParseError(message, remedy or "write it like redis://localhost:6379 or memory://") from None
    return text


def parse_redis_url(text: str) -> str:
    """The URL of a Redis or Valkey server."""
    if not text.startswith(("redis", "valkey", "unix")):
        raise ParseError(f"expected the URL of a Redis server, got {masked(text)}", "write it like redis://localhost:6379")
    return parse_store_url(text)


def _check_options(parts: SplitResult, options: dict[str, str], text: str) -> None:
    for wrapper, names in WRAPPERS.items():
        alone = next((name for name in names if name in options and wrapper not in options), None)
        if alone is not None:
            raise ConfigurationError(f"{alone}= belongs to {wrapper}=; add {wrapper}=…, or remove it")
    rest = {name: value for name, value in options.items() if name not in WRAPPING}
    if parts.scheme == "memory":
        if parts.netloc or parts.path.strip("/"):
            raise ConfigurationError("memory:// has no host and no path; it takes only ?max_keys=…")
        only(rest, ("max_keys",), text)
    elif parts.scheme == "shared":
        if parts.netloc or len(parts.path) < 2:
            remedy = "write the file's absolute path after three slashes: shared:///run/app/limits"
            raise ConfigurationError(f"the URL of a shared store has no path; {remedy}")
        only(rest, ("max_keys", "log_entries"), text)
    else:
        for name in rest:
            known = nearest(name, WRAPPING, 0.75)
            if known is not None:
                raise ConfigurationError(f"unknown option {name!r}; did you mean {known}=?")
        if "unix" not in parts.scheme and not parts.netloc:
            raise ConfigurationError(f"{parts.scheme}:// has no host; write it like redis://localhost:6379")
    if parts.netloc:
        _ = parts.hostname, parts.port if "," not in parts.netloc else None  # raises ValueError for an invalid port
    for name in ("max_keys", "log_entries", *(("lease",) if options.get("lease") != "auto" else ())):
        if name in options:
            number(name, options[name], text)
    if parts.scheme in REDIS:
        from ...stores.redis.address import read_url
        from ...stores.redis.hash_reader import address_only

        read_url(address_only(text))
