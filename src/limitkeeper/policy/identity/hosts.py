"""Hosts: one spelling for what clients write in the Host header, and the patterns that rules name."""

from __future__ import annotations

import re

from ...errors import ConfigurationError
from .addresses import MOST_KEPT, address_text, read_address
from .key_hashing import remember

_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*")
_LONGEST = 253
_kept: dict[str, str] = {}


def host_of(value: str | None) -> str:
    """The host in lower case, without a port, brackets or a last dot; "" when nobody said, or when it is none."""
    if not value:
        return ""
    found = _kept.get(value)
    if found is None:
        found = _read(value)
        if len(value) <= _LONGEST + 8:
            remember(_kept, value, found, MOST_KEPT)
    return found


def _read(value: str) -> str:
    if len(value) > _LONGEST + 8:
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
        name = _international(name)
    return name if len(name) <= _LONGEST and _NAME.fullmatch(name) else ""


def _international(name: str) -> str:
    try:
        return name.encode("idna").decode("ascii").lower()
    except UnicodeError:
        return ""


def host_pattern(text: str) -> str:
    """A rule's host, tidied: `shop.example.com` or `*.example.com` (any host below it). ConfigurationError: it is neither."""
    bare = text.strip()
    host = host_of(bare.removeprefix("*."))
    if not host:
        raise ConfigurationError(f"{text!r} is no host; write shop.example.com, or *.example.com for every host below it")
    return f"*.{host}" if bare.startswith("*.") else host


def host_matches(pattern: str, host: str) -> bool:
    """Whether a tidied host is meant by a tidied pattern; "" means any. `*.example.com` is not example.com itself."""
    if pattern[:2] == "*.":
        return host.endswith(pattern[1:])
    return not pattern or pattern == host


def patterns_of(host: str) -> list[str]:
    """All patterns that mean a tidied host: itself, and one for every domain above it."""
    labels = host.split(".")
    return [host, *("*." + ".".join(labels[i:]) for i in range(1, len(labels)))]
