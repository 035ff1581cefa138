"""Prometheus: a collector that reads tallies when it is scraped. Nothing of it is on the way of a request.

Counting with the client library where a decision is made was rejected: an increment costs more than most decisions do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import ConfigurationError
from .metrics import COUNTER, HISTOGRAM, MEASURES, Labels, MetricSpec, offender_measure
from .snapshot import Histogram, SnapshotSource

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ModuleNotFoundError as error:
    raise ConfigurationError(
        "limitkeeper.observe.prometheus needs prometheus-client: pip install 'limitkeeper[prometheus]'"
    ) from error


class LimitkeeperCollector(Collector):
    """`LimitkeeperCollector(gate)`: the gate's numbers at `/metrics`, in prometheus_client's default registry or the one given.

    One collector for all gates of a registry (`LimitkeeperCollector(one, other)`, or `add`). Gates of the same policy name are
    added up. `offenders` shows that many of the heaviest offenders as series of their own: their keys are hashed, but the
    series come and go with them. `registry=None` registers nowhere.
    """

    def __init__(self, *gates: Any, registry: CollectorRegistry | None = REGISTRY, offenders: int = 0) -> None:
        if isinstance(offenders, bool) or not isinstance(offenders, int) or not 0 <= offenders <= 100:
            raise ConfigurationError(f"offenders={offenders!r}: each is a time series; write a number between 0 and 100")
        self._gates: tuple[SnapshotSource, ...] = ()
        self._measures = (*MEASURES, offender_measure(offenders)) if offenders else MEASURES
        for gate in gates:
            self.add(gate)
        if registry is not None:
            registry.register(self)

    def add(self, gate: Any) -> None:
        """One more gate."""
        if not callable(getattr(gate, "tally", None)):
            raise ConfigurationError(f"{gate!r} counts nothing: give a Gate (a middleware has it as `.gate`)")
        if any(gate is one for one in self._gates):
            raise ConfigurationError(f"{gate!r} is here already; once more would count it twice")
        self._gates = (*self._gates, gate)

    def describe(self) -> Iterator[Metric]:
        """The names, so that a registry can refuse the same ones twice."""
        for measure in self._measures:
            yield family(measure, {})

    def collect(self) -> Iterator[Metric]:
        """What a scrape shows: every number read at one moment for each gate."""
        tallies = [gate.tally() for gate in self._gates]
        for measure in self._measures:
            yield family(measure, measure.of(tallies))


def family(measure: MetricSpec, values: dict[Labels, Any]) -> Metric:
    """A measure's values in Prometheus' own form."""
    name = f"limitkeeper_{measure.name}"
    if measure.kind == HISTOGRAM:
        histogram = HistogramMetricFamily(name, measure.help, labels=measure.labels)
        for labels, value in values.items():
            histogram.add_metric(labels, buckets(value, measure.scale), value.sum * measure.scale)
        return histogram
    kind = CounterMetricFamily if measure.kind == COUNTER else GaugeMetricFamily
    found = kind(name, measure.help, labels=measure.labels)
    for labels, value in values.items():
        found.add_metric(labels, value)
    return found


def buckets(histogram: Histogram, scale: float) -> list[tuple[str, float]]:
    """Cumulative counts under their upper ends in seconds."""
    found, total = [], 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        total += count
        found.append((str(floatToGoString(round(bound * scale, 9))), float(total)))  # type: ignore[no-untyped-call]
    return [*found, ("+Inf", float(histogram.count))]
