"""The rate limiting algorithms, one file each, and the table of their names (`ALGORITHMS`)."""

from .fixed_window import FixedWindow
from .leaky_bucket import LeakyBucket
from .leaky_queue import LeakyBucketQueue
from .limit import Limit
from .sliding_counter import SlidingWindowCounter
from .sliding_log import SlidingWindowLog
from .token_bucket import GCRA, TokenBucket

#: Name of an algorithm in a limit's text -> its class. Longer names come first: "leaky bucket queue" before "leaky bucket".
ALGORITHMS: dict[str, type[Limit]] = {
    "sliding window counter": SlidingWindowCounter,
    "sliding window log": SlidingWindowLog,
    "leaky bucket queue": LeakyBucketQueue,
    "leaky bucket": LeakyBucket,
    "token bucket": TokenBucket,
    "fixed window": FixedWindow,
    "gcra": TokenBucket,
}

__all__ = [
    "ALGORITHMS",
    "GCRA",
    "FixedWindow",
    "LeakyBucket",
    "LeakyBucketQueue",
    "Limit",
    "SlidingWindowCounter",
    "SlidingWindowLog",
    "TokenBucket",
]
