"""The demo as one HTML page: no scripts, no external resources; follows the light or dark scheme, and works on a phone."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from limitkeeper.charts.frame import Frame
from limitkeeper.charts.page import html_page
from limitkeeper.charts.svg import Drawing

from .chart import mark
from .lanes import GROUPS, draw_lane, heights, outcome, window_name
from .traffic import PATTERNS, Pattern, Run

WIDTH = 520.0


STYLE = """
h3 { font-size: .85rem; margin: 20px 0 4px }
h3, .soft-words { color: var(--soft) }
.lane { display: grid; grid-template-columns: 270px 1fr; gap: 2px 16px; align-items: center; border-top: 1px solid var(--grid) }
.lane { padding: 8px 0 }
.lane b { font-weight: 600; font-size: .9rem; display: block }
.lane span { color: var(--soft); font-size: .8rem; display: block }
.legend { display: flex; flex-wrap: wrap; gap: 2px 20px; font-size: .85rem; color: var(--soft) }
.legend svg { display: inline-block; width: 14px; height: 14px; vertical-align: -2px; margin-right: 6px }
@media (max-width: 640px) { .lane { grid-template-columns: 1fr } }
"""


def page(found: Iterable[Iterable[Run]]) -> str:
    """The whole page, from the runs of every pattern."""
    sections = "\n".join(section(pattern, list(lanes)) for pattern, lanes in zip(PATTERNS, found, strict=True))
    about = """<p class="soft-words">What each limit of limitkeeper admits, delays and refuses.
Every mark is a decision of the library, on a manual clock.</p>"""
    return html_page("limitkeeper: the same arrivals through every algorithm", f"{about}\n{legend()}\n{sections}", STYLE)


def section(pattern: Pattern, found: list[Run]) -> str:
    """One pattern: its description, then its lanes in two groups."""
    parts = [f"<section>\n<h2>{escape(pattern.name)}</h2>\n<p>{escape(pattern.story)}</p>"]
    for waits, words in GROUPS:
        parts.append(f"<h3>{words}</h3>\n{row('', '', axis(pattern))}")
        parts += [lane(pattern, run) for run in found if run.lane.waits == waits]
    return "\n".join([*parts, "</section>"])


def row(name: str, words: str, picture: str) -> str:
    return f'<div class="lane"><div>{f"<b>{name}</b><span>{words}</span>" if name else ""}</div><div>{picture}</div></div>'


def lane(pattern: Pattern, run: Run) -> str:
    """A limit, its results, and its marks."""
    words = " · ".join([*outcome(run.figures), f"most in {window_name(pattern.window)}: {run.figures.most_in_window}"])
    above, below = heights(run)
    drawing = Drawing(WIDTH, above + below, str(run.lane.limit), words)
    draw_lane(drawing, strip(pattern, above + below), pattern, run)
    return row(escape(str(run.lane.limit)), words, drawing.markup(style=False))


def strip(pattern: Pattern, height: float) -> Frame:
    """The frame of the marks, with margins for labels and bursts."""
    return Frame(22, 0, WIDTH - 44, height, pattern.begin, pattern.end)


def axis(pattern: Pattern) -> str:
    """The time axis above the lanes."""
    drawing = Drawing(WIDTH, 18, "time", "the time axis of the lanes below")
    ticks = pattern.ticks()
    for moment, label in ticks[:: 1 if len(ticks) < 7 else 2]:
        drawing.text(strip(pattern, 18).px(moment), 14, label, "soft big", "middle")
    return drawing.markup(style=False)


def legend() -> str:
    """The legend of the marks."""
    parts = []
    for kind, words in (("admitted", "admitted at once"), ("delayed", "delayed, drawn where it starts"), ("refused", "refused")):
        drawing = Drawing(14, 14, kind, words)
        mark(drawing, 7, 7, kind)
        parts.append(f"<span>{drawing.markup(style=False)}{words}</span>")
    drawing = Drawing(14, 14, "edge", "the boundary of a fixed window")
    drawing.line(7, 0, 7, 14, "violet-line thin dash")
    parts.append(f"<span>{drawing.markup(style=False)}boundary of a fixed window</span>")
    return f'<p class="legend">{"".join(parts)}</p>'
