"""Prometheus: a scrape shows what the gates counted, in a format that Prometheus accepts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as open_metrics
from prometheus_client.parser import text_string_to_metric_families
from traffic import asked, busy_gate, failing_gate, gate_on

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.observe.metrics import HISTOGRAM, METRICS
from limitkeeper.observe.prometheus import LimitkeeperCollector
from limitkeeper.observe.snapshot import DECISION_BOUNDS_US, RESPONSE_BOUNDS_MS, Histogram, RuleSnapshot, Snapshot
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.request_context import WrittenRequest
from limitkeeper.testing import ManualClock


class FixedSource:
    """A source that always returns the same snapshot."""

    policy = None

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def snapshot(self) -> Snapshot:
        return self._snapshot


def scraped(*gates: object, **more: object) -> tuple[str, CollectorRegistry]:
    registry = CollectorRegistry()
    LimitkeeperCollector(*gates, registry=registry, **more)  # type: ignore[arg-type]
    return generate_latest(registry).decode(), registry


def test_a_scrape_shows_what_was_counted():
    """Every metric has its name and labels, and the numbers are the gate's."""
    text, registry = scraped(busy_gate(), failing_gate())
    value = registry.get_sample_value
    assert value("limitkeeper_requests_total", {"policy": "shop", "outcome": "refused"}) == 25
    assert value("limitkeeper_rule_decisions_total", {"policy": "shop", "rule": "checkout", "outcome": "refused"}) == 24
    assert value("limitkeeper_near_limit_total", {"policy": "shop", "rule": "checkout"}) == 2
    assert value("limitkeeper_shadow_would_refuse_total", {"policy": "shop", "rule": "trial"}) == 2
    assert value("limitkeeper_responses_total", {"policy": "shop", "rule": "checkout", "status": "4xx"}) == 0
    assert value("limitkeeper_store_state", {"policy": "failing", "state": "open"}) == 1
    assert value("limitkeeper_without_store_total", {"policy": "failing", "rule": "closed", "answer": "closed"}) == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {f"limitkeeper_{metric.name}" for metric in METRICS}
    assert all(families[f"limitkeeper_{metric.name}"].type == metric.kind for metric in METRICS)


def test_histograms_are_cumulative_and_in_seconds():
    """Buckets add up to +Inf, their ends are seconds, 800 ms and 2 s are ends of their own, and the sum is in seconds."""
    responses = Histogram(RESPONSE_BOUNDS_MS, tuple(range(len(RESPONSE_BOUNDS_MS) + 1)), 2500.0)
    decisions = Histogram(DECISION_BOUNDS_US, (1,) * (len(DECISION_BOUNDS_US) + 1), 5_000_000.0)
    _, registry = scraped(FixedSource(Snapshot("p", rules=(RuleSnapshot("r", responses=responses),), decisions=decisions)))
    value, of = registry.get_sample_value, {"policy": "p", "rule": "r"}
    assert value("limitkeeper_response_seconds_bucket", {**of, "le": "0.8"}) == sum(range(9))
    assert value("limitkeeper_response_seconds_bucket", {**of, "le": "2.0"}) == sum(range(12))
    assert value("limitkeeper_response_seconds_bucket", {**of, "le": "+Inf"}) == sum(range(16))
    assert value("limitkeeper_response_seconds_count", of) == sum(range(16))
    assert value("limitkeeper_response_seconds_sum", of) == 2.5
    assert value("limitkeeper_decision_seconds_bucket", {"policy": "p", "le": "1e-06"}) == 1
    assert value("limitkeeper_decision_seconds_bucket", {"policy": "p", "le": "0.0025"}) == 12
    assert value("limitkeeper_decision_seconds_sum", {"policy": "p"}) == 5.0


def test_it_reads_when_it_is_scraped():
    """A collector keeps nothing: later traffic is in the next scrape, and requests do no work for it."""
    gate = gate_on(ManualClock())
    _, registry = scraped(gate)
    labels = {"policy": "shop", "outcome": "allowed"}
    assert registry.get_sample_value("limitkeeper_requests_total", labels) == 0
    asked(gate, "/search")
    assert registry.get_sample_value("limitkeeper_requests_total", labels) == 1


def test_two_gates_of_one_policy_are_one():
    """Gates of the same policy name (one for each decorated route, say) are added up rather than shown twice."""
    text, registry = scraped(busy_gate(), busy_gate())
    assert registry.get_sample_value("limitkeeper_requests_total", {"policy": "shop", "outcome": "refused"}) == 50
    lines = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))


def test_a_second_collector_in_one_registry_is_refused():
    """Two collectors would show the same names twice: the registry refuses the second; `add` is the way."""
    _, registry = scraped(busy_gate())
    with pytest.raises(ValueError, match="Duplicated"):
        LimitkeeperCollector(busy_gate(name="other"), registry=registry)
    collector = LimitkeeperCollector(registry=None)
    gate = busy_gate()
    collector.add(gate)
    with pytest.raises(ConfigurationError, match="twice"):
        collector.add(gate)


def test_what_is_no_gate_is_refused():
    """A source without counters is an error that names the right form, when the collector is made and not when it is scraped."""
    with pytest.raises(ConfigurationError, match="expected a Gate"):
        LimitkeeperCollector("limitkeeper.yaml", registry=None)
    for wrong in (-1, True, 1000):
        with pytest.raises(ConfigurationError, match="between 0 and 100"):
            LimitkeeperCollector(registry=None, offenders=wrong)


def test_offenders_are_shown_only_on_request():
    """By default no series has a key; with `offenders` there are at most the requested number, hashed."""
    text, _ = scraped(busy_gate())
    assert "key=" not in text
    text, _ = scraped(busy_gate(), offenders=1)
    shown = [line for line in text.splitlines() if "key=" in line]
    assert len(shown) == 1
    assert "eve" not in shown[0]
    assert shown[0].endswith(" 21.0")


def test_odd_names_are_escaped():
    """A rule may have any name: quotes, newlines and backslashes come out of the parser as they went in."""
    name = 'a "rule"\nwith \\ and ü'
    text, _ = scraped(FixedSource(Snapshot("p", rules=(RuleSnapshot(name, passed=3),))))
    found = {
        sample.labels["rule"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "limitkeeper_rule_decisions_total" and sample.labels["outcome"] == "passed"
    }
    assert found == {name: 3.0}


def test_open_metrics_takes_it_too():
    """The stricter format can be written from the same collector."""
    _, registry = scraped(busy_gate(), failing_gate(), offenders=3)
    assert open_metrics(registry).decode().endswith("# EOF\n")


def test_scrapes_while_requests_run():
    """Counters never go back while threads decide and others scrape."""
    gate = gate_on(ManualClock())
    _, registry = scraped(gate)
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            asked(gate, "/search")
            asked(gate, "/healthz")

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen: dict[tuple[object, ...], float] = {}
    try:
        for _ in range(60):
            for family in registry.collect():
                for sample in family.samples if family.type in ("counter", "histogram") else ():
                    which = (sample.name, *sorted(sample.labels.items()))
                    assert sample.value >= seen.get(which, 0), which
                    seen[which] = sample.value
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_the_number_of_series_follows_from_the_policy():
    """A rule has as many series as documented, whatever its traffic."""

    def count(rules: int) -> int:
        snapshot = busy_gate().snapshot()
        one = snapshot.rules[0]
        many = tuple(RuleSnapshot(f"r{n}", responses=one.responses) for n in range(rules))
        text, _ = scraped(
            FixedSource(Snapshot("p", rules=many, decisions=snapshot.decisions, store=failing_gate().snapshot().store))
        )
        return len([line for line in text.splitlines() if not line.startswith("#")])

    assert count(2) - count(1) == count(3) - count(2) == 38
    assert count(0) == 36


def test_every_status_has_its_class_from_the_start():
    """A websocket's handshake is a 1xx, what is no status a failure: no series appears with its first event."""
    gate = busy_gate()
    before = {line.rpartition(" ")[0] for line in scraped(gate)[0].splitlines()}
    for status in (101, 0, 999):
        asked(gate, "/search", "carl", status)
    text, _ = scraped(gate)
    assert {line.rpartition(" ")[0] for line in text.splitlines()} == before
    assert 'limitkeeper_responses_total{policy="shop",rule="search",status="1xx"} 1.0' in text
    assert 'limitkeeper_responses_total{policy="shop",rule="search",status="5xx"} 2.0' in text


def test_promtool_takes_the_metrics():
    """promtool, where installed, accepts names, units and help texts."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here (Debian: apt-get install prometheus): metrics are not linted by it")
    text, _ = scraped(busy_gate(), failing_gate(), offenders=5)
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_the_client_library_the_error_names_the_extra():
    """Where prometheus-client is missing, importing the collector names the extra."""
    code = """
import sys
sys.modules["prometheus_client"] = None
from limitkeeper import ConfigurationError, MemoryStore
try:
    import limitkeeper.observe.prometheus
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'limitkeeper[prometheus]'" in done.stdout


def test_histograms_of_the_table_are_those_of_the_scrape():
    """The measures that are histograms are exactly those with buckets in a scrape."""
    text, _ = scraped(busy_gate())
    with_buckets = {line.split("_bucket")[0] for line in text.splitlines() if "_bucket{" in line}
    assert with_buckets == {f"limitkeeper_{metric.name}" for metric in METRICS if metric.kind == HISTOGRAM}


KEYED = "identify: {k: {header: X-Key}}\nlimits: [{name: api, key: k, limit: fixed window 1/h}]"
ODD = ["a\rb", "\x00\x1b[2J", "line\u2028end\x85", "half \ud800", "tab\there", "\x7f"]


@pytest.mark.parametrize("key", ODD)
def test_no_key_breaks_a_scrape(key):
    """A key that a client chose, shown on request, is escaped: the scrape stays readable, line by line, and can be encoded."""
    with Gate(Policy.read(KEYED), store=MemoryStore(), show_keys=True) as gate:
        for _ in range(3):
            gate.ask(WrittenRequest("GET", "/", headers={"X-Key": key}))
        for write in (generate_latest, open_metrics):
            registry = CollectorRegistry()
            LimitkeeperCollector(gate, registry=registry, offenders=5)
            text = write(registry).decode()
            assert all(line.isprintable() for line in text.split("\n"))
            assert len([line for line in text.splitlines() if "key=" in line]) == 1


def test_a_name_with_control_characters_is_escaped():
    """So is every other label, also of a policy that was made without being checked."""
    text, _ = scraped(FixedSource(Snapshot("p\r\x00", rules=(RuleSnapshot("r\ud800"),))))
    assert all(line.isprintable() for line in text.split("\n"))
    assert "p\\\\r\\\\x00" in text
