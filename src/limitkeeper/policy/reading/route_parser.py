"""Where requests go and come from, as people write it: "POST /checkout", "/orders/{id}", "*.example.com", "10.0.0.0/8"."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network

from ...errors import ConfigurationError
from ..identity.hosts import host_pattern
from ..model import Match
from .parse_context import ParseError, bounded, did_you_mean, nearest, short

_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,30}")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "MESSAGE")


def match(text: str) -> Match:
    """ "POST /checkout", "GET,HEAD /x", or "/x" for every method."""
    words = bounded(text).strip()
    at = len(text) - len(text.lstrip())
    if not words:
        raise ParseError("nothing stands here, not a match", "write it like POST /checkout")
    slash = words.find("/")
    if slash < 0:
        raise ParseError(f"{words!r} has no path", f"write it like {words.split()[0].upper()} /checkout; '/**' is every path")
    before = words[:slash]
    if before and not before[-1].isspace():
        remedy = (
            "take methods and path apart with a space: GET,HEAD /x"
            if nearest(before, METHODS)
            else "a path begins with '/': write {path: /x, host: …}"
        )
        raise ParseError(f"{short(before)!r} stands directly before the path", remedy, (at, len(before)))
    found = methods(before, at) if before.strip() else frozenset()
    return Match(found, path(words[slash:], at + slash))


def methods(text: str, at: int = 0) -> frozenset[str]:
    """ "GET, HEAD": HTTP methods in any case."""
    found = []
    for word in re.finditer(r"[^\s,|]+", text):
        name = word[0].upper()
        if name not in METHODS and (not _METHOD.fullmatch(name) or nearest(name, METHODS, 0.7) is not None):
            raise ParseError(
                f"no method is called {short(word[0])!r}", did_you_mean(name, METHODS), (at + word.start(), len(word[0]))
            )
        found.append(name)
    if not found:
        raise ParseError("no method stands here", "write it like GET, HEAD")
    return frozenset(found)


def path(text: str, at: int = 0) -> str:
    """A path template: literal segments, {name} and * for one segment, ** at the end for any rest."""
    if not bounded(text).startswith("/"):
        raise ParseError(
            f"the path {short(text)!r} does not begin with '/'", f"write /{text.lstrip('/')}", (at, max(1, len(text)))
        )
    for sign, remedy in (
        ("?", "a rule matches the path only; take the query out"),
        ("#", "take '#' and what follows out"),
        (";", "take ';' and what follows in its segment out"),
    ):
        if sign in text:
            raise ParseError(f"no request's path has a {sign!r}", remedy, (at + text.index(sign), 1))
    if re.search(r"\s", text):
        raise ParseError(
            f"{short(text)!r} has a space in it", "write a list for several paths; %20 stands for a space", (at, len(text))
        )
    names: list[str] = []
    segments = text.strip("/").split("/")
    start = at + len(text) - len(text.lstrip("/"))
    for number, segment in enumerate(segments):
        _segment(segment, number == len(segments) - 1, names, start)
        start += len(segment) + 1
    return text


def _segment(segment: str, last: bool, names: list[str], start: int) -> None:
    part = (start, max(1, len(segment)))
    if segment == "**" and not last:
        raise ParseError("'**' stands at the end of a path only", "'*' is one segment", part)
    if segment in (".", ".."):
        raise ParseError(f"no request keeps a {segment!r} in its path", "write the path that it leads to", part)
    if segment.startswith("{") and segment.endswith("}") and "{" not in segment[1:]:
        name = segment[1:-1]
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ParseError(f"{segment!r} has no name that can be used", "write it like {order_id}", part)
        if name in names:
            raise ParseError(f"{segment!r} stands twice in this path", "give the second one another name", part)
        names.append(name)
    elif segment not in ("*", "**") and re.search(r"[*{}]", segment):
        raise ParseError(f"{segment!r}: '*' and {{name}} are whole segments", "write * or {name} between two '/'", part)


def host(text: str) -> str:
    """A host: "api.example.com", or "*.example.com" for every one below it."""
    name = bounded(text).strip()
    if "://" in name or "/" in name:
        raise ParseError(f"{short(text)!r} is more than a host", "write it like api.example.com")
    if re.search(r":\d+$", name) and name.count(":") == 1:
        raise ParseError(f"{short(text)!r} has a port, which is not looked at", f"write {name.partition(':')[0]}")
    try:
        return host_pattern(name)
    except ConfigurationError:
        raise ParseError(f"{short(text)!r} is no host", "write it like api.example.com or *.example.com") from None


# Networks --------------------------------------------------------------------------------------------------------------


def network(text: str) -> str:
    """An address or a network: "10.0.0.0/8", "2001:db8::/32", "192.0.2.7"."""
    words = bounded(text).strip()
    try:
        return str(ip_network(words))
    except ValueError:
        pass
    try:
        near = ip_network(words, strict=False)
    except ValueError:
        raise ParseError(f"{short(text)!r} is no address and no network", "write it like 10.0.0.0/8 or 2001:db8::/32") from None
    raise ParseError(
        f"{words!r} is an address inside a network",
        f"write {near} for the network, {ip_address(words.split('/')[0])} for the address",
    )


def proxies(text: str) -> str:
    """A network of proxies whose word is trusted."""
    found = ip_network(network(text))
    widest = 8 if found.version == 4 else 16
    if found.prefixlen < widest and (found.prefixlen == 0 or not found.is_private):
        whom = "everybody" if found.prefixlen == 0 else "a large part of the Internet"
        told = f"{found} trusts {whom}: any client could write its own address"
        raise ParseError(told, "name the networks of your proxies, like 10.0.0.0/8")
    return str(found)
