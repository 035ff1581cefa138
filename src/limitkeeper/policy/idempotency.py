"""Idempotency keys: requests with the same key are repetitions of one request, which is charged once.

A charged request makes a mark in the store: a fixed window under (rule, key, idempotency key). A request that finds the mark
takes one repetition of it and is not charged; beyond `replays` repetitions it is charged again, so that no client repeats for
ever. A mark is made only after its charge: a request that waits, was refused or was cancelled marks nothing. Of several
requests that are charged at the same moment, all but the first get their charge back.

A request with the header costs two more calls of the store: one that looks for the mark, one that makes or repeats it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ..algorithms.claim import Claim
from ..decision import Decision
from ..errors import StoreError, StoreUnavailable
from ..stores.contract import Store
from ..stores.sans_io import Call, Plan
from ..wait_queue import Waiter, wait_queue_of
from .compiled_policy import CompiledRule, Entry, escape_part
from .identity.bounded_keys import hash_long

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator

log = logging.getLogger("limitkeeper")


class Repeatable(NamedTuple):
    """A rule that charges once per idempotency key, and the claim of its mark."""

    rule: CompiledRule
    entries: tuple[Entry, ...]
    key: str
    cost: int
    mark: Claim


class Mark(NamedTuple):
    """The mark of an idempotency key; `decision` is None until it is made or repeated."""

    rule: CompiledRule
    claim: Claim
    decision: Decision | None


def add(evaluation: Evaluation, rule: CompiledRule, entries: tuple[Entry, ...], key: str, cost: int) -> bool:
    """Adds a rule whose mark is looked for before it is charged; False when the request has no idempotency key."""
    once, context = rule.config.once, evaluation.context
    assert once is not None
    assert context is not None
    assert rule.idempotent is not None
    value = context.header(once.header)
    if not value:
        return False
    mark = Claim(rule.idempotent, f"{escape_part(key)}|{escape_part(hash_long(value))}", 1)
    evaluation.special = True
    evaluation.idempotent = [*(evaluation.idempotent or ()), Repeatable(rule, entries, key, cost, mark)]
    return True


def find_marks(gate: Evaluator, evaluation: Evaluation) -> Plan[None]:
    """Looks for the marks, and adds the entries of requests that are no repetition. A store that fails at the first call is not
    called again, which would take its budget twice: then all entries are added, for the answer on failure."""
    asked = evaluation.idempotent
    if not asked:
        return
    evaluation.idempotent = None
    repeated: dict[int, Decision] = {}
    seen: list[Decision] = []
    try:
        for one in asked:
            mark = yield Call(gate.store, "decide", ([one.mark], 0), {"commit": False})
            seen += [mark]
        if any(gate._on_failure.has_failed(mark) for mark in seen):
            raise StoreUnavailable("the store could not say whether a request is a repetition")
        again = [i for i, mark in enumerate(seen) if mark.allowed and mark.remaining < mark.limit]
        if again:
            decisions = yield Call(gate.store, "decide_many", ([[asked[i].mark] for i in again], 0))
            repeated = dict(zip(again, decisions, strict=True))
    except StoreError:
        for one in asked:
            _charge(evaluation, one)
        raise
    evaluation.marks = []
    for i, one in enumerate(asked):
        taken = repeated.get(i)
        if taken is not None and taken.allowed:
            one.rule.replayed += 1
            evaluation.marks.append(Mark(one.rule, one.mark, taken))
            continue
        if taken is None and seen[i].allowed:
            evaluation.marks.append(Mark(one.rule, one.mark, None))
        _charge(evaluation, one)


def _charge(evaluation: Evaluation, one: Repeatable) -> None:
    assert evaluation.costs is not None
    evaluation.entries.extend(one.entries)
    evaluation.keys.extend([one.key] * len(one.entries))
    evaluation.costs.extend([one.cost] * len(one.entries))
    evaluation.needs_settlement = evaluation.needs_settlement or one.rule.needs_settlement


def release_marks(gate: Evaluator, evaluation: Evaluation) -> Plan[None]:
    """Gives the repetitions of a refused request back."""
    for rule, claim, decision in evaluation.marks or ():
        if decision is not None:
            rule.replayed -= 1
            yield Call(gate.store, "give_back", ([claim], decision.start_us, decision.source))


def make_marks(gate: Evaluator, evaluation: Evaluation, decision: Decision) -> Plan[None]:
    """Makes the marks of a charged request, and gives charges back where another request made the mark first. If the store fails
    now, a repetition will be charged: the strict side."""
    marks = [mark for mark in evaluation.marks or () if mark.decision is None]
    evaluation.marks = marks
    if not marks:
        return
    try:
        made = yield Call(gate.store, "decide_many", ([[mark.claim] for mark in marks], 0))
        marks = [mark._replace(decision=one) for mark, one in zip(marks, made, strict=True) if one.allowed]
        evaluation.marks = marks
        late = {id(one.rule) for one in marks if _is_repeated(one.decision) and not one.rule.needs_settlement}
        claims = zip(gate._claims(evaluation), evaluation.entries, strict=True) if late else ()
        back = [claim for claim, entry in claims if id(entry.compiled_rule) in late]
        if back:
            yield leave(gate.store, [Waiter(back, decision, None)])
    except StoreError as error:
        log.warning("marking an idempotency key in the store of %r failed: %s", gate.compiled.policy.name, error)


def _is_repeated(mark: Decision | None) -> bool:
    return mark is not None and mark.remaining < mark.limit - 1


def leave(store: Store, charges: list[Waiter]) -> Call:
    """Gives charges back through the store's wait queue, so that waiting requests move up."""
    return Call(wait_queue_of(store), "leave", (charges,))
