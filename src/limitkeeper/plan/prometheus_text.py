"""Reads the counters of a running policy from Prometheus text, a file or a /metrics URL, with prometheus_client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from ..errors import ConfigurationError

try:
    from prometheus_client.parser import text_string_to_metric_families
except ModuleNotFoundError as error:
    raise ConfigurationError("metrics need prometheus-client: pip install 'limitkeeper[plan]'") from error

MAX_BYTES, TIMEOUT_S = 10_000_000, 10.0


@dataclass(slots=True)
class RuleMetrics:
    """Counters of one rule since its processes started; `buckets` are the cumulative counts of response times in seconds."""

    passed: float = 0.0
    refused: float = 0.0
    near: float = 0.0
    shadow_refused: float = 0.0
    buckets: dict[float, float] = field(default_factory=dict)

    def percentile(self, percent: float) -> float | None:
        """The upper bound of the bucket that holds the percentile by nearest rank: at least the true one. None: no responses."""
        total = max(self.buckets.values(), default=0.0)
        return (
            min((bound for bound, count in self.buckets.items() if count * 100 >= percent * total), default=None)
            if total
            else None
        )


def read_metrics(place: str) -> dict[str, RuleMetrics]:
    """The counters by rule; ConfigurationError for a text without limitkeeper's metrics."""
    text = fetch(place) if place.startswith(("http://", "https://")) else read_file(place)
    found: dict[str, RuleMetrics] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("limitkeeper_") and "rule" in sample.labels:
                    add(found.setdefault(sample.labels["rule"], RuleMetrics()), sample.name[12:], sample.labels, sample.value)
    except ValueError as error:
        raise ConfigurationError(f"{place}: not Prometheus text: {error}; give the text of a /metrics page") from None
    if not found:
        raise ConfigurationError(f"{place}: no rule of limitkeeper is among the metrics; export them with LimitkeeperCollector")
    return found


def add(rule: RuleMetrics, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == "rule_decisions_total" and labels.get("outcome") == "passed":
        rule.passed += value
    elif name == "rule_decisions_total":
        rule.refused += value
    elif name == "near_limit_total":
        rule.near += value
    elif name == "shadow_would_refuse_total":
        rule.shadow_refused += value
    elif name == "response_seconds_bucket":
        bound = float(labels.get("le", ""))
        rule.buckets[bound] = rule.buckets.get(bound, 0.0) + value


def read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{path}: can't read the metrics: {(error.strerror or str(error)).lower()}") from None


def fetch(url: str) -> str:
    try:
        with urlopen(Request(url, headers={"Accept": "text/plain"}), timeout=TIMEOUT_S) as response:
            data: bytes = response.read(MAX_BYTES + 1)
    except (URLError, OSError, ValueError) as error:
        raise ConfigurationError(f"{url}: can't read the metrics: {error}; give the URL of a /metrics page") from None
    return data[:MAX_BYTES].decode("utf-8", "replace")
