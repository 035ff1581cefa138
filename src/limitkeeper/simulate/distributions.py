"""Service times: constant, exponential, or through given percentiles.

    800ms                         constant
    {mean: 20ms}                  exponential
    {p50: 200ms, p95: 600ms, …}   log t is linear in the normal quantile z between the given points and beyond them: two
                                  percentiles make a log-normal distribution; at most `max` (default: 20 × the highest)

Rejected: interpolating the percentiles linearly, which has no tail behind the last one: queues are made by the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from random import Random
from statistics import NormalDist

from ..errors import ConfigurationError

#: Draws a time in µs.
Draw = Callable[[], int]


@dataclass(frozen=True)
class ServiceTime:
    """A distribution of times in µs: `constant`, `mean` of an exponential, or `percentiles` (percent, µs)."""

    constant_us: int = 0
    mean_us: int = 0
    percentiles: tuple[tuple[float, int], ...] = ()
    max_us: int = 0

    @staticmethod
    def of(values: Mapping[str, int]) -> ServiceTime:
        """From names: `mean`, or `p50`, `p95` …, and `max`; ConfigurationError where they contradict each other."""
        points = sorted((float(name[1:]), value) for name, value in values.items() if name[0] == "p")
        if len(points) == 1 or ("mean" in values) == bool(points):
            raise ConfigurationError("a distribution has a mean, or two percentiles or more; write {p50: 20ms, p95: 60ms}")
        times = [value for _, value in points]
        if times != sorted(set(times)) or (points and not 0 < points[0][0] < points[-1][0] < 100):
            raise ConfigurationError("percentiles lie between p0 and p100 and grow; write {p50: 20ms, p95: 60ms}")
        most = values.get("max", 20 * times[-1] if times else 0)
        return ServiceTime(mean_us=values.get("mean", 0), percentiles=tuple(points), max_us=most)

    def sampler(self, rng: Random) -> Draw:
        if self.percentiles:
            return self._through_percentiles(rng)
        if self.mean_us:
            draw, rate = rng.expovariate, 1 / self.mean_us
            return lambda: int(draw(rate))
        constant = self.constant_us
        return lambda: constant

    def _through_percentiles(self, rng: Random) -> Draw:
        normal = NormalDist()
        points = [(normal.inv_cdf(percent / 100), log(value)) for percent, value in self.percentiles]
        lines = []  # (z of the end, slope, offset)
        for (z0, y0), (z1, y1) in pairwise(points):
            slope = (y1 - y0) / (z1 - z0)
            lines.append((z1, slope, y0 - slope * z0))
        gauss, most = rng.gauss, self.max_us
        _, last_slope, last_offset = lines.pop()

        def draw() -> int:
            z = gauss(0.0, 1.0)
            for end, slope, offset in lines:
                if z < end:
                    return int(exp(slope * z + offset))
            return min(most, int(exp(last_slope * z + last_offset)))

        return draw
