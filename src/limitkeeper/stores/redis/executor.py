"""From asks to answers: brought where they belong, and once more where a state of another rate was found.

A limit is made known to the server before its first use (`known.py`), in a call of its own: a limiter can be made while the
server is away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...algorithms.claim import NamedLimit
from ...errors import StoreError
from .key_names import KeyNames
from .operations import ScriptRequest, converted, knowing
from .route import Route
from .script_call import MOST, RoutedCommands
from .trips import Plan

#: So often a state that changes its rate meanwhile is looked at again.
LOOKS = 4


def introduced(route: Route, names: KeyNames, limits: Iterable[tuple[NamedLimit, int | None]]) -> Plan[None]:
    """Makes limits known to the server; with each goes when (µs) it came to be, None: now, by the server's time."""
    errors = yield from answered(route, [knowing(names, named, now_us) for named, now_us in limits])
    raise_first(errors)


def raise_first(errors: Iterable[StoreError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def answered(route: Route, asks: Sequence[ScriptRequest], most: int = MOST) -> Plan[list[StoreError | None]]:
    """Has asks answered, at most so many in a call; says for each what went wrong. Those that found a state of another rate go
    again, with it converted."""
    errors: list[StoreError | None] = [None] * len(asks)
    pending = list(enumerate(asks))
    for _ in range(LOOKS):
        parcels = route.parcels([ask for _, ask in pending], most)
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
        errors[at] = StoreError("a key changes its rate faster than it can be read; two rates are in use under one name")
    return errors


def registries(route: Route, keys: Sequence[bytes]) -> Plan[dict[bytes, dict[bytes, bytes]]]:
    """The fields of some registries."""
    errands = [RoutedCommands([["HGETALL", key]], key) for key in dict.fromkeys(keys)]
    yield from route.carried(errands)
    raise_first(errand.error for errand in errands)
    return {errand.key or b"": dict(zip(errand.replies[0][::2], errand.replies[0][1::2], strict=True)) for errand in errands}
