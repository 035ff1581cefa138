"""The report of the live runs: the simulator's, with the answers by status and what the partner got against its limit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from limitkeeper import TokenBucket
from limitkeeper.policy.explain import table
from limitkeeper.simulate.report import Report, rows_of

from .live_run import LiveResult

#: Rows of the comparison at the end; the page has all.
SHOWN = re.compile(
    r"(goodput|refused|latency|SLO.*|timeouts|orders|admitted|attempts of all clients|sent late, p99)$"
    r"|^(gateway|order|order's connections): most in use$"
)


def bound(result: LiveResult, limit: TokenBucket) -> float:
    """burst + rate · T, with T from the partner's first attempt to its last answer."""
    sender = result.senders["partner"]
    return limit.capacity + limit.count / limit.period * 1e6 * (sender.last - sender.first)


def live_rows(result: LiveResult, limit: TokenBucket) -> Iterator[tuple[str, str]]:
    time = result.senders["partner"].last - result.senders["partner"].first
    most = f"{limit.capacity} + {limit.count * 1e6 / limit.period:g} × {time:.1f} = {bound(result, limit):.0f}"
    yield "partner: admitted", f"{result.passed:,} {'≤' if result.passed <= bound(result, limit) else '>'} {most}"
    for name, sender in result.senders.items():
        errors = sum(many for status, many in sender.statuses.items() if status >= 500)
        yield f"{name}: 5xx, timeouts", f"{errors:,}, {sender.statuses[0]:,} of {sender.record.attempts:,} attempts"
    yield from rows_of(result)
    yield "load generator: sent late, p99", f"{result.late_ms:.0f} ms"


class LiveReport(Report):
    """The runs without and with limits, side by side."""

    def __init__(self, results: list[LiveResult], limit: TokenBucket) -> None:
        super().__init__(results)
        self.limit = limit

    def rows(self) -> list[list[str]]:
        found = [dict(live_rows(result, self.limit)) for result in self.results if isinstance(result, LiveResult)]
        names = list(dict.fromkeys(name for one in found for name in one))
        head = ["", *(result.scenario.name for result in self.results)]
        return [head, *([name, *(one.get(name, "–") for one in found)] for name in names)]

    def comparison(self) -> str:
        """The rows of the summary."""
        head, *rows = self.rows()
        return "\n".join(table([head, *(row for row in rows if SHOWN.search(row[0]))]))
