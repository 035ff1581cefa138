"""FutureCharges: when the charges with later starts begin, for which a bucket holds tokens back.

A token or leaky bucket sums charges with later starts in the third integer of its state (`until`), and can't tell which of them
have begun: it would hold back what these give back. The process that made all charges that an `until` counts knows when the last
of them begins. From then on nothing is to come, and a charge is given back from a state whose third integer is 0. The claims that
are given back say so for this `until` alone: where another process has changed it, the algorithm decides as it does without them.

    last start of the `until` after a charge = max(its start, last start of the `until` before it)

Each rate of a name has a state, thus an `until`, of its own on a key, and every charge changes all of them. That of the caller's
rate is known by its limit, those of the others by the numbers of their rates; an `until` that both have seen joins the two.

Rejected: the last start as the third integer (leases of other nodes would lose what they return), and both (four per key).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from .algorithms.claim import Claim, NamedLimit
from .decision import Decision

#: The most keys of which starts are known; beyond it the first ones are forgotten.
MAX_KEYS = 10_000
#: The most rates of a key of which starts are known: twice as many as it has at a time.
MAX_RATES = 8
NO_STATE = (-1, -1, -1)  # no state has the times −1: nothing is restored
Identity = tuple[str, str, str]
States = tuple[int, ...]


class RateStarts:
    """Of each `until` (ticks) of one rate on one key its last start (µs)."""

    def __init__(self, limit: NamedLimit | None, rate: int | None) -> None:
        self.limit, self.rate = limit, rate  # its limit, its number in the store: each None where it is not known
        self.last = OrderedDict[int, int]()

    def is_same(self, other: RateStarts) -> bool:
        """Whether both have the limit, or the number, of one rate."""
        return (self.limit is not None and self.limit == other.limit) or (self.rate is not None and self.rate == other.rate)

    def add(self, before: int, until: int, start_us: int, now_us: int) -> None:
        while next(reversed(self.last)) != before:  # of charges that were given back: they would hide this one
            self.last.popitem()
        self.begun(now_us)
        self.last[until] = max(self.last[before], start_us)

    def begun(self, now_us: int) -> int:
        """Forgets each `until` whose last start has passed but for the last of them, and returns that one; −1: there is none."""
        found, last_us = -1, 0
        while self.last and self.last[next(iter(self.last))] <= now_us:
            found, last_us = self.last.popitem(last=False)
        if found >= 0:
            self.last[found] = last_us
            self.last.move_to_end(found, last=False)
        return found

    def settled(self, before: int, until: int, claim: Claim, start_us: int) -> None:
        """A part of a charge to come is given back: the rest counts in an `until` of its own."""
        limit = None if self.limit is None else self.limit.limit
        if limit is not None and until in self.last:
            rest = ((claim.charged - claim.cost) * limit.unit + limit.gain - 1) // limit.gain
            self.last.setdefault(max(start_us // limit.tick, before) + rest, self.last[until])


class FutureCharges:
    """The last starts of the buckets of one store, by name, key and rate, and by the source of the decisions: a share that
    answers for a store that fails has states of its own."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Identity, str, str], list[RateStarts]] = OrderedDict()

    def add(self, claims: Sequence[Claim], decision: Decision) -> None:
        """Notes a charge with a later start."""
        now_us = decision.start_us - decision.wait_us
        for claim in claims:
            states = claim.remembered() if claim.limit.limit.sums_later_starts else None
            if states is None:
                continue
            rates = self._known.pop((claim.limit.identity, claim.key, decision.source), [])
            for found, one, (_, _, before, at, _, until) in [*_of_each_rate(claim, rates)]:
                if before == until:  # charged above its limit, as debt
                    continue
                if found is not None:
                    one.limit, one.rate = one.limit or found.limit, found.rate if one.rate is None else one.rate
                rates = [other for other in rates if other is not found and not other.is_same(one)]
                if before <= at:  # the first of a new `until`
                    one.last[before] = 0
                elif found is not None and before in found.last:
                    one.last = found.last
                else:  # another process has charged in between
                    continue
                one.add(before, until, decision.start_us, now_us)
                rates.append(one)
            if rates:
                self._known[claim.limit.identity, claim.key, decision.source] = rates[-MAX_RATES:]
                if len(self._known) > MAX_KEYS:
                    self._known.popitem(last=False)

    def forget(self, claims: Sequence[Claim], decision: Decision) -> None:
        """Forgets the `until` of these charges, which are given back, whole or in part."""
        for claim in claims:
            rates = self._known.get((claim.limit.identity, claim.key, decision.source))
            if rates is None or claim.cost <= 0:
                continue
            for one, _, (_, _, before, _, _, until) in _of_each_rate(claim, rates):
                if one is not None and claim.cost < claim.charged:
                    one.settled(before, until, claim, decision.start_us)
                elif one is not None:
                    one.last.pop(until, None)

    def __bool__(self) -> bool:
        return bool(self._known)

    def mark(self, claims: Sequence[Claim], now_us: int, decision: Decision) -> list[Claim]:
        """The claims to give back in the place of these. Where all that the `until` of a rate counts has begun, they say that it
        was 0 before their charge."""
        return [self._marked(claim, now_us, decision) if claim.cost > 0 else claim for claim in claims]

    def _marked(self, claim: Claim, now_us: int, decision: Decision) -> Claim:
        rates = self._known.get((claim.limit.identity, claim.key, decision.source), [])
        own = next((one.begun(now_us) for one in rates if one.limit == claim.limit), -1)
        begun = {one.rate: one.begun(now_us) for one in rates if one.limit != claim.limit and one.rate is not None}
        states = claim.remembered()
        before, after, others = states or (NO_STATE, NO_STATE, None)
        has_begun = decision.start_us <= now_us
        mine = _marked_states((*before, *after), own, has_begun)
        theirs = {other[0]: other[1:] for other in others or ()}
        if has_begun:
            theirs = {rate: NO_STATE * 2 for rate, until in begun.items() if until >= 0} | theirs
        theirs = {rate: _marked_states(other, begun.get(rate, -1), has_begun) for rate, other in theirs.items()}
        if mine == (*before, *after) and theirs == {other[0]: other[1:] for other in others or ()}:
            return claim
        charged_at = decision.start_us if states is None else claim.charged_at()
        if states is None or mine[:3] == (-1, -1, 0):
            claim = Claim(claim.limit, claim.key, claim.cost, claim.charged, claim.reset_id)
        marked = tuple([(rate, *other) for rate, other in theirs.items() if rate is not None]) or None
        a, b, c, new_a, new_b, new_c = mine
        claim.remember((a, b, c), (new_a, new_b, new_c), marked, charged_at)
        return claim


def _of_each_rate(claim: Claim, rates: list[RateStarts]) -> Iterator[tuple[RateStarts | None, RateStarts, States]]:
    """For the caller's rate and each other one: what is known of it, an empty one that has its limit or number, and the states
    before and after the charge. What is known has the limit or the number, or the `until` before or after the charge."""
    before, after, others = claim.remembered() or (NO_STATE, NO_STATE, None)
    numbers = [other[0] for other in others or ()]
    for number, states in [(None, (*before, *after)), *[(other[0], other[1:]) for other in others or ()]]:
        one = RateStarts(claim.limit if number is None else None, number)
        same = [known for known in rates if (known.limit == one.limit if number is None else known.rate == number)]
        if number is None:
            same += [known for known in rates if known.limit is None and known.rate not in numbers]
        else:
            same += [known for known in rates if known.rate is None and known.limit != claim.limit]
        untils = {states[2], states[5]} - {0}
        found = next((known for known in same if not untils.isdisjoint(known.last)), None)
        yield found, one, states


def _marked_states(states: States, begun: int, has_begun: bool) -> States:
    """The states before and after a charge, of which the first says where nothing else is to come. Known states stay, for an
    exact undo, unless `begun` is from after the charge: then it lies beyond the time and the `until` of the state after."""
    if begun < 0:  # of logs and windows too, whose states are others
        return states
    if begun in (states[2], states[5]):
        return (*states[:2], 0, *states[3:])
    return (-1, -1, 0, -1, -1, begun) if has_begun and begun > max(states[3], states[5]) else states
