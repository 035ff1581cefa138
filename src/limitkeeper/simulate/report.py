"""The report of one run, or of several side by side: text for a terminal, JSON, CSV of the series, one self-contained page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ..charts import Line, Mark, html_page, line_chart
from ..plan.percentiles import PERCENTS
from ..plan.quantities import duration_text
from ..plan.report import STYLE, html_table
from ..policy.explain import table
from .recorder import ClassRecorder
from .simulation import Result

COLOURS = ("blue", "red", "green", "violet", "amber", "soft")
#: Points of a line; longer series are averaged.
MAX_POINTS = 300
GRID = """
main { max-width: none; padding: 24px } h2 { margin: 24px 0 10px } section h2 { margin: 0 } .runs { display: grid; gap: 20px }
.runs section { margin-top: 0; min-width: 0 } .about { color: var(--soft) } .broken { color: var(--red) }
"""


@dataclass(frozen=True)
class Chart:
    """A chart of one run: columns of its series, or of what they add up to."""

    title: str
    unit: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()

    def svg(self, style: bool = False) -> str:
        """The picture; with its style for a file of its own."""
        return line_chart(self.title, "seconds", self.unit, self.lines, self.marks).markup(style)


def rows_of(result: Result) -> Iterator[tuple[str, str]]:
    """The figures of a run, each with a name that other runs share."""
    time = result.simulated_s or 1.0
    yield result.kind, duration_text(result.simulated_s) + (", interrupted" if result.interrupted else "")
    for name, one in result.classes.items():
        yield f"{name}: requests", f"{one.sent:,}"
        yield f"{name}: attempts per request", f"{one.attempts / max(1, one.sent):.2f}"
        yield f"{name}: goodput", f"{one.ok / time:,.1f}/s ({one.ok / max(1, one.sent):.1%})"
        yield f"{name}: refused", f"{one.refused:,}{refused_by(one)}"
        yield f"{name}: failed", f"{one.failed:,}"
        if one.samples.count:
            yield f"{name}: latency", ", ".join(f"p{p:g} {duration_text(one.samples.percentile(p))}" for p in PERCENTS)
        if result.scenario.slo is not None:
            broken = [str(check) for check in result.slo_checks(name) if not check.met]
            yield f"{name}: SLO {result.scenario.slo}", f"broken: {', '.join(broken)}" if broken else "met"
        if one.duplicates or one.inconsistent:
            yield f"{name}: orders", f"{one.duplicates:,} written twice, {one.inconsistent:,} written and reported as failed"
        if len(one.users_ok) > 1:
            yield f"{name}: Jain fairness of users", f"{one.fairness():.3f}"
    yield "highest attempts of all clients", f"{max(total(result, 'attempts'), default=0):,.0f}/s"
    if len(result.classes) > 1:
        yield "Jain fairness of classes", f"{result.fairness():.3f}"
    for label, found in result.admissions.items():
        excess = f"over-admission {found.excess:.1f} ({found.worst_key})" if found.excess > 0 else "no over-admission"
        yield f"{label}: {found.limit}", f"{found.admitted:,} admitted, {excess}"
    for name, service in result.services.items():
        size = len(service.pods) * service.concurrency
        yield f"{name}: most in use", f"{service.most_in_use:,} of {size:,}"
        yield f"{name}: longest queue", f"{result.peak(f'{name}.waiting'):,.0f}"
        yield f"{name}: rejected, failed", f"{service.rejected:,}, {service.failed:,} of {service.requests:,}"
    for call in result.calls:
        retries = call.attempts - call.calls
        text = f"{call.calls:,} calls, {retries:,} retries, {call.timeouts:,} timeouts, {call.refused:,} refused by the caller"
        yield call.name, text


def refused_by(one: ClassRecorder) -> str:
    rules = [f"{rule} {count:,}" for rule, count in one.rules.most_common(3)]
    return f" ({', '.join(rules)})" if rules else ""


def total(result: Result, column: str) -> list[float]:
    """A column of all classes of clients together, by interval."""
    return [sum(row[f"{name}.{column}"] for name in result.classes) for row in result.series]


def points(result: Result, values: Sequence[float]) -> list[tuple[float, float]]:
    """A line of at most MAX_POINTS points, each the mean of its intervals."""
    step = -(-len(values) // MAX_POINTS)
    found = []
    for at in range(0, len(values), step):
        part = values[at : at + step]
        found.append((result.series[min(at + step, len(values)) - 1]["time"], sum(part) / len(part)))
    return found


def column(result: Result, name: str) -> list[tuple[float, float]]:
    return points(result, [row[name] for row in result.series])


def charts_of(result: Result, runs: Sequence[Result] = ()) -> Iterator[Chart]:
    """The charts of one run, in an order that all runs share, and with the services and colours of `runs`."""
    if not result.series:
        return
    kinds = (("sent", "blue"), ("attempts", "violet"), ("ok", "green"), ("refused", "amber"), ("failed", "red"))
    lines = [Line(name, points(result, total(result, name)), colour) for name, colour in kinds]
    yield Chart("All clients", "requests per second", lines)
    names = list(result.classes)[: len(COLOURS)]
    for title, kind in (("Goodput", "ok"), ("Refused", "refused")):
        lines = [Line(name, column(result, f"{name}.{kind}"), COLOURS[i]) for i, name in enumerate(names)]
        yield Chart(title, "requests per second", lines)
    lines = [Line(name, column(result, f"{name}.p95 ms"), COLOURS[i]) for i, name in enumerate(names)]
    objectives = () if result.scenario.slo is None else result.scenario.slo.objectives
    marks = [Mark(f"p{p:g} objective", float(goal) * 1000, "red", level=True) for p, goal in objectives if p == 95]
    yield Chart("p95 latency of what no limit refused", "ms", lines, marks)
    for title, kind in (("Places in use", "in use"), ("Waiting in queues", "waiting")):
        busy = enumerate(busiest(runs or [result], kind))
        lines = [Line(name, column(result, f"{name}.{kind}"), COLOURS[i]) for i, name in busy if name in result.services]
        if lines:
            yield Chart(title, "requests", lines)


def busiest(runs: Sequence[Result], kind: str) -> list[str]:
    """The services with the highest values of all runs, as many as there are colours."""
    peaks: dict[str, float] = {}
    for run in runs:
        for name in run.services:
            peaks[name] = max(peaks.get(name, 0.0), run.peak(f"{name}.{kind}"))
    return sorted(peaks, key=lambda name: -peaks[name])[: len(COLOURS)]


class Report:
    """The report of runs, compared side by side where there are several."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results

    def rows(self) -> list[list[str]]:
        """A table with a column per run; the first row is the head."""
        found = [dict(rows_of(result)) for result in self.results]
        names = list(dict.fromkeys(name for one in found for name in one))
        head = ["", *(result.scenario.name for result in self.results)]
        return [head, *([name, *(one.get(name, "–") for one in found)] for name in names)]

    def text(self) -> str:
        return "\n".join(table(self.rows()))

    def as_dict(self) -> dict[str, object]:
        return {"runs": [result.as_dict() for result in self.results]}

    def csv(self) -> str:
        """The series of all runs: a row per run and interval."""
        names = list(dict.fromkeys(name for result in self.results for row in result.series for name in row))
        out = io.StringIO()
        writer = csv.DictWriter(out, ["run", *names], restval="", lineterminator="\n")
        writer.writeheader()
        for result in self.results:
            for row in result.series:
                writer.writerow({"run": result.scenario.name, **{name: f"{value:.6g}" for name, value in row.items()}})
        return out.getvalue()

    def charts(self) -> list[list[tuple[str, Chart]]]:
        """Rows of charts of one kind, each with the name of its run."""
        by_title: dict[str, list[tuple[str, Chart]]] = {}
        for result in self.results:
            for chart in charts_of(result, self.results):
                by_title.setdefault(chart.title, []).append((result.scenario.name, chart))
        return list(by_title.values())

    def html(self, title: str = "Simulation") -> str:
        """One page without scripts and external resources."""
        scenarios = [result.scenario for result in self.results if result.scenario.about]
        parts = [f"<p><b>{escape(one.name)}</b>: {escape(one.about)}</p>" for one in scenarios]
        columns = f'style="grid-template-columns: repeat({len(self.results)}, minmax(0, 1fr))"'
        for row in self.charts():
            cells = "".join(f"<section><p class='about'>{escape(name)}</p>{chart.svg()}</section>" for name, chart in row)
            parts.append(f'<h2>{escape(row[0][1].title)}</h2><div class="runs" {columns}>{cells}</div>')
        parts.append(f"<section><h2>figures</h2>{html_table(self.rows())}</section>")
        return html_page(title, "\n".join(parts), STYLE + GRID)
