"""What Redis remembers of a limit, in one small hash: who it is, when it was born, and the rates that its name has had.

    identity    the limiter's name, the limit's name, the rule: two limits that met in one digest are told apart here
    birth       µs, written once: what an unseen key of a limit with `initial` holds depends on it
    <hex>       one field for each fingerprint: "since text", the moment from which that rate held, and the limit

A state written under another rate is converted as MemoryStore does it, up to the moment when the new rate came to hold.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.limit_parser import parse_limit
from ...errors import ConfigurationError
from .codec import LimitEntry, entry_of, read_value
from .key_names import KeyNames, key_bytes, key_text
from .script_builder import VERBS
from .script_request import LENGTH, NOW, ONE, STATE, ScriptRequest, pack_claims, parts_of

#: A registry is kept at least so long after a limiter with its limit was last made: 400 days, in ms. Longer where a state may be.
_KEPT_MS = 400 * 86_400_000
_DOUBLE = struct.Struct("<d")


class RegisterRequest(ScriptRequest):
    """Makes a limit known; the answer is its birth (µs)."""

    __slots__ = ("place",)

    def __init__(self, place: LimitEntry, now_us: int | None) -> None:
        self.place, self.now_us = place, now_us
        self.answer = self.stale = None
        self.rules = parts_of("register", (), now_us)
        self.keys = [place.registry]
        texts = (b"%x" % place.fingerprint, str(place.limit).encode(), identity(place.named))
        packed = b"".join(LENGTH.pack(len(text)) + text for text in texts)
        moment = b"" if now_us is None else NOW.pack(now_us)
        self.body = bytes((VERBS["register"][0],)) + _DOUBLE.pack(_kept_ms(place)) + packed + moment

    def places(self) -> list[LimitEntry]:
        return [self.place]

    def read(self, reply: bytes, at: int) -> int:
        found = []
        for _ in range(3):
            (size,) = LENGTH.unpack_from(reply, at)
            at += LENGTH.size + size
            found.append(reply[at - size : at])
        birth, rate, whose = found
        if whose != identity(self.place.named):
            raise ConfigurationError(
                f"{self.place.named.identity} and {key_text(whose)!r} meet under {self.place.registry!r}; rename one of them"
            )
        self.answer = self.place.birth_us = int(birth)
        self.place.since_us = since(rate)
        return at


class LoadRequest(ScriptRequest):
    """Puts a state under a key, whatever is there; the answer is True."""

    __slots__ = ("place",)

    def __init__(self, place: LimitEntry, key: str, state: Any, now_us: int | None) -> None:
        self.place, self.now_us = place, now_us
        self.answer = self.stale = None
        self.rules = parts_of("load", (place,), now_us)
        parts = [bytes((VERBS["load"][0],))]
        if now_us is not None:
            parts.append(NOW.pack(now_us))
        self.keys = pack_claims(parts, [place], [Claim(place.named, key, 0)], ())
        packed = _packed_log(state[0]) if place.limit.logs else STATE.pack(*state)
        parts += [LENGTH.pack(len(packed)), packed]
        self.body = b"".join(parts)

    def places(self) -> list[LimitEntry]:
        return [self.place]

    def read(self, reply: bytes, at: int) -> int:
        self.answer = True
        return at + ONE.size


def knowing(names: KeyNames, named: NamedLimit, now_us: int | None = None) -> ScriptRequest:
    """Asks for a limit's birth, and leaves word of its rate; to be sent before the first decision on it."""
    return RegisterRequest(entry_of(names, named), now_us)


def is_known(names: KeyNames, named: NamedLimit) -> bool:
    """Whether `knowing` was answered for this limit."""
    return entry_of(names, named).birth_us is not None


def loading(names: KeyNames, named: NamedLimit, key: str, state: Any, now_us: int | None = None) -> ScriptRequest:
    """Takes over a key's state, as `item` gave it."""
    return LoadRequest(entry_of(names, named), key, state, now_us)


def item(
    names: KeyNames, named: NamedLimit, redis_key: bytes, value: bytes, fields: Mapping[bytes, bytes], now_us: int
) -> tuple[str, Any]:
    """(key, state in the limit's units) of what lies under a name. `fields`: the limit's registry, read with HGETALL."""
    place = entry_of(names, named)
    key = names.parse(redis_key)
    if key is None:
        key = read_value(place.limit, value).key
    return str(key), in_units(place, value, fields, now_us)


def in_units(place: LimitEntry, raw: bytes, fields: Mapping[bytes, bytes], now_us: int) -> Any:
    """A state in its limit's units. Of a rate that nobody remembers, all is taken for used: nothing is forgiven."""
    limit = place.limit
    stored = read_value(limit, raw)
    if stored.fingerprint == place.fingerprint or limit.logs:
        return stored.state
    old = fields.get(b"%x" % stored.fingerprint)
    if old is None:
        return limit.give_back(limit.new(now_us), now_us // limit.tick, -limit.capacity, -1)
    mine = fields.get(b"%x" % place.fingerprint)
    moment = now_us if mine is None else min(now_us, since(mine))
    return limit.convert(parse_limit(old.partition(b" ")[2].decode()), stored.state, moment)


def since(field: bytes) -> int:
    """The moment from which a rate held, of a registry's field."""
    return int(field.partition(b" ")[0])


def identity(named: NamedLimit) -> bytes:
    return b"\n".join(b"%d:%b" % (len(part), part) for part in map(key_bytes, named.identity))


def _kept_ms(place: LimitEntry) -> int:
    if place.names.marked:
        return 3_600_000
    limit = place.limit
    whole_us = limit.capacity * limit.period // limit.count + 2 * limit.period
    return max(_KEPT_MS, min(2 * whole_us // 1000, 10**15))


def _packed_log(entries: Any) -> bytes:
    """(moment, cost) pairs as a log lies under its key."""
    numbers, total = [0.0, 0.0, 0.0, float(len(entries))], 0
    for moment, cost in entries:
        total += cost
        numbers += [moment, total]
    return struct.pack(f"<{len(numbers)}d", *numbers)
