"""`limitkeeper replay`: which keys would have been refused, when and by which rule, as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from limitkeeper.cli import main
from limitkeeper.plan import replay_report
from limitkeeper.plan.log_replay import decided, in_time
from limitkeeper.plan.replay_report import ReplayReport
from limitkeeper.plan.request_log import LogEntry, parse_nginx
from limitkeeper.policy import Policy

POLICY = """\
name: shop
identify:
  user: {header: X-User}
limits:
  - {name: checkout, match: POST /checkout, key: user, limit: token bucket 1/s burst 2}
  - {name: strict, key: user, limit: token bucket 1/s burst 1, on_refusal: shadow}
"""


@pytest.fixture
def policy(tmp_path):
    found = tmp_path / "shop.yaml"
    found.write_text(POLICY)
    return str(found)


@pytest.fixture
def log(tmp_path):
    """Five calls of ann within half a second, one of bob, and a line that is cut."""
    lines = [
        {"time": 1000.0 + n / 10, "method": "POST", "path": "/checkout", "status": 200, "user": "ann", "duration": 5}
        for n in range(5)
    ]
    lines.append({"time": 1000.2, "method": "POST", "path": "/checkout", "status": 200, "user": "bob", "duration": 5})
    lines += [{"time": 1100.0 + n, "method": "GET", "path": "/", "status": 200, "user": "eve", "duration": 5} for n in range(30)]
    found = tmp_path / "access.jsonl"
    found.write_text("\n".join([*map(json.dumps, lines), '{"time": 1130.0, "pa']) + "\n")
    return str(found)


def test_the_text_has_keys_times_and_rules(policy, log, capsys):
    """ann's burst of 2 admits two of five; the report names rule, key, count and times, and the line that was skipped."""
    assert main(["replay", log, "--policy", policy]) == 0
    out = capsys.readouterr().out
    assert "36 requests" in out
    assert "3 (8.3%) would have been refused" in out
    assert "checkout (token bucket 1/s burst 2): 6 requests, 3 refused, first 1970-01-01T00:16:40.200Z" in out
    assert "    ann: 3 refused, first 1970-01-01T00:16:40.200Z, last 1970-01-01T00:16:40.400Z" in out
    assert "bob" not in out
    assert "1 of 37 lines were skipped" in out
    assert "access.jsonl:37" in out


def test_control_characters_of_keys_are_shown_as_escapes(policy, log, capsys):
    """A client chooses its key; its control characters must not reach the terminal."""
    Path(log).write_text(Path(log).read_text().replace('"ann"', '"a\\u001b[2Jnn"'))
    assert main(["replay", log, "--policy", policy]) == 0
    assert "    a\\x1b[2Jnn: 3 refused" in capsys.readouterr().out


def test_shadow_rules_refuse_no_request(policy, log, capsys):
    """A rule in shadow is reported separately: its refusals are not among those of the requests."""
    main(["replay", log, "--policy", policy, "--json"])
    found = json.loads(capsys.readouterr().out)
    strict = found["rules"][1]
    assert found["refused"] == 3
    assert (strict["shadow"], strict["refused"]) == (True, 1)  # the other three did not get as far
    assert found["skipped"] == 1
    assert sum(period["refused"] for period in found["periods"]) == 3


def test_csv_has_a_row_for_each_refusal(policy, log, capsys):
    """--csv prints time, rule, key, mode, method, path and the logged status; the summary goes to stderr."""
    main(["replay", log, "--policy", policy, "--csv"])
    captured = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(captured.out)))
    enforced = [row for row in rows if row["mode"] == "enforced"]
    assert [(row["rule"], row["key"], row["path"]) for row in enforced] == [("checkout", "ann", "/checkout")] * 3
    assert "36 requests" in captured.err


def test_keys_can_be_hashed(policy, log, capsys):
    """--hash-keys shows no key."""
    main(["replay", log, "--policy", policy, "--hash-keys"])
    assert "ann" not in capsys.readouterr().out


def test_a_log_without_times_is_refused(policy, tmp_path, capsys):
    """No rate can be computed without times, and the error names the cause."""
    log = tmp_path / "untimed.jsonl"
    log.write_text('{"path": "/", "duration": 5}\n')
    assert main(["replay", str(log), "--policy", policy]) == 2
    assert "no request of the log has a time" in capsys.readouterr().err


def test_memory_is_bounded(policy, monkeypatch):
    """Beyond MAX_KEYS refused keys are counted together, and beyond MAX_PERIODS the periods double."""
    monkeypatch.setattr(replay_report, "MAX_KEYS", 10)
    monkeypatch.setattr(replay_report, "MAX_PERIODS", 8)
    entries = [LogEntry(1000.5 + n // 5, 0.1, 200, "POST", "/checkout", None, {"user": f"u{n // 5}"}) for n in range(200)]
    report = ReplayReport(Policy.load(policy))
    for one in decided(entries, Policy.load(policy), read_ahead=7):
        list(report.add(one))
    checkout = report.rules["checkout"]
    assert checkout.refusals.count == 3 * 40
    assert len(checkout.keys) == 11
    assert checkout.keys[replay_report.OTHER_KEYS].count == 3 * 30
    assert len(report.periods) <= 8
    assert sum(report.periods.values()) == 120


def test_requests_are_ordered_among_those_read_ahead():
    """A log that is out of order by less than the read-ahead is replayed in order of time."""
    times = [3.5, 1.5, 2.5, 5.5, 4.5, 6.5]
    assert [time for time, _ in in_time([LogEntry(time) for time in times], read_ahead=3)] == sorted(times)


def test_the_cost_of_a_log_line_is_linear_in_its_length():
    """A client controls a part of the line, its User-Agent; a run of letters of 200 kB, which took minutes, takes no time."""
    line = '192.0.2.1 - - [10/Oct/2025:13:55:36 +0000] "GET / HTTP/1.1" 200 5 "-" "' + "a1.-" * 50_000 + '" rt=0.25 tenant="b c"'
    entry = parse_nginx(line, "s")
    assert (entry.duration, entry.fields) == (0.25, {"rt": "0.25", "tenant": "b c"})
