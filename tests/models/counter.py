"""Sliding window counter: a count for each window, the one before weighted by how much of it still lies in the last W."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any

from .answer import Answer, Terms, up


class CounterModel(Terms):
    def __init__(self, limit: Any, birth: int = 0) -> None:
        super().__init__(limit)
        self.used: defaultdict[int, int] = defaultdict(int)

    def estimate(self, moment: int) -> Fraction:
        here = moment - moment % self.window
        weight = Fraction(self.window - (moment - here), self.window)
        return self.used[here] + self.used[here - self.window] * weight

    def decide(self, now: int, cost: int, max_wait: int = 0, not_before: int = 0) -> Answer:
        here = now - now % self.window
        start, retry_at = None, None
        if cost <= self.count:
            retry_at = next(
                moment for moment in self.moments(now, cost) if self.estimate(moment) + cost <= self.count or not cost
            )
            if retry_at == now:
                start = now
                self.used[here] += cost
        left = max(0, int(self.count - self.estimate(now)))
        reset_at = here + 2 * self.window if self.used[here] else here + self.window if self.used[here - self.window] else now
        return Answer(start, retry_at, left, reset_at)

    def moments(self, now: int, cost: int) -> list[int]:
        """Now; then, in this window and in the next, the tick at which the older count has faded enough; then the end."""
        here = now - now % self.window
        found = [now]
        for window in (here, here + self.window):
            older = self.used[window - self.window]
            spare = self.count - self.used[window] - cost
            if older and spare >= 0:
                found.append(max(now, window + up(self.window - Fraction(spare * self.window, older))))
        return [*found, here + 2 * self.window]

    def held(self, now: int) -> int:
        return up(self.estimate(now))

    def give_back(self, now: int, cost: int, charged_at: int | None, charged: int) -> None:
        """To the window of the charge; a refund, and what is charged above an estimate, to the window that is running."""
        here = now - now % self.window
        if cost > 0 and charged_at is not None:
            here = charged_at - charged_at % self.window
        self.used[here] = max(0, min(self.used[here] - cost, int(self.most_debt)) if cost < 0 else self.used[here] - cost)
