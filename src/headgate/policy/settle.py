"""What is settled when the response is known: outcomes that do not count, and costs by the size of the response.

Everything was charged when the request came, so that many at once can't pass on the same allowance. An outcome that does not
count takes its charge back; a response that was smaller than estimated gives the difference back, a larger one is charged on top.
"""

from __future__ import annotations

import logging
from typing import Any

from ..algorithms.claim import Claim
from ..errors import StoreError
from ..line import Turn, line_of
from .identity.complaints import Complaints, title
from .model import Charge
from .passage import Passage

log = logging.getLogger("headgate")
complaints = Complaints()


def counts(charge: Charge, status: int, facts: Any) -> bool:
    """Whether an outcome counts; where a function of the application that should say so raises, it does."""
    if charge.call is not None:
        try:
            return bool(charge.call(status, facts))
        except Exception as error:
            complaints.tell("%s raised %s: the request counts", title(charge.call), type(error).__name__)
            return True
    return not charge.statuses or any(low <= status <= high for low, high in charge.statuses)


def changes(passage: Passage, status: int, size: int) -> list[Claim]:
    """What goes back, claim by claim; a negative cost is charged on top."""
    found = []
    for claim, entry in zip(passage.claims, passage.entries, strict=True):
        rule, clause = entry.rule, entry.clause
        if not counts(rule.charge, status, passage.facts):
            if entry.label == rule.name:
                clause.given_back += 1
            found.append(claim)
        elif rule.cost.source == "response":
            change = claim.cost - -(-size // rule.cost.per)
            if change:
                found.append(Claim(claim.limit, claim.key, change, claim.cost))
    return found


def marks(passage: Passage, status: int) -> list[Turn]:
    """Marks of charges that go back: nothing was charged, so a repetition of it would be the first."""
    found = passage.onces or ()
    return [
        Turn([claim], answer, None)
        for clause, claim, answer in found
        if answer is not None and not counts(clause.rule.charge, status, passage.facts)
    ]


def turns_of(gate: Any, passage: Passage, status: int, size: int) -> list[Turn]:
    """What leaves the line, once."""
    passage.owes = False
    claims = changes(passage, status, size)
    decision: Any = passage.decision
    found = [*([Turn(claims, decision, None)] if claims else ()), *marks(passage, status)]
    passage.facts = None
    return found


def settled(gate: Any, passage: Passage, status: int, size: int) -> None:
    turns = turns_of(gate, passage, status, size)
    if turns:
        try:
            line_of(gate.store).leave(turns)
        except StoreError as error:
            not_delivered(gate, error)


async def asettled(gate: Any, passage: Passage, status: int, size: int) -> None:
    turns = turns_of(gate, passage, status, size)
    if turns:
        try:
            if gate.store.local:
                line_of(gate.store).leave(turns)
            else:
                await line_of(gate.store).aleave(turns)
        except StoreError as error:
            not_delivered(gate, error)


def not_delivered(gate: Any, error: StoreError) -> None:
    """A store that fails now has charged more than was used: the strict side."""
    log.warning("settling with the store of %r failed: %s", gate.policy.name, error)
