"""Decides claims that are on several shards, all or nothing, in two phases (stores/two_phase_decision.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from random import Random
from typing import Any

from ...algorithms.claim import Claim
from ...algorithms.constants import WAS_RESET
from ...clock import Clock
from ...errors import StoreError
from ..contract import Booking, charges_of
from ..sans_io import Call, Plan, Recorded, UntilRefused, together
from ..two_phase_decision import Group, TwoPhaseDecision
from .router import Shard


class CrossShardDecision(TwoPhaseDecision):
    """One decision; the places of its groups are shards."""

    def __init__(
        self, groups: Sequence[Group], max_wait_us: int | None, commit: bool, not_before_us: int, clock: Clock, rng: Random | None
    ) -> None:
        reserves = all(group.place.store.can_reserve(claim.limit) for group in groups for claim in group.claims)
        # A limit that can't reserve makes all of them decide for now.
        super().__init__(groups, max_wait_us if reserves else 0, commit, not_before_us, clock, (rng or random).random)

    def queue_of(self, group: Group, claim: Claim) -> Hashable:
        return id(group.place), claim.named, claim.key

    def ask(
        self, groups: Sequence[Group], not_before_us: Sequence[int], commit: bool, undo: bool, first: bool
    ) -> Plan[Sequence[object]]:
        if undo:
            yield from self.give_back(groups)
        calls = (UntilRefused if commit else Recorded)(
            Call(group.place, "decide", (group.claims, self.max_wait_us), {"commit": commit, "not_before_us": moment})
            for group, moment in zip(groups, not_before_us, strict=True)
        )
        try:
            return (yield calls)  # type: ignore[no-any-return]
        except BaseException:
            self.take(groups, calls.answers, not_before_us, commit)
            yield from self.give_back(self.groups)
            raise

    def give_back(self, groups: Iterable[Group]) -> Plan[None]:
        charged = [group for group in groups if group.charged]
        calls = [Call(one.place, "give_back", charge) for one in charged for charge in charges_of(one.claims, one.decision)]
        for group in charged:
            group.charged = False
        if calls:
            yield calls


def raise_failure(answers: list[Any]) -> list[Any]:
    """The answers of several calls, when none failed."""
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
    return answers


def give_back_bookings(left: dict[int, Booking], leaving: Sequence[int], plan: Callable[..., Plan[bool]]) -> Plan[None]:
    """Gives back bookings on several shards by a `plan` for each, all in one step. Those that fail stay in `left`, with what they
    have not given back."""
    all_claims = [left[at].claims for at in leaving]
    for at in leaving:
        left[at] = left[at]._replace(claims=list(left[at].claims))
    plans = [plan(left[at].claims, [], left[at].charged_at, left[at].source) for at in leaving]
    answers = yield from together(plans)
    for at, claims, answer in zip(leaving, all_claims, answers, strict=True):
        if not isinstance(answer, StoreError):
            del left[at]
        if not answer:
            for claim in claims:
                claim.reset_id = WAS_RESET
    raise_failure(answers)


def resolved(call: Call) -> Call:
    """The call of a shard as one of its store; that of a gate stays as it is."""
    return call._replace(target=call.target.store) if isinstance(call.target, Shard) else call
