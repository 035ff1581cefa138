"""Shell commands to try the shop with curl. The tests run them in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    says: str
    command: str


def lines(base: str) -> tuple[Line, ...]:
    """The commands for the shop at `base`. Square brackets are curl syntax: one process, one connection, many requests;
    behind a `#` they do not change the request."""
    signed = '-H "Authorization: Bearer $TOKEN"'
    return (
        Line("A token for ada, who has the free plan", f"TOKEN=$(curl -sf -X POST '{base}/login?name=ada')"),
        Line("One checkout passes; the headers show what is left", f"curl -si -X POST '{base}/checkout' {signed} -w '\\n'"),
        Line(
            "Twenty in a row: ten pass, the eleventh is refused with a Retry-After",
            f"curl -si -X POST '{base}/checkout?[1-20]' {signed} -w '\\n' | grep -m1 -A13 ' 429 '",
        ),
        Line(
            "Five recommendations a minute are computed; the sixth response is the last one again, with its age",
            f"curl -si '{base}/recommendations#[1-6]' {signed} -w '\\n' | grep -iE '^(HTTP|age|cache-status)'",
        ),
        Line(
            "Five invoices a minute are made at once; the sixth is accepted, made later, and fetched with its ticket",
            f"TICKET=$(curl -si -X POST '{base}/invoices#[1-6]' {signed} | tr -d '\\r' | sed -n 's/^location: //p' | tail -n 1); "
            f"sleep 1; curl -si \"{base}$TICKET\" {signed} -w '\\n'",
        ),
        Line(
            "Five responses a minute have the reviews; the sixth has less",
            f"curl -s '{base}/reviews#[1-6]' {signed} -w '\\n'",
        ),
        Line(
            "The catalog has its own limit: 1000 requests per minute per user",
            f"TOKEN=$(curl -sf -X POST '{base}/login?name=enterprise-eve'); "
            f"curl -s -o /dev/null -w '%{{http_code}}\\n' '{base}/products/[1-1100]' {signed} | sort | uniq -c",
        ),
    )


def script(base: str) -> str:
    """All commands as one shell script; each prints its description first."""
    return "\n".join(f"echo; echo '# {line.says}'; {line.command}" for line in lines(base))
