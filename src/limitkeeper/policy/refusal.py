"""Refusal: chooses status, message and retry time among the rules that refuse a request. Fields and body: `web/`.

Retry-After is the longest of all refusing rules and of the client's penalty, so that it is true. Status, message and action are
those of the refusing rule with the highest priority; among equals, of one that does not degrade, since a degraded response may
run the application, which this rule refuses; among those, of the rule with the longest retry.

A rule with `retry_after: spread 60s` delays what is sent by a part of the interval that depends on the client, so that clients
that were refused together do not come back together. The Decision keeps the exact time.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.policy.compiled_rule import Entry
else:
    from ..decision import Decision
    from .compiled_rule import Entry

from .callback_errors import CallbackErrors, callback_name
from .compiled_rule import identity_of, join_key
from .model import BLOCKED as BLOCKED_LIMIT
from .model import DEGRADE, Rule

#: Reasons of a refusal.
QUOTA, QUEUE_FULL, PENALTY_BOX, STORE = "quota", "queue full", "penalty box", "store"
BLOCKED, CONCURRENT, CAPACITY = "blocked", "concurrent", "capacity"
#: When to retry where too many requests run at a time: the end of a running request is unknown.
CONCURRENT_RETRY_US = 1_000_000
SECOND_US = 1_000_000
callback_errors = CallbackErrors()


MESSAGES = {
    QUOTA: "Too many requests.",
    QUEUE_FULL: "Too many requests are waiting.",
    PENALTY_BOX: "Too many refused requests.",
    STORE: "The limit could not be checked.",
    BLOCKED: "Requests are blocked.",
    CONCURRENT: "Too many requests at a time.",
    CAPACITY: "The service is at its capacity.",
}


@cython.cclass
class Refusal:
    """Why a request was refused. `retry_after` is in whole seconds, rounded up; None: never.

    `rule` is the rule that gives status, message and body; None for the penalty box. `violated` are the labels of all entries
    that refused. `retry_us` is the same in microseconds, unrounded, for protocols that can carry it. `spread_s` is the part of
    `retry_after` by which a spread delays the retry.
    """

    # Not a dataclass: creating a frozen one costs more than the decision that refused.
    __slots__ = ("limit", "message", "reason", "remaining", "retry_after", "retry_us", "rule", "spread_s", "status", "violated")

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
        spread_s: int = 0,
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
        self.spread_s = spread_s

    def __repr__(self) -> str:
        return f"<Refusal {self.status} {self.reason}: {self.message}>"


def seconds(microseconds: int) -> int:
    """Whole seconds, rounded up."""
    return -(-microseconds // 1_000_000)


def default_message(reason: str, retry_after: int | None) -> str:
    if retry_after is None:
        return "This request costs more than its limit ever allows." if reason == QUOTA else MESSAGES[reason]
    return f"{MESSAGES[reason]} Retry after {retry_after}s."


def call_message(refusal: Refusal, context: Any) -> None:
    """Replaces the message by that of the rule's callable, if it has one. Where it raises, or returns no text, the default
    stays."""
    call: Any = None if refusal.rule is None else refusal.rule.answer.message
    if call is None or isinstance(call, str):
        return
    try:
        text = call(refusal, context)
    except Exception as error:
        callback_errors.report(
            "%s raised %s: the default message is sent", callback_name(call), type(error).__name__, raised=error
        )
        return
    if isinstance(text, str):
        refusal.message = str.__str__(text)  # of a subclass (Django's SafeString, an enum): compiled code takes `str` alone
    else:
        callback_errors.report("%s: expected a string, got %s", callback_name(call), type(text).__name__)


def client_delay(evaluation: Any, earliest_us: int, spread_us: int, retry_us: int) -> int:
    """The part of a spread, in microseconds, by which the retry of a refused request is delayed."""
    context = evaluation.context  # None: a hit of a single rule, without a request
    address = None if context is None else identity_of(evaluation.compiled.identities, context, "ip")
    return delay_of(evaluation.gate.secret, address, evaluation.keys, earliest_us, spread_us, retry_us)


def delay_of(secret: bytes, address: Any, keys: Iterable[str], earliest_us: int, spread_us: int, retry_us: int) -> int:
    """A keyed hash of a client (its address and its keys under all rules) and of the interval of its earliest retry, as a part of
    the spread. A client that is refused again, by its rules or in the penalty box, is sent the same moment. With SHA-512: a
    client may choose its key, and `partition` shows the hash of any key with SHA-256.

    The whole second that is sent lies in the same twentieth of the spread: of 21 whole seconds one twentieth has two, and so
    could have a tenth of the clients."""
    interval = (earliest_us + spread_us // 2) // spread_us  # rounded: windows end where intervals would begin
    text = join_key([f"retry {interval}", address, *sorted(set(keys))])
    place = int.from_bytes(hmac.digest(secret, text.encode("utf-8", "surrogatepass"), "sha512")[:8], "big")
    delay_us = place * spread_us >> 64
    if spread_us >= 20_000_000:
        twentieth, second_us = place * 20 >> 64, delay_us // SECOND_US * SECOND_US
        second_us += (twentieth - (second_us + -retry_us % SECOND_US) * 20 // spread_us) * SECOND_US
        low_us = max(second_us, -(-twentieth * spread_us // 20))
        high_us = min(second_us + SECOND_US, -(-(twentieth + 1) * spread_us // 20))
        delay_us = low_us + delay_us % SECOND_US * (high_us - low_us) // SECOND_US
    return delay_us


def block(evaluation: Any, entries: tuple[Entry, ...], key: str, cost: int) -> None:
    """Makes this the evaluation of a blocked key: the entry refuses it, and no other rule is asked or charged."""
    evaluation.special, evaluation.reason, evaluation.needs_settlement = True, BLOCKED, False
    evaluation.entries, evaluation.keys, evaluation.costs = list(entries), [key], [cost]
    evaluation.shadow = evaluation.idempotent = None


def blocked_decision(evaluation: Any) -> Decision:
    """The decision about a blocked key: a limit of 0, and never a retry."""
    return Decision(False, 0, 0, -1, name=evaluation.entries[0].label)


def refusal_without_limit(
    reason: str, status: int, retry_us: int, rule: Rule | None = None, violated: tuple[str, ...] = (), delay_us: int = 0
) -> Refusal:
    """The refusal of a request that no limit refused: by the penalty box, or because the store failed."""
    spread_s = delay_us // 1_000_000
    retry_after = seconds(retry_us) + spread_s
    text = default_message(reason, retry_after)
    return Refusal(reason, status, retry_after, text, rule, violated, retry_us=retry_us + delay_us, spread_s=spread_s)


def is_concurrent(entry: Entry) -> bool:
    """Whether this limit counts requests at a time."""
    return entry.rule.concurrent is not None and entry.named.limit is entry.rule.concurrent


def part_retry_us(entry: Entry, part: Decision) -> int:
    return CONCURRENT_RETRY_US if is_concurrent(entry) and part.retry_us >= 0 else int(part.retry_us)


def retry_of(entries: Sequence[Entry], decision: Decision) -> int:
    """The time to retry where some limits count requests at a time: the longest of those that refuse; -1: never."""
    found = [part_retry_us(entry, part) for entry, part in zip(entries, decision.decisions, strict=True) if not part.allowed]
    return -1 if min(found) < 0 else max(found)


def degrades(rule: Rule, reason: str) -> bool:
    """Whether the rule's degrade handler answers a refusal. Not that of a blocked key, unless the rule blocks every key."""
    return rule.on_refusal.action == DEGRADE and (reason != BLOCKED or rule.limit == BLOCKED_LIMIT)


def precedence(rule: Rule) -> tuple[int, bool]:
    """Among the rules that refuse a request, the one with the largest of these answers it."""
    return rule.priority, rule.on_refusal.action != DEGRADE


def refusal_of(entries: Sequence[Entry], decision: Decision, reason: str, retry_us: int, delay_us: int = 0) -> Refusal:
    """The refusal of a request by the entries whose part of the decision refused."""
    refusing = [pair for pair in zip(entries, decision.decisions, strict=True) if not pair[1].allowed]
    entry, part = max(refusing, key=lambda pair: (*precedence(pair[0].rule), pair[1].retry_us < 0, part_retry_us(*pair)))
    return refusal_by(decision, entry, part, tuple([one.label for one, _ in refusing]), reason, retry_us, delay_us)


@cython.ccall
def refusal_by(
    decision: Decision,
    entry: Entry,
    part: Decision,
    violated: tuple,  # type: ignore[type-arg]
    reason: str,
    retry_us: cython.longlong,
    delay_us: cython.longlong = 0,
) -> Refusal:
    """The refusal by this entry, whose part of the decision is `part`, to be retried after `retry_us` (-1: never); what is
    sent is delayed by `delay_us`.

    Whole seconds of the delay are added to the rounded time: the values of a spread are then equally frequent."""
    rule = entry.rule
    answer = rule.answer
    if rule.concurrent is not None and reason == QUOTA and is_concurrent(entry):
        reason = CONCURRENT
    if retry_us < 0:
        delay_us = 0
    spread_s: cython.longlong = delay_us // 1_000_000
    retry_after = seconds(retry_us) + spread_s if retry_us >= 0 else None
    status = answer.status or (429 if reason in (QUOTA, BLOCKED) else 503)
    text = answer.message
    if not isinstance(text, str) or (retry_after is None and "{retry_after}" in text):  # "Retry after Nones." would be wrong
        text = default_message(reason, retry_after)
    elif "{" in text:
        values = {"retry_after": retry_after, "limit": part.limit, "remaining": part.remaining, "rule": rule.name}
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", str(value))
    retry_us += delay_us
    return Refusal(reason, status, retry_after, text, rule, violated, part.limit, part.remaining, retry_us, spread_s)
