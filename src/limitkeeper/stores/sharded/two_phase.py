"""A decision whose keys live on several shards: two steps instead of one.

Take, then join. Every shard is asked for its own claims, now. When all grant, that is the decision: one call each. When one
refuses, the others give back what they charged, every claim is looked at (nothing stored), and the limit with the longest
retry speaks, as within one store. With patience the looks say when each claim could start; the latest of these is the common
start, and every shard is charged at it.

A store charges at its own earliest start, so a shard that could start earlier is held back by a *pacer*: one more claim in the
same call, on a bucket of one token a microsecond that has just been loaded so that its token is there at the common start and
not before. When somebody came in between and a shard's start is later than that, all are moved there.

Shards may have clocks of their own: starts are compared as waits from the moment at which each shard was looked at, never as
times of day, and each shard is given back at its own start.

Never more than the limits is admitted. What is charged on some shards only, because the caller died between two of them or
a shard failed while it gave back, is at most the cost of that one decision, and is as lost as a hit that was never used.
While two steps are under way others may be refused what is given back a moment later.

The steps are a generator of calls, so that both colours share them: the sync one makes the calls one after the other, the
async one all calls of a step at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...algorithms.claim import Claim
from ...decision import Decision, Decisions
from ...errors import StoreError
from .steps import Call, Step, Steps, fine

#: How often a decision is tried again when others come in between, before it is refused.
ROUNDS = 8
_pacers = itertools.count()


class ShardGroup(NamedTuple):
    """The claims of one decision that live on one shard, and where they stand in the decision."""

    shard: Any
    claims: list[Claim]
    places: list[int]


class Joined(NamedTuple):
    """The decision, and where it was charged: (group, start of its charge)."""

    decision: Decision
    charged: list[tuple[ShardGroup, int]]


def decide(groups: Sequence[ShardGroup], max_wait_us: int | None, commit: bool, tag: str) -> Steps:
    """The steps of one decision; ends with a `Joined`. `tag` makes pacers of this process its own."""
    for group in groups:
        if not all(group.shard.store.can_reserve(claim.limit) for claim in group.claims):
            max_wait_us = 0  # one that can't reserve makes all of them answer for now
    found: list[Decision] = []
    for _ in range(ROUNDS):
        if commit:
            charged = yield from take(groups, [Call(g.shard, "decide", (g.claims, 0)) for g in groups])
            if charged is not None:
                return joined(groups, charged)
        found = yield from look(groups, max_wait_us)
        common = max(part.wait_us for part in found)
        found = [held(part, claim, common) for part, claim in zip(found, in_order(groups), strict=True)]
        if not commit or not all(found):
            return Joined(together(found, all(found), common), [])
        if common:
            charged = yield from take_at(groups, found, common, max_wait_us, tag)
            if charged is not None:
                return joined(groups, charged)
    return Joined(together([refused(part) for part in found], False, 0), [])  # it fits, but others were always quicker


# Taking ----------------------------------------------------------------------------------------------------------------


def take(groups: Sequence[ShardGroup], calls: list[Call]) -> Steps:
    """Charges every group, or none: the decisions of all, or None when one refused."""
    answers = yield Step(calls, eager=True)
    granted = [isinstance(answer, Decision) and bool(answer) for answer in answers]
    if len(answers) == len(calls) and all(granted):
        return answers
    yield from give_back([(group, answer) for group, answer, taken in zip(groups, answers, granted, strict=False) if taken])
    fine(answers)
    return None


def give_back(charged: Sequence[tuple[ShardGroup, Decision]]) -> Steps:
    """Takes charges away again, each at its own start. A shard that fails at it keeps the charge."""
    if charged:
        yield Step([Call(group.shard, "give_back", (group.claims, decision.start_us)) for group, decision in charged])


def take_at(groups: Sequence[ShardGroup], found: list[Decision], common: int, max_wait_us: int | None, tag: str) -> Steps:
    """Charges every group `common` microseconds after it was looked at; None when somebody came in between."""
    begun = [found[group.places[0]].start_us - found[group.places[0]].wait_us for group in groups]
    own = [max(found[place].wait_us for place in group.places) for group in groups]
    paced: list[Decision | None] = [None] * len(groups)
    for _ in range(ROUNDS):
        late = [i for i, decision in enumerate(paced) if decision is None or decision.start_us - begun[i] < common]
        if not late:
            return paced
        yield from give_back([(groups[i], decision) for i in late if (decision := paced[i]) is not None])
        slow = [i for i in late if paced[i] is not None or own[i] < common]
        pacers = {i: f"{tag}{next(_pacers)}" for i in slow}
        answers = yield Step([pace(groups[i].shard, pacers[i], begun[i], common) for i in slow])
        failed = [answer for answer in answers if isinstance(answer, StoreError)]
        if not failed:
            calls = [Call(groups[i].shard, "decide", (paced_claims(groups[i], pacers.get(i)), max_wait_us)) for i in late]
            answers = yield Step(calls)
            failed = [answer for answer in answers if isinstance(answer, StoreError)]
        kept = [(groups[i], decision) for i, decision in enumerate(paced) if decision is not None and i not in late]
        if failed or not all(answers):
            if len(answers) == len(late):
                kept += [(groups[i], a) for i, a in zip(late, answers, strict=True) if isinstance(a, Decision) and a]
            yield from give_back(kept)
            if failed:
                raise failed[0]
            return None
        for i, answer in zip(late, answers, strict=True):
            paced[i] = answer
        common = max(decision.start_us - begun[i] for i, decision in enumerate(paced) if decision is not None)
    yield from give_back([(group, decision) for group, decision in zip(groups, paced, strict=True) if decision is not None])
    return None


def pace(shard: Any, key: str, begun_us: int, wait_us: int) -> Call:
    """Loads a pacer whose token is there so long after that moment of the shard's clock."""
    return Call(shard, "load", (shard.pacer, [(key, (begun_us, wait_us, 0))]))


def paced_claims(group: ShardGroup, pacer: str | None) -> list[Claim]:
    return group.claims if pacer is None else [*group.claims, Claim(group.shard.pacer, pacer, 1)]


# Looking -----------------------------------------------------------------------------------------------------------------


def look(groups: Sequence[ShardGroup], max_wait_us: int | None) -> Steps:
    """What each claim would be told on its own now, in order; nothing is stored."""
    places = [place for group in groups for place in group.places]
    calls = [Call(g.shard, "decide", ([claim], max_wait_us), {"commit": False}) for g in groups for claim in g.claims]
    answers = fine((yield Step(calls)))
    return [answer for _, answer in sorted(zip(places, answers, strict=True), key=lambda pair: pair[0])]


def in_order(groups: Sequence[ShardGroup]) -> list[Claim]:
    """All claims as they stand in the decision."""
    pairs = [pair for group in groups for pair in zip(group.places, group.claims, strict=True)]
    return [claim for _, claim in sorted(pairs, key=lambda pair: pair[0])]


def held(part: Decision, claim: Claim, common: int) -> Decision:
    """Refused, when the common start is further away than this limit can count."""
    limit = claim.limit.limit
    now_us = part.start_us - part.wait_us
    far = limit.gain > 0 and (now_us + common) // limit.tick - now_us // limit.tick > limit.horizon
    if not part or claim.cost == 0 or not common or not far:
        return part
    return refused(part, common - limit.horizon * limit.tick)


def refused(part: Decision, retry_us: int = 1) -> Decision:
    now_us = part.start_us - part.wait_us
    return Decision(False, part.limit, part.remaining, retry_us, part.reset_us, 0, now_us, part.name)


# Joining -----------------------------------------------------------------------------------------------------------------


def joined(groups: Sequence[ShardGroup], charged: Sequence[Decision]) -> Joined:
    """One decision out of those of all shards."""
    parts: dict[int, Decision] = {}
    for group, decision in zip(groups, charged, strict=True):
        parts |= dict(zip(group.places, decision.decisions, strict=False))  # a pacer, which comes last, has no place
    wait_us = max(decision.wait_us for decision in charged)
    decision = together([parts[place] for place in sorted(parts)], True, wait_us)
    return Joined(decision, [(group, answer.start_us) for group, answer in zip(groups, charged, strict=True)])


def together(parts: list[Decision], allowed: bool, wait_us: int) -> Decision:
    """Refused, the limit with the longest retry speaks; allowed, the one closest to its end."""
    speaker = parts[0]
    for part in parts[1:]:
        if allowed:
            if part.remaining * speaker.limit < speaker.remaining * part.limit:
                speaker = part
        elif speaker.retry_us >= 0 and (part.retry_us < 0 or part.retry_us > speaker.retry_us):
            speaker = part
    wait_us = wait_us if allowed else 0
    start_us = parts[0].start_us - parts[0].wait_us + wait_us
    return Decisions(
        parts, allowed, speaker.limit, speaker.remaining, speaker.retry_us, speaker.reset_us, wait_us, start_us, speaker.name
    )
