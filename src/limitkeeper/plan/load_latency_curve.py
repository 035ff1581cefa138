"""A load–latency curve: load steps by rising load, each with what a service did under one offered load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..errors import ConfigurationError
from .percentiles import LatencySamples
from .quantities import rps
from .slo import Slo, SloCheck

#: Percentiles of steps that are made of samples.
STEP_PERCENTS = (50.0, 75.0, 90.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class LoadStep:
    """One load. `load` and `throughput` in RPS (throughput: answered without an error), latencies in seconds.

    `concurrency` None: not recorded; `in_flight` is then throughput × mean (Little's law). `refused` are answers 429."""

    load: float
    throughput: float
    percentiles: Mapping[float, float] = field(default_factory=dict)
    mean: float | None = None
    concurrency: float | None = None
    requests: int = 0
    errors: int = 0
    refused: int = 0
    line: int = 0

    @property
    def in_flight(self) -> float | None:
        if self.concurrency is not None:
            return self.concurrency
        return None if self.mean is None else self.throughput * self.mean

    @property
    def error_share(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    @property
    def refused_share(self) -> float:
        return self.refused / self.requests if self.requests else 0.0

    def percentile(self, percent: float) -> float | None:
        """The percentile, or the next higher one that was measured, which is at least as long; None: there is none."""
        return min((value for known, value in self.percentiles.items() if known >= percent), default=None)

    def checks(self, slo: Slo) -> list[SloCheck]:
        return slo.check(self.percentile)

    def meets(self, slo: Slo, errors: float) -> bool:
        return self.error_share <= errors and all(check.met for check in self.checks(slo))

    def as_dict(self) -> dict[str, object]:
        return {
            "load": self.load,
            "throughput": self.throughput,
            "in_flight": self.in_flight,
            "mean": self.mean,
            "percentiles": {f"p{percent:g}": value for percent, value in self.percentiles.items()},
            "requests": self.requests,
            "errors": self.errors,
            "refused": self.refused,
        }


def step_of(samples: LatencySamples, seconds: float, load: float | None = None, errors: int = 0, refused: int = 0) -> LoadStep:
    """The step of `samples` (without errors and refusals) that were taken in so many seconds."""
    requests = samples.count + errors + refused
    found = {percent: samples.percentile(percent) for percent in STEP_PERCENTS} if samples.count else {}
    offered = requests / seconds if load is None else load
    mean = samples.mean if samples.count else None
    return LoadStep(offered, samples.count / seconds, found, mean, None, requests, errors, refused)


def check_rising(steps: Sequence[LoadStep], source: str) -> None:
    """Raises ConfigurationError at the first step whose load (in a closed loop: concurrency) is not above the one before."""
    closed = all(step.concurrency is not None for step in steps)
    for before, after in pairwise(steps):
        first, second = (step.concurrency or 0.0 if closed else step.load for step in (before, after))
        if second <= first:
            place = f"{source}:{after.line}" if after.line else source
            what = (
                f"concurrency falls from {first:g} to {second:g}" if closed else f"load falls from {rps(first)} to {rps(second)}"
            )
            raise ConfigurationError(f"{place}: the {what}; a curve has rising loads: sort the rows, and keep one row per load")
