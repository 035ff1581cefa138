"""Rules in shadow: asked once the others have let a request pass; their answers are counted, and change nothing.

What the others refuse never happened, so it is not charged here either. Every rule in shadow is a decision of its own, all of
them in one question to the store. What their outcomes do not count goes back like any other charge, or they would count more than
they will in earnest. A passage keeps (clause, claims, answer) of each; None is the answer of those that were not asked.
"""

from __future__ import annotations

from typing import Any

from ..decision import Decision
from ..errors import StoreError
from ..observe.events import SHADOW
from .evaluation import Evaluation


def asked(gate: Any, passage: Evaluation) -> Evaluation:
    if passage.shadow:
        try:
            told(gate, passage, gate.store.decide_many([claims for _, claims, _ in passage.shadow], 0))
        except StoreError:
            pass  # nobody is refused by a rule in shadow, nor by its store
    return passage


async def aasked(gate: Any, passage: Evaluation) -> Evaluation:
    if passage.shadow:
        try:
            told(gate, passage, await gate.store.adecide_many([claims for _, claims, _ in passage.shadow], 0))
        except StoreError:
            pass
    return passage


def told(gate: Any, passage: Evaluation, answers: list[Decision]) -> None:
    passage.shadow = [(clause, claims, answer) for (clause, claims, _), answer in zip(passage.shadow, answers, strict=True)]
    for clause, _, answer in passage.shadow:
        if answer.allowed:
            clause.passed += 1
        elif not gate.failing.has_failed(answer):
            clause.shadow_refused += 1
            passage.shadows = (*passage.shadows, clause.name)
    if passage.shadows:
        gate.tell(SHADOW, passage)
