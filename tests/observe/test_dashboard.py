"""The shipped dashboard: it names exposed series, it is complete, and no panels overlap."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from promql import plain, unknown, unreadable

from limitkeeper.observe.metrics import HISTOGRAM, METRICS
from limitkeeper.observe.operator_files import dashboard

BOARD = json.loads(dashboard())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
ROWS = [panel for panel in BOARD["panels"] if panel["type"] == "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize(("title", "expr"), EXPRESSIONS, ids=[f"{title} {n}" for n, (title, _) in enumerate(EXPRESSIONS)])
def test_panels_name_what_is_exposed(title, expr):
    """Every series, label and fixed value on a panel is one that a real gate exposes; the syntax is right."""
    assert unknown(expr) == []
    assert unreadable(expr) == ""


def test_everything_that_is_measured_is_on_it():
    """Every exposed number is on the dashboard."""
    shown = " ".join(expr for _, expr in EXPRESSIONS)
    names = {f"limitkeeper_{measure.name}{'_bucket' if measure.kind == HISTOGRAM else ''}" for measure in METRICS}
    assert [name for name in sorted(names) if name not in shown] == []


def test_identifiers_are_unique_and_positions_free():
    """Panels have numbers of their own, lie within the 24 columns, and none overlaps another."""
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: dict[tuple[int, int], int] = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"panel {panel['id']} overlaps {taken[x, y]}"
                taken[x, y] = panel["id"]


def test_the_source_is_a_choice():
    """No data source is fixed: every panel and every target uses the chosen Prometheus."""
    names = [variable["name"] for variable in BOARD["templating"]["list"]]
    assert names == ["datasource", "policy", "rule"]
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    for variable in BOARD["templating"]["list"][1:]:
        assert unknown(variable["definition"]) == []


def test_rates_suit_the_zoom():
    """Rates are taken over Grafana's interval for the scrape and the zoom, never over a fixed one."""
    for _, expr in EXPRESSIONS:
        assert set(re.findall(r"\[(.+?)\]", expr)) <= {"$__rate_interval"}


def test_the_lines_of_the_alerts_are_drawn():
    """p95 has its line at 800 ms and p99 at 2 s; so have the other panels whose alert has a threshold."""
    lines = {
        panel["title"]: [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]]
        for panel in PANELS
        if panel["fieldConfig"]["defaults"]["custom"].get("thresholdsStyle", {}).get("mode") == "line"
    }
    assert lines["p95"] == [0.8]
    assert lines["p99"] == [2]
    assert lines["Share of refusals by rule"] == [0.05]
    assert lines["Share of passing requests near their limit"] == [0.2]
    assert lines["Share of the heaviest offender"] == [0.5]
    assert lines["Retry amplification"] == [2]
    assert lines["Time of a decision"] == [0.02]


def test_every_panel_has_a_description():
    """Each panel has a title, a description and a legend or a table. Letters of a panel's targets are unique."""
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters))
    assert [row["title"] for row in ROWS] == [
        "Traffic and refusals",
        "Near the limit, in shadow, spending",
        "Decisions",
        "Responses of what was let pass",
        "Store",
        "Waiting",
        "Offenders",
        "Policy",
        "Bulkheads",
        "Budgets",
    ]


def test_promtool_takes_the_expressions(tmp_path):
    """promtool, where installed, can parse every expression of the dashboard."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here (Debian: apt-get install prometheus): expressions are only looked at")
    rules = [{"record": f"panel:{number}", "expr": plain(expr)} for number, (_, expr) in enumerate(EXPRESSIONS)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
