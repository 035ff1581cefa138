"""Parsers of a policy's short texts: "user | ip", "wait up to 200ms queue 100", "local 1/4", "80%", "1kB".

Each takes a text and returns a value of the model, or raises ParseError with the part that is wrong and what to write instead.
None knows the text's position. Limits are parsed in `limit_parser`, paths and networks in `match_parsers`, URLs in `store_url`.
"""

from __future__ import annotations

import re
from unicodedata import normalize

from ...errors import ConfigurationError, InvalidLimit
from ...rate import duration_us
from ...stores.guarded.share import parse_share
from ..model import CLOSED, DEGRADE, LOCAL, OPEN, REJECT, SHADOW, WAIT, OnFailure, OnRefusal
from .parse_context import ParseError, bounded_text, did_you_mean, shorten

EVERYONE = "everyone"
#: Words with a meaning of their own where the name of an identity may be written.
RESERVED = (EVERYONE, "present", "absent", "by", "default")
PLACEHOLDERS = ("retry_after", "limit", "remaining", "rule")
#: The longest time that a request may wait.
MAX_WAIT = "60s"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_IMPORT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SIZE = re.compile(r"(\d{1,12})\s*([A-Za-z]*)")
_BYTES = {"": 1, "b": 1, "kb": 1000, "mb": 10**6, "gb": 10**9, "kib": 1024, "mib": 1024**2, "gib": 1024**3}


# Names -----------------------------------------------------------------------------------------------------------------


def parse_rule_name(text: str) -> str:
    """The name of a policy or a rule: it is sent in header fields, so printable ASCII without quotes and backslashes."""
    if not text or len(text) > 64:
        raise ParseError(f"a name has 1 to 64 characters, got {len(text)}", "shorten it")
    for index, character in enumerate(text):
        if not " " <= character <= "~" or character in '"\\':
            message = f"{character!r} is not allowed in a name, which is sent in header fields"
            raise ParseError(message, f"write {to_header_text(text)!r}", (index, 1))
    if text != text.strip():
        raise ParseError(f"{text!r} begins or ends with a space", f"write {text.strip()!r}")
    return text


def to_header_text(text: str) -> str:
    """The nearest valid name: letters without accents, other characters removed."""
    allowed = "".join(one for one in normalize("NFKD", text[:64]) if " " <= one <= "~" and one not in '"\\')
    return " ".join(allowed.split()) or "rule"


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


def parse_import_string(text: str) -> str:
    """The import string of a callable, "package.module:attribute". It is imported when a gate is made."""
    if not _IMPORT.fullmatch(bounded_text(text)):
        module, _, attribute = text.rpartition(".")
        dotted = re.fullmatch(r"[\w.]+", text) and module
        example = f"{module}:{attribute}" if dotted else "shop.people:vip_of"
        raise ParseError(f"{shorten(text)!r} is not an import string", f"write package.module:attribute, like {example}")
    return text


# Keys ------------------------------------------------------------------------------------------------------------------


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


# Actions -----------------------------------------------------------------------------------------------------------------


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


_WAIT = re.compile(
    r"wait(?P<to> up to)?(?: (?P<time>(?!queue)\S+(?: (?!queue)[a-z]+)?))?(?: queue (?P<queue>\S+))?(?P<rest>.*)", re.I
)


def parse_wait(text: str) -> OnRefusal:
    """ "wait up to 200ms queue 100": time and queue length are both bounded."""
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
    if queue is None:
        return OnRefusal(WAIT, time_us)
    if not (queue.isascii() and queue.isdigit()) or len(queue) > 6 or not 1 <= int(queue) <= 100_000:
        raise ParseError(f"expected a queue length from 1 to 100000, got {shorten(queue)!r}", remedy)
    return OnRefusal(WAIT, time_us, int(queue))


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
    raise ParseError(
        f"unknown action {shorten(text)!r}", did_you_mean(action, (OPEN, CLOSED, LOCAL), "write open, closed or local 1/4")
    )


# Numbers and messages ------------------------------------------------------------------------------------------------------


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
