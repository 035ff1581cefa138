"""Idempotency keys: requests with the same key are repetitions of one request, which is charged once.

A charged request makes a mark in the store: a fixed window under (rule, key, idempotency key, what the request is). A request
that finds the mark takes one repetition of it and is not charged. What a request is: its method, its path, and the identities
that the policy binds the key to; the same idempotency key on another request is another mark.

Repetitions are bounded twice: `replays` of each mark, and of all marks of a client by the limits of the rule, which are kept a
second time for repetitions (at least `replays` in their period). So a rule passes at most twice its limit, or its limit and the
repetitions of one key. Beyond either bound a repetition is charged. A mark is made
only after its charge: a request that waits, was refused or was cancelled marks nothing. Of several requests that are charged at
the same moment, all but the first get their charge back; they count as repetitions.

A request with the header costs two more calls of the store: one that looks for the mark, one that makes or repeats it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from ..algorithms.claim import Claim
from ..decision import Decision
from ..errors import StoreError, StoreUnavailable
from ..stores.contract import Store
from ..stores.sans_io import Call, Plan
from ..wait_queue import BEGUN, Waiter, wait_queue_of
from .compiled_rule import CompiledRule, Entry, escape_part, identity_of, join_key
from .request_context import RequestContext

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator

log = logging.getLogger("limitkeeper")


class Mark(NamedTuple):
    """The mark of an idempotency key (`claim`; `decision` is None until it is made or repeated), and the charge of its rule."""

    rule: CompiledRule
    claim: Claim
    entries: tuple[Entry, ...]
    key: str
    cost: int
    decision: Decision | None = None

    def replays(self) -> list[Claim]:
        """What a repetition takes of the limits for repetitions: its cost, or one where they count repetitions."""
        pairs = [(entry.replays, entry.replays.limit is entry.named.limit) for entry in self.entries]  # type: ignore[union-attr]
        return [Claim(limit, self.key, self.cost if same else 1) for limit, same in pairs]  # type: ignore[arg-type]

    def repetition(self) -> list[Claim]:
        return [self.claim, *self.replays()]


def mark_of(rule: CompiledRule, context: RequestContext, entries: tuple[Entry, ...], key: str, cost: int) -> Mark | None:
    """The mark of a request; None when it has no idempotency key."""
    once = rule.config.once
    value = None if once is None else context.header(once.header)
    if once is None or rule.idempotent is None or not value:
        return None
    bound = [identity_of(rule.identities, context, name) for name in once.bind]
    used_for = join_key([value, context.method, context.path, *bound])
    claim = Claim(rule.idempotent, f"{escape_part(key)}|{sha256(used_for.encode('utf-8', 'surrogatepass')).hexdigest()}", 1)
    return Mark(rule, claim, entries, key, cost)


def add(evaluation: Evaluation, rule: CompiledRule, entries: tuple[Entry, ...], key: str, cost: int) -> bool:
    """Adds a rule whose mark is looked for before it is charged; False when the request has no idempotency key."""
    assert evaluation.context is not None
    mark = mark_of(rule, evaluation.context, entries, key, cost)
    if mark is None:
        return False
    evaluation.special = True
    evaluation.idempotent = [*(evaluation.idempotent or ()), mark]
    return True


def is_found(mark: Decision) -> bool:
    """Whether a mark that was looked for was made before, and has repetitions left."""
    return mark.allowed and mark.remaining < mark.limit


def is_repetition(store: Store, mark: Mark | None) -> bool:
    """Whether a request would be a repetition now; stores nothing."""
    if mark is None or not is_found(store.decide([mark.claim], 0, commit=False)):
        return False
    return store.decide(mark.repetition(), 0, commit=False).allowed


def find_marks(gate: Evaluator, evaluation: Evaluation) -> Plan[None]:
    """Looks for the marks, and adds the entries of requests that are no repetition. A store that fails at the first call is not
    called again, which would take its budget twice: then all entries are added, for the answer on failure."""
    asked = evaluation.idempotent
    if not asked:
        return
    repeated: dict[int, Decision] = {}
    seen: list[Decision] = []
    try:
        for one in asked:
            seen += [(yield Call(evaluation.compiled.store, "decide", ([one.claim], 0), {"commit": False}))]
        if any(gate._on_failure.has_failed(mark) for mark in seen):
            raise StoreUnavailable("the store could not say whether a request is a repetition")
        again = [i for i, mark in enumerate(seen) if is_found(mark)]
        if again:
            decisions = yield Call(evaluation.compiled.store, "decide_many", ([asked[i].repetition() for i in again], 0))
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
            evaluation.marks.append(one._replace(decision=taken))
            continue
        if taken is None and seen[i].allowed:
            evaluation.marks.append(one)
        _charge(evaluation, one)


def _charge(evaluation: Evaluation, one: Mark) -> None:
    assert evaluation.costs is not None
    evaluation.entries.extend(one.entries)
    evaluation.keys.extend([one.key] * len(one.entries))
    evaluation.costs.extend([one.cost] * len(one.entries))
    evaluation.needs_settlement = evaluation.needs_settlement or one.rule.needs_settlement


def release_marks(gate: Evaluator, evaluation: Evaluation) -> Plan[None]:
    """Gives the repetitions of a refused request back. If the store fails now, they stay charged: the strict side."""
    for mark in evaluation.marks or ():
        if mark.decision is not None:
            mark.rule.replayed -= 1
            back = (mark.repetition(), mark.decision.start_us, mark.decision.source)
            try:
                yield Call(evaluation.compiled.store, "give_back", back)
            except StoreError as error:
                log.warning("giving back to the store of %r failed: %s", gate.compiled.policy.name, error)


def make_marks(gate: Evaluator, evaluation: Evaluation, decision: Decision) -> Plan[None]:
    """Makes the marks of a charged request, and gives charges back where another request made the mark first. If the store fails
    now, a repetition will be charged: the strict side."""
    marks = evaluation.marks = [mark for mark in evaluation.marks or () if mark.decision is None]
    if not marks:
        return
    try:
        made = yield Call(evaluation.compiled.store, "decide_many", ([[mark.claim] for mark in marks], 0))
        pairs = [(mark, one) for mark, one in zip(marks, made, strict=True) if one.allowed]
        evaluation.marks = [mark._replace(decision=one) for mark, one in pairs]
        twins = [mark for mark, one in pairs if one.remaining < one.limit - 1 and not mark.rule.needs_settlement]
        replays = (yield Call(evaluation.compiled.store, "decide_many", ([mark.replays() for mark in twins], 0))) if twins else ()
        late = {id(mark.rule) for mark, one in zip(twins, replays, strict=True) if one.allowed}
        claims = enumerate(gate._claims(evaluation)) if late else ()
        back = [(i, claim) for i, claim in claims if id(evaluation.entries[i].compiled_rule) in late]
        if back:
            yield leave(evaluation.compiled.store, charges_of(evaluation, decision, back))
    except StoreError as error:
        log.warning("marking an idempotency key in the store of %r failed: %s", gate.compiled.policy.name, error)


def charges_of(evaluation: Evaluation, decision: Decision, claims: Iterable[tuple[int, Claim]]) -> list[Waiter]:
    """What a request was charged, to be given back: `claims` with the indexes of their entries. After a wait some of them were
    charged later than others (waiting_requests.py)."""
    found: dict[int, tuple[Decision, list[Claim]]] = {}
    for i, claim in claims:
        part = decision.decisions[i] if evaluation.wait_us else decision
        found.setdefault(part.start_us, (part, []))[1].append(claim)
    return [Waiter(together, part, None, BEGUN) for part, together in found.values()]


def leave(store: Store, charges: list[Waiter]) -> Call:
    """Gives charges back through the store's wait queue, so that waiting requests move up."""
    return Call(wait_queue_of(store), "leave", (charges,))
