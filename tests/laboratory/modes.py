"""Every way of keeping limits that the soak runs, each with its stated bound: what may be admitted on top of the central one.

`extra(limit, seconds, nodes)` is in hits per key. `place` says whose faults it feels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headgate.algorithms import Limit
from headgate.stores.redis import RedisStore

BUDGET = 0.15


@dataclass(frozen=True)
class Mode:
    """A store, or a tower of them, and what it promises."""

    name: str
    make: Callable[[dict[str, Any]], Any]
    extra: Callable[[Limit, float, int], float] = lambda limit, seconds, nodes: 0.0
    place: str = "server"
    #: A store that lets everybody through while it can't decide promises no bound then.
    promises: bool = True
    #: Seconds after a fault within which everything is as before.
    recovery: float = 0.5
    budget: float = BUDGET


def redis_store(url: str) -> Any:
    store = RedisStore(url)
    store.answers_within(round(BUDGET * 1e6))
    return store


MODES = {mode.name: mode for mode in (Mode("redis", lambda places: redis_store(places["server"])),)}
