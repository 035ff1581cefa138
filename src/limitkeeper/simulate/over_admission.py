"""Over-admission: by how much the admitted requests of a key exceed its limit, over all nodes together.

    bucket, meter     level = max(0, level − rate · dt) + cost; the excess over any interval is max(level) − burst
    window, log       the largest number in one window − count: aligned for a fixed window, else every (t − W, t]

Exact for every interval, with a number per key, or the times of one window. It is measured on what all nodes admitted together,
so it shows what leases, per-node stores, crashes and skewed clocks cost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..algorithms import FixedWindow, LeakyBucket, LeakyBucketQueue, Limit, TokenBucket


@dataclass(slots=True)
class KeyAdmissions:
    """What one key was admitted under one limit."""

    level: float = 0.0
    at_us: int = 0
    times: deque[int] = field(default_factory=deque)


class OverAdmission:
    """All keys of one limit. `excess` is the most by which any key exceeded it in any interval; `admitted` the total."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.excess = 0.0
        self.admitted = 0
        self.worst_key = ""
        self._keys: dict[str, KeyAdmissions] = {}
        self._continuous = isinstance(limit, (TokenBucket, LeakyBucket, LeakyBucketQueue))
        self._rate = limit.count / limit.period  # per µs
        self._aligned = isinstance(limit, FixedWindow)

    def add(self, key: str, cost: int, now_us: int) -> None:
        """Counts an admitted request."""
        one = self._keys.get(key)
        if one is None:
            one = self._keys[key] = KeyAdmissions(at_us=now_us)
        self.admitted += cost
        if self._continuous:
            one.level = max(0.0, one.level - (now_us - one.at_us) * self._rate) + cost
            one.at_us = now_us
        else:
            self._count_window(one, cost, now_us)
        excess = one.level - self.limit.capacity
        if excess > self.excess + 1e-6:
            self.excess, self.worst_key = excess, key

    def _count_window(self, one: KeyAdmissions, cost: int, now_us: int) -> None:
        period = self.limit.period
        begin = now_us - now_us % period - 1 if self._aligned else now_us - period
        times = one.times
        times.extend([now_us] * cost)
        while times and times[0] <= begin:
            times.popleft()
        one.level = len(times)
