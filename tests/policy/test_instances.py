"""`instances: 10, safe_concurrency: 40`: its effect on the checks of bursts and on the local shares."""

from __future__ import annotations

import json
import logging

import pytest
from gates import asked, request

from limitkeeper.cli import main
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.model import LOCAL, OnFailure
from limitkeeper.policy.reading.load import examine
from limitkeeper.stores.memory import MemoryStore
from limitkeeper.testing import ManualClock
from stand_ins import NOON, WrappedStore

TEN = "instances: 10\nsafe_concurrency: 40\n"


@pytest.fixture
def found(tmp_path):
    """The diagnostics of a policy: (severity, message)."""

    def check(text):
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        policy, context = examine(path)
        assert policy is not None, context.diagnostics()
        return [
            (one.severity, one.message)
            for one in context.diagnostics()
            if "has no key" not in one.message and "count alone" not in one.message
        ]

    return check


@pytest.mark.parametrize(
    ("burst", "expected"),
    [
        (360, []),
        (361, [("note", "a burst of 361 needs all 10 instances: 10 instances × 40 = 400, and 360 while one is down")]),
        (400, [("note", "a burst of 400 needs all 10 instances: 10 instances × 40 = 400, and 360 while one is down")]),
        (401, [("warning", "a burst of 401 exceeds safe_concurrency 10 instances × 40 = 400")]),
    ],
)
def test_a_burst_is_measured_against_all_instances(burst, expected, found, caplog):
    """The source document's burst of 400 = 10 × 40 causes no warning; a note warns that it needs every instance (N − 1)."""
    text = f"{TEN}limits: [{{name: checkout, match: POST /checkout, limit: token bucket 350/s burst {burst}}}]"
    assert found(text) == expected
    Policy.read(text)
    assert bool(caplog.records) == (burst > 400)


def test_without_instances_safe_concurrency_is_the_whole(found):
    """One instance: as before, and without a note."""
    text = "safe_concurrency: 40\nlimits: [{name: a, limit: 350/s burst %d}]"
    assert found(text % 40) == []
    assert found(text % 41) == [("warning", "a burst of 41 exceeds safe_concurrency 40")]
    assert found(f"instances: 1\n{text % 40}") == []


def test_a_rule_has_its_own_safe_concurrency(found):
    """The number of a rule is that of one instance as well."""
    text = "limits: [{name: a, limit: 350/s burst 90, safe_concurrency: 10}]"
    assert found(TEN + text) == []
    assert found(TEN + text.replace("90", "101")) == [
        ("warning", "a burst of 101 exceeds safe_concurrency 10 instances × 10 = 100")
    ]


def test_overrides_above_the_capacity_are_warned_about(found):
    """An override in the file is checked as the limit is; an unlimited one is noted."""
    text = "limits: [{name: a, key: ip, limit: 20/s, override: {10.0.0.1: 500/s burst 1000, 10.0.0.2: unlimited}}]"
    assert found(TEN + text) == [
        ("warning", "a burst of 1000 exceeds safe_concurrency 10 instances × 40 = 400"),
        ("note", "an unlimited key may exceed safe_concurrency, 400 for all instances together"),
    ]
    assert found(text) == []


def test_overrides_at_run_time_are_warned_about(caplog):
    """An override of a function that exceeds the capacity is logged once, and enforced."""
    text = {"name": "a", "key": "ip", "limit": "20/s", "overrides": {"call": lambda key: "500/s burst 1000", "keep": 0}}
    policy = Policy.of(instances=10, safe_concurrency=40, limits=[text])
    g = Gate(policy, store=MemoryStore(clock=ManualClock(NOON)))
    with caplog.at_level(logging.WARNING, "limitkeeper"):
        evaluations = [asked(g, request()) for _ in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        "a: an override of token bucket 500/s burst 1000 exceeds the safe concurrency 400"
    ]
    assert evaluations[-1].decision.limit == 1000


def test_the_local_share_follows_from_the_instances():
    """`local` is the tenth of ten instances: each admits a tenth while the store fails, all together the limit."""
    rules = "[{name: a, limit: fixed window 50/min}, {name: b, limit: 1/s, on_failure: open}]"
    text = f"instances: 10\non_failure: local\nlimits: {rules}"
    policy = Policy.read(text)
    assert policy.rules[0].on_failure == OnFailure(LOCAL, "1/10")
    assert policy.rules[1].on_failure == OnFailure()
    assert Policy.read(text.replace("local", "local 1/20")).rules[0].on_failure.share == "1/20"
    assert Policy.read(text.replace("instances: 10", "")).rules[0].on_failure.share == "1"
    admitted = 0
    for _ in range(10):
        store = WrappedStore(MemoryStore(clock=ManualClock(NOON)), local=True)
        store.failing = {"decide", "decide_one"}
        g = Gate(Policy.read(text.partition(", {name: b")[0] + "]"), store=store)
        admitted += sum(asked(g, request()).allowed for _ in range(50))
    assert admitted == 50


def test_shares_that_are_too_large_are_warned_about(found):
    """A share above one part for each instance admits more than the limit."""
    text = "instances: 10\nlimits: [{name: a, limit: fixed window %d/min, on_failure: %s}]"
    assert found(text % (50, "local 1/4")) == [("warning", "10 instances with a share of 1/4 admit 2.5 times the limit together")]
    assert found(text % (50, "local 1/10")) == found(text % (50, "local 1/20")) == found(text % (50, "local")) == []
    assert found(text.replace("instances: 10", "") % (50, "local 1/4")) == []


BIG = "{name: big, match: POST /checkout, %s limit: token bucket 200/s burst 400}"
SMALL = "{name: small, match: POST /checkout, %s limit: token bucket 350/s burst 40}"
IDENTIFY = "identify: {user: {header: X-User}, tenant: {header: X-Tenant}}\n"
CUT = [("note", "the burst of 400 is cut to 40 by rule 'small'")]


@pytest.mark.parametrize(
    ("big", "small", "cut"),
    [
        ("", "", True),
        ("key: user,", "", True),
        ("key: user,", "key: user,", True),
        ("key: user,", "key: user | ip,", True),
        ("key: [tenant, user],", "key: tenant,", True),
        ("", "key: user,", False),
        ("key: user | ip,", "key: user,", False),
        ("key: tenant,", "key: user,", False),
        ("when: {present: user},", "when: {present: user},", True),
        ("", "when: {present: user},", False),
        ("when: {absent: user},", "when: {absent: user},", True),
        ("", "when: {absent: user},", False),
        ("key: user,", "when: {present: user},", True),
        ("key: user | tenant,", "when: {present: user},", False),
        ("key: user, unidentified: share,", "when: {present: user},", False),
        ("when: {present: [user, tenant]},", "when: {present: user},", True),
        ("when: {user: [ann]},", "when: {present: user},", True),
        ("when: {user: [ann]},", "when: {user: [bob]},", False),
        ("", "on_refusal: shadow,", False),
        ("cost: 10,", "", False),
        ("cost: 9,", "", True),
        ("", "cost: {query: n},", False),
        ("", "overrides: {call: 'os.path:basename'},", False),
    ],
)
def test_a_cut_burst_is_noted(big, small, cut, found):
    """A burst is cut where every request of one of its keys counts under one key of a rule with a smaller burst."""
    if "overrides" in small:
        small = f"key: user, {small}"
    assert found(f"{IDENTIFY}limits: [{BIG % big}, {SMALL % small}]") == (CUT if cut else [])


@pytest.mark.parametrize(
    ("big", "small", "cut"),
    [
        ("{name: big, key: user, limit: 200/s burst 400}", SMALL % "", True),
        ("{name: big, key: user, limit: 200/s burst 400}", SMALL % "key: user,", False),
        ("{name: big, key: user, match: GET /checkout, limit: 200/s burst 400}", SMALL % "", False),
        ("{name: big, key: user, match: POST /orders, limit: 200/s burst 400}", SMALL % "", False),
        ("{name: big, key: user, match: POST /**, limit: 200/s burst 400}", SMALL % "", True),
        ("{name: big, match: POST /**, limit: 200/s burst 400}", SMALL % "", False),
        ("{name: big, match: {path: /checkout, host: a.example}, key: user, limit: 200/s burst 400}", SMALL % "", True),
        ("{name: big, key: user, limit: 400/min}", "{name: small, key: user, limit: fixed window 40/s}", True),
        ("{name: big, key: user, limit: fixed window 400/min}", "{name: small, key: user, limit: 40/s}", False),
        ("{name: big, key: user, limit: 400/min}", "{name: small, key: user, limit: leaky bucket queue 5/s capacity 9}", False),
    ],
)
def test_a_cut_is_found_on_the_same_route(big, small, cut, found):
    """Another route cuts nothing. A stricter limit of the same key on one route is no cut; one that clients share is."""
    notes = [message for severity, message in found(f"{IDENTIFY}limits: [{big}, {small}]") if severity == "note"]
    assert ["cut to 40" in message for message in notes] == ([True] if cut else [])


def test_explain_shows_capacity_cuts_and_shares(tmp_path, capsys):
    """`explain` names the rule that cuts a burst, the capacity with and without one instance, and the local share."""
    path = tmp_path / "policy.yaml"
    box = "penalty_box: {after: 100/min, for: [1min, 1h]}\nretry_amplification: {key: user | ip}\n"
    path.write_text(f"{TEN}{box}on_failure: local\n{IDENTIFY}limits: [{BIG % 'key: user,'}, {SMALL % ''}]")
    line = ["policy", "explain", str(path), "--request", "POST /checkout user=42"]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "token bucket 200/s burst 400  400 of 400 left, burst cut to 40 by small, local share 1/10\n" in out
    assert "capacity: 10 instances × 40 = 400 concurrent requests, 360 while one is down\n" in out
    assert "penalty box: beyond token bucket 100/min burst 100 refusals of one ip, for 60 s, then 3600 s\n" in out
    assert "retry amplification: attempts per user | ip in 60 s\n" in out
    assert main([*line, "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["rules"][0]["burst_cut"] == {"to": 40, "by": "small"}
    assert explained["rules"][1]["burst_cut"] is None
    assert explained["rules"][0]["local_share"] == "1/10"
    assert len(explained["settings"]) == 3


@pytest.mark.parametrize(
    ("store", "severity"),
    [("store: memory://\n", "warning"), ("", "note"), ("store: shared:///dev/shm/x\n", None), ("store: redis://h\n", None)],
)
def test_several_instances_do_not_share_memory(store, severity, tmp_path):
    """With `instances` and memory:// each instance counts alone: a warning; a note where the store may be passed in Python."""
    path = tmp_path / "policy.yaml"
    path.write_text(f"{store}instances: 10\nlimits: [{{name: a, key: ip, limit: 5/s}}]\n")
    _, context = examine(path)
    alone = [one for one in context.diagnostics() if "10 instances count alone, and admit 10 times" in one.message]
    assert [one.severity for one in alone] == ([] if severity is None else [severity])
