"""The most refused keys in bounded memory: Space-Saving (Metwally, Agrawal, El Abbadi, 2005) over two windows of time.

A window counts at most `size` keys. A counted key goes up by one. A new key takes a free counter; where none is free it takes
that of the key with the least count, `m`, and continues from there: count = m + 1, error = m. Of n offers,

    count − error  ≤  true  ≤  count,    error ≤ n / size,    and every key with more than n / size is counted.

Keys of one count share a level, and a key only moves one level up, so an offer is a few dict operations whatever the size.
A report covers this window and the last (5 to 10 minutes by default). A key that only one of them counts may have had as much as
the other's least there; this is added to its count and its error, so both bounds hold for the two together.

Rejected: Misra and Gries over a sample, as in `hot_key_detector.py` (cheap for every hit, but it has no count to show), halving
all counts now and then (fractional counts, bounds that leak), a counter for every key (a flood of keys is the expected input).
"""

from __future__ import annotations

import threading
from collections import deque

from ..clock import SYSTEM, Clock
from ..errors import ConfigurationError
from ..fork import reset_after_fork
from ..rate import Duration, duration_us
from .key_hash import KeyHash
from .snapshot import Offender

Item = tuple[str, str]

#: A longer key is kept as its hash, so that clients who choose their keys can't choose how much memory these take.
MAX_KEY_LENGTH = 200
#: Offers that may be pending while another thread counts.
MAX_PENDING = 4096


class HashedKey(str):
    """The hash of a key that was too long to be kept."""

    __slots__ = ()


class Window:
    """Counters of one window. `least` is the lowest level: when all counters are taken, an uncounted key had at most that."""

    __slots__ = ("counts", "errors", "least", "levels", "size", "total")

    def __init__(self, size: int) -> None:
        self.size = size
        self.total = 0
        self.least = 1
        self.counts: dict[Item, int] = {}
        self.errors: dict[Item, int] = {}
        self.levels: dict[int, dict[Item, None]] = {}

    def add(self, item: Item) -> None:
        self.total += 1
        count = self.counts.get(item)
        if count is not None:
            del self.levels[count][item]
        elif len(self.counts) < self.size:
            count = self.errors[item] = 0
            self.least = 1
        else:
            count = self.errors[item] = self._evict()
        self.counts[item] = count + 1
        self.levels.setdefault(count + 1, {})[item] = None
        if count and not self.levels[count]:
            del self.levels[count]
            if self.least == count:
                self.least = count + 1

    def _evict(self) -> int:
        """Drops the key that has been on the lowest level for longest; returns its count."""
        lowest = self.levels[self.least]
        evicted = next(iter(lowest))
        del lowest[evicted], self.counts[evicted], self.errors[evicted]
        return self.least

    def estimate(self, item: Item) -> tuple[int, int]:
        """(count, error) of any item, counted or not."""
        count = self.counts.get(item)
        if count is not None:
            return count, self.errors[item]
        unseen = self.least if len(self.counts) >= self.size else 0
        return unseen, unseen


class Offenders:
    """`offer(rule, key)` records a refusal; `top(10)` lists the keys refused most often in the last window or two.

    Keys are shown as hashes (`KeyHash`) unless `show_keys`. Threads may offer at the same time without waiting: an offer made
    while another thread counts is left pending, and only with thousands pending does a thread wait for the counting one.
    """

    def __init__(
        self,
        size: int = 64,
        *,
        window: Duration = "5min",
        secret: str | bytes | None = None,
        show_keys: bool = False,
        clock: Clock | None = None,
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 100_000:
            raise ConfigurationError(f"size must be an integer between 1 and 100000, got {size!r}; 64 is enough")
        self.size = size
        self.window_us = duration_us(window)
        if not self.window_us:
            raise ConfigurationError(f"window={window!r} must be longer than zero; write '5min'")
        self.show_keys = show_keys
        self._hash = KeyHash(secret)
        self._clock: Clock = SYSTEM if clock is None else clock
        self._pending: deque[Item] = deque(maxlen=MAX_PENDING)
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Starts with empty windows and a new lock."""
        self._lock = threading.Lock()
        self._pending.clear()
        self._current, self._previous = Window(self.size), Window(self.size)
        self._since_us = -1

    def offer(self, rule: str, key: str) -> None:
        """Records a refusal."""
        self._pending.append((rule, key if len(key) <= MAX_KEY_LENGTH else HashedKey(self._hash(key))))
        full = len(self._pending) > MAX_PENDING // 2  # the counting thread does not get to run: wait for it
        if self._lock.acquire(full, 0.1 if full else -1):
            try:
                self._count_pending()
            finally:
                self._lock.release()

    def _count_pending(self) -> None:
        self._rotate()
        while self._pending:
            self._current.add(self._pending.popleft())

    def _rotate(self) -> None:
        """Starts a new window when the current one has ended."""
        now_us = self._clock.now_us()
        if self._since_us < 0 or now_us < self._since_us:  # first call, or the clock went back
            self._since_us = now_us
        passed = (now_us - self._since_us) // self.window_us
        if passed:
            self._previous = self._current if passed == 1 else Window(self.size)
            self._current = Window(self.size)
            self._since_us += passed * self.window_us

    @property
    def offered(self) -> int:
        """How many refusals were offered in the windows that `top` covers."""
        return self.look()[0]

    def top(self, n: int | None = None) -> list[Offender]:
        """The heaviest first: by guaranteed count (count − error), then by count. None: all counted keys, at most twice `size`;
        every key with more than `offered / size` is among them."""
        return self.look(n)[1]

    def look(self, n: int | None = None, show_keys: bool = False) -> tuple[int, list[Offender]]:
        """(`offered`, `top(n)`) of one moment; `show_keys` shows the keys this once."""
        with self._lock:
            self._count_pending()
            windows = (self._current, self._previous)
            total = sum(window.total for window in windows)
            both = {item: [window.estimate(item) for window in windows] for window in windows for item in window.counts}
        found = [(item, sum(count for count, _ in pair), sum(error for _, error in pair)) for item, pair in both.items()]
        found.sort(key=lambda one: (one[2] - one[1], -one[1], one[0]))
        return total, [Offender(item[0], self._shown(item[1], show_keys), count, error) for item, count, error in found[:n]]

    def _shown(self, key: str, show: bool) -> str:
        return key if show or self.show_keys or isinstance(key, HashedKey) else self._hash(key)
