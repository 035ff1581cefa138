"""The client's IP address behind trusted proxies, from X-Forwarded-For, Forwarded or a header with one address.

A trusted proxy reports its own peer as the last entry of a header. The header is therefore read from the right, through trusted
proxies only, up to the first address that is not one of them: that is the client, whatever it wrote further left. A malformed or
hidden entry ("unknown", "_secret") ends the walk, and the result is the last address that a trusted hop reported.

    peer 10.0.0.2, X-Forwarded-For: 6.6.6.6, 203.0.113.9, 10.0.0.7      trusted: 10.0.0.0/8      → 203.0.113.9

An IPv6 client owns a whole /64 and may change its address with every request, so its key is the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import ConfigurationError
from ..callback_errors import CallbackErrors
from ..request_context import RequestContext
from .addresses import CACHE_SIZE, Address, Networks, address_text, network_text, read_address
from .key_and_cache_bounds import MAX_KEY_LENGTH, hash_long, remember

#: In `trusted_proxies`: peers on a UNIX socket.
UNIX = "unix"
#: Counts requests over a UNIX socket that is no trusted proxy; logged once.
unknown_peers = CallbackErrors(every_us=1 << 62)
UNKNOWN_PEER = (
    "requests have no client address (over a UNIX socket that is no trusted proxy), so limits by address have one key for all; "
    "write identify: {ip: {client_ip: {trusted_proxies: [unix]}}}, and let the proxy set X-Forwarded-For"
)
#: Proxies in a row that are followed; bounds the work, whatever the length of the header.
MAX_HOPS = 32
#: Characters of one entry.
MAX_HOP_LENGTH = 1024
_PAIR = r"[!#$%&'*+.^_`|~0-9a-z-]+=(?:[!#$%&'*+.^_`|~0-9a-z-]+|\"(?:[^\"\\]|\\.)*\")"
_ELEMENT = re.compile(rf"{_PAIR}(?:\s*;\s*{_PAIR})*\s*(?:;\s*)?", re.I)
_FOR = re.compile(r"(?:^|;)\s*for=(?:\"((?:[^\"\\]|\\.)*)\"|([^;\s]+))", re.I)


class Client(NamedTuple):
    """A client that trusted proxies reported."""

    address: str
    key: str


NOT_CACHED = Client("", "")


@dataclass(frozen=True, slots=True)
class ClientIp:
    """The client's address: `of` gives its key (`203.0.113.9`, `2001:db8::/64`), `address` the whole address.

    `header` is X-Forwarded-For, Forwarded (RFC 7239), or one that holds a single address (X-Real-IP, CF-Connecting-IP). Without
    `trusted_proxies` no header is read.
    """

    trusted_proxies: tuple[str, ...] = ()
    header: str = "X-Forwarded-For"
    ipv6_prefix: int = 64
    ipv4_prefix: int = 32
    trusted: Networks = field(init=False, repr=False, compare=False)
    _name: str = field(init=False, repr=False, compare=False)
    _direct: dict[str, str] = field(init=False, repr=False, compare=False, default_factory=dict)
    _chains: dict[str, Client | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for prefix, maximum, name in ((self.ipv6_prefix, 128, "ipv6_prefix"), (self.ipv4_prefix, 32, "ipv4_prefix")):
            if isinstance(prefix, bool) or not isinstance(prefix, int) or not 1 <= prefix <= maximum:
                raise ConfigurationError(f"{name}: expected a prefix length from 1 to {maximum}, got {prefix!r}")
        assign = object.__setattr__
        assign(self, "trusted_proxies", tuple(self.trusted_proxies))
        assign(self, "trusted", Networks(tuple(text for text in self.trusted_proxies if text != UNIX)))
        assign(self, "_name", self.header.strip().lower())

    def of(self, request: RequestContext) -> str | None:
        """The client's key: its address, or its network by the prefixes. None: a UNIX socket that is no trusted proxy."""
        peer = request.peer()
        key = self._direct.get(peer)  # type: ignore[arg-type]  # cache of peers that are not proxies: nothing else is read
        return key if key is not None else self._find_key(request, peer)

    def address(self, request: RequestContext) -> str | None:
        """The client's whole address, which networks are compared with."""
        peer = request.peer()
        client = self._reported(request) if self._trusts(peer) else None
        return peer if client is None else client.address

    def key_of(self, address: Address) -> str:
        """The key of an address."""
        return network_text(address, self.ipv6_prefix if address[0] == 6 else self.ipv4_prefix)

    def _trusts(self, peer: str | None) -> bool:
        return UNIX in self.trusted_proxies if peer is None else self.trusted.holds(peer)

    def _find_key(self, request: RequestContext, peer: str | None) -> str | None:
        trusted = self._trusts(peer)
        client = self._reported(request) if trusted else None
        if client is not None:
            return client.key
        if peer is None and trusted:  # requests without a credible address share one key
            return UNIX
        if peer is None:
            unknown_peers.report(UNKNOWN_PEER)
            return None
        address = read_address(peer)
        key = hash_long(peer) if address is None else self.key_of(address)  # a test server may call its peer "testclient"
        return key if trusted or len(peer) > MAX_KEY_LENGTH else remember(self._direct, peer, key, CACHE_SIZE)

    def _reported(self, request: RequestContext) -> Client | None:
        """The client that trusted proxies report; None: nothing credible. Cached by header, which a client repeats."""
        value = request.header(self._name)
        if not value:
            return None
        client = self._chains.get(value, NOT_CACHED)
        if client is not NOT_CACHED:
            return client
        address = self._walk(value)
        client = None if address is None else Client(address_text(address), self.key_of(address))
        return client if len(value) > MAX_KEY_LENGTH else remember(self._chains, value, client, CACHE_SIZE)

    def _walk(self, value: str) -> Address | None:
        if self._name != "forwarded" and not self._name.endswith("forwarded-for"):
            return read_address(value)
        last = None
        for hop in map(_forwarded_for if self._name == "forwarded" else read_address, _from_the_right(value)):
            if hop is None:
                break
            last = hop
            if not self.trusted.contain(hop):
                break
        return last


def _from_the_right(value: str) -> Iterator[str]:
    """The entries of a list, last first, read lazily; ends at an entry that is too long."""
    end = len(value)
    for _ in range(MAX_HOPS):
        comma = value.rfind(",", max(0, end - MAX_HOP_LENGTH), end)
        if comma < 0 and end > MAX_HOP_LENGTH:
            return
        hop = value[comma + 1 : end].strip()
        if hop:
            yield hop
        if comma < 0:
            return
        end = comma


def _forwarded_for(element: str) -> Address | None:
    """The address in one element of Forwarded: `for=192.0.2.60;proto=http`, `for="[2001:db8::17]:4711"`."""
    found = _FOR.findall(element) if _ELEMENT.fullmatch(element) is not None else []
    return read_address(found[0][1] or found[0][0]) if len(found) == 1 else None


def without_name(identities: Mapping[str, Any], names: tuple[str, ...], text: str) -> str:
    """A part of a key that has alternatives, without the name of its identity: `42` for `user:42`. The name stays where the value
    could be taken for an address."""
    name, _, value = text.partition(":")
    if len(names) == 1 or name not in names or not value:
        return text
    is_ip = name == "ip" or isinstance(identities[name], ClientIp)
    return value if is_ip or read_address(value.partition("/")[0]) is None else text
