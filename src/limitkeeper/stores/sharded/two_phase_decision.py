"""Decides claims that are on several shards, all or nothing, in two phases.

Every shard is asked to charge its own claims now; when all allow it, that is the decision. When one refuses, the others give back
and every claim is peeked at: the limit with the longest retry decides. With a `max_wait` the latest of the peeked starts is the
common one, and every shard is charged at it (`not_before_us`); all are moved when another caller came in between. Shards may have
clocks of their own: starts are compared as waits since each shard was peeked at.

Never more than the limits is admitted. What is charged on some shards only, because the caller died between two calls or a shard
failed while it gave back, is at most the cost of that one decision, and is lost like a hit that was never used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ...algorithms.claim import Claim
from ...decision import Decision, Decisions
from ...errors import StoreError
from ..sans_io import Call, Plan, Recorded, UntilRefused
from .router import Shard

T = TypeVar("T")
#: How often a decision is tried again when other callers come in between, before it is refused.
ROUNDS = 8


class ShardGroup(NamedTuple):
    """The claims of one decision that are on one shard, and their positions in the decision."""

    shard: Shard
    claims: list[Claim]
    positions: list[int]


class Charge(NamedTuple):
    """A group that was charged, and the Decision of its shard."""

    group: ShardGroup
    decision: Decision


#: The joined decision, and what was charged for it.
Outcome = tuple[Decision, list[Charge]]


def plan_decision(groups: Sequence[ShardGroup], max_wait_us: int | None, commit: bool, not_before_us: int) -> Plan[Outcome]:
    """The calls of one decision."""
    if not all(group.shard.store.can_reserve(claim.limit) for group in groups for claim in group.claims):
        max_wait_us = 0  # a limit that can't reserve makes all of them decide for now
    claims = in_order(groups, [claim for group in groups for claim in group.claims])
    parts: list[Decision] = []
    for _ in range(ROUNDS):
        if commit:
            options = {"not_before_us": not_before_us}
            charges = yield from charge(groups, [Call(g.shard, "decide", (g.claims, 0), options) for g in groups])
            if charges is not None:
                return join_charges(charges)
        parts = yield from peek(groups, max_wait_us, not_before_us)
        wait_us = max(part.wait_us for part in parts)
        parts = [refuse_beyond_horizon(part, claim, wait_us) for part, claim in zip(parts, claims, strict=True)]
        if not commit or not all(parts):
            return Decisions.join(parts, wait_us), []
        if wait_us:
            charges = yield from charge_at(groups, parts, wait_us, max_wait_us)
            if charges is not None:
                return join_charges(charges)
    return Decisions.join([refused(part, 1) for part in parts]), []  # it fits, but other callers were always first


def charge(groups: Sequence[ShardGroup], calls: Sequence[Call]) -> Plan[list[Charge] | None]:
    """Charges every group or none; None when one refused."""
    calls = UntilRefused(calls)
    try:
        answers = yield calls
    except BaseException:
        yield from give_back(charged(groups, calls.answers))
        raise
    charges = charged(groups, answers)
    if len(charges) == len(groups):
        return charges
    yield from give_back(charges)
    raise_failure(answers)
    return None


def charged(groups: Iterable[ShardGroup], answers: Iterable[object]) -> list[Charge]:
    """The groups that were charged, by the answers so far."""
    return [Charge(group, a) for group, a in zip(groups, answers, strict=False) if isinstance(a, Decision) and a]


def charge_at(
    groups: Sequence[ShardGroup], parts: Sequence[Decision], wait_us: int, max_wait_us: int | None
) -> Plan[list[Charge] | None]:
    """Charges every group `wait_us` after it was peeked at, or later where another caller came in between; None when one
    refused."""
    peeked_at = [parts[group.positions[0]].start_us - parts[group.positions[0]].wait_us for group in groups]
    charges: dict[int, Charge] = {}
    for _ in range(ROUNDS):
        early = [i for i in range(len(groups)) if i not in charges or charges[i].decision.start_us < peeked_at[i] + wait_us]
        if not early:
            return [charges[i] for i in range(len(groups))]
        yield from give_back([charges.pop(i) for i in early if i in charges])
        calls = Recorded(
            Call(groups[i].shard, "decide", (groups[i].claims, max_wait_us), {"not_before_us": peeked_at[i] + wait_us})
            for i in early
        )
        try:
            answers = yield calls
        except BaseException:
            yield from give_back([*charges.values(), *charged([groups[i] for i in early], calls.answers)])
            raise
        charges |= {i: Charge(groups[i], a) for i, a in zip(early, answers, strict=True) if isinstance(a, Decision) and a}
        if len(charges) < len(groups):
            yield from give_back(charges.values())
            raise_failure(answers)
            return None
        wait_us = max(charge.decision.start_us - peeked_at[i] for i, charge in charges.items())
    yield from give_back(charges.values())
    return None


def give_back(charges: Iterable[Charge]) -> Plan[None]:
    """Gives charges back, each at its own start. A shard that fails at it keeps the charge."""
    calls = [Call(group.shard, "give_back", (group.claims, decision.start_us, decision.source)) for group, decision in charges]
    if calls:
        yield calls


def peek(groups: Sequence[ShardGroup], max_wait_us: int | None, not_before_us: int) -> Plan[list[Decision]]:
    """The decision on each claim by itself, in order, without charging."""
    options = {"commit": False, "not_before_us": not_before_us}
    calls = [Call(group.shard, "decide", ([claim], max_wait_us), options) for group in groups for claim in group.claims]
    return in_order(groups, raise_failure((yield calls)))


def in_order(groups: Sequence[ShardGroup], values: Iterable[T]) -> list[T]:
    """The values of all claims, given group by group, in the order of the decision."""
    positions = [position for group in groups for position in group.positions]
    return [value for _, value in sorted(zip(positions, values, strict=True), key=lambda pair: pair[0])]


def refuse_beyond_horizon(part: Decision, claim: Claim, wait_us: int) -> Decision:
    """Refused when the common start is further away than this limit can count."""
    limit = claim.limit.limit
    now_us = part.start_us - part.wait_us
    is_beyond = limit.gain > 0 and (now_us + wait_us) // limit.tick - now_us // limit.tick > limit.horizon
    if not part or claim.cost == 0 or not wait_us or not is_beyond:
        return part
    return refused(part, wait_us - limit.horizon * limit.tick)


def refused(part: Decision, retry_us: int) -> Decision:
    now_us = part.start_us - part.wait_us
    return Decision(False, part.limit, part.remaining, retry_us, part.reset_us, 0, now_us, part.name, part.source)


def join_charges(charges: list[Charge]) -> Outcome:
    """One decision out of those of all shards."""
    parts: dict[int, Decision] = {}
    for group, decision in charges:
        parts |= dict(zip(group.positions, decision.decisions, strict=True))
    wait_us = max(charge.decision.wait_us for charge in charges)
    return Decisions.join([parts[position] for position in sorted(parts)], wait_us), charges


def raise_failure(answers: list[Any]) -> list[Any]:
    """The answers of several calls, when none failed."""
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
    return answers
