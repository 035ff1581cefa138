"""Service level objectives of latency: `p95=800ms,p99=2s`, and whether measured percentiles meet them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from ..errors import ConfigurationError
from ..rate import Duration
from .limit_shares import parse_amounts
from .quantities import duration_text, number_of, seconds_of

REMEDY = "write percentiles with latencies, as in p95=800ms,p99=2s"


@dataclass(frozen=True, slots=True)
class SloCheck:
    """One objective and what was measured, in seconds."""

    percent: float
    objective: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured <= self.objective

    def __str__(self) -> str:
        relation = "≤" if self.met else ">"
        return f"p{self.percent:g} {duration_text(self.measured)} {relation} {duration_text(self.objective)}"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives: (percent, seconds), the lowest percentile first."""

    objectives: tuple[tuple[float, Fraction], ...]

    @staticmethod
    def of(objectives: str | Mapping[str, Duration]) -> Slo:
        """`Slo.of("p95=800ms,p99=2s")`; ConfigurationError for objectives that contradict each other."""
        found = []
        for name, value in (parse_amounts(objectives) if isinstance(objectives, str) else objectives).items():
            if name[:1].lower() != "p":
                raise ConfigurationError(f"{name!r} is no percentile; {REMEDY}")
            percent = number_of(name[1:], f"the percentile {name!r}", REMEDY, most=100)
            found.append((float(percent), seconds_of(value, f"the objective of {name}")))
        found.sort()
        for (low, first), (high, second) in pairwise(found):
            if second < first:
                raise ConfigurationError(f"p{high:g} can't be below p{low:g}: {duration_text(second)} < {duration_text(first)}")
        return Slo(tuple(found))

    def check(self, percentile: Callable[[float], float | None]) -> list[SloCheck]:
        """Checks measured percentiles; one that was not measured (None) is left out."""
        measured = [(percent, float(objective), percentile(percent)) for percent, objective in self.objectives]
        return [SloCheck(percent, objective, value) for percent, objective, value in measured if value is not None]

    @property
    def longest(self) -> tuple[float, float]:
        """The objective of the highest percentile."""
        percent, seconds = self.objectives[-1]
        return percent, float(seconds)

    def __str__(self) -> str:
        return ", ".join(f"p{percent:g} ≤ {duration_text(seconds)}" for percent, seconds in self.objectives)


DEFAULT_SLO = Slo.of("p95=800ms,p99=2s")
