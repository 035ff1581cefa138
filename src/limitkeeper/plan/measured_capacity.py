"""Capacity from measurements: percentiles against the SLO, the load–latency curve, the knee; limit = margin × lowest ceiling.

Ceilings that measurements give: the highest load of the curve before the SLO is broken; the peak of the scalability law; and
concurrency / p95 where the safe concurrency is known. Latencies alone give no rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor, isfinite

from .capacity_formula import DEFAULT_MARGIN, Ceiling
from .load_latency_curve import LoadStep, check_rising
from .measurement_files import Measurements
from .percentiles import PERCENTS, LatencySamples, interpolated
from .quantities import Number, duration_text, number_of, round_down, rps
from .scalability_law import Scalability, fit_scalability
from .slo import DEFAULT_SLO, Slo, SloCheck

#: Share of requests that may fail in a step that counts as sustained.
MAX_ERRORS = 0.01
NO_LIMIT = "Latencies alone give no limit: add pods and concurrency, or a log with times."


@dataclass(frozen=True, slots=True)
class Analysis:
    """What measurements say. `limit` None: no ceiling follows from them."""

    sources: tuple[str, ...]
    slo: Slo
    margin: Fraction
    samples: LatencySamples
    steps: tuple[LoadStep, ...]
    scalability: Scalability | None
    ceilings: tuple[Ceiling, ...]
    notes: tuple[str, ...]
    total_concurrency: int | None = None

    @property
    def limit(self) -> Fraction | None:
        return round_down(self.ceilings[0].rate * self.margin) if self.ceilings else None

    @property
    def checks(self) -> list[SloCheck]:
        """The SLO against all samples together."""
        return self.slo.check(self.samples.percentile) if self.samples.count else []

    @property
    def burst(self) -> int:
        """The part of the requests in progress at the ceiling that the margin leaves free, at least 1."""
        last, _ = self.sustained()
        in_flight = self.total_concurrency or (last.in_flight if last is not None and last.in_flight else 1.0)
        return max(1, floor(in_flight * (1 - self.margin)))

    def sustained(self) -> tuple[LoadStep | None, LoadStep | None]:
        """The last step before the SLO is broken, and the first that breaks it."""
        last = None
        for step in self.steps:
            if not step.meets(self.slo, MAX_ERRORS):
                return last, step
            last = step
        return last, None

    def reasons(self) -> list[str]:
        found = [*self._samples(), *self._curve(), *self._law()]
        if not self.ceilings:
            return [*found, *([] if self.steps else [NO_LIMIT]), *self.notes]
        lowest, limit = self.ceilings[0], self.limit or Fraction(0)
        others = ", ".join(f"{one.name} {rps(one.rate)}" for one in self.ceilings[1:])
        found.append(f"The lowest ceiling is {lowest.name}: {rps(lowest.rate)}{f' (the others: {others})' if others else ''}.")
        found.append(f"{rps(lowest.rate)} × {float(self.margin):g} = {rps(limit)}: the limit.")
        return [*found, *self.notes]

    def _samples(self) -> list[str]:
        if not self.samples.count:
            return []
        values = " / ".join(duration_text(self.samples.percentile(percent)) for percent in PERCENTS)
        how = f"by DDSketch, each within {self.samples.error:.0%}"
        if self.samples.exact:
            between = " / ".join(duration_text(interpolated(self.samples.ordered(), percent)) for percent in PERCENTS)
            how = f"by nearest rank, latencies that requests had (interpolation gives {between}, between two of them)"
        met = "met" if all(check.met for check in self.checks) else "broken"
        return [
            f"{self.samples.count:,} samples: p50 / p95 / p99 = {values}, {how}.",
            f"The SLO is {met}: {', '.join(map(str, self.checks))}.",
            *self._slow(),
        ]

    def _slow(self) -> list[str]:
        percent, objective = self.slo.longest
        if self.samples.longest <= objective:
            return []
        above = self.samples.above(objective)
        count = "Some" if above is None else f"{above:,} of {self.samples.count:,}"
        goal, longest = duration_text(objective), duration_text(self.samples.longest)
        return [f"{count} samples took longer than {goal} (the objective of p{percent:g}), the longest {longest}: timeout risk."]

    def _curve(self) -> list[str]:
        if not self.steps:
            return []
        last, broken = self.sustained()
        if broken is None:
            top = self.steps[-1]
            return [f"The SLO holds at every load up to {rps(top.throughput)}: the ceiling is at least that; test more load."]
        why = ", ".join(str(check) for check in broken.checks(self.slo) if not check.met) or f"{broken.error_share:.1%} errors"
        if last is None:
            return [f"The SLO is broken at the lowest load, {rps(broken.load)} ({why}): begin with less load."]
        return [f"The SLO holds up to {rps(last.throughput)} and is broken at {rps(broken.load)} ({why})."]

    def _law(self) -> list[str]:
        law = self.scalability
        if law is None:
            return []
        text = f"Universal scalability law: contention {law.contention:.3g}, coherency {law.coherency:.3g}, error {law.error:.1%}"
        if not isfinite(law.knee_concurrency):
            return [f"{text}; the throughput grows with the load: there is no knee in the measured range."]
        peak = f"; the peak is {rps(law.peak_throughput)}" if isfinite(law.peak_throughput) else ""
        guess = "" if self.peak_measured else ", beyond the measured loads: an extrapolation"
        return [f"{text}; the knee is at {law.knee_concurrency:.0f} in progress and {rps(law.knee_throughput)}{peak}{guess}."]

    @property
    def peak_measured(self) -> bool:
        """Whether the peak of the law is near the measured throughputs; otherwise it is no ceiling to rely on."""
        top = max((step.throughput for step in self.steps), default=0.0)
        return self.scalability is not None and self.scalability.peak_throughput <= 1.2 * top

    def warnings(self) -> list[str]:
        found = [f"the SLO is broken: {check}" for check in self.checks if not check.met]
        for percent, _ in self.slo.objectives:
            if any(percent not in step.percentiles for step in self.steps):
                higher = all(step.percentile(percent) is not None for step in self.steps)
                remedy = "the next higher percentile takes its place" if higher else "its objective is not checked there"
                found.append(f"p{percent:g} was not measured at every load: {remedy}")
        if self.steps and self.sustained()[1] is None:
            found.append("no load broke the SLO: the limit follows from the highest load that was measured, not from capacity")
        refused = any(step.refused for step in self.steps)
        return found + ["some requests were refused (429): a limit was in force while measuring"] * refused


def analyze(
    measurements: Measurements | Sequence[Measurements],
    *,
    slo: Slo | str = DEFAULT_SLO,
    margin: Number = DEFAULT_MARGIN,
    total_concurrency: int | None = None,
) -> Analysis:
    """Analyzes measurements; several files (one per load) together make one curve, by concurrency or load."""
    files = [measurements] if isinstance(measurements, Measurements) else list(measurements)
    goal = Slo.of(slo) if isinstance(slo, str) else slo
    share = number_of(margin, "margin", "write a share of the ceiling between 0.5 and 0.8, as in 0.7", most=1)
    samples = LatencySamples(keep=max([one.samples.keep for one in files], default=1))
    if len(files) == 1:
        samples = files[0].samples
    else:
        for one in files:
            samples.extend(one.samples)
    steps = [step for one in files for step in one.steps]
    if len(files) > 1:
        steps.sort(key=lambda step: (step.concurrency or 0.0, step.load))
        check_rising(steps, " and ".join(one.source for one in files))
    sources = tuple(f"{one.source} ({one.format})" for one in files)
    texts = tuple(note for one in files for note in one.notes)
    law = law_of(steps)
    found = Analysis(sources, goal, share, samples, tuple(steps), law, (), texts, total_concurrency)
    return replace(found, ceilings=tuple(sorted(ceilings_of(found), key=lambda one: one.rate)))


def law_of(steps: Sequence[LoadStep]) -> Scalability | None:
    """The law of the steps; None for fewer than four, which three parameters would fit whatever they are."""
    points = [(step.in_flight, step.throughput) for step in steps if step.in_flight and step.throughput > 0]
    return fit_scalability([(n, x) for n, x in points if n]) if len({n for n, _ in points}) >= 4 else None


def ceilings_of(found: Analysis) -> list[Ceiling]:
    ceilings, total = [], found.total_concurrency
    if total is not None and found.samples.count and (p95 := Fraction(str(found.samples.percentile(95.0)))):
        ceilings.append(Ceiling("concurrency / p95", total / p95, f"{total} / {duration_text(p95)}"))
    last, _ = found.sustained()
    if last is not None:
        ceilings.append(Ceiling(f"the highest load within {found.slo}", Fraction(str(last.throughput)), "measured"))
    law = found.scalability
    if law is not None and found.peak_measured:
        ceilings.append(Ceiling("the peak of the scalability law", Fraction(str(law.peak_throughput)), "fitted"))
    return [one for one in ceilings if one.rate > 0]
