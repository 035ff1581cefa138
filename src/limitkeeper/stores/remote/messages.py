"""The messages of the LK.STORE commands: RemoteStore encodes requests and decodes replies, the service does the opposite.

A command has one argument: a head (little-endian: B protocol, B whether it carries a time, I map version, I map digest, q time if
it does; microseconds), then the operation's arguments. HIT, nearly all of the traffic, is binary; the others are JSON arrays.

    HIT        q cost, H length of the limit, the limit, the key in UTF-8
                   -> q now, B allowed, q remaining, q retry, q reset, B source
    DECIDE     requests (lists of claims), max_wait, not_before, commit -> for each a decision, and charges
    GIVE_BACK  claims with charges, charged_at, source -> given, charges
    REBOOK     bookings (claims with charges, charged_at, deadline, stays, source) -> for each a decision or null, and charges
    RESET, FORGET claims    REGISTER limit    ITEMS limit, own, slots    LOAD limit, pairs    TIME    MAP message (shard_map.py)
    HASH       name -> fields of a store hash (store_hash.py); name, field, value or null: sets or removes a field

    limit      [limiter, name, canonical text]
    claim      [limit, key, cost]; with its charge [limit, key, cost, charged, charge]
    decision   [now, wait, source, [[allowed, remaining, retry, reset, wait] for each limit]]

A limit is sent with every claim, so that a service that was restarted needs no registration first.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, NamedTuple

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.limit_parser import parse_limit
from ...decision import Decision, Decisions
from ..contract import Booking, KeyState
from ..leased.key_lease import SOURCES
from ..redis.key_names import key_bytes, key_text

PREFIX = b"LK.STORE."
PROTOCOL = 1
#: Requests that can be split are so from about this size on, in bytes.
MAX_REQUEST = 100_000
#: The largest command: a process with 50 000 waiters moves all of them up in one.
MAX_COMMAND = 16 << 20

_HEAD, _TIME, _HIT, _HIT_REPLY = Struct("<BBII"), Struct("<q"), Struct("<qH"), Struct("<qB3qB")

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)  # one for all: making it takes as long as its work
#: What decoding bytes that are no message may raise.
MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, struct.error)
#: Version and digest of a shard map; (0, 0) without one.
MapId = tuple[int, int]
Json = Any


class OtherProtocol(ValueError):
    """A request in another version of the protocol."""


class Head(NamedTuple):
    """What every request begins with; `now_us` None: the service's own time counts."""

    map_id: MapId
    now_us: int | None

    def encode(self) -> bytes:
        head = _HEAD.pack(PROTOCOL, self.now_us is not None, *self.map_id)
        return head if self.now_us is None else head + _TIME.pack(self.now_us)


def decode_head(body: bytes) -> tuple[Head, int]:
    """The head of a request, and where it ends."""
    if not body or body[0] != PROTOCOL:
        raise OtherProtocol(f"version {body[0] if body else 0} of the store protocol was sent, and this service has {PROTOCOL}")
    _, timed, version, digest = _HEAD.unpack_from(body)
    if not timed:
        return Head((version, digest), None), _HEAD.size
    return Head((version, digest), _TIME.unpack_from(body, _HEAD.size)[0]), _HEAD.size + _TIME.size


def encode_json(value: Json) -> bytes:
    return _ENCODER.encode(value).encode()


# Hits ----------------------------------------------------------------------------------------------------------------


def encode_hit(head: bytes, limit: bytes, key: str, cost: int) -> bytes:
    return b"".join((head, _HIT.pack(cost, len(limit)), limit, key_bytes(key)))


def decode_hit(body: bytes, at: int) -> tuple[bytes, str, int]:
    """The limit, the key and the cost."""
    cost, size = _HIT.unpack_from(body, at)
    end = at + _HIT.size + size
    return body[end - size : end], key_text(body[end:]), cost


def encode_hit_reply(made: Decision) -> bytes:
    source = SOURCES.index(made.source)
    return _HIT_REPLY.pack(made.start_us, made.allowed, made.remaining, made.retry_us, made.reset_us, source)


def decode_hit_reply(reply: bytes, named: NamedLimit) -> Decision:
    now_us, allowed, remaining, retry_us, reset_us, source = _HIT_REPLY.unpack(reply)
    return Decision(allowed, named.limit.capacity, remaining, retry_us, reset_us, 0, now_us, named.name, SOURCES[source])


# Limits, claims and decisions ----------------------------------------------------------------------------------------


def limit_json(named: NamedLimit) -> Json:
    return [named.limiter, named.name, str(named.limit)]


def limit_of(limiter: str, name: str, text: str) -> NamedLimit:
    return NamedLimit(limiter, name, parse_limit(text))


def claims_json(claims: Sequence[Claim]) -> Json:
    return [[limit_json(claim.named), claim.key, claim.cost] for claim in claims]


def charged_json(claims: Sequence[Claim]) -> Json:
    """Claims with their charges."""
    return [[limit_json(claim.named), claim.key, claim.cost, claim.charged, charge_json(claim)] for claim in claims]


def claims_of(claims: Json, find: Callable[..., NamedLimit]) -> list[Claim]:
    found = []
    for limit, key, cost, *charged in claims:
        claim = Claim(find(*limit), key, cost, *charged[:1])
        if charged:
            set_charges([claim], charged[1:])
        found.append(claim)
    return found


def charge_json(claim: Claim) -> Json:
    """What a claim knows of its charge; the states of a log stay where they are."""
    charge = claim.charge()
    return [*charge[:3], 0, 0, 0, 0, 0, 0, None] if claim.named.limit.logs else charge


def set_charges(claims: Sequence[Claim], charges: Json) -> None:
    for claim, (*charge, others) in zip(claims, charges, strict=True):
        claim.set_charge((*charge, others and tuple(map(tuple, others))))  # JSON has no tuples


def decision_json(made: Decision) -> Json:
    parts = [[one.allowed, one.remaining, one.retry_us, one.reset_us, one.wait_us] for one in made.decisions]
    return [made.start_us - made.wait_us, made.wait_us, made.source, parts]


def decision_of(found: Json, claims: Sequence[Claim]) -> Decision:
    now_us, joined_wait_us, source, fields = found
    parts = []
    for claim, (allowed, remaining, retry_us, reset_us, wait_us) in zip(claims, fields, strict=True):
        times, named = (retry_us, reset_us, wait_us, now_us + wait_us), claim.named
        parts.append(Decision(allowed, named.limit.capacity, remaining, *times, named.name, source))
    return Decisions.join(parts, joined_wait_us)


def bookings_json(bookings: Sequence[Booking]) -> Json:
    return [[charged_json(one.claims), one.charged_at, one.deadline_us, one.stays, one.source] for one in bookings]


def bookings_of(bookings: Json, find: Callable[..., NamedLimit]) -> list[Booking]:
    return [Booking(claims_of(claims, find), *rest) for claims, *rest in bookings]


def states_of(pairs: Json) -> list[KeyState]:
    """Keys and states: three integers, or the entries of a log and two zeros. JSON has no tuples."""
    return [(key, (tuple(map(tuple, first)) if isinstance(first, list) else first, *rest)) for key, (first, *rest) in pairs]
