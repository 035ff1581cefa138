"""Refusal: why a request was refused, when to retry, and in which words.

Retry-After is the longest of all refusing rules, so that it is true. Status, message and action are those of the refusing rule
with the highest priority; among equals, of the rule with the longest retry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.policy.compiled_policy import Entry
else:
    from ..decision import Decision
    from .compiled_policy import Entry

from .model import Rule

#: Reasons of a refusal.
QUOTA, QUEUE_FULL, PENALTY_BOX, STORE = "quota", "queue full", "penalty box", "store"


def retry_text(seconds: int | None) -> str:
    return "" if seconds is None else f" Retry after {seconds}s."


MESSAGES: dict[str, Callable[[int | None], str]] = {
    QUOTA: lambda s: "This request costs more than its limit ever allows." if s is None else f"Too many requests.{retry_text(s)}",
    QUEUE_FULL: lambda s: f"Too many requests are waiting.{retry_text(s)}",
    PENALTY_BOX: lambda s: f"Too many refused requests.{retry_text(s)}",
    STORE: lambda s: f"The limit could not be checked.{retry_text(s)}",
}


@cython.cclass
class Refusal:
    """Why a request was refused. `retry_after` is in whole seconds, rounded up; None: never.

    `rule` is the rule that gives status, message and body; None for the penalty box. `violated` are the labels of all entries
    that refused. `retry_us` is `retry_after` in microseconds, for protocols that can carry it.
    """

    # Not a dataclass: creating a frozen one costs more than the decision that refused.
    __slots__ = ("limit", "message", "reason", "remaining", "retry_after", "retry_us", "rule", "status", "violated")

    def __init__(
        self,
        reason: str,
        status: int,
        retry_after: int | None,
        message: str,
        rule: Rule | None = None,
        violated: tuple[str, ...] = (),
        limit: int = 0,
        remaining: int = 0,
        retry_us: int = 0,
    ) -> None:
        self.reason = reason
        self.status = status
        self.retry_after = retry_after
        self.message = message
        self.rule = rule
        self.violated = violated
        self.limit = limit
        self.remaining = remaining
        self.retry_us = retry_us

    def __repr__(self) -> str:
        return f"<Refusal {self.status} {self.reason}: {self.message}>"


def seconds(microseconds: int) -> int:
    """Whole seconds, rounded up."""
    return -(-microseconds // 1_000_000)


def format_message(text: str, retry_after: int | None, limit: int, remaining: int, rule: str) -> str:
    """A message with its placeholders replaced."""
    values = {"retry_after": retry_after, "limit": limit, "remaining": remaining, "rule": rule}
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def refusal_of(entries: Sequence[Entry], decision: Decision, reason: str) -> Refusal:
    """The refusal of a request by the entries whose part of the decision refused."""
    refusing = [pair for pair in zip(entries, decision.decisions, strict=True) if not pair[1].allowed]
    entry, part = max(refusing, key=lambda pair: (pair[0].rule.priority, pair[1].retry_us < 0, pair[1].retry_us))
    return refusal_by(decision, entry, part, tuple([one.label for one, _ in refusing]), reason)


@cython.ccall
def refusal_by(decision: Decision, entry: Entry, part: Decision, violated: tuple, reason: str) -> Refusal:  # type: ignore[type-arg]
    """The refusal by this entry, whose part of the decision is `part`."""
    rule = entry.rule
    answer = rule.answer
    retry_after = seconds(decision.retry_us) if decision.retry_us >= 0 else None
    status = answer.status or (429 if reason == QUOTA else 503)
    text = answer.message
    if text is None or (retry_after is None and "{retry_after}" in text):  # "Retry after Nones." would be wrong
        text = MESSAGES[reason](retry_after)
    elif "{" in text:
        text = format_message(text, retry_after, part.limit, part.remaining, rule.name)
    return Refusal(reason, status, retry_after, text, rule, violated, part.limit, part.remaining, decision.retry_us)
