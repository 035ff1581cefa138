"""Limits and states as bytes: what travels to the script, and what lies under a key.

A limit travels as its rule's number, a fingerprint, its tick and four numbers of the rule's own, all of them doubles: Lua has
no other number, every one of these is an integer below 2^53, and a double is read in one step. A state lies under its key as
fingerprint, moment of writing (µs), and the rule's three integers, 40 bytes; a log as its header and its entries.

The fingerprint is 52 bits of the limit's canonical text. A state under another fingerprint was written under another rate of
the same name; converting it takes integers beyond 2^53, so the script hands it back and Python does it (see `asks.converted`).
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Any, NamedTuple

from ...algorithms.claim import NamedLimit
from ...algorithms.limit import Limit
from ...errors import ConfigurationError
from .key_names import KeyNames, key_text


class Rule(NamedTuple):
    """The Lua mirror of a rule: its number, its file, and the fields of a limit that it takes."""

    code: int
    file: str
    fields: tuple[str, ...]


_PACED = ("gain", "unit", "full", "capacity")

#: The words that name a rule -> its mirror. Adding a rule is one file in `lua/` and one line here.
RULES: dict[str, Rule] = {
    "token bucket": Rule(1, "token_bucket", _PACED),
    "leaky bucket": Rule(1, "token_bucket", _PACED),
    "leaky bucket queue": Rule(2, "leaky_queue", _PACED),
    "fixed window": Rule(3, "fixed_window", ("window", "count", "aligned")),
    "sliding window counter": Rule(4, "sliding_counter", ("window", "count", "horizon")),
    "sliding window log": Rule(5, "sliding_log", ("window", "count")),
}

CELL = struct.Struct("<5d")
_LOG = struct.Struct("<4d")
_HIT = struct.Struct("<7d")


def rule_of(limit: Limit) -> Rule:
    found = RULES.get(type(limit).kind)
    if found is None:
        raise ConfigurationError(f"{limit}: RedisStore has no Lua mirror of this rule; use one of: {', '.join(RULES)}")
    return found


@lru_cache(4096)
def fingerprint(text: str) -> int:
    """52 bits of a limit's canonical text: an integer that a double holds."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 12


class LimitEntry:
    """What is known of one limit under one set of names: everything that does not change from call to call."""

    # fmt: off
    __slots__ = ("birth_us", "capacity", "fingerprint", "head", "hit", "limit", "name", "named", "names", "numbers", "plain",
                 "registry", "rule", "since_us", "straight")
    # fmt: on

    def __init__(self, names: KeyNames, named: NamedLimit) -> None:
        limit = named.limit
        self.names, self.named, self.limit, self.name = names, named, limit, named.name
        self.rule = rule_of(limit)
        self.registry = names.registry(named)
        self.head = names.head(named)
        self.capacity = limit.capacity
        self.fingerprint = fingerprint(str(limit))
        numbers = [float(getattr(limit, field)) for field in self.rule.fields]
        self.numbers = (float(limit.tick), *numbers, *[0.0] * (4 - len(numbers)))
        self.hit = self.hit_body(1)
        self.plain = frozenset(("hit", self.rule.file))
        self.birth_us: int | None = None  # when the limit was first known to this Redis; only a ramp needs it
        self.since_us: int | None = None  # when this rate came to hold under its name
        #: Whether a hit can go the straight way: nothing travels with its claim but numbers.
        self.straight = not limit.logs and limit.ramp == 0

    def hit_body(self, cost: int) -> bytes:
        return bytes((self.rule.code,)) + _HIT.pack(self.fingerprint, cost, *self.numbers)

    def unseen(self) -> tuple[Any, int]:
        """What a key that nobody has seen holds, and until when (µs) that is less than all."""
        limit = self.limit
        if self.birth_us is None:
            raise ConfigurationError(f"{limit}: its birth is not known yet; the store asks for it before the first decision")
        return limit.new(self.birth_us), (self.birth_us // limit.tick + limit.ramp) * limit.tick


def entry_of(names: KeyNames, named: NamedLimit) -> LimitEntry:
    """The place of a limit, made when it is first named."""
    place: LimitEntry | None = names.places.get(named)
    if place is None:
        place = names.places[named] = LimitEntry(names, named)
    return place


class Stored(NamedTuple):
    """What lies under a key: the fingerprint it was written under, when (µs), the state, the whole key if that was hashed."""

    fingerprint: int
    written_us: int
    state: Any
    key: str | None


def read_value(limit: Limit, value: bytes) -> Stored:
    """A value as Python's integers; a log as `items` gives it, ((moment, cost), …) and two zeros."""
    if limit.logs:
        print_, written, base, n = map(int, _LOG.unpack_from(value))
        numbers = struct.unpack_from(f"<{2 * n}d", value, _LOG.size)
        entries, total = [], base
        for moment, upto in zip(numbers[::2], numbers[1::2], strict=True):
            entries.append((int(moment), int(upto) - total))
            total = int(upto)
        state: Any = (tuple(entries), 0, 0)
        tail = value[_LOG.size + 16 * n :]
    else:
        print_, written, *numbers3 = map(int, CELL.unpack_from(value))
        state = tuple(numbers3)
        tail = value[CELL.size :]
    return Stored(print_, written, state, key_text(tail) if tail else None)
