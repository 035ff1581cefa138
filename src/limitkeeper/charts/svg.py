"""A small SVG writer: shapes with class names and one style, readable on light and dark backgrounds.

Colours are in the style only, so a picture follows the reader's `prefers-color-scheme`. Marks differ in shape, too.
Numbers are rounded to a tenth of a pixel: the same run draws the same bytes everywhere.
Rejected: a plotting library, which writes 300 kB for a few lines and dots, and output that changes with its version.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

LIGHT = {
    "card": "#ffffff",
    "ink": "#1c2530",
    "soft": "#5f6b7a",
    "grid": "#e3e7ec",
    "band": "#f3f5f8",
    "blue": "#2563eb",
    "green": "#15803d",
    "amber": "#c2680a",
    "red": "#d62839",
    "violet": "#7c3aed",
}
DARK = {
    "card": "#14181e",
    "ink": "#e8ebef",
    "soft": "#a0abb8",
    "grid": "#2a313b",
    "band": "#1b2028",
    "blue": "#78a6ff",
    "green": "#4ade80",
    "amber": "#fbb040",
    "red": "#ff7b86",
    "violet": "#b794ff",
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def rules(colours: dict[str, str]) -> str:
    """The rules of one colour scheme."""
    lines = [f".{name} {{ fill: {value} }} .{name}-line {{ stroke: {value} }}" for name, value in colours.items()]
    return "\n".join([f"text {{ fill: {colours['ink']} }}", *lines])


STYLE = f"""
text {{ font-family: {FONT}; font-size: 13px }}
.title {{ font-size: 17px; font-weight: 650 }} .small {{ font-size: 12px }} .strong {{ font-weight: 650 }}
.code {{ font-family: {MONO}; font-size: 12px }} .big {{ font-size: 15px }}
.thin {{ stroke-width: 1 }} .fine {{ stroke-width: 1.5 }} .bold {{ stroke-width: 2.2 }}
.thin, .fine, .bold {{ fill: none; stroke-linecap: round; stroke-linejoin: round }}
.dash {{ stroke-dasharray: 4 4 }} .wash {{ opacity: .13 }} .veil {{ opacity: .26 }}
{rules(LIGHT)}
@media (prefers-color-scheme: dark) {{
{rules(DARK)}
}}
"""


def number(value: float | int | str) -> str:
    """A coordinate: a tenth of a pixel, without trailing zeros."""
    if isinstance(value, str):
        return value
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


class Drawing:
    """Shapes in drawing order; `words` names the colours and weights (classes) of a shape."""

    def __init__(self, width: float, height: float, title: str, about: str) -> None:
        self.width, self.height = width, height
        self.title, self.about = title, about
        self.card = False
        self._parts: list[str] = []

    def put(self, tag: str, words: str, content: str | None = None, **attributes: float | str) -> None:
        """One element; `content` is text and is escaped."""
        given = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(number(value))}"' for name, value in attributes.items())
        inside = "/>" if content is None else f">{escape(content, quote=False)}</{tag}>"
        self._parts.append(f'<{tag} class="{words}"{given}{inside}')

    def text(self, x: float, y: float, content: str, words: str = "", anchor: str = "start") -> None:
        self.put("text", words, content, x=x, y=y, text_anchor=anchor)

    def line(self, x1: float, y1: float, x2: float, y2: float, words: str) -> None:
        self.put("line", words, x1=x1, y1=y1, x2=x2, y2=y2)

    def rect(self, x: float, y: float, width: float, height: float, words: str, round: float = 0) -> None:
        self.put("rect", words, x=x, y=y, width=width, height=height, rx=round)

    def circle(self, x: float, y: float, radius: float, words: str) -> None:
        self.put("circle", words, cx=x, cy=y, r=radius)

    def cross(self, x: float, y: float, size: float, words: str) -> None:
        self.put(
            "path",
            words,
            d=path([(x - size, y - size), (x + size, y + size)]) + path([(x - size, y + size), (x + size, y - size)]),
        )

    def polyline(self, points: Iterable[tuple[float, float]], words: str, close: bool = False) -> None:
        self.put("path", words, d=path(points) + ("Z" if close else ""))

    def markup(self, style: bool = True) -> str:
        """The whole picture; without the style for a page that already has it."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(self.width)} {number(self.height)}" role="img">\n'
            f"<title>{escape(self.title, quote=False)}</title>\n<desc>{escape(self.about, quote=False)}</desc>\n"
        )
        size = f'width="{number(self.width - 1)}" height="{number(self.height - 1)}"'
        card = [f'<rect class="card grid-line thin" x="0.5" y="0.5" {size} rx="10"/>'] if self.card else []
        body = "\n".join(card + self._parts)
        return f"{head}{f'<style>{STYLE}</style>' if style else ''}\n{body}\n</svg>\n"


def path(points: Iterable[tuple[float, float]]) -> str:
    """Straight lines from point to point."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
