"""Files for operators that come with the package: alert rules for Prometheus, and a dashboard for Grafana.

python -c 'from limitkeeper.observe.operator_files import alert_rules; print(alert_rules())' > limitkeeper-alerts.yml
"""

from __future__ import annotations

from importlib.resources import files

#: Where the runbook is, as the alert rules say it.
RUNBOOK = "docs/observability.md"


def alert_rules(runbook: str = RUNBOOK) -> str:
    """The alert rules, as YAML. `runbook` is where your copy of the page about them is: its headings are added to it."""
    return _text("alerts.yml").replace(f"{RUNBOOK}#", f"{runbook}#")


def dashboard() -> str:
    """The dashboard, as JSON: import it in Grafana, and choose a Prometheus as its source."""
    return _text("dashboard.json")


def _text(name: str) -> str:
    return (files("limitkeeper.observe") / name).read_text(encoding="utf-8")
