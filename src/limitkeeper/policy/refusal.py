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


def may_wait(passage: Evaluation, decision: Decision) -> bool:
    """Whether every rule that refuses would rather wait, and it can pass at all."""
    if decision.retry_us < 0:
        return False
    for entry, part in zip(passage.entries, decision.decisions, strict=True):
        if not part.allowed and not entry.clause.waits:
            return False
    return True


def filled(text: str, retry_after: int | None, limit: int, remaining: int, rule: str) -> str:
    """A message with its places filled in."""
    told = {"retry_after": str(retry_after), "limit": str(limit), "remaining": str(remaining)}
    for name, value in (*told.items(), ("rule", rule)):
        text = text.replace(f"{{{name}}}", value)
    return text


def speaker_of(passage: Evaluation, decision: Decision) -> tuple[Entry, Decision]:
    """The refusing entry whose rule speaks."""
    refusing = [pair for pair in zip(passage.entries, decision.decisions, strict=True) if not pair[1].allowed]
    return max(refusing, key=lambda pair: (pair[0].rule.priority, pair[1].retry_us < 0, pair[1].retry_us))


def refusal_of(passage: Evaluation, decision: Decision, reason: str) -> Refusal:
    """What a refused request is told, by whichever of its rules speaks."""
    entry, part = speaker_of(passage, decision)
    labels = [one.label for one, told in zip(passage.entries, decision.decisions, strict=True) if not told.allowed]
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


def refused(gate: Any, passage: Evaluation, decision: Decision) -> Evaluation:
    """Counts a refused request and says why."""
    entry: Entry = passage.entries[0]
    part: Decision
    clause: CompiledRule = entry.clause
    last: Any = None
    refusal: Refusal
    passage.decision = decision
    passage.allowed = passage.owes = False
    if len(passage.entries) == 1:  # the way of a client in a retry loop
        clause.refused += 1
        gate.offenders.offer(clause.name, passage.keys[0])
        refusal = worded(decision, entry, decision, (entry.label,), passage.reason)
    else:
        for entry, key, part in zip(passage.entries, passage.keys, decision.decisions, strict=True):
            clause = entry.clause
            if not part.allowed and clause is not last:  # limits of one rule stand together, and count once
                clause.refused += 1
                gate.offenders.offer(clause.name, key)
                last = clause
        refusal = refusal_of(passage, decision, passage.reason)
    passage.refusal = refusal
    if refusal.rule.on_refusal.action == DEGRADE:  # type: ignore[union-attr]
        clause = clause_of(passage, refusal.rule)
        clause.degraded += 1
    shut = gate.shutter is not None and gate.shutter.note(gate, passage)
    gate.refused_one(passage)
    gate.tell(REFUSED, passage)
    if shut:
        gate.tell(PENALTY_BOX, passage)
    return passage


def clause_of(passage: Evaluation, rule: Any) -> CompiledRule:
    """A rule as it runs."""
    return next(entry.clause for entry in passage.entries if entry.rule is rule)  # type: ignore[no-any-return]
