"""Writes the report of a plan or an analysis: as text for a terminal, as JSON, and as one HTML page with charts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from html import escape
from math import isfinite

from ..charts import Line, Mark, html_page, line_chart
from ..policy.explain import table
from .capacity_formula import Capacity
from .limit_plan import Plan
from .load_latency_curve import LoadStep
from .measured_capacity import MAX_ERRORS, Analysis
from .percentiles import PERCENTS
from .quantities import duration_text, rps

Table = tuple[str, list[list[str]]]


class Report:
    """The sections of a report; `plan` is None for an analysis that gives no limit."""

    def __init__(self, source: Capacity | Analysis, plan: Plan | None = None) -> None:
        self.source, self.plan = source, plan
        self.reasons = source.reasons() if plan is None else plan.reasons()
        self.warnings = source.warnings() if plan is None else plan.warnings()

    def tables(self) -> Iterator[Table]:
        """Titles and rows; the first row is the head."""
        if self.source.ceilings:
            yield "ceilings", [["", "ceiling", "from"], *([one.name, rps(one.rate), one.formula] for one in self.source.ceilings)]
        if self.plan is not None:
            rows = [[name, f"{float(rate):g}", str(burst)] for name, rate, burst in limits_of(self.plan)]
            yield "limits", [["", "RPS", "burst"], *rows]
        if isinstance(self.source, Analysis) and self.source.steps:
            head = ["load", "throughput", "in progress", *(f"p{percent:g}" for percent in PERCENTS), "errors", "refused", "SLO"]
            yield "loads", [head, *(step_row(step, self.source) for step in self.source.steps)]

    def text(self) -> str:
        """The report for a terminal."""
        parts = ["\n".join([title, *table(rows)]) for title, rows in self.tables()]
        parts.append("\n".join(self.reasons))
        if self.warnings:
            parts.append("\n".join(f"warning: {warning}" for warning in self.warnings))
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, object]:
        """The same for JSON; rates in RPS, latencies in seconds."""
        source, plan = self.source, self.plan
        found: dict[str, object] = {
            "ceiling": number(source.ceilings[0].rate) if source.ceilings else None,
            "ceilings": [{"name": one.name, "rps": number(one.rate), "from": one.formula} for one in source.ceilings],
            "margin": number(source.margin),
            "limit": None if source.limit is None else number(source.limit),
        }
        if isinstance(source, Capacity):
            found |= {"total_concurrency": source.total_concurrency, "one_pod_down": number(source.one_pod_down)}
            found |= {"band": [number(one) for one in source.band()], "p95": number(source.p95)}
            found["little"] = None if source.little is None else number(source.little)
        else:
            found |= analysis_dict(source)
        if plan is not None:
            found["burst"] = plan.burst
            found["limits"] = [{"name": name, "rps": number(rate), "burst": burst} for name, rate, burst in limits_of(plan)]
        return found | {"reasons": self.reasons, "warnings": self.warnings}

    def charts(self) -> Iterator[str]:
        """SVG charts of what is known."""
        source = self.source
        limit = [] if source.limit is None else [Mark("limit", float(source.limit), "green")]
        if isinstance(source, Capacity):
            top, total = float(source.service_ceiling), float(source.total_concurrency)
            marks = [*limit, Mark("ceiling", float(source.ceiling)), Mark(f"{total:g} slots", total, "red", level=True)]
            line = Line("requests in progress, each of p95", [(0.0, 0.0), (top, total)])
            yield line_chart("Concurrency by rate", "RPS", "in progress", [line], marks).markup(style=False)
            return
        if len(source.steps) > 1:
            yield curve_chart(source, limit)
        if source.scalability is not None:
            yield law_chart(source)
        if source.samples.count:
            yield distribution_chart(source)

    def html(self, title: str = "Capacity plan") -> str:
        """One self-contained page."""
        tables = "".join(f"<section><h2>{escape(name)}</h2>{html_table(rows)}</section>" for name, rows in self.tables())
        charts = "".join(f"<section>{chart}</section>" for chart in self.charts())
        reasons = "".join(f"<p>{escape(reason)}</p>" for reason in self.reasons)
        warnings = "".join(f'<p class="warning">{escape(warning)}</p>' for warning in self.warnings)
        return html_page(title, f"{tables}\n{charts}\n<section><h2>why</h2>{reasons}{warnings}</section>", STYLE)


STYLE = """
section { overflow-x: auto } h2 { font-size: 1rem; margin-bottom: 8px } .warning { color: var(--red) }
table { border-collapse: collapse; width: 100% } th { color: var(--soft) }
td, th { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--grid); font-weight: 400 }
"""


def number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def limits_of(plan: Plan) -> list[tuple[str, Fraction, int]]:
    """Name, rate and burst of every limit of a plan."""
    rows: list[tuple[str, Fraction, int]] = [("all clients together", plan.limit, plan.burst)]
    if plan.internal:
        rows.append(("internal jobs", plan.internal, plan.internal_burst))
    for shares in (plan.classes, plan.endpoints):
        rows += [(share.name, share.rate, shares.burst_of(share, plan.burst)) for share in shares.shares] if shares else []
    for key in plan.per_key:
        rows += [(f"each {key.identity}{f' of {tier}' if tier else ''}", rate, plan.key_burst(rate)) for tier, rate in key.tiers]
    return rows


def step_row(step: LoadStep, source: Analysis) -> list[str]:
    percentiles = [duration_text(step.percentiles[p]) if p in step.percentiles else "–" for p in PERCENTS]
    in_flight = "–" if step.in_flight is None else f"{step.in_flight:.3g}"
    shares = [f"{share:.1%}" for share in (step.error_share, step.refused_share)]
    met = "met" if step.meets(source.slo, MAX_ERRORS) else "broken"
    return [rps(step.load), rps(step.throughput), in_flight, *percentiles, *shares, met]


def analysis_dict(source: Analysis) -> dict[str, object]:
    law, samples = source.scalability, source.samples
    checks = [asdict(one) | {"met": one.met} for one in source.checks]
    return {
        "sources": list(source.sources),
        "samples": samples.count,
        "percentiles": {f"p{p:g}": samples.percentile(p) for p in PERCENTS} if samples.count else {},
        "percentile_error": samples.error,
        "slo": checks,
        "loads": [step.as_dict() for step in source.steps],
        "scalability": None
        if law is None
        else {
            "rate_of_one": law.rate_of_one,
            "contention": law.contention,
            "coherency": law.coherency,
            "error": law.error,
            "knee": finite(law.knee_concurrency),
            "knee_rps": finite(law.knee_throughput),
            "peak": finite(law.peak_concurrency),
            "peak_rps": finite(law.peak_throughput),
        },
    }


def finite(value: float) -> float | None:
    return value if isfinite(value) else None


def curve_chart(source: Analysis, limit: list[Mark]) -> str:
    colours = dict(zip(PERCENTS, ("green", "blue", "violet"), strict=True))
    points = {p: [(step.load, step.percentiles[p] * 1000) for step in source.steps if p in step.percentiles] for p in PERCENTS}
    lines = [Line(f"p{p:g}", points[p], colour) for p, colour in colours.items() if points[p]]
    goals = source.slo.objectives
    marks = [Mark(f"p{p:g} objective", float(goal) * 1000, colours.get(p, "red"), level=True) for p, goal in goals]
    return line_chart("Latency by load", "offered load in RPS", "latency in ms", lines, [*marks, *limit]).markup(style=False)


def law_chart(source: Analysis) -> str:
    law = source.scalability
    assert law is not None
    points = [(step.in_flight or 0.0, step.throughput) for step in source.steps]
    end = max(n for n, _ in points) * 1.2
    fitted = [(end * i / 60, law.throughput(end * i / 60)) for i in range(61)]
    knees = ((law.knee_concurrency, "knee", "amber"), (law.peak_concurrency, "peak", "red"))
    marks = [Mark(name, at, colour) for at, name, colour in knees if at <= end]
    lines = [Line("universal scalability law", fitted), Line("measured", points, "violet", dots=True)]
    return line_chart("Throughput by concurrency", "requests in progress", "RPS", lines, marks).markup(style=False)


def distribution_chart(source: Analysis) -> str:
    points = [(float(p), source.samples.percentile(p) * 1000) for p in (1, *range(5, 100, 5), 99)]
    marks = [Mark(f"p{p:g} objective", float(goal) * 1000, "red", level=True) for p, goal in source.slo.objectives]
    line = Line("latency of the samples", points)
    return line_chart("Latency by percentile", "percentile", "latency in ms", [line], marks).markup(style=False)


def html_table(rows: list[list[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{cells}</tr>{lines}</table>"
