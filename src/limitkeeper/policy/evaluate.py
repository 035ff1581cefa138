"""What every request goes through at a gate: which rules are meant, one question to the store, a evaluation that is counted.

    matched       which rules the path is meant by (compiled.py)
    claims     for each of them: its key, its limits, its cost (compiled_rule.py)
    decision   all of them together in one question to the store: all are charged, or none
    evaluation    counted, told to listeners, and handed to whoever writes the answer

`ask_nowait` answers on the spot whatever this process can answer alone; `ask` and `aask` are the two colours of the rest. What is not
on the way of every request has a file of its own: waiting (queue.py), rules in shadow (shadow.py), charging once (once.py), a
store that fails (on_failure.py), what is settled when the response is known (settle.py), who is shut out (shut_out.py), how a
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
    from cython.cimports.limitkeeper.policy.evaluation import Entry, Evaluation, new_evaluation
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
    from .evaluation import Entry, Evaluation, new_evaluation
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
    __slots__ = (
        "__weakref__",
        "_publisher",
        "allowed_requests",
        "callback_errors",
        "compiled",
        "exempt_requests",
        "latency",
        "latency_sum",
        "offenders",
        "on_failure",
        "penalty_box",
        "queue",
        "refused_requests",
        "remote",
        "requests",
        "store",
        "unlimited_requests",
    )
    # fmt: on

    def __init__(self) -> None:
        self.compiled: Any = None
        self.store: Store = None  # type: ignore[assignment]
        self.remote = False
        self.on_failure: Any = None
        self.queue: Any = None
        self.penalty_box: Any = None
        self.offenders: Any = None
        self._publisher: Any = None
        self.requests = self.allowed_requests = self.refused_requests = self.exempt_requests = self.unlimited_requests = 0
        self.latency: list[int] = [0] * (BOUNDS + 1)
        self.latency_sum = 0
        self.callback_errors = CallbackErrors()

    # Preparing -------------------------------------------------------------------------------------------------

    @cython.cfunc
    def prepare(self, context: RequestContext) -> Evaluation:
        """What a request asks for: the entries, keys and costs of all rules that are meant."""
        compiled: CompiledPolicy = self.compiled
        evaluation: Evaluation = new_evaluation(self, compiled)
        evaluation.began_us = monotonic_us()
        evaluation.context = context
        matched: MatchedRules = compiled.match(context)
        if matched.exempt or limiter_base.off:
            return evaluation
        exempted: object = None
        if matched.exemptions:
            exempted = compiled.exempted_rules(matched, context)
            if exempted is True:
                return evaluation
        if matched.hosts is not None:
            matched = compiled.match_host(matched, context)
        evaluation.costs = []
        i: cython.Py_ssize_t
        compiled_rule: CompiledRule
        for i in range(len(matched.rules)):
            compiled_rule = matched.rules[i]
            if (exempted is not None and compiled_rule.name in exempted) or not compiled_rule.meant(context):  # type: ignore[operator]
                continue
            key = compiled_rule.key_for(context)
            if key is None:
                continue
            self.add(evaluation, compiled_rule, context, key)  # type: ignore[arg-type]
        return evaluation

    @cython.cfunc
    def add(self, evaluation: Evaluation, compiled_rule: CompiledRule, context: RequestContext, key: str) -> cython.int:
        """One rule's entries, to be asked with all others; in shadow, or once, on its own."""
        limits: tuple = compiled_rule.limits_for(context, key)  # type: ignore[type-arg]
        if not limits:
            return 0
        cost: cython.longlong = compiled_rule.cost_for(context)
        if compiled_rule.shadow:
            evaluation.special = True
            if evaluation.shadow is None:
                evaluation.shadow = []
            evaluation.shadow.append((compiled_rule, [Claim(entry.named, key, cost) for entry in limits], None))
            evaluation.needs_settlement = evaluation.needs_settlement or compiled_rule.needs_settlement
            return 0
        if compiled_rule.once:
            rule: Any = compiled_rule.config
            told = context.header(rule.once.header)
            if told:
                evaluation.special = True
                if evaluation.idempotent is None:
                    evaluation.idempotent = []
                evaluation.idempotent.append((compiled_rule, limits, key, cost, told))
                return 0
        i: cython.Py_ssize_t
        for i in range(len(limits)):
            evaluation.entries.append(limits[i])
            evaluation.keys.append(key)
            evaluation.costs.append(cost)
        if compiled_rule.needs_settlement:
            evaluation.needs_settlement = True
        return 0

    @cython.cfunc
    def claims(self, evaluation: Evaluation) -> list:  # type: ignore[type-arg]
        """The claims of a evaluation, made when they are first needed."""
        if evaluation.claims is None:
            found: list = []  # type: ignore[type-arg]
            i: cython.Py_ssize_t
            for i in range(len(evaluation.entries)):
                entry: Entry = evaluation.entries[i]
                found.append(Claim(entry.named, evaluation.keys[i], evaluation.costs[i]))
            evaluation.claims = found
        return evaluation.claims  # type: ignore[no-any-return]

    @cython.cfunc
    def decide(self, evaluation: Evaluation) -> Decision:
        """One question for all entries, asked of a store in this process (or waited for)."""
        if len(evaluation.entries) == 1 and not evaluation.needs_settlement:
            entry: Entry = evaluation.entries[0]
            return self.store.decide_one(entry.named, evaluation.keys[0], evaluation.costs[0], 0, True)
        return self.store.decide(self.claims(evaluation), 0)

    # Concluding ------------------------------------------------------------------------------------------------

    @cython.cfunc
    def passed(self, evaluation: Evaluation, decision: Decision) -> Evaluation:
        """Counts a request that every rule let pass."""
        evaluation.decision = decision
        evaluation.allowed = True
        i: cython.Py_ssize_t
        entry: Entry
        n: cython.Py_ssize_t = len(evaluation.entries)
        if n == 1:
            entry = evaluation.entries[0]
            self.count_one(evaluation, entry, decision, 0)
        else:
            together: Decisions = decision  # type: ignore[assignment]
            for i in range(n):
                self.count_one(evaluation, evaluation.entries[i], together.parts[i], i)
        self.timed(evaluation)
        self.requests += 1
        self.allowed_requests += 1
        if not evaluation.needs_settlement:
            evaluation.context = None  # context know the request, and the request its evaluation: no circle is left behind
        return evaluation

    @cython.cfunc
    def count_one(self, evaluation: Evaluation, entry: Entry, part: Decision, i: cython.Py_ssize_t) -> cython.int:
        compiled_rule: CompiledRule = entry.compiled_rule
        if entry.label is compiled_rule.name:
            compiled_rule.passed += 1
        if part.remaining * 5 < part.limit and evaluation.near_rule is not compiled_rule:
            compiled_rule.near += 1
            evaluation.near_rule = compiled_rule
        if compiled_rule.alert >= 0:
            used: cython.longlong = part.limit - part.remaining
            cost: cython.longlong = evaluation.costs[i]
            if used >= part.limit * compiled_rule.alert and used - cost < part.limit * compiled_rule.alert:
                compiled_rule.alerts += 1
                self.alerted(evaluation, entry, part, i)
        return 0

    @cython.cfunc
    def timed(self, evaluation: Evaluation) -> cython.int:
        """Counts how long the decision took."""
        took: cython.longlong = monotonic_us() - evaluation.began_us - evaluation.wait_us
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
    def free(self, evaluation: Evaluation) -> Evaluation:
        """A request that nothing limits."""
        if not evaluation.needs_settlement:
            evaluation.context = None
        self.requests += 1
        self.allowed_requests += 1
        if evaluation.costs is None:
            self.exempt_requests += 1
        else:
            self.unlimited_requests += 1
        return evaluation

    def claims_of(self, evaluation: Evaluation) -> list[Claim]:
        """The claims of a evaluation, for whoever asks the store himself."""
        return self.claims(evaluation)

    def let_pass(self, evaluation: Evaluation, decision: Any) -> Evaluation:
        """Counts a request that passes, though the store was not asked."""
        if decision is not None:
            return self.passed(evaluation, decision)
        self.timed(evaluation)
        evaluation.context = None
        self.requests += 1
        self.allowed_requests += 1
        return evaluation

    def refused_one(self, evaluation: Evaluation) -> None:
        evaluation.context = None
        self.timed(evaluation)
        self.requests += 1
        self.refused_requests += 1

    def alerted(self, evaluation: Evaluation, entry: Entry, part: Decision, i: int) -> None:
        """A key's use has crossed its rule's mark."""
        self.callback_errors.report("%s: a key has used %d of %d", entry.label, part.limit - part.remaining, part.limit)
        self.publish(ALERT, evaluation)

    def publish(self, kind: str, evaluation: Any, error: Any = None) -> None:
        if self._publisher is not None:
            cost = evaluation.costs[0] if evaluation is not None and evaluation.costs else 1
            keys = tuple(evaluation.keys) if evaluation is not None else None
            self._publisher.publish(kind, self.compiled.policy.name, keys, cost, evaluation, error)

    # The three ways to ask ---------------------------------------------------------------------------------------

    def ask_nowait(self, context: RequestContext) -> Evaluation | None:
        """The answer, when this process can give it without waiting for anything; otherwise None, and nothing was done."""
        evaluation: Evaluation
        decision: Decision
        if self.penalty_box is not None:
            shut = self.penalty_box.shut(self, context)
            if shut is not None:
                return shut  # type: ignore[no-any-return]
        evaluation = self.prepare(context)
        if self.remote:
            return self.ask_lease(evaluation)
        if evaluation.special:
            return self.ask_special(evaluation)
        if not evaluation.entries:
            return self.free(evaluation)
        try:
            decision = self.decide(evaluation)
        except StoreError as error:
            return self.on_failure.answer(self, evaluation, error)  # type: ignore[no-any-return]
        if decision.allowed:
            return self.passed(evaluation, decision)
        if refusal.may_wait(evaluation, decision):
            return None
        return refusal.refused(self, evaluation, decision)

    @cython.cfunc
    def ask_lease(self, evaluation: Evaluation) -> Evaluation:
        """A far store can answer one plain hit at once when it holds a lease for it."""
        if evaluation.special:
            return None  # type: ignore[return-value]
        if not evaluation.entries:
            return self.free(evaluation)
        if len(evaluation.entries) > 1 or evaluation.needs_settlement:
            return None  # type: ignore[return-value]
        entry: Entry = evaluation.entries[0]
        found = self.store.hit_nowait(entry.named, evaluation.keys[0], evaluation.costs[0])
        if found is None:
            return None  # type: ignore[return-value]
        decision: Decision = found
        if self.on_failure.has_failed(decision):
            return self.on_failure.answer(self, evaluation, decision)  # type: ignore[no-any-return]
        if decision.allowed:
            return self.passed(evaluation, decision)
        if refusal.may_wait(evaluation, decision):
            return None  # type: ignore[return-value]
        return refusal.refused(self, evaluation, decision)

    def ask_special(self, evaluation: Evaluation) -> Evaluation | None:
        """Rules in shadow and charges made once, on a store in this process."""
        try:
            idempotency.marked(self, evaluation)
            if not evaluation.entries:
                return shadow.asked(self, self.free(evaluation))
            decision: Decision = self.decide(evaluation)
            if not decision.allowed:
                idempotency.unmarked(self, evaluation)
                if refusal.may_wait(evaluation, decision):
                    return None
                return refusal.refused(self, evaluation, decision)
        except StoreError as error:
            return self.on_failure.answer(self, evaluation, error)  # type: ignore[no-any-return]
        idempotency.paid(self, evaluation, decision)
        return shadow.asked(self, self.passed(evaluation, decision))

    def ask(self, context: RequestContext) -> Evaluation:
        """The answer, waited for: in a rule's queue, or for a store that is far away."""
        if not self.remote:  # nearly always that is all
            found = self.ask_nowait(context)
            if found is not None:
                return found
        if self.penalty_box is not None:
            shut = self.penalty_box.shut(self, context)
            if shut is not None:
                return shut  # type: ignore[no-any-return]
        evaluation: Evaluation = self.prepare(context)
        try:
            idempotency.marked(self, evaluation)
            if not evaluation.entries:
                return shadow.asked(self, self.free(evaluation))
            decision: Decision = self.decide(evaluation)
            if self.on_failure.has_failed(decision):
                return self.on_failure.answer(self, evaluation, decision)  # type: ignore[no-any-return]
            if not decision.allowed:
                if refusal.may_wait(evaluation, decision):
                    decision = self.queue.wait(self, evaluation, decision)
                    if self.on_failure.has_failed(decision):
                        return self.on_failure.answer(self, evaluation, decision)  # type: ignore[no-any-return]
                if not decision.allowed:
                    idempotency.unmarked(self, evaluation)
                    return refusal.refused(self, evaluation, decision)
        except StoreError as error:
            return self.on_failure.answer(self, evaluation, error)  # type: ignore[no-any-return]
        idempotency.paid(self, evaluation, decision)
        return shadow.asked(self, self.passed(evaluation, decision))

    async def aask(self, context: RequestContext) -> Evaluation:
        """The same, awaited. Nothing blocks the loop."""
        if self.penalty_box is not None:
            shut = self.penalty_box.shut(self, context)
            if shut is not None:
                return shut  # type: ignore[no-any-return]
        evaluation: Evaluation = self.prepare(context)
        try:
            await idempotency.amarked(self, evaluation)
            if not evaluation.entries:
                return await shadow.aasked(self, self.free(evaluation))
            if self.remote:
                decision: Decision = await self.store.adecide(self.claims(evaluation), 0)
            else:
                decision = self.decide(evaluation)
            if self.on_failure.has_failed(decision):
                return self.on_failure.answer(self, evaluation, decision)  # type: ignore[no-any-return]
            if not decision.allowed:
                if refusal.may_wait(evaluation, decision):
                    decision = await self.queue.await_(self, evaluation, decision)
                    if self.on_failure.has_failed(decision):
                        return self.on_failure.answer(self, evaluation, decision)  # type: ignore[no-any-return]
                if not decision.allowed:
                    await idempotency.aunmarked(self, evaluation)
                    return refusal.refused(self, evaluation, decision)
        except StoreError as error:
            return self.on_failure.answer(self, evaluation, error)  # type: ignore[no-any-return]
        await idempotency.apaid(self, evaluation, decision)
        return await shadow.aasked(self, self.passed(evaluation, decision))

    # Responses -------------------------------------------------------------------------------------------------

    @cython.ccall
    def count_response(self, evaluation: Evaluation, status: cython.int) -> cython.void:
        """Counts a response and its time under every rule that let the request pass."""
        took: cython.longlong = monotonic_us() - evaluation.began_us
        i: cython.Py_ssize_t = 0
        while i < RESPONSE_BOUNDS and took > RESPONSE_BOUNDS_MS[i] * 1000:
            i += 1
        family: cython.Py_ssize_t = status // 100 if 100 <= status < 600 else 0
        k: cython.Py_ssize_t
        for k in range(len(evaluation.entries)):
            entry: Entry = evaluation.entries[k]
            compiled_rule: CompiledRule = entry.compiled_rule
            if entry.label is compiled_rule.name:
                compiled_rule.times[i] += 1
                compiled_rule.statuses[family] += 1
                compiled_rule.sum_ms += took / 1000.0
