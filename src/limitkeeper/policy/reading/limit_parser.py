"""Parses the limits of a policy and locates errors in their text: the algorithm, an option, or the whole limit."""

from __future__ import annotations

import re

from ...algorithms import ALGORITHMS
from ...algorithms.limit import Limit
from ...algorithms.limit_parser import parse_limit
from ...errors import InvalidLimit
from ...rate import WRITE
from ..model import Limits
from .parse_context import ParseError, bounded_text, did_you_mean, nearest, shorten
from .validators import split_remedy

UNLIMITED = "unlimited"
_OPTION = re.compile(r"^(?:unknown option '(\w+)'|(burst|initial|capacity|align)\b)")


def parse_limits(text: str) -> Limits:
    """One limit, several separated by ';', or "unlimited"."""
    if text.strip().lower() == UNLIMITED:
        return ()
    found, start = [], 0
    for piece in bounded_text(text).split(";"):
        found.append(parse_single_limit(piece, start))
        start += len(piece) + 1
    return tuple(found)


def parse_single_limit(text: str, start: int = 0) -> Limit:
    """One limit; `start` is its offset in a longer text."""
    limit = bounded_text(text).strip()
    at = start + len(text) - len(text.lstrip())
    if not limit:
        raise ParseError("one side of a ';' is empty", "write it like token bucket 5/s; fixed window 1000/min", (start, 1))
    prefix = re.match(r"[^\d;]*", limit)
    algorithm = " ".join((prefix[0] if prefix else "").split()).lower()
    if algorithm and (algorithm not in ALGORITHMS or algorithm == limit.lower()):
        span = at, max(1, len((prefix[0] if prefix else "").rstrip()))
        raise ParseError(*explain_algorithm(limit, algorithm), span)
    try:
        return parse_limit(limit)
    except (InvalidLimit, ValueError) as error:
        raise locate_error(limit, error, at) from None


def explain_algorithm(limit: str, algorithm: str) -> tuple[str, str]:
    """Message and remedy for a limit that does not begin with an algorithm and a rate."""
    if algorithm == UNLIMITED:
        return f"{UNLIMITED!r} can't be combined", f"write {UNLIMITED} alone, or a limit"
    if algorithm in ("unlimted", "none", "off", "no limit", "infinite", "∞"):
        return f"{algorithm!r} is not a limit", f"write {UNLIMITED}"
    known = algorithm if algorithm in ALGORITHMS else nearest(algorithm, ALGORITHMS)
    if known is not None and not any(character.isdigit() for character in limit):
        return f"{shorten(limit)!r} has no rate", f"write it like {known} 5/s"
    return f"unknown algorithm {shorten(algorithm)!r}", did_you_mean(algorithm, ALGORITHMS)


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
