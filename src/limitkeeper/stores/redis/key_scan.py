"""Keeping house in Redis: reading all keys of a limit, writing them, forgetting them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from .address import Endpoint
from .executor import answered, raise_first, registries
from .key_names import KeyNames
from .operations import item, loading
from .route import Route
from .script_call import RoutedCommands
from .trips import Plan

#: So many keys are looked for, read or written in one go.
MANY = 500


def sent(route: Route, errands: Sequence[RoutedCommands]) -> Plan[list[Any]]:
    """The replies of plain errands, or the first error."""
    yield from route.carried(errands)
    raise_first(errand.error for errand in errands)
    return [reply for errand in errands for reply in errand.replies]


def server_time(route: Route) -> Plan[int]:
    """The server's time in microseconds."""
    told = yield from sent(route, [RoutedCommands([["TIME"]])])
    return int(told[0][0]) * 1_000_000 + int(told[0][1])


def forgotten(route: Route, names: KeyNames, claims: Sequence[Claim]) -> Plan[None]:
    """Forgets the claims' keys."""
    keys = dict.fromkeys(names.key(claim.named, claim.key) for claim in claims)
    yield from sent(route, [RoutedCommands([["UNLINK", key]], key) for key in keys])


def kept(route: Route, names: KeyNames, named: NamedLimit, now_us: int | None) -> Plan[list[tuple[str, Any]]]:
    """(key, state) of every key of a limit, states of other rates converted."""
    moment = now_us if now_us is not None else (yield from server_time(route))
    registry = names.registry(named)
    fields = yield from registries(route, [registry])
    found: dict[str, Any] = {}
    servers = yield from route.everywhere()
    for server in servers:
        keys = yield from _scanned(route, names.pattern(named), server)
        for at in range(0, len(keys), MANY):
            some = keys[at : at + MANY]
            values = yield from sent(route, [RoutedCommands([["GET", key]], key) for key in some])
            pairs = zip(some, values, strict=True)
            found.update(item(names, named, key, value, fields[registry], moment) for key, value in pairs if value is not None)
    return list(found.items())


def _scanned(route: Route, pattern: bytes, server: Endpoint) -> Plan[list[bytes]]:
    """The keys of one server under a pattern."""
    keys: dict[bytes, None] = {}
    cursor = b"0"
    while True:
        errand = RoutedCommands([["SCAN", cursor, "MATCH", pattern, "COUNT", b"%d" % MANY]], place=server)
        ((cursor, some),) = yield from sent(route, [errand])
        keys.update(dict.fromkeys(some))
        if cursor == b"0":
            return list(keys)


def taken_over(
    route: Route, names: KeyNames, named: NamedLimit, items: Iterable[tuple[str, Any]], now_us: int | None
) -> Plan[None]:
    """Writes what `kept` gave, here or elsewhere."""
    asks = []
    for key, state in items:
        if type(key) is not str:
            raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}")
        asks.append(loading(names, named, key, state, now_us))
    for at in range(0, len(asks), MANY):
        raise_first((yield from answered(route, asks[at : at + MANY])))
