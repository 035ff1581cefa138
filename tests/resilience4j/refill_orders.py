"""Small models of how permissions may be taken, from the descriptions that the project started from.

StoredFirst and RecomputeWhenEmpty take what is stored and look at the time only when it runs out. RefillFirst looks at the time
first; it is the exact model (fractions, no rounding) against which limitkeeper is checked.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil


@dataclass
class StoredFirst:
    """The order of "refill-rate-limiter": stored permissions first, then a time index that may lie in the future. Nanoseconds."""

    capacity: int
    nanos_per_permission: int
    permissions: int
    time_index: int = 0

    def reserve(self, now, permits=1, timeout=0):
        missing = permits - self.permissions
        if missing <= 0:
            self.permissions = -missing
            return 0
        passed = now - self.time_index
        if passed >= self.capacity * self.nanos_per_permission:
            self.permissions, self.time_index = self.capacity - permits, now
            return 0
        needed = missing * self.nanos_per_permission
        wait = max(0, needed - passed)
        if wait > timeout:
            return -1
        self.permissions, self.time_index = 0, self.time_index + needed
        return wait


@dataclass
class RecomputeWhenEmpty:
    """The token bucket of the list of four algorithms: an integer, recomputed when it is zero. Milliseconds."""

    maximum: int
    interval: int
    tokens: int = 0
    newest: int = 0

    def acquire(self, now):
        if self.tokens < 1:
            self.tokens = min(self.maximum, self.tokens + (now - self.newest) // self.interval)
            if self.tokens < 1:
                return False
            self.newest = now
        self.tokens -= 1
        return True


class RefillFirst:
    """Nothing but the time index: the moment since which permissions have been growing, never further back than a full bucket.

    permissions(now) = (now − index) / time per permission; taking n moves the index on by n; an index in the future is debt.
    Future starts are whole microseconds, as the clock's are, and a bucket that is full at a start grows no further before it.
    """

    def __init__(self, capacity, limit, period_ns, initial):
        self.per = Fraction(period_ns, limit)
        self.capacity = capacity
        self.index = -initial * self.per

    def refill(self, now):
        self.index = max(self.index, now - self.capacity * self.per)

    def reserve(self, now, permits, timeout):
        """Nanoseconds to wait, in whole microseconds; −1 when that is more than the timeout."""
        self.refill(now)
        wait = ceil(max(Fraction(0), self.index + permits * self.per - now) / 1000) * 1000
        if wait > timeout:
            return -1
        self.refill(now + wait)
        self.index += permits * self.per
        return wait

    def available(self, now):
        """Whole permissions, rounded down; below zero when they are reserved ahead."""
        self.refill(now)
        return (now - self.index) // self.per
