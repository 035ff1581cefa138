"""Reads the output of load generators as load steps: wrk, hey, k6 (text or JSON), locust (`--csv`), and a table of steps.

wrk, locust and a k6 test with `vus` are closed loops: their users wait for responses, so the offered load is the throughput, and
the concurrency is what they vary.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError
from .load_latency_curve import LoadStep
from .request_log import MalformedLine, parse_number, unit_factor

_DURATION = re.compile(r"([\d.]+)\s*(us|µs|ms|s|m|h)\b")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_in(text: str) -> float:
    """Seconds of "635.91us", "1.2s", "1m30s"."""
    return sum(float(amount) * _SECONDS[unit] for amount, unit in _DURATION.findall(re.sub(r"(?<=[a-zµ])(?=\d)", " ", text)))


def number_after(pattern: str, text: str) -> float | None:
    found = re.search(pattern, text, re.M)
    return None if found is None else float(found[1].replace(",", ""))


def need(value: float | None, what: str, source: str) -> float:
    if value is None:
        raise ConfigurationError(f"{source}: the output has no {what}; keep all of it, also when the test was interrupted")
    return value


def read_wrk(text: str, source: str) -> list[LoadStep]:
    """wrk and wrk2, best with `--latency`; without, only the mean is known."""
    rate = need(number_after(r"^Requests/sec:\s+([\d.]+)", text), "'Requests/sec'", source)
    requests = int(need(number_after(r"^\s*(\d+) requests in", text), "'requests in'", source))
    errors = sum(map(int, re.findall(r"(?:connect|read|write|timeout) (\d+)", text)))
    errors += int(number_after(r"Non-2xx or 3xx responses: (\d+)", text) or 0)
    mean = re.search(r"^\s*Latency\s+([\d.]+\w+)", text, re.M)
    percentiles = {
        float(p): seconds_in(value) for p, value in re.findall(r"^\s*([\d.]+)%\s+([\d.]+(?:us|ms|s|m))\s*$", text, re.M)
    }
    connections = number_after(r"and (\d+) connections", text)
    share = min(1.0, errors / requests) if requests else 0.0
    return [LoadStep(rate, rate * (1 - share), percentiles, seconds_in(mean[1]) if mean else None, connections, requests, errors)]


def read_hey(text: str, source: str) -> list[LoadStep]:
    """hey's summary; requests without a response are in its error distribution."""
    rate = need(number_after(r"^\s*Requests/sec:\s+([\d.]+)", text), "'Requests/sec'", source)
    percentiles = {float(p): float(value) for p, value in re.findall(r"^\s*([\d.]+)%+ in ([\d.]+) secs", text, re.M)}
    statuses = {int(code): int(count) for code, count in re.findall(r"\[(\d{3})\]\s+(\d+) responses", text)}
    lost = sum(map(int, re.findall(r"^\s*\[(\d+)\]\s+(?!\d+ responses)\S", text, re.M)))
    refused = statuses.get(429, 0)
    errors = lost + sum(count for code, count in statuses.items() if code >= 500)
    requests = lost + sum(statuses.values())
    good = (requests - errors - refused) / requests if requests else 1.0
    mean = number_after(r"^\s*Average:\s+([\d.]+) secs", text)
    return [LoadStep(rate, rate * good, percentiles, mean, None, requests, errors, refused)]


def read_k6_text(text: str, source: str) -> list[LoadStep]:
    """The summary that k6 prints at the end of a test."""
    line = re.search(r"^\s*http_req_duration\.*:\s+(.+)$", text, re.M)
    if line is None:
        raise ConfigurationError(f"{source}: the output has no 'http_req_duration'; keep all of k6's summary")
    values = {name: seconds_in(value) * 1000 for name, value in re.findall(r"(\w+|p\([\d.]+\))=(\S+)", line[1])}
    counts = re.search(r"^\s*http_reqs\.*:\s+(\d+)\s+([\d.]+)/s", text, re.M)
    failed = re.search(r"^\s*http_req_failed\.*:\s+([\d.]+)%", text, re.M)
    users = number_after(r"^\s*vus_max\.*:\s+(\d+)", text)
    rate, requests = (float(counts[2]), int(counts[1])) if counts else (None, 0)
    return [k6_step(values, need(rate, "'http_reqs'", source), requests, float(failed[1]) / 100 if failed else 0.0, users)]


def read_k6_summary(value: Mapping[str, Any], source: str) -> list[LoadStep]:
    """k6's `--summary-export` or handleSummary data, whose values may be nested in `values`."""
    metrics = {name: metric.get("values", metric) for name, metric in value["metrics"].items() if isinstance(metric, dict)}
    reqs = metrics.get("http_reqs", {})
    failed = metrics.get("http_req_failed", {})
    rate = need(reqs.get("rate"), "'http_reqs'", source)
    users = metrics.get("vus_max", {}).get("value")
    share = float(failed.get("value", failed.get("rate", 0.0)))
    return [k6_step(metrics.get("http_req_duration", {}), rate, int(reqs.get("count", 0)), share, users)]


def k6_step(values: Mapping[str, float], rate: float, requests: int, failed: float, users: float | None) -> LoadStep:
    """A step of k6's figures in milliseconds. k6 counts every status from 400 as failed, refusals included."""
    percentiles = {float(name[2:-1]): value / 1000 for name, value in values.items() if name.startswith("p(")}
    if "med" in values:
        percentiles[50.0] = values["med"] / 1000
    mean = values["avg"] / 1000 if "avg" in values else None
    return LoadStep(rate, rate * (1 - failed), percentiles, mean, users, requests, round(requests * failed))


Row = dict[str, str]
#: Columns of a table of steps, by what they hold; percentiles are p95 or 95%, latencies may end in _ms, _s or _us.
_COLUMNS = {
    "load": ("load", "rps", "offered", "rate", "requests/s", "offered_rps"),
    "throughput": ("throughput", "achieved", "achieved_rps"),
    "concurrency": ("concurrency", "users", "user count", "connections", "vus", "in_flight"),
    "requests": ("requests", "request count", "count"),
    "errors": ("errors", "failures", "failure count", "failures/s"),
    "refused": ("refused",),
}
_PERCENTILE = re.compile(r"p?([\d.]+)%?(?:_(ms|s|us))?")


def is_step_table(header: Sequence[str]) -> bool:
    """Whether a CSV header has a load and a percentile."""
    names = [name.strip().lower() for name in header]
    return bool({*_COLUMNS["load"], *_COLUMNS["concurrency"]} & {*names}) and any(percent_of(name) for name in names)


def percent_of(name: str) -> tuple[float, str] | None:
    """The percentile of a column and its unit: "p95_ms" is (95, "ms"), locust's "95%" is (95, "")."""
    found = _PERCENTILE.fullmatch(name) if name[:1] == "p" or name.endswith("%") else None
    return None if found is None else (float(found[1]), found[2] or "")


def read_step_table(text: str, source: str, unit: str) -> list[LoadStep]:
    """A table with a row per load; of locust's files the rows named Aggregated, joined by user count."""
    lines = text.splitlines()
    rows = csv.DictReader(lines)
    steps = []
    for row in rows:
        lower = {name.strip().lower(): (value or "").strip() for name, value in row.items() if name}
        if lower.get("name", "Aggregated") == "Aggregated" and "N/A" not in lower.values():
            steps.append(step_of_row(lower, f"{source}:{rows.line_num}", rows.line_num, unit))
    if not steps:
        raise ConfigurationError(f"{source}: the table has no rows; write one row per load below the header")
    return join_by_users(steps) if "user count" in lines[0].lower() else steps


def step_of_row(row: Row, place: str, line: int, unit: str) -> LoadStep:
    def get(what: str, otherwise: float | None) -> float | None:
        name = next((name for name in _COLUMNS[what] if row.get(name)), None)
        return otherwise if name is None else cell(name)

    def cell(name: str) -> float:
        try:
            return parse_number(row[name], f"a number in column {name!r}")
        except MalformedLine as error:
            raise ConfigurationError(f"{place}: {error}; correct it") from None

    percents = {name: found for name in row if row[name] and (found := percent_of(name))}
    percentiles = {percent: cell(name) * unit_factor(word or unit) for name, (percent, word) in percents.items()}
    mean = next((cell(name) * unit_factor(word or unit) for name, word in MEANS.items() if row.get(name)), None)
    load = get("load", None)
    throughput = get("throughput", load)
    if throughput is None:
        raise ConfigurationError(f"{place}: the row has no load; add a column 'rps' or 'throughput'")
    requests, errors, refused = (int(get(what, 0) or 0) for what in ("requests", "errors", "refused"))
    offered = throughput if load is None else load
    return LoadStep(offered, throughput, percentiles, mean, get("concurrency", None), requests, errors, refused, line)


MEANS = {"mean_ms": "ms", "mean_s": "s", "mean": "", "average response time": "ms", "total average response time": "ms"}


def join_by_users(steps: Sequence[LoadStep]) -> list[LoadStep]:
    """One step per user count: the median row by p95, since locust writes a row every second, also while it adds users."""
    groups: dict[float, list[LoadStep]] = {}
    for step in steps:
        if step.throughput > 0:
            groups.setdefault(step.concurrency or 0.0, []).append(step)
    middle: Callable[[list[LoadStep]], LoadStep] = lambda rows: sorted(rows, key=lambda row: row.percentiles.get(95.0, 0.0))[  # noqa: E731
        len(rows) // 2
    ]
    return [middle(groups[users]) for users in sorted(groups)]


def read_summary(text: str, source: str, unit: str) -> tuple[str, list[LoadStep]] | None:
    """The generator and its steps; None: the text is no summary."""
    if re.search(r"^Running .+ test @ ", text, re.M):
        return "wrk", read_wrk(text, source)
    if re.search(r"^Summary:", text, re.M) and "Requests/sec" in text:
        return "hey", read_hey(text, source)
    if re.search(r"^\s*http_req_duration\.*:", text, re.M):
        return "k6 summary", read_k6_text(text, source)
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        found = isinstance(value, dict) and isinstance(value.get("metrics"), dict)
        return ("k6 summary", read_k6_summary(value, source)) if found else None
    header = next(csv.reader(text[:65_536].splitlines()[:1]), [])
    if is_step_table(header):
        locust = {"user count", "request count"} & {name.lower() for name in header}
        return "locust statistics" if locust else "table of loads", read_step_table(text, source, unit)
    return None
