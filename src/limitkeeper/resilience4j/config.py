"""RateLimiterConfig: how many permissions, how often, how long to wait. Frozen, comparable, checked on creation.

`limit_for_period` permissions grow evenly over `limit_refresh_period`, up to `permit_capacity` of them. As a token bucket:

    rate = limit_for_period / limit_refresh_period      burst = permit_capacity      initial = initial_permits

Periods are whole nanoseconds, limitkeeper's are whole microseconds: count and period are multiplied by the same number until
both are whole. 50 per 500 ns are 100 per 1 µs, 7 per 333 ns are 7000 per 333 µs; nothing is rounded. Rejected: whole
nanoseconds per permission (3 per second would lose a third of a nanosecond with each of them).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from functools import partial
from math import ceil, gcd
from typing import Any, NamedTuple

from ..algorithms import TokenBucket
from ..algorithms.constants import MAX_WAIT
from ..errors import InvalidLimit
from ..rate import MAX_COUNT, UNITS, Duration, Rate, exact_us

_NANOS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:ns|nanos|nanoseconds?)\s*", re.I)


class Outcome(NamedTuple):
    """How a call ended: what it returned, or the exception that it raised."""

    result: Any = None
    error: BaseException | None = None


Predicate = Callable[[Outcome], object]


@dataclass(frozen=True, init=False)
class RateLimiterConfig:
    """The configuration of a RateLimiter.

    Durations are seconds, a timedelta, or text ("250ms", "500ns"); they are read back as text. `permit_capacity` is never
    below `limit_for_period`, which is also its default and that of `initial_permits`. `drain_permissions_on_result` is called
    with every decorated call's Outcome: true drains all permissions (a server answered 429).
    """

    limit_for_period: int
    limit_refresh_period: str
    timeout_duration: str
    permit_capacity: int
    initial_permits: int
    drain_permissions_on_result: Predicate | None
    _given: dict[str, Any] = field(init=False, repr=False, compare=False)
    #: The same as a limitkeeper limit.
    limit: TokenBucket = field(init=False, repr=False, compare=False)
    #: The longest wait, in whole microseconds.
    timeout_us: int = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        limit_for_period: int = 50,
        limit_refresh_period: Duration = "500ns",
        timeout_duration: Duration = "5s",
        permit_capacity: int | None = None,
        initial_permits: int | None = None,
        drain_permissions_on_result: Predicate | None = None,
    ) -> None:
        given = dict(locals())
        del given["self"]
        count = _whole("limit_for_period", limit_for_period, 1)
        period_ns = _period_ns(limit_refresh_period)
        timeout_ns = ceil(_nanoseconds("timeout_duration", timeout_duration))
        if timeout_ns < 0:
            raise InvalidLimit(f"timeout_duration={timeout_duration!r}: must not be negative; write 0 or more")
        capacity = max(count, 0 if permit_capacity is None else _whole("permit_capacity", permit_capacity, 0))
        initial = count if initial_permits is None else _whole("initial_permits", initial_permits, 0)
        if initial > capacity:
            raise InvalidLimit(f"initial_permits={initial} must be at most the permit_capacity, {capacity}")
        if drain_permissions_on_result is not None and not callable(drain_permissions_on_result):
            raise TypeError(f"drain_permissions_on_result must be a function of an Outcome, got {drain_permissions_on_result!r}")
        vars(self).update(  # the fields are frozen
            limit_for_period=count,
            limit_refresh_period=_text(period_ns),
            timeout_duration=_text(timeout_ns),
            permit_capacity=capacity,
            initial_permits=initial,
            drain_permissions_on_result=drain_permissions_on_result,
            _given=given,
            limit=TokenBucket(_rate(count, period_ns), burst=capacity, initial=initial),
            timeout_us=min(MAX_WAIT, -(-timeout_ns // 1000)),
        )

    @classmethod
    def of_defaults(cls) -> RateLimiterConfig:
        """50 per 500 ns, waiting up to 5 s."""
        return cls()

    def replace(self, **changes: Any) -> RateLimiterConfig:
        """A copy with changes; values left to their defaults follow them."""
        return type(self)(**{**self._given, **changes})

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **self._given), ()

    @property
    def timeout(self) -> timedelta:
        return timedelta(microseconds=self.timeout_us)


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidLimit(f"{name}={value!r} must be a whole number of permissions")
    if not least <= value <= MAX_COUNT:
        raise InvalidLimit(f"{name}={value} must be between {least} and {MAX_COUNT} permissions")
    return value


def _nanoseconds(name: str, value: Duration) -> Fraction:
    found = _NANOS.fullmatch(value) if isinstance(value, str) else None
    return Fraction(found[1]) if found else exact_us(value, f"{name}={value!r}") * 1000


def _period_ns(value: Duration) -> int:
    exact = _nanoseconds("limit_refresh_period", value)
    if exact < 1:
        raise InvalidLimit(f"limit_refresh_period={value!r} must be at least '1ns'")
    if exact.denominator != 1:
        raise InvalidLimit(f"limit_refresh_period={value!r} must be whole nanoseconds; round it to '{round(exact)}ns'")
    return int(exact)


def _rate(count: int, period_ns: int) -> Rate:
    """The same rate in whole permissions per whole microseconds."""
    times = 1000 // gcd(1000, period_ns)
    many, period = count * times, period_ns * times // 1000
    if many > MAX_COUNT:
        shared = gcd(many, period)
        many, period = many // shared, period // shared
    if many > MAX_COUNT:
        raise InvalidLimit(
            f"limit_for_period={count} per {_text(period_ns)} is {many} per {period} µs, beyond {MAX_COUNT}; "
            f"write at most {MAX_COUNT // times} per {_text(period_ns)}, or a period in whole microseconds"
        )
    return Rate(many, period)


def _text(ns: int) -> str:
    """A duration in the largest unit that divides it: "500ns", "250ms", "5s"."""
    if ns % 1000:
        return f"{ns}ns"
    for unit, (size, _) in reversed(UNITS.items()):
        if ns and ns // 1000 % size == 0:
            return f"{ns // 1000 // size}{unit}"
    return "0s"
