"""Settlement: refunds and extra charges once the response is known, for outcomes that do not count and costs by response size.

Everything is charged when the request comes, so that many concurrent requests can't pass on the same allowance. An outcome that
does not count is refunded; a response smaller than estimated refunds the difference, a larger one is charged on top. An unknown
outcome (the client disconnected before the response began) stays charged: otherwise a client that disconnects after each guess
would never be charged for a failed login. Refunds go to the store that charged, also when the policy has another one by now.

A size that is known before the first byte goes (`Content-Length`, a whole body) is charged then (`afford`). A response that its
limit can't hold is not sent: it is refused, its estimate stays charged, since its handler has run, and the retry is that of the
same request and size under all its limits. Streams of unknown length are charged at their end, beyond the limit if need be.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..algorithms.claim import Claim
from ..clock import steady_us
from ..decision import Decision, Decisions
from ..errors import StoreError
from ..stores.sans_io import Call, Plan
from ..wait_queue import Waiter
from .callback_errors import CallbackErrors, callback_name
from .compiled_rule import CompiledRule, Entry
from .idempotency import charges_of, leave
from .model import Charge
from .refusal import is_concurrent
from .request_context import RequestContext

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator

log = logging.getLogger("limitkeeper")
#: Errors of charge callbacks.
callback_errors = CallbackErrors()
#: The status of a response that never began; and the size of one that was refused, or that other code makes of an exception,
#: which is not known: its estimate stays charged.
UNKNOWN, NOT_SENT = 0, -1


def counts(charge: Charge, status: int, context: RequestContext | None) -> bool:
    """Whether an outcome counts; an unknown one does, and one whose callback raises."""
    if status == UNKNOWN:
        return True
    if charge.call is not None:
        try:
            return bool(charge.call(status, context))  # type: ignore[arg-type]
        except Exception as error:
            name = callback_name(charge.call)
            callback_errors.report("%s raised %s: the request counts", name, type(error).__name__, raised=error)
            return True
    return not charge.statuses or any(low <= status <= high for low, high in charge.statuses)


def is_returned(entry: Entry, status: int, context: RequestContext | None) -> bool:
    """Whether the settlement returns the whole charge: a place among requests at a time, or an outcome that does not count."""
    return is_concurrent(entry) or not counts(entry.rule.charge, status, context)


def refund(rule: CompiledRule, claim: Claim, context: RequestContext | None, status: int, size: int) -> list[Claim]:
    """The refund of one claim, if any; a negative cost is charged on top."""
    cost = rule.config.cost
    if claim.limit.limit is rule.config.concurrent:  # its request has ended, however it did
        return [claim]
    if not counts(rule.config.charge, status, context):
        if claim.limit.name == rule.name:
            rule.given_back += 1
        return [claim]
    units = cost.units if size == NOT_SENT else -(-size // cost.per)
    change = claim.cost - units if cost.source == "response" else 0
    if status == UNKNOWN:
        change = min(change, 0)
    return [Claim(claim.limit, claim.key, change, claim.cost, claim.reset_id)] if change else []


def refunds_of(evaluation: Evaluation, status: int, size: int) -> list[Waiter]:
    """All refunds of an evaluation: its own claims, marks of refunded charges (a repetition will be the first), shadow rules."""
    context = evaluation.context
    found: list[Waiter] = []
    if evaluation.claims is not None and evaluation.decision is not None:
        pairs = enumerate(zip(evaluation.claims, evaluation.entries, strict=True))
        back = [(i, one) for i, (claim, entry) in pairs for one in refund(entry.compiled_rule, claim, context, status, size)]
        found = charges_of(evaluation, evaluation.decision, back)
        for mark in evaluation.marks or ():
            if mark.decision is not None and not counts(mark.rule.config.charge, status, context):
                found.append(Waiter([mark.claim], mark.decision, None))
    for rule, charged, decision in evaluation.shadow or ():
        if decision is not None and rule.needs_settlement and decision.allowed:
            claims = [one for claim in charged for one in refund(rule, claim, context, status, size)]
            if claims and not evaluation.gate._on_failure.has_failed(decision):
                found.append(Waiter(claims, decision, None))
    return found


def afford(evaluation: Evaluation, status: int, size: int) -> Plan[bool]:
    """Charges a response of known size before it is sent. False: it must not be sent, and the evaluation has its refusal. If the
    store fails, it is sent, and charged at its end."""
    claims, context, gate = evaluation.claims or [], evaluation.context, evaluation.gate
    wanted: dict[int, int] = {}
    for i, (claim, entry) in enumerate(zip(claims, evaluation.entries, strict=False)):
        units = -(-size // entry.rule.cost.per)
        if entry.rule.cost.source == "response" and units > claim.cost and counts(entry.rule.charge, status, context):
            wanted[i] = units
    if not wanted or not evaluation.allowed or evaluation.decision is None or gate._on_failure.has_failed(evaluation.decision):
        return True
    extra = [Claim(claims[i].limit, claims[i].key, units - claims[i].cost) for i, units in wanted.items()]
    whole = [
        Claim(claim.limit, claim.key, wanted.get(i, 0 if is_returned(entry, status, context) else claim.cost))
        for i, (claim, entry) in enumerate(zip(claims, evaluation.entries, strict=True))
    ]
    try:
        decision = yield Call(evaluation.compiled.store, "decide", (extra, 0))
        if decision.allowed or gate._on_failure.has_failed(decision):
            parts = () if gate._on_failure.has_failed(decision) else decision.decisions
            for (i, units), part in zip(wanted.items(), parts, strict=False):
                alert_crossed(evaluation, evaluation.entries[i], part, units - claims[i].cost)
                claims[i] = Claim(claims[i].limit, claims[i].key, units, units, claims[i].reset_id)
            evaluation.decision = after_charge(evaluation.decision, dict(zip(wanted, parts, strict=False)))
            return True
        decision = yield Call(evaluation.compiled.store, "decide", (whole, 0), {"commit": False})
    except StoreError:
        return True
    if gate._on_failure.has_failed(decision) or all(decision.decisions[i].allowed for i in wanted):
        return True
    yield from settle(evaluation, status, NOT_SENT)
    evaluation.context = context
    refuse_response(gate, evaluation, decision)
    return False


def after_charge(before: Decision, charged: Mapping[int, Decision]) -> Decision:
    """The decision of a request, with what is left after a further charge of some of its limits, for the fields of its response.
    When and where it was charged stays as it was, for what is given back."""
    parts = [
        Decision(
            one.allowed, one.limit, now.remaining, one.retry_us, now.reset_us, one.wait_us, one.start_us, one.name, one.source
        )
        for one, now in [(one, charged.get(i, one)) for i, one in enumerate(before.decisions)]
    ]
    if len(parts) == 1:
        return parts[0]
    joined = Decisions.join(parts)
    fields = (joined.allowed, joined.limit, joined.remaining, joined.retry_us, joined.reset_us)
    return Decisions(parts, *fields, before.wait_us, before.start_us, joined.name, before.source)


def refuse_response(gate: Evaluator, evaluation: Evaluation, decision: Decision) -> None:
    """Counts a request as refused that was counted as allowed: its response costs more than is left."""
    evaluation.began_us = steady_us()
    gate._requests -= 1
    gate._allowed -= 1
    if gate._attempts is not None:
        gate._attempts.attempts -= 1
    gate._refuse(evaluation, decision)


def settle(evaluation: Evaluation, status: int, size: int) -> Plan[None]:
    """Settles once. If the store fails now, more is charged than was used: the strict side."""
    evaluation.needs_settlement = False
    decision, on_failure = evaluation.decision, evaluation.gate._on_failure
    if decision is not None and on_failure.has_failed(decision):
        for entry, claim, part in zip(evaluation.entries, evaluation.claims or (), decision.decisions, strict=True):
            on_failure.give_back(entry, refund(entry.compiled_rule, claim, evaluation.context, status, size), part)
        evaluation.context = None
        return
    refunds = refunds_of(evaluation, status, size) if evaluation.allowed else []
    evaluation.context = None
    store = evaluation.compiled.store
    if refunds:
        try:
            yield leave(store, refunds)
            yield from alert(evaluation, refunds)
        except StoreError as error:
            log.warning("settling with the store of %r failed: %s", evaluation.policy.name, error)


def alert(evaluation: Evaluation, refunds: list[Waiter]) -> Plan[None]:
    """Alerts of every key whose use an extra charge has raised across its rule's alert level."""
    extra = {(claim.limit, claim.key): -claim.cost for one in refunds for claim in one.claims if claim.cost < 0}
    parts = evaluation.decision.decisions if evaluation.decision else ()
    entries = zip(evaluation.entries, evaluation.keys, parts, strict=False)
    raised = [one for one in entries if one[0].compiled_rule.alert >= 0 and (one[0].named, one[1]) in extra]
    if not raised:
        return
    claims = [Claim(entry.named, key, 0) for entry, key, _ in raised]
    decision = yield Call(evaluation.compiled.store, "decide", (claims, 0), {"commit": False})
    for (entry, key, before), after in zip(raised, decision.decisions, strict=True):
        if before.limit - before.remaining < after.limit * entry.compiled_rule.alert:
            alert_crossed(evaluation, entry, after, extra[entry.named, key])


def alert_crossed(evaluation: Evaluation, entry: Entry, after: Decision, extra: int) -> None:
    """Alerts where an extra charge, after which the key is in this state, has raised its use across the rule's alert level."""
    level, used = after.limit * entry.compiled_rule.alert, after.limit - after.remaining
    if entry.compiled_rule.alert >= 0 and used - extra < level <= used:
        evaluation.gate._alert(evaluation, entry, used, after.limit)
