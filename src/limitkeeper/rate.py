"""Rate: a count per period, from text or numbers (`"5/s"`, `"10 per 5 minutes"`, `"100/s burst 200"`); durations (`"250ms"`).

A rate is two integers, a count and a period in microseconds; floats are converted exactly here and not used afterwards.
Months and years are rejected because their length varies.
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
#: A count, burst or capacity. An alias, because Cython would check an argument annotated `int` before our own validation.
Count = int

#: Canonical unit -> (microseconds, other accepted spellings).
UNITS: dict[str, tuple[int, tuple[str, ...]]] = {
    "us": (1, ("µs", "microsecond", "microseconds")),
    "ms": (1_000, ("millisecond", "milliseconds")),
    "s": (1_000_000, ("sec", "secs", "second", "seconds")),
    "min": (60_000_000, ("m", "mins", "minute", "minutes")),
    "h": (3_600_000_000, ("hr", "hrs", "hour", "hours")),
    "d": (86_400_000_000, ("day", "days")),
}
_ALIASES = {alias: size for unit, (size, more) in UNITS.items() for alias in (unit, *more)}
#: Longer units, in days; a month and a year have these lengths wherever they begin.
_DAYS = {7: ("w", "week", "weeks"), 30: ("month", "months"), 365: ("year", "years")}
_ALIASES |= {alias: days * 86_400_000_000 for days, aliases in _DAYS.items() for alias in aliases}

#: At most so many digits as `int` reads in any build of Python.
_NUMBER, _AMOUNT = r"\d{1,50}(?:_\d{1,50}){0,9}", r"\d{1,99}(?:\.\d{1,99})?"
_RATE = re.compile(
    rf"\s*(?P<count>{_NUMBER})\s*(?:/|per\b)\s*(?P<amount>{_AMOUNT})?\s*(?P<unit>[^\W\d_]+)\s*(?P<rest>.*)", re.I | re.S
)
#: A count that is not a positive whole number: "-1/s", "1.5/s".
_OTHER_COUNT = re.compile(
    rf"\s*(?P<count>-?\d{{0,10}}\.?\d{{1,10}})\s*(?:/|per\b)\s*(?P<amount>{_AMOUNT})?\s*(?P<unit>[^\W\d_]+)(?P<rest>.*)",
    re.I | re.S,
)
_ASSIGNED = re.compile(rf"(?P<word>[a-z]+)\s*[=:]\s*(?P<value>{_NUMBER}|[a-z]+)", re.I)
_OPTION = re.compile(rf"(?P<word>[a-z]+)\s+(?P<value>{_NUMBER}|[a-z]+)\s*", re.I)
#: The beginning of another rate, where an option may be.
_ANOTHER = re.compile(r"(?:(?:[,&+]|and\b)\D*)?\d+\s*(?:/|per\b)", re.I)
_DURATION = re.compile(rf"\s*(?P<amount>{_AMOUNT})\s*(?P<unit>[^\W\d_]+)\s*", re.I)
WRITE = 'write it like "5/s", "100/min", "10 per 5 minutes" or "100/s burst 200"'
NO_DURATION = "expected a duration, got {!r}; write seconds as a number, a timedelta, or text like '250ms'"


class Rate(NamedTuple):
    """`count` per `period` microseconds."""

    count: int  # type: ignore[assignment]
    period: int

    def __str__(self) -> str:
        return f"{self.count}/{period_text(self.period)}"


#: A rate as text, as a Rate, or as a count (with `per=`).
RateValue = str | int | Rate


def period_text(period: int) -> str:
    """The period in the largest unit that divides it: "s" for 1 s, "2d" for 2 days."""
    for unit, (size, _) in reversed(UNITS.items()):
        if period % size == 0:
            return unit if period == size else f"{period // size}{unit}"
    raise AssertionError("a microsecond divides every period")


def unit_us(unit: str, text: object) -> int:
    """Microseconds in one `unit`; raises InvalidLimit with the list of units for an unknown one."""
    word = unit.lower()
    if word not in _ALIASES:
        raise InvalidLimit(
            f"{text!r}: unknown unit {unit!r}; use one of {', '.join(UNITS)}, week, month, year, or their long names"
        )
    return _ALIASES[word]


def whole(value: object, what: str, text: object, least: int = 1) -> int:
    """Returns `value` if it is an int between `least` and MAX_COUNT; otherwise raises InvalidLimit."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidLimit(f"{text!r}: {what} must be a whole number, got {value!r}; {WRITE}")
    if value < least:
        raise InvalidLimit(f"{text!r}: {what} must be at least {least}, got {value}; {WRITE}")
    if value > MAX_COUNT:
        raise InvalidLimit(f"{text!r}: {what} must be at most {MAX_COUNT}, got {value}")
    return value


def checked(count: object, period: int | Fraction, text: object) -> Rate:
    """Makes a Rate within the limits: 1 … 10^9 per 1 µs … 400 days, in whole microseconds."""
    if period <= 0:
        raise InvalidLimit(f"{text!r}: the period must be greater than zero; {WRITE}")
    if int(period) != period:
        raise InvalidLimit(f"{text!r}: the period must be a whole number of microseconds; round it to {max(1, round(period))}us")
    if period > MAX_PERIOD:
        raise InvalidLimit(f"{text!r}: the period must be at most 400 days")
    return Rate(whole(count, "the count", text), int(period))


def parse_rate(text: object, options: tuple[str, ...] = ()) -> tuple[Rate, dict[str, int | str]]:
    """Parses "count / period" and the options that follow, of which only `options` are allowed."""
    if not isinstance(text, str):
        raise InvalidLimit(f"expected a rate, got {text!r}; {WRITE}, or give a number and per=")
    found = _RATE.fullmatch(text)
    if found is None:
        raise InvalidLimit(explain_count(text) or f"expected a rate, got {text!r}; {WRITE}")
    amount = Fraction(found["amount"] or 1)
    rate = checked(int(found["count"]), amount * unit_us(found["unit"], text), text)
    return rate, parse_options(found["rest"], options, text)


def explain_count(text: str) -> str | None:
    """The message for a rate whose count is negative or has a fraction; None for any other text."""
    found = _OTHER_COUNT.fullmatch(text)
    if found is None:
        return None
    count = Fraction(found["count"])
    if count <= 0:
        return f"{text!r}: the count must be at least 1, got {found['count']}; {WRITE}"
    period = Fraction(found["amount"] or 1) * unit_us(found["unit"], text) * count.denominator
    if period.denominator != 1 or not 0 < period <= MAX_PERIOD or count.numerator > MAX_COUNT:
        return f"{text!r}: the count must be a whole number, got {found['count']}; {WRITE}"
    remedy = f"{count.numerator} per {period_text(int(period))}{found['rest']}"
    return f"{text!r}: the count must be a whole number, got {found['count']}; write {remedy}"


def parse_options(rest: str, options: tuple[str, ...], text: object) -> dict[str, int | str]:
    """Parses "burst 10 initial 0": each option once, and only those of this kind of limit."""
    given: dict[str, int | str] = {}
    while rest:
        if _ANOTHER.match(rest):
            raise InvalidLimit(f"{text!r}: expected one limit, got another one: {rest!r}; separate limits with ';'")
        found = _OPTION.match(rest)
        if found is None:
            assigned = _ASSIGNED.match(rest)
            remedy = WRITE if assigned is None else f"write {assigned['word']} {assigned['value']}, with a space"
            raise InvalidLimit(f"{text!r}: expected an option and its value, got {rest!r}; {remedy}")
        word, value = found["word"].lower(), found["value"]
        if word not in options:
            having = f"only {' and '.join(options)}" if options else "no options"
            raise InvalidLimit(f"{text!r}: unknown option {word!r}; this kind of limit has {having}")
        if word in given:
            raise InvalidLimit(f"{text!r}: duplicate option {word!r}; give it once")
        given[word] = int(value) if value[0].isdigit() else value.lower()
        rest = rest[found.end() :]
    return given


def read_rate(rate: object, per: Duration | None, options: tuple[str, ...] = ()) -> tuple[Rate, dict[str, int | str]]:
    """Reads a rate given as text, as a Rate, or as a number with `per=`."""
    if isinstance(rate, Rate):
        return checked(rate.count, rate.period, rate), {}
    if per is None:
        return parse_rate(rate, options)
    if isinstance(rate, str):
        raise InvalidLimit(f"{rate!r} with per={per!r}: duplicate period; give it in the text or as per=, not both")
    return checked(rate, exact_us(per, f"{rate} per {per!r}"), f"{rate} per {per!r}"), {}


def exact_us(value: Duration, text: object = None) -> Fraction:
    """Converts a duration to an exact number of microseconds: seconds, a timedelta, "250ms", or a unit ("minute")."""
    shown = value if text is None else text
    if isinstance(value, timedelta):
        return Fraction(value // timedelta(microseconds=1))
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        if found is not None:
            return Fraction(found["amount"]) * unit_us(found["unit"], shown)
        if (bare := value.strip()).isalpha():
            return Fraction(unit_us(bare, shown))
        if bare.replace(".", "", 1).isdecimal():
            raise InvalidLimit(f"{shown!r} has no unit; write '{bare}s' or '{bare}ms'")
        raise InvalidLimit(NO_DURATION.format(shown))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value in (float("inf"), -float("inf")):
        raise InvalidLimit(NO_DURATION.format(shown))
    return Fraction(float.__repr__(value)) * 1_000_000 if isinstance(value, float) else Fraction(value) * 1_000_000


def duration_us(value: Duration, name: str = "") -> int:
    """Converts a duration to whole microseconds, rounded up; raises InvalidLimit for a negative one. `name` is the argument's."""
    exact = exact_us(value, f"{name}={value!r}" if name else None)
    if exact < 0:
        raise InvalidLimit(f"{name or 'a duration'} must be at least 0, got {value!r}")
    return -int(-exact // 1)
