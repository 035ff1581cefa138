"""Derates the limits of strict leases at the parent, so that no window ever admits more than the limit itself.

A token is spent up to one life τ after it was charged. What is spent in a window of W was charged in W + τ, so a parent that
grants count per W + τ keeps every window of W (and every longer one) within the limit. The price is τ / (W + τ) of the rate:
0.17 % for W = 60 s and τ = 0.1 s, 9.1 % for W = 1 s. The leases of a fixed window end with the window: it costs nothing there.
"""

from __future__ import annotations

import logging

from ...algorithms.claim import NamedLimit
from ...algorithms.fixed_window import FixedWindow
from ...algorithms.leaky_bucket import LeakyBucket
from ...algorithms.limit import Limit
from ...algorithms.token_bucket import TokenBucket
from ...errors import ConfigurationError, InvalidLimit
from ...rate import Rate

log = logging.getLogger("limitkeeper")


class DeratedLimits:
    """The limits of strict leases as they are charged at the parent, and the price of each: the lost part of its rate."""

    def __init__(self, life_us: int) -> None:
        self.life_us = life_us
        self.prices: dict[str, float] = {}

    def __call__(self, named: NamedLimit) -> NamedLimit:
        limit = named.limit
        if not limit.refunds or isinstance(limit, FixedWindow):
            return named
        derated = derate(limit, self.life_us)
        self.prices[str(limit)] = price = 1 - limit.period / derated.period
        log.info("strict leases of %s: never more in any window, at a price of %.2f %% of its rate", limit, 100 * price)
        return NamedLimit(named.limiter, named.name, derated)


def derate(limit: Limit, life_us: int) -> Limit:
    """The limit with its count in a period longer by one lease life, or by the least more that its ticks can count."""
    step = 1
    while step <= limit.period + life_us:
        rate = Rate(int(limit.count), -(-(limit.period + life_us) // step) * step)
        try:
            if isinstance(limit, TokenBucket):
                return TokenBucket(rate, limit.capacity, limit.initial)
            if isinstance(limit, LeakyBucket):
                return LeakyBucket(rate, limit.capacity)
            return type(limit)(rate)  # type: ignore[call-arg] # a window or a log
        except InvalidLimit:
            step *= 10
    raise ConfigurationError(f"{limit} can't be leased strictly with a life of {life_us} µs; choose a life in whole milliseconds")
