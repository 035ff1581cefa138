"""Checks that an expression of PromQL can be parsed, and names only what a gate exposes."""

from __future__ import annotations

import re
from functools import cache

import pytest
from prometheus_client import CollectorRegistry
from traffic import busy_gate, failing_gate

from limitkeeper.client import SpendGuard
from limitkeeper.concurrency import Bulkhead
from limitkeeper.observe.prometheus import LimitkeeperCollector


@cache
def exposed() -> dict[str, dict[str, set[str]]]:
    """{series: {label: the values it has}}, from real gates, a bulkhead and a spend guard."""
    registry = CollectorRegistry()
    LimitkeeperCollector(
        *(busy_gate(), failing_gate(), Bulkhead(3, name="database"), SpendGuard("50")), registry=registry, offenders=5
    )
    found: dict[str, dict[str, set[str]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                found.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    return found


def unknown(expr: str, recorded: frozenset[str] = frozenset()) -> list[str]:
    """Names in an expression that no gate exposes: series, labels to select, values of fixed labels, labels to group by."""
    series, wrong = exposed(), []
    names = re.findall(r"(limitkeeper[_:][\w:]+)(?:\{([^}]*)\})?", expr)
    for name, selector in names:
        if name not in series and name not in recorded:
            wrong.append(name)
        for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', selector):
            if label not in series.get(name, {}):
                wrong.append(f"{name}{{{label}}}")
            elif operator == "=" and label not in ("policy", "rule") and value not in series[name][label]:
                wrong.append(f"{name}{{{label}={value}}}")
    plain = [name for name, _ in names if name in series]
    for group in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", expr):
        labels = [part.strip() for part in group.split(",")]
        wrong += [f"by ({label})" for label in labels if plain and not any(label in series[name] for name in plain)]
    return wrong


def plain(expr: str) -> str:
    """A panel's expression with values in place of Grafana's variables."""
    return expr.replace("$__rate_interval", "5m").replace("$policy", ".*").replace("$rule", ".*")


def unreadable(expr: str) -> str:
    """Errors that a parser of the whole language finds in an expression, type errors included; empty where it is right."""
    promql_parser = pytest.importorskip("promql_parser", reason="promql-parser has no wheel here: expressions are not parsed")
    try:
        promql_parser.parse(plain(expr))
    except ValueError as wrong:
        return str(wrong) or "unreadable"
    return ""
