# cython: boundscheck=False, wraparound=False
"""Several limits together: all are charged at one instant, or none is.

One pass asks every rule for its own earliest start; the common start is the latest of them. When it is not now, a
second pass charges every rule at it. A rule that fits at some moment fits at every later one (nothing else being
charged), so the second pass can't fail. Everything is arithmetic: whoever holds the states loads them into the claims
before, and stores what the claims hold after.
"""

from __future__ import annotations

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim
    from cython.cimports.limitkeeper.algorithms.constants import MAX_WAIT, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import Answer, Limit
    from cython.cimports.limitkeeper.decision import Decision, Decisions, Fields, filled, is_deciding
else:
    from ..decision import Decision, Decisions, Fields, filled, is_deciding
    from .claim import Claim
    from .constants import MAX_WAIT, REFUSED
    from .limit import Answer, Limit


@cython.cfunc
@cython.exceptval(check=False)
def ask(claim: Claim, now_us: cython.longlong, at_us: cython.longlong, max_wait_us: cython.longlong) -> cython.void:
    """Asks one rule, between microseconds outside and its ticks inside; the answer is left in the claim."""
    limit: Limit = claim.named.limit
    tick: cython.longlong = limit.tick
    now: cython.longlong = now_us if limit.fine else now_us // tick
    patience: cython.longlong = 0
    at: cython.longlong = now
    if claim.cost > 0 and max_wait_us > 0:
        patience = (now_us + max_wait_us) // tick - now
    if claim.cost > 0 and at_us > now_us:
        at = at_us // tick
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
    if max_wait_us > 0:
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
@cython.exceptval(check=False)
def fields_of(claim: Claim, now_us: cython.longlong) -> Fields:
    """The answer that a decision left in a claim, as a Decision's fields."""
    allowed: cython.bint = claim.start >= 0
    retry: cython.longlong = 0
    if not allowed:
        retry = claim.retry - now_us if claim.start == REFUSED else -1
    return (
        allowed,
        claim.named.limit.capacity,
        claim.remaining,
        retry,
        claim.reset - now_us,
        claim.start - now_us if allowed else 0,
    )


def together(claims: list, now_us: cython.longlong, start_us: cython.longlong) -> Decision:  # type: ignore[type-arg]
    """One Decision for all claims. What was not stored has been looked at (`look`) before, while the states were at hand."""
    return join_claims(claims, now_us, start_us, reserved(names_of(claims)))


@cython.cfunc
def names_of(claims: list) -> tuple:  # type: ignore[type-arg]
    """The names of the limits of these claims, in order."""
    claim: Claim
    found: list = []  # type: ignore[type-arg]
    for claim in claims:
        found.append(claim.named.name)  # noqa: PERF401 - typed
    return tuple(found)


@cython.cfunc
def reserved(names: tuple) -> Decisions | None:  # type: ignore[type-arg]
    """Compiled, a new answer with room for these limits; plain, and for one limit, none is needed."""
    if len(names) == 1 or not cython.compiled:
        return None
    joined: Decisions = Decisions.__new__(Decisions)
    joined.reserve(names)
    return joined


@cython.cfunc
def join_claims(claims: list, now_us: cython.longlong, start_us: cython.longlong, joined: Decisions | None) -> Decision:  # type: ignore[type-arg]
    """As `together`; compiled, the answers of several limits are left in `joined` as integers."""
    wait_us: cython.longlong = start_us - now_us if start_us >= 0 else 0
    claim: Claim = claims[0]
    i: cython.Py_ssize_t
    if len(claims) == 1:
        return filled(claim.named.name, fields_of(claim, now_us), now_us)
    if not cython.compiled:
        return Decisions.join([filled(one.named.name, fields_of(one, now_us), now_us) for one in claims], wait_us)
    allowed: cython.bint = start_us >= 0
    fields: Fields = fields_of(claim, now_us)
    deciding: Fields = fields
    joined.fields[0] = fields
    joined.name = claim.named.name
    for i in range(1, len(claims)):
        claim = claims[i]
        fields = fields_of(claim, now_us)
        joined.fields[i] = fields
        if is_deciding(allowed, fields[1], fields[2], fields[3], deciding[1], deciding[2], deciding[3]):
            deciding = fields
            joined.name = claim.named.name
    joined.allowed = allowed
    joined.limit = deciding[1]
    joined.remaining = deciding[2]
    joined.retry_us = deciding[3]
    joined.reset_us = deciding[4]
    joined.wait_us = wait_us
    joined.start_us = now_us + wait_us
    joined.source = "store"
    return joined
