"""Prometheus collector: reads snapshots when it is scraped; it costs a request nothing.

Rejected: counting with the client library where a decision is made, because an increment costs more than most decisions do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import ConfigurationError
from .metrics import COUNTER, HISTOGRAM, METRICS, Labels, MetricSpec, Value, offender_metric
from .snapshot import Histogram, Snapshot, SnapshotSource, check_source

try:
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ModuleNotFoundError as error:
    raise ConfigurationError(
        "limitkeeper.observe.prometheus needs prometheus-client: pip install 'limitkeeper[prometheus]'"
    ) from error


class LimitkeeperCollector(Collector):
    """`LimitkeeperCollector(gate)`: the gate's metrics at `/metrics`, in prometheus_client's default registry or the one given.

    One collector serves all gates of a registry (`LimitkeeperCollector(one, other)`, or `add`). Gates of the same policy name are
    added up. `offenders` exports that many of the heaviest offenders as series of their own: their keys are hashed, but the
    series change over time. `registry=None` registers nowhere.
    """

    def __init__(self, *gates: SnapshotSource, registry: CollectorRegistry | None = REGISTRY, offenders: int = 0) -> None:
        if isinstance(offenders, bool) or not isinstance(offenders, int) or not 0 <= offenders <= 100:
            raise ConfigurationError(f"offenders={offenders!r}: each is a time series; write a number between 0 and 100")
        self._gates: tuple[SnapshotSource, ...] = ()
        self._metrics = (*METRICS, offender_metric(offenders)) if offenders else METRICS
        for gate in gates:
            self.add(gate)
        if registry is not None:
            registry.register(self)

    def add(self, gate: SnapshotSource) -> None:
        """Adds a gate."""
        check_source(gate)
        if any(gate is one for one in self._gates):
            raise ConfigurationError(f"{gate!r} was added before; adding it again would count it twice")
        self._gates = (*self._gates, gate)

    def describe(self) -> Iterator[Metric]:
        """The metric names, so that a registry can refuse duplicates."""
        for metric in self._metrics:
            yield family(metric, {})

    def collect(self) -> Iterator[Metric]:
        """The result of a scrape: all numbers of a gate are read at one moment."""
        snapshots = [gate.snapshot() for gate in self._gates]
        for metric in self._metrics:
            yield family(metric, metric.collect(snapshots))


def family(metric: MetricSpec, values: dict[Labels, Value]) -> Metric:
    """A metric's values in the client library's form."""
    name = f"limitkeeper_{metric.name}"
    if metric.kind == HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.help, labels=metric.labels)
        for labels, value in values.items():
            histogram.add_metric(labels, buckets(value, metric.scale), value.sum * metric.scale)
        return histogram
    kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
    found = kind(name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        found.add_metric(labels, value)
    return found


def buckets(histogram: Histogram, scale: float) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound in seconds."""
    found = [
        (str(floatToGoString(round(bound * scale, 9))), float(total))  # type: ignore[no-untyped-call]
        for bound, total in histogram.cumulative()
    ]
    return [*found, ("+Inf", float(histogram.count))]


def scrape(snapshots: Sequence[Snapshot]) -> tuple[bytes, str]:
    """The metrics of several snapshots together, in Prometheus' text format, and its content type."""
    registry = CollectorRegistry()
    LimitkeeperCollector(*snapshots, registry=registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST
