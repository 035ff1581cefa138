"""Who is refused most, in bounded memory: Space-Saving (Metwally, Agrawal, El Abbadi, 2005) over two windows of time.

A window counts at most `size` keys. A key that is counted goes up by one. A stranger takes a free counter; where none is free it
takes that of the key with the least count, `m`, and goes on from there: count = m + 1, error = m. Of n offers,

    count − error  ≤  true  ≤  count,    error ≤ n / size,    and whoever has more than n / size is among the counted.

Keys of one count stand together on a level, and the lowest level is known, so an offer is a few steps in dicts whatever the size:
a key only ever moves one level up, and when the lowest level is left empty, the next one has just been entered.

Two windows, this one and the last: what is told covers between one and two windows (5 to 10 minutes unless told otherwise), and
who stopped is forgotten. A key that only one of them counts may have had as much as that one's least in the other, so this much
is added to its count and its error; both bounds hold for the two together.

Only refusals are offered. Rejected: `stores/sharded/hot_keys.py` (Misra and Gries over a sample: it finds who is hot for a few
additions per hit, but tells no count that could be shown), halving all counts now and then (counts in fractions, bounds that
leak), a counter for every key (unbounded: a flood of keys is what this is for).
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

#: A longer key is kept as its hash: somebody who chooses his keys does not choose how much memory they take.
LONGEST = 200
#: Offers that may lie about while somebody else counts.
LATE = 4096


class HashedKey(str):
    """A key that was too long to be kept: this is its hash already."""

    __slots__ = ()


class Window:
    """One window's counters. `least` is the lowest level; everybody who is not counted had at most that when all are taken."""

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
            count = self.errors[item] = self._make_room()
        self.counts[item] = count + 1
        self.levels.setdefault(count + 1, {})[item] = None
        if count and not self.levels[count]:
            del self.levels[count]
            if self.least == count:
                self.least = count + 1

    def _make_room(self) -> int:
        """Lets go of the key that has been on the lowest level for longest; its count."""
        lowest = self.levels[self.least]
        gone = next(iter(lowest))
        del lowest[gone], self.counts[gone], self.errors[gone]
        return self.least

    def told(self, item: Item) -> tuple[int, int]:
        """(count, error) of any item, counted or not."""
        count = self.counts.get(item)
        if count is not None:
            return count, self.errors[item]
        unseen = self.least if len(self.counts) >= self.size else 0
        return unseen, unseen


class Offenders:
    """`offer(rule, key)` when somebody is refused; `top(10)` says who that was most often in the last window or two.

    Keys are shown as hashes (see `Veil`) unless `show_keys`. Threads may offer at the same time, and nobody waits: who finds
    another one counting leaves the offer to be counted next, and only where thousands lie about lets the other one finish.
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
            raise ConfigurationError(f"size must be a whole number of keys between 1 and 100000, not {size!r}; 64 is plenty")
        self.size = size
        self.window_us = duration_us(window)
        if not self.window_us:
            raise ConfigurationError(f"window={window!r}: counting needs some time; write '5min'")
        self.show_keys = show_keys
        self._veil = KeyHash(secret)
        self._clock: Clock = SYSTEM if clock is None else clock
        self._late: deque[Item] = deque(maxlen=LATE)
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Nobody was offered, and nobody holds the lock."""
        self._lock = threading.Lock()
        self._late.clear()
        self._now, self._before = Window(self.size), Window(self.size)
        self._since_us = -1

    def offer(self, rule: str, key: str) -> None:
        """Somebody was refused."""
        self._late.append((rule, key if len(key) <= LONGEST else HashedKey(self._veil(key))))
        crowded = len(self._late) > LATE // 2  # whoever counts does not get to run: let him
        if self._lock.acquire(crowded, 0.1 if crowded else -1):
            try:
                self._catch_up()
            finally:
                self._lock.release()

    def _catch_up(self) -> None:
        self._turn()
        late = self._late
        while late:
            self._now.add(late.popleft())

    def _turn(self) -> None:
        """The end of a window, when it has come."""
        now_us = self._clock.now_us()
        if self._since_us < 0 or now_us < self._since_us:  # the first, or a clock that went back
            self._since_us = now_us
        passed = (now_us - self._since_us) // self.window_us
        if passed:
            self._before = self._now if passed == 1 else Window(self.size)
            self._now = Window(self.size)
            self._since_us += passed * self.window_us

    @property
    def offered(self) -> int:
        """How many were offered in the windows that `top` tells of."""
        return self.look()[0]

    def top(self, n: int | None = None) -> list[Offender]:
        """The heaviest first: by what they are known to have (count − error), then by what they may have. None: all that are
        counted, everybody with more than `offered / size` among them, at most twice `size`."""
        return self.look(n)[1]

    def look(self, n: int | None = None) -> tuple[int, list[Offender]]:
        """(`offered`, `top(n)`) of one moment."""
        with self._lock:
            self._catch_up()
            windows = (self._now, self._before)
            total = sum(window.total for window in windows)
            told = {item: [window.told(item) for window in windows] for window in windows for item in window.counts}
        found = [(item, sum(count for count, _ in both), sum(error for _, error in both)) for item, both in told.items()]
        found.sort(key=lambda one: (one[2] - one[1], -one[1], one[0]))
        return total, [Offender(item[0], self._shown(item[1]), count, error) for item, count, error in found[:n]]

    def _shown(self, key: str) -> str:
        return key if self.show_keys or isinstance(key, HashedKey) else self._veil(key)
