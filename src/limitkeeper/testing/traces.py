"""What can happen to a limiter, as data: awkward limits, and traces of steps for `limitkeeper.testing.player` to play.

A trace is a list of small tuples, so that a failing one prints as something that can be pasted into a test. Times are
integer microseconds. `Until` moves the clock to what the last decision promised, or one microsecond beside it: promises
break at their edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple

from hypothesis import strategies as st

from ..algorithms import ALGORITHMS, FixedWindow, LeakyBucket, LeakyBucketQueue, Limit, TokenBucket
from ..errors import InvalidLimit

HUGE = 10**30
DAY_US = 86_400_000_000

#: Rates that break arithmetic: fractions that never end, ticks coarser than a microsecond, the edges of the domain.
RATES = (
    "5/s",
    "1/s",
    "2/s",
    "3/s",
    "10/min",
    "54/min",
    "7 per 3 hours",
    "10007/30d",
    "1234567/d",
    "1234567/s",
    "1/400d",
    "1000000000/ms",
    "3 per 7us",
    "2 per 1ms",
)
SIZES = (1, 2, 3, 10, 1000)


class Wait(NamedTuple):
    us: int


class Until(NamedTuple):
    """Moves to the last decision's `retry`, `reset` or `wait`, and `beside` microseconds more."""

    what: str
    beside: int


class Hit(NamedTuple):
    key: Any
    cost: Any


class Peek(NamedTuple):
    key: Any
    cost: Any


class HitMany(NamedTuple):
    keys: tuple[Any, ...]
    cost: int


class Acquire(NamedTuple):
    key: Any
    cost: Any
    timeout_us: int | None


class Reserve(NamedTuple):
    key: Any
    cost: Any
    max_wait_us: int | None


class Cancel(NamedTuple):
    """Cancels one of the reservations made so far: the last is 0, the one before it 1, …"""

    back: int


class Settle(NamedTuple):
    back: int
    used: int


class Refund(NamedTuple):
    """Refunds one of the hits allowed so far, counted as the reservations are."""

    back: int


class Reset(NamedTuple):
    key: Any


Step = Wait | Until | Hit | Peek | HitMany | Acquire | Reserve | Cancel | Settle | Refund | Reset


# Limits ----------------------------------------------------------------------------------------------------------------


def shapes(algorithm: type[Limit]) -> list[dict[str, Any]]:
    """The options that a rule is tried with."""
    if algorithm is TokenBucket:
        return [{}, *({"burst": size, "initial": initial} for size in SIZES for initial in (None, 0, 1))]
    if algorithm is LeakyBucket:
        return [{"capacity": size} for size in SIZES]
    if algorithm is LeakyBucketQueue:
        return [{}, *({"capacity": size} for size in SIZES)]
    return [{}, {"align": "first"}] if algorithm is FixedWindow else [{}]


def made(algorithm: type[Limit], rate: str) -> Iterator[Limit]:
    """Every shape of one rule at one rate, but for those that can't be counted exactly."""
    for options in shapes(algorithm):
        try:
            yield algorithm(rate, **options)  # type: ignore[call-arg]
        except InvalidLimit:
            pass


def within_a_life(limit: Limit) -> bool:
    """Whether it fills up within some decades: beyond that, seconds as floats no longer hold whole microseconds."""
    return limit.capacity * limit.period // limit.count < 20_000 * DAY_US or limit.capacity > 1000


#: Every rule, at every rate, in every shape.
LIMITS: dict[type[Limit], list[Limit]] = {
    algorithm: [limit for rate in RATES for limit in made(algorithm, rate) if within_a_life(limit)]
    for algorithm in dict.fromkeys(ALGORITHMS.values())
}


def limits(*algorithms: type[Limit]) -> st.SearchStrategy[Limit]:
    """A limit of one of these rules (of any)."""
    return st.sampled_from([limit for algorithm in algorithms or tuple(LIMITS) for limit in LIMITS[algorithm]])


# Steps -----------------------------------------------------------------------------------------------------------------


def kept(make: Callable[..., st.SearchStrategy[Any]]) -> Callable[..., Any]:
    """One strategy per limits, made once: hypothesis takes a strategy that is made anew for each example for a flaky one."""
    made_once = lru_cache(maxsize=None)(make)

    @wraps(make)
    def find(some: Sequence[Limit], *args: Any, **kwargs: Any) -> st.SearchStrategy[Any]:
        return made_once(tuple(some), *args, **kwargs)

    return find


@kept
def moments(some: Sequence[Limit]) -> st.SearchStrategy[int]:
    """Lengths of time that matter to these limits: a tick, an interval, a window, several of them, and one beside."""
    marks = {1}
    for limit in some:
        marks |= {limit.tick, limit.period // limit.count, limit.period // 2, limit.period, 2 * limit.period}
    near = st.builds(lambda mark, beside: max(0, mark + beside), st.sampled_from(sorted(marks)), st.sampled_from((-1, 0, 1)))
    return near | st.integers(0, 30) | st.integers(0, 3 * max(marks))


@kept
def costs(some: Sequence[Limit]) -> st.SearchStrategy[int]:
    sizes = sorted({size for limit in some for size in (limit.capacity - 1, limit.capacity, limit.capacity + 1)})
    return st.sampled_from((1, 1, 1, 2, 3, 0, *sizes, HUGE))


def times(some: Sequence[Limit], backwards: bool) -> st.SearchStrategy[Step]:
    leaps = st.sampled_from((1000 * DAY_US, -1, -1_000_000, -DAY_US) if backwards else (1000 * DAY_US,))
    until = st.builds(Until, st.sampled_from(("retry", "retry", "wait", "reset")), st.sampled_from((-1, 0, 0, 1)))
    return until | until | st.builds(Wait, moments(some)) | st.builds(Wait, moments(some)) | st.builds(Wait, leaps)


def takings(some: Sequence[Limit], keys: st.SearchStrategy[Any], cost: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    waits = st.none() | moments(some) | moments(some)
    takes: list[st.SearchStrategy[Step]] = [st.builds(Hit, keys, cost), st.builds(Hit, keys, cost), st.builds(Peek, keys, cost)]
    takes += [st.builds(Reserve, keys, cost, waits), st.builds(Reserve, keys, cost, waits)]
    takes += [st.builds(Acquire, keys, cost, waits), st.builds(HitMany, st.lists(keys, max_size=4).map(tuple), costs(some))]
    return st.one_of(takes)


def givings(some: Sequence[Limit], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    back = st.sampled_from((0, 0, 1, 2, 3))
    gives: list[st.SearchStrategy[Step]] = [
        st.builds(Cancel, back),
        st.builds(Cancel, back),
        st.builds(Settle, back, st.integers(0, 12)),
    ]
    if all(limit.refunds for limit in some):
        gives.append(st.builds(Refund, back))
    return st.one_of(*gives, st.builds(Reset, keys))


@kept
def traces(
    some: Sequence[Limit], several_keys: bool = False, backwards: bool = False, gives: bool = True, max_size: int = 25
) -> st.SearchStrategy[list[Step]]:
    """Traces for a limiter of these limits. With several keys and limits, each limit may have its own key and cost."""
    keys: st.SearchStrategy[Any] = st.sampled_from("ab") if several_keys else st.just("a")
    cost: st.SearchStrategy[Any] = costs(some)
    if len(some) > 1 and several_keys:
        keys = keys | st.tuples(*[st.sampled_from(("a", "b", None)) for _ in some])
        cost = cost | st.tuples(*[costs([limit]) for limit in some])
    taking, passing = takings(some, keys, cost), times(some, backwards)
    step = taking | taking | passing
    return st.lists(step | givings(some, keys) if gives else step, max_size=max_size)
