"""What every request goes through at a gate: which rules are meant, one question to the store, a passage that is counted.

    plan       which rules the path is meant by (edition.py)
    claims     for each of them: its key, its limits, its cost (clause.py)
    decision   all of them together in one question to the store: all are charged, or none
    passage    counted, told to listeners, and handed to whoever writes the answer

`quick` answers on the spot whatever this process can answer alone; `ask` and `aask` are the two colours of the rest. What is not
on the way of every request has a file of its own: waiting (queue.py), rules in shadow (shadow.py), charging once (once.py), a
store that fails (failing.py), what is settled when the response is known (settle.py), who is shut out (shut_out.py), how a
refusal is told (refusing.py).

Compiled: added to a request, one rule costs about as much as three calls of Python.
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper import limiter_base
    from cython.cimports.limitkeeper.algorithms.claim import Claim
    from cython.cimports.limitkeeper.decision import Decision, Decisions
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.policy.compiled_policy import CompiledPolicy, MatchedRules
    from cython.cimports.limitkeeper.policy.compiled_rule import CompiledRule
    from cython.cimports.limitkeeper.policy.evaluation import Entry, Evaluation, begun
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
    from cython.cimports.limitkeeper.stores.contract import Store
else:
    from .. import limiter_base
    from ..algorithms.claim import Claim
    from ..clock import monotonic_us
    from ..decision import Decision, Decisions
    from ..stores.contract import Store
    from .compiled_policy import CompiledPolicy, MatchedRules
    from .compiled_rule import CompiledRule
    from .evaluation import Entry, Evaluation, begun
    from .request_context import RequestContext

from ..errors import StoreError
from ..observe.events import ALERT
from ..observe.snapshot import DECISION_BOUNDS_US, RESPONSE_BOUNDS_MS
from . import idempotency, refusal, shadow
from .identity.callback_errors import CallbackErrors

BOUNDS = len(DECISION_BOUNDS_US)
#: So many of the bounds are 1, 2, 4, 8 …: found without looking at the table.
DOUBLING = 10
assert DECISION_BOUNDS_US[:DOUBLING] == tuple([1 << i for i in range(DOUBLING)])
RESPONSE_BOUNDS = len(RESPONSE_BOUNDS_MS)


@cython.cclass
class Evaluator:
    """What every request goes through; `Gate` adds what happens around it."""

    # fmt: off
    __slots__ = ("__weakref__", "_publisher", "allowed_requests", "complaints", "edition", "exempt_requests", "failing",
                 "far", "latency", "latency_sum", "offenders", "queue", "refused_requests", "requests", "shutter", "store",
                 "unlimited_requests")
    # fmt: on

    def __init__(self) -> None:
        self.edition: Any = None
        self.store: Store = None  # type: ignore[assignment]
        self.far = False
        self.failing: Any = None
        self.queue: Any = None
        self.shutter: Any = None
        self.offenders: Any = None
        self._publisher: Any = None
        self.requests = self.allowed_requests = self.refused_requests = self.exempt_requests = self.unlimited_requests = 0
        self.latency: list[int] = [0] * (BOUNDS + 1)
        self.latency_sum = 0
        self.complaints = CallbackErrors()

    # Preparing -------------------------------------------------------------------------------------------------

    @cython.cfunc
    def prepare(self, facts: RequestContext) -> Evaluation:
        """What a request asks for: the entries, keys and costs of all rules that are meant."""
        edition: CompiledPolicy = self.edition
        passage: Evaluation = begun(self, edition)
        passage.began_us = monotonic_us()
        passage.facts = facts
        plan: MatchedRules = edition.plan(facts)
        if plan.exempt or limiter_base.off:
            return passage
        excused: object = None
        if plan.pardons:
            excused = edition.pardoned(plan, facts)
            if excused is True:
                return passage
        if plan.hosts is not None:
            plan = edition.hosted(plan, facts)
        passage.costs = []
        i: cython.Py_ssize_t
        clause: CompiledRule
        for i in range(len(plan.clauses)):
            clause = plan.clauses[i]
            if (excused is not None and clause.name in excused) or not clause.meant(facts):  # type: ignore[operator]
                continue
            key = clause.key_for(facts)
            if key is None:
                continue
            self.add(passage, clause, facts, key)  # type: ignore[arg-type]
        return passage

    @cython.cfunc
    def add(self, passage: Evaluation, clause: CompiledRule, facts: RequestContext, key: str) -> cython.int:
        """One rule's entries, to be asked with all others; in shadow, or once, on its own."""
        limits: tuple = clause.limits_for(facts, key)  # type: ignore[type-arg]
        if not limits:
            return 0
        cost: cython.longlong = clause.cost_for(facts)
        if clause.shadow:
            passage.special = True
            if passage.shadow is None:
                passage.shadow = []
            passage.shadow.append((clause, [Claim(entry.named, key, cost) for entry in limits], None))
            passage.owes = passage.owes or clause.owes
            return 0
        if clause.once:
            rule: Any = clause.rule
            told = facts.header(rule.once.header)
            if told:
                passage.special = True
                if passage.onces is None:
                    passage.onces = []
                passage.onces.append((clause, limits, key, cost, told))
                return 0
        i: cython.Py_ssize_t
        for i in range(len(limits)):
            passage.entries.append(limits[i])
            passage.keys.append(key)
            passage.costs.append(cost)
        if clause.owes:
            passage.owes = True
        return 0

    @cython.cfunc
    def claims(self, passage: Evaluation) -> list:  # type: ignore[type-arg]
        """The claims of a passage, made when they are first needed."""
        if passage.claims is None:
            found: list = []  # type: ignore[type-arg]
            i: cython.Py_ssize_t
            for i in range(len(passage.entries)):
                entry: Entry = passage.entries[i]
                found.append(Claim(entry.named, passage.keys[i], passage.costs[i]))
            passage.claims = found
        return passage.claims  # type: ignore[no-any-return]

    @cython.cfunc
    def decide(self, passage: Evaluation) -> Decision:
        """One question for all entries, asked of a store in this process (or waited for)."""
        if len(passage.entries) == 1 and not passage.owes:
            entry: Entry = passage.entries[0]
            return self.store.decide_one(entry.named, passage.keys[0], passage.costs[0], 0, True)
        return self.store.decide(self.claims(passage), 0)

    # Concluding ------------------------------------------------------------------------------------------------

    @cython.cfunc
    def passed(self, passage: Evaluation, decision: Decision) -> Evaluation:
        """Counts a request that every rule let pass."""
        passage.decision = decision
        passage.allowed = True
        i: cython.Py_ssize_t
        entry: Entry
        n: cython.Py_ssize_t = len(passage.entries)
        if n == 1:
            entry = passage.entries[0]
            self.count_one(passage, entry, decision, 0)
        else:
            together: Decisions = decision  # type: ignore[assignment]
            for i in range(n):
                self.count_one(passage, passage.entries[i], together.parts[i], i)
        self.timed(passage)
        self.requests += 1
        self.allowed_requests += 1
        if not passage.owes:
            passage.facts = None  # facts know the request, and the request its passage: no circle is left behind
        return passage

    @cython.cfunc
    def count_one(self, passage: Evaluation, entry: Entry, part: Decision, i: cython.Py_ssize_t) -> cython.int:
        clause: CompiledRule = entry.clause
        if entry.label is clause.name:
            clause.passed += 1
        if part.remaining * 5 < part.limit and passage.near_by is not clause:
            clause.near += 1
            passage.near_by = clause
        if clause.alert >= 0:
            used: cython.longlong = part.limit - part.remaining
            cost: cython.longlong = passage.costs[i]
            if used >= part.limit * clause.alert and used - cost < part.limit * clause.alert:
                clause.alerts += 1
                self.alerted(passage, entry, part, i)
        return 0

    @cython.cfunc
    def timed(self, passage: Evaluation) -> cython.int:
        """Counts how long the decision took."""
        took: cython.longlong = monotonic_us() - passage.began_us - passage.wait_us
        if took < 0:  # who waited on another clock than the machine's
            took = 0
        i: cython.Py_ssize_t = 0
        edge: cython.longlong = 1
        while i < DOUBLING and took > edge:
            i += 1
            edge *= 2
        while DOUBLING <= i < BOUNDS and took > DECISION_BOUNDS_US[i]:
            i += 1
        self.latency[i] += 1
        self.latency_sum += took
        return 0

    @cython.cfunc
    def free(self, passage: Evaluation) -> Evaluation:
        """A request that nothing limits."""
        if not passage.owes:
            passage.facts = None
        self.requests += 1
        self.allowed_requests += 1
        if passage.costs is None:
            self.exempt_requests += 1
        else:
            self.unlimited_requests += 1
        return passage

    def claims_of(self, passage: Evaluation) -> list[Claim]:
        """The claims of a passage, for whoever asks the store himself."""
        return self.claims(passage)

    def let_pass(self, passage: Evaluation, decision: Any) -> Evaluation:
        """Counts a request that passes, though the store was not asked."""
        if decision is not None:
            return self.passed(passage, decision)
        self.timed(passage)
        passage.facts = None
        self.requests += 1
        self.allowed_requests += 1
        return passage

    def refused_one(self, passage: Evaluation) -> None:
        passage.facts = None
        self.timed(passage)
        self.requests += 1
        self.refused_requests += 1

    def alerted(self, passage: Evaluation, entry: Entry, part: Decision, i: int) -> None:
        """A key's use has crossed its rule's mark."""
        self.complaints.report("%s: a key has used %d of %d", entry.label, part.limit - part.remaining, part.limit)
        self.tell(ALERT, passage)

    def tell(self, kind: str, passage: Any, error: Any = None) -> None:
        if self._publisher is not None:
            cost = passage.costs[0] if passage is not None and passage.costs else 1
            keys = tuple(passage.keys) if passage is not None else None
            self._publisher.publish(kind, self.edition.policy.name, keys, cost, passage, error)

    # The three ways to ask ---------------------------------------------------------------------------------------

    def quick(self, facts: RequestContext) -> Evaluation | None:
        """The answer, when this process can give it without waiting for anything; otherwise None, and nothing was done."""
        passage: Evaluation
        decision: Decision
        if self.shutter is not None:
            shut = self.shutter.shut(self, facts)
            if shut is not None:
                return shut  # type: ignore[no-any-return]
        passage = self.prepare(facts)
        if self.far:
            return self.quick_far(passage)
        if passage.special:
            return self.quick_special(passage)
        if not passage.entries:
            return self.free(passage)
        try:
            decision = self.decide(passage)
        except StoreError as error:
            return self.failing.answer(self, passage, error)  # type: ignore[no-any-return]
        if decision.allowed:
            return self.passed(passage, decision)
        if refusal.may_wait(passage, decision):
            return None
        return refusal.refused(self, passage, decision)

    @cython.cfunc
    def quick_far(self, passage: Evaluation) -> Evaluation:
        """A far store can answer one plain hit at once when it holds a lease for it."""
        if passage.special:
            return None  # type: ignore[return-value]
        if not passage.entries:
            return self.free(passage)
        if len(passage.entries) > 1 or passage.owes:
            return None  # type: ignore[return-value]
        entry: Entry = passage.entries[0]
        found = self.store.hit_nowait(entry.named, passage.keys[0], passage.costs[0])
        if found is None:
            return None  # type: ignore[return-value]
        decision: Decision = found
        if self.failing.has_failed(decision):
            return self.failing.answer(self, passage, decision)  # type: ignore[no-any-return]
        if decision.allowed:
            return self.passed(passage, decision)
        if refusal.may_wait(passage, decision):
            return None  # type: ignore[return-value]
        return refusal.refused(self, passage, decision)

    def quick_special(self, passage: Evaluation) -> Evaluation | None:
        """Rules in shadow and charges made once, on a store in this process."""
        try:
            idempotency.marked(self, passage)
            if not passage.entries:
                return shadow.asked(self, self.free(passage))
            decision: Decision = self.decide(passage)
            if not decision.allowed:
                idempotency.unmarked(self, passage)
                if refusal.may_wait(passage, decision):
                    return None
                return refusal.refused(self, passage, decision)
        except StoreError as error:
            return self.failing.answer(self, passage, error)  # type: ignore[no-any-return]
        idempotency.paid(self, passage, decision)
        return shadow.asked(self, self.passed(passage, decision))

    def ask(self, facts: RequestContext) -> Evaluation:
        """The answer, waited for: in a rule's queue, or for a store that is far away."""
        if not self.far:  # nearly always that is all
            found = self.quick(facts)
            if found is not None:
                return found
        if self.shutter is not None:
            shut = self.shutter.shut(self, facts)
            if shut is not None:
                return shut  # type: ignore[no-any-return]
        passage: Evaluation = self.prepare(facts)
        try:
            idempotency.marked(self, passage)
            if not passage.entries:
                return shadow.asked(self, self.free(passage))
            decision: Decision = self.decide(passage)
            if self.failing.has_failed(decision):
                return self.failing.answer(self, passage, decision)  # type: ignore[no-any-return]
            if not decision.allowed:
                if refusal.may_wait(passage, decision):
                    decision = self.queue.wait(self, passage, decision)
                    if self.failing.has_failed(decision):
                        return self.failing.answer(self, passage, decision)  # type: ignore[no-any-return]
                if not decision.allowed:
                    idempotency.unmarked(self, passage)
                    return refusal.refused(self, passage, decision)
        except StoreError as error:
            return self.failing.answer(self, passage, error)  # type: ignore[no-any-return]
        idempotency.paid(self, passage, decision)
        return shadow.asked(self, self.passed(passage, decision))

    async def aask(self, facts: RequestContext) -> Evaluation:
        """The same, awaited. Nothing blocks the loop."""
        if self.shutter is not None:
            shut = self.shutter.shut(self, facts)
            if shut is not None:
                return shut  # type: ignore[no-any-return]
        passage: Evaluation = self.prepare(facts)
        try:
            await idempotency.amarked(self, passage)
            if not passage.entries:
                return await shadow.aasked(self, self.free(passage))
            if self.far:
                decision: Decision = await self.store.adecide(self.claims(passage), 0)
            else:
                decision = self.decide(passage)
            if self.failing.has_failed(decision):
                return self.failing.answer(self, passage, decision)  # type: ignore[no-any-return]
            if not decision.allowed:
                if refusal.may_wait(passage, decision):
                    decision = await self.queue.await_(self, passage, decision)
                    if self.failing.has_failed(decision):
                        return self.failing.answer(self, passage, decision)  # type: ignore[no-any-return]
                if not decision.allowed:
                    await idempotency.aunmarked(self, passage)
                    return refusal.refused(self, passage, decision)
        except StoreError as error:
            return self.failing.answer(self, passage, error)  # type: ignore[no-any-return]
        await idempotency.apaid(self, passage, decision)
        return await shadow.aasked(self, self.passed(passage, decision))

    # Responses -------------------------------------------------------------------------------------------------

    @cython.ccall
    def count_response(self, passage: Evaluation, status: cython.int) -> cython.void:
        """Counts a response and its time under every rule that let the request pass."""
        took: cython.longlong = monotonic_us() - passage.began_us
        i: cython.Py_ssize_t = 0
        while i < RESPONSE_BOUNDS and took > RESPONSE_BOUNDS_MS[i] * 1000:
            i += 1
        family: cython.Py_ssize_t = status // 100 if 100 <= status < 600 else 0
        k: cython.Py_ssize_t
        for k in range(len(passage.entries)):
            entry: Entry = passage.entries[k]
            clause: CompiledRule = entry.clause
            if entry.label is clause.name:
                clause.times[i] += 1
                clause.statuses[family] += 1
                clause.sum_ms += took / 1000.0
