"""Sliding window counter: two counters, the previous one weighted by the part of it that still lies in the window.

    cur · W + prev · (W − elapsed) + cost · W ≤ count · W      multiplied by W, so that nothing is rounded

State: (window, cur, prev) for windows of W on the Unix epoch. It can't reserve: the weighted sum at a later time depends
on the calls admitted until then. A refused call gets the first time at which it would fit. A charge is given back to the window
that it was made in, the previous one included, which still counts.
Worst case in any interval of W: 2 × count (all at the end of one window, then again as the weight falls).
"""

from __future__ import annotations

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..errors import InvalidLimit
from ..rate import Duration, RateValue

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.constants import NEVER, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit, State
else:
    from .constants import NEVER, REFUSED
    from .limit import I64, Answer, Limit, State


from .constants import TOP
from .limit import does_not_fit


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def decide(limit: Limit, window: I64, cur: I64, prev: I64, now: I64, not_before: I64, cost: I64, max_wait: I64) -> Answer:
    size: I64 = limit.window
    here: I64 = now - now % size
    this: I64 = 0
    last: I64 = 0
    if here <= window:
        here = window
        this = cur
        last = prev
    elif here == window + size:
        last = cur
    elapsed: I64 = now - here if now > here else 0
    free: I64 = (limit.count - this) * size - last * (size - elapsed)
    verdict: I64 = REFUSED
    retry: I64 = now
    if cost > limit.count:
        verdict = NEVER
    elif cost * size <= free:
        if not_before <= now:
            free -= cost * size
            this += cost
            end: I64 = here + 2 * size if this > 0 else (here + size if last > 0 else now)
            return (here, this, last, now, now, free // size, end)
    else:
        room: I64 = limit.count - this - cost
        if room >= 0:
            retry = here + size - room * size // last
        else:
            room = (limit.count - cost) * size // this
            retry = here + size + (size - room if room < size else 0)
    reset: I64 = now
    if this > 0:
        reset = here + 2 * size
    elif last > 0:
        reset = here + size
    return (window, cur, prev, verdict, retry, free // size if free > 0 else 0, reset)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def give_back(limit: Limit, window: I64, cur: I64, prev: I64, now: I64, cost: I64, charged: I64, charged_at: I64) -> State:
    size: I64 = limit.window
    here: I64 = now - now % size
    if here > window:
        prev = cur if here == window + size else 0
        cur = 0
    else:
        here = window
    if cost < 0:
        return (here, limit.horizon if -cost > limit.horizon - cur else cur - cost, prev)
    if charged_at < 0 or charged_at >= here:
        cur = cur - cost if cur > cost else 0
    elif charged_at >= here - size:
        prev = prev - cost if prev > cost else 0
    return (here, cur, prev)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def used(limit: Limit, window: I64, cur: I64, prev: I64, now: I64) -> I64:
    size: I64 = limit.window
    here: I64 = now - now % size
    if here <= window:
        here = window
    elif here == window + size:
        prev = cur
        cur = 0
    else:
        return 0
    elapsed: I64 = now - here if now > here else 0
    return cur + (prev * (size - elapsed) + size - 1) // size


@cython.cclass
class SlidingWindowCounter(Limit):
    """`SlidingWindowCounter("1000/min")`: about `count` in any window, with two counters per key."""

    __slots__ = ()
    kind = "sliding window counter"

    def __init__(self, rate: RateValue, *, per: Duration | None = None) -> None:
        self._read(rate, per)
        size: int = self.period
        tick = 1
        while self.count * (size // tick) > TOP // 4:
            tick *= 10
            if size % tick:
                raise InvalidLimit(does_not_fit(self, int(self.count), TOP // 4))
        self.tick = tick
        self.window = size // tick
        self.horizon = TOP // 4 // (size // tick)
        self.reserves = False
        self.aligned = True
        self.rule = decide
        self.undo = give_back
        self.usage = used
        self._seal(f"{self.kind} {self.rate}")
