"""The shipped alert rules: they name exposed series, they fire when they should, and not before."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from promql import unknown, unreadable

from limitkeeper.observe.operator_files import alert_rules

ROOT = Path(__file__).parents[2]
GROUPS = yaml.safe_load(alert_rules())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in RULES if "record" in rule}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert", rule.get("record")))
def test_rules_name_what_is_exposed(rule):
    """Every series, label and fixed value in a rule is one that a real gate exposes; the syntax is right."""
    assert unknown(rule["expr"], frozenset(RECORDS)) == []
    assert unreadable(rule["expr"]) == ""


def test_the_reader_of_expressions_sees_mistakes():
    """A misspelt series, label, value or grouping is found, and so are an open bracket and a superfluous range."""
    assert unknown("rate(limitkeeper_request_total[5m])") == ["limitkeeper_request_total"]
    assert unknown('limitkeeper_requests_total{outcom="refused"}') == ["limitkeeper_requests_total{outcom}"]
    assert unknown('limitkeeper_requests_total{outcome="denied"}') == ["limitkeeper_requests_total{outcome=denied}"]
    assert unknown("sum by (tenant) (limitkeeper_requests_total)") == ["by (tenant)"]
    assert unreadable('sum(rate(x{a="("}[5m]))') == ""
    assert "parenthesis" in unreadable("sum(rate(x[5m])")
    assert unreadable("sum(rate(x[5m)])")
    assert "type" in unreadable("rate(x)")
    assert "type" in unreadable("sum(x[5m])")


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_description_and_a_remedy(name):
    """Each alert has a severity, a summary, a description, and a link to a heading of the page with the remedy."""
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("info", "warning", "critical")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert "{{ $labels.policy }}" in alert["annotations"]["summary"]
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)
    assert anchor in {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).lower().strip()) for heading in headings}


def test_thresholds_are_those_of_the_page():
    """The numbers of the table in the documentation are the numbers of the rules."""
    page = (ROOT / "docs" / "observability.md").read_text()
    received = {
        name: (condition, wait)
        for name, condition, wait in re.findall(r"^\| `(Limitkeeper\w+)` \| (.+?) \| (.+?) \|", page, re.M)
    }
    numbers = {"5 %": 0.05, "20 %": 0.2, "50 %": 0.5, "800 ms": 0.8, "2 s": 2, "2 attempts": 2, "20 ms": 0.02}
    for name, (condition, wait) in received.items():
        alert = ALERTS[name]
        assert wait == {None: "at once"}.get(alert.get("for"), str(alert.get("for")).replace("m", " min")), name
        written = next((number for text, number in numbers.items() if text in condition), 0)
        assert float(re.search(r"> ([\d.]+)", alert["expr"])[1]) == written, name


def test_the_seeds_latencies_are_alerts():
    """Endpoint p95 above 800 ms and p99 above 2 s, from the times of admitted requests."""
    assert ALERTS["LimitkeeperResponseP95"]["expr"] == "limitkeeper:response_seconds:p95_5m > 0.8"
    assert ALERTS["LimitkeeperResponseP99"]["expr"] == "limitkeeper:response_seconds:p99_5m > 2"
    for part in ("p95_5m", "p99_5m"):
        assert "limitkeeper_response_seconds_bucket" in RECORDS[f"limitkeeper:response_seconds:{part}"]["expr"]


def test_no_alert_takes_a_refusal_for_an_error():
    """No rule counts 4xx responses, and refusals are only alerted on as refusals."""
    for rule in RULES:
        assert "4xx" not in rule["expr"]
        assert "429" not in rule["expr"]


def test_links_can_lead_to_a_page_of_your_own():
    """A page hosted elsewhere gets its own links."""
    text = alert_rules("https://wiki.example/limitkeeper")
    assert "https://wiki.example/limitkeeper#store-degraded" in text
    assert "docs/observability.md#" not in text


# With promtool ---------------------------------------------------------------------------------------------------

CHECKOUT = '{policy="shop", rule="checkout"%s}'


def of(name: str, more: str = "", labels: str = CHECKOUT) -> str:
    return name + labels % (f", {more}" if more else "")


def histogram(name: str, fast: int, slow: int, bounds: tuple[str, str], labels: str = CHECKOUT) -> dict[str, str]:
    """`fast` observations a minute below the first bound, `slow` more between the two."""
    counts = {bounds[0]: fast, bounds[1]: fast + slow, "+Inf": fast + slow}
    return {of(f"{name}_bucket", f'le="{bound}"', labels): f"0+{count}x60" for bound, count in counts.items()}


def decisions(passed: int, refused: int) -> dict[str, str]:
    name = "limitkeeper_rule_decisions_total"
    return {of(name, 'outcome="passed"'): f"0+{passed}x60", of(name, 'outcome="refused"'): f"0+{refused}x60"}


SHOP = '{policy="shop"%s}'
REFUSED = of("limitkeeper_requests_total", 'outcome="refused"', SHOP)
ATTEMPTS, DISTINCT = (of(f"limitkeeper_{name}_total", "", SHOP) for name in ("attempts", "distinct_requests"))
#: alert -> (series at which it fires, several sets of series at which it does not, minutes it may take)
CASES = {
    "LimitkeeperSustainedRefusals": (decisions(94, 6), [decisions(95, 5)], (10, 16)),
    "LimitkeeperOneKeyDominates": (
        {of("limitkeeper_top_offender_ratio"): "0.6x60", REFUSED: "0+120x60"},
        [
            {of("limitkeeper_top_offender_ratio"): "0.6x60", REFUSED: "0+30x60"},
            {of("limitkeeper_top_offender_ratio"): "0.5x60", REFUSED: "0+120x60"},
        ],
        (10, 16),
    ),
    "LimitkeeperNearLimit": (
        {**decisions(100, 0), of("limitkeeper_near_limit_total"): "0+21x60"},
        [{**decisions(100, 0), of("limitkeeper_near_limit_total"): "0+20x60"}],
        (15, 21),
    ),
    "LimitkeeperQueueFull": (
        {of("limitkeeper_queue_full_total"): "0+1x60"},
        [{of("limitkeeper_queue_full_total"): "7x60"}],
        (5, 8),
    ),
    "LimitkeeperShadowWouldRefuse": (
        {of("limitkeeper_shadow_would_refuse_total"): "0+1x60"},
        [{of("limitkeeper_shadow_would_refuse_total"): "7x60"}],
        (15, 18),
    ),
    "LimitkeeperSpendAlert": (
        {of("limitkeeper_alerts_total"): "0x20 1x60"},
        [{of("limitkeeper_alerts_total"): "1x60"}],
        (20, 23),
    ),
    "LimitkeeperClientsInPenaltyBox": (
        {of("limitkeeper_penalty_box_clients", "", SHOP): "3x60"},
        [{of("limitkeeper_penalty_box_clients", "", SHOP): "0x60"}],
        (10, 12),
    ),
    "LimitkeeperRetryAmplification": (
        {ATTEMPTS: "0+210x60", DISTINCT: "0+100x60"},
        [{ATTEMPTS: "0+200x60", DISTINCT: "0+100x60"}, {ATTEMPTS: "0x60", DISTINCT: "0x60"}],
        (5, 9),
    ),
    "LimitkeeperStoreDegraded": (
        {of("limitkeeper_store_state", 'state="open"', SHOP): "0x10 1x60"},
        [
            {
                of("limitkeeper_store_state", 'state="open"', SHOP): "0x60",
                of("limitkeeper_store_state", 'state="half_open"', SHOP): "1x60",
            }
        ],
        (11, 14),
    ),
    "LimitkeeperFailingOpen": (
        {of("limitkeeper_without_store_total", 'answer="open"'): "0x10 1x60"},
        [{of("limitkeeper_without_store_total", 'answer="local"'): "0x10 1x60"}],
        (10, 13),
    ),
    "LimitkeeperFailingClosed": (
        {of("limitkeeper_without_store_total", 'answer="closed"'): "0x10 1x60"},
        [{of("limitkeeper_without_store_total", 'answer="local"'): "0x10 1x60"}],
        (10, 13),
    ),
    "LimitkeeperSlowDecisions": (
        histogram("limitkeeper_decision_seconds", 90, 10, ("0.01", "0.05"), SHOP),
        [histogram("limitkeeper_decision_seconds", 100, 0, ("0.01", "0.05"), SHOP)],
        (10, 16),
    ),
    "LimitkeeperResponseP95": (
        histogram("limitkeeper_response_seconds", 94, 6, ("0.8", "1.0")),
        [histogram("limitkeeper_response_seconds", 96, 4, ("0.8", "1.0"))],
        (5, 9),
    ),
    "LimitkeeperResponseP99": (
        histogram("limitkeeper_response_seconds", 980, 20, ("2.0", "3.0")),
        [histogram("limitkeeper_response_seconds", 995, 5, ("2.0", "3.0"))],
        (5, 9),
    ),
    "LimitkeeperReloadRefused": (
        {of("limitkeeper_reloads_total", 'outcome="refused"', SHOP): "0x10 1x60"},
        [{of("limitkeeper_reloads_total", 'outcome="loaded"', SHOP): "0x10 1x60"}],
        (10, 13),
    ),
}


def promtool(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not here (Debian: apt-get install prometheus): only the structure of the rules is tested")
    return subprocess.run([found, *words], capture_output=True, text=True, timeout=60, **more)  # type: ignore[call-overload]


def test_every_alert_has_a_case():
    """Each shipped alert is made to fire in a case, and the series of the cases are exposed ones."""
    assert set(CASES) == set(ALERTS)
    for fires, silent, _ in CASES.values():
        assert unknown(" ".join([*fires, *(which for series in silent for which in series)])) == []


def test_promtool_takes_the_rules(tmp_path):
    """promtool, where installed, finds nothing wrong with the rules."""
    (tmp_path / "alerts.yml").write_text(alert_rules())
    done = promtool("check", "rules", str(tmp_path / "alerts.yml"))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(RULES)} rules found" in done.stdout


def firing(series: dict[str, str], name: str, minute: int, expected: bool, severity: str) -> dict[str, object]:
    """One of promtool's unit tests: whether an alert fires at a minute."""
    expr = f'count(ALERTS{{alertname="{name}", alertstate="firing", policy="shop", severity="{severity}"}}) or vector(0)'
    return {
        "interval": "1m",
        "input_series": [{"series": which, "values": values} for which, values in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": int(expected)}]},
        ],
    }


def test_alerts_fire_when_they_should_and_not_before(tmp_path):
    """With promtool: each alert fires in its case, not earlier than its wait, and not at all just below its threshold."""
    (tmp_path / "alerts.yml").write_text(alert_rules())
    tests = []
    for name, (fires, silent, (early, late)) in CASES.items():
        severity = ALERTS[name]["labels"]["severity"]
        tests.append(firing(fires, name, early - 1, False, severity))
        tests.append(firing(fires, name, late, True, severity))
        tests += [firing(series, name, minute, False, severity) for series in silent for minute in (early, late, 50)]
    (tmp_path / "tests.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", str(tmp_path / "tests.yml"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
