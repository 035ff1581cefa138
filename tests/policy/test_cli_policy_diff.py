"""`limitkeeper policy diff`: which rules change, and for which requests."""

from __future__ import annotations

import json

import pytest

from limitkeeper.cli import main

OLD = """\
store: redis://:first-password@localhost:6379
identify: {user: {header: X-User}, plan: {header: X-Plan, default: free}}
exempt: [{path: /healthz, header: {X-Probe: probe-secret}}]
limits:
  - {name: user, key: user | ip, limit: {by: plan, free: 20/s, pro: 100/s}, override: {acme: 500/s, beta: 50/s}}
  - {name: checkout, match: POST /checkout, key: user, limit: token bucket 5/s burst 10, priority: 0, description: one}
  - {name: search, match: "GET,HEAD /search", key: user, limit: 5/s}
"""
NEW = """\
# A comment changes nothing, and neither does the order of fields.
store: redis://:second-password@localhost:6379
identify: {user: {header: X-User}, plan: {header: X-Plan, default: free}}
budget: 50ms
exempt: [{path: /livez, header: {X-Probe: probe-secret}}]
limits:
  - name: user
    key: user | ip
    limit: {by: plan, free: 10/s, pro: 100 per second, team: 50/s}
    override: {acme: 1000/s, beta: 50 per second}
  - name: login
    match: {methods: POST, path: /login, host: id.example.com}
    when: {absent: user, plan: [free, trial]}
    key: ip
    limit: fixed window 5/min
  - name: checkout
    match: [POST /checkout]
    key: [user, ip]
    limit: 5 per second burst 10
    on_refusal: wait up to 200ms
    description: two
"""


@pytest.fixture
def diff(tmp_path, monkeypatch, capsys):
    """Writes two policies and compares them; returns the exit code and the output."""
    monkeypatch.chdir(tmp_path)

    def compare(old: str, new: str, *options: str) -> tuple[int, str]:
        (tmp_path / "old.yaml").write_text(old)
        (tmp_path / "new.yaml").write_text(new)
        return main(["policy", "diff", "old.yaml", "new.yaml", *options]), capsys.readouterr().out

    return compare


def test_changes_with_the_requests_that_they_concern(diff):
    """Added, removed and changed rules are shown with their requests; equivalent spellings are not."""
    code, out = diff(OLD, NEW)
    assert code == 0
    assert (
        out
        == """\
changed rule user: every request, by user | ip
  limit.free     20/s → 10/s
  limit.team     added: 50/s
  override.acme  500/s → 1000/s
added rule login: POST id.example.com/login where user is absent and plan is free or trial, by ip: fixed window 5/min
changed rule checkout: POST /checkout, by user, ip
  key         user → [user, ip]
  on_refusal  added: wait up to 200ms
removed rule search: GET,HEAD /search, by user: 5/s
changed for all rules:
  exempt  [{path: /healthz, header: {X-Probe: …}}] → [{path: /livez, header: {X-Probe: …}}]
  budget  added: 50ms
"""
    )


def test_secrets_are_masked(diff):
    """Neither form of the output shows a password or the value of an exempt header."""
    for options in ((), ("--json",)):
        _, out = diff(OLD, NEW.replace("localhost", "db.example.com"), *options)
        assert "db.example.com" in out
        assert not any(secret in out for secret in ("first-password", "second-password", "probe-secret"))


def test_equal_policies(diff):
    """Two policies that decide alike have no differences, however they are written."""
    same = OLD.replace("20/s", "20 per second").replace("priority: 0, ", "").replace("match: POST", "match:   POST")
    assert diff(OLD, same) == (0, "no rule and no setting changes\n")


def test_a_condition_or_a_source_of_overrides_changes(diff):
    """Conditions, the response of a refusal, and sources of overrides are compared too."""
    old = "identify: {a: {header: A}}\nlimits: [{name: x, key: ip, when: {present: a}, limit: 1/s, overrides: {call: 'm:f'}}]\n"
    new = old.replace("present", "absent").replace("m:f", "m:g").replace("limit: 1/s", "limit: 1/s, status: 503")
    _, out = diff(old, new)
    assert out.splitlines() == [
        "changed rule x: every request where a is absent, by ip",
        "  when.present    removed: a",
        "  when.absent     added: a",
        "  overrides.call  m:f → m:g",
        "  status          added: 503",
    ]


def test_changes_as_json(diff):
    """With --json the output has the rules and the settings; null is a field that is not written."""
    _, out = diff(OLD, NEW, "--json")
    found = json.loads(out)
    assert [(one["kind"], one["rule"]) for one in found["rules"]] == [
        ("changed", "user"),
        ("added", "login"),
        ("changed", "checkout"),
        ("removed", "search"),
    ]
    assert found["rules"][0]["fields"][1] == {"field": "limit.team", "old": None, "new": "50/s"}
    assert [one["field"] for one in found["settings"]] == ["exempt", "budget"]


def test_a_policy_with_errors(diff, capsys):
    """A policy with errors is not compared: its errors are shown, and the exit code is 1."""
    assert main(["policy", "diff", "nowhere.yaml", "nowhere.yaml"]) == 2
    code, out = diff(OLD, "limits: 3\n")
    assert (code, out) == (1, "")
