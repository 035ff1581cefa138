"""Law 3 as a check: the upper bound of what each algorithm may admit, in exact fractions.

`admitted` is a list of (start, cost), `returned` a list of (moment, cost), both in ticks of the limit. A charge that was
cancelled before its start was never admitted. What was given back within an interval is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial

from ..algorithms import FixedWindow, LeakyBucket, LeakyBucketQueue, Limit, SlidingWindowCounter, SlidingWindowLog, TokenBucket

Costs = Sequence[tuple[int, int]]


def between(costs: Costs, first: int, last: int) -> int:
    """The cost in the closed interval [first, last]."""
    return sum(cost for moment, cost in costs if first <= moment <= last)


def intervals(admitted: Costs) -> Iterator[tuple[int, int]]:
    """Every closed interval that begins and ends with a start; no other contains more."""
    moments = sorted({start for start, _ in admitted})
    return ((first, last) for i, first in enumerate(moments) for last in moments[i:])


def bucket(limit: Limit, admitted: Costs, returned: Costs) -> None:
    """burst + rate · T in any interval T; one tick more after a give-back (a start is a whole tick)."""
    rate = Fraction(limit.count * limit.tick, limit.period)
    for first, last in intervals(admitted):
        taken = between(admitted, first, last) - between(returned, first, last)
        most = limit.capacity + rate * (last - first + bool(returned))
        assert taken <= most, f"{limit}: {taken} admitted in [{first}, {last}], at most {float(most)}"


def queue(limit: Limit, admitted: Costs, returned: Costs) -> None:
    """A start occupies its cost, to the tick: at most one start more than rate · T."""
    rate = Fraction(limit.count * limit.tick, limit.period)
    for first, last in intervals(admitted):
        before = between(admitted, first, last - 1) - between(returned, first, last)
        most = rate * (last - first + 1)
        assert before <= most, f"{limit}: {before} started in [{first}, {last}), and another at {last}; at most {float(most)}"


def any_window(limit: Limit, admitted: Costs, returned: Costs, times: int = 1) -> None:
    """`times` the count in every half-open window (t − W, t]."""
    window = limit.period // limit.tick
    for last in {start for start, _ in admitted}:
        taken = between(admitted, last - window + 1, last) - between(returned, last - window + 1, last)
        assert taken <= times * limit.count, f"{limit}: {taken} admitted in the window that ends at {last}"


def aligned_window(limit: Limit, admitted: Costs, returned: Costs) -> None:
    """The count in every aligned window; twice the count in any window."""
    any_window(limit, admitted, returned, 2)
    window = limit.period // limit.tick
    for first in {start - start % window for start, _ in admitted} if limit.aligned else ():
        taken = between(admitted, first, first + window - 1) - between(returned, first, first + window - 1)
        assert taken <= limit.count, f"{limit}: {taken} admitted in the window that begins at {first}"


BOUNDS: dict[type[Limit], Callable[[Limit, Costs, Costs], None]] = {
    TokenBucket: bucket,
    LeakyBucket: bucket,
    LeakyBucketQueue: queue,
    FixedWindow: aligned_window,
    SlidingWindowLog: any_window,
    SlidingWindowCounter: partial(any_window, times=2),
}


def check_bound(limit: Limit, admitted: Costs, returned: Costs = ()) -> None:
    """Fails when the limit admitted more than its bound."""
    BOUNDS[type(limit)](limit, admitted, returned)
