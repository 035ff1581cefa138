"""Rate limiting, from one function in a script to a fleet: one rule, one exact answer, at every scale.

limiter = Limiter(TokenBucket("5/s burst 10"))
if not limiter.hit("user:42"):
    ...
"""

import typing as _typing

from .algorithms import (
    GCRA,
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limit,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from .decision import Decision
from .errors import (
    ConfigurationError,
    InvalidCost,
    InvalidLimit,
    LimitkeeperError,
    RateLimited,
    SeveralWorkers,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from .limiter import AsyncLimiter, Limiter
from .limiter_base import COMPILED as compiled
from .reservation import Reservation
from .stores import MemoryStore, store_from_url

if _typing.TYPE_CHECKING:
    from .stores import GuardedStore, LeasedStore, RedisStore, ShardedStore, SharedStore
else:  # hidden from type checkers, to which every misspelt name would have a type

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import stores

        return getattr(stores, name)


__version__ = "0.1.0"

#: Stores that are imported when first used.
_LATER = ("GuardedStore", "LeasedStore", "RedisStore", "ShardedStore", "SharedStore")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])


__all__ = [
    "GCRA",
    "AsyncLimiter",
    "ConfigurationError",
    "Decision",
    "FixedWindow",
    "GuardedStore",
    "InvalidCost",
    "InvalidLimit",
    "LeakyBucket",
    "LeakyBucketQueue",
    "LeasedStore",
    "Limit",
    "Limiter",
    "LimitkeeperError",
    "MemoryStore",
    "RateLimited",
    "RedisStore",
    "Reservation",
    "SeveralWorkers",
    "ShardedStore",
    "SharedStore",
    "SlidingWindowCounter",
    "SlidingWindowLog",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
    "TokenBucket",
    "compiled",
    "store_from_url",
]
