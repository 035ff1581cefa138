"""Limits as people write them in a policy, with the place of what is wrong: an algorithm, an option, or all of it."""

from __future__ import annotations

import re

from ...algorithms import ALGORITHMS
from ...algorithms.limit import Limit
from ...algorithms.limit_parser import parse_limit
from ...errors import InvalidLimit
from ...rate import WRITE
from ..model import Limits
from .parse_context import ParseError, bounded, did_you_mean, nearest, short

UNLIMITED = "unlimited"
_OPTION = re.compile(r"^(?:'(\w+)' does not|(burst|initial|capacity|align)\b)")


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
        raise ParseError(
            "nothing stands on one side of a ';'", "write it like token bucket 5/s; fixed window 1000/min", (start, 1)
        )
    named = re.match(r"[^\d;]*", words)
    kind = " ".join((named[0] if named else "").split()).lower()
    if kind and (kind not in ALGORITHMS or kind == words.lower()):
        raise ParseError(*unknown_kind(words, kind), (at, max(1, len((named[0] if named else "").rstrip()))))
    try:
        return parse_limit(words)
    except (InvalidLimit, ValueError) as error:
        raise misread_limit(words, error, at) from None


def unknown_kind(words: str, kind: str) -> tuple[str, str]:
    if kind == UNLIMITED:
        return f"{UNLIMITED!r} stands alone", f"write {UNLIMITED}, or a limit"
    if kind in ("unlimted", "none", "off", "no limit", "infinite", "∞"):
        return f"{kind!r} is no limit", f"write {UNLIMITED}"
    meant = kind if kind in ALGORITHMS else nearest(kind, ALGORITHMS)
    if meant is not None and not any(character.isdigit() for character in words):
        return f"{short(words)!r} has no rate", f"write it like {meant} 5/s"
    return f"no algorithm is called {short(kind)!r}", did_you_mean(kind, ALGORITHMS)


def misread_limit(words: str, error: Exception, at: int) -> ParseError:
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
            remedy = f"write it like {option[0].split()[0]} 10" if remedy == WRITE else remedy
            return ParseError(message or said, remedy, (at + option.start(), len(option[0])))
    shown = said if repr(words)[:20] in said else f"{short(words)!r}: {said}"
    message, _, remedy = shown.rpartition("; ")
    return ParseError(message or shown, remedy if message else "", (at, len(words)))
