"""Encodes limits for the scripts and decodes the states that the scripts store.

A limit is sent as the number of its rule, a fingerprint, its tick and four numbers of the rule, all of them doubles: Lua has no
other number, each of these is an integer below 2^53, and a double is read in one step. A state is stored as fingerprint, time of
writing (µs) and the rule's three integers, 40 bytes; a log as its header and its entries.

The fingerprint is 52 bits of the limit's canonical text. A key on which several rates of one name are in use holds a block for
each, with the numbers of that rate, so that any script can read it (`lua/rates.lua`). Only for a value of 40 bytes that another
rate has written does the entry that meets it note that rate's numbers, of this process or of the registry, and send them from
then on.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...algorithms.all_of import seeded
from ...algorithms.claim import NamedLimit
from ...algorithms.limit import Limit
from ...algorithms.limit_parser import parse_limit
from ...errors import ConfigurationError, StoreUnavailable
from .key_names import KeyNames, key_text

#: A state as the rules see it: three integers, or a log's ((moment, cost), …) and two zeros.
State = tuple[object, ...]

#: The registry of a limit as HGETALL returns it; and several, by their keys.
Registry = Mapping[bytes, bytes]
Registries = Mapping[bytes, Registry]


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

#: So many registered limits and sets of limits are cached.
MAX_CACHED = 4096
#: So many other rates of its name does a limit send along.
MAX_MET = 8
#: So many decisions are made without the fast path once a key with several rates, or with a reset marker, was met. Then it is
#: tried again: such keys may be gone, and one more round trip in so many decisions costs nothing.
DECISIONS_WITHOUT_FAST_PATH = 10_000
_HEADER = struct.Struct("<2d")
_STATE = struct.Struct("<5d")
_LOG = struct.Struct("<4d")
_BLOCK = struct.Struct("<9d")
_RATE = struct.Struct("<6d")
_HIT = struct.Struct("<B7d")


def rule_of(limit: Limit) -> Rule:
    found = RULES.get(type(limit).kind)
    if found is None:
        raise ConfigurationError(f"{limit}: RedisStore has no Lua mirror of this rule; use one of: {', '.join(RULES)}")
    return found


def fingerprint(text: str) -> int:
    """52 bits of a limit's canonical text: an integer that a double holds."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 12


class LimitEntry:
    """One limit under one prefix: the encoded parts that are the same for every call."""

    # fmt: off
    __slots__ = ("birth_us", "capacity", "fingerprint", "head", "hit", "hit_parts", "is_plain", "limit", "met", "name", "named",
                 "names", "numbers", "registry", "rule", "since_us", "users",
                 "without_fast_path")
    # fmt: on

    def __init__(self, names: KeyNames, named: NamedLimit) -> None:
        limit = named.limit
        self.names, self.named, self.limit, self.name = names, named, limit, named.name
        self.rule = rule_of(limit)
        self.registry = names.registry(named)
        self.head = names.head(named)
        self.capacity = limit.capacity
        self.fingerprint = fingerprint(str(limit))
        self.numbers = numbers_of(limit)
        self.hit = self.encode_hit(1)
        self.hit_parts = frozenset(("hit", self.rule.file))
        self.birth_us: int | None = None  # when the limit was first registered in this Redis; only a ramp needs it
        self.since_us: int | None = None  # when this rate was first used under its name; None: not registered yet
        #: Whether the fast paths can decide it: a hit is sent as numbers only.
        self.is_plain = not limit.logs and limit.ramp == 0
        self.without_fast_path = 0  # so many decisions more
        self.users = 0  # limiters and policies that have registered it
        self.met: dict[int, bytes] = {}  # other rates of this name, encoded, by fingerprint

    def encode_hit(self, cost: int) -> bytes:
        return _HIT.pack(self.rule.code, self.fingerprint, cost, *self.numbers)

    def needs_registry(self, raw: bytes) -> bool:
        """Whether a value that could not be read was written by a rate that this limit has not met yet."""
        try:
            written_by = int(_HEADER.unpack_from(raw)[0])
        except (ValueError, OverflowError, struct.error):
            raise StoreUnavailable(f"{raw[:40]!r} is no state that limitkeeper has written; reset its key") from None
        return self._is_unmet(written_by) and self.rate({}, written_by) is None

    def _is_unmet(self, print_: int) -> bool:
        return print_ >= 0 and print_ != self.fingerprint and print_ not in self.met

    def rate(self, registry: Registry, print_: int) -> Limit | None:
        """The limit of this name with a fingerprint: one that is used here or is in the registry; None when neither has it."""
        for other in list(self.names.entries.values()):
            if other.fingerprint == print_ and other.registry == self.registry:
                return other.limit
        return rate_of(registry, print_)

    def meet(self, raw: bytes, registry: Registry) -> None:
        """Learns from a value that the fast path could not read: the rate that wrote it."""
        written_by = int(_HEADER.unpack_from(raw)[0])
        if written_by == self.fingerprint:  # from the future: the clock went back
            return
        self.is_plain, self.without_fast_path = False, DECISIONS_WITHOUT_FAST_PATH
        self.names.limit_sets.clear()
        if self._is_unmet(written_by):
            while len(self.met) >= MAX_MET:
                self.met.pop(next(iter(list(self.met)), 0), None)
            limit = self.rate(registry, written_by)
            self.met[written_by] = _RATE.pack(written_by, *((0.0,) * 5 if limit is None else numbers_of(limit)))

    def forget_unknown(self) -> None:
        """Forgets rates that no registry had: it may have them later."""
        self.met = {print_: rate for print_, rate in list(self.met.items()) if _RATE.unpack(rate)[1]}

    def try_fast_path_later(self) -> None:
        """Counts a decision without the fast path."""
        self.without_fast_path -= 1
        if self.without_fast_path <= 0:  # below 0: two threads have counted at once
            self.without_fast_path = 0
            self.is_plain = not self.limit.logs and self.limit.ramp == 0
            self.names.limit_sets.clear()

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


def registered_entry(names: KeyNames, named: NamedLimit) -> LimitEntry | None:
    """The entry of a limit that is registered."""
    found = names.registered.get(id(named))
    if found is not None:
        return found[1]
    entry = names.entries.get(named)
    if entry is None or entry.since_us is None:
        return None
    if len(names.registered) >= MAX_CACHED:
        names.registered.clear()
    names.registered[id(named)] = (named, entry)
    return entry


def numbers_of(limit: Limit) -> tuple[float, ...]:
    """The tick and the four numbers of a limit's rule."""
    numbers = [float(getattr(limit, field)) for field in rule_of(limit).fields]
    return (float(limit.tick), *numbers, *[0.0] * (4 - len(numbers)))


def rate_of(registry: Registry, print_: int) -> Limit | None:
    """The limit with this fingerprint; None when the registry does not have it."""
    field = registry.get(b"%x" % print_)
    return None if field is None else parse_limit(field.partition(b" ")[2].decode())


def decode_value(limit: Limit, value: bytes) -> tuple[list[tuple[int, State]], str | None]:
    """A stored value: (fingerprint, state) of each rate (0 and the state of a log), and the whole key if its name is a hash."""
    first, rates = int(_HEADER.unpack_from(value)[0]), list[tuple[int, State]]()
    if limit.logs:
        base, count = _LOG.unpack_from(value)[2:]
        base, n = int(base), int(count)
        numbers = struct.unpack_from(f"<{2 * n}d", value, _LOG.size)
        entries, total = [], base
        for moment, upto in zip(numbers[::2], numbers[1::2], strict=True):
            entries.append((int(moment), int(upto) - total))
            total = int(upto)
        if entries or first >= 0:
            rates.append((0, (tuple(entries), 0, 0)))
        end = _LOG.size + 16 * (n + int(count % 1 * 64) + (first < 0))  # steps of the clock, and a reset marker
    elif first < 0:
        blocks = _BLOCK.iter_unpack(value[_HEADER.size : _HEADER.size - first * _BLOCK.size])
        rates += [(int(block[0]), tuple(map(int, block[6:]))) for block in blocks if block[0]]
        end = _HEADER.size - first * _BLOCK.size
    else:
        rates.append((first, tuple(map(int, _STATE.unpack_from(value)[2:]))))
        end = _STATE.size
    return rates, key_text(value[end:]) if len(value) > end else None


def encode_log(entries: Sequence[tuple[int, int]]) -> bytes:
    """(moment, cost) pairs as a log is stored."""
    numbers, total = [0.0, 0.0, 0.0, float(len(entries))], 0
    for moment, cost in entries:
        total += cost
        numbers += [moment, total]
    return struct.pack(f"<{len(numbers)}d", *numbers)


def decode_item(
    entry: LimitEntry, redis_key: bytes, value: bytes, registry: Registry, now_us: int, own: bool = False
) -> tuple[str, State] | None:
    """(key, state under this limit) of a stored value: its own, or that of a rate that is new to the key (`own`: None). None: no
    state. A rate that neither this process nor the registry has counts as fully used."""
    limit = entry.limit
    rates, whole = decode_value(limit, value)
    if not rates:
        return None
    key = str(whole) if (found := entry.names.parse(redis_key)) is None else found
    state = dict(rates).get(0 if limit.logs else entry.fingerprint)
    if own and (state is None or (limit.logs and abs(_HEADER.unpack_from(value)[0]) != limit.window)):
        return None
    if state is None:
        amount = 0
        for print_, held in rates:
            other = entry.rate(registry, print_)
            amount = max(amount, limit.capacity if other is None else other.used(held, now_us // other.tick))  # type: ignore[arg-type]
        state = seeded(limit, min(int(registry.get(b"birth", now_us)), now_us), now_us, amount)
    return key, state


def since_us(field: bytes) -> int:
    """When a rate was first used (µs), from its field of a registry."""
    return int(field.partition(b" ")[0])
