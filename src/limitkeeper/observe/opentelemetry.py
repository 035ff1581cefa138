"""OpenTelemetry metrics: observable instruments that read snapshots; also the span attributes of a decision.

Only the API is needed; without an SDK all of this does nothing. Names are those of Prometheus with a dot
(`limitkeeper.requests`), so that an exporter's form of them (`limitkeeper_requests_total`) is the name in the alert rules.

The API has no observable histogram, and recording every decision costs several microseconds. So a histogram is exported as three
sums: `.bucket` (cumulative, with the attribute `le` in seconds), `.count` and `.sum`. They are up-down counters without a unit,
though they only grow: exporters append `_total` to a monotonic name, while the alerts need `limitkeeper_response_seconds_bucket`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from .metrics import COUNTER, HISTOGRAM, METRICS, MetricSpec, Value
from .snapshot import Histogram, SnapshotSource, check_source

if TYPE_CHECKING:
    from ..policy.evaluation import Evaluation

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import CallbackOptions, Observation
except ModuleNotFoundError as error:
    raise ConfigurationError(
        "limitkeeper.observe.opentelemetry needs the OpenTelemetry API: pip install 'limitkeeper[opentelemetry]'"
    ) from error

Samples = Iterable[tuple[dict[str, str], float]]
AttributeValue = bool | int | float | str | list[str]


def instrument(*gates: SnapshotSource, meter: metrics.Meter | None = None) -> None:
    """Registers every metric of the gates with the meter (one call per meter; gates of the same policy are added up)."""
    for gate in gates:
        check_source(gate)
    used = metrics.get_meter("limitkeeper") if meter is None else meter
    for metric in METRICS:
        _register(metric, gates, used)


def _register(metric: MetricSpec, gates: tuple[SnapshotSource, ...], meter: metrics.Meter) -> None:
    name = f"limitkeeper.{metric.name}"

    def observe(samples: Callable[[Value], Samples]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def callback(options: CallbackOptions) -> Iterator[Observation]:
            for labels, value in metric.collect(gate.snapshot() for gate in gates).items():
                attributes = dict(zip(metric.labels, labels, strict=True))
                for more, number in samples(value):
                    yield Observation(number, {**attributes, **more})

        return callback

    if metric.kind == HISTOGRAM:
        for suffix, samples in histogram_sums(metric.scale).items():
            meter.create_observable_up_down_counter(f"{name}.{suffix}", [observe(samples)], "", metric.help)
    elif metric.kind == COUNTER:
        meter.create_observable_counter(name, [observe(lambda value: [({}, value)])], "1", metric.help)
    else:
        meter.create_observable_gauge(name, [observe(lambda value: [({}, value)])], "", metric.help)


def histogram_sums(scale: float) -> dict[str, Callable[[Histogram], Samples]]:
    """The sums that a histogram is exported as, by the suffix of their names."""

    def buckets(value: Histogram) -> Samples:
        return [*(({"le": f"{bound * scale:g}"}, total) for bound, total in value.cumulative()), ({"le": "+Inf"}, value.count)]

    return {
        "bucket": buckets,
        "count": lambda value: [({}, value.count)],
        "sum": lambda value: [({}, value.sum * scale)],
    }


def annotate(evaluation: Evaluation, span: trace.Span | None = None) -> None:
    """Sets the `limitkeeper.*` attributes of a decision on a span (default: the current one); never a key."""
    span = trace.get_current_span() if span is None else span
    if span.is_recording():
        span.set_attributes(attributes_of(evaluation))


def attributes_of(evaluation: Evaluation) -> dict[str, AttributeValue]:
    """The span attributes. `limitkeeper.rule` is the rule that refused or, of those that allowed, the one closest to refusing."""
    found: dict[str, AttributeValue] = {"limitkeeper.allowed": bool(evaluation.allowed)}
    decision, refusal = evaluation.decision, evaluation.refusal
    if refusal is not None:
        found["limitkeeper.reason"] = refusal.reason
        if refusal.rule is not None:
            found["limitkeeper.rule"] = refusal.rule.name
        if refusal.retry_after is not None:
            found["limitkeeper.retry_after"] = refusal.retry_after
    if decision is not None:  # a second limit of a rule has a name of its own
        rules = (entry.rule.name for entry in evaluation.entries if entry.named.name == decision.name)
        found.setdefault("limitkeeper.rule", next(rules, str(decision.name)))
        found["limitkeeper.limit"] = decision.limit
        found["limitkeeper.remaining"] = decision.remaining
    if evaluation.wait_us:
        found["limitkeeper.wait"] = evaluation.wait_us / 1_000_000
    if evaluation.shadows:
        found["limitkeeper.shadow"] = list(evaluation.shadows)
    return found
