"""Rules in shadow mode: asked after the others have allowed a request; what they would refuse is counted and passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..algorithms.claim import Claim
from ..decision import Decision
from ..errors import StoreError
from ..observe.events import SHADOW
from ..stores.sans_io import Call, Plan
from .compiled_rule import CompiledRule

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator


class ShadowRule(NamedTuple):
    """A rule in shadow mode with its claims, and their decision once it was asked. Charges are settled as those of other rules
    are, or shadow mode would count more than the real rule will."""

    rule: CompiledRule
    claims: list[Claim]
    decision: Decision | None = None


def ask_shadow(gate: Evaluator, evaluation: Evaluation) -> Plan[Evaluation]:
    """Asks the rules in shadow mode, after the others have allowed the request: their answers are counted and change nothing.
    Each is a decision of its own, all in one call. A store that fails refuses no request here."""
    if evaluation.shadow:
        try:
            decisions = yield Call(evaluation.compiled.store, "decide_many", ([claims for _, claims, _ in evaluation.shadow], 0))
        except StoreError:
            return evaluation
        evaluation.shadow = [one._replace(decision=made) for one, made in zip(evaluation.shadow, decisions, strict=True)]
        for rule, _, decision in evaluation.shadow:
            if decision.allowed:  # type: ignore[union-attr]
                rule.passed += 1
            elif not gate._on_failure.has_failed(decision):  # type: ignore[arg-type]
                rule.shadow_refused += 1
                evaluation.shadows = (*evaluation.shadows, rule.name)
        if evaluation.shadows:
            gate._publish(SHADOW, evaluation)
    return evaluation


def passed_apart(evaluation: Evaluation) -> list[CompiledRule]:
    """The rules without entries that have passed a request: those in shadow mode, and those with a capacity."""
    found = [one.rule for one in evaluation.shadow or () if one.decision is not None and one.decision.allowed]
    return found + [one.rule for one in evaluation.capacity or () if one.rule.name not in evaluation.shadows]
