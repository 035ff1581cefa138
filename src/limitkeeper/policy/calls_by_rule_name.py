"""Hit, peek and reserve calls of a rule by its name, under a given key, without a request: for callers such as the service's.

    hit       `Evaluator.hit_rule_nowait`, or many in one call of the store: `hit_rules`
    reserve   charges at a start within `max_wait_us`; the evaluation keeps its claims, so that the caller can settle them
    peek      what a hit would be answered now; nothing is stored or counted

Tiers, overrides, shadow mode and `on_failure` of the rule hold as for requests. Its match, condition, exemptions, penalty box,
idempotency key and queue belong to requests and are not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..decision import Decision
from ..errors import ConfigurationError, StoreError
from ..stores.sans_io import Call, Plan
from . import rule_fair_share
from .compiled_rule import CompiledRule
from .refusal import BLOCKED, blocked_decision
from .shadow_rules import ask_shadow

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator

#: A rule, a key, a cost, and the tier (None: the rule's default).
RuleHit = tuple[CompiledRule, str, int, str | None]


def hit_rules(gate: Evaluator, hits: Sequence[RuleHit]) -> Plan[list[Evaluation]]:
    """Independent hits, in order, in one call of the store."""
    evaluations = [gate.prepare_rule(*hit) for hit in hits]
    asked = [evaluation for evaluation in evaluations if evaluation.entries and evaluation.reason != BLOCKED]
    others = [evaluation for evaluation in evaluations if not evaluation.entries]
    for evaluation in evaluations:
        if evaluation.reason == BLOCKED:
            gate._refuse(evaluation, blocked_decision(evaluation))
    decisions: Sequence[Decision | StoreError] = ()
    try:
        if asked:
            decisions = yield Call(asked[0].compiled.store, "decide_many", ([gate._claims(one) for one in asked], 0))
    except StoreError as error:
        decisions = [error] * len(asked)
    for evaluation, decision in zip(asked, decisions, strict=True):
        conclude(gate, evaluation, decision)
    for evaluation in others:
        yield from without_limits(gate, evaluation)
    return evaluations


def without_limits(gate: Evaluator, evaluation: Evaluation) -> Plan[Evaluation]:
    """The evaluation of a rule that is unlimited, in shadow mode, or has a capacity."""
    refused = yield from rule_fair_share.ask(gate, evaluation, None)
    return (yield from ask_shadow(gate, gate._allow_unlimited(evaluation))) if refused is None else refused


def reserve_rule(gate: Evaluator, hit: RuleHit, max_wait_us: int) -> Plan[Evaluation]:
    """A charge at the earliest start within `max_wait_us`. `evaluation.claims` is what was charged, None if nothing was."""
    evaluation = gate.prepare_rule(*hit)
    if evaluation.capacity is not None:
        raise ConfigurationError(f"{hit[0].name}: a capacity can't be reserved, its shares depend on who asks; use a hit")
    if not evaluation.entries:
        return (yield from without_limits(gate, evaluation))
    if evaluation.reason == BLOCKED:
        evaluation.claims = None
        return gate._refuse(evaluation, blocked_decision(evaluation))
    for entry in evaluation.entries:
        if max_wait_us and not evaluation.compiled.store.can_reserve(entry.named):
            raise ConfigurationError(f"{entry.label}: {entry.named.limit} can't reserve a later start; leave max_wait out")
    found: Decision | StoreError
    try:
        found = yield Call(evaluation.compiled.store, "decide", (gate._claims(evaluation), max_wait_us))
    except StoreError as error:
        found = error
    if isinstance(found, StoreError) or gate._on_failure.has_failed(found) or not found.allowed:
        evaluation.claims = None
    return conclude(gate, evaluation, found)


def peek_rule(gate: Evaluator, hit: RuleHit) -> Plan[Decision | None]:
    """The decision that a hit would get now; None: unlimited. A rule in shadow mode is asked as any other."""
    evaluation = gate.prepare_rule(*hit)
    if evaluation.reason == BLOCKED:
        return blocked_decision(evaluation)
    for one in evaluation.capacity or ():
        return (yield from one.rule.capacity.plan_call("peek", one.key, one.cost))  # type: ignore[no-any-return]
    claims = evaluation.shadow[0].claims if evaluation.shadow else gate._claims(evaluation)
    if not claims:
        return None
    decision: Decision = yield Call(evaluation.compiled.store, "decide", (claims, 0), {"commit": False})
    return decision


def conclude(gate: Evaluator, evaluation: Evaluation, decision: Decision | StoreError) -> Evaluation:
    """Counts what the store decided; where it failed, the rule's `on_failure` decides."""
    if isinstance(decision, StoreError) or gate._on_failure.has_failed(decision):
        return gate._on_failure.answer(gate, evaluation, decision)
    return gate._allow(evaluation, decision) if decision.allowed else gate._refuse(evaluation, decision)
