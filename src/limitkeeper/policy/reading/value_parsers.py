"""Parsers of the values that a policy writes as short texts: names, keys, limits, matches, networks, actions, sizes, store URLs.

Each takes a text and returns a value of the model, or raises ParseError with the part that is wrong and what to write instead.
None knows the text's position, and none connects to a store or imports a callable.
"""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from unicodedata import normalize
from urllib.parse import SplitResult, urlsplit

from ...algorithms import ALGORITHMS, SlidingWindowLog, TokenBucket
from ...algorithms.limit import Limit
from ...algorithms.limit_parser import beginning_with, parse_limit
from ...errors import ConfigurationError, InvalidLimit
from ...rate import WRITE, Rate, duration_us, parse_rate
from ...stores.guarded.share import parse_share
from ...stores.memory import MemoryStore
from ...stores.urls import REDIS, WRAPPERS, WRAPPING, maker_of, masked, number, only, options_of, wrapped
from ..identity.host_names_and_patterns import host_pattern
from ..model import (
    BLOCKED,
    BLOCKED_TEXT,
    CLOSED,
    DEGRADE,
    LOCAL,
    OPEN,
    REJECT,
    SHADOW,
    WAIT,
    Key,
    Limits,
    Match,
    OnFailure,
    OnRefusal,
    RetryAfter,
)
from .diagnostics import ParseError, bounded_text, did_you_mean, nearest, shorten, split_remedy

EVERYONE = "everyone"
#: Words with a meaning of their own where the name of an identity may be written.
RESERVED = (EVERYONE, "present", "absent", "by", "default")
PLACEHOLDERS = ("retry_after", "limit", "remaining", "rule")
#: The longest time that a request may wait.
MAX_WAIT = "60s"
#: The longest interval over which retries are spread.
MAX_SPREAD = "1d"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "MESSAGE")
UNLIMITED = "unlimited"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NOT_IN_HEADER = re.compile(r"[^ -~]|[\"\\]")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_IMPORT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SIZE = re.compile(r"(\d{1,12})\s*([A-Za-z]*)")
_BYTES = {"": 1, "b": 1, "kb": 1000, "mb": 10**6, "gb": 10**9, "kib": 1024, "mib": 1024**2, "gib": 1024**3}
_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,30}")
_NOT_IN_PATH = {
    "?": "a rule matches only the path; remove the query",
    "#": "remove '#' and what follows",
    ";": "remove ';' and what follows in its segment",
}
#: What `parse_rule_name`, `parse_identity_name` and `parse_header_name` accept, as JSON Schema.
RULE_NAMES = {"maxLength": 64, "pattern": r"^[!#-\[\]-~]([ !#-\[\]-~]*[!#-\[\]-~])?$(?!\n)"}
IDENTITY_NAMES = {"maxLength": 64, "pattern": rf"^{_NAME.pattern}$(?!\n)", "not": {"enum": list(RESERVED)}}
#: The longest name of a field of responses.
MAX_FIELD_NAME = 60
HEADER_NAMES = {"maxLength": 100, "pattern": rf"^{_TOKEN.pattern}$(?!\n)"}
#: What no path of a request has unencoded: regular expressions, and the parameters of other routers (<int:id>, :id).
_FOREIGN = re.compile(r"^<(?:\w+:)?(?P<name>\w+)>|[\[\]\\^|<>]|^:(?=\w)|^\.[+*]|^\(.*\)[+*?]$|\$$")
_OPTION = re.compile(r"^(?:unknown option '(\w+)'|(burst|initial|capacity|align)\b)")
_TIME = r"(?P<time>(?!queue|per )\S+(?: (?!queue|per )[a-z]+)?)"
_PLACES = r"(?: queue (?P<queue>\S+))?(?: per client (?P<client>\S+))?"
_WAIT = re.compile(rf"wait(?P<to> up to)?(?: {_TIME})?{_PLACES}(?P<rest>.*)", re.I)


def parse_rule_name(text: str) -> str:
    """The name of a policy or a rule: it is sent in header fields, so printable ASCII without quotes and backslashes."""
    if not text or len(text) > 64:
        raise ParseError(f"a name has 1 to 64 characters, got {len(text)}", "shorten it")
    invalid = _NOT_IN_HEADER.search(text)
    if invalid is not None:
        nearest_name = " ".join(_NOT_IN_HEADER.sub("", normalize("NFKD", text)).split())  # letters without accents
        message = f"{invalid[0]!r} is not allowed in a name, which is sent in header fields"
        raise ParseError(message, f"write {nearest_name or 'rule'!r}", (invalid.start(), 1))
    if text != text.strip():
        raise ParseError(f"{text!r} begins or ends with a space", f"write {text.strip()!r}")
    return text


def parse_identity_name(text: str) -> str:
    """The name of an identity: like an identifier, so that "user | ip" can be split."""
    if text in RESERVED:
        raise ParseError(f"{text!r} is reserved and can't name an identity", f"write {text}_id, for example")
    if len(text) > 64 or not _NAME.fullmatch(text):
        raise ParseError(f"{shorten(text)!r} can't name an identity", "use letters, digits and _ . -, beginning with a letter")
    return text


def parse_value(text: str) -> str:
    """A non-empty value."""
    if not bounded_text(text).strip():
        raise ParseError("the value is empty", "write one, or remove the field")
    return text.strip()


def parse_header_name(text: str) -> str:
    """The name of a header field."""
    if len(text) > 100 or not _TOKEN.fullmatch(text):
        raise ParseError(f"{shorten(text)!r} is not a valid header name", "write it like X-Tenant")
    return text


def parse_field_name(text: str) -> str:
    """The name of a field of responses that carries a limit."""
    if len(text) > MAX_FIELD_NAME:
        raise ParseError(f"the name of a field has at most {MAX_FIELD_NAME} characters, got {len(text)}")
    return parse_header_name(text)


def parse_import_string(text: str) -> str:
    """The import string of a callable, "package.module:attribute". It is imported when a gate is made."""
    if not _IMPORT.fullmatch(bounded_text(text)):
        module, _, attribute = text.rpartition(".")
        dotted = re.fullmatch(r"[\w.]+", text) and module
        example = f"{module}:{attribute}" if dotted else "shop.people:vip_of"
        raise ParseError(f"{shorten(text)!r} is not an import string", f"write package.module:attribute, like {example}")
    return text


def parse_key(text: str) -> Key:
    """A key of one part, or "everyone"."""
    return () if text.strip() == EVERYONE else (parse_alternatives(text),)


def parse_alternatives(text: str) -> tuple[str, ...]:
    """One part of a key: "user", or "user | ip" for the first identity that is present."""
    found: list[str] = []
    start = 0
    if not text.strip():
        raise ParseError("the key is empty", "write it like user | ip, or remove the field")
    for piece in bounded_text(text).split("|"):
        name = piece.strip()
        span = start + len(piece) - len(piece.lstrip()), len(name)
        if not name:
            raise ParseError(f"one side of a '|' is empty in {text!r}", "write it like user | ip", (text.find("|"), 1))
        if name in found:
            raise ParseError(f"{name!r} is listed twice in {text!r}", "remove one of them", span)
        try:
            found.append(parse_identity_name(name))
        except ParseError as error:
            raise ParseError(error.message, key_remedy(name) or error.suggestion, span) from None
        start += len(piece) + 1
    return tuple(found)


def key_remedy(name: str) -> str:
    if name == EVERYONE:
        return "write 'everyone' alone: it is one key for all requests"
    for sign in (",", "+", "&", " and ", "/", ":"):
        if sign in name:
            return f"write a list to join parts to one key: [{', '.join(part.strip() for part in name.split(sign))}]"
    return "write 'user | ip' for the first identity that is present" if re.search(r"\bor\b|\s", name) else ""


def parse_limits(text: str, default: str = TokenBucket.kind) -> Limits:
    """One limit, several separated by ';', "unlimited", or "blocked" (also "0/s")."""
    if text.strip().lower() == UNLIMITED:
        return ()
    if BLOCKED_TEXT.fullmatch(text):
        return BLOCKED
    found, start = [], 0
    for piece in bounded_text(text).split(";"):
        found.append(parse_single_limit(piece, start, default))
        start += len(piece) + 1
    return tuple(found)


def parse_cap(text: str) -> Limit:
    """The rate of a dependency: a bare one is a sliding window log."""
    return parse_single_limit(text, default=SlidingWindowLog.kind)


def parse_rate_alone(text: str) -> Rate:
    """A rate without an algorithm or options."""
    rate = bounded_text(text).strip()
    try:
        return parse_rate(rate)[0]
    except InvalidLimit as error:
        raise locate_error(rate, error, len(text) - len(text.lstrip())) from None


def parse_single_limit(text: str, start: int = 0, default: str = TokenBucket.kind) -> Limit:
    """One limit; `start` is its offset in a longer text, `default` the algorithm of a rate alone."""
    limit = bounded_text(text).strip()
    at = start + len(text) - len(text.lstrip())
    if not limit:
        raise ParseError("one side of a ';' is empty", "write it like token bucket 5/s; fixed window 1000/min", (start, 1))
    prefix = re.split(r"(?<!\S)[-.]?\d|[\d;]", limit, maxsplit=1)[0].rstrip()
    algorithm = " ".join(prefix.split()).lower()
    if algorithm and (algorithm not in ALGORITHMS or algorithm == limit.lower()):
        raise ParseError(*explain_algorithm(limit, algorithm), (at, len(prefix)))
    try:
        return parse_limit(limit, default)
    except (InvalidLimit, ValueError) as error:
        raise locate_error(limit, error, at) from None


def explain_algorithm(limit: str, algorithm: str) -> tuple[str, str]:
    """Message and remedy for a limit that does not begin with an algorithm and a rate."""
    if algorithm == UNLIMITED:
        return f"{UNLIMITED!r} can't be combined", f"write {UNLIMITED} alone, or a limit"
    if algorithm in ("unlimted", "none", "off", "no limit", "infinite", "∞"):
        return f"{algorithm!r} is not a limit", f"write {UNLIMITED}"
    known = algorithm if algorithm in ALGORITHMS else nearest(algorithm, (*ALGORITHMS, str(BLOCKED[0]), UNLIMITED))
    if known in (str(BLOCKED[0]), UNLIMITED):
        return f"unknown limit {shorten(algorithm)!r}", f"did you mean {known!r}?"
    if known is not None and not any(character.isdigit() for character in limit):
        return f"{shorten(limit)!r} has no rate", f"write it like {known} 5/s"
    several = beginning_with(algorithm)
    remedy = f"did you mean {' or '.join(map(repr, several))}?" if several else did_you_mean(algorithm, ALGORITHMS)
    return f"unknown algorithm {shorten(algorithm)!r}", remedy


def locate_error(limit: str, error: Exception, at: int) -> ParseError:
    """An InvalidLimit with its span: the option that is wrong, or the whole limit."""
    text = str(error)
    for algorithm in ("", *ALGORITHMS):  # the message may repeat the text, with or without the algorithm
        rest = " ".join(limit.split())[len(algorithm) :].strip() if limit.lower().startswith(algorithm) else limit
        text = text.removeprefix(f"{rest!r}: ")
    message, remedy = split_remedy(text)
    found = _OPTION.match(message)
    option = None if found is None else re.search(rf"\b{found[1] or found[2]}\s+\S+", limit, re.I)
    if option is not None:
        remedy = f"write it like {option[0].split()[0]} 10" if remedy == WRITE else remedy
        return ParseError(message, remedy, (at + option.start(), len(option[0])))
    message, remedy = split_remedy(text if repr(limit)[:20] in text else f"{shorten(limit)!r}: {text}")
    return ParseError(message, remedy, (at, len(limit)))


def parse_match(text: str) -> Match:
    """ "POST /checkout", "GET,HEAD /x", or "/x" for every method."""
    match = bounded_text(text).strip()
    at = len(text) - len(text.lstrip())
    if not match:
        raise ParseError("expected a match, got an empty string", "write it like POST /checkout")
    slash = match.find("/")
    if slash < 0:
        word = match.split()[0]
        example = f"{word.upper()} /checkout" if nearest(word, METHODS) else f"/{word} or POST /{word}"
        raise ParseError(f"{match!r} has no path", f"write it like {example}; '/**' is every path")
    before = match[:slash]
    if before and not before[-1].isspace():
        remedy = "a path begins with '/'; for a host write {path: /x, host: …}"
        if nearest(before, METHODS):
            remedy = "separate methods and path with a space: GET,HEAD /x"
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
    for sign, remedy in _NOT_IN_PATH.items():
        if sign in text:
            raise ParseError(f"the path of a request never has a {sign!r}", remedy, (at + text.index(sign), 1))
    if re.search(r"\s", text):
        remedy = "write a list for several paths; %20 stands for a space"
        raise ParseError(f"{shorten(text)!r} contains a space", remedy, (at, len(text)))
    names: list[str] = []
    segments = text.strip("/").split("/")
    start = at + len(text) - len(text.lstrip("/"))
    for index, segment in enumerate(segments):
        _check_segment(segment, index == len(segments) - 1, names, start)
        start += len(segment) + 1
    return text


def _check_segment(segment: str, last: bool, names: list[str], start: int) -> None:
    span = (start, max(1, len(segment)))
    foreign = _FOREIGN.search(segment)
    if foreign is not None:
        name = foreign["name"] or "id"
        message = f"{segment!r} looks like a regular expression or another router's parameter, and would match only itself"
        raise ParseError(message, f"write {{{name}}} or * for one segment, and a literal {foreign[0][0]!r} percent-encoded", span)
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


def parse_network(text: str) -> str:
    """An address or a network: "10.0.0.0/8", "2001:db8::/32", "192.0.2.7"."""
    network = bounded_text(text).strip()
    try:
        found = ip_network(network, strict=False)
    except ValueError:
        remedy = "write it like 10.0.0.0/8 or 2001:db8::/32"
        raise ParseError(f"expected an address or a network, got {shorten(text)!r}", remedy) from None
    address = ip_address(network.split("/")[0])
    if address != found.network_address:
        raise ParseError(f"{network!r} has host bits set", f"write {found} for the network, {address} for the address")
    return str(found)


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


def parse_on_refusal(text: str) -> OnRefusal:
    """ "reject", "wait up to 200ms queue 100", "degrade package.module:handler" or "shadow"."""
    words = bounded_text(text).split()
    action = words[0].lower() if words else ""
    if action in (REJECT, SHADOW) and len(words) == 1:
        return OnRefusal(action)
    if action == SHADOW or SHADOW in (word.lower().strip(",;") for word in words[1:] if action == WAIT):
        raise ParseError("a shadow rule lets every request pass, so no request waits", "write shadow or wait up to …, not both")
    if action == WAIT:
        return parse_wait(" ".join(words))
    if action == DEGRADE:
        if len(words) != 2:
            remedy = "write degrade package.module:handler, or the name of a handler that is given to the middleware"
            raise ParseError("'degrade' needs one handler", remedy)
        return OnRefusal(DEGRADE, handler=parse_import_string(words[1]) if ":" in words[1] else words[1])
    remedy = did_you_mean(action, (REJECT, WAIT, DEGRADE, SHADOW), "write reject, wait up to 200ms, degrade <handler> or shadow")
    raise ParseError(f"unknown action {shorten(text)!r}", remedy)


def parse_wait(text: str) -> OnRefusal:
    """ "wait up to 200ms queue 100 per client 25": time, queue length and the places of one client are bounded."""
    remedy = "write it like wait up to 200ms queue 100"
    found = _WAIT.fullmatch(text)
    if found is None or found["rest"].strip():
        raise ParseError(f"can't parse {shorten(text)!r}", remedy)
    time, queue = found["time"], found["queue"]
    if time is None:
        raise ParseError("the wait has no time limit", remedy)
    if time.lower() in ("forever", "infinite", "inf", "unlimited", "unbounded", "none", "indefinitely"):
        raise ParseError(f"a wait of {time!r} is unbounded: every refused request would stay", remedy)
    try:
        time_us = duration_us(time)
    except (InvalidLimit, ValueError):
        raise ParseError(f"expected a duration, got {shorten(time)!r}", remedy) from None
    if found["to"] is None:
        raise ParseError(f"can't parse {shorten(text)!r}", f"write wait up to {time}")
    if not 0 < time_us <= duration_us(MAX_WAIT):
        raise ParseError(f"a wait of {time} is not between 0 and {MAX_WAIT}", "clients give up sooner; let them retry instead")
    for places in (queue, found["client"]):
        if places and (not (places.isascii() and places.isdigit()) or len(places) > 6 or not 1 <= int(places) <= 100_000):
            raise ParseError(f"expected a number of places from 1 to 100000, got {shorten(places)!r}", remedy)
    length, per_client = int(queue or OnRefusal().queue), int(found["client"] or 0)
    if per_client > length:
        raise ParseError(
            f"one client can't have {per_client} of {length} places", f"write per client {length}, or a longer queue"
        )
    return OnRefusal(WAIT, time_us, length, per_client=per_client)


def parse_retry_after(text: str) -> RetryAfter:
    """ "spread 60s": refused clients retry at moments that are spread over that interval."""
    word, _, time = bounded_text(text).strip().partition(" ")
    try:
        spread_us = duration_us(time) if word.lower() == "spread" else 0
    except (InvalidLimit, ValueError):
        spread_us = 0
    if not 1_000_000 <= spread_us <= duration_us(MAX_SPREAD):
        message = f"expected spread and a duration between 1s and {MAX_SPREAD}, got {shorten(text)!r}"
        raise ParseError(message, "write it like spread 60s")
    return RetryAfter(spread_us)


def parse_on_failure(text: str) -> OnFailure:
    """ "open", "closed", or "local 1/4": this node's share of the limit, in memory."""
    words = bounded_text(text).split()
    action = words[0].lower() if words else ""
    if action in (OPEN, CLOSED) and len(words) == 1:
        return OnFailure(action)
    if action == LOCAL:
        share = "".join(words[1:]) or "1"
        try:
            parse_share(share)
        except ConfigurationError:
            remedy = "write local 1/4 where four nodes share the limit, or local alone"
            raise ParseError(f"{share!r} is not a share of a limit", remedy) from None
        return OnFailure(LOCAL, share)
    remedy = did_you_mean(action, (OPEN, CLOSED, LOCAL), "write open, closed or local 1/4")
    raise ParseError(f"unknown action {shorten(text)!r}", remedy)


def parse_percent(text: str) -> float:
    """ "80%" is 0.8."""
    found = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,4})?)\s*%\s*", text)
    if found is None:
        remedy = f"write {text.strip()}%" if re.fullmatch(r"\s*\d{1,3}(\.\d+)?\s*", text) else "write it like 80%"
        raise ParseError(f"expected a percentage, got {shorten(text)!r}", remedy)
    if not 1 <= float(found[1]) <= 100:
        raise ParseError(f"{text.strip()} is not between 1% and 100%", "write it like 80%")
    return round(float(found[1]) / 100, 6)


def parse_size(text: str) -> int:
    """ "1kB" is 1000 bytes, "1KiB" 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].lower() not in _BYTES:
        raise ParseError(f"expected a size, got {shorten(text)!r}", "write it like 1kB, 1KiB or 4MB")
    size = int(found[1]) * _BYTES[found[2].lower()]
    if not 1 <= size <= 10**12:
        raise ParseError(f"{shorten(text)!r} is not between 1B and 1000GB", "write it like 1kB")
    return size


def parse_statuses(text: str) -> tuple[int, int]:
    """ "401", "4xx" or "400-499", as an inclusive range."""
    status = text.strip().lower()
    if re.fullmatch(r"[1-5]xx", status):
        return int(status[0]) * 100, int(status[0]) * 100 + 99
    found = re.fullmatch(r"([1-5]\d\d)(?:\s*-\s*([1-5]\d\d))?", status)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ParseError(f"expected a status, got {shorten(text)!r}", "write it like 401, 4xx or 400-499")
    return int(found[1]), int(found[2] or found[1])


def parse_message(text: str, known: tuple[str, ...] = PLACEHOLDERS) -> str:
    """A message whose {placeholders} are all known."""
    if len(text) > 2000:
        raise ParseError(f"a message has at most 2000 characters, got {len(text)}")
    for found in re.finditer(r"\{(\w+)\}", text):
        if found[1] not in known:
            remedy = did_you_mean(found[1], known, f"write one of {', '.join('{' + word + '}' for word in known)}")
            raise ParseError(f"unknown placeholder {found[0]}", remedy, (found.start(), len(found[0])))
    return text


def parse_store_url(text: str) -> str:
    """The URL of a store."""
    try:
        parts = urlsplit(text)
        maker_of(parts.scheme, text)
        _check_options(parts, options_of(parts.query, text), text)
    except (ConfigurationError, ValueError) as error:
        message, remedy = split_remedy(str(error).removeprefix(f"{masked(text)}: "))
        raise ParseError(message, remedy or "write it like redis://localhost:6379 or memory://") from None
    return text


def parse_redis_url(text: str) -> str:
    """The URL of a Redis or Valkey server."""
    if not text.startswith(("redis", "valkey", "unix")):
        raise ParseError(f"expected the URL of a Redis server, got {masked(text)}", "write it like redis://localhost:6379")
    return parse_store_url(text)


def _check_options(parts: SplitResult, options: dict[str, str], text: str) -> None:
    for wrapper, names in WRAPPERS.items():
        alone = next((name for name in names if name in options and wrapper not in options), None)
        if alone is not None:
            raise ConfigurationError(f"{alone}= belongs to {wrapper}=; add {wrapper}=…, or remove it")
    rest = {name: value for name, value in options.items() if name not in WRAPPING}
    if parts.scheme == "memory":
        if parts.netloc or parts.path.strip("/"):
            raise ConfigurationError("memory:// has no host and no path; it takes only ?max_keys=…")
        only(rest, ("max_keys",), text)
    elif parts.scheme == "shared":
        if parts.netloc or len(parts.path) < 2:
            remedy = "write the file's absolute path after three slashes: shared:///dev/shm/app.limits"
            raise ConfigurationError(f"the URL of a shared store has no path; {remedy}")
        only(rest, ("max_keys", "log_entries"), text)
    else:
        for name in rest:
            known = nearest(name, WRAPPING, 0.75)
            if known is not None:
                raise ConfigurationError(f"unknown option {name!r}; did you mean {known}=?")
        if "unix" not in parts.scheme and not parts.netloc:
            raise ConfigurationError(f"{parts.scheme}:// has no host; write it like redis://localhost:6379")
    if parts.netloc:
        try:
            _ = parts.hostname, parts.port if "," not in parts.netloc else None
        except ValueError:
            raise ConfigurationError("port: expected a number from 1 to 65535; write it like redis://localhost:6379") from None
    for name in ("max_keys", "log_entries", *(("lease",) if options.get("lease") != "auto" else ())):
        if name in options:
            number(name, options[name], text)
    wrapped(MemoryStore(), {name: value for name, value in options.items() if name in WRAPPING}, text).close()
    if parts.scheme in REDIS:
        from ...stores.redis.address import address_only, read_url
        from ...stores.redis.server_store import checked_timeout

        checked_timeout(read_url(address_only(text)).options.get("timeout", "1s"))
