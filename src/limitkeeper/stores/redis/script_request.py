"""Encodes the operations of a store into script requests and decodes their replies.

`keys` and `body` are sent, `decode` takes the reply. The bytes of a request and of a reply are self-delimiting, so any number of
requests form one script call by concatenation (`encode_call`, `decode_call`). Times in a reply are integer microseconds counted
from the server's now, exact within 285 years (2^53 µs).

A key that has other rates of its name is not decided on by a script that lacks what it takes to read it: the request is `stale`,
with the bytes of the value. `again` makes the request to send next, with the numbers of that rate and `lua/rates.lua`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ...algorithms.all_of import join_replies
from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.constants import WAS_RESET
from ...decision import Decision
from ...errors import ConfigurationError, StoreUnavailable
from ..contract import Booking
from .key_names import MAX_KEY, RESERVED, KeyNames, join_parts, key_bytes, key_text, tag
from .limit_and_state_codec import MAX_CACHED, LimitEntry, Registries, State, encode_log, entry_of, since_us
from .request import Request, T
from .script_builder import OPERATIONS, Script, script_of

Claims = Sequence[Claim]
Entries = Sequence[LimitEntry]

_NOW = struct.Struct("<d")
_STATE = struct.Struct("<3d")
_LENGTH = struct.Struct("<I")
_ONE = struct.Struct("<q")
_TWO = struct.Struct("<2q")
_FOUR = struct.Struct("<4q")
_CLAIM = struct.Struct("<BB7d")
_CHARGE = struct.Struct("<dddB")
_STATES = struct.Struct("<6d")
#: A charge of another rate: its fingerprint, and its states before and after.
_OTHER = struct.Struct("<7q")
_DECIDE = struct.Struct("<BHBBdd")
_GIVE_BACK = struct.Struct("<BH")
_REBOOK = struct.Struct("<BI")
_BOOKING = struct.Struct("<HBdd")
_CLOCK = frozenset(("clock",))
_RATES = frozenset(("rates",))
#: Lua passes a bounded number of arguments to MGET (`hit_all.lua`).
_MAX_UNPACKED = 1000


#: A registry lives at least so long after its limit was last registered, in ms: 400 days. Longer where a state may.
_KEPT_MS = 400 * 86_400_000
#: A reset marker is kept for as long as the limit takes to fill up, within these bounds.
_MIN_MARKED_US, _MAX_MARKED_US = 3_600_000_000, 86_400_000_000


class DecideOptions(NamedTuple):
    """The options of `Store.decide`, and the time that the request carries (None: the server's). `first`: a peek that a charge
    may follow, which counts as the first use of its rates."""

    max_wait_us: int = 0
    commit: bool = True
    now_us: int | None = None
    not_before_us: int = 0
    remember: bool = False
    first: bool = False

    def is_hit(self) -> bool:
        return self.commit and not (self.max_wait_us or self.not_before_us or self.remember)


def _layout_of(sizes: Sequence[int]) -> tuple[struct.Struct, tuple[int, ...]]:
    """A start and then so many numbers for each limit: their format, and the position of the first of each."""
    return struct.Struct(f"<{1 + sum(sizes)}q"), tuple(accumulate(sizes[:-1], initial=1))


class LimitSet:
    """The limits of a decision: the encoded parts that are the same for every call on them."""

    # fmt: off
    __slots__ = ("entries", "files", "heads", "hit_all", "hit_parts", "is_plain", "nameds", "parts", "with_states",
                 "without_states")
    # fmt: on

    def __init__(self, entries: Entries, nameds: Sequence[NamedLimit]) -> None:
        self.entries, self.nameds = entries, nameds
        self.files = frozenset(entry.rule.file for entry in entries)
        self.parts = _parts_of("decide", entries)
        self.heads = [entry.head for entry in entries]
        self.is_plain = len(entries) <= _MAX_UNPACKED and all(entry.is_plain for entry in entries)
        self.hit_parts = self.files | {"hit_all"}
        self.hit_all = self.encode_hit([1] * len(entries))
        self.without_states = _layout_of([4] * len(entries))
        self.with_states = _layout_of([5 if entry.limit.logs else 11 for entry in entries])

    def encode_hit(self, costs: Sequence[int]) -> bytes:
        pairs = zip(self.entries, costs, strict=True)
        return struct.pack("<BH", OPERATIONS["hit_all"], len(costs)) + b"".join([entry.encode_hit(cost) for entry, cost in pairs])

    def decode(self, reply: bytes, at: int, claims: Claims, now_us: int, with_states: bool) -> tuple[Decision, int]:
        """The Decision at a position of a reply, and where it ends. `with_states`: the claims remember the states."""
        layout, positions = self.with_states if with_states else self.without_states
        numbers = layout.unpack_from(reply, at)
        decision = join_replies(claims, numbers, positions, now_us, numbers[0])
        at += layout.size
        return decision, self._decode_states(reply, at, claims, numbers) if with_states else at

    def _decode_states(self, reply: bytes, at: int, claims: Claims, numbers: tuple[int, ...]) -> int:
        """Has claims remember their charges: reset marker, states before and after, and those of other rates from `at` on."""
        for entry, claim, i in zip(self.entries, claims, self.with_states[1], strict=True):
            claim.reset_id = numbers[i + 4]
            if claim.cost > 0:
                a, b, c, new_a, new_b, new_c = (0,) * 6 if entry.limit.logs else numbers[i + 5 : i + 11]
                claim.remember((a, b, c), (new_a, new_b, new_c), None, numbers[0])
        for claim in claims:
            end = at + 1 + reply[at] * _OTHER.size
            claim.others = tuple(_OTHER.iter_unpack(reply[at + 1 : end])) if end > at + 1 else None
            at = end
        return at


def limit_set_of(names: KeyNames, claims: Claims) -> LimitSet:
    """The limits of some claims; cached once all of them are registered."""
    key = tuple([id(claim.named) for claim in claims])
    found = names.limit_sets.get(key)
    if found is None:
        nameds = [claim.named for claim in claims]
        found = LimitSet([entry_of(names, named) for named in nameds], nameds)
        if all(entry.since_us is not None for entry in found.entries):
            if len(names.limit_sets) >= MAX_CACHED:
                names.limit_sets.clear()
            names.limit_sets[key] = found
    return found


class ScriptRequest(Request[T]):
    """One encoded operation. `parts` are those of its script."""

    __slots__ = ("_arguments", "body", "entries", "keys", "now_us", "parts", "stale")

    parts: frozenset[str]
    keys: list[bytes]
    body: bytes
    entries: Entries  # the limits of its claims, in order
    stale: list[bytes] | None  # after a stale reply, for each claim: the value that could not be read, b"" where there is none
    now_us: int | None  # the time that the request carries; None: the server's
    _arguments: tuple[Any, ...]  # those that it was made of

    def _encode(self, parts: frozenset[str], keys: list[bytes], body: bytes, now_us: int | None) -> None:
        self.pending, self.in_flight, self.stale, self.now_us = True, False, None, now_us
        self.keys, self.body, self.parts = keys, body, parts
        if now_us is not None:
            self.body = _NOW.pack(now_us) + body
            self.parts |= _CLOCK

    def decode(self, reply: bytes, at: int) -> int:
        """Decodes this request's part of a reply; returns where the next one begins."""
        raise NotImplementedError

    def stale_registries(self) -> list[bytes]:
        """The registries that `again` needs."""
        pairs = zip(self.entries, self.stale or (), strict=False)
        return [entry.registry for entry, raw in pairs if raw and entry.needs_registry(raw)]

    def again(self, registries: Registries) -> ScriptRequest[T]:
        """The request to send after a stale one: with the rates that wrote what it could not read."""
        for entry, raw in zip(self.entries, self.stale or (), strict=True):
            if raw:
                entry.meet(raw, registries.get(entry.registry, {}))
        made = self._general()
        for entry in self.entries:
            entry.forget_unknown()
        return made

    def _general(self) -> ScriptRequest[T]:
        """The same operation, not on a fast path."""
        return type(self)(*self._arguments)

    def _done(self, answer: T) -> None:
        self.answer, self.pending = answer, False

    def _decode_stale(self, reply: bytes, at: int) -> int:
        self.stale, at = _unpack_texts(reply, at + _TWO.size, len(self.entries))
        return at


#: A request whatever its answer.
AnyRequest = ScriptRequest[Any]


def _pack_text(text: bytes) -> bytes:
    return _LENGTH.pack(len(text)) + text


def _unpack_texts(reply: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    """So many texts, each behind its length, at a position of a reply; and where they end."""
    found = []
    for _ in range(count):
        (size,) = _LENGTH.unpack_from(reply, at)
        at += _LENGTH.size + size
        found.append(reply[at - size : at])
    return found, at


def _parts_of(operation: str, entries: Entries) -> frozenset[str]:
    """The parts of the script of an operation on some limits."""
    found = frozenset([operation, *[entry.rule.file for entry in entries]])
    return found | _RATES if any(entry.without_fast_path for entry in entries) else found


def _encode_claims(parts: list[bytes], entries: Entries, claims: Claims, charged_at: int | None = None) -> list[bytes]:
    """Appends encoded claims (with `charged_at`: and what was charged then) to `parts`; returns their keys."""
    keys = []
    for entry, claim in zip(entries, claims, strict=True):
        data = key_bytes(claim.key)
        keys.append(entry.head + tag(data) + b"}")
        more, extras = [], 0
        if entry.limit.ramp > 0:
            first, full_at_us = entry.unseen()
            extras |= 1
            more.append(_STATE.pack(first[0], first[1], full_at_us))
        if len(data) > MAX_KEY:
            extras |= 2
            more.append(_pack_text(data))
        if entry.without_fast_path:
            entry.try_fast_path_later()
            if entry.met:
                extras |= 4
                met = list(entry.met.values())
                more += [bytes((len(met),)), *met]
        parts.append(_CLAIM.pack(entry.rule.code, extras, entry.fingerprint, claim.cost, *entry.numbers))
        parts += more
        if charged_at is not None:
            around = None if entry.limit.logs else claim.remembered()
            others = (around[2] if around else None) or ()
            start_us = _start_of(entry, claim, keys[-1], charged_at)
            parts.append(_CHARGE.pack(claim.charged, start_us, claim.reset_id, 0 if around is None else 1 + len(others)))
            if around is not None:
                parts += [_STATES.pack(*around[0], *around[1]), *(_OTHER.pack(*other) for other in others)]
    return keys


def _start_of(entry: LimitEntry, claim: Claim, key: bytes, charged_at: int) -> int:
    """The start of a claim's charge. That of a log, whose entry is found by it, may differ from that of its decision: what the
    claim shows counts before what was noted, since two decisions over several slots may have one start on a key."""
    own_us = claim.charged_at() if entry.limit.logs else -1
    return own_us if own_us >= 0 else entry.names.starts.get((charged_at, key), charged_at)


class HitRequest(ScriptRequest[Decision]):
    """A hit on one limit: the fast path (`hit.lua`)."""

    __slots__ = ("claim", "cost", "entry", "key")

    def __init__(
        self, entry: LimitEntry, key: str, data: bytes, cost: int, now_us: int | None, claim: Claim | None = None
    ) -> None:
        self.entry, self.key, self.cost, self.claim = entry, key, cost, claim
        body = entry.hit if cost == 1 else entry.encode_hit(cost)
        self._encode(entry.hit_parts, [entry.head + data + b"}"], body, now_us)

    def decode(self, reply: bytes, at: int) -> int:
        now_us, left, retry_us, reset_us = _FOUR.unpack_from(reply, at)
        entry = self.entry
        if now_us < 0:
            self.entries = [entry]
            return self._decode_stale(reply, at)
        self.answer = Decision(retry_us == 0, entry.capacity, left, retry_us, reset_us, 0, now_us, entry.name)
        self.pending = False
        return at + 32

    def _general(self) -> DecideRequest:
        claim = self.claim or Claim(self.entry.named, self.key, self.cost)
        return DecideRequest(self.entry.names, [claim], DecideOptions(now_us=self.now_us), general=True)


class DecideRequest(ScriptRequest[Decision]):
    """A decision on any number of limits. Hits on plain limits use a fast path (`hit_all.lua`) whose body is cached."""

    __slots__ = ("claims", "limits", "remember")

    def __init__(self, names: KeyNames, claims: Claims, options: DecideOptions, general: bool = False) -> None:
        self._arguments = (names, claims, options, True)
        self.limits = limits = limit_set_of(names, claims)
        self.claims, self.entries = claims, limits.entries
        max_wait_us, commit, now_us, not_before_us, _, first = options
        self.remember = False  # what the fast path charges has seen no reset marker
        is_hit = limits.is_plain and not general and options.is_hit()
        if not is_hit or not self._encode_hit(limits, claims, now_us):
            self.remember = commit
            how = 2 if first else commit
            parts = [_DECIDE.pack(OPERATIONS["decide"], len(claims), how, commit, max_wait_us, not_before_us)]
            keys = _encode_claims(parts, limits.entries, claims)
            self._encode(limits.parts, keys, b"".join(parts), now_us)

    def _encode_hit(self, limits: LimitSet, claims: Claims, now_us: int | None) -> bool:
        """Encodes the hot path. False: a cost of 0 or a long key needs the general form."""
        keys, ones, last, suffix = [], True, None, b""
        for head, claim in zip(limits.heads, claims, strict=True):
            key, cost = claim.key, claim.cost
            if cost != 1:
                if cost <= 0:
                    return False
                ones = False
            if key is not last:  # mostly all limits have the same key
                data = key_bytes(key)
                if len(data) > MAX_KEY:
                    return False
                last, suffix = key, tag(data) + b"}"
            keys.append(head + suffix)
            claim.reset_id = 0
        body = limits.hit_all if ones else limits.encode_hit([claim.cost for claim in claims])
        self._encode(limits.hit_parts, keys, body, now_us)
        return True

    def decode(self, reply: bytes, at: int) -> int:
        now_us, start_us = _TWO.unpack_from(reply, at)
        if now_us < 0:
            return self._decode_stale(reply, at)
        with_states = self.remember and start_us >= 0
        self.answer, at = self.limits.decode(reply, at + 8, self.claims, now_us, with_states)
        self.pending = False
        return at


class GiveBackRequest(ScriptRequest[bool]):
    """Gives charges back. The answer is False when all of them are from before a reset of their keys."""

    __slots__ = ()

    def __init__(self, names: KeyNames, claims: Claims, charged_at: int, now_us: int | None) -> None:
        self._arguments = (names, claims, charged_at, now_us)
        self.entries = [entry_of(names, claim.named) for claim in claims]
        parts = [_GIVE_BACK.pack(OPERATIONS["give_back"], len(claims))]
        keys = _encode_claims(parts, self.entries, claims, charged_at)
        self._encode(_parts_of("give_back", self.entries), keys, b"".join(parts), now_us)

    def decode(self, reply: bytes, at: int) -> int:
        now_us, given = _TWO.unpack_from(reply, at)
        if now_us < 0:
            return self._decode_stale(reply, at)
        self._done(given > 0)
        return at + _TWO.size


class RebookRequest(ScriptRequest[list[Decision | None]]):
    """Removes bookings from a queue and moves the others up (`Store.rebook`); None for a booking that keeps its start."""

    __slots__ = ("limit_sets",)

    def __init__(self, names: KeyNames, bookings: Sequence[Booking], now_us: int | None) -> None:
        self._arguments = (names, bookings, now_us)
        self.limit_sets = [limit_set_of(names, booking.claims) for booking in bookings]
        self.entries = [entry for limits in self.limit_sets for entry in limits.entries]
        parts, keys = [_REBOOK.pack(OPERATIONS["rebook"], len(bookings))], list[bytes]()
        for limits, (claims, charged_at, deadline_us, stays, _) in zip(self.limit_sets, bookings, strict=True):
            parts.append(_BOOKING.pack(len(claims), stays, charged_at, -1 if deadline_us is None else deadline_us))
            keys += _encode_claims(parts, limits.entries, claims, charged_at)
        self._encode(_parts_of("rebook", self.entries) | _RATES, keys, b"".join(parts), now_us)

    def decode(self, reply: bytes, at: int) -> int:
        (now_us,) = _ONE.unpack_from(reply, at)
        if now_us < 0:
            return self._decode_stale(reply, at)
        at += 8
        answer: list[Decision | None] = []
        for limits, booking in zip(self.limit_sets, self._arguments[1], strict=True):
            moved, decision = reply[at], None
            at += 1
            if moved == 2:
                mark_as_reset(booking.claims)
            elif moved:
                decision, at = limits.decode(reply, at, booking.claims, now_us, True)
            answer.append(decision)
        self._done(answer)
        return at


class RegisterRequest(ScriptRequest[None]):
    """Registers a limit before its first use; decoding sets the birth and the first use of its entry.

    The registry is a small hash: `identity` tells two limits with one digest apart; `birth` (µs, written once) is what the state
    of an unseen key of a limit with `initial` depends on; a field per fingerprint, "since text", says when that rate was first
    used, and the limit.
    """

    def __init__(self, names: KeyNames, named: NamedLimit, now_us: int | None = None) -> None:
        entry = entry_of(names, named)
        self.entries = [entry]
        texts = (b"%x" % entry.fingerprint, str(entry.limit).encode(), _identity(named))
        body = struct.pack("<Bd", OPERATIONS["register"], _kept_ms(entry)) + b"".join(map(_pack_text, texts))
        self._encode(_parts_of("register", ()), [entry.registry], body, now_us)

    def decode(self, reply: bytes, at: int) -> int:
        (birth, rate, identity), at = _unpack_texts(reply, at, 3)
        (entry,) = self.entries
        if identity != _identity(entry.named):
            raise ConfigurationError(
                f"{entry.named.identity} and {key_text(identity)!r} have the same digest {entry.registry!r}; rename one of them"
            )
        entry.birth_us, entry.since_us = int(birth), since_us(rate)
        self._done(None)
        return at


class LoadRequest(ScriptRequest[None]):
    """Writes a state, as `decode_item` returned it, under a key, replacing that of this rate."""

    def __init__(self, names: KeyNames, named: NamedLimit, key: str, state: State, now_us: int | None = None) -> None:
        self._arguments = (names, named, key, state, now_us)
        if type(key) is not str:
            raise TypeError(f"key: expected a str, got {type(key).__name__}: {key!r}")
        entry = entry_of(names, named)
        self.entries, used = [entry], _parts_of("load", [entry])
        parts = [bytes((OPERATIONS["load"],))]
        keys = _encode_claims(parts, [entry], [Claim(named, key, 0)])
        parts.append(_pack_text(encode_log(state[0]) if entry.limit.logs else _STATE.pack(*state)))  # type: ignore[arg-type]
        self._encode(used, keys, b"".join(parts), now_us)

    def decode(self, reply: bytes, at: int) -> int:
        if _ONE.unpack_from(reply, at)[0] < 0:
            return self._decode_stale(reply, at)
        self._done(None)
        return at + _ONE.size


class ResetRequest(ScriptRequest[None]):
    """Deletes the states of a claim's key. Where there are any, a reset marker takes their place: a charge from before then gives
    nothing back any more."""

    def __init__(self, names: KeyNames, claim: Claim, now_us: int | None = None) -> None:
        entry = entry_of(names, claim.named)
        self.entries, limit = [entry], entry.limit
        parts = [bytes((OPERATIONS["reset"],))]
        keys = _encode_claims(parts, [entry], [claim])
        full_us = limit.capacity * limit.period // limit.count
        parts.append(_NOW.pack(min(max(full_us, _MIN_MARKED_US), _MAX_MARKED_US)))
        self._encode(frozenset(("reset", entry.rule.file)), keys, b"".join(parts), now_us)

    def decode(self, reply: bytes, at: int) -> int:
        self._done(None)
        return at + _ONE.size


def mark_as_reset(claims: Claims) -> None:
    """Notes that a charge that was to be given back is from before a reset of its keys."""
    for claim in claims:
        claim.reset_id = WAS_RESET


def _identity(named: NamedLimit) -> bytes:
    return b"\n".join(map(join_parts, named.identity))


def _kept_ms(entry: LimitEntry) -> int:
    if entry.names.marked:
        return 3_600_000
    limit = entry.limit
    whole_us = limit.capacity * limit.period // limit.count + 2 * limit.period
    return max(_KEPT_MS, min(2 * whole_us // 1000, 10**15))


def encode_hit(
    entry: LimitEntry, key: str, cost: int = 1, now_us: int | None = None, claim: Claim | None = None
) -> HitRequest | DecideRequest:
    """A hit on one limit: what most calls are."""
    try:  # `key_bytes` and `tag`, written out for the ordinary key
        data = key.encode()
    except UnicodeEncodeError:
        data = key_bytes(key)
    if cost <= 0 or not entry.is_plain or len(data) > MAX_KEY:
        return DecideRequest(entry.names, [claim or Claim(entry.named, key, cost)], DecideOptions(now_us=now_us))
    return HitRequest(entry, key, data if data and data[0] not in RESERVED else tag(data), cost, now_us, claim)


def encode_decide(names: KeyNames, claims: Claims, options: DecideOptions) -> HitRequest | DecideRequest:
    """A decision on claims, see `Store.decide`."""
    if len(claims) == 1 and options.is_hit():
        claim = claims[0]
        claim.reset_id = 0  # what the fast path charges has seen no reset marker
        return encode_hit(entry_of(names, claim.named), claim.key, claim.cost, options.now_us, claim)
    return DecideRequest(names, claims, options)


def encode_call(requests: Sequence[AnyRequest]) -> tuple[Script, list[bytes], bytes]:
    """One script call for all of these: the script, the keys, the body."""
    if len(requests) == 1:
        return script_of(requests[0].parts), requests[0].keys, requests[0].body
    parts = requests[0].parts
    for request in requests:
        if request.parts is not parts:
            parts |= request.parts
    return script_of(parts), [key for request in requests for key in request.keys], b"".join([one.body for one in requests])


def decode_call(requests: Sequence[AnyRequest], reply: object) -> bool:
    """Decodes the reply of a call for each request. False: it is no reply of these scripts, which were not executed. Raises
    StoreUnavailable for bytes that are none of their replies: they were executed, and are not sent again."""
    if type(reply) is not bytes:
        return False
    at = 0
    try:
        for request in requests:
            request.stale = None
            at = request.decode(reply, at)
    except (struct.error, TypeError, ValueError, IndexError, OverflowError):
        raise StoreUnavailable(f"the server gave an unexpected reply: {reply[:200]!r}") from None
    return True
