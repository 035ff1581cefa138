"""The lines to type: each is one command for a shell with curl, and they are run one after the other by the tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    says: str
    command: str


def lines(base: str) -> tuple[Line, ...]:
    """What to type against the shop at `base`. Square brackets are curl's own: one process, one connection, many requests."""
    signed = '-H "Authorization: Bearer $TOKEN"'
    return (
        Line("A token for ada, who is on the free plan", f"TOKEN=$(curl -s -X POST '{base}/login?name=ada')"),
        Line("One checkout passes, and says what is left", f"curl -si -X POST '{base}/checkout' {signed} -w '\\n'"),
        Line(
            "Twenty in a row: ten pass, the eleventh is refused and told when to come back",
            f"curl -si -X POST '{base}/checkout?[1-20]' {signed} -w '\\n' | grep -m1 -A12 ' 429 '",
        ),
        Line(
            "The catalog bears 1000 a minute for one user, whatever happened to the checkout",
            f"TOKEN=$(curl -s -X POST '{base}/login?name=enterprise-eve'); "
            f"curl -s -o /dev/null -w '%{{http_code}}\\n' '{base}/products/[1-1100]' {signed} | sort | uniq -c",
        ),
    )


def script(base: str) -> str:
    """All of them, for a shell: each with what it says before it."""
    return "\n".join(f"echo; echo '# {line.says}'; {line.command}" for line in lines(base))
