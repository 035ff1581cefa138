"""Parses and writes quantities: latencies in seconds and rates in requests per second (RPS), as exact fractions.

Fractions, because a plan multiplies and rounds down: 0.29 × 100 is 28.999… in floats, and would lose one request per second.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor

from ..errors import ConfigurationError, InvalidLimit
from ..rate import MAX_COUNT, Duration, exact_us

Number = int | float | str | Fraction


def seconds_of(value: Duration | Fraction, name: str) -> Fraction:
    """A latency in seconds; ConfigurationError unless it is greater than zero."""
    try:
        found = value if isinstance(value, Fraction) else exact_us(value) / 1_000_000
    except InvalidLimit as error:
        raise ConfigurationError(f"{name}: {error}") from None
    if found <= 0:
        raise ConfigurationError(f"{name} must be greater than 0, got {value!r}; write a measured latency like '800ms'")
    return found


def number_of(value: Number, name: str, remedy: str, most: Number = MAX_COUNT) -> Fraction:
    """A number greater than 0 and at most `most`; ConfigurationError with the remedy otherwise."""
    mantissa, mark, exponent = str(value).strip().lower().partition("e")
    try:  # an exponent beyond every limit is as good as a larger one, whose fraction has as many digits
        found = Fraction(f"{mantissa}e{max(-400, min(400, int(exponent)))}" if mark else mantissa)
    except (ValueError, ZeroDivisionError):
        raise ConfigurationError(f"{name} must be a number, got {value!r}; {remedy}") from None
    if found <= 0:
        raise ConfigurationError(f"{name} must be greater than 0, got {value!r}; {remedy}")
    if found > Fraction(most):
        raise ConfigurationError(f"{name} must be at most {most}, got {value!r}; {remedy}")
    return found


def whole_number(value: Number, name: str, remedy: str) -> int:
    """A whole number of at least 1."""
    found = number_of(value, name, remedy)
    if found.denominator != 1:
        raise ConfigurationError(f"{name} must be a whole number, got {value!r}; {remedy}")
    return int(found)


def round_down(rate: Fraction) -> Fraction:
    """A rate that a limit can be written with: whole requests per second, or below 1 RPS whole requests per hour."""
    return Fraction(floor(rate)) if rate >= 1 else Fraction(floor(rate * 3600), 3600)


def rate_text(rate: Fraction) -> str:
    """The rate of a limit: "200/s", "30/min", "90/h"."""
    for size, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if (rate * size).denominator == 1:
            return f"{int(rate * size)}/{unit}"
    raise ConfigurationError(f"{float(rate):g} RPS is no whole number of requests per hour; round it")


def rps(rate: Fraction | float) -> str:
    """A rate as readable text: "350 RPS", "0.25 RPS"."""
    value = float(rate)
    return f"{value:,.0f} RPS" if value >= 100 or value == int(value) else f"{value:.4g} RPS"


def duration_text(seconds: Fraction | float) -> str:
    """A latency as readable text: "800 ms", "1.5 s"."""
    value = float(seconds)
    if value >= 1:
        return f"{value:.4g} s"
    return f"{value * 1000:.4g} ms" if value >= 0.001 else f"{value * 1e6:.4g} µs"
