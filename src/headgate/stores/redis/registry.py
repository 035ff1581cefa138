"""What a Redis remembers of a limit: one small hash for each, written once.

    who      the limiter's name, the limit's name and the rule, so that two limits whose digests meet are told apart
    birth    when this Redis first heard of it (µs); keys of a limit that does not start full are as old as that
    <print>  for each rate it has had, under the print of its text: since when (µs), and the text

It is read when a store first uses a limit, in one call of its own; a limiter can be made while the server is away. What was known
before that call counts: a limit that was made five seconds earlier is five seconds old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...algorithms.claim import NamedLimit
from ...errors import ConfigurationError, StoreError
from .asks import Ask, converted
from .names import Names
from .packed import Place, place_of
from .parcel import Errand
from .route import Route
from .trips import Plan

_INTRODUCE = """local now = tonumber(ARGV[5])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local since = string.format('%.0f', now - tonumber(ARGV[4]))
redis.call('HSETNX', KEYS[1], 'who', ARGV[1])
redis.call('HSETNX', KEYS[1], 'birth', since)
redis.call('HSETNX', KEYS[1], ARGV[2], since .. ' ' .. ARGV[3])
if ARGV[5] ~= '' then redis.call('PEXPIRE', KEYS[1], 3600000) end
return redis.call('HMGET', KEYS[1], 'who', 'birth', ARGV[2])"""


def introduced(route: Route, names: Names, limits: Iterable[tuple[NamedLimit, int]], now_us: int | None) -> Plan[None]:
    """Makes limits and server known to each other. With each limit goes for how long (µs) it has been known here."""
    asked = []
    for named, age_us in limits:
        place = place_of(names, named)
        who = repr(named.identity).encode("utf-8", "backslashreplace")
        print_, text = b"%x" % place.fingerprint, str(named.limit)
        call = ["EVAL", _INTRODUCE, 1, place.registry, who, print_, text, age_us, "" if now_us is None else now_us]
        asked.append((place, who, Errand([call], place.registry)))
    yield from route.carried([errand for _, _, errand in asked])
    for place, who, errand in asked:
        if errand.error is not None:
            raise errand.error
        _learn(place, who, errand.replies[0])


def _learn(place: Place, who: bytes, told: list[Any]) -> None:
    if told[0] != who:
        raise ConfigurationError(
            f"{place.named!r} and {told[0].decode(errors='replace')} would share their keys in Redis; rename one of the limiters"
        )
    place.birth_us = int(told[1])
    place.since_us = int(told[2].partition(b" ")[0])


def answered(route: Route, asks: Sequence[Ask]) -> Plan[list[StoreError | None]]:
    """Brings asks where they belong, and those that found a state of another rate a second time, with it converted."""
    errors: list[StoreError | None] = [None] * len(asks)
    pending = list(enumerate(asks))
    for _ in range(4):
        parcels = route.parcels([ask for _, ask in pending])
        yield from route.carried(parcels)
        failed = {id(ask): parcel.error for parcel in parcels if parcel.error is not None for ask in parcel.asks}
        stale = []
        for at, ask in pending:
            if id(ask) in failed:
                errors[at] = failed[id(ask)]
            elif ask.stale is not None:
                stale.append((at, ask))
            elif ask is not asks[at]:
                asks[at].answer, asks[at].stale = ask.answer, None
        if not stale:
            return errors
        texts = yield from registries(route, [key for _, ask in stale for key in ask.registries()])
        pending = [(at, converted(ask, texts)) for at, ask in stale]
    for at, _ in pending:
        errors[at] = StoreError("a key changes its rate faster than it can be read; are two rates in use under one name?")
    return errors


def registries(route: Route, keys: Sequence[bytes]) -> Plan[dict[bytes, dict[bytes, bytes]]]:
    """The fields of some registries."""
    errands = [Errand([["HGETALL", key]], key) for key in dict.fromkeys(keys)]
    yield from route.carried(errands)
    found = {}
    for errand in errands:
        if errand.error is not None:
            raise errand.error
        flat = errand.replies[0]
        found[errand.key or b""] = dict(zip(flat[::2], flat[1::2], strict=True))
    return found
