"""Every way of keeping limits that the soak runs, each with its stated bound, in hits of one key.

`extra(limit, seconds, nodes)` is what the store may admit on top of what one central store admits; `alone` is what guards may let
through by themselves while the store is away. `place` is the server whose faults affect it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from limitkeeper import GuardedStore, LeasedStore, RedisStore, ShardedStore, SharedStore, TokenBucket
from limitkeeper.algorithms import Limit
from limitkeeper.stores.guarded.share import shared_limit

BUDGET = 0.25
NODES = 2
Bound = Callable[[Limit, float, int], float]


def nothing(limit: Limit, seconds: float, nodes: int) -> float:
    return 0.0


def without_bound(limit: Limit, seconds: float, nodes: int) -> float:
    return math.inf


def shares(limit: Limit, seconds: float, nodes: int) -> float:
    """Every node's declared share: its burst and its rate."""
    share = shared_limit(limit, Fraction(1, NODES))
    gained = share.count * seconds * 1e6 / share.period if isinstance(share, TokenBucket) else 0.0
    return nodes * (share.capacity + gained)


@dataclass(frozen=True)
class Mode:
    """A store, or a stack of them, and its bound."""

    name: str
    make: Callable[[dict[str, Any]], Any]
    extra: Bound = nothing
    alone: Bound = nothing
    place: str = "server"
    #: Seconds after a fault within which everything is as before.
    recovery: float = 0.5
    budget: float = BUDGET
    #: How long it waits for one reply of the server before it gives up.
    patience: float = BUDGET


def redis_store(url: str, timeout: float = BUDGET) -> RedisStore:
    return RedisStore(url, timeout=timeout)


def guarded(store: Any, on_failure: str) -> GuardedStore:
    """With short probe intervals, so that a round of a few seconds sees it recover."""
    share = NODES if on_failure == "local" else None
    return GuardedStore(store, BUDGET, on_failure, share, max_backoff="400ms", ramp="200ms")


def sharded(places: dict[str, Any]) -> ShardedStore:
    return ShardedStore({"one": redis_store(places["server"]), "two": redis_store(places["second"])})


def leased(places: dict[str, Any]) -> LeasedStore:
    return LeasedStore(redis_store(places["server"]))


def leased_and_guarded(places: dict[str, Any]) -> GuardedStore:
    return guarded(leased(places), "local")


MODES = {
    mode.name: mode
    for mode in (
        Mode("redis", lambda places: redis_store(places["server"], places.get("timeout", BUDGET))),
        Mode("redis + sentinel", lambda places: redis_store(places["sentinel"]), place="sentinel"),
        Mode("redis + cluster", lambda places: redis_store(places["cluster"]), place="cluster"),
        Mode("guarded, closed", lambda places: guarded(redis_store(places["server"]), "closed"), recovery=1.0),
        Mode("guarded, open", lambda places: guarded(redis_store(places["server"]), "open"), alone=without_bound, recovery=1.0),
        Mode("guarded, local", lambda places: guarded(redis_store(places["server"]), "local"), alone=shares, recovery=1.0),
        Mode("leased", leased),
        Mode("leased, guarded, local", leased_and_guarded, alone=shares, recovery=1.0, patience=BUDGET / 3),
        Mode("sharded", sharded),
        Mode("shared file", lambda places: SharedStore(places["folder"] + "/limits", timeout=0.5), place="file", budget=0.5),
    )
}
