"""Plans over stored keys: reads all keys of a limit (SCAN, GET), writes states, deletes keys, reads the server's time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...algorithms.claim import Claim, NamedLimit
from ..sans_io import Plan
from .address import Endpoint
from .codec import State
from .command_routing import Route, RoutedCommands, raise_first
from .key_names import KeyNames
from .limit_record import LoadRequest, decode_item

#: Number of keys that are scanned, read or written at once.
BATCH = 500


def server_time(route: Route) -> Plan[int]:
    """The server's time in microseconds."""
    ((seconds, us),) = yield from route.query([RoutedCommands([["TIME"]])])
    return int(seconds) * 1_000_000 + int(us)


def delete_keys(route: Route, names: KeyNames, claims: Sequence[Claim]) -> Plan[None]:
    keys = dict.fromkeys(names.key(claim.named, claim.key) for claim in claims)
    yield from route.query([RoutedCommands([["UNLINK", key]], key) for key in keys])


def read_items(route: Route, names: KeyNames, named: NamedLimit, now_us: int | None) -> Plan[list[tuple[str, State]]]:
    """(key, state) of every key of a limit; states of other rates are converted."""
    moment = now_us if now_us is not None else (yield from server_time(route))
    registry = names.registry(named)
    fields = (yield from route.read_hashes([registry]))[registry]
    found: dict[str, State] = {}
    for server in (yield from route.all_endpoints()):
        keys = yield from _scan(route, names.pattern(named), server)
        for at in range(0, len(keys), BATCH):
            some = keys[at : at + BATCH]
            values = yield from route.query([RoutedCommands([["GET", key]], key) for key in some])
            pairs = zip(some, values, strict=True)
            found.update(decode_item(names, named, key, value, fields, moment) for key, value in pairs if value is not None)
    return list(found.items())


def _scan(route: Route, pattern: bytes, server: Endpoint) -> Plan[list[bytes]]:
    """The keys of one server that match a pattern."""
    keys: dict[bytes, None] = {}
    cursor = b"0"
    while True:
        commands = RoutedCommands([["SCAN", cursor, "MATCH", pattern, "COUNT", b"%d" % BATCH]], endpoint=server)
        ((cursor, some),) = yield from route.query([commands])
        keys.update(dict.fromkeys(some))
        if cursor == b"0":
            return list(keys)


def write_items(
    route: Route, names: KeyNames, named: NamedLimit, items: Iterable[tuple[str, State]], now_us: int | None
) -> Plan[None]:
    """Writes what `read_items` returned, here or from another store."""
    requests = []
    for key, state in items:
        if type(key) is not str:
            raise TypeError(f"key: expected a str, got {type(key).__name__}: {key!r}")
        requests.append(LoadRequest(names, named, key, state, now_us))
    for at in range(0, len(requests), BATCH):
        raise_first((yield from route.execute(requests[at : at + BATCH])))
