"""Writes figures of RESULTS.md into README.md and docs/. `make bench` and `make docs` run it; a test compares.

A page quotes a table by its name, `<!-- figures: peers -->` … `<!-- end -->`, or one figure by section, row and column (the
first by default): `<!-- figure: Shared file :: shared hit / memory hit, allow -->2.18 ×<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
QUOTED = re.compile(r"(<!-- figures?: (.+?) -->).*?(<!-- end -->)", re.S)


class Figure(NamedTuple):
    """A cell of a table of RESULTS.md."""

    section: str
    row: str
    column: int = 0


class Table(NamedTuple):
    head: tuple[str, ...]
    rows: tuple[tuple[str | Figure, ...], ...]


def hot(row: str) -> tuple[Figure, Figure]:
    return Figure("One hot key", row, 0), Figure("One hot key", row, 1)


def added(row: str) -> tuple[Figure, Figure]:
    return Figure("Web", row, 0), Figure("Web", row, 2)


def leased(nodes: int) -> tuple[str | Figure, ...]:
    row = f"token bucket, following demand, {nodes} nodes"
    return (str(nodes), *(Figure("Leases", row, column) for column in (0, 2, 3)))


TABLES = {
    "peers": Table(
        ("one decision in memory", "allowed, ns", "refused, ns", "bytes a key, 1 M keys", "the answer"),
        (
            (
                "**limitkeeper**",
                *hot("token bucket"),
                Figure("Memory", "limitkeeper, token bucket"),
                "allowed, remaining, and exactly when to retry",
            ),
            (
                "limits (Flask-Limiter, slowapi)",
                *hot("limits, fixed window"),
                Figure("Memory", "limits, fixed window"),
                "a bool; the rest by a second call",
            ),
            (
                "throttled-py",
                *hot("throttled-py, fixed window"),
                Figure("Memory", "throttled-py, GCRA"),
                "limited, remaining, reset and retry after",
            ),
            ("pyrate-limiter", *hot("pyrate-limiter, token bucket"), Figure("Memory", "pyrate-limiter, GCRA"), "a bool"),
        ),
    ),
    "middlewares": Table(
        ("one request through a middleware", "added when allowed, µs", "a refusal, µs"),
        (
            ("**limitkeeper**, ASGI (FastAPI, Starlette), header fields on", *added("limitkeeper, 1 rule")),
            ("slowapi, its ASGI middleware, header fields on", *added("slowapi, ASGI middleware, headers")),
            ("fastapi-limiter, no header fields", *added("fastapi-limiter, Depends, no headers")),
            ("**limitkeeper** around Flask, header fields on", Figure("Web", "limitkeeper around Flask, 1 rule"), ""),
            ("Flask-Limiter, header fields on", *added("flask-limiter, headers")),
        ),
    ),
    "algorithms": Table(
        ("rule", "allowed, ns", "refused, ns", "bytes a key, at 1 000 000 keys"),
        (
            ("token bucket", *hot("token bucket"), Figure("Memory", "limitkeeper, token bucket")),
            ("leaky bucket", *hot("leaky bucket, meter"), "the same cell"),
            ("leaky bucket queue (mixed with refused)", *hot("leaky bucket, queue (mixed, deny)"), "the same cell"),
            ("fixed window", *hot("fixed window"), "the same cell"),
            ("fixed window, align first", *hot("fixed window, first-aligned"), "the same cell"),
            ("sliding window counter", *hot("sliding counter"), "the same cell"),
            ("sliding window log", *hot("sliding log"), "the same cell, and 16 an entry"),
        ),
    ),
    "leases": Table(("nodes", "0.5 × load", "2 × load", "10 × load"), tuple(leased(nodes) for nodes in (1, 4, 16))),
    "sizing": Table(
        ("of one core", "name below", "measured"),
        (
            ("a request through the middleware, 5 of 200 rules, µs", "`REQUEST_US`", added("limitkeeper, 200 rules, 5 apply")[0]),
            ("a decision in Redis, server CPU, µs", "`REDIS_US`", Figure("Redis", "server :: limitkeeper, allow")),
            ("the same in batches of 50, µs", "`REDIS_BATCH_US`", Figure("Redis", "server :: limitkeeper, batches of 50")),
            ("a decision of the service, `LK.HIT`, µs", "`SERVICE_US`", Figure("Service", "RESP, LK.HIT", 1)),
            ("a live key in memory, bytes", "`KEY_BYTES`", Figure("Memory", "limitkeeper, token bucket")),
            ("a live key in Redis, bytes", "`REDIS_KEY_BYTES`", Figure("Redis", "bytes of a token bucket's key")),
        ),
    ),
}


def value(results: str, figure: Figure) -> str:
    """A figure as RESULTS.md prints it. A row `table :: row` is that of the table with this first heading."""
    section = results.partition(f"\n## {figure.section}\n")[2].partition("\n## ")[0]
    table, _, row = figure.row.rpartition(" :: ")
    found = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", section.partition(f"\n| {table} |")[2] if table else section, re.M)
    if found is None:
        raise SystemExit(f"RESULTS.md has no row {figure.row!r} in {figure.section!r}: run make bench")
    return found[1].split("|")[figure.column].strip()


def table(results: str, name: str) -> str:
    head, rows = TABLES[name]
    lines = [head, ["--:" if isinstance(cell, Figure) else "---" for cell in rows[0]]]
    lines += [[value(results, cell) if isinstance(cell, Figure) else cell for cell in row] for row in rows]
    return "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n\n"


def quoted(page: str, results: str) -> str:
    """The text of a page with the figures of these results."""

    def figures(found: re.Match[str]) -> str:
        section, *row = found[2].split(" :: ")
        if not row:
            return found[1] + table(results, section) + found[3]
        column = int(row.pop()) if row[-1].isdigit() else 0
        return found[1] + value(results, Figure(section, " :: ".join(row), column)) + found[3]

    return QUOTED.sub(figures, page)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    results = RESULTS.read_text()
    for path in pages():
        text = path.read_text()
        if (new := quoted(text, results)) != text:
            path.write_text(new)


if __name__ == "__main__":
    main()
