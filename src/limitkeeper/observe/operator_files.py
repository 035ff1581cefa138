"""Files for operators that come with the package: alert rules for Prometheus, and a dashboard for Grafana.

python -c 'from limitkeeper.observe.operator_files import alert_rules; print(alert_rules())' > limitkeeper-alerts.yml
"""

from __future__ import annotations

from importlib.resources import files

#: The runbook that the alert rules link to.
RUNBOOK = "docs/observability.md"


def alert_rules(runbook: str = RUNBOOK) -> str:
    """The alert rules, as YAML. `runbook` is the address of your copy of the runbook; a heading's anchor follows it."""
    return _read("alerts.yml").replace(f"{RUNBOOK}#", f"{runbook}#")


def dashboard() -> str:
    """The dashboard, as JSON: import it in Grafana and choose a Prometheus as its source."""
    return _read("dashboard.json")


def _read(name: str) -> str:
    return (files("limitkeeper.observe") / name).read_text(encoding="utf-8")
