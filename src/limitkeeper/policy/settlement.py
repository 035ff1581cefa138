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
complaints = CallbackErrors()
#: The status of a response that never began, and of which nobody can tell what it would have been.
UNKNOWN = 0


def counts(charge: Charge, status: int, facts: Any) -> bool:
    """Whether an outcome counts: an unknown one does, and one for which the application's function raises."""
    if status == UNKNOWN:
        return True
    if charge.call is not None:
        try:
            return bool(charge.call(status, facts))
        except Exception as error:
            complaints.report("%s raised %s: the request counts", callback_name(charge.call), type(error).__name__)
            return True
    return not charge.statuses or any(low <= status <= high for low, high in charge.statuses)


def changes(passage: Evaluation, status: int, size: int) -> list[Claim]:
    """What goes back, claim by claim; a negative cost is charged on top."""
    found = []
    for claim, entry in zip(passage.claims, passage.entries, strict=True):
        found += changed(entry.clause, claim, passage.facts, status, size)
    return found


def changed(clause: Any, claim: Claim, facts: Any, status: int, size: int) -> list[Claim]:
    """What goes back of one claim, if anything does."""
    rule = clause.rule
    if not counts(rule.charge, status, facts):
        if claim.limit.name == rule.name:
            clause.given_back += 1
        return [claim]
    change = claim.cost - -(-size // rule.cost.per) if rule.cost.source == "response" else 0
    if status == UNKNOWN:
        change = min(change, 0)
    return [Claim(claim.limit, claim.key, change, claim.cost)] if change else []


def shadows(gate: Any, passage: Evaluation, status: int, size: int) -> list[Waiter]:
    """What goes back of rules in shadow."""
    found = []
    for clause, claims, decision in passage.shadow or ():
        if decision is None or not (clause.owes and decision.allowed) or gate.failing.has_failed(decision):
            continue
        back = [one for claim in claims for one in changed(clause, claim, passage.facts, status, size)]
        found += [Waiter(back, decision, None)] if back else []
    return found


def marks(passage: Evaluation, status: int) -> list[Waiter]:
    """Marks of charges that go back: nothing was charged, so a repetition of it would be the first."""
    found = passage.onces or ()
    return [
        Waiter([claim], answer, None)
        for clause, claim, answer in found
        if answer is not None and not counts(clause.rule.charge, status, passage.facts)
    ]


def turns_of(gate: Any, passage: Evaluation, status: int, size: int) -> list[Waiter]:
    """What leaves the line, once."""
    passage.owes = False
    found: list[Waiter] = []
    if passage.allowed and passage.claims is not None and passage.decision is not None:
        claims = changes(passage, status, size)
        decision: Any = passage.decision
        found = [*([Waiter(claims, decision, None)] if claims else ()), *marks(passage, status)]
    if passage.allowed and passage.shadow:
        found += shadows(gate, passage, status, size)
    passage.facts = None
    return found


# Alerts ---------------------------------------------------------------------------------------------------------------


def rising(passage: Evaluation, turns: list[Waiter]) -> list[tuple[int, int]]:
    """Which entries were charged on top, and how much, of rules that want to be told: a response may cross their mark."""
    more = {(claim.limit, claim.key): -claim.cost for turn in turns for claim in turn.claims if claim.cost < 0}
    pairs = enumerate(zip(passage.entries, passage.keys, strict=True)) if more else ()
    found = [(i, more.get((entry.named, key), 0)) for i, (entry, key) in pairs if entry.clause.alert >= 0]
    return [(i, units) for i, units in found if units]


def look_at(passage: Evaluation, risen: list[tuple[int, int]]) -> list[Claim]:
    return [Claim(passage.entries[i].named, passage.keys[i], 0) for i, _ in risen]


def alert(gate: Any, passage: Evaluation, risen: list[tuple[int, int]], told: Decision) -> None:
    """Tells of every key whose use was below its rule's mark when the request came, and is above it now."""
    decision: Any = passage.decision
    for (i, units), after in zip(risen, told.decisions, strict=True):
        entry, before = passage.entries[i], decision.decisions[i]
        mark = after.limit * entry.clause.alert
        used = after.limit - after.remaining
        if before.limit - before.remaining < mark <= used and used - units < mark:
            entry.clause.alerts += 1
            gate.alerted(passage, entry, after, i)


# In both colours ------------------------------------------------------------------------------------------------------


def settled(gate: Any, passage: Evaluation, status: int, size: int) -> None:
    store, turns = passage.edition.store, turns_of(gate, passage, status, size)
    if turns:
        try:
            wait_queue_of(store).leave(turns)
            risen = rising(passage, turns)
            if risen:
                alert(gate, passage, risen, store.decide(look_at(passage, risen), 0, commit=False))
        except StoreError as error:
            not_delivered(gate, error)


async def asettled(gate: Any, passage: Evaluation, status: int, size: int) -> None:
    store, turns = passage.edition.store, turns_of(gate, passage, status, size)
    if turns:
        try:
            if store.local:
                wait_queue_of(store).leave(turns)
            else:
                await wait_queue_of(store).aleave(turns)
            risen = rising(passage, turns)
            if risen:
                claims = look_at(passage, risen)
                told = store.decide(claims, 0, commit=False) if store.local else await store.adecide(claims, 0, False)
                alert(gate, passage, risen, told)
        except StoreError as error:
            not_delivered(gate, error)


def not_delivered(gate: Any, error: StoreError) -> None:
    """A store that fails now has charged more than was used: the strict side."""
    log.warning("settling with the store of %r failed: %s", gate.policy.name, error)
