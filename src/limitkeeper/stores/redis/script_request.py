"""Encodes the operations of a store into script requests and decodes their replies.

`keys` and `body` are sent, `decode` takes the reply. The bytes of a request and of a reply are self-delimiting, so any number of
requests form one script call by concatenation (`encode_call`, `decode_call`). Times in a reply are integer microseconds counted
from the server's now, exact within 285 years (2^53 µs).

A state that was written under another rate of its name is not decided on: the request is `stale`, with the bytes of that state.
`limit_record.convert_stale` makes the request to send next: "if the state still is these bytes, use this one instead".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.constants import MAX_WAIT
from ...decision import Decision, Decisions
from ..contract import Booking
from .codec import LimitEntry, State, entry_of
from .key_names import MAX_KEY, RESERVED, KeyNames, key_bytes, tag
from .script_builder import OPERATIONS, Script, script_of

T = TypeVar("T")

NOW = struct.Struct("<d")
STATE = struct.Struct("<3d")
LENGTH = struct.Struct("<I")
ONE = struct.Struct("<q")
TWO = struct.Struct("<2q")
_FOUR = struct.Struct("<4q")
_CLAIM = struct.Struct("<BB7d")
_CHARGE = struct.Struct("<dB")
_STATES = struct.Struct("<6d")
_DECIDE = struct.Struct("<BHBBdd")
_GIVE_BACK = struct.Struct("<BHd")
_REBOOK = struct.Struct("<BI")
_BOOKING = struct.Struct("<HBdd")
_CLOCK = frozenset(("clock",))
#: Lua passes a bounded number of arguments to MGET (`hit_all.lua`).
_MAX_UNPACKED = 1000
#: So many registered limits and sets of limits are cached.
_MAX_CACHED = 4096


class Converted(NamedTuple):
    """A state in the limit's units, and the stored bytes that it was made of."""

    raw: bytes
    state: State


class LimitSet:
    """The limits of a decision: the encoded parts that are the same for every call on them."""

    __slots__ = ("entries", "files", "heads", "hit_all", "hit_parts", "is_plain", "nameds", "reply", "reply_with_states")

    def __init__(self, entries: Sequence[LimitEntry], nameds: Sequence[NamedLimit]) -> None:
        self.entries, self.nameds = entries, nameds
        self.files = frozenset(entry.rule.file for entry in entries)
        self.heads = [entry.head for entry in entries]
        self.is_plain = len(entries) <= _MAX_UNPACKED and all(entry.is_plain for entry in entries)
        self.hit_parts = self.files | {"hit_all"}
        self.hit_all = self.encode_hit([1] * len(entries))
        self.reply = struct.Struct("<q" + "4q" * len(entries))
        self.reply_with_states = struct.Struct("<q" + "".join("4q" if entry.limit.logs else "10q" for entry in entries))

    def encode_hit(self, costs: Sequence[int]) -> bytes:
        pairs = zip(self.entries, costs, strict=True)
        return struct.pack("<BH", OPERATIONS["hit_all"], len(costs)) + b"".join([entry.encode_hit(cost) for entry, cost in pairs])


def limit_set_of(names: KeyNames, claims: Sequence[Claim]) -> LimitSet:
    """The limits of some claims; cached once all of them are registered."""
    key = tuple([id(claim.named) for claim in claims])
    found = names.limit_sets.get(key)
    if found is None:
        nameds = [claim.named for claim in claims]
        found = LimitSet([entry_of(names, named) for named in nameds], nameds)
        if all(entry.since_us is not None for entry in found.entries):
            if len(names.limit_sets) >= _MAX_CACHED:
                names.limit_sets.clear()
            names.limit_sets[key] = found
    return found


def registered_entry(names: KeyNames, named: NamedLimit) -> LimitEntry | None:
    """The entry of a limit that is registered."""
    found = names.registered.get(id(named))
    if found is not None:
        return found[1]
    entry = names.entries.get(named)
    if entry is None or entry.since_us is None:
        return None
    if len(names.registered) >= _MAX_CACHED:
        names.registered.clear()
    names.registered[id(named)] = (named, entry)
    return entry


class ScriptRequest(Generic[T]):
    """One encoded operation. `parts` are those of its script; when it is not `pending` any more, `answer` is its answer."""

    __slots__ = ("answer", "body", "entries", "found_us", "keys", "now_us", "parts", "pending", "stale")

    parts: frozenset[str]
    keys: list[bytes]
    body: bytes
    answer: T
    pending: bool
    #: The limits of its claims, in order.
    entries: Sequence[LimitEntry]
    #: After a reply that is stale: for each claim the bytes of a state that must be converted, b"" where there is none.
    stale: list[bytes] | None
    #: The store's time when the stale state was found.
    found_us: int
    #: The time that the request carries; None: the server's.
    now_us: int | None

    def _encode(self, parts: frozenset[str], keys: list[bytes], body: bytes, now_us: int | None) -> None:
        self.pending, self.stale, self.now_us = True, None, now_us
        self.keys, self.body, self.parts = keys, body, parts
        if now_us is not None:
            self.body = NOW.pack(now_us) + body
            self.parts |= _CLOCK

    def decode(self, reply: bytes, at: int) -> int:
        """Decodes this request's part of a reply; returns where the next one begins."""
        raise NotImplementedError

    def with_states(self, states: Sequence[Converted | None]) -> ScriptRequest[T]:
        """The same operation, with converted states in the place of stale ones."""
        raise NotImplementedError

    def _done(self, answer: T) -> None:
        self.answer, self.pending = answer, False

    def _decode_stale(self, reply: bytes, at: int) -> int:
        self.found_us = TWO.unpack_from(reply, at)[1]
        at += TWO.size
        self.stale = []
        for _ in self.entries:
            (size,) = LENGTH.unpack_from(reply, at)
            at += LENGTH.size
            self.stale.append(reply[at : at + size])
            at += size
        return at


#: A request whatever its answer.
AnyRequest = ScriptRequest[Any]


def parts_of(operation: str, entries: Sequence[LimitEntry]) -> frozenset[str]:
    """The parts of the script of an operation on some limits."""
    return frozenset([operation, *[entry.rule.file for entry in entries]])


def encode_claims(
    parts: list[bytes],
    entries: Sequence[LimitEntry],
    claims: Sequence[Claim],
    states: Sequence[Converted | None] = (),
    charges: bool = False,
) -> list[bytes]:
    """Appends encoded claims (with `charges`: and what was charged) to `parts`; returns their keys."""
    keys = []
    for i, (entry, claim) in enumerate(zip(entries, claims, strict=True)):
        data = key_bytes(claim.key)
        keys.append(entry.head + tag(data) + b"}")
        more, extras = [], 0
        if entry.limit.ramp > 0:
            first, full_at_us = entry.unseen()
            extras |= 1
            more.append(STATE.pack(first[0], first[1], full_at_us))
        if len(data) > MAX_KEY:
            extras |= 2
            more += [LENGTH.pack(len(data)), data]
        converted = states[i] if states else None
        if converted is not None:
            state = (0, 0, 0) if entry.limit.logs else converted.state
            extras |= 4
            more += [LENGTH.pack(len(converted.raw)), converted.raw, STATE.pack(*state)]
        parts.append(_CLAIM.pack(entry.rule.code, extras, entry.fingerprint, claim.cost, *entry.numbers))
        parts += more
        if charges:
            around = claim.remembered() if claim.cost == claim.charged and not entry.limit.logs else None
            parts.append(_CHARGE.pack(claim.charged, around is not None))
            if around is not None:
                parts.append(_STATES.pack(*around[0], *around[1]))
    return keys


class HitRequest(ScriptRequest[Decision]):
    """A hit on one limit: the fast path (`hit.lua`)."""

    __slots__ = ("cost", "entry", "key")

    def __init__(self, entry: LimitEntry, key: str, data: bytes, cost: int, now_us: int | None) -> None:
        self.entry, self.key, self.cost = entry, key, cost
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

    def with_states(self, states: Sequence[Converted | None]) -> DecideRequest:
        claims = [Claim(self.entry.named, self.key, self.cost)]
        return DecideRequest(limit_set_of(self.entry.names, claims), claims, 0, True, False, 0, self.now_us, states)


class DecideRequest(ScriptRequest[Decision]):
    """A decision on any number of limits. Hits on plain limits use a fast path (`hit_all.lua`) whose body is cached."""

    __slots__ = ("_arguments", "claims", "limits", "remember")

    def __init__(
        self,
        limits: LimitSet,
        claims: Sequence[Claim],
        max_wait_us: int,
        commit: bool,
        remember: bool,
        not_before_us: int,
        now_us: int | None,
        states: Sequence[Converted | None] = (),
    ) -> None:
        self._arguments = (limits, claims, max_wait_us, commit, remember, not_before_us, now_us)
        self.limits, self.claims, self.entries = limits, claims, limits.entries
        self.remember = commit and (remember or max_wait_us > 0)
        if (
            commit
            and limits.is_plain
            and not (max_wait_us or remember or not_before_us or states)
            and self._encode_hit(limits, claims, now_us)
        ):
            return
        parts = [_DECIDE.pack(OPERATIONS["decide"], len(claims), commit, self.remember, max_wait_us, not_before_us)]
        keys = encode_claims(parts, limits.entries, claims, states)
        self._encode(limits.files | {"decide"}, keys, b"".join(parts), now_us)

    def _encode_hit(self, limits: LimitSet, claims: Sequence[Claim], now_us: int | None) -> bool:
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
        body = limits.hit_all if ones else limits.encode_hit([claim.cost for claim in claims])
        self._encode(limits.hit_parts, keys, body, now_us)
        return True

    def decode(self, reply: bytes, at: int) -> int:
        now_us, start_us = TWO.unpack_from(reply, at)
        if now_us < 0:
            return self._decode_stale(reply, at)
        with_states = self.remember and start_us >= 0
        self.answer, at = _decode_decision(reply, at + 8, self.limits, self.claims, now_us, with_states)
        self.pending = False
        return at

    def with_states(self, states: Sequence[Converted | None]) -> DecideRequest:
        return DecideRequest(*self._arguments, states)


class GiveBackRequest(ScriptRequest[None]):
    """Gives charges back."""

    __slots__ = ("_arguments",)

    def __init__(
        self,
        names: KeyNames,
        claims: Sequence[Claim],
        charged_at: int,
        now_us: int | None,
        states: Sequence[Converted | None] = (),
    ) -> None:
        self._arguments = (names, claims, charged_at, now_us)
        self.entries = [entry_of(names, claim.named) for claim in claims]
        parts = [_GIVE_BACK.pack(OPERATIONS["give_back"], len(claims), charged_at)]
        keys = encode_claims(parts, self.entries, claims, states, charges=True)
        self._encode(parts_of("give_back", self.entries), keys, b"".join(parts), now_us)

    def decode(self, reply: bytes, at: int) -> int:
        (now_us,) = ONE.unpack_from(reply, at)
        if now_us < 0:
            return self._decode_stale(reply, at)
        self._done(None)
        return at + 8

    def with_states(self, states: Sequence[Converted | None]) -> GiveBackRequest:
        return GiveBackRequest(*self._arguments, states)


class RebookRequest(ScriptRequest[list[Decision | None]]):
    """Removes bookings from a queue and moves the others up (`Store.rebook`); None for a booking that keeps its start."""

    __slots__ = ("_arguments", "limit_sets")

    def __init__(
        self,
        names: KeyNames,
        bookings: Sequence[Booking],
        now_us: int | None,
        states: Sequence[Converted | None] = (),
    ) -> None:
        self._arguments = (names, bookings, now_us)
        self.limit_sets = [limit_set_of(names, booking.claims) for booking in bookings]
        self.entries = [entry for limits in self.limit_sets for entry in limits.entries]
        parts, keys = [_REBOOK.pack(OPERATIONS["rebook"], len(bookings))], list[bytes]()
        for limits, (claims, charged_at, deadline_us, stays, _) in zip(self.limit_sets, bookings, strict=True):
            parts.append(_BOOKING.pack(len(claims), stays, charged_at, -1 if deadline_us is None else deadline_us))
            keys += encode_claims(parts, limits.entries, claims, states[len(keys) : len(keys) + len(claims)], charges=True)
        self._encode(parts_of("rebook", self.entries), keys, b"".join(parts), now_us)

    def decode(self, reply: bytes, at: int) -> int:
        (now_us,) = ONE.unpack_from(reply, at)
        if now_us < 0:
            return self._decode_stale(reply, at)
        at += 8
        answer: list[Decision | None] = []
        for limits, booking in zip(self.limit_sets, self._arguments[1], strict=True):
            moved, decision = reply[at], None
            at += 1
            if moved:
                decision, at = _decode_decision(reply, at, limits, booking.claims, now_us, True)
            answer.append(decision)
        self._done(answer)
        return at

    def with_states(self, states: Sequence[Converted | None]) -> RebookRequest:
        return RebookRequest(*self._arguments, states)


def encode_hit(entry: LimitEntry, key: str, cost: int = 1, now_us: int | None = None) -> HitRequest | DecideRequest:
    """A hit on one limit: what most calls are."""
    try:  # `key_bytes` and `tag`, written out for the ordinary key
        data = key.encode()
    except UnicodeEncodeError:
        data = key_bytes(key)
    if cost <= 0 or not entry.is_plain or len(data) > MAX_KEY:
        claims = [Claim(entry.named, key, cost)]
        return DecideRequest(limit_set_of(entry.names, claims), claims, 0, True, False, 0, now_us)
    return HitRequest(entry, key, data if data and data[0] not in RESERVED else tag(data), cost, now_us)


def encode_decide(
    names: KeyNames,
    claims: Sequence[Claim],
    max_wait_us: int | None = 0,
    commit: bool = True,
    now_us: int | None = None,
    not_before_us: int = 0,
    *,
    remember: bool = False,
) -> HitRequest | DecideRequest:
    """A decision on claims, see `Store.decide`."""
    wait_us = MAX_WAIT if max_wait_us is None or max_wait_us > MAX_WAIT else int(max_wait_us)
    if len(claims) == 1 and not wait_us and commit and not remember and not not_before_us:
        return encode_hit(entry_of(names, claims[0].named), claims[0].key, claims[0].cost, now_us)
    return DecideRequest(limit_set_of(names, claims), claims, wait_us, commit, remember, not_before_us, now_us)


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
    """Decodes the reply of a call for each request. False: it is no reply of these scripts."""
    if type(reply) is not bytes:
        return False
    at = 0
    try:
        for request in requests:
            request.stale = None
            at = request.decode(reply, at)
    except (struct.error, TypeError, ValueError, IndexError):
        return False
    return True


def _decode_decision(
    reply: bytes, at: int, limits: LimitSet, claims: Sequence[Claim], now_us: int, with_states: bool
) -> tuple[Decision, int]:
    """The Decision at a position of a reply, and where it ends. `with_states`: the claims remember the states."""
    layout = limits.reply_with_states if with_states else limits.reply
    numbers = layout.unpack_from(reply, at)
    start_us, parts, i = numbers[0], [], 1
    for entry, claim in zip(limits.entries, claims, strict=True):
        start, retry_us, left, reset_us = numbers[i : i + 4]
        if start >= 0:
            parts.append(Decision(True, entry.capacity, left, 0, reset_us, start - now_us, start, entry.name))
        else:
            never = -1 if start != -1 else retry_us
            parts.append(Decision(False, entry.capacity, left, never, reset_us, 0, now_us, entry.name))
        i += 4
        if with_states and not entry.limit.logs:
            if claim.cost > 0:
                claim.remember(numbers[i : i + 3], numbers[i + 3 : i + 6])
            i += 6
    return Decisions.join(parts, start_us - now_us if start_us >= 0 else 0), at + layout.size
