"""A page of charts: one HTML file without scripts and external resources, in the reader's light or dark scheme."""

from __future__ import annotations

from html import escape

from .svg import DARK, FONT, LIGHT, STYLE


def variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


PAGE_STYLE = f"""
:root {{ color-scheme: light dark; {variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}
body {{ margin: 0; background: var(--band); color: var(--ink); font: 16px/1.5 {FONT} }}
main {{ max-width: 900px; margin: 0 auto; padding: 24px 16px 48px }}
h1 {{ font-size: 1.7rem; margin: .4em 0 .2em }} h2 {{ font-size: 1.2rem; margin: 0 }} p {{ margin: .3em 0 }}
section {{ background: var(--card); border: 1px solid var(--grid); border-radius: 10px }}
section {{ padding: 16px 20px 20px; margin-top: 20px }}
svg {{ display: block; width: 100%; height: auto; overflow: visible }}
@media (max-width: 640px) {{ section {{ padding: 12px 14px 16px }} }}
"""


def html_page(title: str, body: str, style: str = "") -> str:
    """A page with a heading; `body` is HTML, `title` is text, `style` adds to the common rules."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>{STYLE}{PAGE_STYLE}{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
</body>
</html>
"""
