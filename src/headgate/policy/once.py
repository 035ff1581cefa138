"""Charging once: requests that carry the same idempotency key are one request, repeated.

The first one leaves a mark in the store, a fixed window of its own under (rule, key, idempotency key), and is charged; those that
find the mark are not. The mark counts, so that nobody repeats for ever: beyond `replays` a repetition is charged like any other.
A first request that was refused takes its mark away again: its retry is charged.

The mark is asked before the limits, so a request that carries the header makes one more question to the store.
"""

from __future__ import annotations

from typing import Any

from ..algorithms.claim import Claim, NamedLimit
from ..algorithms.fixed_window import FixedWindow
from ..decision import Decision
from ..rate import Rate
from .clause import escaped
from .keeping import kept
from .model import Rule
from .passage import Passage

Mark = tuple[Any, Claim, Decision]


def mark_of(gate: Any, rule: Rule) -> NamedLimit:
    """The limit that marks a rule's idempotency keys; made once per edition."""
    marks: dict[str, NamedLimit] = gate.marks
    found = marks.get(rule.name)
    assert rule.once is not None
    if found is None or found.limit.capacity != rule.once.replays + 1 or found.limit.period != rule.once.keep_us:
        limit = FixedWindow(Rate(rule.once.replays + 1, rule.once.keep_us), align="first")
        found = marks[rule.name] = NamedLimit(gate.policy.name, f"{rule.name} once", limit)
    return found


def claims_of(gate: Any, passage: Passage) -> list[list[Claim]]:
    """The marks to ask for."""
    return [
        [Claim(mark_of(gate, clause.rule), f"{escaped(key)}|{escaped(kept(told))}", 1)]
        for clause, _, key, _, told in passage.onces
    ]


def taken(passage: Passage, asked: list[list[Claim]], answers: list[Decision]) -> None:
    """Adds the limits of those that are charged; a repetition is not."""
    marks: list[Mark] = []
    for (clause, limits, key, cost, _), claims, answer in zip(passage.onces, asked, answers, strict=True):
        if answer.allowed and answer.remaining < answer.limit - 1:
            clause.replayed += 1
            continue
        if answer.allowed:
            marks.append((clause, claims[0], answer))
        for entry in limits:
            passage.entries.append(entry)
            passage.keys.append(key)
            passage.costs.append(cost)
        if clause.owes:
            passage.owes = True
    passage.onces = marks


def marked(gate: Any, passage: Passage) -> None:
    """Asks for the marks, and leaves in the passage what is to be charged."""
    if passage.onces:
        asked = claims_of(gate, passage)
        taken(passage, asked, gate.store.decide_many(asked, 0))


async def amarked(gate: Any, passage: Passage) -> None:
    if passage.onces:
        asked = claims_of(gate, passage)
        taken(passage, asked, await gate.store.adecide_many(asked, 0))


def unmarked(gate: Any, passage: Passage) -> None:
    """Takes the marks of a refused request away."""
    for _, claim, answer in passage.onces or ():
        gate.store.give_back([claim], answer.start_us)


async def aunmarked(gate: Any, passage: Passage) -> None:
    for _, claim, answer in passage.onces or ():
        await gate.store.agive_back([claim], answer.start_us)
