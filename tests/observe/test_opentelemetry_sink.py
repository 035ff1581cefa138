"""OpenTelemetry: the SDK collects what the gates counted, and spans have the decision but never the key."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from traffic import asked, busy_gate, failing_gate, gate_on

from limitkeeper import ConfigurationError
from limitkeeper.client import SpendGuard
from limitkeeper.concurrency import Bulkhead
from limitkeeper.observe.metrics import COUNTER, HISTOGRAM, METRICS
from limitkeeper.observe.opentelemetry import annotate, instrument
from limitkeeper.policy import WrittenRequest
from limitkeeper.testing import ManualClock


def collected(*gates: object) -> tuple[dict[str, dict[tuple[tuple[str, str], ...], float]], dict[str, object]]:
    """{instrument: {attributes: value}} as the SDK collects them, and the instruments' data."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    instrument(*gates, meter=provider.get_meter("limitkeeper"))
    data = reader.get_metrics_data()
    found, kinds = {}, {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics if data else []:
        found[metric.name] = {tuple(sorted(point.attributes.items())): point.value for point in metric.data.data_points}
        kinds[metric.name] = metric.data
    provider.shutdown()
    return found, kinds


def test_the_sdk_collects_what_was_counted():
    """Every metric is an instrument with the same numbers and attributes; counters are monotonic sums."""
    gates = (busy_gate(), failing_gate(), Bulkhead(3, name="database"), SpendGuard("50"))
    snapshots = [gate.snapshot() for gate in gates]
    found, kinds = collected(*gates)
    for metric in METRICS:
        if metric.kind != HISTOGRAM:
            expected = {
                tuple(sorted(zip(metric.labels, labels, strict=True))): v for labels, v in metric.collect(snapshots).items()
            }
            assert found[f"limitkeeper.{metric.name}"] == expected, metric.name
            assert getattr(kinds[f"limitkeeper.{metric.name}"], "is_monotonic", False) == (metric.kind == COUNTER)


def test_a_histogram_goes_out_as_three_sums():
    """Buckets are cumulative under their ends in seconds; count and sum are beside them. An exporter to Prometheus keeps the
    names of the alert rules: it adds `_total` to monotonic counters."""
    found, kinds = collected(busy_gate())
    parts = [kinds[f"limitkeeper.response_seconds.{part}"] for part in ("bucket", "count", "sum")]
    assert [part.is_monotonic for part in parts] == [False] * 3
    of = (("policy", "shop"), ("rule", "checkout"))
    buckets = {
        dict(labels)["le"]: value for labels, value in found["limitkeeper.response_seconds.bucket"].items() if of[1] in labels
    }
    assert buckets["0.8"] == buckets["2"] == buckets["+Inf"] == 13
    assert found["limitkeeper.response_seconds.count"][of] == 13
    assert 0 < found["limitkeeper.response_seconds.sum"][of] < 13
    assert "1e-06" in {dict(labels)["le"] for labels in found["limitkeeper.decision_seconds.bucket"]}


def test_instruments_are_read_at_a_collection():
    """Traffic after `instrument` is in the next collection."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    gate = gate_on(ManualClock())
    instrument(gate, meter=provider.get_meter("limitkeeper"))
    for expected in (0, 1, 2):
        metrics = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        requests = next(metric for metric in metrics if metric.name == "limitkeeper.requests")
        allowed = [point.value for point in requests.data.data_points if point.attributes["outcome"] == "allowed"]
        assert allowed == [expected]
        asked(gate, "/search")
    provider.shutdown()


def test_what_is_no_gate_is_refused():
    """A source without counters is an error that names the right form."""
    with pytest.raises(ConfigurationError, match="expected a Gate"):
        instrument("limitkeeper.yaml")


def spans_of(*evaluations: object) -> list[dict[str, object]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for evaluation in evaluations:
        with provider.get_tracer("test").start_as_current_span("request"):
            annotate(evaluation)
    provider.shutdown()
    return [dict(span.attributes) for span in exporter.get_finished_spans()]


def test_a_span_has_the_decision():
    """The current span gets the deciding rule, what is left, and the retry time; a refusal has a reason."""
    gate = gate_on(ManualClock())
    evaluations = [asked(gate, "/checkout") for _ in range(6)]
    first, last = spans_of(evaluations[0], evaluations[-1])
    assert first == {
        "limitkeeper.allowed": True,
        "limitkeeper.rule": "checkout",
        "limitkeeper.limit": 5,
        "limitkeeper.remaining": 4,
    }
    assert last == {
        "limitkeeper.allowed": False,
        "limitkeeper.reason": "quota",
        "limitkeeper.rule": "checkout",
        "limitkeeper.retry_after": 60,
        "limitkeeper.limit": 5,
        "limitkeeper.remaining": 0,
    }


def test_a_span_has_shadows_and_waits():
    """A shadow that would refuse, and the time waited, are attributes; an exempt request is just allowed."""
    gate = gate_on(ManualClock())
    asked(gate, "/search")
    asked(gate, "/slow")
    shadowed, waited, exempt = spans_of(asked(gate, "/search"), asked(gate, "/slow"), asked(gate, "/healthz"))
    assert shadowed["limitkeeper.shadow"] == ("trial",)
    assert waited["limitkeeper.wait"] == 0.1
    assert exempt == {"limitkeeper.allowed": True}


def test_a_span_never_has_a_key():
    """Neither a key nor its hash is among the attributes."""
    gate = gate_on(ManualClock())
    evaluations = [asked(gate, "/checkout", "somebody-with-a-name") for _ in range(7)]
    for attributes in spans_of(*evaluations):
        assert "somebody" not in repr(attributes)
        assert not any("key" in name for name in attributes)


def test_without_a_span_nothing_happens():
    """Without tracing, annotating costs one check and does nothing; a given span is used instead of the current one."""
    gate = gate_on(ManualClock())
    evaluation = asked(gate, "/search")
    annotate(evaluation)
    assert not trace.get_current_span().is_recording()
    provider = TracerProvider()
    span = provider.get_tracer("test").start_span("mine")
    annotate(evaluation, span)
    assert span.attributes["limitkeeper.rule"] == "search"
    span.end()
    provider.shutdown()


def test_a_client_in_the_penalty_box_has_no_rule():
    """A client in the penalty box is refused by no rule; the reason is the penalty box."""
    gate = gate_on(ManualClock())
    evaluations = [asked(gate, "/checkout") for _ in range(27)]
    (attributes,) = spans_of(evaluations[-1])
    assert attributes["limitkeeper.reason"] == "penalty box"
    assert "limitkeeper.rule" not in attributes
    assert gate.ask(WrittenRequest("GET", "/healthz", headers={"x-user": "ann"})).allowed


def test_without_the_api_the_error_names_the_extra():
    """Where OpenTelemetry is missing, importing the sink names the extra."""
    code = """
import sys
sys.modules["opentelemetry"] = None
from limitkeeper import ConfigurationError
try:
    import limitkeeper.observe.opentelemetry
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'limitkeeper[opentelemetry]'" in done.stdout


def test_only_the_api_is_imported():
    """The sink works without the SDK: it imports nothing of it."""
    code = """
import sys
import limitkeeper.observe.opentelemetry
print(any(name.startswith("opentelemetry.sdk") for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"
