"""A picture of fair shares: what three clients get of one capacity while two of them flood. From a real run."""

from __future__ import annotations

from collections import Counter

from limitkeeper.charts.line_chart import Line, Mark, line_chart
from limitkeeper.charts.svg import Drawing
from limitkeeper.sharing import FairShare
from limitkeeper.testing import ManualClock

SECONDS = 16
#: Requests per second of each client, and the seconds in which it sends them.
CLIENTS = {"partner": (150, 0, 16), "acme": (1500, 3, 16), "public": (3000, 8, 13)}
COLOURS = {"partner": "green", "acme": "blue", "public": "amber"}


def fair_shares() -> Drawing:
    clock = ManualClock(0.0)
    share = FairShare("350/s", guarantees={"partner": "200/s"}, window="100ms", clock=clock)
    arrivals = [
        (begin * 1_000_000 + number * 1_000_000 // rate, name)
        for name, (rate, begin, end) in CLIENTS.items()
        for number in range(rate * (end - begin))
    ]
    passed: Counter[tuple[str, int]] = Counter()
    for at_us, name in sorted(arrivals):
        clock.advance((at_us - clock.now_us()) / 1e6)
        passed[name, at_us // 500_000] += share.hit(name).allowed
    lines = [
        Line(name, [(half / 2 + 0.25, passed[name, half] * 2.0) for half in range(2 * SECONDS)], COLOURS[name])
        for name in CLIENTS
    ]
    title = "350/s divided: the partner's 150/s of its guaranteed 200/s pass, whatever acme and the public send"
    drawing = line_chart(title, "seconds", "admitted per second", lines, [Mark("capacity", 350.0, level=True)])
    drawing.card = True
    return drawing
