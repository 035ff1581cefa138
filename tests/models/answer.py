"""The answer of a model, and what all models share: rounding up, and a limit in exact numbers.

The models are the rules again, slowly: fractions instead of scaled integers, lists of everything that was ever charged
instead of three numbers. They were written from the meaning of the rules, never from their source, so that the two can
disagree. Time is counted in the limit's own ticks, as the rules count it.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

FOREVER = 10**30


class Answer(NamedTuple):
    """`start`: when the whole cost fits, None when refused. `retry_at`: when refused, the first moment at which this same
    call would be accepted, None for never. `remaining` and `reset_at` as users see them."""

    start: int | None
    retry_at: int | None
    remaining: int
    reset_at: int


class Terms:
    """A limit in exact numbers of its own ticks."""

    def __init__(self, limit: Any) -> None:
        self.count: int = limit.count
        self.size: int = limit.capacity
        self.window: int = limit.period // limit.tick
        #: Ticks from one unit to the next at the limit's rate.
        self.interval = Fraction(limit.period, limit.tick * limit.count)
        #: How far ahead a charge can stand, so that every number stays below 2^53.
        self.horizon: int = limit.horizon if limit.kind.startswith(("token", "leaky")) else FOREVER
        #: The largest debt, in ticks, or count of a window: whole numbers end at 2^53. More than that is not remembered.
        self.most_debt = Fraction(2**53 - 1, limit.gain) if limit.gain else Fraction(limit.horizon)

    def held_is_known(self, _now: int) -> bool:
        """Whether a rule that keeps three numbers knows the amount that is held."""
        return True

    def countable(self, cost: int, debt: Fraction) -> int:
        """How much of a cost can be added to a debt of so many ticks."""
        return min(cost, int((self.most_debt - debt) / self.interval))


def up(moment: Fraction | int) -> int:
    """Waits are rounded up, to the next tick."""
    return ceil(moment)
