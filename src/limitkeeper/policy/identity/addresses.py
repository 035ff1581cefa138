"""Addresses and networks as integers: read once, compared with two operations.

An address is (version, integer). An IPv4 address written in IPv6 (`::ffff:1.2.3.4`) is the IPv4 address: whoever listens on both
families sees one client under both names. A zone (`fe80::1%eth0`) says which cable, not who: it is left out.
Read by the system's own `inet_pton` (0.3 µs; `ipaddress` takes 2 to 5), which takes no leading zeros, no hex, no short forms.
"""

from __future__ import annotations

import ipaddress
import socket

from ...errors import ConfigurationError
from .key_hashing import remember

Address = tuple[int, int]

#: How many answers about single addresses are remembered; each can be had again for a microsecond.
MOST_KEPT = 16_384
#: No address with its brackets, zone and port is longer.
LONGEST = 128
_MAPPED = 0xFFFF
_BITS = {4: 32, 6: 128}


def read_address(text: str) -> Address | None:
    """The address that a text is: plain, with a zone, in brackets, with a port. None: it is none."""
    if len(text) > LONGEST:
        return None
    text = text.strip()
    if text[:1] == "[":
        inside, bracket, port = text[1:].partition("]")
        return _six(inside) if bracket and _is_port(port) else None
    colons = text.count(":")
    if colons == 0:
        return _four(text)
    if colons == 1:
        address, _, port = text.partition(":")
        return _four(address) if _is_port(":" + port) else None
    return _six(text)


def _is_port(text: str) -> bool:
    """Nothing, or a colon and a port; proxies may write an invented one with an underscore."""
    if not text:
        return True
    port = text[1:]
    return text[0] == ":" and port.isascii() and ((port.isdigit() and len(port) <= 5) or (port[:1] == "_" and len(port) > 1))


def _four(text: str) -> Address | None:
    try:
        return 4, int.from_bytes(socket.inet_pton(socket.AF_INET, text))
    except (OSError, ValueError):
        return None


def _six(text: str) -> Address | None:
    text, percent, zone = text.partition("%")
    if percent and not zone:
        return None
    try:
        number = int.from_bytes(socket.inet_pton(socket.AF_INET6, text))
    except (OSError, ValueError):
        return None
    return (4, number & 0xFFFFFFFF) if number >> 32 == _MAPPED else (6, number)


def address_text(address: Address) -> str:
    """The one spelling of an address."""
    version, number = address
    if version == 4:
        return socket.inet_ntop(socket.AF_INET, number.to_bytes(4))
    return socket.inet_ntop(socket.AF_INET6, number.to_bytes(16))


def network_text(address: Address, prefix: int) -> str:
    """The network of an address: `2001:db8::/64`; with all its bits, the address itself."""
    version, number = address
    spare = _BITS[version] - prefix
    if spare == 0:
        return address_text(address)
    return f"{address_text((version, number >> spare << spare))}/{prefix}"


def read_network(text: str) -> tuple[int, int, int]:
    """(version, shift, the bits before it) of `10.0.0.0/8` or of a single address; ConfigurationError says what to write."""
    try:
        network = ipaddress.ip_network(text)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{text!r} is no network: {_remedy(text, error)}") from None
    version, number, prefix = network.version, int(network.network_address), network.prefixlen
    if number >> 32 == _MAPPED:
        version, number, prefix = 4, number & 0xFFFFFFFF, prefix - 96
    shift = _BITS[version] - prefix
    return version, shift, number >> shift


def _remedy(text: object, error: Exception) -> str:
    try:
        return f"bits are set behind its prefix; write {ipaddress.ip_network(text, strict=False)}"  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return "write it like 10.0.0.0/8, 2001:db8::/32 or 192.0.2.7"


class Networks:
    """Several networks, asked whether one of them holds an address. One lookup per length of prefix, whatever their number."""

    __slots__ = ("_kept", "_shifts", "texts")

    def __init__(self, texts: tuple[str, ...] = ()) -> None:
        self.texts = tuple(texts)
        by_shift: dict[tuple[int, int], set[int]] = {}
        for version, shift, bits in map(read_network, self.texts):
            by_shift.setdefault((version, shift), set()).add(bits)
        self._shifts = {
            version: tuple((shift, frozenset(bits)) for (v, shift), bits in sorted(by_shift.items()) if v == version)
            for version in (4, 6)
        }
        self._kept: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"Networks({self.texts!r})"

    def __bool__(self) -> bool:
        return bool(self.texts)

    def hold(self, address: Address) -> bool:
        """The same, for an address that has been read."""
        version, number = address
        return any(number >> shift in bits for shift, bits in self._shifts[version])

    def holds(self, address: str | None) -> bool:
        """Whether one of the networks holds this address; what is no address is in none."""
        if address is None:
            return False
        answer = self._kept.get(address)
        if answer is None:
            read = read_address(address)
            answer = read is not None and self.hold(read)
            if len(address) <= LONGEST:
                remember(self._kept, address, answer, MOST_KEPT)
        return answer
