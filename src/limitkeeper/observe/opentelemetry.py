"""OpenTelemetry: instruments that read tallies when somebody collects, and what a span may know of a decision.

Only the API is needed; without an SDK all of this does nothing. Names are those of Prometheus with a dot
(`limitkeeper.requests`),
so that what an exporter makes of them (`limitkeeper_requests_total`) is what the alert rules name.

The API has no histogram that is observed from outside, and recording every decision as it happens costs several microseconds
each. So a histogram goes out as three sums: `.bucket` (cumulative, with the attribute `le` in seconds), `.count` and `.sum`. They
only ever grow, and yet are up-down counters without a unit: to the name of a monotonic one exporters add `_total` (to one with a
unit that unit), and `limitkeeper_response_seconds_bucket` is what the alert rules ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..errors import ConfigurationError
from .metrics import COUNTER, HISTOGRAM, MEASURES, MetricSpec
from .snapshot import Histogram

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import CallbackOptions, Observation
except ModuleNotFoundError as error:
    raise ConfigurationError(
        "limitkeeper.observe.opentelemetry needs the OpenTelemetry API: pip install 'limitkeeper[opentelemetry]'"
    ) from error

Callback = Callable[[CallbackOptions], Iterable[Observation]]


def instrument(*gates: Any, meter: metrics.Meter | None = None) -> None:
    """Makes every number of the gates an observable instrument of the meter (one meter: one call; same policies are added up)."""
    for gate in gates:
        if not callable(getattr(gate, "tally", None)):
            raise ConfigurationError(f"{gate!r} counts nothing: give a Gate (a middleware has it as `.gate`)")
    used = metrics.get_meter("limitkeeper") if meter is None else meter
    for measure in MEASURES:
        _register(measure, gates, used)


def _register(measure: MetricSpec, gates: tuple[Any, ...], meter: metrics.Meter) -> None:
    name = f"limitkeeper.{measure.name}"

    def observed(told: Callable[[Any], Iterable[tuple[dict[str, str], float]]]) -> Callback:
        def callback(options: CallbackOptions) -> Iterator[Observation]:
            for labels, value in measure.of([gate.tally() for gate in gates]).items():
                attributes = dict(zip(measure.labels, labels, strict=True))
                for more, number in told(value):
                    yield Observation(number, {**attributes, **more})

        return callback

    if measure.kind == HISTOGRAM:
        for ending, told in parts(measure):
            meter.create_observable_up_down_counter(f"{name}.{ending}", [observed(told)], "", measure.help)
    elif measure.kind == COUNTER:
        meter.create_observable_counter(name, [observed(plain)], "1", measure.help)
    else:
        meter.create_observable_gauge(name, [observed(plain)], "", measure.help)


def plain(value: Any) -> Iterable[tuple[dict[str, str], float]]:
    return [({}, value)]


def parts(measure: MetricSpec) -> Iterable[tuple[str, Callable[[Histogram], Iterable[tuple[dict[str, str], float]]]]]:
    """The three sums of a histogram."""

    def bucket(value: Histogram) -> Iterator[tuple[dict[str, str], float]]:
        total = 0
        for bound, count in zip(value.bounds, value.counts, strict=False):
            total += count
            yield {"le": f"{bound * measure.scale:g}"}, total
        yield {"le": "+Inf"}, value.count

    yield "bucket", bucket
    yield "count", lambda value: [({}, value.count)]
    yield "sum", lambda value: [({}, value.sum * measure.scale)]


def annotate(passage: Any, span: trace.Span | None = None) -> None:
    """Tells a span (the current one) what the gate decided: `limitkeeper.*` attributes, and never a key."""
    span = trace.get_current_span() if span is None else span
    if span.is_recording():
        span.set_attributes(attributes_of(passage))


def attributes_of(passage: Any) -> dict[str, Any]:
    """What a span may know. `limitkeeper.rule` is the rule that refused or, of those that let pass, the closest to its end."""
    found: dict[str, Any] = {"limitkeeper.allowed": bool(passage.allowed)}
    decision, refusal = passage.decision, passage.refusal
    if refusal is not None:
        found["limitkeeper.reason"] = refusal.reason
        if refusal.rule is not None:
            found["limitkeeper.rule"] = refusal.rule.name
        if refusal.retry_after is not None:
            found["limitkeeper.retry_after"] = refusal.retry_after
    if decision is not None:
        found.setdefault("limitkeeper.rule", rule_of(passage))
        found["limitkeeper.limit"] = decision.limit
        found["limitkeeper.remaining"] = decision.remaining
    if passage.wait_us:
        found["limitkeeper.wait"] = passage.wait_us / 1_000_000
    if passage.shadows:
        found["limitkeeper.shadow"] = list(passage.shadows)
    return found


def rule_of(passage: Any) -> str:
    """The rule whose limit decided (a second limit of a rule has a name of its own)."""
    name = str(passage.decision.name)
    return next((str(entry.rule.name) for entry in passage.entries if entry.label == name), name)
