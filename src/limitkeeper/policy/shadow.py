"""Rules in shadow: asked once the others have let a request pass; their answers are counted, and change nothing.

What the others refuse never happened, so it is not charged here either. Every rule in shadow is a decision of its own, all of
them in one question to the store. What their outcomes do not count goes back like any other charge, or they would count more than
they will in earnest. A evaluation keeps (compiled_rule, claims, answer) of each; None is the answer of those that were not asked.
"""

from __future__ import annotations

from typing import Any

from ..decision import Decision
from ..errors import StoreError
from ..observe.events import SHADOW
from .evaluation import Evaluation


def asked(gate: Any, evaluation: Evaluation) -> Evaluation:
    if evaluation.shadow:
        try:
            told(gate, evaluation, gate.store.decide_many([claims for _, claims, _ in evaluation.shadow], 0))
        except StoreError:
            pass  # nobody is refused by a rule in shadow, nor by its store
    return evaluation


async def aasked(gate: Any, evaluation: Evaluation) -> Evaluation:
    if evaluation.shadow:
        try:
            told(gate, evaluation, await gate.store.adecide_many([claims for _, claims, _ in evaluation.shadow], 0))
        except StoreError:
            pass
    return evaluation


def told(gate: Any, evaluation: Evaluation, answers: list[Decision]) -> None:
    evaluation.shadow = [
        (compiled_rule, claims, answer) for (compiled_rule, claims, _), answer in zip(evaluation.shadow, answers, strict=True)
    ]
    for compiled_rule, _, answer in evaluation.shadow:
        if answer.allowed:
            compiled_rule.passed += 1
        elif not gate.on_failure.has_failed(answer):
            compiled_rule.shadow_refused += 1
            evaluation.shadows = (*evaluation.shadows, compiled_rule.name)
    if evaluation.shadows:
        gate.publish(SHADOW, evaluation)
