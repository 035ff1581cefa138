"""Checks that no interval admits more than the upper bound of each algorithm, in exact fractions (law 3).

`admitted` is a list of (start, cost), `returned` a list of (moment, cost), both in ticks of the limit. A charge that was
cancelled before its start was never admitted. What was given back within an interval is subtracted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from math import floor

from ..algorithms import FixedWindow, LeakyBucket, LeakyBucketQueue, Limit, SlidingWindowCounter, SlidingWindowLog, TokenBucket

Costs = Sequence[tuple[int, int]]
Extra = Fraction | int


def between(costs: Costs, first: int, last: int) -> int:
    """The cost in the closed interval [first, last]."""
    return sum(cost for moment, cost in costs if first <= moment <= last)


def intervals(admitted: Costs) -> Iterator[tuple[int, int]]:
    """Every closed interval that begins and ends with a start; no other contains more."""
    moments = sorted({start for start, _ in admitted})
    return ((first, last) for i, first in enumerate(moments) for last in moments[i:])


def net_by_moment(admitted: Costs, returned: Costs) -> list[tuple[int, int, int]]:
    """(moment, admitted, admitted − returned) in order of time."""
    found: dict[int, list[int]] = {}
    for sign, costs in ((1, admitted), (-1, returned)):
        for moment, cost in costs:
            pair = found.setdefault(moment, [0, 0])
            pair[0] += cost if sign > 0 else 0
            pair[1] += sign * cost
    return [(moment, *found[moment]) for moment in sorted(found)]  # type: ignore[misc]


def bucket(limit: Limit, admitted: Costs, returned: Costs, extra: Extra = 0) -> None:
    """burst + rate · T in any interval T; one tick more after a give-back (a start is a whole tick).

    `most` is the largest sum of cost − rate · T over all intervals that end here: one pass instead of all pairs of moments.
    """
    gain, unit = limit.count * limit.tick, limit.period  # per tick, and of one: in whole numbers
    allowed = floor((limit.capacity + extra) * unit) + gain * bool(returned)
    most, first, last = -1, 0, 0
    for moment, cost, net in net_by_moment(admitted, returned):
        most -= gain * (moment - last)
        if most < 0 and cost:  # no interval that began before contains more than one that begins here
            most, first = 0, moment
        most, last = most + net * unit, moment
        if cost and most > allowed:
            taken, at_most = most + gain * (last - first), allowed + gain * (last - first)
            raise AssertionError(f"{limit}: {taken / unit:g} admitted in [{first}, {last}], at most {at_most / unit:.3f}")


def queue(limit: Limit, admitted: Costs, returned: Costs, extra: Extra = 0) -> None:
    """A start occupies its cost, to the tick: at most one start more than rate · T."""
    rate = Fraction(limit.count * limit.tick, limit.period)
    for first, last in intervals(admitted):
        before = between(admitted, first, last - 1) - between(returned, first, last)
        most = rate * (last - first + 1) + extra
        assert before <= most, f"{limit}: {before} started in [{first}, {last}), and another at {last}; at most {float(most)}"


def any_window(limit: Limit, admitted: Costs, returned: Costs, extra: Extra = 0, times: int = 1) -> None:
    """`times` the count in every half-open window (t − W, t]."""
    window = limit.period // limit.tick
    net, oldest, taken = net_by_moment(admitted, returned), 0, 0
    for last, cost, change in net:
        taken += change
        while net[oldest][0] <= last - window:
            taken -= net[oldest][2]
            oldest += 1
        assert not cost or taken <= times * limit.count + extra, (
            f"{limit}: {taken} admitted in the window that ends at {last}, at most {float(times * limit.count + extra)}"
        )


def aligned_window(limit: Limit, admitted: Costs, returned: Costs, extra: Extra = 0) -> None:
    """The count in every aligned window; twice the count in any window."""
    any_window(limit, admitted, returned, extra, 2)
    window, taken = limit.period // limit.tick, Counter[int]()
    for moment, _, net in net_by_moment(admitted, returned) if limit.aligned else ():
        taken[moment - moment % window] += net
    for first, cost in taken.items():
        assert cost <= limit.count + extra, f"{limit}: {cost} admitted in the window that begins at {first}"


BOUNDS: dict[type[Limit], Callable[..., None]] = {
    TokenBucket: bucket,
    LeakyBucket: bucket,
    LeakyBucketQueue: queue,
    FixedWindow: aligned_window,
    SlidingWindowLog: any_window,
    SlidingWindowCounter: partial(any_window, times=2),
}


def check_bound(limit: Limit, admitted: Costs, returned: Costs = (), extra: Extra = 0) -> None:
    """Fails when the limit admitted more than its bound and `extra`."""
    BOUNDS[type(limit)](limit, admitted, returned, extra)
