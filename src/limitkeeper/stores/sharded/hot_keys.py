"""Which keys are hot: the heavy hitters among all keys, found in bounded memory (Misra and Gries, 1982).

At most `counters` keys are counted. A key that is counted goes up; a stranger takes a free counter, and where none is free,
all go down by one and those at nothing are let go. Of N hits, a count is at most N / (counters + 1) too low and never too
high, so whatever has more than that share is found. One hit in about `EVERY` is looked at, at uneven distances (keys that
take turns can't hide between them), so a hit costs a subtraction. Counting
begins anew with every window of `window_us`, on the clock of the shard that answers.

A key is hot from `rate` hits a second on, counted over a window, and until a window brings less than half of that.

Rejected: Space-Saving (finding the smallest counter on every stranger costs more than it is worth here), count-min (it
answers how often, not who), a counter for every key (unbounded).
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

#: The mean distance between two hits that are looked at.
EVERY = 8


@cython.cclass
class HotKeys:
    """Counts keys; `hot` holds those that are hot now, as {key: hits a second}."""

    __slots__ = ("chance", "counters", "counts", "hot", "rate", "since_us", "skip", "window_us")

    def __init__(self, rate: int = 1000, counters: int = 64, window_us: int = 1_000_000) -> None:
        self.rate = rate
        self.counters = counters
        self.window_us = window_us
        self.counts: dict[str, Any] = {}
        self.hot: dict[str, Any] = {}
        self.since_us = -1
        self.chance = 0x9E3779B9
        self.skip = 1

    @cython.ccall
    def hit(self, key: str, now_us: cython.longlong) -> cython.bint:
        """A hit of a key; True when it has just become hot."""
        self.skip -= 1
        if self.skip > 0:
            return False
        self.chance = (self.chance * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        self.skip = 1 + (self.chance >> 16) % (2 * EVERY - 1)
        return self.look(key, now_us)

    @cython.cfunc
    def look(self, key: str, now_us: cython.longlong) -> cython.bint:
        if self.since_us < 0 or now_us < self.since_us:  # the first, or a clock that went back
            self.since_us = now_us
        if now_us - self.since_us >= self.window_us:
            self.turn(now_us)
        count: cython.longlong = self.counted(key)
        if count == 0 or count * EVERY * 1_000_000 < self.rate * self.window_us or key in self.hot:
            return False
        self.hot[key] = self.per_second(count)
        return True

    @cython.cfunc
    def counted(self, key: str) -> cython.longlong:
        """Counts a key; its count, or 0 when it is not counted."""
        counts = self.counts
        known = counts.get(key)
        if known is not None:
            counts[key] = known + 1
            return known + 1  # type: ignore[no-any-return]
        if len(counts) < self.counters:
            counts[key] = 1
            return 1
        self.counts = {other: count - 1 for other, count in counts.items() if count > 1}
        return 0

    def per_second(self, count: int) -> int:
        return count * EVERY * 1_000_000 // self.window_us

    def turn(self, now_us: int) -> None:
        """The end of a window: what brought less than half of the rate is no longer hot. A window without a hit cools all."""
        over = now_us - self.since_us >= 2 * self.window_us
        rates = {} if over else {key: self.per_second(self.counts.get(key, 0)) for key in self.hot}
        self.hot = {key: rate for key, rate in rates.items() if 2 * rate >= self.rate}
        self.counts = {}
        self.since_us = now_us

    def forget(self) -> None:
        """Nobody is hot any more."""
        self.counts, self.hot = {}, {}
