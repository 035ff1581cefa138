"""HotKeys: finds the keys with most hits, in bounded memory (Misra and Gries, 1982).

At most `counters` keys are counted. An uncounted key takes a free counter; where none is free, all are decremented and those at 0
are dropped. Of N hits, a count is at most N / (counters + 1) too low and never too high, so a key with more than that share is
found. One hit in about `EVERY` is sampled, at pseudo-random distances (keys that take turns can't hide between them).

A key is hot from `rate` hits a second on, counted over a window, and until a window has less than half of that. Rejected:
Space-Saving (finding the smallest counter costs more than it gains here), count-min (it answers how often, not which).
"""

from __future__ import annotations

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

#: The mean distance between two sampled hits.
EVERY = 8


@cython.cclass
class HotKeys:
    """Counts keys; `hot` holds those that are hot now, as {key: hits a second}."""

    __slots__ = ("counters", "counts", "hot", "random", "rate", "since_us", "skip", "window_us")

    def __init__(self, rate: int = 1000, counters: int = 64, window_us: int = 1_000_000) -> None:
        self.rate = rate
        self.counters = counters
        self.window_us = window_us
        self.counts: dict[str, int] = {}
        self.hot: dict[str, int] = {}
        self.since_us = -1
        self.random = 0x9E3779B9
        self.skip = 1

    @cython.ccall
    def hit(self, key: str, now_us: cython.longlong) -> cython.bint:
        """Counts a hit of a key; True when it has just become hot."""
        self.skip -= 1
        if self.skip > 0:
            return False
        self.random = (self.random * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        self.skip = 1 + (self.random >> 16) % (2 * EVERY - 1)
        return self.sample(key, now_us)

    @cython.cfunc
    def sample(self, key: str, now_us: cython.longlong) -> cython.bint:
        if self.since_us < 0 or now_us < self.since_us:  # the first, or a clock that went back
            self.since_us = now_us
        if now_us - self.since_us >= self.window_us:
            self.end_window(now_us)
        count: cython.longlong = self.increment(key)
        if count == 0 or count * EVERY * 1_000_000 < self.rate * self.window_us or key in self.hot:
            return False
        self.hot[key] = self.per_second(count)
        return True

    @cython.cfunc
    def increment(self, key: str) -> cython.longlong:
        """Counts a key; its count, or 0 when it is not counted."""
        counts = self.counts
        known = counts.get(key)
        if known is not None:
            counts[key] = known + 1
            return known + 1
        if len(counts) < self.counters:
            counts[key] = 1
            return 1
        self.counts = {other: count - 1 for other, count in counts.items() if count > 1}
        return 0

    def per_second(self, count: int) -> int:
        return count * EVERY * 1_000_000 // self.window_us

    def end_window(self, now_us: int) -> None:
        """Ends a window: a key with less than half of the rate is not hot any more, and after a window without a hit none is."""
        over = now_us - self.since_us >= 2 * self.window_us
        rates = {} if over else {key: self.per_second(self.counts.get(key, 0)) for key in self.hot}
        self.hot = {key: rate for key, rate in rates.items() if 2 * rate >= self.rate}
        self.counts = {}
        self.since_us = now_us
