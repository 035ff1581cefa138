"""headgate: rate limiting, one rule and one true answer at every scale.

limiter = Limiter(TokenBucket("5/s burst 10"))
if not limiter.hit("user:42"):
    ...
"""

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
    HeadgateError,
    InvalidCost,
    InvalidLimit,
    RateLimited,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from .limiter import AsyncLimiter, Limiter
from .reservation import Reservation
from .stores import MemoryStore, store_from_url
from .verbs import COMPILED as compiled

__version__ = "0.1.0"

__all__ = [
    "GCRA",
    "AsyncLimiter",
    "ConfigurationError",
    "Decision",
    "FixedWindow",
    "HeadgateError",
    "InvalidCost",
    "InvalidLimit",
    "LeakyBucket",
    "LeakyBucketQueue",
    "Limit",
    "Limiter",
    "MemoryStore",
    "RateLimited",
    "Reservation",
    "SlidingWindowCounter",
    "SlidingWindowLog",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
    "TokenBucket",
    "compiled",
    "store_from_url",
]
