"""Parsers of matches, paths, hosts and networks: "POST /checkout", "/orders/{id}", "*.example.com", "10.0.0.0/8"."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network

from ...errors import ConfigurationError
from ..identity.hosts import host_pattern
from ..model import Match
from .parse_context import ParseError, bounded_text, did_you_mean, nearest, shorten

_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,30}")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "MESSAGE")


def parse_match(text: str) -> Match:
    """ "POST /checkout", "GET,HEAD /x", or "/x" for every method."""
    match = bounded_text(text).strip()
    at = len(text) - len(text.lstrip())
    if not match:
        raise ParseError("expected a match, got an empty string", "write it like POST /checkout")
    slash = match.find("/")
    if slash < 0:
        raise ParseError(f"{match!r} has no path", f"write it like {match.split()[0].upper()} /checkout; '/**' is every path")
    before = match[:slash]
    if before and not before[-1].isspace():
        if nearest(before, METHODS):
            remedy = "separate methods and path with a space: GET,HEAD /x"
        else:
            remedy = "a path begins with '/'; for a host write {path: /x, host: …}"
        raise ParseError(f"no space between {shorten(before)!r} and the path", remedy, (at, len(before)))
    methods = parse_methods(before, at) if before.strip() else frozenset[str]()
    return Match(methods, parse_path(match[slash:], at + slash))


def parse_methods(text: str, at: int = 0) -> frozenset[str]:
    """ "GET, HEAD": HTTP methods in any case."""
    found = []
    for word in re.finditer(r"[^\s,|]+", text):
        name = word[0].upper()
        if name not in METHODS and (not _METHOD.fullmatch(name) or nearest(name, METHODS, 0.7) is not None):
            span = at + word.start(), len(word[0])
            raise ParseError(f"unknown method {shorten(word[0])!r}", did_you_mean(name, METHODS), span)
        found.append(name)
    if not found:
        raise ParseError("expected a method, got an empty string", "write it like GET, HEAD")
    return frozenset(found)


def parse_path(text: str, at: int = 0) -> str:
    """A path template: literal segments, {name} and * for one segment, ** at the end for any rest."""
    if not bounded_text(text).startswith("/"):
        span = at, max(1, len(text))
        raise ParseError(f"the path {shorten(text)!r} does not begin with '/'", f"write /{text.lstrip('/')}", span)
    for sign, remedy in (
        ("?", "a rule matches only the path; remove the query"),
        ("#", "remove '#' and what follows"),
        (";", "remove ';' and what follows in its segment"),
    ):
        if sign in text:
            raise ParseError(f"the path of a request never has a {sign!r}", remedy, (at + text.index(sign), 1))
    if re.search(r"\s", text):
        remedy = "write a list for several paths; %20 stands for a space"
        raise ParseError(f"{shorten(text)!r} contains a space", remedy, (at, len(text)))
    names: list[str] = []
    segments = text.strip("/").split("/")
    start = at + len(text) - len(text.lstrip("/"))
    for number, segment in enumerate(segments):
        _check_segment(segment, number == len(segments) - 1, names, start)
        start += len(segment) + 1
    return text


def _check_segment(segment: str, last: bool, names: list[str], start: int) -> None:
    span = (start, max(1, len(segment)))
    if segment == "**" and not last:
        raise ParseError("'**' is allowed only at the end of a path", "write '*' for one segment", span)
    if segment in (".", ".."):
        raise ParseError(f"{segment!r} is resolved before paths are matched", "write the resolved path", span)
    if segment.startswith("{") and segment.endswith("}") and "{" not in segment[1:]:
        name = segment[1:-1]
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ParseError(f"{segment!r} is not a valid capture", "write it like {order_id}", span)
        if name in names:
            raise ParseError(f"{segment!r} is captured twice in this path", "rename the second one", span)
        names.append(name)
    elif segment not in ("*", "**") and re.search(r"[*{}]", segment):
        raise ParseError(f"{segment!r}: '*' and {{name}} must be whole segments", "write * or {name} between two '/'", span)


def parse_host(text: str) -> str:
    """A host: "api.example.com", or "*.example.com" for every subdomain."""
    name = bounded_text(text).strip()
    if "://" in name or "/" in name:
        raise ParseError(f"expected a host, got {shorten(text)!r}", "write only the host, like api.example.com")
    if re.search(r":\d+$", name) and name.count(":") == 1:
        raise ParseError(f"{shorten(text)!r} has a port, but hosts are matched without", f"write {name.partition(':')[0]}")
    try:
        return host_pattern(name)
    except ConfigurationError:
        raise ParseError(f"expected a host, got {shorten(text)!r}", "write it like api.example.com or *.example.com") from None


# Networks --------------------------------------------------------------------------------------------------------------


def parse_network(text: str) -> str:
    """An address or a network: "10.0.0.0/8", "2001:db8::/32", "192.0.2.7"."""
    network = bounded_text(text).strip()
    try:
        return str(ip_network(network))
    except ValueError:
        pass
    try:
        masked = ip_network(network, strict=False)
    except ValueError:
        remedy = "write it like 10.0.0.0/8 or 2001:db8::/32"
        raise ParseError(f"expected an address or a network, got {shorten(text)!r}", remedy) from None
    remedy = f"write {masked} for the network, {ip_address(network.split('/')[0])} for the address"
    raise ParseError(f"{network!r} has host bits set", remedy)


def parse_trusted_proxy(text: str) -> str:
    """A network of trusted proxies, or "unix" for UNIX sockets; not one that holds a large part of the Internet."""
    if text == "unix":
        return text
    network = ip_network(parse_network(text))
    widest = 8 if network.version == 4 else 16
    if network.prefixlen < widest and (network.prefixlen == 0 or not network.is_private):
        whom = "every client" if network.prefixlen == 0 else "a large part of the Internet"
        message = f"{network} trusts {whom}: any client could forge its address"
        raise ParseError(message, "write the networks of your proxies, like 10.0.0.0/8")
    return str(network)
