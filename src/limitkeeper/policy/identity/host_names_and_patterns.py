"""Canonical form of the Host header, and the host patterns of rules."""

from __future__ import annotations

import re

from ...errors import ConfigurationError
from .addresses import CACHE_SIZE, address_text, read_address
from .key_and_cache_bounds import remember

_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*")
_MAX_NAME = 253
#: Host names in an unreadable header, and the most of them.
_NAMES = re.compile(r"[a-z0-9_.-]+")
_MAX_NAMES = 8
_cache: dict[str, str] = {}


def host_of(value: str | None) -> str:
    """The host in lower case, without port, brackets and final dot; "" for a missing or invalid one."""
    if not value:
        return ""
    found = _cache.get(value)
    if found is None:
        found = _parse_host(value)
        if len(value) <= _MAX_NAME + 8:
            remember(_cache, value, found, CACHE_SIZE)
    return found


def _parse_host(value: str) -> str:
    if len(value) > _MAX_NAME + 8:
        return ""
    text = value.strip().lower()
    if text[:1] == "[" or text.count(":") > 1:
        address = read_address(text)
        return "" if address is None else address_text(address)
    name, colon, port = text.partition(":")
    if colon and port and not (port.isascii() and port.isdigit() and len(port) <= 5):
        return ""
    name = name.removesuffix(".")
    if not name.isascii():
        try:
            name = name.encode("idna").decode("ascii").lower()
        except UnicodeError:
            return ""
    return name if len(name) <= _MAX_NAME and _NAME.fullmatch(name) else ""


def host_pattern(text: str) -> str:
    """A rule's host in canonical form: `shop.example.com`, or `*.example.com` for its subdomains. ConfigurationError: neither."""
    bare = text.strip()
    host = host_of(bare.removeprefix("*."))
    if not host:
        raise ConfigurationError(f"{text!r} is not a host; write shop.example.com, or *.example.com for its subdomains")
    return f"*.{host}" if bare.startswith("*.") else host


def patterns_of(host: str) -> list[str]:
    """All patterns that match a canonical host: itself, and one for each parent domain (example.com is not `*.example.com`)."""
    labels = host.split(".")
    return [host, *("*." + ".".join(labels[i:]) for i in range(1, len(labels)))]


def possible_patterns(value: str) -> list[str]:
    """The patterns of the names in a Host header that can't be parsed; an application may take any of them for the host. Of a
    long header, both ends and what precedes the first colon are read."""
    parts = (value[:_MAX_NAME], value.partition(":")[0][-_MAX_NAME:], value[-_MAX_NAME:])
    names = [name.strip(".") for part in parts for name in _NAMES.findall(part.lower())]
    found = dict.fromkeys(names if len(names) <= _MAX_NAMES else names[: _MAX_NAMES // 2] + names[-_MAX_NAMES // 2 :])
    return [pattern for name in found if name for pattern in ("*." + name, *patterns_of(name))]
