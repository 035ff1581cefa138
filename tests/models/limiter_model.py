"""A limiter and its store without regard to speed: a model for every limit and key, copied before each trial, and a queue of
waiters that is undone and booked again when one leaves.

Outside it counts microseconds; each model counts in its limit's ticks: now is rounded down to one, a start is a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf
from typing import Any, NamedTuple

from limitkeeper import SlidingWindowCounter

from . import model_of
from .answer import FOREVER

#: The longest wait there is, in microseconds: 142 years.
WITHOUT_BOUND = 2**52


#: The moment of a reset that a store need not remember, and how long it remembers one at least.
UNKNOWN = -1
REMEMBERED_US = 3_600_000_000


class Ask(NamedTuple):
    """`cost` of the limit called `name`, for `key`."""

    name: str
    key: str
    cost: int


@dataclass
class Part:
    """The answer of one limit. `retry_us` None is never; `start_us` None is refused."""

    name: str
    limit: int
    start_us: int | None
    retry_us: int | None
    remaining: int = 0
    reset_us: int = 0


@dataclass
class Turn:
    """A reservation: its costs, when it starts, until when it would wait, whether it is still open, and when each of its keys was
    reset."""

    asks: list[Ask]
    start_us: int | None
    deadline_us: int | None
    open: bool = True
    resets: dict[tuple[str, str], int] = field(default_factory=dict)


class LimiterModel:
    def __init__(self, limits: Mapping[str, Any], now_us: int) -> None:
        self.limits = dict(limits)
        self.birth_us = now_us
        self.cells: dict[tuple[str, str], Any] = {}
        self.turns: list[Turn] = []

    def cell(self, ask: Ask) -> Any:
        limit = self.limits[ask.name]
        return self.cells.setdefault(ask[:2], model_of(limit, self.birth_us // limit.tick))

    # Deciding ----------------------------------------------------------------------------------------------------------

    def decide(
        self, asks: Sequence[Ask], now_us: int, max_wait_us: int | None = 0, commit: bool = True
    ) -> tuple[Any, int | None]:
        """The expected `Decision.to_dict()`, and the start in microseconds (None when refused)."""
        if not asks:
            return self.free(), 0
        patience = WITHOUT_BOUND if max_wait_us is None else max_wait_us
        if not all(self.limits[ask.name].reserves for ask in asks):
            patience = 0
        patience = min([patience, *(self.cell(ask).horizon * self.limits[ask.name].tick for ask in asks if ask.cost)])
        parts = [self.decide_part(ask, now_us, patience) for ask in asks]
        starts = [part.start_us for part in parts]
        start_us = None if None in starts else max(start or 0 for start in starts)
        if start_us is not None and commit:
            for ask, part in zip(asks, parts, strict=True):
                part.start_us = self.charge(ask, now_us, start_us) if ask.cost else start_us
        for ask, part in zip(asks, parts, strict=True):
            self.look(ask, part, now_us)
        return joined_answer(parts, now_us, start_us), start_us

    def decide_part(self, ask: Ask, now_us: int, patience_us: int) -> Part:
        """The answer of one limit on its own; nothing is charged."""
        limit = self.limits[ask.name]
        now = now_us // limit.tick
        patience = (now_us + patience_us) // limit.tick - now
        start, *_ = deepcopy(self.cell(ask)).decide(now, ask.cost, patience)
        part = Part(ask.name, limit.capacity, None, 0)
        if ask.cost == 0:
            part.start_us = now_us
        elif start is not None:
            part.start_us = start * limit.tick if start > now else now_us
        else:
            part.retry_us = self.retry_us(ask, now_us, patience_us)
        return part

    def retry_us(self, ask: Ask, now_us: int, patience_us: int) -> int | None:
        """With an unlimited timeout it may still have to wait for room; with a limited one it waits for its start."""
        tick = self.limits[ask.name].tick
        now = now_us // tick
        room = deepcopy(self.cell(ask)).decide(now, ask.cost, FOREVER)
        turn = deepcopy(self.cell(ask)).decide(now, ask.cost, 0)
        if turn.retry_at is None:
            return None
        return max(room.retry_at * tick if room.start is None else 0, turn.retry_at * tick - patience_us) - now_us

    def charge(self, ask: Ask, now_us: int, start_us: int) -> int:
        tick = self.limits[ask.name].tick
        start = self.cell(ask).decide(now_us // tick, ask.cost, FOREVER, start_us // tick).start
        return int(start * tick if start > now_us // tick else now_us)

    def look(self, ask: Ask, part: Part, now_us: int) -> None:
        tick = self.limits[ask.name].tick
        _, _, part.remaining, reset_at = self.cell(ask).decide(now_us // tick, 0, 0)
        part.reset_us = reset_at * tick - now_us if reset_at > now_us // tick else 0

    def free(self) -> dict[str, Any]:
        least = min(limit.capacity for limit in self.limits.values())
        return fields(Part(next(iter(self.limits)), least, 0, 0, least), 0)

    # Giving back -------------------------------------------------------------------------------------------------------

    def give_back(self, asks: Sequence[Ask], now_us: int, charged_at: int | None, charged: Sequence[int]) -> None:
        for ask, whole in zip(asks, charged, strict=True):
            tick = self.limits[ask.name].tick
            if ask.cost:
                at = None if charged_at is None else charged_at // tick
                self.cell(ask).give_back(now_us // tick, ask.cost, at, whole)

    def reset(self, ask: Ask, now_us: int) -> None:
        """A reservation of this key gives nothing back from now on. Of a key that is as new, a store may have forgotten that it
        existed: the moment is UNKNOWN then, and either answer is right."""
        for turn in self.turns:
            if ask[:2] in {one[:2] for one in turn.asks}:
                turn.resets[ask[:2]] = now_us if self.is_used(ask, now_us) else UNKNOWN
        self.cells.pop(ask[:2], None)

    def is_used(self, ask: Ask, now_us: int) -> bool:
        now = now_us // self.limits[ask.name].tick
        return bool(self.cell(ask).decide(now, 0, 0).reset_at > now)

    def is_window_over(self, ask: Ask, charged_at_us: int, now_us: int) -> bool:
        limit = self.limits[ask.name]
        return isinstance(limit, SlidingWindowCounter) and charged_at_us // limit.period < now_us // limit.period

    def leave(self, turn: Turn, parts: Sequence[Ask], now_us: int) -> None:
        """Gives back `parts` of a turn, or all of it. All behind are undone, from the last to the first; then they book again, in
        order: they move up. Settling above the estimate leaves no room to move up."""
        behind = [one for one in self.behind(turn) if one.start_us is not None and one.start_us > now_us]
        if any(part.cost < 0 for part in parts):
            behind = []
        for one in reversed(behind):
            self.give_back(one.asks, now_us, one.start_us, [ask.cost for ask in one.asks])
        whole = {ask[:2]: ask.cost for ask in turn.asks}
        self.give_back(parts, now_us, turn.start_us, [whole[part[:2]] for part in parts])
        for one in behind:
            left = None if one.deadline_us is None else one.deadline_us - now_us
            _, one.start_us = self.decide(one.asks, now_us, left)

    def behind(self, turn: Turn) -> list[Turn]:
        """Those with a start at or after this one's that share a key with it, or with another that does."""
        found, shared = [], {ask[:2] for ask in turn.asks}
        later = [one for one in self.turns if one.open and one is not turn and (one.start_us or 0) >= (turn.start_us or 0)]
        while more := [one for one in later if one not in found and shared & {ask[:2] for ask in one.asks}]:
            found += more
            shared |= {ask[:2] for one in more for ask in one.asks}
        return sorted(found, key=lambda one: (one.start_us or 0, self.turns.index(one)))


def joined_answer(parts: list[Part], now_us: int, start_us: int | None) -> dict[str, Any]:
    """One answer for all: refused, that of the limit with the longest retry; allowed, that of the one closest to its end."""
    every = [fields(part, now_us) for part in parts]
    if len(every) == 1:
        return every[0]
    if start_us is None:
        speaker = max(every, key=lambda part: part["retry_after"])
    else:
        speaker = min(every, key=lambda part: part["remaining"] * Fraction(1, part["limit"]))
    wait = (start_us - now_us) / 1e6 if start_us is not None else 0.0
    return {**speaker, "allowed": start_us is not None, "wait": wait, "decisions": every}


def fields(part: Part, now_us: int) -> dict[str, Any]:
    allowed = part.start_us is not None
    return {
        "allowed": allowed,
        "limit": part.limit,
        "remaining": part.remaining,
        "retry_after": 0.0 if allowed else inf if part.retry_us is None else part.retry_us / 1e6,
        "reset_after": part.reset_us / 1e6,
        "wait": max(0, part.start_us - now_us) / 1e6 if part.start_us is not None else 0.0,
        "name": part.name,
    }
