"""Who a request is: facts with a name. `of(facts)` answers with a value, with `default`, or with None: not there.

A value is what a client says unless something vouches for it: a header, a cookie or a query parameter can be invented with
every request, a certificate, a verified token (`jwt.py`) or an address (`client_ip.py`) can't. An empty value is no value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from ...errors import ConfigurationError
from ..request_context import RequestContext
from .addresses import MOST_KEPT, read_address, read_network
from .callback_errors import CallbackErrors, callback_name, check_callback
from .client_ip import ClientIp
from .key_hashing import hash_long, remember

_ESCAPED = re.compile(r"\\(?:([0-3][0-7]{2})|(.))", re.S)
SUBJECT, SAN = "subject", "san"
#: Who says several things at once under one name. One application takes the first of them, another the last, so whoever could
#: choose the rest freely would be a new client with every request: they are all one.
SEVERAL = "several values"


def _named(owner: Any, lower: bool = False) -> None:
    """Checks (and, for headers, lowers) the name that an identity was given."""
    name = owner.name
    if not isinstance(name, str) or not name.strip():
        raise ConfigurationError(f"{type(owner).__name__}: {name!r} is no name; write the name of what to look at")
    object.__setattr__(owner, "name", name.strip().lower() if lower else name)


def _value(text: str | None, default: str | None) -> str | None:
    if not text:
        return default
    text = text.strip()
    return hash_long(text) if text else default


@dataclass(frozen=True, slots=True)
class Header:
    """A request header's value, as the client wrote it."""

    name: str
    default: str | None = None

    def __post_init__(self) -> None:
        _named(self, lower=True)

    def of(self, facts: RequestContext) -> str | None:
        value = facts.header(self.name)
        if value is not None and "," in value and facts.differs("header", self.name):
            return SEVERAL
        return _value(value, self.default)


@dataclass(frozen=True, slots=True)
class Query:
    """The first value of a query parameter."""

    name: str
    default: str | None = None

    def __post_init__(self) -> None:
        _named(self)

    def of(self, facts: RequestContext) -> str | None:
        return SEVERAL if facts.differs("query", self.name) else _value(facts.query(self.name), self.default)


def _unquoted(value: str) -> str:
    """A cookie's value as applications read it: each of its characters may be written as `\\141` within quotes, or as `%61`."""
    if value[:1] == '"' and value[-1:] == '"' and len(value) > 1:
        value = _ESCAPED.sub(lambda found: found[2] or chr(int(found[1], 8)), value[1:-1])
    return unquote(value) if "%" in value else value


@dataclass(frozen=True, slots=True)
class Cookie:
    """The cookie of this name. Lines of several Cookie headers, joined with commas, are read as one. What frameworks overlook
    (spaces around the name, quotes, escapes in them, percent-encoding) makes no other cookie of it."""

    name: str
    default: str | None = None
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _named(self)
        object.__setattr__(self, "_pattern", re.compile(rf"(?:^|[;,])\s*{re.escape(self.name)}\s*=([^;,]*)"))

    def of(self, facts: RequestContext) -> str | None:
        header = facts.header("cookie")
        if not header:
            return self.default
        found = self._pattern.findall(header)
        if not found:
            return self.default
        if len(found) > 1 and len(set(found)) > 1:
            return SEVERAL
        return _value(_unquoted(found[0].strip()), self.default)


@dataclass(frozen=True, slots=True)
class Captured:
    """A part of the path that the rule's template named: `/orders/{order_id}`. Read after the tidy-up, so in lower case."""

    name: str
    default: str | None = None

    def __post_init__(self) -> None:
        _named(self)

    def of(self, facts: RequestContext) -> str | None:
        return _value(facts.captured.get(self.name), self.default)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Who a verified client certificate names: its subject, or the first of its alternative names (SPIFFE: the service)."""

    field: str = SAN
    default: str | None = None

    def __post_init__(self) -> None:
        if self.field not in (SUBJECT, SAN):
            raise ConfigurationError(f"certificate: {self.field!r} is nothing a certificate is known by; write san or subject")

    def of(self, facts: RequestContext) -> str | None:
        certificate = facts.certificate()
        said = None if certificate is None else certificate.get(self.field)
        if isinstance(said, (list, tuple)):
            said = next((one for one in said if one), None)
        return _value(said, self.default) if isinstance(said, str) else self.default


@dataclass(frozen=True, slots=True)
class Called:
    """What a function of the application says: `call(facts)` returns text, a whole number, or None.

    A call that raises, or answers something else, is logged (now and then) and counts as nothing said.
    """

    call: Callable[[Any], Any]
    default: str | None = None
    complaints: CallbackErrors = field(init=False, repr=False, compare=False, default_factory=CallbackErrors)

    def __post_init__(self) -> None:
        check_callback(self.call)

    def of(self, facts: RequestContext) -> str | None:
        try:
            said = self.call(facts)
        except Exception as error:
            self.complaints.report("%s raised %s: it counts as nothing said", callback_name(self.call), type(error).__name__)
            return self.default
        if isinstance(said, int) and not isinstance(said, bool):
            said = str(said)
        if said is None or isinstance(said, str):
            return _value(said, self.default)
        self.complaints.report("%s answered a %s, not text: it counts as nothing", callback_name(self.call), type(said).__name__)
        return self.default

    def address(self, facts: RequestContext) -> str | None:
        """As the identity `ip`: the client's address, which networks are compared with."""
        return self.of(facts)


@dataclass(frozen=True, slots=True)
class Network:
    """The class of the client's address: `(("internal", ("10.1.0.0/16",)), …)`. Of several, the narrowest network decides."""

    ip: ClientIp | Called
    classes: tuple[tuple[str, tuple[str, ...]], ...]
    default: str | None = None
    _ordered: tuple[tuple[int, int, int, str], ...] = field(init=False, repr=False, compare=False)
    _kept: dict[str, str | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        found = [(*read_network(text), name) for name, texts in self.classes for text in texts]
        object.__setattr__(self, "_ordered", tuple(sorted(found, key=lambda one: one[1])))

    def of(self, facts: RequestContext) -> str | None:
        address = self.ip.address(facts)
        if address is None:
            return self.default
        if address in self._kept:
            return self._kept[address]
        return remember(self._kept, address, self._class(address), MOST_KEPT)

    def _class(self, text: str) -> str | None:
        address = read_address(text)
        if address is not None:
            version, number = address
            for v, shift, bits, name in self._ordered:
                if v == version and number >> shift == bits:
                    return name
        return self.default
