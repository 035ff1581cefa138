"""The words that people write, read as values: "user | ip", "POST /checkout", "wait up to 200ms queue 100", "local 1/4", "80%", "1kB".

Each function takes a text and gives a value of the model, or raises `Wrong` with the part that is wrong and what to write. None of
them knows where the text stands.
"""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from ..algorithms import ALGORITHMS
from ..algorithms.limit import Limit
from ..algorithms.text import parse_limit
from ..errors import ConfigurationError, InvalidLimit
from ..rate import duration_us
from ..stores.guarded.share import share_of_nodes
from ..stores.urls import WRAPPERS, WRAPPING, maker_of, masked, only, options_of
from .hosts import host_pattern
from .model import CLOSED, DEGRADE, LOCAL, OPEN, REJECT, SHADOW, WAIT, Limits, Match, OnFailure, OnRefusal
from .page import Wrong, did_you_mean, nearest, short

#: Longer texts are no limits, keys or matches.
LONGEST = 400
UNLIMITED, EVERYONE = "unlimited", "everyone"
#: Words that have a meaning where an identity's name may stand.
RESERVED = (EVERYONE, "present", "absent", "by", "default")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "MESSAGE")
PLACEHOLDERS = ("retry_after", "limit", "remaining", "rule")
#: The longest that a request may wait for its turn.
PATIENCE = "60s"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CALL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SIZE = re.compile(r"(\d{1,12})\s*([A-Za-z]*)")
_BYTES = {"": 1, "b": 1, "kb": 1000, "mb": 10**6, "gb": 10**9, "kib": 1024, "mib": 1024**2, "gib": 1024**3}
_OPTION = re.compile(r"^(?:'(\w+)' does not|(burst|initial|capacity|align)\b)")


def bounded(text: str) -> str:
    if len(text) > LONGEST:
        raise Wrong(f"{short(text)!r} has {len(text)} characters; nothing here is that long")
    return text


# Names -----------------------------------------------------------------------------------------------------------------


def title(text: str) -> str:
    """The name of a policy or a rule, which goes into header fields."""
    if not text or len(text) > 64:
        raise Wrong(f"a name has 1 to 64 characters, not {len(text)}", "shorten it")
    for place, character in enumerate(text):
        if not " " <= character <= "~" or character in '"\\':
            told = f"{character!r} can't stand in a name, which goes into header fields"
            raise Wrong(told, f"write {plain_title(text)!r}", (place, 1))
    if text != text.strip():
        raise Wrong(f"{text!r} begins or ends with a space", f"write {text.strip()!r}")
    return text


def plain_title(text: str) -> str:
    """The nearest name that can be written."""
    kept = "".join(one if " " <= one <= "~" and one not in '"\\' else "-" for one in text)
    return re.sub(r"-+", "-", kept).strip("- ") or "rule"


def identity_name(text: str) -> str:
    """The name of an identity: like a name in a program, so that "user | ip" can be told apart."""
    if text in RESERVED:
        raise Wrong(f"{text!r} has a meaning of its own and can't name an identity", f"write {text}_id, for example")
    if len(text) > 64 or not _NAME.fullmatch(text):
        raise Wrong(f"{short(text)!r} can't name an identity", "letters, digits and _ . - can, beginning with a letter")
    return text


def header_name(text: str) -> str:
    """The name of a header field."""
    if len(text) > 100 or not _TOKEN.fullmatch(text):
        raise Wrong(f"{short(text)!r} can't be the name of a header", "write it like X-Tenant")
    return text


def call(text: str) -> str:
    """The name of something to call: "package.module:attribute". It is imported when a gate is made."""
    if not _CALL.fullmatch(bounded(text)):
        module, _, attribute = text.rpartition(".")
        known = re.fullmatch(r"[\w.]+", text) and module
        like = f"{module}:{attribute}" if known else "shop.people:vip_of"
        raise Wrong(f"{short(text)!r} names nothing to call", f"write package.module:attribute, like {like}")
    return text


# Keys ------------------------------------------------------------------------------------------------------------------


def alternatives(text: str) -> tuple[str, ...]:
    """One part of a key: "user", or "user | ip", the first one present."""
    found, start = [], 0
    for piece in bounded(text).split("|"):
        name = piece.strip()
        at = start + len(piece) - len(piece.lstrip())
        if not name:
            raise Wrong(f"nothing stands on one side of a '|' in {text!r}", "write it like user | ip", (text.find("|"), 1))
        if name in found:
            raise Wrong(f"{name!r} stands twice in {text!r}", "say it once", (at, len(name)))
        try:
            found.append(identity_name(name))
        except Wrong as wrong:
            raise Wrong(wrong.message, key_remedy(name) or wrong.suggestion, (at, len(name))) from None
        start += len(piece) + 1
    return tuple(found)


def key_remedy(name: str) -> str:
    if name == EVERYONE:
        return "'everyone' stands alone, for one key for all"
    for sign in (",", "+", "&", " and ", "/", ":"):
        if sign in name:
            parts = ", ".join(part.strip() for part in name.split(sign))
            return f"join parts to one key with a list: [{parts}]"
    if re.search(r"\bor\b|\s", name):
        return "write 'user | ip' for the first one present"
    return ""


# Limits ----------------------------------------------------------------------------------------------------------------


def limits(text: str) -> Limits:
    """One limit, several with ';' between them, or "unlimited"."""
    if text.strip().lower() == UNLIMITED:
        return ()
    found, start = [], 0
    for piece in bounded(text).split(";"):
        found.append(limit(piece, start))
        start += len(piece) + 1
    return tuple(found)


def limit(text: str, start: int = 0) -> Limit:
    """One limit; `start` is where it begins in a longer text."""
    words = text.strip()
    at = start + len(text) - len(text.lstrip())
    if not words:
        raise Wrong("nothing stands on one side of a ';'", "write it like token bucket 5/s; fixed window 1000/min", (start, 1))
    named = re.match(r"[^\d;]*", words)
    kind = " ".join((named[0] if named else "").split()).lower()
    if kind and kind not in ALGORITHMS:
        raise Wrong(*unknown_kind(words, kind), (at, max(1, len((named[0] if named else "").rstrip()))))
    try:
        return parse_limit(words)
    except (InvalidLimit, ValueError) as error:
        raise misread_limit(words, error, at) from None


def unknown_kind(words: str, kind: str) -> tuple[str, str]:
    if kind == UNLIMITED:
        return f"{UNLIMITED!r} stands alone", f"write {UNLIMITED}, or a limit"
    if kind in ("unlimted", "none", "off", "no limit", "infinite", "∞"):
        return f"{kind!r} is no limit", f"write {UNLIMITED}"
    meant = nearest(kind, ALGORITHMS)
    if meant is not None and not any(character.isdigit() for character in words):
        return f"{short(words)!r} has no rate", f"write it like {meant} 5/s"
    return f"no rule is called {short(kind)!r}", did_you_mean(kind, ALGORITHMS)


def misread_limit(words: str, error: Exception, at: int) -> Wrong:
    """An InvalidLimit at its place: the option that is wrong, or the whole limit."""
    said = str(error)
    for kind in ("", *ALGORITHMS):  # what the message repeats: the text with or without the name of the rule
        rest = " ".join(words.split())[len(kind) :].strip() if words.lower().startswith(kind) else words
        said = said.removeprefix(f"{rest!r}: ")
    message, _, remedy = said.rpartition("; ")
    found = _OPTION.match(message or said)
    if found is not None:
        option = re.search(rf"\b{found[1] or found[2]}\s+\S+", words, re.I)
        if option is not None:
            return Wrong(f"{option[0]!r}: {message or said}", remedy, (at + option.start(), len(option[0])))
    shown = said if repr(words)[:20] in said else f"{short(words)!r}: {said}"
    message, _, remedy = shown.rpartition("; ")
    return Wrong(message or shown, remedy if message else "", (at, len(words)))


# Matches ---------------------------------------------------------------------------------------------------------------


def match(text: str) -> Match:
    """ "POST /checkout", "GET,HEAD /x", or "/x" for every method."""
    words = bounded(text).strip()
    at = len(text) - len(text.lstrip())
    if not words:
        raise Wrong("nothing stands here, not a match", "write it like POST /checkout")
    slash = words.find("/")
    if slash < 0:
        raise Wrong(f"{words!r} has no path", f"write it like {words.split()[0].upper()} /checkout; '/**' is every path")
    before = words[:slash]
    if before and not before[-1].isspace():
        remedy = (
            "take methods and path apart with a space: GET,HEAD /x"
            if nearest(before, METHODS)
            else "a path begins with '/': write {path: /x, host: …}"
        )
        raise Wrong(f"{short(before)!r} stands directly before the path", remedy, (at, len(before)))
    found = methods(before, at) if before.strip() else frozenset()
    return Match(found, path(words[slash:], at + slash))


def methods(text: str, at: int = 0) -> frozenset[str]:
    """ "GET, HEAD": HTTP methods in any case."""
    found = []
    for word in re.finditer(r"[^\s,|]+", text):
        name = word[0].upper()
        meant = nearest(name, METHODS, 0.7)
        if not re.fullmatch(r"[A-Z][A-Z0-9_-]{0,30}", name) or (meant is not None and name not in METHODS):
            raise Wrong(f"no method is called {short(word[0])!r}", did_you_mean(name, METHODS), (at + word.start(), len(word[0])))
        found.append(name)
    if not found:
        raise Wrong("no method stands here", "write it like GET, HEAD")
    return frozenset(found)


def path(text: str, at: int = 0) -> str:
    """A path template: literal segments, {name} and * for one segment, ** at the end for any rest."""
    if not bounded(text).startswith("/"):
        raise Wrong(f"the path {short(text)!r} does not begin with '/'", f"write /{text.lstrip('/')}", (at, max(1, len(text))))
    for sign, remedy in (("?", "a rule matches the path only; take the query out"), ("#", "take '#' and what follows out")):
        if sign in text:
            raise Wrong(f"no request's path has a {sign!r}", remedy, (at + text.index(sign), 1))
    if re.search(r"\s", text):
        raise Wrong(
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
        raise Wrong("'**' stands at the end of a path only", "'*' is one segment", part)
    if segment in (".", ".."):
        raise Wrong(f"no request keeps a {segment!r} in its path", "write the path that it leads to", part)
    if segment.startswith("{") and segment.endswith("}") and "{" not in segment[1:]:
        name = segment[1:-1]
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise Wrong(f"{segment!r} has no name that can be used", "write it like {order_id}", part)
        if name in names:
            raise Wrong(f"{segment!r} stands twice in this path", "give the second one another name", part)
        names.append(name)
    elif segment not in ("*", "**") and re.search(r"[*{}]", segment):
        raise Wrong(f"{segment!r}: '*' and {{name}} are whole segments", "write * or {name} between two '/'", part)


def host(text: str) -> str:
    """A host: "api.example.com", or "*.example.com" for every one below it."""
    name = bounded(text).strip()
    if "://" in name or "/" in name:
        raise Wrong(f"{short(text)!r} is more than a host", "write it like api.example.com")
    if re.search(r":\d+$", name) and name.count(":") == 1:
        raise Wrong(f"{short(text)!r} has a port, which is not looked at", f"write {name.partition(':')[0]}")
    try:
        return host_pattern(name)
    except ConfigurationError:
        raise Wrong(f"{short(text)!r} is no host", "write it like api.example.com or *.example.com") from None


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
        raise Wrong(f"{short(text)!r} is no address and no network", "write it like 10.0.0.0/8 or 2001:db8::/32") from None
    raise Wrong(
        f"{words!r} is an address inside a network",
        f"write {near} for the network, {ip_address(words.split('/')[0])} for the address",
    )


def proxies(text: str) -> str:
    """A network of proxies whose word is trusted."""
    found = network(text)
    if found in ("0.0.0.0/0", "::/0"):
        raise Wrong(
            f"{found} trusts everybody: any client could write its own address",
            "name the networks of your proxies, like 10.0.0.0/8",
        )
    return found


# What happens beyond a limit, and numbers --------------------------------------------------------------------------------


def on_refusal(text: str) -> OnRefusal:
    """ "reject", "wait up to 200ms queue 100", "degrade package.module:handler" or "shadow"."""
    words = bounded(text).split()
    verb = words[0].lower() if words else ""
    if verb in (REJECT, SHADOW) and len(words) == 1:
        return OnRefusal(verb)
    if verb == SHADOW or SHADOW in (word.lower().strip(",;") for word in words[1:] if verb == WAIT):
        raise Wrong("a rule in shadow lets everybody pass, so nobody waits", "write shadow or wait up to …, not both")
    if verb == WAIT:
        return wait(" ".join(words))
    if verb == DEGRADE:
        if len(words) != 2:
            raise Wrong(
                "'degrade' has no handler", "write degrade package.module:handler, or the name of one given to the middleware"
            )
        return OnRefusal(DEGRADE, handler=words[1] if ":" not in words[1] else call(words[1]))
    remedy = did_you_mean(verb, (REJECT, WAIT, DEGRADE, SHADOW), "write reject, wait up to 200ms, degrade <handler> or shadow")
    raise Wrong(f"{short(text)!r} is nothing that can happen on a refusal", remedy)


_WAIT = re.compile(
    r"wait(?P<to> up to)?(?: (?P<time>(?!queue)\S+(?: (?!queue)[a-z]+)?))?(?: queue (?P<queue>\S+))?(?P<rest>.*)", re.I
)


def wait(text: str) -> OnRefusal:
    """ "wait up to 200ms queue 100": both a time and a length of the queue, so that nothing grows without end."""
    like = "write it like wait up to 200ms queue 100"
    found = _WAIT.fullmatch(text)
    if found is None or found["rest"].strip():
        raise Wrong(f"{short(text)!r} is not understood", like)
    if found["time"] is None:
        raise Wrong("a wait without a time has no end", like)
    if found["time"].lower() in ("forever", "infinite", "inf", "unlimited", "unbounded", "none", "indefinitely"):
        raise Wrong(f"a wait of {found['time']!r} has no end: every refused request would stay", like)
    try:
        time_us = duration_us(found["time"])
    except (InvalidLimit, ValueError):
        raise Wrong(f"{short(found['time'])!r} is no duration", like) from None
    if found["to"] is None:
        raise Wrong(f"{short(text)!r} is not understood", f"write wait up to {found['time']}")
    if not 0 < time_us <= duration_us(PATIENCE):
        raise Wrong(
            f"a wait of {found['time']} is not between 0 and {PATIENCE}", "clients give up sooner; let them retry instead"
        )
    queue = found["queue"]
    if queue is None:
        return OnRefusal(WAIT, time_us)
    if not (queue.isascii() and queue.isdigit()) or len(queue) > 6 or not 1 <= int(queue) <= 100_000:
        raise Wrong(f"a queue of {short(queue)!r} is not from 1 to 100000", like)
    return OnRefusal(WAIT, time_us, int(queue))


def on_failure(text: str) -> OnFailure:
    """ "open", "closed", or "local 1/4": this node's share, in memory."""
    words = bounded(text).split()
    verb = words[0].lower() if words else ""
    if verb in (OPEN, CLOSED) and len(words) == 1:
        return OnFailure(verb)
    if verb == LOCAL:
        share = "".join(words[1:]) or "1"
        try:
            share_of_nodes(share)
        except ConfigurationError:
            raise Wrong(
                f"{share!r} is no share of a limit", "write local 1/4 where four nodes share it, or local alone"
            ) from None
        return OnFailure(LOCAL, share)
    remedy = did_you_mean(verb, (OPEN, CLOSED, LOCAL), "write open, closed or local 1/4")
    raise Wrong(f"{short(text)!r} is nothing that can happen when a store fails", remedy)


def percent(text: str) -> float:
    """ "80%" is 0.8."""
    found = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,4})?)\s*%\s*", text)
    if found is None:
        remedy = f"write {text.strip()}%" if re.fullmatch(r"\s*\d{1,3}(\.\d+)?\s*", text) else "write it like 80%"
        raise Wrong(f"{short(text)!r} is no part of a limit", remedy)
    if not 1 <= float(found[1]) <= 100:
        raise Wrong(f"{text.strip()} is not between 1% and 100%", "write it like 80%")
    return round(float(found[1]) / 100, 6)


def size(text: str) -> int:
    """ "1kB" is 1000 bytes, "1KiB" 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].lower() not in _BYTES:
        raise Wrong(f"{short(text)!r} is no size", "write it like 1kB, 1KiB or 4MB")
    if not 1 <= int(found[1]) * _BYTES[found[2].lower()] <= 10**12:
        raise Wrong(f"{short(text)!r} is not between 1B and 1000GB", "write it like 1kB")
    return int(found[1]) * _BYTES[found[2].lower()]


def statuses(text: str) -> tuple[int, int]:
    """ "401", "4xx" or "400-499", as a range of both ends."""
    words = text.strip().lower()
    if re.fullmatch(r"[1-5]xx", words):
        return int(words[0]) * 100, int(words[0]) * 100 + 99
    found = re.fullmatch(r"([1-5]\d\d)(?:\s*-\s*([1-5]\d\d))?", words)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise Wrong(f"{short(text)!r} is no status", "write it like 401, 4xx or 400-499")
    return int(found[1]), int(found[2] or found[1])


def told(text: str, known: tuple[str, ...] = PLACEHOLDERS) -> str:
    """A message: its {placeholders} are known ones."""
    if len(text) > 2000:
        raise Wrong(f"a message has at most 2000 characters, not {len(text)}")
    for found in re.finditer(r"\{(\w+)\}", text):
        if found[1] not in known:
            remedy = did_you_mean(found[1], known, f"there are {', '.join('{' + word + '}' for word in known)}")
            raise Wrong(f"nothing is put in the place of {found[0]}", remedy, (found.start(), len(found[0])))
    return text


def joined(parts: tuple[Any, ...]) -> str:
    """The key of several parts, as a gate joins them; None is a part that is absent."""
    if len(parts) == 1:
        return str(parts[0])
    return "|".join("-" if part is None else _escaped(str(part)) for part in parts)


def _escaped(text: str) -> str:
    return "%2D" if text == "-" else text.replace("%", "%25").replace("|", "%7C")


# Stores ----------------------------------------------------------------------------------------------------------------------


def store_url(text: str) -> str:
    """A store's URL, looked at without making the store."""
    try:
        parts = urlsplit(text)
        maker_of(parts.scheme, text)
        options = options_of(parts.query, text)
        _options_hold(parts, options, text)
    except (ConfigurationError, ValueError) as error:
        said = str(error).removeprefix(f"{masked(text)}: ")
        message, _, remedy = said.rpartition("; ")
        raise Wrong(message or said, remedy if message else "write it like redis://localhost:6379 or memory://") from None
    return text


def _options_hold(parts: Any, options: dict[str, str], text: str) -> None:
    for wrapper, more in WRAPPERS.items():
        alone = next((name for name in more if name in options and wrapper not in options), None)
        if alone is not None:
            raise ConfigurationError(f"{alone}= belongs to {wrapper}=; write {wrapper}=… too, or leave it out")
    rest = {name: value for name, value in options.items() if name not in WRAPPING}
    if parts.scheme == "memory":
        if parts.netloc or parts.path.strip("/"):
            raise ConfigurationError("memory:// has no host and no path; it takes only ?max_keys=…")
        only(rest, ("max_keys",), text)
    elif parts.scheme == "shared":
        if parts.netloc or len(parts.path) < 2:
            raise ConfigurationError(
                "a shared store has no path; write the file's whole path after three slashes: shared:///run/app/limits"
            )
        only(rest, ("max_keys", "log_entries"), text)
    elif "unix" not in parts.scheme and not parts.netloc:
        raise ConfigurationError(f"{parts.scheme}:// has no host; write it like redis://localhost:6379")
    if parts.netloc:
        _ = parts.hostname, parts.port if "," not in parts.netloc else None
