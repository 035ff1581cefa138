"""Leaky bucket as a meter: every request adds water, which drains at the rate; a request that would overflow is refused.

    water(now) = max(0, water(at) − rate · (now − at))        a cost fits when  water + cost ≤ capacity

It mirrors the token bucket: water equals the tokens missing. So it uses the same functions, with the same state and the
same results on every trace; only the parameters differ in name. Worst case in any interval T: capacity + rate · T.
"""

from __future__ import annotations

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..errors import InvalidLimit
from ..rate import Count, Duration, RateValue, whole

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.limit import Limit
else:
    from .limit import Limit

from .limit import option
from .token_bucket import TokenBucket


@cython.cclass
class LeakyBucket(Limit):
    """`LeakyBucket("5/s", capacity=10)`: a meter that admits while water + cost ≤ capacity.

    Args:
        rate: how fast the water drains: text ("5/s capacity 10"), or a number with `per`.
        capacity: how much the bucket holds.
        per: the period of a rate that is a number, as in `LeakyBucket(5, per="1s")`.
    """

    __slots__ = ()
    kind = "leaky bucket"

    def __init__(self, rate: RateValue, capacity: Count | None = None, *, per: Duration | None = None) -> None:
        given = self._read(rate, per, ("capacity",))
        size = option("capacity", capacity, given, rate)
        if size is None:
            raise InvalidLimit(f'{rate!r}: a leaky bucket needs a capacity; write "5/s capacity 10" or capacity=10')
        self.capacity = self.initial = whole(size, "capacity", rate)
        self._scale(self.capacity)
        twin: Limit = TokenBucket(self.rate, self.capacity)
        self.rule = twin.rule
        self.undo = twin.undo
        self.usage = twin.usage
        self.sums_later_starts = True
        self._seal(f"{self.kind} {self.rate} capacity {self.capacity}")
