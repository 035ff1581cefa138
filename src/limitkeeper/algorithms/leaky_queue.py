"""Leaky bucket as a queue: shapes traffic to evenly spaced starts, FIFO.

    backlog(now) = max(0, backlog(at) − gain · (now − at))    the next start: when the backlog has drained
    a cost fits when  backlog + cost · unit ≤ full             full: capacity units, the one leaving now included

State: (at, backlog, gap), as in the token bucket. A cost of n takes n intervals. `hit` is admitted only when the backlog
is empty; `acquire` and `reserve` take the next free slot. At 5/s with capacity 10, of 20 calls at once 10 are accepted
and the last waits 1.8 s. Worst wait: (capacity − 1) / rate. Worst case in any interval T: 1 start + rate · T, to the tick.

Rejected: a queue of requests drained by a thread (a timer per key); computing the start of each request needs neither.
"""

from __future__ import annotations

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..rate import MAX_COUNT, Count, Duration, RateValue, whole

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.constants import NEVER, REFUSED, TOP
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit, State
else:
    from .constants import NEVER, REFUSED, TOP
    from .limit import I64, Answer, Limit, State


from .limit import option
from .token_bucket import TokenBucket


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def decide(limit: Limit, at: I64, backlog: I64, gap: I64, now: I64, not_before: I64, cost: I64, max_wait: I64) -> Answer:
    level: I64 = backlog
    elapsed: I64 = now - at
    if elapsed >= limit.drained:
        level = 0
    elif elapsed > 0:
        level = backlog - elapsed * limit.gain
        if level < 0:
            level = 0
    start: I64 = REFUSED
    retry: I64 = now
    if cost > limit.capacity:
        start = NEVER
    else:
        need: I64 = cost * limit.unit
        wait: I64 = level if limit.even else (level + limit.gain - 1) // limit.gain
        late: I64 = not_before - now
        if late > wait:
            wait = late
        else:
            late = 0  # the start is rounded up to a tick; the fraction stays in the backlog
        if max_wait > limit.horizon:
            max_wait = limit.horizon
        if level + need > limit.full:  # queue full: it must drain first, whatever max_wait is
            retry = now + (level + need - limit.full + limit.gain - 1) // limit.gain
        elif wait <= max_wait:
            gap = 0
            if late > 0 and late * limit.gain > level:
                gap = late * limit.gain - level
                level = late * limit.gain
            level += need
            backlog = level
            start = now + wait
            if elapsed > 0:
                at = now
        if start < 0 and now + wait - max_wait > retry:
            retry = now + wait - max_wait
    reset: I64 = now + (level if limit.even else (level + limit.gain - 1) // limit.gain)
    return (at, backlog, gap, start, retry, 0 if level > 0 else limit.capacity, reset)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def give_back(limit: Limit, at: I64, backlog: I64, gap: I64, now: I64, cost: I64, charged: I64, charged_at: I64) -> State:
    elapsed: I64 = now - at
    if elapsed >= limit.drained:
        backlog = 0
    elif elapsed > 0:
        backlog -= elapsed * limit.gain
        if backlog < 0:
            backlog = 0
    if elapsed > 0:
        at = now
    if cost < 0:
        if -cost > (TOP - backlog) // limit.unit:
            return (at, TOP - (TOP - backlog) % limit.unit, gap)
        return (at, backlog - cost * limit.unit, gap)
    if cost > limit.capacity:
        cost = limit.capacity
    back: I64 = cost * limit.unit
    ahead: I64 = charged_at - now
    if ahead > limit.horizon or -ahead > limit.horizon:
        return (at, backlog, gap)
    # Later starts are already assigned, so only the last charge of the queue can be given back.
    own: I64 = backlog - ahead * limit.gain
    if own > 0 and (own - 1) // limit.unit >= charged:  # own > charged · unit, where that product exceeds a C integer too
        return (at, backlog, gap)
    if ahead > 0 and cost == charged and own == back:
        back += gap
    return (at, backlog - back if backlog > back else 0, 0 if back else gap)


@cython.cclass
class LeakyBucketQueue(Limit):
    """`LeakyBucketQueue("5/s", capacity=10)`: strict pacing, FIFO.

    Args:
        rate: how fast calls leave the queue: text ("5/s capacity 10"), or a number with `per`.
        capacity: how many calls the queue holds, the one that leaves now included; None is unlimited.
        per: the period of a rate that is a number, as in `LeakyBucketQueue(5, per="1s")`.
    """

    __slots__ = ()
    kind = "leaky bucket queue"

    def __init__(self, rate: RateValue, capacity: Count | None = None, *, per: Duration | None = None) -> None:
        given = self._read(rate, per, ("capacity",))
        size = option("capacity", capacity, given, rate)
        self.refunds = False
        if size is None:
            self._scale(self.count)
            self.full = TOP // 2
            self.capacity = self.initial = min(MAX_COUNT, self.full // self.unit)
            self.horizon = (TOP - self.full - self.gain) // self.gain
        else:
            self.capacity = self.initial = whole(size, "capacity", rate)
            self._scale(self.capacity)
        self.rule = decide
        self.undo = give_back
        twin: Limit = TokenBucket(self.rate, 1)
        self.usage = twin.usage  # the same level, counted the same way
        self.bounded = size is not None
        words = f"{self.kind} {self.rate}"
        self._seal(words if size is None else f"{words} capacity {self.capacity}")
