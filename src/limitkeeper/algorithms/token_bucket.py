"""Token bucket: refills at a constant rate and admits bursts up to its size.

    taken(now) = max(0, taken(at) − gain · (now − at))        lazy refill: computed on each call, without a timer
    a cost fits when  taken + cost · unit ≤ full              unit: one token, full: burst tokens, gain: refill per tick

State: (at, taken, until). `taken` is the amount missing from a full bucket; a reservation of a later start makes it
larger than full, and the refill pays that debt. `until` is the time at which all charges with later starts are paid:
giving back an earlier charge must leave enough for them. A charge that has begun may look like the last of them: where the
state can't distinguish the two, less is given back. Refill first, then take. Worst case in any interval T: burst + rate · T.

Rejected: counting tokens upwards with a float (fractions are lost or invented), and moving `at` into the future for a
reservation (a clock that goes back would then look like a reservation and lock the key out).
"""

from __future__ import annotations

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..errors import InvalidLimit
from ..rate import Count, Duration, RateValue, whole

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.constants import NEVER, REFUSED, TOP
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit, State
else:
    from .constants import NEVER, REFUSED, TOP
    from .limit import I64, Answer, Limit, State


from .limit import option


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def decide(limit: Limit, at: I64, taken: I64, until: I64, now: I64, not_before: I64, cost: I64, max_wait: I64) -> Answer:
    level: I64 = taken
    elapsed: I64 = now - at
    if elapsed >= limit.drained:
        level = 0
    elif elapsed > 0:
        level = taken - elapsed * limit.gain
        if level < 0:
            level = 0
    verdict: I64 = REFUSED
    retry: I64 = now
    if cost > limit.capacity:
        verdict = NEVER
    else:
        need: I64 = cost * limit.unit
        wait: I64 = 0
        if level + need > limit.full:
            wait = (level + need - limit.full + limit.gain - 1) // limit.gain
        if not_before - now > wait:
            wait = not_before - now
        if max_wait > limit.horizon:
            max_wait = limit.horizon
        if wait <= max_wait:
            if wait > 0:
                lead: I64 = wait * limit.gain
                if lead > level:  # the bucket is full at that start
                    level = lead
                if until > now and (until - now) * limit.gain > lead:
                    lead = (until - now) * limit.gain
                until = now + (lead + need + limit.gain - 1) // limit.gain
            level += need
            return (
                now if elapsed > 0 else at,
                level,
                until if until > now else 0,
                now + wait,
                now,
                (limit.full - level) // limit.unit if level < limit.full else 0,
                now + (level if limit.even else (level + limit.gain - 1) // limit.gain),
            )
        retry = now + wait - max_wait
    return (
        at,
        taken,
        until,
        verdict,
        retry,
        (limit.full - level) // limit.unit if level < limit.full else 0,
        now + (level if limit.even else (level + limit.gain - 1) // limit.gain),
    )


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def give_back(limit: Limit, at: I64, taken: I64, until: I64, now: I64, cost: I64, charged: I64, charged_at: I64) -> State:
    elapsed: I64 = now - at
    if elapsed >= limit.drained:
        taken = 0
    elif elapsed > 0:
        taken -= elapsed * limit.gain
        if taken < 0:
            taken = 0
    if elapsed > 0:
        at = now
    if until <= now + (limit.unit + limit.gain - 1) // limit.gain:
        until = 0  # a token or less is unpaid: nothing is still to start
    if cost < 0:  # settled above its estimate: into debt
        if -cost > (TOP - taken) // limit.unit:
            return (at, TOP - (TOP - taken) % limit.unit, until)
        return (at, taken - cost * limit.unit, until)
    if cost > limit.capacity:
        cost = limit.capacity
    if charged > limit.capacity:
        charged = 0  # of another rate: charged here as debt, without a start
    back: I64 = cost * limit.unit
    ahead: I64 = charged_at - now
    if charged_at < 0:
        ahead = 0
    paid: I64 = charged_at + (charged * limit.unit + limit.gain - 1) // limit.gain
    if taken > limit.full and ahead > 0:
        # Go's CancelAt: what others reserved behind this start stays theirs; the rest of what is missing is debt. A charge that
        # has begun has none behind it in a queue: it is given back but for what is still to start.
        if ahead > limit.horizon:
            return (at, taken, until)
        behind: I64 = taken - ahead * limit.gain - limit.full
        if charged == 0 or until <= paid:  # no start behind it
            behind = 0
        elif behind > (until - paid) * limit.gain:
            behind = (until - paid) * limit.gain
        if behind > 0:
            back = back - behind if back > behind else 0
    if charged_at > now:
        if charged_at < until <= paid:  # the last start to come was this one; before it: this charge was made as debt
            until = charged_at + ((charged - cost) * limit.unit + limit.gain - 1) // limit.gain
    elif charged_at >= 0 and until == paid and taken - (until - now) * limit.gain <= limit.unit - limit.gain:
        until = 0  # the last start was this one, which has begun: with another to come, a token more would be missing
    floor: I64 = (until - now) * limit.gain if until > now else 0
    taken = taken - back if taken > back else 0
    return (at, taken if taken > floor else floor, until)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def used(limit: Limit, at: I64, taken: I64, _until: I64, now: I64) -> I64:
    elapsed: I64 = now - at
    if elapsed >= limit.drained:
        return 0
    if elapsed > 0:
        taken -= elapsed * limit.gain
    return (taken + limit.unit - 1) // limit.unit if taken > 0 else 0


@cython.cclass
class TokenBucket(Limit):
    """`TokenBucket("5/s burst 10")`: up to `burst` at once, `rate` in the long run.

    Args:
        rate: text ("5/s burst 10"), or a number with `per`.
        burst: the size of the bucket; by default the rate's count.
        initial: what every key holds when the limiter is created; by default `burst`.
        per: the period of a rate that is a number, as in `TokenBucket(5, per="1s")`.
    """

    __slots__ = ()
    kind = "token bucket"

    def __init__(
        self, rate: RateValue, burst: Count | None = None, initial: Count | None = None, *, per: Duration | None = None
    ) -> None:
        given = self._read(rate, per, ("burst", "initial"))
        size = option("burst", burst, given, rate)
        self.capacity = whole(self.count if size is None else size, "burst", rate)
        level = option("initial", initial, given, rate)
        self.initial = self.capacity if level is None else whole(level, "initial", rate, least=0)
        if self.initial > self.capacity:
            raise InvalidLimit(f"{rate!r}: initial must be at most burst ({self.capacity}), got {self.initial}")
        self._scale(self.capacity)
        self.ramp = (self.full - self.initial * self.unit + self.gain - 1) // self.gain
        self.rule = decide
        self.undo = give_back
        self.usage = used
        self.sums_later_starts = True
        words = f"{self.kind} {self.rate} burst {self.capacity}"
        self._seal(words if self.initial == self.capacity else f"{words} initial {self.initial}")

    @property
    def burst(self) -> int:
        return self.capacity


GCRA = TokenBucket
"""The same class under the name of its algorithm, the generic cell rate algorithm."""
