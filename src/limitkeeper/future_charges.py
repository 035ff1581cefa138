"""FutureCharges: when the charges with later starts begin, for which a bucket holds tokens back.

A token or leaky bucket sums charges with later starts in the third integer of its state (`until`), and can't tell which of them
have begun: it would hold back what these give back. The process that made all charges that an `until` counts knows when the last
of them begins. From then on nothing is to come, and a charge is given back from a state whose third integer is 0. The claims that
are given back say so for this `until` alone: where another process has changed it, the algorithm decides as it does without them.

    last start of the `until` after a charge = max(its start, last start of the `until` before it)

Rejected: the last start as the third integer (leases of other nodes would lose what they return), and both (four per key).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .algorithms.claim import Claim, NamedLimit
from .decision import Decision

#: The most keys of which starts are known; beyond it the first ones are forgotten.
MAX_KEYS = 10_000


class FutureCharges:
    """The last starts of the buckets of one store: by limit and key, of each `until` (ticks) its last start (µs)."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[NamedLimit, str], OrderedDict[int, int]] = OrderedDict()

    def add(self, claims: Sequence[Claim], decision: Decision) -> None:
        """Notes a charge with a later start."""
        now_us = decision.start_us - decision.wait_us
        for claim in claims:
            states = claim.remembered() if claim.limit.limit.sums_later_starts else None
            if states is None:
                continue
            (_, _, before), (_, _, until), _ = states
            known = self._known.pop((claim.limit, claim.key), None)
            if before <= now_us // claim.limit.limit.tick:  # the first of a new `until`
                known = OrderedDict({before: 0})
            if known is not None and before in known:
                while next(reversed(known)) != before:  # of charges that were given back: they would hide this one
                    known.popitem()
                _drop_begun(known, now_us)
                known[until] = max(known[before], decision.start_us)
                self._known[claim.limit, claim.key] = known
                if len(self._known) > MAX_KEYS:
                    self._known.popitem(last=False)

    def begun(self, claim: Claim, now_us: int) -> int:
        """The `until` that only counts charges that have begun; −1: none is known."""
        known = self._known.get((claim.limit, claim.key))
        return -1 if known is None else _drop_begun(known, now_us)

    def forget(self, claims: Sequence[Claim]) -> None:
        """Forgets the `until` of these charges, which are given back."""
        for claim in claims:
            known, states = self._known.get((claim.limit, claim.key)), claim.remembered()
            if known is not None and states is not None:
                known.pop(states[1][2], None)

    def __bool__(self) -> bool:
        return bool(self._known)

    def mark(self, claims: Sequence[Claim], now_us: int, start_us: int) -> list[Claim]:
        """The claims to give back in the place of these. Where all that the bucket's `until` counts has begun, they say that it
        was 0 before their charge."""
        return [self._marked(claim, now_us, start_us) if claim.cost > 0 else claim for claim in claims]

    def _marked(self, claim: Claim, now_us: int, start_us: int) -> Claim:
        begun = self.begun(claim, now_us)
        if begun < 0:
            return claim
        states = claim.remembered()
        if states is not None and begun in (states[0][2], states[1][2]):
            before, after, others = states
            claim.remember((*before[:2], 0), after, others, claim.charged_at())
        elif start_us <= now_us:
            claim = Claim(claim.limit, claim.key, claim.cost, claim.charged, claim.reset_id)
            claim.remember((-1, -1, 0), (-1, -1, begun), None, start_us)  # no state has the times −1: nothing is restored
        return claim


def _drop_begun(known: OrderedDict[int, int], now_us: int) -> int:
    """Forgets each `until` whose last start has passed but for the last of them, and returns that one; −1: there is none."""
    found, last_us = -1, 0
    while known and known[next(iter(known))] <= now_us:
        found, last_us = known.popitem(last=False)
    if found >= 0:
        known[found] = last_us
        known.move_to_end(found, last=False)
    return found
