"""Identities: named properties of a request. `of(request)` returns the value, `default`, or None when it is absent.

A header, a cookie or a query parameter is whatever the client wrote, and may differ with every request. A certificate, a verified
token (`jwt.py`) and an address (`client_ip.py`) can't be forged. An empty value counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import ConfigurationError
from ..callback_errors import CallbackErrors, callback_name, check_callback
from ..request_context import USUAL, RequestContext
from .addresses import CACHE_SIZE, read_address, read_network
from .client_ip import ClientIp
from .key_and_cache_bounds import hash_long, remember
from .paths import canonical_value, decode_percent

#: A cookie's value in quotes, or without spaces and quotes within; and a value in quotes with a semicolon, which is found where
#: escaped quotes are removed.
_CLEAR = re.compile(r'"(?:[^\\"]|\\.)*"|[^\s"]*', re.S)
_ACROSS = re.compile(r'=[ \t]*"[^";]*;[^"]*"[ \t]*(?:;|$)')
_QUOTES = re.compile(r'\\[\\"]')
_ESCAPED = re.compile(r"\\(?:([0-3][0-7]{2})|(.))", re.S)
SUBJECT, SAN = "subject", "san"
#: The value of a name with several different values. Applications take the first or the last of them, so a client that could
#: choose the rest freely would get a new key with every request: all such requests share this one.
SEVERAL = "several values"
UNREADABLE_HOST = "unreadable host"
#: Shorter values are neither hashed nor taken for a hash.
SHORT = 64
#: The most characters of the cookies of a request, and of one, that are read. Longer ones, which no browser sends, are SEVERAL.
MAX_COOKIES, MAX_COOKIE = 65_536, 4096


def trimmed(text: str | None, default: str | None) -> str | None:
    """A value as it is counted: without spaces around it, hashed where it is long; the default where nothing is left."""
    if not text:
        return default
    text = text.strip()
    if 0 < len(text) < SHORT:
        return text
    return hash_long(text) if text else default


@dataclass(frozen=True, slots=True)
class NamedIdentity:
    """Base of the identities that read one named part of a request."""

    name: str
    default: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigurationError(f"{type(self).__name__}: expected a name, got {self.name!r}")


@dataclass(frozen=True, slots=True)
class Header(NamedIdentity):
    """A request header's value, as the client wrote it."""

    def __post_init__(self) -> None:
        NamedIdentity.__post_init__(self)
        object.__setattr__(self, "name", self.name.strip().lower())

    def of(self, request: RequestContext) -> str | None:
        value = request.header(self.name)
        several = value is not None and "," in value and request.differs("header", self.name)
        return SEVERAL if several else trimmed(value, self.default)


@dataclass(frozen=True, slots=True)
class Query(NamedIdentity):
    """The value of a query parameter."""

    def of(self, request: RequestContext) -> str | None:
        return SEVERAL if request.differs("query", self.name) else trimmed(request.query(self.name), self.default)


@dataclass(frozen=True, slots=True)
class Captured(NamedIdentity):
    """A path segment that the rule's template captures (`/orders/{order_id}`), or that the framework has converted, where it has
    routed the request. In canonical form: in lower case, and `07`, `+7` and `7.0` are 7."""

    def of(self, request: RequestContext) -> str | None:
        value = request.captured.get(self.name)
        return trimmed(canonical_value(value) if value else None, self.default)


@dataclass(frozen=True, slots=True)
class RequestPart:
    """The host that is requested, the method, or the route. Methods other than the usual ones are "other", and all hosts that
    can't be parsed are one, since clients can send any. The route is the framework's template (`/orders/{order}`), present only
    where the framework has routed the request: in limits on handlers."""

    part: str
    default: str | None = None

    def of(self, request: RequestContext) -> str | None:
        if self.part == "method":
            return request.method if request.method in USUAL else "other"
        if self.part == "route":
            return trimmed(request.route(), self.default)
        return trimmed(request.host() or (UNREADABLE_HOST if request.header("host") else None), self.default)


@dataclass(frozen=True, slots=True)
class Cookie(NamedIdentity):
    """A cookie's value. Differences that frameworks ignore (spaces around the name, quotes, escapes in them, percent-encoding) do
    not make another value. A cookie that some of them read and others do not see, or read otherwise, is SEVERAL: all separate
    cookies by semicolons, http.cookies (Bottle) by spaces too, commas may be those of several Cookie headers; werkzeug takes
    `a="; sid=1"` for one cookie, and reads none with a space or a quote within its value."""

    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _plain: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        NamedIdentity.__post_init__(self)
        object.__setattr__(self, "_pattern", cookie_pattern(self.name))
        object.__setattr__(self, "_plain", cookie_pattern(self.name, ";", "[ \\t]*"))

    def of(self, request: RequestContext) -> str | None:
        header = request.header("cookie") or ""
        found = set(self._pattern.findall(header[:MAX_COOKIES]))
        if len(header) > MAX_COOKIES or len(found) > 1 or any(len(value) > MAX_COOKIE for value in found):
            return SEVERAL
        if not found:
            return self.default
        value = found.pop().strip()
        seen = {text.partition(",")[0].strip() for text in self._plain.findall(header)}
        if seen != {value} or _CLEAR.fullmatch(value) is None or ('"' in header and _ACROSS.search(_QUOTES.sub("", header))):
            return SEVERAL
        return trimmed(unquote_cookie(value), self.default)


def cookie_pattern(name: str, between: str = "", space: str = r"\s*") -> re.Pattern[str]:
    """Finds the values of a cookie in a Cookie header, as they are written, `between` any of these characters; by default between
    all that an application may separate cookies by: semicolons, commas, and spaces before a name (http.cookies)."""
    before = rf"(?:^|[{between}]){space}" if between else r"(?:^|[;,\s])"
    return re.compile(rf"{before}{re.escape(name)}{space}=([^{between or ';,'}]*)")


def unquote_cookie(value: str) -> str:
    """A cookie's value as applications read it: a character may be written as `\\141` within quotes, or as `%61`."""
    if value[:1] == '"' and value[-1:] == '"' and len(value) > 1:
        value = _ESCAPED.sub(lambda found: found[2] or chr(int(found[1], 8)), value[1:-1])
    return decode_percent(value.encode("utf-8", "surrogatepass")).decode("utf-8", "replace") if "%" in value else value


@dataclass(frozen=True, slots=True)
class Certificate:
    """The name in a verified client certificate: its subject, or the first of its alternative names (SPIFFE: the service)."""

    field: str = SAN
    default: str | None = None

    def __post_init__(self) -> None:
        if self.field not in (SUBJECT, SAN):
            raise ConfigurationError(f"certificate: expected san or subject, got {self.field!r}")

    def of(self, request: RequestContext) -> str | None:
        certificate = request.certificate()
        value = None if certificate is None else certificate.get(self.field)
        if isinstance(value, (list, tuple)):
            value = next((one for one in value if one), None)
        return trimmed(value, self.default) if isinstance(value, str) else self.default


@dataclass(frozen=True, slots=True)
class Called:
    """The result of a callback: `call(request)` returns a string, an integer, or None.

    A call that raises, or returns another type, is logged at intervals and counts as absent.
    """

    call: Callable[[RequestContext], object]
    default: str | None = None
    errors: CallbackErrors = field(init=False, repr=False, compare=False, default_factory=CallbackErrors)

    def __post_init__(self) -> None:
        check_callback(self.call, "request")

    def of(self, request: RequestContext) -> str | None:
        try:
            value = self.call(request)
        except Exception as error:
            if request.passes_on(error):
                raise
            name = callback_name(self.call)
            self.errors.report("%s raised %s: the identity is absent", name, type(error).__name__, raised=error)
            return self.default
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None or isinstance(value, str):
            return trimmed(value and str.__str__(value), self.default)  # compiled code takes no subclass of `str`
        self.errors.report("%s: expected a string, got %s: it is absent", callback_name(self.call), type(value).__name__)
        return self.default

    def address(self, request: RequestContext) -> str | None:
        """As the identity `ip`: the client's address, which networks are compared with."""
        return self.of(request)


@dataclass(frozen=True, slots=True)
class Network:
    """The class of the client's address: `(("internal", ("10.1.0.0/16",)), …)`. The narrowest matching network decides."""

    ip: ClientIp | Called
    classes: tuple[tuple[str, tuple[str, ...]], ...]
    default: str | None = None
    _ordered: tuple[tuple[int, int, int, str], ...] = field(init=False, repr=False, compare=False)
    _cache: dict[str, str | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        found = [(*read_network(text), name) for name, texts in self.classes for text in texts]
        object.__setattr__(self, "_ordered", tuple(sorted(found, key=lambda one: one[1])))

    def of(self, request: RequestContext) -> str | None:
        text = request.given_address() or self.ip.address(request)
        found = self._cache.get(text or "", "")  # "": not cached
        if text is None or found != "":
            return self.default if text is None else found
        version, number = read_address(text) or (0, 0)
        matching = (name for v, shift, bits, name in self._ordered if v == version and number >> shift == bits)
        return remember(self._cache, text, next(matching, self.default), CACHE_SIZE)
