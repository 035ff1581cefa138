"""Token bucket and leaky bucket, as one moment: when the bucket will be full (or, the other way round, dry) again.

A charge pushes that moment away by `cost · interval`, from where it is or from the charge's own start, whichever is later.
A cost fits as soon as the moment, so pushed, is no further away than a whole bucket takes to fill.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from .answer import Answer, Terms, up


class Charge(NamedTuple):
    start: int
    cost: int
    #: The start before it was rounded up to a tick.
    exact: Fraction
    #: Where the moment was before this charge.
    before: Fraction


class BucketModel(Terms):
    def __init__(self, limit: Any, birth: int = 0) -> None:
        super().__init__(limit)
        missing = self.size - limit.initial
        self.full_at = birth + missing * self.interval if missing else Fraction(0)
        self.charges: list[Charge] = []
        #: After a give_back: the earliest and the latest that the moment may be. See `settle_on`.
        self.walls = (self.full_at, self.full_at)

    def decide(self, now: int, cost: int, max_wait: int, not_before: int = 0) -> Answer:
        start, retry_at = None, None
        if cost <= self.size:
            exact = max(Fraction(now), Fraction(not_before), self.full_at + (cost - self.size) * self.interval)
            start = retry_at = up(exact)
            patience = min(max_wait, self.horizon)
            if start - now > patience:
                start, retry_at = None, start - patience
        if start is not None and cost:
            self.charges.append(Charge(start, cost, exact, self.full_at))
            self.full_at = self.pushed(self.full_at, start, cost)
        return Answer(start, retry_at, self.remaining(now), max(now, up(self.full_at)))

    def pushed(self, moment: Fraction, start: Fraction | int, cost: int) -> Fraction:
        return max(moment, Fraction(start)) + cost * self.interval

    def remaining(self, now: int) -> int:
        return max(0, int(self.size - max(0, self.full_at - now) / self.interval))

    def held(self, now: int) -> int:
        """Whole units that are missing at `now`, debt and reservations included."""
        return up(max(0, self.full_at - now) / self.interval)

    def give_back(self, now: int, cost: int, charged_at: int | None, charged: int) -> None:
        """The tokens go back, up to full; undoing the newest charge also restores the idle time before its start.

        Others ahead: Go's `CancelAt`. What was reserved behind the charge stays reserved, and a waiter that has not started stays
        paid for. Debt has no start.
        """
        self.full_at = max(self.full_at, Fraction(now))
        back = cost * self.interval
        if cost < 0:  # settled above its estimate: into debt, from now on
            cost = -self.countable(-cost, self.full_at - now)
            self.charges.append(Charge(-1, -cost, Fraction(now), self.full_at))
            self.full_at -= cost * self.interval
            self.walls = (self.full_at, self.full_at)
            return
        last = self.charges[-1] if self.charges else None
        size = self.size * self.interval
        self.lessen(charged_at, charged, cost)
        ahead = self.still_to_come(now)
        low = high = max(ahead, self.full_at - back)
        if last and last[:2] == (charged_at, charged):
            low = max(ahead, min(last.before, low)) if cost == charged else low
        elif ahead > now or self.full_at - now > size:
            behind = max(0, min(self.full_at - charged_at - size, ahead - charged_at)) if charged_at else back
            high = max(ahead, self.full_at - max(0, back - behind))
        self.walls = (low, high)
        self.full_at = low

    def lessen(self, charged_at: int | None, charged: int, cost: int) -> None:
        """The charge is `cost` less, or gone."""
        for i, charge in enumerate(self.charges):
            if charge[:2] == (charged_at, charged):
                self.charges[i : i + 1] = [charge._replace(cost=charged - cost)] if charged > cost else []
                return

    def still_to_come(self, now: int) -> Fraction:
        """Where the moment would be if only charges that have not started yet had ever been made."""
        moment = Fraction(now)
        for charge in self.charges:
            if charge.start > now:
                moment = self.pushed(moment, charge.exact, charge.cost)
        return moment

    def settle_on(self, state: tuple[int, int, int], gain: int, now: int) -> None:
        """A rule that keeps three numbers can't know as much as this list. It may give back less than all that is free, but
        nothing that others have paid for, and no less than Go's rule (but for the rounding of a start, and what its third number
        holds back for starts that were still to come). From there on, the model goes by that."""
        low, high = self.walls
        found = max(state[0] + Fraction(state[1], gain), Fraction(now))
        assert low <= found <= max(high + 1, state[2]), (
            f"gives back {'too much' if found < low else 'too little'}: {found} not in {low}…{high}"
        )
        self.full_at = found
