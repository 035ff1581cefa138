"""Limit: the base class of all limits, frozen integers with three pure functions: `decide`, `give_back` and `used`.

`decide(limit, a, b, c, now, not_before, cost, max_wait) -> (a', b', c', start, retry_at, remaining, reset_at)`
    finds the earliest `start ≥ max(now, not_before)` at which the whole cost fits, and charges it at that start
    when `start − now ≤ max_wait`. Otherwise `start` is REFUSED or NEVER, the state is returned unchanged, and
    `retry_at` is the first time at which the same call would be accepted.
`give_back(limit, a, b, c, now, cost, charged, charged_at) -> (a', b', c')`
    removes `cost` of a charge of `charged` that was made at `charged_at` (UNKNOWN: from the latest charges); a negative
    cost charges more even when the limit is exceeded, which settles a reservation above its estimate.
`used(limit, a, b, c, now) -> units`
    the units that a state holds as used at `now`, rounded up, debt and reservations of later starts included: what another
    rate under the same name starts with (`all_of.seeded`).

Time is counted in ticks of 1, 10, 100 … µs, the smallest for which every product stays below 2^53 (Lua's doubles agree bit for
bit). A rate of `count` per `period` is kept as `gain` per tick against `unit` per token, reduced by their gcd: 3/s is 3 against
1 000 000 and no fraction is lost. The state is three integers whose meaning each algorithm defines; a state equal to that of an
unseen key may be dropped. `sums_later_starts`: the third integer grows with every charge that has a later start; a charge that is
given back while it is as this charge left it is given back from the one before (`future_charges.py`).

Rejected: one float per key (two machines round it differently), and absolute GCRA times scaled by the count (1.8e15 µs times a
count exceed 2^53).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..errors import ConfigurationError, InvalidLimit
from ..rate import Duration, Rate, RateValue, period_text, read_rate
from .constants import TOP

if not cython.compiled:
    I64 = int
    State = tuple[int, int, int]
    Answer = tuple[int, int, int, int, int, int, int]

#: The longest time that a state may last: 2^63 µs, less 3900 years for the time on the clock.
LONGEST_US = 91 * 10**17
#: A state as plain data: three integers, or the (moment, cost) entries of a log and two zeros.
StateData = tuple[Any, int, int]
#: What `Limit.decide` returns: the new state, then start, retry_at, remaining and reset_at.
Result = tuple[Any, int, int, int, int, int, int]


@cython.cclass
class Limit:
    """Base class of TokenBucket, LeakyBucket, LeakyBucketQueue, FixedWindow, SlidingWindowLog and SlidingWindowCounter."""

    # fmt: off
    __slots__ = ("_sealed", "aligned", "bounded", "capacity", "count", "drained", "even", "fine", "full", "gain", "horizon",
                 "initial", "logs", "period", "ramp", "rate", "refunds", "reserves", "rule", "sums_later_starts", "text", "tick",
                 "undo", "unit", "usage", "window")
    # fmt: on

    def __init__(self) -> None:
        raise TypeError("Limit is an abstract base class; use TokenBucket, FixedWindow, SlidingWindowLog, …")

    def _read(self, rate: RateValue, per: Duration | None, options: tuple[str, ...] = ()) -> dict[str, int | str]:
        """Parses the rate and sets the fields that all limits have; returns the options found in the text."""
        if isinstance(rate, str) and rate.strip().lower().startswith(self.kind + " "):
            rate = rate.strip()[len(self.kind) :]
        found, given = read_rate(rate, per, options)
        self.rate = found
        self.count, self.period = found.count, found.period
        self.tick = 1
        self.window = self.period
        self.capacity = self.initial = self.count
        self.gain = self.unit = self.full = self.horizon = self.drained = self.ramp = 0
        self.reserves = self.refunds = True
        self.logs = self.aligned = self.bounded = self.sums_later_starts = False
        if not cython.compiled:
            self.rule: Callable[..., Answer]
            self.undo: Callable[..., State]
            self.usage: Callable[..., int]
        return given

    def _scale(self, tokens: int) -> None:
        """Sets tick, gain and unit such that this number of tokens, times `unit`, stays below 2^52."""
        size: int = int(tokens)
        count: int = int(self.count)
        period: int = int(self.period)
        tick: int = 1
        while True:
            shared = gcd(count, period // tick)
            unit = period // tick // shared
            if size * unit <= TOP // 2:
                break
            tick *= 10
            if period % tick:
                raise InvalidLimit(does_not_fit(self, size, TOP // 2))
        gain: int = count // shared
        if (TOP // gain + 1) * tick > LONGEST_US:
            near = Rate(count, TOP // 2 // size * 1000)
            raise InvalidLimit(f"{self.rate} with {size}: takes too many thousand years to fill; a limit that fits is {near}")
        self.tick, self.gain, self.unit = tick, gain, unit
        self.full = size * unit
        self.drained = TOP // gain + 1
        self.horizon = (TOP - size * unit - gain) // gain

    def _seal(self, text: str) -> None:
        """Freezes the limit. `fine` (tick == 1) and `even` (gain == 1) let the hot path skip a division."""
        self.text = text
        self.fine = self.tick == 1
        self.even = self.gain == 1
        if not cython.compiled:
            self._sealed = True

    def decide(self, state: StateData, now: int, cost: int = 1, max_wait: int = 0, not_before: int = 0) -> Result:
        """Calls the algorithm directly, in ticks, for simulators and tests. `state` is three integers."""
        a, b, c = state
        return self.rule(self, a, b, c, now, max(now, not_before), cost, max_wait)

    def give_back(self, state: StateData, now: int, cost: int, charged_at: int, charged: int = -1) -> StateData:
        """Removes a charge from a state directly, in ticks."""
        a, b, c = state
        return self.undo(self, a, b, c, now, cost, cost if charged < 0 else charged, charged_at)

    def used(self, state: StateData, now: int) -> int:
        """The units that a state holds as used at `now`, in ticks."""
        a, b, c = state
        return self.usage(self, a, b, c, now)

    def new(self, birth_us: int = 0) -> StateData:
        """The state of an unseen key in a store where the limit was registered at `birth_us`."""
        return self.unseen(birth_us)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def unseen(self, birth_us: cython.longlong) -> State:
        if self.ramp > 0:
            return (birth_us // self.tick, self.full - self.initial * self.unit, 0)
        return (0, 0, 0)

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_sealed", cython.compiled):
            raise AttributeError(f"{type(self).__name__} is frozen: can't set {name!r}; create a new limit")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: can't delete {name!r}")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Limit):
            return type(self) is type(other) and str(self) == str(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.text))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text.removeprefix(self.kind).strip()!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text.removeprefix(self.kind).strip(),)

    def __copy__(self) -> Limit:
        return self

    def __deepcopy__(self, memo: object) -> Limit:
        return self

    #: The name of the algorithm in a limit's text.
    kind = ""


def option(name: str, argument: object, given: dict[str, int | str], text: object) -> object:
    """The value of an option given in the text or as an argument; raises InvalidLimit when given in both."""
    if argument is not None and name in given:
        raise InvalidLimit(f"{text!r} with {name}={argument!r}: duplicate option {name!r}; give it once")
    return given.get(name) if argument is None else argument


def does_not_fit(limit: Limit, size: int, most: int) -> str:
    """The error message for a limit beyond exact integers; it names the nearest limit that fits (a period in coarser ticks)."""
    tick: int = 10
    period: int = int(limit.period)
    while size * (period // tick) > most:
        tick *= 10
    ticks = max(1, (period + tick // 2) // tick)
    if size * ticks > most:
        ticks -= 1
    near = Rate(int(limit.count), ticks * tick)
    return (
        f"{limit.rate} with {size}: can't be counted exactly in 53 bits; "
        f"the nearest limit that fits is {near} (a period in whole {period_text(tick)})"
    )


def refuse_refund(limit: Limit) -> None:
    """Raises ConfigurationError for a limit that takes no refunds."""
    if not limit.refunds:
        raise ConfigurationError(
            f"{limit}: a leaky bucket queue can't be refunded after the start; cancel the reservation instead"
        )


__all__ = ["Duration", "Limit"]
