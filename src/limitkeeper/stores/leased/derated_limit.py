"""Strict leases: the limit that the parent is told, so that no window ever holds more than the limit says.

A token is spent up to one life τ after it was charged. What is spent in a window of W was charged in W + τ, so a parent that
grants count per W + τ keeps every window of W (and every longer one) within what the rule itself promises. The price is
τ / (W + τ) of the rate: 0.17 % for W = 60 s and τ = 0.1 s, 9.1 % for W = 1 s. A fixed window's leases end with the window:
there it costs nothing.
"""

from __future__ import annotations

from typing import Any

from ...algorithms.leaky_bucket import LeakyBucket
from ...algorithms.token_bucket import TokenBucket
from ...errors import ConfigurationError, InvalidLimit
from ...rate import Rate


def stretched(limit: Any, life_us: int) -> Any:
    """The same limit with its count in a period longer by one lease life, or by a little more where that can't be counted."""
    step = 1
    while step <= limit.period + life_us:
        period = -(-(limit.period + life_us) // step) * step
        try:
            return remade(limit, Rate(int(limit.count), period))
        except InvalidLimit:
            step *= 10
    raise ConfigurationError(f"{limit} can't be leased strictly with a life of {life_us} µs; choose a life in round milliseconds")


def remade(limit: Any, rate: Rate) -> Any:
    """The same kind of limit at another rate."""
    if isinstance(limit, TokenBucket):
        return TokenBucket(rate, limit.capacity, limit.initial)
    return type(limit)(rate, limit.capacity) if isinstance(limit, LeakyBucket) else type(limit)(rate)
