"""Latency percentiles: exact by nearest rank while the samples fit in memory, by a sketch with a stated error beyond.

    nearest rank:   the ⌈p·n / 100⌉-th smallest sample
    interpolated:   between the samples around position p·(n − 1) / 100

Nearest rank is a latency that some request had, and at least p % of the requests were no slower: what an SLO states.
Interpolation (the default of numpy and of spreadsheets) invents values between groups: of 50 requests of 200 ms and 50 slower
ones it makes a p50 of 400 ms, which no request took.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import floor, isfinite
from typing import TYPE_CHECKING

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from .ddsketch import LatencySketch

#: Samples that are kept exactly: 8 MB.
MAX_EXACT_SAMPLES = 1_000_000
PERCENTS = (50.0, 95.0, 99.0)


def _position(percent: float) -> Fraction:
    found = Fraction(str(percent))
    if not 0 < found <= 100:
        raise ConfigurationError(f"a percentile is above 0 and at most 100, got {percent!r}; write 95 for p95")
    return found


def nearest_rank(ordered: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of the sorted samples do not exceed."""
    rank = -(-_position(percent) * len(ordered) // 100)
    return ordered[int(rank) - 1]


def interpolated(ordered: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation between the two nearest sorted samples."""
    place = _position(percent) * (len(ordered) - 1) / 100
    low = floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * float(place - low)


class LatencySamples:
    """Latencies in seconds. `keep` samples are kept exactly; with more, a sketch takes them all and `exact` is False."""

    def __init__(self, seconds: Iterable[float] = (), keep: int = MAX_EXACT_SAMPLES) -> None:
        self.keep = keep
        self.count = 0
        self.total = 0.0
        self.longest = 0.0
        self._kept = array("d")
        self._sorted = True
        self._sketch: LatencySketch | None = None
        for one in seconds:
            self.add(one)

    def add(self, seconds: float) -> None:
        if not isfinite(seconds) or seconds < 0:
            raise ValueError(f"a latency is at least 0, got {seconds!r}")
        self.count += 1
        self.total += seconds
        self.longest = max(self.longest, seconds)
        if self._sketch is not None:
            self._sketch.add(seconds)
            return
        self._kept.append(seconds)
        self._sorted = False
        if self.count > self.keep:
            self._begin_sketch()

    def extend(self, other: LatencySamples) -> None:
        """Adds all samples of another collection."""
        for one in other._kept:
            self.add(one)
        if other._sketch is not None:
            if self._sketch is None:
                self._begin_sketch()
            self._sketch = other._sketch.merged(self._sketch)
            self.count, self.total = self.count + other.count, self.total + other.total
            self.longest = max(self.longest, other.longest)

    def _begin_sketch(self) -> None:
        from .ddsketch import LatencySketch

        self._sketch = LatencySketch()
        for one in self._kept:
            self._sketch.add(one)
        self._kept = array("d")

    @property
    def exact(self) -> bool:
        return self._sketch is None

    @property
    def error(self) -> float:
        """The largest relative error of a percentile; 0 while exact."""
        if self._sketch is None:
            return 0.0
        from .ddsketch import RELATIVE_ERROR

        return RELATIVE_ERROR

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def ordered(self) -> Sequence[float]:
        """The exact samples, sorted; empty with a sketch."""
        if not self._sorted:
            self._kept = array("d", sorted(self._kept))
            self._sorted = True
        return self._kept

    def percentile(self, percent: float) -> float:
        """The percentile by nearest rank, or by the sketch."""
        if not self.count:
            raise ConfigurationError("there are no samples; a percentile needs at least one")
        _position(percent)
        return nearest_rank(self.ordered(), percent) if self._sketch is None else self._sketch.percentile(percent)

    def above(self, seconds: float) -> int | None:
        """How many samples exceed a latency; None with a sketch."""
        return None if self._sketch is not None else sum(one > seconds for one in self._kept)
