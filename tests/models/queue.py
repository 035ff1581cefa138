"""Leaky bucket as a queue: turns of `cost · interval`, one after the other, and the moment when the last of them is over.

A cost fits when the whole queue, with it, is no longer than the capacity; the one that is leaving now counts.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from .answer import Answer, Terms, up
from .bucket import Charge


class QueueModel(Terms):
    def __init__(self, limit: Any, birth: int = 0) -> None:
        super().__init__(limit)
        #: How long the queue may be: its capacity, or (without one) as far as whole numbers below 2^53 can count.
        self.longest = self.size * self.interval if limit.bounded else Fraction(limit.full, limit.gain)
        self.free_at = Fraction(0)
        self.turns: list[Charge] = []

    def decide(self, now: int, cost: int, max_wait: int, not_before: int = 0) -> Answer:
        turn = max(self.free_at, Fraction(now))
        if not_before > up(turn):  # rounding up is for the caller; the queue itself continues without it
            turn = Fraction(not_before)
        start: int | None = up(turn)
        patience = min(max_wait, self.horizon)
        retry_at: int | None = max(now, up(turn) - patience)
        if cost > self.size:
            start, retry_at = None, None
        elif (room_at := self.free_at + cost * self.interval - self.longest) > now:
            start, retry_at = None, max(retry_at or now, up(room_at))
        elif up(turn) - now > patience:
            start = None
        if start is not None and cost:
            self.turns.append(Charge(start, cost, turn, self.free_at))
            self.free_at = turn + cost * self.interval
        left = 0 if self.free_at > now else self.size
        return Answer(start, retry_at, left, max(now, up(self.free_at)))

    def held(self, now: int) -> int:
        """Whole units that are in the queue at `now`."""
        return up(max(0, self.free_at - now) / self.interval)

    def give_back(self, now: int, cost: int, charged_at: int | None, charged: int) -> None:
        """Only the last turn of the queue can be given back: a later waiter keeps its start. Undoing it also restores the idle
        time before its start."""
        self.free_at = max(self.free_at, Fraction(now))
        low = high = self.free_at
        if cost < 0:
            low = high = self.free_at + self.countable(-cost, self.free_at - now) * self.interval
        elif charged_at is not None and self.free_at - charged_at <= charged * self.interval:
            last = self.turns.pop() if self.turns and self.turns[-1][:2] == (charged_at, charged) else None
            low = high = max(Fraction(now), self.free_at - cost * self.interval)
            if last and cost == charged:
                low = max(Fraction(now), min(low, last.before))
        self.walls = (low, high)
        self.free_at = low

    def settle_on(self, state: tuple[int, int, int], gain: int, now: int) -> None:
        """A rule that keeps three numbers may not remember an idle stretch from before the last; never less than is free."""
        low, high = self.walls
        found = max(state[0] + Fraction(state[1], gain), Fraction(now))
        assert low <= found <= high, f"gives back {'too much' if found < low else 'too little'}: {found} not in {low}…{high}"
        self.free_at = found
