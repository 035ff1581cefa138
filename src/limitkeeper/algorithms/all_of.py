# cython: boundscheck=False, wraparound=False
"""Decides several limits together: all are charged at one start, or none is.

The first pass computes the earliest start of each limit; the common start is the latest of them. When that is not now, a
second pass charges every limit at it. A cost that fits at some time fits at every later time (with no other charges), so
the second pass can't fail. This module only computes: the store loads the states into the claims before, and stores the
states that the claims hold afterwards.

Several rates under one name: each rate in use on a key has its own state there. A call asks only its own rate; what it is
admitted with is charged to all of them (`charged_too`). A rate that is new to a key starts with the largest amount that the
states of the others hold as used (`seeded`). Rejected: one state converted from rate to rate; each conversion loses what the
other rate had not counted, and two rates used in turn then admitted almost everything.
"""

from __future__ import annotations

from collections.abc import Sequence

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim
    from cython.cimports.limitkeeper.algorithms.constants import MAX_WAIT, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit, State
    from cython.cimports.limitkeeper.decision import Decision, Decisions, Fields, filled, is_deciding
else:
    from ..decision import Decision, Decisions, Fields, filled, is_deciding
    from .claim import Claim
    from .constants import MAX_WAIT, REFUSED
    from .limit import I64, Answer, Limit, State


@cython.cfunc
@cython.exceptval(check=False)
def decide_claim(claim: Claim, now_us: I64, at_us: I64, max_wait_us: I64) -> cython.void:
    """Decides one claim, converting microseconds to the limit's ticks and back; the result is left in the claim."""
    limit: Limit = claim.named.limit
    tick: I64 = limit.tick
    now: I64 = now_us if limit.fine else now_us // tick
    max_wait: I64 = 0
    at: I64 = now
    if claim.cost > 0 and max_wait_us > 0:
        max_wait = (now_us + max_wait_us) // tick - now
    if claim.cost > 0 and at_us > now_us:
        at = at_us // tick
    answer: Answer = limit.rule(limit, claim.a, claim.b, claim.c, now, at, claim.cost, max_wait)
    claim.new_a = answer[0]
    claim.new_b = answer[1]
    claim.new_c = answer[2]
    claim.start = answer[3]
    claim.retry = answer[4] * tick if answer[4] > now else now_us
    claim.remaining = answer[5]
    claim.reset = answer[6] * tick if answer[6] > now else now_us
    if claim.start == REFUSED and tick > 1 and max_wait_us > 0:
        claim.retry = retry_us(limit, claim.a, claim.b, claim.c, now_us, claim.cost, max_wait_us)
    if claim.cost == 0:  # a cost of 0 is always allowed
        claim.start = at_us
        claim.retry = now_us
    elif claim.start >= 0:
        claim.start = claim.start * tick if claim.start > now else now_us


@cython.cfunc
@cython.exceptval(check=False)
def retry_us(limit: Limit, a: I64, b: I64, c: I64, now_us: I64, cost: I64, max_wait_us: I64) -> I64:
    """The exact retry time in microseconds: `max_wait_us` need not be a whole number of ticks and may reach into the next one."""
    now: I64 = now_us // limit.tick
    answer: Answer = limit.rule(limit, a, b, c, now, now, cost, limit.horizon)
    start_us: I64
    if answer[3] >= 0:
        start_us = answer[3] * limit.tick - max_wait_us
        return start_us if start_us > now_us else now_us
    # A full queue, or a start beyond the horizon: retry when there is room, or the start is within the horizon, and not before
    # it is within max_wait_us. That of a queue is its end, when it is empty.
    room_us: I64 = answer[4] * limit.tick
    start_us = (answer[4] + limit.horizon if limit.refunds else answer[6]) * limit.tick - max_wait_us
    return start_us if start_us > room_us else room_us


@cython.cfunc
@cython.exceptval(check=False)
def peek_claim(claim: Claim, now_us: I64) -> cython.void:
    """Sets `remaining` and `reset` of a claim to the current values, without a charge."""
    limit: Limit = claim.named.limit
    tick: I64 = limit.tick
    now: I64 = now_us // tick
    answer: Answer = limit.rule(limit, claim.a, claim.b, claim.c, now, now, 0, 0)
    claim.remaining = answer[5]
    claim.reset = answer[6] * tick if answer[6] > now else now_us


@cython.cfunc
@cython.exceptval(check=False)
def decide(claims: list, now_us: I64, not_before_us: I64, max_wait_us: I64) -> I64:
    """Returns the common start in microseconds, not before `not_before_us`, or REFUSED or NEVER. If there is a start, the claims
    hold the states to store."""
    at_us: I64 = not_before_us if not_before_us > now_us else now_us
    start_us: I64 = at_us
    worst: I64 = 0
    i: cython.Py_ssize_t
    claim: Claim
    limit: Limit
    if max_wait_us > 0:
        for i in range(len(claims)):
            claim = claims[i]
            limit = claim.named.limit
            if not limit.reserves:  # if one limit can't reserve, none waits
                max_wait_us = 0
            elif limit.gain > 0 and claim.cost > 0 and limit.horizon * limit.tick < max_wait_us:
                max_wait_us = limit.horizon * limit.tick  # nor longer than each of them can count
    for i in range(len(claims)):
        claim = claims[i]
        decide_claim(claim, now_us, at_us, max_wait_us)
        if claim.start < worst:
            worst = claim.start
        elif claim.start > start_us:
            start_us = claim.start
    if worst < 0:
        return worst
    if start_us > now_us:
        for i in range(len(claims)):
            claim = claims[i]
            if claim.start < start_us:  # a claim with that start is already charged there, fraction kept
                decide_claim(claim, now_us, start_us, MAX_WAIT)
    return start_us


@cython.ccall
@cython.exceptval(check=False)
def seeded(limit: Limit, birth_us: I64, now_us: I64, amount: I64) -> State:
    """The state of a rate that is new to a key: that of an unseen key, charged with `amount`, at most its capacity."""
    if amount > limit.capacity:
        amount = limit.capacity
    first: State = limit.unseen(birth_us)
    return limit.undo(limit, first[0], first[1], first[2], now_us // limit.tick, -amount, amount, -1)


@cython.ccall
@cython.exceptval(check=False)
def charged_too(limit: Limit, a: I64, b: I64, c: I64, now_us: I64, start_us: I64, cost: I64) -> State:
    """The state of another rate after its name has admitted `cost` at `start_us`: charged at that start if it fits there,
    otherwise over the limit: in the window of that start, or as debt from now on."""
    now: I64 = now_us // limit.tick
    start: I64 = start_us // limit.tick
    answer: Answer = limit.rule(limit, a, b, c, now, start, cost, MAX_WAIT)
    if answer[3] == start:
        return (answer[0], answer[1], answer[2])
    return limit.undo(limit, a, b, c, now, -cost, 0, start)


@cython.cfunc
@cython.exceptval(check=False)
def given_back(limit: Limit, state: State, now_us: I64, cost: I64, charged: I64, charged_at_us: I64, before_until: I64) -> State:
    """The state without `cost` of a charge. Where the charge was the last of those with later starts that a bucket sums,
    `before_until` is the sum (the third integer) before it; otherwise −1."""
    now: I64 = now_us // limit.tick
    at: I64 = charged_at_us // limit.tick if charged_at_us >= 0 else -1
    until: I64 = state[2]
    if limit.sums_later_starts and before_until >= 0 and cost > 0:
        if cost < charged and at > now:  # the rest is still to come, behind those before it
            at = before_until if before_until > at else at
        else:
            until, charged = before_until, 0  # which this charge has no part in
    return limit.undo(limit, state[0], state[1], until, now, cost, charged, at)


@cython.cfunc
@cython.exceptval(check=False)
def fields_of(claim: Claim, now_us: I64) -> Fields:
    """The result that a decision left in a claim, as the fields of a Decision."""
    allowed: cython.bint = claim.start >= 0
    retry: I64 = 0
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


def join_results(claims: list, now_us: I64, start_us: I64) -> Decision:
    """Joins the results of all claims into one Decision; for claims that were not stored, call `peek_claim` before."""
    return join_claims(claims, now_us, start_us, new_decisions(names_of(claims)))


def join_replies(claims: Sequence[Claim], numbers: tuple, positions: tuple, now_us: I64, start_us: I64) -> Decision:
    """Joins the results of a server. `numbers` has, from the position of each claim: its start (or REFUSED, NEVER), the
    microseconds to the retry, what remains, and the microseconds to the reset."""
    asked: list = list(claims)
    claim: Claim
    i: cython.Py_ssize_t
    at: cython.Py_ssize_t
    for i in range(len(asked)):
        claim = asked[i]
        at = positions[i]
        claim.start = numbers[at]
        claim.retry = now_us + numbers[at + 1]
        claim.remaining = numbers[at + 2]
        claim.reset = now_us + numbers[at + 3]
    return join_results(asked, now_us, start_us)


@cython.cfunc
def names_of(claims: list) -> tuple:
    """The names of the limits of these claims, in order."""
    claim: Claim
    found: list = []
    for claim in claims:
        found.append(claim.named.name)  # noqa: PERF401 - typed
    return tuple(found)


@cython.cfunc
def new_decisions(names: tuple) -> Decisions | None:
    """Compiled: a new Decisions with space for these limits. None in the pure-Python build and for one limit."""
    if len(names) == 1 or not cython.compiled:
        return None
    joined: Decisions = Decisions.__new__(Decisions)
    joined.reserve(names)
    return joined


@cython.cfunc
def join_claims(claims: list, now_us: I64, start_us: I64, joined: Decisions | None) -> Decision:
    """As `join_results`; compiled, the results of several limits are stored in `joined` as integers."""
    wait_us: I64 = start_us - now_us if start_us >= 0 else 0
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
