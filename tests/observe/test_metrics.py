"""Metrics from a snapshot: complete, bounded, and added up where two gates share a policy's name."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from traffic import USER, asked, busy_gate, failing_gate, gate_on

from limitkeeper import FixedWindow
from limitkeeper.observe.metrics import COUNTER, GAUGE, HISTOGRAM, METRICS, offender_metric
from limitkeeper.observe.snapshot import Histogram, Offender, RuleSnapshot, Snapshot
from limitkeeper.policy.model import PenaltyBoxConfig
from limitkeeper.testing import ManualClock
from stand_ins import NOON

NAMED = {metric.name: metric for metric in METRICS}


def test_every_number_of_a_tally_is_read():
    """Every number that a gate counts has a metric: setting any number of a snapshot changes a metric."""
    blank = Snapshot("p", rules=(RuleSnapshot("r"),))
    plain = {metric.name: metric.collect([blank]) for metric in METRICS}
    unread = []
    for field in fields(RuleSnapshot):
        if field.name not in ("name", "responses", "statuses"):
            snapshot = Snapshot("p", rules=(RuleSnapshot("r", **{field.name: 7}),))
            if all(metric.collect([snapshot]) == plain[metric.name] for metric in METRICS):
                unread.append(field.name)
    for field in fields(Snapshot):
        if isinstance(field.default, int):
            snapshot = Snapshot("p", rules=(RuleSnapshot("r"),), offenders=(Offender("r", "k", 1, 0),), **{field.name: 7})
            before = Snapshot("p", rules=(RuleSnapshot("r"),), offenders=(Offender("r", "k", 1, 0),))
            if all(metric.collect([snapshot]) == metric.collect([before]) for metric in METRICS):
                unread.append(field.name)
    assert unread == ["requests"]  # it is the sum of the outcomes


def test_allowed_and_refused_are_all_requests():
    """The two outcomes of a request add up to all requests; exempt, unlimited and penalty-box ones are among them."""
    snapshot = busy_gate().snapshot()
    found = NAMED["requests"].collect([snapshot])
    assert sum(found.values()) == snapshot.requests == 46
    assert found["shop", "refused"] == 25
    assert NAMED["exempt_requests"].collect([snapshot]) == {("shop",): 1}
    assert NAMED["unlimited_requests"].collect([snapshot]) == {("shop",): 1}
    assert NAMED["penalty_box_requests"].collect([snapshot]) == {("shop",): 1}


def test_a_refusal_is_no_response_and_no_error():
    """Responses are those of admitted requests: 24 refused checkouts are in no class of status and in no histogram."""
    snapshot = busy_gate().snapshot()
    found = {labels[2]: value for labels, value in NAMED["responses"].collect([snapshot]).items() if labels[1] == "checkout"}
    assert found == {"1xx": 0, "2xx": 10, "3xx": 0, "4xx": 0, "5xx": 3}
    assert NAMED["rule_decisions"].collect([snapshot])["shop", "checkout", "refused"] == 24
    assert NAMED["response_seconds"].collect([snapshot])["shop", "checkout"].count == 13


def test_real_traffic_is_counted():
    """A wait, a shadow, alerts, near limits, a give-back, reloads: each is counted as often as it happened."""
    snapshots = [busy_gate().snapshot()]
    received = {name: NAMED[name].collect(snapshots) for name in NAMED}
    assert received["waited"]["shop", "slow"] == 1
    assert received["shadow_would_refuse"]["shop", "trial"] == 2
    assert received["alerts"]["shop", "checkout"] == 2
    assert received["near_limit"]["shop", "checkout"] == 2
    assert received["given_back"]["shop", "login"] == 1
    assert received["penalty_box_clients"] == {("shop",): 1}
    assert received["reloads"] == {("shop", "loaded"): 1, ("shop", "refused"): 1}
    assert received["top_offender_ratio"]["shop", "checkout"] == 21 / 24  # refusals of the penalty box belong to no rule
    assert received["store_state"] == {}


def test_a_store_that_fails_is_counted():
    """A guard's state and failures, and every decision that was made without the store, by how it was made."""
    snapshots = [failing_gate().snapshot()]
    received = {name: NAMED[name].collect(snapshots) for name in NAMED}
    assert received["store_state"] == {("failing", "closed"): 0, ("failing", "half_open"): 0, ("failing", "open"): 1}
    assert received["store_failures"] == {("failing",): 5}
    assert received["store_opened"] == {("failing",): 1}
    without = {labels[1:]: value for labels, value in received["without_store"].items() if value}
    assert without == {("open", "open"): 2, ("closed", "closed"): 1, ("local", "local"): 2}


def test_gates_of_one_policy_are_added_up():
    """Two gates of the same name count as one: counters and buckets add up, a share is the larger one."""
    one, other = busy_gate().snapshot(), busy_gate().snapshot()
    for metric in METRICS:
        alone, both = metric.collect([one]), metric.collect([one, other])
        assert set(alone) == set(both)
        for labels, value in metric.collect([other]).items():
            if metric.kind == HISTOGRAM:
                assert both[labels].count == alone[labels].count + value.count
                assert both[labels].sum == alone[labels].sum + value.sum
            elif metric.largest:
                assert both[labels] == max(alone[labels], value)
            else:
                assert both[labels] == alone[labels] + value


def test_gates_of_two_policies_stay_apart():
    """Different names are different series."""
    snapshots = [busy_gate(name="one").snapshot(), busy_gate(name="other").snapshot()]
    assert {labels[0] for labels in NAMED["requests"].collect(snapshots)} == {"one", "other"}


def test_every_series_is_there_before_anything_happens():
    """A fresh gate shows the series that a busy one shows, all at zero: the first event of a counter is not lost."""
    fresh, busy = gate_on(ManualClock()).snapshot(), busy_gate().snapshot()
    for metric in METRICS:
        assert set(metric.collect([fresh])) == set(metric.collect([busy])), metric.name
        for value in metric.collect([fresh]).values():
            assert (value.count if metric.kind == HISTOGRAM else value) == 0


def test_keys_make_no_series():
    """A thousand different keys make not one more series than one key does."""
    few, many = gate_on(ManualClock()), gate_on(ManualClock())
    for n in range(1000):
        few.offenders.offer("checkout", "ann")
        many.offenders.offer("checkout", f"u{n}")
    for metric in METRICS:
        assert set(metric.collect([few.snapshot()])) == set(metric.collect([many.snapshot()]))
        assert "key" not in metric.labels


def test_offenders_have_a_measure_on_request():
    """Shown one by one, offenders are at most the requested number, with their guaranteed count, and a hash for a key."""
    snapshot = busy_gate().snapshot()
    found = offender_metric(1).collect([snapshot])
    assert list(found.values()) == [21]
    ((policy, rule, key),) = found
    assert (policy, rule, len(key)) == ("shop", "checkout", 12)
    assert len(offender_metric(5).collect([snapshot])) == 3
    doubtful = offender_metric(1)
    assert doubtful.labels == ("policy", "rule", "key")
    assert doubtful.collect([Snapshot("p", offenders=(Offender("r", "k", 9, 4),))]) == {("p", "r", "k"): 5}


def test_the_share_of_an_offender_is_never_too_high():
    """The sketch's possible error counts against no key; a second limit counts for its rule; no offenders is no share."""
    share = NAMED["top_offender_ratio"]
    offenders = (Offender("a", "x", 60, 20), Offender("a.2", "y", 50, 0), Offender("gone", "z", 90, 0))
    snapshot = Snapshot("p", rules=(RuleSnapshot("a"), RuleSnapshot("b")), offenders=offenders, offered=100)
    assert share.collect([snapshot]) == {("p", "a"): 0.5, ("p", "b"): 0.0}
    assert share.collect([Snapshot("p", rules=(RuleSnapshot("a"),))]) == {("p", "a"): 0.0}


def test_measures_are_well_made():
    """Names are unique and lower case, every metric has a help text, histograms are in seconds."""
    assert len(NAMED) == len(METRICS)
    for metric in METRICS:
        assert metric.name == metric.name.lower()
        assert metric.help.endswith(".")
        assert metric.kind in (COUNTER, GAUGE, HISTOGRAM)
        assert (metric.kind == HISTOGRAM) == metric.name.endswith("_seconds")
    assert Histogram((1,), (2, 3), 4.0).count == 5


def test_the_page_names_every_measure():
    """The table of the documentation has every number under the name that Prometheus shows."""
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    names = [f"`limitkeeper_{metric.name}{'_total' if metric.kind == COUNTER else ''}`" for metric in METRICS]
    assert [name for name in names if name not in page] == []


def test_the_penalty_box_does_not_hide_a_dominating_client():
    """A client in the penalty box is refused by no rule: its share of the refusals by rules stays as it was."""
    gate = gate_on(ManualClock(NOON))
    for _ in range(500):
        asked(gate, "/checkout", "mallory")
    asked(gate, "/checkout", "ann")
    snapshot = gate.snapshot()
    assert snapshot.penalty_box > 400
    assert NAMED["top_offender_ratio"].collect([snapshot])["shop", "checkout"] == 1.0


def test_a_reload_keeps_the_count_of_the_penalty_box():
    """Whatever a new version configures, the counter of the penalty box continues."""
    gate = busy_gate()
    before = gate.snapshot().penalty_box
    assert before > 0
    for said in (None, PenaltyBoxConfig(FixedWindow("5/min"), 1_000_000, USER)):
        gate.reload(replace(gate.policy, penalty_box=said))
        assert gate.snapshot().penalty_box == before
