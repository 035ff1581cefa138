"""Parses limits from text: `"token bucket 5/s burst 10; fixed window 1000/min"`. The default algorithm is the token bucket."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

from ..errors import ConfigurationError, InvalidLimit
from . import ALGORITHMS
from .limit import Limit
from .token_bucket import TokenBucket

#: The beginning of a count that is not a positive whole number; TokenBucket says what is wrong with it.
_COUNT = re.compile(r"[-.]\d")


def parse_limit(text: object, default: str = TokenBucket.kind) -> Limit:
    """Parses one limit; `parse_limit(str(limit)) == limit`. `default` is the algorithm of a rate alone."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidLimit(
            f"expected the text of a limit, got {text!r}; write it like 'token bucket 5/s burst 10' or 'fixed window 1000/min'"
        )
    words = " ".join(text.split())
    for kind, algorithm in ALGORITHMS.items():
        if words.lower().startswith(kind + " "):
            return algorithm(words[len(kind) + 1 :])  # type: ignore[call-arg]
    if words[0].isdigit() or _COUNT.match(words):
        return ALGORITHMS[default](words)  # type: ignore[call-arg]
    name = re.split(r" *[-.]?\d", words, maxsplit=1)[0]
    if name.lower() in ALGORITHMS:
        raise InvalidLimit(f"expected a rate after the algorithm, got {text!r}; write it like '{name} 5/s'")
    near = beginning_with(name) or get_close_matches(name.lower(), ALGORITHMS, 1)
    remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else f"expected one of: {', '.join(ALGORITHMS)}"
    raise InvalidLimit(f"unknown algorithm {name!r}; {remedy}")


def beginning_with(words: str) -> list[str]:
    """The algorithms whose names begin with these words: both sliding windows for "sliding window"."""
    return [kind for kind in ALGORITHMS if kind.startswith(words.lower() + " ")]


def parse_limits(text: str, default: str = TokenBucket.kind) -> list[Limit]:
    """Parses several limits separated by ';'."""
    parts = text.split(";")
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise InvalidLimit(f"{text!r}: empty limit beside a ';'; write it like 'token bucket 5/s; fixed window 1000/min'")
    return [parse_limit(part, default) for part in parts]


def named_limits(limits: object, name: str | None) -> dict[str, Limit]:
    """The limits of a limiter by name, from one limit, a mapping, a text, or a sequence of limits.

    The default name of a limit is its text, so that equal limits share state and different ones do not. In a limiter with
    an explicit name it is the algorithm (and a number), which does not change with the rate.
    """
    if isinstance(limits, str):
        limits = parse_limits(limits)
    if isinstance(limits, Limit):
        limits = [limits]
    if isinstance(limits, Mapping):
        found = {_checked_name(key): parse_limit(one) if isinstance(one, str) else one for key, one in limits.items()}
    elif isinstance(limits, (list, tuple)):
        ones = [parse_limit(one) if isinstance(one, str) else one for one in limits]
        names = [str(one) for one in ones] if name is None else _steady_names(ones, name)
        found = dict(zip(names, ones, strict=True))
        if len(found) < len(ones):
            raise ConfigurationError(f"duplicate limit in {'; '.join(names)}; give it once")
    else:
        raise ConfigurationError(
            f"expected a limit, a text, or a mapping of names to limits, got {limits!r}; write '5/s burst 10'"
        )
    if not found:
        raise ConfigurationError("a limiter needs at least one limit")
    for key, one in found.items():
        if not isinstance(one, Limit):
            raise ConfigurationError(
                f"{key!r}: expected a limit, got {one!r}; write TokenBucket('5/s') or the text 'token bucket 5/s'"
            )
    return found


def _steady_names(limits: list[object], name: str) -> list[str]:
    if len(limits) == 1:
        return [name]
    kinds = [getattr(type(one), "kind", "") for one in limits]
    return [kind if kinds.count(kind) == 1 else f"{kind} {kinds[: i + 1].count(kind)}" for i, kind in enumerate(kinds)]


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a limit's name must be a non-empty string, got {name!r}")
    return name
