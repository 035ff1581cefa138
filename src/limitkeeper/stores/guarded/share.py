"""Computes a declared share of a limit: what one node may admit by itself while the store can't be reached.

    a rate of `count` per `period`, times n/d, is exactly `count · n` per `period · d`: no fraction is lost
    burst, capacity and initial are rounded down, and are at least 1 (initial: at least 0)
    a window keeps its length and its count is rounded down; below one it is 1 per a window that is longer accordingly

A quarter of 5/s burst 10 is 5 per 4 s burst 2; of 2/min one per two minutes. The shares of all nodes together never exceed the
limit in the long run, except where a burst or a count is smaller than the number of nodes: a limit of 0 can't be stated.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import gcd

from ...algorithms.limit import Limit
from ...errors import ConfigurationError, InvalidLimit
from ...rate import MAX_PERIOD, Rate, read_rate

Share = str | float | int | Fraction
WRITE = "write the number of nodes (share=4) or this node's part (share='1/4', 0.25)"
OPTIONS = ("burst", "capacity", "initial", "align")


def parse_share(share: object) -> Fraction:
    """A share as an exact fraction: a number of nodes (an int, or text of one), a fraction, or text like "1/4"."""
    if isinstance(share, bool) or not isinstance(share, (str, int, float, Fraction)):
        raise ConfigurationError(f"share={share!r} is not a share; {WRITE}")
    try:
        part = Fraction(repr(share) if isinstance(share, float) else share).limit_denominator(10**6)
    except (ValueError, ZeroDivisionError):
        raise ConfigurationError(f"share={share!r} is not a share; {WRITE}") from None
    if isinstance(share, int) or (isinstance(share, str) and share.strip().isdigit()):
        part = Fraction(1, int(share)) if int(share) > 0 else Fraction(0)
    if not 0 < part <= 1:
        raise ConfigurationError(f"share={share!r} is not between 0 and 1; {WRITE}")
    return part


def shared_limit(limit: Limit, part: Fraction) -> Limit:
    """This part of a limit, with the same algorithm and alignment."""
    if part == 1:
        return limit
    rate, given = read_rate(limit.text.removeprefix(limit.kind), None, OPTIONS)
    options = {
        name: value if isinstance(value, str) else max(0 if name == "initial" else 1, int(value * part))
        for name, value in given.items()
    }
    make: Callable[..., Limit] = type(limit)
    if limit.gain > 0:  # it refills continuously: any period will do
        common = gcd(rate.count * part.numerator, part.denominator)
        try:
            return make(Rate(rate.count * part.numerator // common, rate.period * part.denominator // common), **options)
        except InvalidLimit:  # beyond what can be counted exactly: rounded down, as a window is
            pass
    count = int(rate.count * part)
    if count:
        return make(Rate(count, rate.period), **options)
    return make(Rate(1, min(MAX_PERIOD, -int(-Fraction(rate.period) // (rate.count * part)))), **options)
