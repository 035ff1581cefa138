"""Fixed window: one counter per window, reset to zero when the window ends.

    a cost fits when  used + cost ≤ count                      windows of W on the Unix epoch, or from the first request

State: (window, used, before): the start of the last window charged, the units used in it, and the units used in the
window before it (−1: unknown, assumed full; −2: unknown, more than one window ago; −3: nothing). A cost that does not fit
goes *whole* into the next window, and later calls are refused until then, so that they do not overtake it. `before`
restores the state when a reservation is cancelled.
Worst case in any interval of W: 2 × count (the double burst at the boundary).
"""

from __future__ import annotations

from typing import Literal

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..errors import InvalidLimit
from ..rate import Duration, RateValue

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.constants import NEVER, REFUSED, TOP
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit, State
else:
    from .constants import NEVER, REFUSED, TOP
    from .limit import I64, Answer, Limit, State


from .limit import option

Align = Literal["clock", "first"]


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def window_of(limit: Limit, window: I64, used: I64, moment: I64) -> I64:
    """The start of the window that contains `moment`; an unaligned window opens at `moment` when none is running."""
    if limit.aligned:
        return moment - moment % limit.window
    if used > 0 and moment < window + limit.window:
        return window
    return moment


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def used_before(limit: Limit, window: I64, used: I64, opened: I64, now: I64) -> I64:
    """`before` of a window that opens at `opened`, when `window` was the last one charged."""
    if opened == window + limit.window:
        return used
    if window + limit.window <= now or used == 0:
        return -3
    return -1 if window > now else -2  # a gap: the use of the old window is no longer known


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def decide(limit: Limit, window: I64, used: I64, before: I64, now: I64, not_before: I64, cost: I64, max_wait: I64) -> Answer:
    size: I64 = limit.window
    verdict: I64 = REFUSED
    retry: I64 = now
    if cost > limit.count:
        verdict = NEVER
    else:
        start: I64 = not_before if not_before > now else now
        if start < window:  # a later window is reserved: start there
            start = window
        opened: I64 = window_of(limit, window, used, start)
        filled: I64 = used
        past: I64 = before
        if opened != window:
            past = used_before(limit, window, used, opened, now)
            filled = 0
        if filled + cost > limit.count:
            past = filled
            opened += size
            start = opened
            filled = 0
        if start - now <= max_wait:
            filled += cost
            return (
                opened,
                filled,
                past,
                start,
                now,
                limit.count - filled if opened <= now and filled < limit.count else 0,
                opened + size if filled > 0 else now,
            )
        retry = start - max_wait
    left: I64 = limit.count
    reset: I64 = now
    if used > 0 and now < window + size:
        reset = window + size
        left = limit.count - used if used < limit.count else 0
        if now < window:
            left = 0
    return (window, used, before, verdict, retry, left, reset)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def give_back(limit: Limit, window: I64, used: I64, before: I64, now: I64, cost: I64, charged: I64, charged_at: I64) -> State:
    size: I64 = limit.window
    if cost < 0:  # settled above its estimate: charge the current window, even above its count
        if -cost > TOP // 4:
            cost = -(TOP // 4)
        # What another rate has admitted (`charged` is 0) is charged in the window of its start.
        start: I64 = charged_at if charged == 0 and charged_at > now else now
        if start >= window + size or used == 0:
            opened: I64 = window_of(limit, window, used, start)
            return (opened, -cost, used_before(limit, window, used, opened, now) if opened > now else 0)
        if window > start and window - size <= start and before != -1 and before != -2:
            if before < 0:
                before = 0
            return (window, used, before - cost if before < TOP // 2 else before)
        return (window, used - cost if used < TOP // 2 else used, before)
    if charged_at < 0:
        charged_at = now
    if charged_at >= window and charged_at < window + size and now < window + size:
        used = used - cost if used > cost else 0
        while used == 0 and window > now:  # the reserved window is empty again: restore the one before it that is not
            if before == -3:
                return (0, 0, 0)
            if before == -2:
                return (now - now % size if limit.aligned else now, limit.count, 0)
            window -= size
            used = before if before >= 0 else limit.count
            before = 0 if window <= now else -1
    elif before > 0 and charged_at < window and charged_at >= window - size and now < window:
        before = before - cost if before > cost else 0
    return (window, used, before)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def used(limit: Limit, window: I64, filled: I64, before: I64, now: I64) -> I64:
    if now >= window + limit.window:
        return 0
    if now >= window or before == -3:
        return filled
    if before < 0:
        return filled + limit.count
    # A later window is reserved: the one before it counts too, and those between it and the present one as full.
    between: I64 = (window - now - 1) // limit.window
    filled += before
    return TOP if between > (TOP - filled) // limit.count else filled + between * limit.count


@cython.cclass
class FixedWindow(Limit):
    """`FixedWindow("1000/min")`: at most `count` per window.

    Args:
        rate: text ("1000/min"), or a number with `per`.
        align: "clock" (the default) aligns windows to the clock, UTC; "first" starts a window at its first request.
        per: the period of a rate that is a number, as in `FixedWindow(5, per="1s")`.
    """

    __slots__ = ()
    kind = "fixed window"

    def __init__(self, rate: RateValue, align: Align | None = None, *, per: Duration | None = None) -> None:
        given = self._read(rate, per, ("align",))
        chosen = option("align", align, given, rate)
        if chosen not in (None, "clock", "first"):
            raise InvalidLimit(f"{rate!r}: align must be 'clock' or 'first', got {chosen!r}")
        self.aligned = chosen != "first"
        self.rule = decide
        self.undo = give_back
        self.usage = used
        words = f"{self.kind} {self.rate}"
        self._seal(words if self.aligned else f"{words} align first")
