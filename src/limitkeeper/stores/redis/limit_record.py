"""The registry of a limit in Redis, a small hash: whose digest it is, when the limit was born, and the rates of its name.

    identity    the limiter's name, the limit's name, the rule: tells two limits with one digest apart
    birth       µs, written once: the state of an unseen key of a limit with `initial` depends on it
    <hex>       one field per fingerprint: "since text", when that rate was first used, and the limit

A limit is registered before its first use. A state written under another rate is converted as MemoryStore does it, at the moment
when the new rate was first used.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.limit_parser import parse_limit
from ...errors import ConfigurationError
from .codec import LimitEntry, State, decode_value, encode_log, entry_of
from .key_names import KeyNames, join_parts, key_text
from .script_builder import OPERATIONS
from .script_request import LENGTH, ONE, STATE, Converted, ScriptRequest, T, encode_claims, parts_of

#: Registries by their key, each as HGETALL returns it.
Registries = Mapping[bytes, Mapping[bytes, bytes]]

#: A registry lives at least so long after its limit was last registered, in ms: 400 days. Longer where a state may.
_KEPT_MS = 400 * 86_400_000


class RegisterRequest(ScriptRequest[None]):
    """Registers a limit; decoding sets the birth and the first use of its entry."""

    def __init__(self, names: KeyNames, named: NamedLimit, now_us: int | None = None) -> None:
        entry = entry_of(names, named)
        self.entries = [entry]
        texts = (b"%x" % entry.fingerprint, str(entry.limit).encode(), _identity(named))
        packed = b"".join(LENGTH.pack(len(text)) + text for text in texts)
        body = struct.pack("<Bd", OPERATIONS["register"], _kept_ms(entry)) + packed
        self._encode(parts_of("register", ()), [entry.registry], body, now_us)

    def decode(self, reply: bytes, at: int) -> int:
        found = []
        for _ in range(3):
            (size,) = LENGTH.unpack_from(reply, at)
            at += LENGTH.size + size
            found.append(reply[at - size : at])
        (entry,), (birth, rate, identity) = self.entries, found
        if identity != _identity(entry.named):
            raise ConfigurationError(
                f"{entry.named.identity} and {key_text(identity)!r} have the same digest {entry.registry!r}; rename one of them"
            )
        entry.birth_us, entry.since_us = int(birth), _since(rate)
        self._done(None)
        return at


class LoadRequest(ScriptRequest[None]):
    """Writes a state, as `decode_item` returned it, under a key, replacing what is there."""

    def __init__(self, names: KeyNames, named: NamedLimit, key: str, state: State, now_us: int | None = None) -> None:
        entry = entry_of(names, named)
        self.entries = [entry]
        parts = [bytes((OPERATIONS["load"],))]
        keys = encode_claims(parts, [entry], [Claim(named, key, 0)])
        packed = encode_log(state[0]) if entry.limit.logs else STATE.pack(*state)  # type: ignore[arg-type]
        parts += [LENGTH.pack(len(packed)), packed]
        self._encode(parts_of("load", [entry]), keys, b"".join(parts), now_us)

    def decode(self, reply: bytes, at: int) -> int:
        self._done(None)
        return at + ONE.size


def stale_registries(request: ScriptRequest[T]) -> list[bytes]:
    """The registries that `convert_stale` needs."""
    return [entry.registry for entry, raw in zip(request.entries, request.stale or (), strict=False) if raw]


def convert_stale(request: ScriptRequest[T], registries: Registries) -> ScriptRequest[T]:
    """The request to send after a stale one: with its states converted to the limits' units."""
    states: list[Converted | None] = []
    for entry, raw in zip(request.entries, request.stale or (), strict=True):
        fields = registries.get(entry.registry, {})
        states.append(Converted(raw, _convert(entry, raw, fields, request.found_us)) if raw else None)
    return request.with_states(states)


def decode_item(
    names: KeyNames, named: NamedLimit, redis_key: bytes, value: bytes, fields: Mapping[bytes, bytes], now_us: int
) -> tuple[str, State]:
    """(key, state in the limit's units) of a stored value. `fields`: the limit's registry."""
    entry = entry_of(names, named)
    key = names.parse(redis_key)
    return str(decode_value(entry.limit, value).key if key is None else key), _convert(entry, value, fields, now_us)


def _convert(entry: LimitEntry, raw: bytes, fields: Mapping[bytes, bytes], now_us: int) -> State:
    """A state in its limit's units. One of an unknown rate counts as fully used: nothing is forgiven."""
    limit = entry.limit
    stored = decode_value(limit, raw)
    if stored.fingerprint == entry.fingerprint or limit.logs:
        return stored.state
    old = fields.get(b"%x" % stored.fingerprint)
    converted: State
    if old is None:
        converted = limit.give_back(limit.new(now_us), now_us // limit.tick, -limit.capacity, -1)
    else:
        mine = fields.get(b"%x" % entry.fingerprint)
        moment = now_us if mine is None else min(now_us, _since(mine))
        converted = limit.convert(parse_limit(old.partition(b" ")[2].decode()), stored.state, moment)  # type: ignore[arg-type]
    return converted


def _identity(named: NamedLimit) -> bytes:
    return b"\n".join(map(join_parts, named.identity))


def _since(field: bytes) -> int:
    """When a rate was first used (µs), from its field of a registry."""
    return int(field.partition(b" ")[0])


def _kept_ms(entry: LimitEntry) -> int:
    if entry.names.marked:
        return 3_600_000
    limit = entry.limit
    whole_us = limit.capacity * limit.period // limit.count + 2 * limit.period
    return max(_KEPT_MS, min(2 * whole_us // 1000, 10**15))
