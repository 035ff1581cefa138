"""Parses IP addresses and networks into integers, so that membership is a shift and a set lookup.

An address is (version, integer). An IPv4-mapped IPv6 address (`::ffff:1.2.3.4`) is the IPv4 address: a server that listens on
both families sees one client under both. A zone (`fe80::1%eth0`) is ignored: it names an interface, not a client.
Parsed by the system's `inet_pton` (0.3 µs; `ipaddress` takes 2 to 5), which takes no leading zeros, no hex and no short forms.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from ...errors import ConfigurationError
from .key_and_cache_bounds import remember

Address = tuple[int, int]

#: Entries of each cache of single addresses; a miss costs a microsecond.
CACHE_SIZE = 16_384
#: The longest address with brackets, zone and port.
MAX_LENGTH = 128
_MAPPED = 0xFFFF
#: RFC 7239 lets proxies write an obfuscated port that begins with an underscore.
_PORT = re.compile(r"(:([0-9]{1,5}|_[\x00-\x7f]+))?", re.S)
_BITS = {4: 32, 6: 128}


def read_address(text: str) -> Address | None:
    """Parses an address: plain, with a zone, in brackets, with a port. None: not an address."""
    if len(text) > MAX_LENGTH:
        return None
    text = text.strip()
    if text[:1] == "[":
        inside, bracket, port = text[1:].partition("]")
        return _parse(socket.AF_INET6, inside) if bracket and _PORT.fullmatch(port) else None
    if text.count(":") > 1:
        return _parse(socket.AF_INET6, text)
    address, colon, port = text.partition(":")
    return _parse(socket.AF_INET, address) if _PORT.fullmatch(colon + port) else None


def _parse(family: socket.AddressFamily, text: str) -> Address | None:
    text, percent, zone = text.partition("%") if family == socket.AF_INET6 else (text, "", "")
    try:
        number = int.from_bytes(socket.inet_pton(family, text))
    except (OSError, ValueError):
        return None
    if family == socket.AF_INET:
        return 4, number
    if percent and (not zone or "," in zone):  # a comma: several values of a header with a single address
        return None
    return (4, number & 0xFFFFFFFF) if number >> 32 == _MAPPED else (6, number)


def address_text(address: Address) -> str:
    """The canonical text of an address."""
    version, number = address
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    return socket.inet_ntop(family, number.to_bytes(_BITS[version] // 8))


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
        try:
            remedy = f"it has host bits set; write {ipaddress.ip_network(text, strict=False)}"
        except (ValueError, TypeError):
            remedy = "write it like 10.0.0.0/8, 2001:db8::/32 or 192.0.2.7"
        raise ConfigurationError(f"{text!r} is not a network: {remedy}") from None
    version, number, prefix = network.version, int(network.network_address), network.prefixlen
    if number >> 32 == _MAPPED:
        version, number, prefix = 4, number & 0xFFFFFFFF, prefix - 96
    shift = _BITS[version] - prefix
    return version, shift, number >> shift


class Networks:
    """A set of networks. A lookup costs one shift per distinct prefix length, whatever their number."""

    def __init__(self, texts: tuple[str, ...] = ()) -> None:
        self.texts = tuple(texts)
        self._bits: dict[int, dict[int, set[int]]] = {4: {}, 6: {}}  # by version and shift
        for version, shift, bits in map(read_network, self.texts):
            self._bits[version].setdefault(shift, set()).add(bits)
        self._cache: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"Networks({self.texts!r})"

    def contain(self, address: Address) -> bool:
        """Whether a network contains a parsed address."""
        version, number = address
        return any(number >> shift in bits for shift, bits in self._bits[version].items())

    def holds(self, address: str | None) -> bool:
        """Whether a network contains the address in a text; False for other texts. Cached."""
        if address is None or not self.texts:
            return False
        found = self._cache.get(address)
        if found is None:
            parsed = read_address(address)
            found = parsed is not None and self.contain(parsed)
            if len(address) <= MAX_LENGTH:
                remember(self._cache, address, found, CACHE_SIZE)
        return found
