"""LoadShedder: under overload the least critical calls are refused first, and the most critical ones keep a reserve.

    load   of an interval: mean of in_use / ((1 − reserve) · size), as the calls that came in it found it
    level  how many of the lowest classes are shed: + 1 after an interval with load ≥ high,
           − 1 after `patience` intervals in a row with load ≤ low, otherwise unchanged (hysteresis); intervals without a call
           have the load that the next call finds

The highest class is never shed by level, and only it uses the reserve: `reserve · size` places stay free of all others. A level
rises within one interval and falls slowly: a level that is lowered too early brings the overload back. Rejected: shedding at
random by a probability for each class, which refuses critical calls while background ones run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..clock import SYSTEM, Clock
from ..errors import BulkheadFull, ConfigurationError
from ..observe.events import ALLOWED, REFUSED
from ..rate import Duration, duration_us
from .bulkhead import Bulkhead, PlaceContext, checked_size


class ShedCall(PlaceContext):
    """One call of a class: a context manager, sync and async, and a decorator."""

    __slots__ = ("_criticality", "_shedder")

    def __init__(self, shedder: LoadShedder, criticality: str) -> None:
        self._shedder, self._criticality = shedder, criticality

    def acquire(self) -> None:
        if self._shedder.take(self._criticality):
            self._shedder.bulkhead.acquire()

    async def aacquire(self) -> None:
        if self._shedder.take(self._criticality):
            await self._shedder.bulkhead.aacquire()

    def release(self) -> None:
        self._shedder.bulkhead.release()


class LoadShedder:
    """`LoadShedder(Bulkhead(100, 50, "1s"))`: `with shedder.call("background"):`, or raises `BulkheadFull`.

    `classes` are ordered from the most critical to the least. Only the first may wait in the bulkhead's queue; the others run
    at once or are refused. The bulkhead may be that of an `AdaptiveBulkhead`.

    `reserve` is the part of the places that is kept for the first class. After an `interval` in which calls found on average
    `high` of the other places taken, the least critical class is shed, after another one the next; after `patience` intervals
    in a row below `low` it is admitted again.
    """

    def __init__(
        self,
        bulkhead: Bulkhead,
        classes: Sequence[str] = ("critical", "normal", "background"),
        *,
        reserve: float = 0.2,
        high: float = 0.9,
        low: float = 0.6,
        interval: Duration = "1s",
        patience: int = 5,
        clock: Clock = SYSTEM,
    ) -> None:
        self._rank = {name: rank for rank, name in enumerate(classes)}
        if len(self._rank) < 2 or len(self._rank) < len(classes):
            raise ConfigurationError(f"expected two or more different classes, the most critical first, got {classes!r}")
        if not 0 <= reserve < 1 or not 0 < low < high <= 1:
            raise ConfigurationError(
                f"expected 0 ≤ reserve < 1 and 0 < low < high ≤ 1, got reserve={reserve!r}, low={low!r}, high={high!r}"
            )
        self.bulkhead, self.reserve, self.high, self.low = bulkhead, reserve, high, low
        self.patience, self._interval_us, self._clock = checked_size(patience, "patience", 1), duration_us(interval), clock
        self.level = 0
        self.shed = dict.fromkeys(classes, 0)  # calls refused, by class
        self._end_us = clock.now_us() + self._interval_us
        self._sum, self._asked, self._calm = 0.0, 0, 0

    def call(self, criticality: str) -> ShedCall:
        """The context of one call of a class."""
        if criticality not in self._rank:
            raise ConfigurationError(
                f"unknown class {criticality!r}; known are, the most critical first: {', '.join(self._rank)}"
            )
        return ShedCall(self, criticality)

    def take(self, criticality: str) -> bool:
        """Takes a place for a call that is not of the highest class, or raises `BulkheadFull`; True for the highest class,
        which acquires from the bulkhead."""
        bulkhead, rank = self.bulkhead, self._rank[criticality]
        with bulkhead._lock:
            most = bulkhead.max_concurrent - math.ceil(bulkhead.max_concurrent * self.reserve)
            self._observe(bulkhead.in_use / max(1, most))
            is_shed = rank >= len(self._rank) - self.level
            if rank == 0:
                return True
            taken = not is_shed and bulkhead.in_use < most
            bulkhead.in_use += taken
            bulkhead._permitted += taken
            bulkhead._rejected += not taken
            self.shed[criticality] += not taken
        bulkhead.events.publish(ALLOWED if taken else REFUSED, bulkhead.name, criticality)
        if not taken:
            why = f"sheds {criticality!r} calls" if is_shed else f"has no place outside its reserve for {criticality!r} calls"
            raise BulkheadFull(bulkhead.name, bulkhead.max_concurrent, why)
        return False

    def _observe(self, load: float) -> None:
        """Adds the load that a call found; at the end of an interval the level follows its mean."""
        now_us = self._clock.now_us()
        left_us = self._end_us - now_us
        if not 0 < left_us <= self._interval_us and self._asked:  # more than an interval is left when the clock went back
            mean, empty = self._sum / self._asked, max(0, -left_us // self._interval_us)
            self._calm = (self._calm + 1 if mean <= self.low else 0) + (empty if load <= self.low else 0)
            if mean >= self.high:
                self.level = min(self.level + 1, len(self._rank) - 1)
            if self._calm >= self.patience:
                self.level = max(0, self.level - self._calm // self.patience)
                self._calm = 0
            self._sum, self._asked, self._end_us = 0.0, 0, now_us + self._interval_us
        self._sum += load
        self._asked += 1
