"""The report of a replay: who would have been refused, when, and by which rule, in bounded memory.

Of each rule at most MAX_KEYS refused keys are counted by themselves, the others together; refusals are counted in at most
MAX_PERIODS periods of time, which double in length when there are more. With READ_AHEAD requests that wait to be ordered, memory
does not grow with the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..policy import Policy
from ..policy.key_inspection import key_text
from ..policy.model import SHADOW
from .log_replay import Replayed

READ_AHEAD, MAX_KEYS, MAX_PERIODS = 10_000, 10_000, 1_000
CSV_HEADER = ("time", "rule", "key", "mode", "method", "path", "status")
OTHER_KEYS, ALL_KEYS = "(other keys)", "(all keys together)"


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class Refusals:
    """How often something was refused, first and last."""

    count: int = 0
    first: float = 0.0
    last: float = 0.0

    def add(self, time: float) -> None:
        self.first = time if not self.count else min(self.first, time)
        self.last = max(self.last, time)
        self.count += 1

    def as_dict(self) -> dict[str, Any]:
        return {"refused": self.count, "first": time_text(self.first), "last": time_text(self.last)} if self.count else {}

    def __str__(self) -> str:
        return f"{self.count:,} refused, first {time_text(self.first)}, last {time_text(self.last)}"


@dataclass(slots=True)
class RuleReport:
    """One rule: requests that it was asked about, its refusals, and those of each key."""

    limit: str
    shadow: bool
    asked: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    keys: dict[str, Refusals] = field(default_factory=dict)

    def add(self, key: str, time: float) -> None:
        self.refusals.add(time)
        if key not in self.keys and len(self.keys) >= MAX_KEYS:
            key = OTHER_KEYS
        self.keys.setdefault(key, Refusals()).add(time)

    def worst(self, top: int) -> list[tuple[str, Refusals]]:
        return sorted(self.keys.items(), key=lambda pair: (-pair[1].count, pair[0]))[:top]


class ReplayReport:
    """Collects what `decided` yields. `shown` makes the text of a key."""

    def __init__(self, policy: Policy, shown: Callable[[str], str] = str) -> None:
        self.policy, self.shown = policy, shown
        self.rules = {rule.name: RuleReport(limit_text(rule.limit), rule.on_refusal.action == SHADOW) for rule in policy.rules}
        self.requests = self.refused = 0
        self.first = self.last = 0.0
        self.period_s = 1.0
        self.periods: Counter[int] = Counter()

    def add(self, one: Replayed) -> Iterator[tuple[str, ...]]:
        """Counts a request; a CSV row for each rule that refuses it."""
        time, entry, outcomes = one
        self.first = time if not self.requests else self.first
        self.last, self.requests = max(self.last, time), self.requests + 1
        enforced = False
        for name, key, refuses in outcomes:
            rule = self.rules[name]
            rule.asked += 1
            if refuses:
                text = self.shown(key) if key else ALL_KEYS
                rule.add(text, time)
                enforced = enforced or not rule.shadow
                mode = "shadow" if rule.shadow else "enforced"
                yield time_text(time), name, text, mode, entry.method, entry.path, str(entry.status)
        if enforced:
            self.refused += 1
            self._count_period(time)

    def _count_period(self, time: float) -> None:
        self.periods[int(time // self.period_s)] += 1
        while len(self.periods) > MAX_PERIODS:
            self.period_s *= 2
            halved: Counter[int] = Counter()
            for number, count in self.periods.items():
                halved[number // 2] += count
            self.periods = halved

    def summary(self, log: str) -> str:
        share = self.refused / self.requests if self.requests else 0.0
        span = f"from {time_text(self.first)} to {time_text(self.last)}" if self.requests else "with a time"
        return f"{log}: {self.requests:,} requests {span}; {self.refused:,} ({share:.1%}) would have been refused."

    def text(self, log: str, top: int) -> str:
        lines = [self.summary(log)]
        if self.periods:
            number, count = max(self.periods.items(), key=lambda pair: (pair[1], -pair[0]))
            lines.append(f"Most refusals: {count:,} in the {self.period_s:g} s from {time_text(number * self.period_s)}.")
        for name, rule in self.rules.items():
            shadow = ", in shadow" if rule.shadow else ""
            found = str(rule.refusals) if rule.refusals.count else "none refused"
            lines.append(f"{name} ({rule.limit}{shadow}): {rule.asked:,} requests, {found}")
            lines += [f"    {key_text(key)}: {refusals}" for key, refusals in rule.worst(top)]
            hidden = len(rule.keys) - top
            lines += [f"    and {hidden:,} more keys"] if hidden > 0 else []
        return "\n".join(lines)

    def as_dict(self, top: int) -> dict[str, Any]:
        rules = [
            {"rule": name, "limit": rule.limit, "shadow": rule.shadow, "asked": rule.asked, "refused": 0}
            | rule.refusals.as_dict()
            | {"refused_keys": len(rule.keys), "keys": [{"key": key} | found.as_dict() for key, found in rule.worst(top)]}
            for name, rule in self.rules.items()
        ]
        periods = [{"from": time_text(n * self.period_s), "refused": count} for n, count in sorted(self.periods.items())]
        return {"requests": self.requests, "refused": self.refused, "period_s": self.period_s, "periods": periods, "rules": rules}


def limit_text(limit: Any) -> str:
    """The limits of a rule; of tiers, those without a tier of their own."""
    limits = limit if isinstance(limit, tuple) else limit.otherwise
    return "; ".join(map(str, limits)) or "by tier"
