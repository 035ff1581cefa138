"""What a run records: counters and latencies of every class of clients, and a series with one row per interval."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from ..plan.percentiles import LatencySamples, nearest_rank
from .services import OK, REFUSED

#: Columns of a class of clients in the series: counts per second, and the p95 latency of the interval in ms.
COUNTS = ("sent", "attempts", "ok", "refused", "failed")


class ClassRecorder:
    """The counters of one class of clients. Latencies are those of requests that no limit refused, failed ones included."""

    def __init__(self, name: str, users: int) -> None:
        self.name = name
        self.sent = self.attempts = self.retries = self.ok = self.refused = self.failed = 0
        self.duplicates = self.inconsistent = 0
        self.rules: Counter[str] = Counter()
        self.samples = LatencySamples()
        self.users_ok = array("Q", bytes(8 * users))
        self.users_ended = array("Q", bytes(8 * users))
        self.recent: list[float] = []
        self._before = dict.fromkeys(COUNTS, 0)

    def end(self, status: int, took_us: int, user: int, rule: str) -> None:
        """Counts a request that has its last answer."""
        self.users_ended[user] += 1
        if status == REFUSED:
            self.refused += 1
            self.rules[rule] += 1
            return
        if status == OK:
            self.ok += 1
            self.users_ok[user] += 1
        else:
            self.failed += 1
        seconds = took_us / 1e6
        self.samples.add(seconds)
        self.recent.append(seconds)

    def row(self, interval_s: float) -> dict[str, float]:
        """The interval that ends now."""
        found: dict[str, float] = {}
        for name in COUNTS:
            now = getattr(self, name)
            found[f"{self.name}.{name}"] = (now - self._before[name]) / interval_s
            self._before[name] = now
        self.recent.sort()
        found[f"{self.name}.p95 ms"] = nearest_rank(self.recent, 95) * 1000 if self.recent else 0.0
        self.recent.clear()
        return found

    def percentile(self, percent: float) -> float | None:
        """Seconds; None without samples."""
        return self.samples.percentile(percent) if self.samples.count else None

    def fairness(self) -> float:
        """Jain's index of the share of its requests that each user got answered."""
        pairs = zip(self.users_ok, self.users_ended, strict=True)
        return jain([ok / ended for ok, ended in pairs if ended])


def jain(shares: Sequence[float]) -> float:
    """(Σx)² / (n·Σx²): 1 when all have the same, 1/n when one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
