"""Decides claims that are in several places (the shards of a ShardedStore, the slots of a cluster), all or nothing.

1. Every place charges its own claims at their earliest start. All have the same one: done, in one round trip.
2. One refuses: those that were charged give back and are peeked at; the limit with the longest retry decides. Starts differ:
   those with an earlier one give back and are charged again, not before the latest start of all, until all have the same.

Places may have clocks of their own: starts are compared as waits since each place was first asked. Between the two steps others
may see a charge and be refused because of it, never admitted. What is charged in some places only, because the caller died in
between or a place failed while it gave back, is at most the cost of this one decision: too strict, never too lax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..algorithms.claim import Claim
from ..decision import Decision, Decisions
from ..errors import StoreError, StoreUnavailable
from .sans_io import Plan

#: How often a common start is looked for while other callers take theirs.
ROUNDS = 12


@dataclass(slots=True, eq=False)
class Group:
    """The claims of a decision that are in one place, and their positions in it."""

    place: Any
    claims: list[Claim]
    positions: list[int]
    decision: Any = None  # the latest of its place; None: not asked since it gave back
    now_us: int | None = None  # the place's time when it was first asked
    start_us: int = 0  # of the latest decision; where it needed no wait, or was rounded, as it was asked for
    charged: bool = False

    def take(self, decision: Decision, not_before_us: int, commit: bool) -> None:
        self.decision, self.charged, self.start_us = decision, commit and decision.allowed, decision.start_us
        if self.now_us is None:
            self.now_us = decision.start_us - decision.wait_us
        elif not decision.wait_us or decision.start_us < not_before_us:
            # A call takes its time: later places would never catch up. And coarse ticks round a start down.
            self.start_us = not_before_us

    def wait_us(self, start_us: int) -> int:
        """The wait for a start, counted from when the place was first asked."""
        return start_us - (self.now_us or 0)


def group_claims(claims: Sequence[Claim], place_of: Callable[[Claim], Any]) -> list[Group]:
    """Claims by their places, in the order in which these are first named."""
    found: dict[Any, list[int]] = {}
    for at, claim in enumerate(claims):
        found.setdefault(place_of(claim), []).append(at)
    return [Group(place, [claims[at] for at in positions], positions) for place, positions in found.items()]


class TwoPhaseDecision:
    """One decision on several groups; `decide` is a plan. A subclass asks the places."""

    #: Whether a peek comes first and finds a refusal, or the common start, without a charge.
    peeks_first = False

    def __init__(self, groups: Sequence[Group], commit: bool, not_before_us: int) -> None:
        self.groups, self.commit, self.not_before_us = groups, commit, not_before_us

    def ask(
        self, groups: Sequence[Group], not_before_us: Sequence[int], commit: bool, undo: bool, first: bool
    ) -> Plan[Sequence[object]]:
        """The Decision or StoreError of each group; those behind a refusal may be missing. `undo`: give back before. `first`: a
        peek that a charge may follow."""
        raise NotImplementedError

    def give_back(self, groups: Iterable[Group]) -> Plan[None]:
        """Gives back the charges of groups. A place that fails at it keeps its charge."""
        raise NotImplementedError

    def decide(self) -> Plan[Decision]:
        groups, not_before_us = self.groups, [self.not_before_us] * len(self.groups)
        if self.commit and self.peeks_first:
            yield from self._update(groups, not_before_us, commit=False, first=True)
            if not all(group.decision for group in groups):
                return self._joined(False)
            latest_us = max(group.wait_us(group.start_us) for group in groups)
            not_before_us = [(group.now_us or 0) + latest_us for group in groups]
        yield from self._update(groups, not_before_us, self.commit)
        for _ in range(ROUNDS):
            if not all(group.decision for group in groups):
                yield from self._withdraw()
                return self._joined(False)
            latest_us = max(group.wait_us(group.start_us) for group in groups)
            early = [group for group in groups if group.wait_us(group.start_us) < latest_us]
            if not early or not self.commit:
                return self._joined(True)
            yield from self._update(early, [(group.now_us or 0) + latest_us for group in early], commit=True, undo=True)
        yield from self._withdraw()
        raise StoreUnavailable(f"no common start was found in {ROUNDS} rounds: too many callers use these keys; try again")

    def _withdraw(self) -> Plan[None]:
        """Gives back what was charged, and peeks at what is there then."""
        some = [group for group in self.groups if group.charged or group.decision is None]
        try:
            if some:
                yield from self._update(some, [self.not_before_us] * len(some), commit=False, undo=True)
        finally:
            self._forget_charges()

    def _update(
        self, groups: Sequence[Group], not_before_us: Sequence[int], commit: bool, undo: bool = False, first: bool = False
    ) -> Plan[None]:
        """Decides again for some groups. If one fails, all give back what they charged."""
        answers = yield from self.ask(groups, not_before_us, commit, undo, first)
        self.take(groups, answers, not_before_us, commit)
        failed = next((answer for answer in answers if isinstance(answer, StoreError)), None)
        if failed is not None:
            try:
                yield from self.give_back(self.groups)
            finally:
                self._forget_charges()
            raise failed

    def _forget_charges(self) -> None:
        """A caller that fails or is cancelled gives back what its claims show as charged: that would be a second time."""
        for group in self.groups:
            for claim in group.claims:
                claim.forget_charge()

    def take(self, groups: Sequence[Group], answers: Sequence[object], not_before_us: Sequence[int], commit: bool) -> None:
        for group in groups:
            group.decision, group.charged = None, False
        for group, answer, moment in zip(groups, answers, not_before_us, strict=False):
            if isinstance(answer, Decision):
                group.take(answer, moment, commit)

    def _joined(self, allowed: bool) -> Decision:
        parts: dict[int, Decision] = {}
        for group in self.groups:
            for position, part in zip(group.positions, group.decision.decisions, strict=True):
                if allowed:
                    times = (part.retry_us, part.reset_us, group.wait_us(part.start_us), part.start_us)
                    part = Decision(True, part.limit, part.remaining, *times, part.name, part.source)
                parts[position] = part
        return Decisions.join([parts[position] for position in range(len(parts))])
