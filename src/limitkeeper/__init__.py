"""Rate limiting for Python: the public names of limitkeeper.

limiter = Limiter(TokenBucket("5/s burst 10"))
if not limiter.hit("user:42"):
    ...
"""

import typing as _typing

try:
    from .decision import Decision  # a compiled module
except ImportError as error:
    if "interpreter" not in str(error):
        raise
    raise ImportError(
        "limitkeeper's compiled modules can be imported by one interpreter of a process: use worker processes instead of "
        "subinterpreters (mod_wsgi: WSGIApplicationGroup %{GLOBAL}), or install limitkeeper with LIMITKEEPER_DISABLE_COMPILED=1"
    ) from error

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
from .errors import (
    BulkheadFull,
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
from .stores import _LATER, MemoryStore, store_from_url

if _typing.TYPE_CHECKING:
    from .stores import GuardedStore, LeasedStore, RedisStore, RemoteStore, ShardedStore, SharedStore
else:  # hidden from type checkers, which would otherwise accept every misspelt name

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import stores

        return getattr(stores, name)


__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])


__all__ = [
    "GCRA",
    "AsyncLimiter",
    "BulkheadFull",
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
    "RemoteStore",
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
