"""Hypothesis strategies: limits with awkward rates, and traces of steps that a `TracePlayer` plays on a limiter.

A trace is a list of small tuples, so that a failing one prints as something that can be pasted into a test. Times are
integer microseconds. `Until` moves the clock to the moment that the last decision named, or one microsecond off: errors are
at the edges.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

from hypothesis import strategies as st

from ..algorithms import ALGORITHMS, FixedWindow, LeakyBucket, LeakyBucketQueue, Limit, TokenBucket
from ..errors import InvalidLimit

P = ParamSpec("P")
T = TypeVar("T")
#: A key for every limit, or a tuple of one for each; None skips a limit.
StepKey = str | tuple[str | None, ...]
StepCost = int | tuple[int, ...]

HUGE = 10**30
DAY_US = 86_400_000_000

#: Rates that break arithmetic: fractions that never end, ticks coarser than a microsecond, the edges of the domain.
RATES = (
    *("5/s", "1/s", "2/s", "3/s", "10/min", "54/min", "7 per 3 hours", "10007/30d", "1234567/d", "1234567/s"),
    *("1/400d", "1000000000/ms", "3 per 7us", "2 per 1ms"),
)
SIZES = (1, 2, 3, 10, 1000)


Wait = namedtuple("Wait", "us")
#: Moves to the last decision's `retry`, `reset` or `wait`, plus `offset` microseconds.
Until = namedtuple("Until", "what offset")
Hit = namedtuple("Hit", "key cost")
Peek = namedtuple("Peek", "key cost")
HitMany = namedtuple("HitMany", "keys cost")
Acquire = namedtuple("Acquire", "key cost timeout_us")
Reserve = namedtuple("Reserve", "key cost max_wait_us")
#: These three concern one of the reservations, or of the allowed hits, made so far: 0 is the last, 1 the one before it, …
Cancel = namedtuple("Cancel", "back")
Settle = namedtuple("Settle", "back used")
Refund = namedtuple("Refund", "back")
Reset = namedtuple("Reset", "key")
Step = Wait | Until | Hit | Peek | HitMany | Acquire | Reserve | Cancel | Settle | Refund | Reset


# Limits ----------------------------------------------------------------------------------------------------------------


#: The options that an algorithm is tested with; the others have none.
OPTIONS: dict[type[Limit], list[dict[str, Any]]] = {
    TokenBucket: [{}, *({"burst": size, "initial": initial} for size in SIZES for initial in (None, 0, 1))],
    LeakyBucket: [{"capacity": size} for size in SIZES],
    LeakyBucketQueue: [{}, *({"capacity": size} for size in SIZES)],
    FixedWindow: [{}, {"align": "first"}],
}


def variants(algorithm: type[Limit], rate: str) -> Iterator[Limit]:
    """One algorithm at one rate with all options, except those that can't be counted exactly."""
    for options in OPTIONS.get(algorithm, [{}]):
        try:
            yield algorithm(rate, **options)  # type: ignore[call-arg]
        except InvalidLimit:
            pass


def fills_within_decades(limit: Limit) -> bool:
    """Whether it fills up within decades: beyond that, seconds as floats can't represent whole microseconds."""
    return limit.capacity * limit.period // limit.count < 20_000 * DAY_US or limit.capacity > 1000


#: Every algorithm, at every rate, with all options.
LIMITS: dict[type[Limit], list[Limit]] = {
    algorithm: [limit for rate in RATES for limit in variants(algorithm, rate) if fills_within_decades(limit)]
    for algorithm in dict.fromkeys(ALGORITHMS.values())
}


def limits(*algorithms: type[Limit]) -> st.SearchStrategy[Limit]:
    """A limit of one of these algorithms (default: of any)."""
    return st.sampled_from([limit for algorithm in algorithms or tuple(LIMITS) for limit in LIMITS[algorithm]])


# Steps -----------------------------------------------------------------------------------------------------------------


def cached(make: Callable[P, st.SearchStrategy[T]]) -> Callable[P, st.SearchStrategy[T]]:
    """Creates one strategy per argument list of limits: hypothesis takes one created anew for each example for a flaky one."""
    cached_make = lru_cache(maxsize=None)(make)

    @wraps(make)
    def find(*args: P.args, **kwargs: P.kwargs) -> st.SearchStrategy[T]:
        limits, *more = args
        return cached_make(tuple(limits), *more, **kwargs)  # type: ignore[arg-type]

    return find


@cached
def moments(some: Sequence[Limit]) -> st.SearchStrategy[int]:
    """Durations that matter to these limits: a tick, an interval, a window, several of them, and one microsecond off."""
    marks = {1}
    for limit in some:
        marks |= {limit.tick, limit.period // limit.count, limit.period // 2, limit.period, 2 * limit.period}
    near = st.builds(lambda mark, offset: max(0, mark + offset), st.sampled_from(sorted(marks)), st.sampled_from((-1, 0, 1)))
    return near | st.integers(0, 30) | st.integers(0, 3 * max(marks))


@cached
def costs(some: Sequence[Limit]) -> st.SearchStrategy[int]:
    sizes = sorted({size for limit in some for size in (limit.capacity - 1, limit.capacity, limit.capacity + 1)})
    return st.sampled_from((1, 1, 1, 2, 3, 0, *sizes, HUGE))


def time_steps(some: Sequence[Limit], backwards: bool) -> st.SearchStrategy[Step]:
    leaps = st.sampled_from((1000 * DAY_US, -1, -1_000_000, -DAY_US) if backwards else (1000 * DAY_US,))
    until = st.builds(Until, st.sampled_from(("retry", "retry", "wait", "reset")), st.sampled_from((-1, 0, 0, 1)))
    return until | until | st.builds(Wait, moments(some)) | st.builds(Wait, moments(some)) | st.builds(Wait, leaps)


def charging_steps(
    some: Sequence[Limit], keys: st.SearchStrategy[StepKey], cost: st.SearchStrategy[StepCost]
) -> st.SearchStrategy[Step]:
    waits = st.none() | moments(some) | moments(some)
    takes: list[st.SearchStrategy[Step]] = [st.builds(Hit, keys, cost), st.builds(Hit, keys, cost), st.builds(Peek, keys, cost)]
    takes += [st.builds(Reserve, keys, cost, waits), st.builds(Reserve, keys, cost, waits)]
    takes += [st.builds(Acquire, keys, cost, waits), st.builds(HitMany, st.lists(keys, max_size=4).map(tuple), costs(some))]
    return st.one_of(takes)


def give_back_steps(some: Sequence[Limit], keys: st.SearchStrategy[StepKey]) -> st.SearchStrategy[Step]:
    back = st.sampled_from((0, 0, 1, 2, 3))
    gives: list[st.SearchStrategy[Step]] = [
        st.builds(Cancel, back),
        st.builds(Cancel, back),
        st.builds(Settle, back, st.integers(0, 12)),
    ]
    if all(limit.refunds for limit in some):
        gives.append(st.builds(Refund, back))
    return st.one_of(*gives, st.builds(Reset, keys))


@cached
def traces(
    some: Sequence[Limit], several_keys: bool = False, backwards: bool = False, gives: bool = True, max_size: int = 25
) -> st.SearchStrategy[list[Step]]:
    """Traces for a limiter of these limits. With several keys and limits, each limit may have its own key and cost."""
    keys: st.SearchStrategy[StepKey] = st.sampled_from("ab") if several_keys else st.just("a")
    cost: st.SearchStrategy[StepCost] = costs(some)
    if len(some) > 1 and several_keys:
        keys = keys | st.tuples(*[st.sampled_from(("a", "b", None)) for _ in some])
        cost = cost | st.tuples(*[costs([limit]) for limit in some])
    charging = charging_steps(some, keys, cost)
    step = charging | charging | time_steps(some, backwards)
    return st.lists(step | give_back_steps(some, keys) if gives else step, max_size=max_size)
