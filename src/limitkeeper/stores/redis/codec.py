"""Encodes limits for the scripts and decodes the states that the scripts store.

A limit is sent as the number of its rule, a fingerprint, its tick and four numbers of the rule, all of them doubles: Lua has no
other number, each of these is an integer below 2^53, and a double is read in one step. A state is stored as fingerprint, time of
writing (µs) and the rule's three integers, 40 bytes; a log as its header and its entries.

The fingerprint is 52 bits of the limit's canonical text. A state with another fingerprint was written under another rate of the
same name. Converting it takes integers beyond 2^53, so the script returns it and Python converts it (`limit_registry.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ...algorithms.claim import NamedLimit
from ...algorithms.limit import Limit
from ...errors import ConfigurationError
from .key_names import KeyNames, key_text

#: A state as the rules see it: three integers, or a log's ((moment, cost), …) and two zeros.
State = tuple[object, ...]


class Rule(NamedTuple):
    """The Lua mirror of a rule: its number, its file, and the fields of a limit that it takes."""

    code: int
    file: str
    fields: tuple[str, ...]


_PACED = ("gain", "unit", "full", "capacity")

#: Kind of a limit -> its mirror. A new rule is one file in `lua/` and one line here.
RULES: dict[str, Rule] = {
    "token bucket": Rule(1, "token_bucket", _PACED),
    "leaky bucket": Rule(1, "token_bucket", _PACED),
    "leaky bucket queue": Rule(2, "leaky_queue", _PACED),
    "fixed window": Rule(3, "fixed_window", ("window", "count", "aligned")),
    "sliding window counter": Rule(4, "sliding_counter", ("window", "count", "horizon")),
    "sliding window log": Rule(5, "sliding_log", ("window", "count")),
}

_STATE = struct.Struct("<5d")
_LOG = struct.Struct("<4d")
_HIT = struct.Struct("<B7d")


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
    """One limit under one prefix: the encoded parts that are the same for every call."""

    # fmt: off
    __slots__ = ("birth_us", "capacity", "fingerprint", "head", "hit", "hit_parts", "is_plain", "limit", "name", "named", "names",
                 "numbers", "registry", "rule", "since_us")
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
        self.hit = self.encode_hit(1)
        self.hit_parts = frozenset(("hit", self.rule.file))
        self.birth_us: int | None = None  # when the limit was first registered in this Redis; only a ramp needs it
        self.since_us: int | None = None  # when this rate was first used under its name; None: not registered yet
        #: Whether the fast paths can decide it: a hit is sent as numbers only.
        self.is_plain = not limit.logs and limit.ramp == 0

    def encode_hit(self, cost: int) -> bytes:
        return _HIT.pack(self.rule.code, self.fingerprint, cost, *self.numbers)

    def unseen(self) -> tuple[State, int]:
        """The state of an unseen key, and when (µs) it has filled up."""
        limit = self.limit
        if self.birth_us is None:
            raise ConfigurationError(f"{limit}: its birth is unknown; register the limit before the first decision")
        return limit.new(self.birth_us), (self.birth_us // limit.tick + limit.ramp) * limit.tick


def entry_of(names: KeyNames, named: NamedLimit) -> LimitEntry:
    """The entry of a limit, created at its first use."""
    entry = names.entries.get(named)
    if entry is None:
        entry = names.entries[named] = LimitEntry(names, named)
    return entry


class StoredState(NamedTuple):
    """A decoded value: its fingerprint, when it was written (µs), the state, and the whole key if its name is a hash."""

    fingerprint: int
    written_us: int
    state: State
    key: str | None


def decode_value(limit: Limit, value: bytes) -> StoredState:
    if limit.logs:
        print_, written, base, n = map(int, _LOG.unpack_from(value))
        numbers = struct.unpack_from(f"<{2 * n}d", value, _LOG.size)
        entries, total = [], base
        for moment, upto in zip(numbers[::2], numbers[1::2], strict=True):
            entries.append((int(moment), int(upto) - total))
            total = int(upto)
        state: State = (tuple(entries), 0, 0)
        tail = value[_LOG.size + 16 * n :]
    else:
        print_, written, *three = map(int, _STATE.unpack_from(value))
        state = tuple(three)
        tail = value[_STATE.size :]
    return StoredState(print_, written, state, key_text(tail) if tail else None)


def encode_log(entries: Sequence[tuple[int, int]]) -> bytes:
    """(moment, cost) pairs as a log is stored."""
    numbers, total = [0.0, 0.0, 0.0, float(len(entries))], 0
    for moment, cost in entries:
        total += cost
        numbers += [moment, total]
    return struct.pack(f"<{len(numbers)}d", *numbers)
