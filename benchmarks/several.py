"""Several limits in one decision: the cost of the second and the fifth beside the first, and keys given by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from report import Section, Table, number
from timing import Case, Effort, measure, one_core

from limitkeeper import FixedWindow, Limiter, TokenBucket

KEY, TENANT = "user:123456", "tenant:42"
PLENTY = 10**9
ONE, TWO, FIVE = "one limit", "two limits, one key", "five limits, one key"
MAPPED, MAPPED_ONE = "two limits, a mapping of keys", "one limit, a mapping of keys"
REFUSED, PEEKED, PARTS = "two limits, refused", "two limits, peek", "two limits, `decisions` read"


def limiter(count: int) -> Limiter:
    """Token buckets and fixed windows in turn, none of which ever refuses."""
    return Limiter({f"limit {i}": (FixedWindow if i % 2 else TokenBucket)(f"{PLENTY - i}/h") for i in range(count)})


def cases() -> list[Case]:
    one, two, five = limiter(1), limiter(2), limiter(5)
    exhausted = Limiter({"a": TokenBucket(f"{PLENTY}/h"), "b": FixedWindow("1/h")})
    exhausted.hit(KEY)
    return [
        Case(ONE, "o.hit(k)", {"o": one, "k": KEY}),
        Case(MAPPED_ONE, "o.hit(k)", {"o": one, "k": {"limit 0": KEY}}),
        Case(TWO, "o.hit(k)", {"o": two, "k": KEY}),
        Case(MAPPED, "o.hit(k)", {"o": two, "k": {"limit 0": KEY, "limit 1": TENANT}}),
        Case(REFUSED, "o.hit(k)", {"o": exhausted, "k": KEY}),
        Case(PEEKED, "o.peek(k)", {"o": two, "k": KEY}),
        Case(PARTS, "o.hit(k).decisions", {"o": two, "k": KEY}),
        Case(FIVE, "o.hit(k)", {"o": five, "k": KEY}),
    ]


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Several limits in one decision",
        "`limiter.hit(key)` with token buckets and fixed windows in turn: all are charged, or none is. The answer is dropped at "
        "once; the answer of each limit (`decisions`) is made when it is read.",
    )
    with one_core():
        took, failed = measure(cases(), effort, note)
    section.fail(failed)
    section.figure("two limits / one limit", took[TWO] / took[ONE], 2.5, "×")
    section.figure("five limits / one limit", took[FIVE] / took[ONE], 4.5, "×")
    section.figure("mapping of keys, two limits / the same key for both", took[MAPPED] / took[TWO], 1.5, "×")
    section.details = [Table(("limiter.hit", "ns"), [(name, number(value, "")) for name, value in took.items()])]
    return section
