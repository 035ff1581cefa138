"""How people state rates and durations: `"5/s"`, `"10 per 5 minutes"`, `"100/s burst 200"`, `250ms`.

A rate is two integers, a count and a period in microseconds; nothing is ever a float from here on.
Windows are multiples of seconds on the Unix epoch, so months and years (whose length varies) are refused.
"""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction
from typing import NamedTuple

from .errors import InvalidLimit

#: Largest count, burst, capacity and cost.
MAX_COUNT = 10**9
#: Longest period: 400 days, in microseconds.
MAX_PERIOD = 400 * 86_400 * 10**6

Duration = float | int | timedelta | str

#: Canonical unit -> (microseconds, the other spellings that are understood).
UNITS: dict[str, tuple[int, tuple[str, ...]]] = {
    "us": (1, ("µs", "microsecond", "microseconds")),
    "ms": (1_000, ("millisecond", "milliseconds")),
    "s": (1_000_000, ("sec", "secs", "second", "seconds")),
    "min": (60_000_000, ("m", "mins", "minute", "minutes")),
    "h": (3_600_000_000, ("hr", "hrs", "hour", "hours")),
    "d": (86_400_000_000, ("day", "days")),
}
_ALIASES = {alias: size for unit, (size, more) in UNITS.items() for alias in (unit, *more)}
_ALIASES |= {"w": 7 * 86_400_000_000, "week": 7 * 86_400_000_000, "weeks": 7 * 86_400_000_000}
_UNEVEN = {"mo", "month", "months", "monthly", "y", "yr", "year", "years", "yearly"}

_NUMBER = r"\d+(?:_\d+)*"
_RATE = re.compile(
    rf"\s*(?P<count>{_NUMBER})\s*(?:/|per\b)\s*(?P<amount>\d+(?:\.\d+)?)?\s*(?P<unit>[^\W\d_]+)\s*(?P<rest>.*)", re.I | re.S
)
_OPTION = re.compile(rf"(?P<word>[a-z]+)\s+(?P<value>{_NUMBER}|[a-z]+)\s*", re.I)
_DURATION = re.compile(r"\s*(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>[^\W\d_]+)\s*", re.I)
WRITE = 'write it like "5/s", "100/min", "10 per 5 minutes" or "100/s burst 200"'


class Rate(NamedTuple):
    """`count` per `period` microseconds."""

    count: int  # type: ignore[assignment]
    period: int

    def __str__(self) -> str:
        return f"{self.count}/{period_text(self.period)}"


def period_text(period: int) -> str:
    """The period in the largest unit that divides it: 1 s is "s", 2 days are "2d"."""
    for unit, (size, _) in reversed(UNITS.items()):
        if period % size == 0:
            return unit if period == size else f"{period // size}{unit}"
    raise AssertionError("a microsecond divides every period")


def unit_us(unit: str, text: object) -> int:
    """Microseconds in one `unit`, or an InvalidLimit that says which units there are."""
    word = unit.lower()
    if word in _UNEVEN:
        raise InvalidLimit(f"{text!r}: a {word} has no fixed length; write days, as in '1000/30d'")
    if word not in _ALIASES:
        raise InvalidLimit(f"{text!r}: unknown unit {unit!r}; use one of {', '.join(UNITS)}, week, or their long names")
    return _ALIASES[word]


def whole(value: object, what: str, text: object, least: int = 1) -> int:
    """`value` as an int between `least` and MAX_COUNT."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidLimit(f"{text!r}: {what} must be a whole number, not {value!r}; {WRITE}")
    if value < least:
        raise InvalidLimit(f"{text!r}: {what} must be at least {least}, not {value}; {WRITE}")
    if value > MAX_COUNT:
        raise InvalidLimit(f"{text!r}: {what} {value} is beyond {MAX_COUNT}; write at most {MAX_COUNT}")
    return value


def checked(count: object, period: int | Fraction, text: object) -> Rate:
    """A Rate inside the domain: 1 … 10^9 per 1 µs … 400 days, in whole microseconds."""
    if period <= 0:
        raise InvalidLimit(f"{text!r}: the period must be longer than nothing; {WRITE}")
    if int(period) != period:
        raise InvalidLimit(f"{text!r}: the period must be a whole number of microseconds; round it to {max(1, round(period))}us")
    if period > MAX_PERIOD:
        raise InvalidLimit(f"{text!r}: the period is beyond 400 days; write a shorter one, such as 400d")
    return Rate(whole(count, "the count", text), int(period))


def parse_rate(text: object, options: tuple[str, ...] = ()) -> tuple[Rate, dict[str, int | str]]:
    """Reads "count / period" and the options behind it, of which only `options` are allowed."""
    if not isinstance(text, str):
        raise InvalidLimit(f"{text!r} is not a rate; {WRITE}, or give a number and per=")
    found = _RATE.fullmatch(text)
    if found is None:
        raise InvalidLimit(f"{text!r} is not a rate; {WRITE}")
    amount = Fraction(found["amount"] or 1)
    rate = checked(int(found["count"]), amount * unit_us(found["unit"], text), text)
    return rate, parse_options(found["rest"], options, text)


def parse_options(rest: str, options: tuple[str, ...], text: object) -> dict[str, int | str]:
    """Reads "burst 10 initial 0"; each option once, and only those that this kind of limit has."""
    given: dict[str, int | str] = {}
    while rest:
        found = _OPTION.match(rest)
        if found is None:
            raise InvalidLimit(f"{text!r}: {rest!r} is not understood; {WRITE}")
        word, value = found["word"].lower(), found["value"]
        if word not in options:
            having = f"only {' and '.join(options)}" if options else "no options"
            raise InvalidLimit(f"{text!r}: {word!r} does not belong here; this kind of limit has {having}")
        if word in given:
            raise InvalidLimit(f"{text!r}: {word!r} is said twice; say it once")
        given[word] = int(value) if value[0].isdigit() else value.lower()
        rest = rest[found.end() :]
    return given


def read_rate(rate: object, per: Duration | None, options: tuple[str, ...] = ()) -> tuple[Rate, dict[str, int | str]]:
    """A rate given as text, as a Rate, or as a number with `per=`."""
    if isinstance(rate, Rate):
        return checked(rate.count, rate.period, rate), {}
    if per is None:
        return parse_rate(rate, options)
    if isinstance(rate, str):
        raise InvalidLimit(f"{rate!r} with per={per!r}: say the period once, in the text or as per=")
    return checked(rate, exact_us(per, f"{rate} per {per!r}"), f"{rate} per {per!r}"), {}


def exact_us(value: Duration, text: object = None) -> Fraction:
    """A duration as an exact number of microseconds: seconds, a timedelta, "250ms", or a bare unit ("minute")."""
    shown = value if text is None else text
    if isinstance(value, timedelta):
        return Fraction(value // timedelta(microseconds=1))
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        if found is not None:
            return Fraction(found["amount"]) * unit_us(found["unit"], shown)
        if value.strip().isalpha():
            return Fraction(unit_us(value.strip(), shown))
        raise InvalidLimit(f"{shown!r} is not a duration; write seconds as a number, a timedelta, or text like '250ms'")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value in (float("inf"), -float("inf")):
        raise InvalidLimit(f"{shown!r} is not a duration; write seconds as a number, a timedelta, or text like '250ms'")
    return Fraction(float.__repr__(value)) * 1_000_000 if isinstance(value, float) else Fraction(value) * 1_000_000


def duration_us(value: Duration) -> int:
    """A duration in whole microseconds, rounded up, never negative."""
    exact = exact_us(value)
    if exact < 0:
        raise InvalidLimit(f"{value!r}: a duration can't be negative; write 0 or more seconds")
    return -int(-exact // 1)
