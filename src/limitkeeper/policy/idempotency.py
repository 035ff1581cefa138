"""Charging once: requests that carry the same idempotency key are one request, repeated.

Whoever was charged leaves a mark in the store, a fixed window of its own under (rule, key, idempotency key); those that find the
mark take one repetition of it, and are not charged. It counts, so that nobody repeats for ever: beyond `replays` a repetition is
charged like any other. A mark is made only after its charge: a request that is still waiting, was refused or went away vouches
for nobody. Of several that are charged at the same moment, all but the first get their charge back.

So a request that carries the header asks the store twice more: whether there is a mark, then for it.
"""

from __future__ import annotations

import logging
from typing import Any

from ..algorithms.claim import Claim, NamedLimit
from ..algorithms.fixed_window import FixedWindow
from ..decision import Decision
from ..errors import StoreError, StoreUnavailable
from ..rate import Rate
from ..wait_queue import Waiter, wait_queue_of
from .compiled_rule import escaped
from .evaluation import Evaluation
from .identity.key_hashing import hash_long, remember
from .model import Rule

log = logging.getLogger("limitkeeper")
#: How many rules' marks are kept at hand.
MOST_MARKS = 10_000
#: The compiled_rule, its mark, and the answer that made it; None: it is made when the request was charged.
Mark = tuple[Any, Claim, Decision | None]


def mark_of(gate: Any, compiled_rule: Any) -> NamedLimit:
    """The limit that marks a rule's idempotency keys; made once for each way that it is said."""
    rule: Rule = compiled_rule.config
    assert rule.once is not None
    marks: dict[Any, NamedLimit] = gate.marks
    said = (compiled_rule.limiter, rule.name, rule.once.replays, rule.once.keep_us)
    found = marks.get(said)
    if found is None:
        limit = FixedWindow(Rate(rule.once.replays + 1, rule.once.keep_us), align="first")
        found = remember(marks, said, NamedLimit(compiled_rule.limiter, f"{rule.name} once", limit), MOST_MARKS)
    return found


def claims_of(gate: Any, evaluation: Evaluation) -> list[list[Claim]]:
    """The marks to ask for."""
    return [
        [Claim(mark_of(gate, compiled_rule), f"{escaped(key)}|{escaped(hash_long(told))}", 1)]
        for compiled_rule, _, key, _, told in evaluation.idempotent
    ]


# Before the charge ----------------------------------------------------------------------------------------------------


def repeated(seen: list[Decision]) -> list[int]:
    """Which of the marks that were looked at are there, with repetitions left."""
    return [i for i, mark in enumerate(seen) if mark.allowed and mark.remaining < mark.limit]


def charged(evaluation: Evaluation, compiled_rule: Any, limits: Any, key: str, cost: int) -> None:
    """Adds the limits of one that is charged."""
    for entry in limits:
        evaluation.entries.append(entry)
        evaluation.keys.append(key)
        evaluation.costs.append(cost)
    if compiled_rule.needs_settlement:
        evaluation.needs_settlement = True


def sorted_out(evaluation: Evaluation, asked: list[list[Claim]], seen: list[Decision], told: dict[int, Decision]) -> None:
    """Adds the limits of those that are charged; a repetition is not."""
    marks: list[Mark] = []
    for i, (compiled_rule, limits, key, cost, _) in enumerate(evaluation.idempotent):
        taken = told.get(i)
        if taken is not None and taken.allowed:
            compiled_rule.replayed += 1
            marks.append((compiled_rule, asked[i][0], taken))
            continue
        if taken is None and seen[i].allowed:
            marks.append((compiled_rule, asked[i][0], None))
        charged(evaluation, compiled_rule, limits, key, cost)
    evaluation.idempotent = marks


def unknown(evaluation: Evaluation) -> None:
    """Nobody knows whether these are repetitions: all are charged, and whoever answers for the store finds every limit."""
    for compiled_rule, limits, key, cost, _ in evaluation.idempotent:
        charged(evaluation, compiled_rule, limits, key, cost)
    evaluation.idempotent = []


def checked(gate: Any, seen: list[Decision]) -> None:
    """A store that fails at the first question is not asked a second one: that would take its budget twice."""
    if any(gate.on_failure.has_failed(mark) for mark in seen):
        raise StoreUnavailable("the store could not say whether a request is a repetition")


def marked(gate: Any, evaluation: Evaluation) -> None:
    """Looks for the marks, and leaves in the evaluation what is to be charged."""
    if evaluation.idempotent:
        asked = claims_of(gate, evaluation)
        try:
            seen = [gate.store.decide(claims, 0, commit=False) for claims in asked]
            checked(gate, seen)
            again = repeated(seen)
            told = gate.store.decide_many([asked[i] for i in again], 0) if again else []
        except StoreError:
            unknown(evaluation)
            raise
        sorted_out(evaluation, asked, seen, dict(zip(again, told, strict=True)))


async def amarked(gate: Any, evaluation: Evaluation) -> None:
    if evaluation.idempotent:
        asked = claims_of(gate, evaluation)
        try:
            seen = [await gate.store.adecide(claims, 0, commit=False) for claims in asked]
            checked(gate, seen)
            again = repeated(seen)
            told = await gate.store.adecide_many([asked[i] for i in again], 0) if again else []
        except StoreError:
            unknown(evaluation)
            raise
        sorted_out(evaluation, asked, seen, dict(zip(again, told, strict=True)))


def unmarked(gate: Any, evaluation: Evaluation) -> None:
    """Gives the repetitions of a refused request back."""
    for compiled_rule, claim, answer in evaluation.idempotent or ():
        if answer is not None:
            compiled_rule.replayed -= 1
            gate.store.give_back([claim], answer.start_us, answer.source)


async def aunmarked(gate: Any, evaluation: Evaluation) -> None:
    for compiled_rule, claim, answer in evaluation.idempotent or ():
        if answer is not None:
            compiled_rule.replayed -= 1
            await gate.store.agive_back([claim], answer.start_us, answer.source)


# After the charge -----------------------------------------------------------------------------------------------------


def unpaid(evaluation: Evaluation) -> list[Mark]:
    """Marks that are to be made. Repetitions that were taken stay taken, whatever comes of them."""
    evaluation.idempotent = [mark for mark in evaluation.idempotent or () if mark[2] is None]
    return evaluation.idempotent  # type: ignore[no-any-return]


def twins(gate: Any, evaluation: Evaluation, decision: Decision, marks: list[Mark], told: list[Decision]) -> list[Waiter]:
    """What goes back to those who were not the first after all. `evaluation.idempotent` are the marks that were made."""
    evaluation.idempotent = [
        (compiled_rule, claim, answer) for (compiled_rule, claim, _), answer in zip(marks, told, strict=True) if answer.allowed
    ]
    again = {
        id(compiled_rule)
        for compiled_rule, _, answer in evaluation.idempotent
        if answer.remaining < answer.limit - 1 and not compiled_rule.needs_settlement
    }
    claims = gate.claims_of(evaluation) if again else []
    back = [claim for claim, entry in zip(claims, evaluation.entries, strict=False) if id(entry.compiled_rule) in again]
    return [Waiter(back, decision, None)] if back else []


def paid(gate: Any, evaluation: Evaluation, decision: Decision) -> None:
    """Makes the marks of a request that was charged."""
    marks = unpaid(evaluation)
    if marks:
        try:
            turns = twins(gate, evaluation, decision, marks, gate.store.decide_many([[claim] for _, claim, _ in marks], 0))
            if turns:
                wait_queue_of(gate.store).leave(turns)
        except StoreError as error:
            not_marked(gate, error)


async def apaid(gate: Any, evaluation: Evaluation, decision: Decision) -> None:
    marks = unpaid(evaluation)
    if marks:
        try:
            told = await gate.store.adecide_many([[claim] for _, claim, _ in marks], 0)
            turns = twins(gate, evaluation, decision, marks, told)
            if turns and gate.store.local:
                wait_queue_of(gate.store).leave(turns)
            elif turns:
                await wait_queue_of(gate.store).aleave(turns)
        except StoreError as error:
            not_marked(gate, error)


def not_marked(gate: Any, error: StoreError) -> None:
    """A store that fails now knows nothing of a repetition, which will be charged: the strict side."""
    log.warning("marking an idempotency key in the store of %r failed: %s", gate.policy.name, error)
