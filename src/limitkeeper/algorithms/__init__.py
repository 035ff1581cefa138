"""The rules, one file each: pure functions on integers. Adding a rule is one file and one line in this table."""

from .fixed_window import FixedWindow
from .leaky_bucket import LeakyBucket
from .leaky_queue import LeakyBucketQueue
from .limit import Limit
from .sliding_counter import SlidingWindowCounter
from .sliding_log import SlidingWindowLog
from .token_bucket import GCRA, TokenBucket

#: The words that name a rule in text -> the rule. Longer names first, so that a queue is not read as a bucket.
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
