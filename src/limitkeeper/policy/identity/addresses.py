"""Parses IP addresses and networks into integers, so that membership is a shift and a set lookup.

An address is (version, integer). An IPv4-mapped IPv6 address (`::ffff:1.2.3.4`) is the IPv4 address: a server that listens on
both families sees one client under both. A zone (`fe80::1%eth0`) is ignored: it names an interface, not a client.
Parsed by the system's `inet_pton` (0.3 µs; `ipaddress` takes 2 to 5), which takes no leading zeros, no hex and no short forms.
"""

from __future__ import annotations

import ipaddress
import socket

from ...errors import ConfigurationError
from .bounded_keys import remember

Address = tuple[int, int]

#: Entries of each cache of single addresses; a miss costs a microsecond.
CACHE_SIZE = 16_384
#: The longest address with brackets, zone and port.
MAX_LENGTH = 128
_MAPPED = 0xFFFF
_BITS = {4: 32, 6: 128}


def read_address(text: str) -> Address | None:
    """Parses an address: plain, with a zone, in brackets, with a port. None: not an address."""
    if len(text) > MAX_LENGTH:
        return None
    text = text.strip()
    if text[:1] == "[":
        inside, bracket, port = text[1:].partition("]")
        return _parse_ipv6(inside) if bracket and _is_port(port) else None
    colons = text.count(":")
    if colons == 0:
        return _parse_ipv4(text)
    if colons == 1:
        address, _, port = text.partition(":")
        return _parse_ipv4(address) if _is_port(":" + port) else None
    return _parse_ipv6(text)


def _is_port(text: str) -> bool:
    """Empty, or a colon and a port; RFC 7239 lets proxies write an obfuscated port that begins with an underscore."""
    if not text:
        return True
    port = text[1:]
    return text[0] == ":" and port.isascii() and ((port.isdigit() and len(port) <= 5) or (port[:1] == "_" and len(port) > 1))


def _parse_ipv4(text: str) -> Address | None:
    try:
        return 4, int.from_bytes(socket.inet_pton(socket.AF_INET, text))
    except (OSError, ValueError):
        return None


def _parse_ipv6(text: str) -> Address | None:
    text, percent, zone = text.partition("%")
    if percent and not zone:
        return None
    try:
        number = int.from_bytes(socket.inet_pton(socket.AF_INET6, text))
    except (OSError, ValueError):
        return None
    return (4, number & 0xFFFFFFFF) if number >> 32 == _MAPPED else (6, number)


def address_text(address: Address) -> str:
    """The canonical text of an address."""
    version, number = address
    if version == 4:
        return socket.inet_ntop(socket.AF_INET, number.to_bytes(4))
    return socket.inet_ntop(socket.AF_INET6, number.to_bytes(16))


def network_text(address: Address, prefix: int) -> str:
    """The network of an address: `2001:db8::/64`; the address itself for a full prefix."""
    version, number = address
    shift = _BITS[version] - prefix
    return f"{address_text((version, number >> shift << shift))}/{prefix}" if shift else address_text(address)


def read_network(text: str) -> tuple[int, int, int]:
    """Parses `10.0.0.0/8` or a single address to (version, shift, prefix bits); ConfigurationError names the fix."""
    try:
        network = ipaddress.ip_network(text)
    except (ValueError, TypeError):
        raise ConfigurationError(f"{text!r} is not a network: {_remedy(text)}") from None
    version, number, prefix = network.version, int(network.network_address), network.prefixlen
    if number >> 32 == _MAPPED:
        version, number, prefix = 4, number & 0xFFFFFFFF, prefix - 96
    shift = _BITS[version] - prefix
    return version, shift, number >> shift


def _remedy(text: str) -> str:
    try:
        return f"it has host bits set; write {ipaddress.ip_network(text, strict=False)}"
    except (ValueError, TypeError):
        return "write it like 10.0.0.0/8, 2001:db8::/32 or 192.0.2.7"


class Networks:
    """A set of networks. A lookup costs one shift per distinct prefix length, whatever their number."""

    __slots__ = ("_cache", "_shifts", "texts")

    def __init__(self, texts: tuple[str, ...] = ()) -> None:
        self.texts = tuple(texts)
        by_shift: dict[tuple[int, int], set[int]] = {}
        for version, shift, bits in map(read_network, self.texts):
            by_shift.setdefault((version, shift), set()).add(bits)
        self._shifts = {
            version: tuple((shift, frozenset(bits)) for (v, shift), bits in sorted(by_shift.items()) if v == version)
            for version in (4, 6)
        }
        self._cache: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"Networks({self.texts!r})"

    def __bool__(self) -> bool:
        return bool(self.texts)

    def contain(self, address: Address) -> bool:
        """Whether a network contains a parsed address."""
        version, number = address
        return any(number >> shift in bits for shift, bits in self._shifts[version])

    def holds(self, address: str | None) -> bool:
        """Whether a network contains the address in a text; False for other texts. Cached."""
        if address is None:
            return False
        found = self._cache.get(address)
        if found is None:
            parsed = read_address(address)
            found = parsed is not None and self.contain(parsed)
            if len(address) <= MAX_LENGTH:
                remember(self._cache, address, found, CACHE_SIZE)
        return found
