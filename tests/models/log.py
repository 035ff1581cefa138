"""Sliding window log: every admitted call with its moment and its cost, in a plain list."""

from __future__ import annotations

from typing import Any

from .answer import Answer, Terms


class LogModel(Terms):
    def __init__(self, limit: Any, birth: int = 0) -> None:
        super().__init__(limit)
        self.entries: list[list[int]] = []

    def counted(self, moment: int) -> int:
        """The entries that count at a moment: all not yet a window old, dated in the future too."""
        return sum(cost for at, cost in self.entries if at > moment - self.window)

    def decide(self, now: int, cost: int, max_wait: int, not_before: int = 0) -> Answer:
        start, retry_at = None, None
        if cost <= self.count:
            earliest = max(now, not_before)
            moments = [earliest, *sorted(at + self.window for at, _ in self.entries if at + self.window > earliest)]
            start = next(moment for moment in moments if self.counted(moment) + cost <= self.count or not cost)
            retry_at = start - max_wait
            if retry_at > now:
                start = None
            elif cost:
                self.entries.append([start, cost])
        reset_at = max((at + self.window for at, _ in self.entries), default=now)
        return Answer(start, retry_at, max(0, self.count - self.counted(now)), max(now, reset_at))

    def give_back(self, now: int, cost: int, charged_at: int | None, charged: int) -> None:
        """From the entry of that moment; a refund from the newest entries that have begun. Expired ones give nothing."""
        if cost < 0:
            self.entries.append([now, -cost])
            return
        for entry in sorted(self.entries, reverse=True):
            if now - self.window < entry[0] and (entry[0] <= now if charged_at is None else entry[0] == charged_at):
                part = min(cost, entry[1])
                entry[1] -= part
                cost -= part
        self.entries = [entry for entry in self.entries if entry[1]]
