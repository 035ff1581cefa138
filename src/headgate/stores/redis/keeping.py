"""Keeping house in Redis: reading all keys of a limit, writing them, forgetting them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from .address import Place as Server
from .asks import _in_units
from .names import Names, is_hashed, key_bytes
from .packed import CELL, Place, place_of, read_value
from .parcel import Errand
from .registry import registries
from .resp import Command
from .route import Route
from .trips import Plan

#: So many keys are looked for, read or written in one go.
MANY = 500
_LOG = struct.Struct("<4d")
_HOUR_MS = 3_600_000


def sent(route: Route, errands: Sequence[Errand]) -> Plan[list[Any]]:
    """The replies of plain errands, or the first error."""
    yield from route.carried(errands)
    for errand in errands:
        if errand.error is not None:
            raise errand.error
    return [reply for errand in errands for reply in errand.replies]


def server_time(route: Route) -> Plan[int]:
    """The server's time in microseconds."""
    told = yield from sent(route, [Errand([["TIME"]])])
    return int(told[0][0]) * 1_000_000 + int(told[0][1])


def forgotten(route: Route, names: Names, claims: Sequence[Claim]) -> Plan[None]:
    """Forgets the claims' keys."""
    keys = dict.fromkeys(names.key(claim.named, claim.key) for claim in claims)
    yield from sent(route, [Errand([["UNLINK", key]], key) for key in keys])


def kept(route: Route, names: Names, named: NamedLimit, now_us: int | None) -> Plan[list[tuple[str, Any]]]:
    """(key, state) of every key of a limit, states of other rates converted."""
    place = place_of(names, named)
    now = now_us if now_us is not None else (yield from server_time(route))
    fields = yield from registries(route, [place.registry])
    found: dict[str, Any] = {}
    servers = yield from route.everywhere()
    for server in servers:
        keys = yield from _scanned(route, names.pattern(named), server)
        for at in range(0, len(keys), MANY):
            errands = [Errand([["GET", key]], key) for key in keys[at : at + MANY]]
            values = yield from sent(route, errands)
            for key, value in zip(keys[at : at + MANY], values, strict=True):
                if value is not None:
                    stored = read_value(named.limit, value)
                    text = stored.key if stored.key is not None else names.parse(key)
                    found[str(text)] = _in_units(place, value, fields[place.registry], now)
    return list(found.items())


def _scanned(route: Route, pattern: bytes, server: Server) -> Plan[list[bytes]]:
    """The keys of one server under a pattern."""
    keys: dict[bytes, None] = {}
    cursor = b"0"
    while True:
        errand = Errand([["SCAN", cursor, "MATCH", pattern, "COUNT", MANY]], place=server)
        ((cursor, some),) = yield from sent(route, [errand])
        keys.update(dict.fromkeys(some))
        if cursor == b"0":
            return list(keys)


def taken_over(route: Route, names: Names, named: NamedLimit, items: Iterable[tuple[str, Any]], now_us: int | None) -> Plan[None]:
    """Writes what `kept` gave, here or elsewhere."""
    place = place_of(names, named)
    now = now_us if now_us is not None else (yield from server_time(route))
    errands = []
    for key, state in items:
        if type(key) is not str:
            raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}")
        name = names.key(named, key)
        errands.append(Errand([_written(names, place, name, key, state, now)], name))
    for at in range(0, len(errands), MANY):
        yield from sent(route, errands[at : at + MANY])


def _written(names: Names, place: Place, name: bytes, key: str, state: Any, now_us: int) -> Command:
    limit = place.limit
    if limit.logs:
        totals: list[float] = []
        for moment, cost in state[0]:
            totals += [moment, (totals[-1] if totals else 0) + cost]
        value = _LOG.pack(place.fingerprint, now_us, 0, len(totals) // 2) + struct.pack(f"<{len(totals)}d", *totals)
        new_us = (int(totals[-2]) + limit.window) * limit.tick if totals else now_us
    else:
        value = CELL.pack(place.fingerprint, now_us, *state)
        new_us = int(limit.decide(state, now_us // limit.tick, 0)[6]) * limit.tick
    if is_hashed(key_bytes(key)):
        value += key_bytes(key)
    if limit.ramp > 0:
        new_us = max(new_us, place.unseen()[1])
    ttl = _HOUR_MS if names.marked else min(10**15, max(0, new_us - now_us) // 1000) + 1001
    return ["SET", name, value, "PX", ttl]
