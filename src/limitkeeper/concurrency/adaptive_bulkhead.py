"""Adaptive concurrency: a bulkhead whose size follows the response times of the calls in it.

    AIMD       limit + 1 while calls succeed and use it; × 0.9 after a drop or a call slower than `timeout`; with a `window`
               once for all calls of a window, by their mean response time
    Gradient2  g = clamp(tolerance · long / short, 0.5, 1)      long: mean response time of about 600 windows, short: of this one
               limit ← (1 − smoothing) · limit + smoothing · (limit · g + queue)

Both as in Netflix's concurrency-limits, with its defaults and three faults of its Gradient2 corrected. `queue` is added only
where g = 1: at g ≈ 0.8 it let the limit drift upwards under constant overload. A window with drops multiplies the limit by
`backoff` and does not enter `long`: calls that all time out have a stable response time, which let the limit climb to its
maximum. And a window that used the whole limit does not raise `long`: it measures the queue that the limit itself made, so that
limit and `long` raised each other. Only at the minimum it does, and fast: there the server itself has become slower.

A limit of which less than half is used says nothing about the server, and is not raised.

Partitions have guaranteed shares of the limit: below the limit every call is admitted; at the limit a partition is, while it
holds less than ceil(share · limit). What others have borrowed is not taken back from them, so that a full limit plus the shares
can be in use for a while.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from ..clock import SYSTEM, Clock
from ..decorators import decorated
from ..errors import ConfigurationError, InvalidLimit
from ..fork import reset_after_fork
from ..observe.events import ALLOWED
from ..rate import Duration, duration_us
from .bulkhead import Bulkhead, checked_size

P = ParamSpec("P")
R = TypeVar("R")
#: Exceptions of a call that count as drops: it took too long. (A timeout around a call cancels it.)
DROPS = (TimeoutError, asyncio.CancelledError)


class LimitAlgorithm(Protocol):
    """`update` takes the response time (s) of a window, the most calls that ran in it, and whether one was dropped."""

    limit: float
    window_us: int  # 0: every call is a window
    least_samples: int

    def update(self, seconds: float, in_flight: int, dropped: bool) -> float: ...


def _checked_range(minimum: int, initial: int, maximum: int) -> tuple[int, int, int]:
    sizes = [checked_size(value, name, 1) for name, value in (("minimum", minimum), ("initial", initial), ("maximum", maximum))]
    if sorted(sizes) != sizes:
        raise InvalidLimit(f"expected minimum ≤ initial ≤ maximum, got {minimum}, {initial}, {maximum}")
    return minimum, initial, maximum


def _checked_part(value: float, what: str) -> float:
    if not 0 < value <= 1:
        raise InvalidLimit(f"{what} must be above 0 and at most 1, got {value!r}")
    return float(value)


class AIMD:
    """Additive increase, multiplicative decrease: after each call, or after each window. Without a window a server with more
    workers than 1 / (1 − backoff) makes the limit oscillate: its slow calls end together, and each lowers the limit."""

    least_samples = 1

    def __init__(
        self,
        initial: int = 20,
        minimum: int = 20,
        maximum: int = 200,
        backoff: float = 0.9,
        timeout: Duration = "5s",
        window: Duration = 0,
    ) -> None:
        self.minimum, initial, self.maximum = _checked_range(minimum, initial, maximum)
        self.limit = float(initial)
        self.backoff, self.timeout = _checked_part(backoff, "backoff"), duration_us(timeout) / 1e6
        self.window_us = duration_us(window)

    def update(self, seconds: float, in_flight: int, dropped: bool) -> float:
        if dropped or seconds > self.timeout:
            self.limit = float(int(self.limit * self.backoff))
        elif in_flight * 2 >= self.limit:
            self.limit += 1
        self.limit = min(max(self.limit, self.minimum), self.maximum)
        return self.limit


class Gradient2:
    """Follows the ratio of the long-term to the present response time.

    Args:
        initial: the limit at the start.
        minimum: the smallest limit.
        maximum: the largest limit.
        smoothing: how much of a new limit is taken over with each window, from 0 to 1.
        queue: what is added to the limit while response times are normal, as room for growth.
        long_window: over how many windows the long-term response time is averaged.
        tolerance: up to how many times the long-term response time is normal.
        backoff: the factor of the limit after a drop.
        window: how often the limit is computed.
    """

    least_samples = 10
    WARM_UP = 10  # windows of which `long` is the plain mean

    def __init__(
        self,
        initial: int = 20,
        minimum: int = 20,
        maximum: int = 200,
        smoothing: float = 0.2,
        queue: int = 4,
        long_window: int = 600,
        tolerance: float = 1.5,
        backoff: float = 0.9,
        window: Duration = "1s",
    ) -> None:
        self.minimum, initial, self.maximum = _checked_range(minimum, initial, maximum)
        self.limit = float(initial)
        self.smoothing, self.backoff = _checked_part(smoothing, "smoothing"), _checked_part(backoff, "backoff")
        if tolerance < 1:
            raise InvalidLimit(f"tolerance must be at least 1, got {tolerance!r}")
        self.queue, self.tolerance = checked_size(queue, "queue", 0), float(tolerance)
        self.factor, self.window_us = 2 / (checked_size(long_window, "long_window", 1) + 1), duration_us(window)
        self.long, self.windows = 0.0, 0

    def update(self, seconds: float, in_flight: int, dropped: bool) -> float:
        if dropped:
            self.limit = min(max(self.limit * self.backoff, self.minimum), self.maximum)
            return self.limit
        self._learn(seconds, in_flight)
        if in_flight >= self.limit / 2:
            gradient = min(max(self.tolerance * self.long / seconds, 0.5), 1.0)
            wanted = self.limit * gradient + (self.queue if gradient == 1.0 else 0)
            wanted = self.limit * (1 - self.smoothing) + self.smoothing * wanted
            self.limit = min(max(wanted, self.minimum), self.maximum)
        return self.limit

    def _learn(self, seconds: float, in_flight: int) -> None:
        self.windows += 1
        factor = 1 / self.windows if self.windows <= self.WARM_UP else self.factor
        if seconds > self.long > 0 and in_flight >= int(self.limit):
            factor = 0.0 if self.limit > self.minimum else max(factor, self.smoothing)
        self.long += (seconds - self.long) * factor
        if self.long / seconds > 2:  # the server recovered: the long term follows faster
            self.long *= 0.95


class AdaptiveCall:
    """One call: a context manager, sync and async. `drop()` and `ignore()` within it set its outcome."""

    __slots__ = ("_adaptive", "_began_us", "_dropped", "_ignored", "_in_flight", "_partition")

    def __init__(self, adaptive: AdaptiveBulkhead, partition: str | None) -> None:
        self._adaptive, self._partition = adaptive, partition
        self._began_us = self._in_flight = 0
        self._dropped = self._ignored = False

    def drop(self) -> None:
        """It was shed, or took too long: the limit is lowered."""
        self._dropped = True

    def ignore(self) -> None:
        """Its response time says nothing (a cached answer, an early error), nor does a timeout or a cancellation that ends it."""
        self._ignored = True

    def _begin(self, counted: bool) -> Self:
        self._began_us, self._in_flight = self._adaptive._begin(self._partition, counted)
        return self

    def __enter__(self) -> Self:
        if not (taken := self._adaptive._take(self._partition)):
            self._adaptive.bulkhead.acquire()
        return self._begin(taken)

    async def __aenter__(self) -> Self:
        if not (taken := self._adaptive._take(self._partition)):
            await self._adaptive.bulkhead.aacquire()
        return self._begin(taken)

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        dropped = self._dropped or (not self._ignored and kind is not None and issubclass(kind, DROPS))
        ignored = not dropped and (self._ignored or kind is not None)
        self._adaptive._end(self._partition, self._began_us, self._in_flight, dropped, ignored)

    async def __aexit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        self.__exit__(kind)


class AdaptiveBulkhead:
    """`AdaptiveBulkhead(Gradient2())`: `with adaptive.call():`, `async with adaptive.call("batch"):`, `@adaptive.limit`.

    `bulkhead` is the bulkhead whose size follows `algorithm`; `max_waiting` and `timeout` are its own, by default no call
    waits: a queue would hide the response times. A call that raises says nothing, unless it timed out or was cancelled, which
    is a drop. `partitions` guarantee shares of the limit to kinds of calls: `{"live": 0.9, "batch": 0.1}`.
    """

    def __init__(
        self,
        algorithm: LimitAlgorithm | None = None,
        max_waiting: int | None = 0,
        timeout: Duration | None = None,
        *,
        partitions: Mapping[str, float] | None = None,
        name: str = "adaptive",
        clock: Clock = SYSTEM,
    ) -> None:
        self.algorithm = Gradient2() if algorithm is None else algorithm
        self.bulkhead = Bulkhead(int(self.algorithm.limit), max_waiting, timeout, name=name, clock=clock)
        self.partitions = {each: _checked_part(share, f"the share of {each!r}") for each, share in (partitions or {}).items()}
        if sum(self.partitions.values()) > 1 + 1e-9:
            raise ConfigurationError(f"the shares of all partitions must be at most 1 together, got {self.partitions}")
        self._reset_after_fork()
        reset_after_fork(self)
        self._clock = clock
        self._window_end_us = clock.now_us() + self.algorithm.window_us
        self._samples, self._sum_us, self._most, self._dropped = 0, 0, 0, False

    def _reset_after_fork(self) -> None:
        """No call of a partition runs in a forked child."""
        self.busy = dict.fromkeys(self.partitions, 0)

    def call(self, partition: str | None = None) -> AdaptiveCall:
        """The context of one call. A partition that was not declared has no guaranteed share."""
        return AdaptiveCall(self, partition)

    def guaranteed(self, partition: str) -> int:
        """The calls that are guaranteed to a partition now."""
        share = self.partitions.get(partition, 0.0)
        return max(1, math.ceil(self.bulkhead.max_concurrent * share)) if share else 0

    def limit(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorates a function, method, coroutine or (async) generator."""
        return decorated(function, lambda args, kwargs: self.call())  # type: ignore[no-any-return]

    def _take(self, partition: str | None) -> bool:
        """Takes a free place, or one of the partition's share where the limit is used up, and counts it in the same step: a
        place that is free now may be taken before the next one."""
        bulkhead = self.bulkhead
        with bulkhead._lock:
            if partition is None or partition not in self.busy:
                return False
            if taken := bulkhead.in_use < bulkhead.max_concurrent or self.busy[partition] < self.guaranteed(partition):
                self.busy[partition] += 1
                bulkhead.in_use += 1
                bulkhead._permitted += 1
        if taken:
            bulkhead.events.publish(ALLOWED, bulkhead.name)
        return taken

    def _begin(self, partition: str | None, counted: bool = False) -> tuple[int, int]:
        with self.bulkhead._lock:
            if not counted and partition in self.busy:
                self.busy[partition] += 1
            return self._clock.now_us(), self.bulkhead.in_use

    def _end(self, partition: str | None, began_us: int, in_flight: int, dropped: bool, ignored: bool) -> None:
        now_us = self._clock.now_us()
        try:
            with self.bulkhead._lock:
                if partition is not None and self.busy.get(partition):
                    self.busy[partition] -= 1
                size = None if ignored else self._sample(now_us, max(1, now_us - began_us), in_flight, dropped)
            if size is not None and size != self.bulkhead.max_concurrent:
                self.bulkhead.resize(size)
        finally:  # also when an algorithm of the application raises
            self.bulkhead.release()

    def _sample(self, now_us: int, took_us: int, in_flight: int, dropped: bool) -> int | None:
        """Adds a call to the window; the new size at the window's end."""
        self._samples += 1
        self._sum_us += took_us
        self._most = max(self._most, in_flight)
        self._dropped = self._dropped or dropped
        algorithm = self.algorithm
        is_within = 0 < self._window_end_us - now_us <= algorithm.window_us  # more is left when the clock went back
        if is_within or (self._samples < algorithm.least_samples and not self._dropped):
            return None
        limit = algorithm.update(self._sum_us / self._samples / 1e6, self._most, self._dropped)
        self._samples, self._sum_us, self._most, self._dropped = 0, 0, 0, False
        self._window_end_us = now_us + algorithm.window_us
        return max(1, int(limit))
