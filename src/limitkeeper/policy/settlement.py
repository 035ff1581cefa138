"""What is settled when the response is known: outcomes that do not count, and costs by the size of the response.

Everything was charged when the request came, so that many at once can't pass on the same allowance. An outcome that does not
count takes its charge back; a response that was smaller than estimated gives the difference back, a larger one is charged on top.
Where the outcome is unknown (the client disconnected before the response began) nothing goes back: otherwise a client that
disconnects after each guess would never be charged for a failed login.
Whatever was charged goes back to the store that charged it, also when the policy has another one by now.
"""

from __future__ import annotations

import logging
from typing import Any

from ..algorithms.claim import Claim
from ..decision import Decision
from ..errors import StoreError
from ..wait_queue import Waiter, wait_queue_of
from .evaluation import Evaluation
from .identity.callback_errors import CallbackErrors, callback_name
from .model import Charge

log = logging.getLogger("limitkeeper")
callback_errors = CallbackErrors()
#: The status of a response that never began, and of which nobody can tell what it would have been.
UNKNOWN = 0


def counts(charge: Charge, status: int, context: Any) -> bool:
    """Whether an outcome counts: an unknown one does, and one for which the application's function raises."""
    if status == UNKNOWN:
        return True
    if charge.call is not None:
        try:
            return bool(charge.call(status, context))
        except Exception as error:
            callback_errors.report("%s raised %s: the request counts", callback_name(charge.call), type(error).__name__)
            return True
    return not charge.statuses or any(low <= status <= high for low, high in charge.statuses)


def changes(evaluation: Evaluation, status: int, size: int) -> list[Claim]:
    """What goes back, claim by claim; a negative cost is charged on top."""
    found = []
    for claim, entry in zip(evaluation.claims, evaluation.entries, strict=True):
        found += changed(entry.compiled_rule, claim, evaluation.context, status, size)
    return found


def changed(compiled_rule: Any, claim: Claim, context: Any, status: int, size: int) -> list[Claim]:
    """What goes back of one claim, if anything does."""
    rule = compiled_rule.config
    if not counts(rule.charge, status, context):
        if claim.limit.name == rule.name:
            compiled_rule.given_back += 1
        return [claim]
    change = claim.cost - -(-size // rule.cost.per) if rule.cost.source == "response" else 0
    if status == UNKNOWN:
        change = min(change, 0)
    return [Claim(claim.limit, claim.key, change, claim.cost)] if change else []


def shadows(gate: Any, evaluation: Evaluation, status: int, size: int) -> list[Waiter]:
    """What goes back of rules in shadow."""
    found = []
    for compiled_rule, claims, decision in evaluation.shadow or ():
        if decision is None or not (compiled_rule.needs_settlement and decision.allowed) or gate.on_failure.has_failed(decision):
            continue
        back = [one for claim in claims for one in changed(compiled_rule, claim, evaluation.context, status, size)]
        found += [Waiter(back, decision, None)] if back else []
    return found


def marks(evaluation: Evaluation, status: int) -> list[Waiter]:
    """Marks of charges that go back: nothing was charged, so a repetition of it would be the first."""
    found = evaluation.idempotent or ()
    return [
        Waiter([claim], answer, None)
        for compiled_rule, claim, answer in found
        if answer is not None and not counts(compiled_rule.config.charge, status, evaluation.context)
    ]


def turns_of(gate: Any, evaluation: Evaluation, status: int, size: int) -> list[Waiter]:
    """What leaves the line, once."""
    evaluation.needs_settlement = False
    found: list[Waiter] = []
    if evaluation.allowed and evaluation.claims is not None and evaluation.decision is not None:
        claims = changes(evaluation, status, size)
        decision: Any = evaluation.decision
        found = [*([Waiter(claims, decision, None)] if claims else ()), *marks(evaluation, status)]
    if evaluation.allowed and evaluation.shadow:
        found += shadows(gate, evaluation, status, size)
    evaluation.context = None
    return found


# Alerts ---------------------------------------------------------------------------------------------------------------


def rising(evaluation: Evaluation, turns: list[Waiter]) -> list[tuple[int, int]]:
    """Which entries were charged on top, and how much, of rules that want to be told: a response may cross their mark."""
    more = {(claim.limit, claim.key): -claim.cost for turn in turns for claim in turn.claims if claim.cost < 0}
    pairs = enumerate(zip(evaluation.entries, evaluation.keys, strict=True)) if more else ()
    found = [(i, more.get((entry.named, key), 0)) for i, (entry, key) in pairs if entry.compiled_rule.alert >= 0]
    return [(i, units) for i, units in found if units]


def look_at(evaluation: Evaluation, risen: list[tuple[int, int]]) -> list[Claim]:
    return [Claim(evaluation.entries[i].named, evaluation.keys[i], 0) for i, _ in risen]


def alert(gate: Any, evaluation: Evaluation, risen: list[tuple[int, int]], told: Decision) -> None:
    """Tells of every key whose use was below its rule's mark when the request came, and is above it now."""
    decision: Any = evaluation.decision
    for (i, units), after in zip(risen, told.decisions, strict=True):
        entry, before = evaluation.entries[i], decision.decisions[i]
        mark = after.limit * entry.compiled_rule.alert
        used = after.limit - after.remaining
        if before.limit - before.remaining < mark <= used and used - units < mark:
            entry.compiled_rule.alerts += 1
            gate.alerted(evaluation, entry, after, i)


# In both colours ------------------------------------------------------------------------------------------------------


def settled(gate: Any, evaluation: Evaluation, status: int, size: int) -> None:
    store, turns = evaluation.compiled.store, turns_of(gate, evaluation, status, size)
    if turns:
        try:
            wait_queue_of(store).leave(turns)
            risen = rising(evaluation, turns)
            if risen:
                alert(gate, evaluation, risen, store.decide(look_at(evaluation, risen), 0, commit=False))
        except StoreError as error:
            not_delivered(gate, error)


async def asettled(gate: Any, evaluation: Evaluation, status: int, size: int) -> None:
    store, turns = evaluation.compiled.store, turns_of(gate, evaluation, status, size)
    if turns:
        try:
            if store.local:
                wait_queue_of(store).leave(turns)
            else:
                await wait_queue_of(store).aleave(turns)
            risen = rising(evaluation, turns)
            if risen:
                claims = look_at(evaluation, risen)
                told = store.decide(claims, 0, commit=False) if store.local else await store.adecide(claims, 0, False)
                alert(gate, evaluation, risen, told)
        except StoreError as error:
            not_delivered(gate, error)


def not_delivered(gate: Any, error: StoreError) -> None:
    """A store that fails now has charged more than was used: the strict side."""
    log.warning("settling with the store of %r failed: %s", gate.policy.name, error)
