"""Several limits together: all are charged at one instant, or none is.

One pass asks every rule for its own earliest start; the common start is the latest of them. When it is not now, a
second pass charges every rule at it. A rule that fits at some moment fits at every later one (nothing else being
charged), so the second pass can't fail. Everything is arithmetic: whoever holds the states loads them into the claims
before, and stores what the claims hold after.
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim
    from cython.cimports.limitkeeper.algorithms.constants import MAX_WAIT, PLAIN, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import Answer, Limit
    from cython.cimports.limitkeeper.decision import Decision, Decisions, fresh
else:
    from ..decision import Decision, Decisions, fresh
    from .claim import Claim
    from .constants import MAX_WAIT, PLAIN, REFUSED
    from .limit import Answer, Limit


@cython.cfunc
@cython.exceptval(check=False)
def ask(claim: Claim, now_us: cython.longlong, at_us: cython.longlong, max_wait_us: cython.longlong) -> cython.void:
    """Asks one rule, between microseconds outside and its ticks inside; the answer is left in the claim."""
    limit: Limit = claim.named.limit
    tick: cython.longlong = limit.tick
    now: cython.longlong = now_us // tick
    patience: cython.longlong = (now_us + max_wait_us) // tick - now if claim.cost > 0 else 0
    at: cython.longlong = at_us // tick if claim.cost > 0 else now
    answer: Answer = limit.rule(limit, claim.a, claim.b, claim.c, now, at, claim.cost, patience)
    claim.new_a = answer[0]
    claim.new_b = answer[1]
    claim.new_c = answer[2]
    claim.start = answer[3]
    claim.retry = answer[4] * tick if answer[4] > now else now_us
    claim.remaining = answer[5]
    claim.reset = answer[6] * tick if answer[6] > now else now_us
    if claim.start == REFUSED and tick > 1 and max_wait_us > 0:
        claim.retry = retry_us(limit, claim.a, claim.b, claim.c, now_us, claim.cost, max_wait_us)
    if claim.cost == 0:  # nothing asked for, nothing refused
        claim.start = at_us
        claim.retry = now_us
    elif claim.start >= 0:
        claim.start = claim.start * tick if claim.start > now else now_us


@cython.cfunc
@cython.exceptval(check=False)
def retry_us(
    limit: Limit,
    a: cython.longlong,
    b: cython.longlong,
    c: cython.longlong,
    now_us: cython.longlong,
    cost: cython.longlong,
    max_wait_us: cython.longlong,
) -> cython.longlong:
    """When to come back, to the microsecond: patience is no whole number of coarse ticks, and reaches further at their end."""
    now: cython.longlong = now_us // limit.tick
    answer: Answer = limit.rule(limit, a, b, c, now, now, cost, limit.horizon)
    start_us: cython.longlong
    if answer[3] >= 0:
        start_us = answer[3] * limit.tick - max_wait_us
        return start_us if start_us > now_us else now_us
    # A queue without room, whatever the patience: not before there is room, nor before its end (when it is as new) is near.
    room_us: cython.longlong = answer[4] * limit.tick
    start_us = answer[6] * limit.tick - max_wait_us
    return start_us if start_us > room_us and not limit.refunds else room_us


@cython.cfunc
@cython.exceptval(check=False)
def look(claim: Claim, now_us: cython.longlong) -> cython.void:
    """Leaves in the claim what is there now, nothing being taken."""
    limit: Limit = claim.named.limit
    tick: cython.longlong = limit.tick
    now: cython.longlong = now_us // tick
    answer: Answer = limit.rule(limit, claim.a, claim.b, claim.c, now, now, 0, 0)
    claim.remaining = answer[5]
    claim.reset = answer[6] * tick if answer[6] > now else now_us


@cython.cfunc
@cython.exceptval(check=False)
def decide(
    claims: list,  # type: ignore[type-arg]
    now_us: cython.longlong,
    not_before_us: cython.longlong,
    max_wait_us: cython.longlong,
) -> cython.longlong:
    """The common start in microseconds, not before `not_before_us`, or REFUSED or NEVER. When granted, the claims hold the
    states to be stored."""
    at_us: cython.longlong = not_before_us if not_before_us > now_us else now_us
    start_us: cython.longlong = at_us
    worst: cython.longlong = 0
    i: cython.Py_ssize_t
    claim: Claim
    for i in range(len(claims)):
        claim = claims[i]
        if not claim.named.limit.reserves:  # one that can't reserve makes all of them answer for now
            max_wait_us = 0
    for i in range(len(claims)):
        claim = claims[i]
        ask(claim, now_us, at_us, max_wait_us)
        if claim.start < worst:
            worst = claim.start
        elif claim.start > start_us:
            start_us = claim.start
    if worst == 0 and start_us > now_us:
        for i in range(len(claims)):
            claim = claims[i]
            if beyond(claim.named.limit, now_us, start_us) and claim.cost > 0:
                claim.start = worst = REFUSED
                claim.retry = start_us - claim.named.limit.horizon * claim.named.limit.tick
    if worst < 0:
        return worst
    if start_us > now_us:
        for i in range(len(claims)):
            claim = claims[i]
            if claim.start < start_us:  # whose own start it is was charged there already, its fraction kept
                ask(claim, now_us, start_us, MAX_WAIT)
    return start_us


@cython.cfunc
@cython.exceptval(check=False)
def beyond(limit: Limit, now_us: cython.longlong, start_us: cython.longlong) -> cython.bint:
    """Whether a common start is further away than this limit can count."""
    return limit.gain > 0 and start_us // limit.tick - now_us // limit.tick > limit.horizon


@cython.cfunc
def alone(claim: Claim, now_us: cython.longlong) -> Decision:
    """The answer of one limit. Filled in rather than called for: of five limits that is a third of the whole decision."""
    allowed: cython.bint = claim.start >= 0
    wait: cython.longlong = claim.start - now_us if allowed else 0
    decision: Decision = fresh(claim.named.name)
    decision.allowed = allowed
    decision.limit = claim.named.limit.capacity
    decision.remaining = claim.remaining
    decision.retry_us = 0 if allowed else (claim.retry - now_us if claim.start == REFUSED else -1)
    decision.reset_us = claim.reset - now_us
    decision.wait_us = wait
    decision.start_us = now_us + wait
    if PLAIN:
        decision.__class__ = Decision
    return decision


def together(claims: list, now_us: cython.longlong, start_us: cython.longlong) -> Decision:  # type: ignore[type-arg]
    """One Decision for all: refused, the limit with the longest retry speaks; allowed, the one closest to its end.

    What was not stored has been looked at (`look`) before, while the states were at hand."""
    parts: list = []  # type: ignore[type-arg]
    part: Decision
    i: cython.Py_ssize_t
    for i in range(len(claims)):
        parts.append(alone(claims[i], now_us))  # noqa: PERF401 - typed
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    allowed: cython.bint = start_us >= 0
    speaker: Decision = parts[0]
    for i in range(1, len(parts)):
        part = parts[i]
        if allowed:
            if part.remaining * speaker.limit < speaker.remaining * part.limit:
                speaker = part
        elif speaker.retry_us >= 0 and (part.retry_us < 0 or part.retry_us > speaker.retry_us):
            speaker = part
    wait: cython.longlong = start_us - now_us if allowed else 0
    if cython.compiled:
        told: Decisions = Decisions.__new__(Decisions)
        told.parts = tuple(parts)
        told.allowed = allowed
        told.limit = speaker.limit
        told.remaining = speaker.remaining
        told.retry_us = speaker.retry_us
        told.reset_us = speaker.reset_us
        told.wait_us = wait
        told.start_us = now_us + wait
        told.name = speaker.name
        return told
    fields: Any = (
        allowed,
        speaker.limit,
        speaker.remaining,
        speaker.retry_us,
        speaker.reset_us,
        wait,
        now_us + wait,
        speaker.name,
    )
    return Decisions(parts, *fields)
