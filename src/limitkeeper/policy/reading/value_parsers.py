"""The words that people write, read as values: "user | ip", "wait up to 200ms queue 100", "local 1/4", "80%", "1kB".

Each function takes a text and gives a value of the model, or raises `Wrong` with the part that is wrong and what to write. None
of them knows where the text stands. Limits are in `limit_words`, paths and networks in `routes`, URLs in `store_words`.
"""

from __future__ import annotations

import re
from unicodedata import normalize

from ...errors import ConfigurationError, InvalidLimit
from ...rate import duration_us
from ...stores.guarded.share import parse_share
from ..model import CLOSED, DEGRADE, LOCAL, OPEN, REJECT, SHADOW, WAIT, OnFailure, OnRefusal
from .parse_context import ParseError, bounded, did_you_mean, short

EVERYONE = "everyone"
#: Words that have a meaning where an identity's name may stand.
RESERVED = (EVERYONE, "present", "absent", "by", "default")
PLACEHOLDERS = ("retry_after", "limit", "remaining", "rule")
#: The longest that a request may wait for its turn.
PATIENCE = "60s"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CALL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SIZE = re.compile(r"(\d{1,12})\s*([A-Za-z]*)")
_BYTES = {"": 1, "b": 1, "kb": 1000, "mb": 10**6, "gb": 10**9, "kib": 1024, "mib": 1024**2, "gib": 1024**3}


# Names -----------------------------------------------------------------------------------------------------------------


def title(text: str) -> str:
    """The name of a policy or a rule, which goes into header fields."""
    if not text or len(text) > 64:
        raise ParseError(f"a name has 1 to 64 characters, not {len(text)}", "shorten it")
    for place, character in enumerate(text):
        if not " " <= character <= "~" or character in '"\\':
            told = f"{character!r} can't stand in a name, which goes into header fields"
            raise ParseError(told, f"write {plain_title(text)!r}", (place, 1))
    if text != text.strip():
        raise ParseError(f"{text!r} begins or ends with a space", f"write {text.strip()!r}")
    return text


def plain_title(text: str) -> str:
    """The nearest name that can be written: letters without their accents, and nothing else that is foreign."""
    kept = "".join(one for one in normalize("NFKD", text[:64]) if " " <= one <= "~" and one not in '"\\')
    return " ".join(kept.split()) or "rule"


def identity_name(text: str) -> str:
    """The name of an identity: like a name in a program, so that "user | ip" can be told apart."""
    if text in RESERVED:
        raise ParseError(f"{text!r} has a meaning of its own and can't name an identity", f"write {text}_id, for example")
    if len(text) > 64 or not _NAME.fullmatch(text):
        raise ParseError(f"{short(text)!r} can't name an identity", "letters, digits and _ . - can, beginning with a letter")
    return text


def value(text: str) -> str:
    """A value that somebody may have: not an empty one."""
    if not bounded(text).strip():
        raise ParseError("an empty text is no value", "write one, or leave the word out")
    return text.strip()


def header_name(text: str) -> str:
    """The name of a header field."""
    if len(text) > 100 or not _TOKEN.fullmatch(text):
        raise ParseError(f"{short(text)!r} can't be the name of a header", "write it like X-Tenant")
    return text


def call(text: str) -> str:
    """The name of something to call: "package.module:attribute". It is imported when a gate is made."""
    if not _CALL.fullmatch(bounded(text)):
        module, _, attribute = text.rpartition(".")
        known = re.fullmatch(r"[\w.]+", text) and module
        like = f"{module}:{attribute}" if known else "shop.people:vip_of"
        raise ParseError(f"{short(text)!r} names nothing to call", f"write package.module:attribute, like {like}")
    return text


# Keys ------------------------------------------------------------------------------------------------------------------


def alternatives(text: str) -> tuple[str, ...]:
    """One part of a key: "user", or "user | ip", the first one present."""
    found, start = [], 0
    if not text.strip():
        raise ParseError("an empty text is no key", "write it like user | ip, or leave the word out")
    for piece in bounded(text).split("|"):
        name = piece.strip()
        at = start + len(piece) - len(piece.lstrip())
        if not name:
            raise ParseError(f"nothing stands on one side of a '|' in {text!r}", "write it like user | ip", (text.find("|"), 1))
        if name in found:
            raise ParseError(f"{name!r} stands twice in {text!r}", "say it once", (at, len(name)))
        try:
            found.append(identity_name(name))
        except ParseError as wrong:
            raise ParseError(wrong.message, key_remedy(name) or wrong.suggestion, (at, len(name))) from None
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


# What happens beyond a limit, and numbers --------------------------------------------------------------------------------


def on_refusal(text: str) -> OnRefusal:
    """ "reject", "wait up to 200ms queue 100", "degrade package.module:handler" or "shadow"."""
    words = bounded(text).split()
    verb = words[0].lower() if words else ""
    if verb in (REJECT, SHADOW) and len(words) == 1:
        return OnRefusal(verb)
    if verb == SHADOW or SHADOW in (word.lower().strip(",;") for word in words[1:] if verb == WAIT):
        raise ParseError("a rule in shadow lets everybody pass, so nobody waits", "write shadow or wait up to …, not both")
    if verb == WAIT:
        return wait(" ".join(words))
    if verb == DEGRADE:
        if len(words) != 2:
            raise ParseError(
                "'degrade' has no handler", "write degrade package.module:handler, or the name of one given to the middleware"
            )
        return OnRefusal(DEGRADE, handler=call(words[1]) if ":" in words[1] else words[1])
    remedy = did_you_mean(verb, (REJECT, WAIT, DEGRADE, SHADOW), "write reject, wait up to 200ms, degrade <handler> or shadow")
    raise ParseError(f"{short(text)!r} is nothing that can happen on a refusal", remedy)


_WAIT = re.compile(
    r"wait(?P<to> up to)?(?: (?P<time>(?!queue)\S+(?: (?!queue)[a-z]+)?))?(?: queue (?P<queue>\S+))?(?P<rest>.*)", re.I
)


def wait(text: str) -> OnRefusal:
    """ "wait up to 200ms queue 100": both a time and a length of the queue, so that nothing grows without end."""
    like = "write it like wait up to 200ms queue 100"
    found = _WAIT.fullmatch(text)
    if found is None or found["rest"].strip():
        raise ParseError(f"{short(text)!r} is not understood", like)
    if found["time"] is None:
        raise ParseError("a wait without a time has no end", like)
    if found["time"].lower() in ("forever", "infinite", "inf", "unlimited", "unbounded", "none", "indefinitely"):
        raise ParseError(f"a wait of {found['time']!r} has no end: every refused request would stay", like)
    try:
        time_us = duration_us(found["time"])
    except (InvalidLimit, ValueError):
        raise ParseError(f"{short(found['time'])!r} is no duration", like) from None
    if found["to"] is None:
        raise ParseError(f"{short(text)!r} is not understood", f"write wait up to {found['time']}")
    if not 0 < time_us <= duration_us(PATIENCE):
        raise ParseError(
            f"a wait of {found['time']} is not between 0 and {PATIENCE}", "clients give up sooner; let them retry instead"
        )
    queue = found["queue"]
    if queue is None:
        return OnRefusal(WAIT, time_us)
    if not (queue.isascii() and queue.isdigit()) or len(queue) > 6 or not 1 <= int(queue) <= 100_000:
        raise ParseError(f"a queue of {short(queue)!r} is not from 1 to 100000", like)
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
            parse_share(share)
        except ConfigurationError:
            raise ParseError(
                f"{share!r} is no share of a limit", "write local 1/4 where four nodes share it, or local alone"
            ) from None
        return OnFailure(LOCAL, share)
    remedy = did_you_mean(verb, (OPEN, CLOSED, LOCAL), "write open, closed or local 1/4")
    raise ParseError(f"{short(text)!r} is nothing that can happen when a store fails", remedy)


def percent(text: str) -> float:
    """ "80%" is 0.8."""
    found = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,4})?)\s*%\s*", text)
    if found is None:
        remedy = f"write {text.strip()}%" if re.fullmatch(r"\s*\d{1,3}(\.\d+)?\s*", text) else "write it like 80%"
        raise ParseError(f"{short(text)!r} is no part of a limit", remedy)
    if not 1 <= float(found[1]) <= 100:
        raise ParseError(f"{text.strip()} is not between 1% and 100%", "write it like 80%")
    return round(float(found[1]) / 100, 6)


def size(text: str) -> int:
    """ "1kB" is 1000 bytes, "1KiB" 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].lower() not in _BYTES:
        raise ParseError(f"{short(text)!r} is no size", "write it like 1kB, 1KiB or 4MB")
    if not 1 <= int(found[1]) * _BYTES[found[2].lower()] <= 10**12:
        raise ParseError(f"{short(text)!r} is not between 1B and 1000GB", "write it like 1kB")
    return int(found[1]) * _BYTES[found[2].lower()]


def statuses(text: str) -> tuple[int, int]:
    """ "401", "4xx" or "400-499", as a range of both ends."""
    words = text.strip().lower()
    if re.fullmatch(r"[1-5]xx", words):
        return int(words[0]) * 100, int(words[0]) * 100 + 99
    found = re.fullmatch(r"([1-5]\d\d)(?:\s*-\s*([1-5]\d\d))?", words)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ParseError(f"{short(text)!r} is no status", "write it like 401, 4xx or 400-499")
    return int(found[1]), int(found[2] or found[1])


def told(text: str, known: tuple[str, ...] = PLACEHOLDERS) -> str:
    """A message: its {placeholders} are known ones."""
    if len(text) > 2000:
        raise ParseError(f"a message has at most 2000 characters, not {len(text)}")
    for found in re.finditer(r"\{(\w+)\}", text):
        if found[1] not in known:
            remedy = did_you_mean(found[1], known, f"there are {', '.join('{' + word + '}' for word in known)}")
            raise ParseError(f"nothing is put in the place of {found[0]}", remedy, (found.start(), len(found[0])))
    return text
