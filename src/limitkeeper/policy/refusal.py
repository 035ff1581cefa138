"""How a refusal is made: who speaks, when to come back, in which words.

Retry-After is always the longest of all refusing rules, so that it is true. Status, message and action are those of the refusing
rule with the highest priority; among equals, of the one that takes longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.policy.compiled_rule import CompiledRule
    from cython.cimports.limitkeeper.policy.evaluation import Entry, Evaluation, Refusal
else:
    from ..decision import Decision
    from .compiled_rule import CompiledRule
    from .evaluation import Entry, Evaluation, Refusal

from ..observe.events import PENALTY_BOX, REFUSED
from .evaluation import QUEUE_FULL, QUOTA, SHUT_OUT, STORE
from .model import DEGRADE


def again(seconds: int | None) -> str:
    return "" if seconds is None else f" Retry after {seconds}s."


MESSAGES: dict[str, Callable[[int | None], str]] = {
    QUOTA: lambda s: "This request costs more than its limit ever allows." if s is None else f"Too many requests.{again(s)}",
    QUEUE_FULL: lambda s: f"Too many requests are waiting.{again(s)}",
    SHUT_OUT: lambda s: f"Too many refused requests.{again(s)}",
    STORE: lambda s: f"The limit could not be checked.{again(s)}",
}


def seconds(microseconds: int) -> int:
    """Whole seconds, rounded up."""
    return -(-microseconds // 1_000_000)


def may_wait(evaluation: Evaluation, decision: Decision) -> bool:
    """Whether every rule that refuses would rather wait, and it can pass at all."""
    if decision.retry_us < 0:
        return False
    for entry, part in zip(evaluation.entries, decision.decisions, strict=True):
        if not part.allowed and not entry.compiled_rule.waits:
            return False
    return True


def filled(text: str, retry_after: int | None, limit: int, remaining: int, rule: str) -> str:
    """A message with its places filled in."""
    told = {"retry_after": str(retry_after), "limit": str(limit), "remaining": str(remaining)}
    for name, value in (*told.items(), ("rule", rule)):
        text = text.replace(f"{{{name}}}", value)
    return text


def speaker_of(evaluation: Evaluation, decision: Decision) -> tuple[Entry, Decision]:
    """The refusing entry whose rule speaks."""
    refusing = [pair for pair in zip(evaluation.entries, decision.decisions, strict=True) if not pair[1].allowed]
    return max(refusing, key=lambda pair: (pair[0].rule.priority, pair[1].retry_us < 0, pair[1].retry_us))


def refusal_of(evaluation: Evaluation, decision: Decision, reason: str) -> Refusal:
    """What a refused request is told, by whichever of its rules speaks."""
    entry, part = speaker_of(evaluation, decision)
    labels = [one.label for one, told in zip(evaluation.entries, decision.decisions, strict=True) if not told.allowed]
    return worded(decision, entry, part, tuple(labels), reason)


@cython.cfunc
def worded(decision: Decision, entry: Entry, part: Decision, violated: tuple, reason: str) -> Refusal:  # type: ignore[type-arg]
    rule: Any = entry.rule
    answer: Any = rule.answer
    retry_after = seconds(decision.retry_us) if decision.retry_us >= 0 else None
    status = answer.status or (429 if reason == QUOTA else 503)
    text = answer.message
    if text is None or (retry_after is None and "{retry_after}" in text):  # "Retry after s." would say nothing
        text = MESSAGES[reason](retry_after)
    elif "{" in text:
        text = filled(text, retry_after, part.limit, part.remaining, rule.name)
    return Refusal(reason, status, retry_after, text, rule, violated, part.limit, part.remaining, decision.retry_us)


def refused(gate: Any, evaluation: Evaluation, decision: Decision) -> Evaluation:
    """Counts a refused request and says why."""
    entry: Entry = evaluation.entries[0]
    part: Decision
    compiled_rule: CompiledRule = entry.compiled_rule
    last: Any = None
    refusal: Refusal
    evaluation.decision = decision
    evaluation.allowed = evaluation.needs_settlement = False
    if len(evaluation.entries) == 1:  # the way of a client in a retry loop
        compiled_rule.refused += 1
        gate.offenders.offer(compiled_rule.name, evaluation.keys[0])
        refusal = worded(decision, entry, decision, (entry.label,), evaluation.reason)
    else:
        for entry, key, part in zip(evaluation.entries, evaluation.keys, decision.decisions, strict=True):
            compiled_rule = entry.compiled_rule
            if not part.allowed and compiled_rule is not last:  # limits of one rule stand together, and count once
                compiled_rule.refused += 1
                gate.offenders.offer(compiled_rule.name, key)
                last = compiled_rule
        refusal = refusal_of(evaluation, decision, evaluation.reason)
    evaluation.refusal = refusal
    if refusal.rule.on_refusal.action == DEGRADE:  # type: ignore[union-attr]
        compiled_rule = clause_of(evaluation, refusal.rule)
        compiled_rule.degraded += 1
    shut = gate.penalty_box is not None and gate.penalty_box.note(gate, evaluation)
    gate.refused_one(evaluation)
    gate.publish(REFUSED, evaluation)
    if shut:
        gate.publish(PENALTY_BOX, evaluation)
    return evaluation


def clause_of(evaluation: Evaluation, rule: Any) -> CompiledRule:
    """A rule as it runs."""
    return next(entry.compiled_rule for entry in evaluation.entries if entry.rule is rule)  # type: ignore[no-any-return]
