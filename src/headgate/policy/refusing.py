"""How a refusal is made: who speaks, when to come back, in which words.

Retry-After is always the longest of all refusing rules, so that it is true. Status, message and action are those of the refusing
rule with the highest priority; among equals, of the one that takes longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..decision import Decision
from ..observe.events import REFUSED
from .model import DEGRADE, Rule
from .passage import QUEUE_FULL, QUOTA, SHUT_OUT, STORE, Entry, Passage, Refusal


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


def may_wait(passage: Passage, decision: Decision) -> bool:
    """Whether every rule that refuses would rather wait, and it can pass at all."""
    if decision.retry_us < 0:
        return False
    for entry, part in zip(passage.entries, decision.decisions, strict=True):
        if not part.allowed and not entry.clause.waits:
            return False
    return True


def filled(text: str, retry_after: int | None, limit: int, remaining: int, rule: str) -> str:
    """A message with its places filled in."""
    if "{" not in text:
        return text
    told = {"retry_after": "" if retry_after is None else str(retry_after), "limit": str(limit), "remaining": str(remaining)}
    for name, value in (*told.items(), ("rule", rule)):
        text = text.replace(f"{{{name}}}", value)
    return text


def speaker_of(passage: Passage, decision: Decision) -> tuple[Entry, Decision]:
    """The refusing entry whose rule speaks."""
    refusing = [pair for pair in zip(passage.entries, decision.decisions, strict=True) if not pair[1].allowed]
    return max(refusing, key=lambda pair: (pair[0].rule.priority, pair[1].retry_us < 0, pair[1].retry_us))


def refusal_of(passage: Passage, decision: Decision, reason: str) -> Refusal:
    entry, part = speaker_of(passage, decision)
    rule: Rule = entry.rule
    retry_after = seconds(decision.retry_us) if decision.retry_us >= 0 else None
    status = rule.answer.status or (429 if reason == QUOTA else 503)
    text = rule.answer.message if rule.answer.message is not None else MESSAGES[reason](retry_after)
    return Refusal(
        reason,
        status,
        retry_after,
        filled(text, retry_after, part.limit, part.remaining, rule.name),
        rule,
        tuple([one.label for one, told in zip(passage.entries, decision.decisions, strict=True) if not told.allowed]),
        part.limit,
        part.remaining,
        decision.retry_us,
    )


def refused(gate: Any, passage: Passage, decision: Decision) -> Passage:
    """Counts a refused request and says why."""
    passage.decision = decision
    passage.allowed = passage.owes = False
    refusal = passage.refusal = refusal_of(passage, decision, passage.reason)
    for entry, key, part in zip(passage.entries, passage.keys, decision.decisions, strict=True):
        if not part.allowed:
            entry.clause.refused += 1
            gate.offenders.offer(entry.label, key)
    if refusal.rule is not None and refusal.rule.on_refusal.action == DEGRADE:
        speaker_of(passage, decision)[0].clause.degraded += 1
    gate.refused_one(passage)
    gate.tell(REFUSED, passage)
    if gate.shutter is not None and gate.shutter.note(gate, passage):
        gate.tell(SHUT_OUT, passage)
    return passage
