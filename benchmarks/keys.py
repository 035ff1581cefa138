"""A hundred thousand keys in random order: the cost of the key table over a hot key, beside a dict with the same keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from report import Section, Table, number
from timing import Case, Effort, measure, one_core

from limitkeeper import Limiter, TokenBucket

KEYS = 100_000
#: Slow to refill, so that no key is as new, and forgotten, before it is used again.
SLOW = "1000/h burst 1000000"
HIT, LOOK = "for x in k: o.hit(x)", "for x in k: o[x]"


def copies(keys: list[str]) -> list[str]:
    """Equal keys that are other objects, and whose hash is not computed yet."""
    return [(key + " ")[:-1] for key in keys]


def cases(limiter: Limiter, known: dict[str, int], order: list[str]) -> list[Case]:
    others = copies(order)
    sum(hash(key) for key in others)
    hot = [order[0]] * KEYS
    return [
        Case("one hot key, hit", HIT, {"o": limiter, "k": hot}, most=1),
        Case("one hot key, dict", LOOK, {"o": known, "k": hot}, most=1),
        Case("the same key objects, hit", HIT, {"o": limiter, "k": order}, most=1),
        Case("the same key objects, dict", LOOK, {"o": known, "k": order}, most=1),
        Case("equal keys, hash known, hit", HIT, {"o": limiter, "k": others}, most=1),
        Case("equal keys, hash known, dict", LOOK, {"o": known, "k": others}, most=1),
        Case("equal keys, just made, hit", HIT, {"o": limiter}, lambda: copies(order), most=1),
        Case("equal keys, just made, dict", LOOK, {"o": known}, lambda: copies(order), most=1),
    ]


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "100 000 keys in random order",
        "Every key hit once per pass, in one random order; the dict has the same keys and is asked in the same order. "
        "Goal: a hot hit plus 1.5 lookups. Reported beside it: keys that are equal but other objects, hash known or not.",
    )
    limiter, order = Limiter(TokenBucket(SLOW)), [f"user:{100_000 + i}" for i in range(KEYS)]
    for key in order:
        limiter.hit(key)
    known = {key: i for i, key in enumerate(order)}
    random.Random(7).shuffle(order)
    with one_core():
        took, failed = measure(cases(limiter, known, order), effort, note, most=4)
    section.fail(failed)
    if limiter.stats().keys < KEYS:
        raise AssertionError(f"{KEYS - limiter.stats().keys} keys were forgotten meanwhile")
    each = {name: value / KEYS for name, value in took.items()}
    judge(section, each)
    return section


def judge(section: Section, each: dict[str, float]) -> None:
    hot = each["one hot key, hit"]
    table = Table(("keys", "hit ns", "dict lookup ns", "(hit − hot hit) / lookup"))
    for kind in ("the same key objects", "equal keys, hash known", "equal keys, just made"):
        hit, look = each[f"{kind}, hit"], each[f"{kind}, dict"]
        section.figure(
            f"(hit − hot hit) / dict lookup, {kind}", (hit - hot) / look, 1.5 if kind.startswith("the same") else None, "×"
        )
        table.rows.append((kind, number(hit, ""), number(look, ""), number((hit - hot) / look, "×")))
    table.rows.append(("one hot key", number(hot, ""), number(each["one hot key, dict"], ""), ""))
    section.details = [table]
