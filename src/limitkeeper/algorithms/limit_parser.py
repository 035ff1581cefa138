"""Limits as text: `"token bucket 5/s burst 10; fixed window 1000/min"`. Without a name of a rule it is a token bucket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError, InvalidLimit
from . import ALGORITHMS
from .limit import Limit
from .token_bucket import TokenBucket


def parse_limit(text: object) -> Limit:
    """One limit from its text; what `str(limit)` gives parses back."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidLimit(f"{text!r} is no limit; write it like 'token bucket 5/s burst 10' or 'fixed window 1000/min'")
    words = " ".join(text.split())
    for kind, algorithm in ALGORITHMS.items():
        if words.lower().startswith(kind + " "):
            return algorithm(words[len(kind) + 1 :])  # type: ignore[call-arg]
    if words[0].isdigit():
        return TokenBucket(words)
    raise InvalidLimit(f"{text!r}: no rule is called so; start with one of: {', '.join(ALGORITHMS)}")


def parse_limits(text: str) -> list[Limit]:
    """Several limits, with ';' between them."""
    parts = text.split(";")
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise InvalidLimit(
            f"{text!r}: nothing stands on one side of a ';'; write it like 'token bucket 5/s; fixed window 1000/min'"
        )
    return [parse_limit(part) for part in parts]


def named_limits(limits: Any, name: str | None) -> dict[str, Limit]:
    """The limits of a limiter under their names: given as one limit, a mapping, a text, or a sequence of limits.

    Without names of their own, limits are called by their text, so that equal rules share and different ones never meet;
    under an explicit limiter name they are called by what does not change with the rate.
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
            raise ConfigurationError(f"the same limit twice: {'; '.join(names)}; say it once")
    else:
        raise ConfigurationError(f"{limits!r} is no limit; give a limit, a text, or a mapping of names to limits")
    if not found:
        raise ConfigurationError("a limiter needs at least one limit")
    for key, one in found.items():
        if not isinstance(one, Limit):
            raise ConfigurationError(f"{key!r}: {one!r} is no limit; write TokenBucket('5/s') or the text 'token bucket 5/s'")
    return found


def _steady_names(limits: list[Any], name: str) -> list[str]:
    if len(limits) == 1:
        return [name]
    kinds = [getattr(type(one), "kind", "") for one in limits]
    return [kind if kinds.count(kind) == 1 else f"{kind} {kinds[: i + 1].count(kind)}" for i, kind in enumerate(kinds)]


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a limit's name must be a text, not {name!r}")
    return name
