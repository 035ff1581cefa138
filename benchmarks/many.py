"""A thousand keys in one call, beside a list of single hits of the same keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from report import Section, Table, number
from timing import Case, Effort, measure, one_core

from limitkeeper import Limiter, TokenBucket

KEYS = 1000


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "hit_many", "`limiter.hit_many(keys)` of 1000 different keys, beside `[limiter.hit(key) for key in keys]`; token bucket."
    )
    keys = [f"user:{100_000 + i}" for i in range(KEYS)]
    cases = []
    for verdict, rate in (("allow", "1000/h burst 1000000"), ("deny", "1/h")):
        limiter = Limiter(TokenBucket(rate))
        limiter.hit_many(keys)
        cases.append(Case(f"hit_many {verdict}", "o.hit_many(k)", {"o": limiter, "k": keys}))
        cases.append(Case(f"single {verdict}", "[o.hit(key) for key in k]", {"o": limiter, "k": keys}))
    with one_core():
        took, failed = measure(cases, effort, note)
    section.fail(failed)
    table = Table(("1000 keys", "hit_many, ns a key", "single hits, ns a key"))
    for verdict in ("allow", "deny"):
        many, single = took[f"hit_many {verdict}"], took[f"single {verdict}"]
        section.figure(f"hit_many / single hits, {verdict}", 100 * many / single, 50, "%")
        table.rows.append((verdict, number(many / KEYS, ""), number(single / KEYS, "")))
    section.details = [table]
    return section
