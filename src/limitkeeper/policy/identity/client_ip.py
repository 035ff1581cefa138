"""Whose address a request comes from, when proxies stand between.

What counts is the address at the other end of the connection: nobody can forge that. A proxy that is trusted tells who was at
*its* other end, as the last entry of a header. So the header is read from the right, over trusted proxies only, up to the first
address that is none of them: that is the client, whatever it wrote further left. Where an entry is malformed (or hidden:
"unknown", "_secret") the walk ends, and the answer is the last address that a trusted hop vouched for; never text of a stranger.

    peer 10.0.0.2, X-Forwarded-For: 6.6.6.6, 203.0.113.9, 10.0.0.7      trusted: 10.0.0.0/8      → 203.0.113.9

An IPv6 client has a whole /64 to itself and may change its address with every request, so its key is the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import ConfigurationError
from ..request_context import RequestContext
from .addresses import MOST_KEPT, Address, Networks, address_text, network_text, read_address
from .key_hashing import LONGEST, hash_long, remember

#: In `trusted_proxies`: whoever comes over a UNIX socket.
UNIX = "unix"
#: So many proxies in a row are believed; work is bounded by it, whatever the length of the header.
MOST_HOPS = 32
#: No entry of an honest proxy is longer.
LONGEST_HOP = 1024
_PAIR = r"[!#$%&'*+.^_`|~0-9a-z-]+=(?:[!#$%&'*+.^_`|~0-9a-z-]+|\"(?:[^\"\\]|\\.)*\")"
_ELEMENT = re.compile(rf"{_PAIR}(?:\s*;\s*{_PAIR})*\s*(?:;\s*)?", re.I)
_FOR = re.compile(r"(?:^|;)\s*for=(?:\"((?:[^\"\\]|\\.)*)\"|([^;\s]+))", re.I)


class Client(NamedTuple):
    """A client whom trusted proxies told of."""

    address: str
    key: str


UNKNOWN = Client("", "")


@dataclass(frozen=True, slots=True)
class ClientIp:
    """The client's address, by which it is counted: `of` gives the key (`203.0.113.9`, `2001:db8::/64`), `address` all of it.

    `header` is X-Forwarded-For, Forwarded (RFC 7239), or one that holds a single address (X-Real-IP, CF-Connecting-IP). Without
    `trusted_proxies` no header is ever read.
    """

    trusted_proxies: tuple[str, ...] = ()
    header: str = "X-Forwarded-For"
    ipv6_prefix: int = 64
    ipv4_prefix: int = 32
    trusted: Networks = field(init=False, repr=False, compare=False)
    _name: str = field(init=False, repr=False, compare=False)
    _direct: dict[str, str] = field(init=False, repr=False, compare=False)
    _chains: dict[str, Client | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for prefix, most, name in ((self.ipv6_prefix, 128, "ipv6_prefix"), (self.ipv4_prefix, 32, "ipv4_prefix")):
            if isinstance(prefix, bool) or not isinstance(prefix, int) or not 1 <= prefix <= most:
                raise ConfigurationError(f"{name}: {prefix!r} is no length of a prefix; write 1 to {most}")
        made = object.__setattr__
        made(self, "trusted_proxies", tuple(self.trusted_proxies))
        made(self, "trusted", Networks(tuple(text for text in self.trusted_proxies if text != UNIX)))
        made(self, "_name", self.header.strip().lower())
        made(self, "_direct", {})
        made(self, "_chains", {})

    def of(self, facts: RequestContext) -> str | None:
        """The client's key: its address, or its network where prefixes say so. None: a UNIX socket, and nobody told."""
        peer = facts.peer()
        key = self._direct.get(peer)  # type: ignore[arg-type]  # peers that are no proxy: nothing else needs to be looked at
        return key if key is not None else self._found(facts, peer)

    def address(self, facts: RequestContext) -> str | None:
        """The client's whole address: what networks are compared with."""
        peer = facts.peer()
        client = self._told(facts) if self._trusts(peer) else None
        return peer if client is None else client.address

    def _trusts(self, peer: str | None) -> bool:
        if peer is None:
            return UNIX in self.trusted_proxies
        return bool(self.trusted) and self.trusted.holds(peer)

    def _found(self, facts: RequestContext, peer: str | None) -> str | None:
        if self._trusts(peer):
            client = self._told(facts)
            return client.key if client is not None else None if peer is None else self._key(peer)
        if peer is None:
            return None
        key = self._key(peer)
        return remember(self._direct, peer, key, MOST_KEPT) if len(peer) <= LONGEST else key

    def _key(self, text: str) -> str:
        address = read_address(text)
        return hash_long(text) if address is None else self.key_of(address)  # a server's own word for a peer: "testclient"

    def key_of(self, address: Address) -> str:
        """The key of an address."""
        return network_text(address, self.ipv6_prefix if address[0] == 6 else self.ipv4_prefix)

    def _told(self, facts: RequestContext) -> Client | None:
        """The client, as trusted proxies tell; None: they say nothing that can be believed. A client sends the same header each
        time, so what a header means is remembered."""
        value = facts.header(self._name)
        if not value:
            return None
        client = self._chains.get(value, UNKNOWN)
        if client is UNKNOWN:
            address = self._walked(value)
            client = None if address is None else Client(address_text(address), self.key_of(address))
            if len(value) <= LONGEST:
                remember(self._chains, value, client, MOST_KEPT)
        return client

    def _walked(self, value: str) -> Address | None:
        if self._name == "forwarded":
            hops = map(_node, _from_the_right(value))
        elif self._name.endswith("forwarded-for"):
            hops = map(read_address, _from_the_right(value))
        else:
            return read_address(value)
        last = None
        for hop in hops:
            if hop is None:
                break
            last = hop
            if not self.trusted.hold(hop):
                break
        return last


def _from_the_right(value: str) -> Iterator[str]:
    """The entries of a list, last first; nothing further left is looked at than somebody asks for. "" where it makes no sense."""
    end = len(value)
    for _ in range(MOST_HOPS):
        comma = value.rfind(",", max(0, end - LONGEST_HOP), end)
        if comma < 0 and end > LONGEST_HOP:
            return
        hop = value[comma + 1 : end].strip()
        if hop:
            yield hop
        if comma < 0:
            return
        end = comma


def _node(element: str) -> Address | None:
    """The address in one element of Forwarded: `for=192.0.2.60;proto=http`, `for="[2001:db8::17]:4711"`."""
    if _ELEMENT.fullmatch(element) is None:
        return None
    found = _FOR.findall(element)
    if len(found) != 1:
        return None
    quoted, plain = found[0]
    return read_address(plain or quoted)
