"""The quantile sketch for samples that do not fit in memory: DDSketch, with a relative error of 1 % of the value.

Rejected: t-digest and KLL, whose error is one of rank: near p99 a small error of rank is a large one of latency.
"""

from __future__ import annotations

from ..errors import ConfigurationError

try:
    from ddsketch import DDSketch
except ModuleNotFoundError as error:
    message = "more samples than fit in memory need ddsketch: pip install 'limitkeeper[plan]' or 'limitkeeper[simulate]'"
    raise ConfigurationError(message) from error

#: |estimate − exact| ≤ RELATIVE_ERROR × exact.
RELATIVE_ERROR = 0.01


class LatencySketch:
    """Percentiles of any number of samples in a few kilobytes."""

    def __init__(self) -> None:
        self._sketch = DDSketch(RELATIVE_ERROR)

    def add(self, seconds: float) -> None:
        self._sketch.add(seconds)

    def merged(self, other: LatencySketch | None) -> LatencySketch:
        """The sketch of both collections of samples."""
        found = LatencySketch()
        for one in (self, other):
            if one is not None:
                found._sketch.merge(one._sketch)
        return found

    def percentile(self, percent: float) -> float:
        value = self._sketch.get_quantile_value(percent / 100)
        return 0.0 if value is None else float(value)
