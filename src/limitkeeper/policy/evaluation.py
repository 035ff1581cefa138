"""Evaluation of a request by a policy: which rules apply, one decision of the store for all of them, and what was counted.

    match      the rules of the path (compiled_policy.py)
    entries    of each rule that applies: its limits, the key and the cost
    decision   of all entries together, in one call of the store: all are charged, or none
    result     an `Evaluation`, counted and published, for the caller that writes the response

`ask_nowait` answers whatever needs no waiting; `ask` and `aask` perform the rest as one plan (stores/sans_io.py). Steps that
most requests skip have files of their own: idempotency.py, waiting_requests.py, shadow.py, on_failure.py, settlement.py.

Compiled: one rule adds about as much to a request as three Python calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper import limiter_base
    from cython.cimports.limitkeeper.algorithms.claim import Claim
    from cython.cimports.limitkeeper.decision import Decision, Decisions
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.policy.compiled_policy import CompiledPolicy, CompiledRule, Entry, MatchedRules
    from cython.cimports.limitkeeper.policy.evaluation import new_evaluation
    from cython.cimports.limitkeeper.policy.refusal import Refusal, refusal_by
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
    from cython.cimports.limitkeeper.stores.contract import Store
    from cython.cimports.limitkeeper.stores.memory import MemoryStore
else:
    from .. import limiter_base
    from ..algorithms.claim import Claim
    from ..clock import monotonic_us
    from ..decision import Decision, Decisions
    from ..stores.contract import Store
    from ..stores.memory import MemoryStore
    from .compiled_policy import CompiledPolicy, CompiledRule, Entry, MatchedRules
    from .refusal import Refusal, refusal_by
    from .request_context import RequestContext

from ..errors import StoreError
from ..observe.events import ALERT, REFUSED
from ..observe.events import PENALTY_BOX as PENALTY_BOX_EVENT
from ..observe.offenders import Offenders
from ..observe.snapshot import DECISION_BOUNDS_US, RESPONSE_BOUNDS_MS
from ..stores.sans_io import Call, Plan, arun, run
from . import idempotency, settlement, shadow
from .identity.callback_errors import CallbackErrors
from .model import DEGRADE, Policy
from .refusal import QUOTA, refusal_of

if TYPE_CHECKING:
    from ..observe.events import Publisher
    from .on_failure import FailureAnswers
    from .penalty_box import PenaltyBox
    from .waiting_requests import WaitingRequests

BOUNDS = len(DECISION_BOUNDS_US)
#: So many of the bounds are 1, 2, 4, 8 …: found without reading the table.
DOUBLING = 10
assert DECISION_BOUNDS_US[:DOUBLING] == tuple([1 << i for i in range(DOUBLING)])
RESPONSE_BOUNDS = len(RESPONSE_BOUNDS_MS)


@cython.cclass
class Evaluation:
    """The result of one request.

    allowed           go on to the handler
    decision          of all limits together; None when nothing limits this request (exempt, no rule applies, in the penalty box,
                      store failed open)
    entries           the limits that were asked, in the order of `decision.decisions`
    keys              their keys, in the same order
    policy            the version of the policy that evaluated this request
    refusal           when not allowed
    shadows           names of the rules in shadow mode that would have refused
    wait_us           how long it waited
    origin            the request names the page that made it: its script may read only what the response exposes
    needs_settlement  True: `settle` (or `asettle`) must be called when the response is known
    """

    # fmt: off
    __slots__ = ("allowed", "began_us", "claims", "compiled", "context", "costs", "decision", "entries", "gate", "idempotent",
                 "keys", "marks", "matched", "near_rule", "needs_settlement", "origin", "reason", "refusal", "shadow",
                 "shadows", "special", "wait_us")
    # fmt: on

    @cython.annotation_typing(False)
    def __init__(self, gate: Evaluator, compiled: CompiledPolicy) -> None:
        self.gate = gate
        self.compiled = compiled
        self.context: RequestContext | None = None
        self.allowed = True
        self.decision: Decision | None = None
        self.entries: list[Entry] = []
        self.keys: list[str] = []
        self.refusal: Refusal | None = None
        self.shadows: tuple[str, ...] = ()
        self.wait_us = 0
        self.began_us = 0
        self.origin = False
        self.needs_settlement = False
        # State of the evaluation: costs in the order of the entries, claims, and rules that are asked apart (special).
        self.costs: list[int] | None = None
        self.claims: list[Claim] | None = None
        self.shadow: list[shadow.ShadowRule] | None = None
        self.idempotent: list[idempotency.Repeatable] | None = None
        self.marks: list[idempotency.Mark] | None = None
        self.special = False
        self.matched: MatchedRules | None = None
        self.near_rule: CompiledRule | None = None  # counted as near its limit: once per rule
        self.reason = QUOTA

    def __bool__(self) -> bool:
        return self.allowed

    @property
    def policy(self) -> Policy:
        policy: Policy = self.compiled.policy
        return policy

    @property
    def degrade(self) -> Callable[..., Any] | None:
        """The handler that answers instead of the application, when the refusing rule degrades."""
        refusal = self.refusal
        if refusal is None or refusal.rule is None or refusal.rule.on_refusal.action != DEGRADE:
            return None
        handler: Callable[..., Any] = self.compiled.handler(refusal.rule)
        return handler

    @cython.ccall
    def count_response(self, status: cython.int) -> cython.void:
        """Counts the response and its time under every rule that allowed the request. Every middleware calls it once, when the
        response begins."""
        took: cython.longlong = monotonic_us() - self.began_us
        i: cython.Py_ssize_t = 0
        while i < RESPONSE_BOUNDS and took > RESPONSE_BOUNDS_MS[i] * 1000:
            i += 1
        family: cython.Py_ssize_t = status // 100 if 100 <= status < 600 else 0
        k: cython.Py_ssize_t
        for k in range(len(self.entries)):
            entry: Entry = self.entries[k]
            rule: CompiledRule = entry.compiled_rule
            if entry.label is rule.name:
                rule.response_times[i] += 1
                rule.statuses[family] += 1
                rule.sum_ms += took / 1000.0

    def settle(self, status: int, size: int = 0) -> None:
        """Settles charges that depend on the status or the size of the response. Does nothing unless `needs_settlement`. Status 0
        is an unknown outcome, which stays charged."""
        if self.needs_settlement:
            run(settlement.settle(self, status, size))

    async def asettle(self, status: int, size: int = 0) -> None:
        """As `settle`, awaited."""
        if self.needs_settlement:
            plan = settlement.settle(self, status, size)
            if self.compiled.store.local:
                run(plan)
            else:
                await arun(plan)


if not cython.compiled:
    new_evaluation = Evaluation  # compiled, evaluation.pxd creates one without a call of `__init__`


@cython.cclass
class Evaluator:
    """The compiled part of `Gate`: evaluates requests and counts them."""

    # fmt: off
    __slots__ = ("__weakref__", "_allowed", "_busy", "_callback_errors", "_exempt", "_latency", "_latency_sum", "_on_failure",
                 "_penalty_box", "_publisher", "_refused", "_remote", "_requests", "_unlimited", "_waiting", "compiled",
                 "offenders", "secret", "store")
    # fmt: on

    def __init__(self) -> None:
        self.compiled: CompiledPolicy = None  # type: ignore[assignment]
        self.store: Store = None  # type: ignore[assignment]
        self.offenders: Offenders = None  # type: ignore[assignment]
        self.secret = b""
        self._remote = self._busy = False
        self._on_failure: FailureAnswers = None  # type: ignore[assignment]
        self._waiting: WaitingRequests = None  # type: ignore[assignment]
        self._penalty_box: PenaltyBox | None = None
        self._publisher: Publisher | None = None
        self._callback_errors = CallbackErrors()
        self._requests = self._allowed = self._refused = self._exempt = self._unlimited = 0
        self._latency = [0] * (BOUNDS + 1)
        self._latency_sum = 0

    # Asking ----------------------------------------------------------------------------------------------------

    def ask_nowait(self, context: RequestContext) -> Evaluation | None:
        """Evaluates a request if that needs no wait, in a queue or for a remote store; otherwise None, and nothing is charged."""
        evaluation: Evaluation
        decision: Decision
        if self._penalty_box is not None:
            refused = self._penalty_box.refuse(self, context)
            if refused is not None:
                return refused
        evaluation = self._prepare(context)
        if self._remote:
            return self._ask_lease(evaluation)
        if evaluation.special:
            return run(self._plan(evaluation, False))
        if not evaluation.entries:
            return self._allow_unlimited(evaluation)
        try:
            decision = self._decide(evaluation)
        except StoreError as error:
            return self._on_failure.answer(self, evaluation, error)
        if decision.allowed:
            return self._allow(evaluation, decision)
        return None if may_wait(evaluation, decision) else self._refuse(evaluation, decision)

    @cython.cfunc
    def _ask_lease(self, evaluation: Evaluation) -> Evaluation:
        """A remote store answers one plain hit at once when it holds a lease for it."""
        if evaluation.special:
            return None  # type: ignore[return-value]
        if not evaluation.entries:
            return self._allow_unlimited(evaluation)
        if len(evaluation.entries) > 1 or evaluation.needs_settlement:
            return None  # type: ignore[return-value]
        entry: Entry = evaluation.entries[0]
        found = self.store.hit_nowait(entry.named, evaluation.keys[0], evaluation.costs[0])  # type: ignore[index]
        if found is None:
            return None  # type: ignore[return-value]
        decision: Decision = found
        if self._on_failure.has_failed(decision):
            return self._on_failure.answer(self, evaluation, decision)
        if decision.allowed:
            return self._allow(evaluation, decision)
        return None if may_wait(evaluation, decision) else self._refuse(evaluation, decision)  # type: ignore[return-value]

    def ask(self, context: RequestContext) -> Evaluation:
        """Evaluates a request; waits in a rule's queue, or for a remote store."""
        if not self._remote:  # nearly always that is all
            found = self.ask_nowait(context)
            if found is not None:
                return found
        found = None if self._penalty_box is None else self._penalty_box.refuse(self, context)
        return run(self._plan(self._prepare(context), True)) if found is None else found  # type: ignore[return-value]

    async def aask(self, context: RequestContext) -> Evaluation:
        """As `ask`, awaited."""
        found = None if self._penalty_box is None else self._penalty_box.refuse(self, context)
        if found is None:
            found = await arun(self._plan(self._prepare(context), True))
        return found  # type: ignore[return-value]

    def _plan(self, evaluation: Evaluation, wait: bool) -> Plan[Evaluation | None]:
        """The whole evaluation. Without `wait`, the result of a request that would wait is None."""
        decision: Decision
        try:
            yield from idempotency.find_marks(self, evaluation)
            if not evaluation.entries:
                self._allow_unlimited(evaluation)
                return (yield from shadow.ask(self, evaluation))
            decision = yield self._call(evaluation)
            waits = not decision.allowed and not self._on_failure.has_failed(decision) and may_wait(evaluation, decision)
            if waits and wait:
                decision = yield from self._waiting.wait(self, evaluation, decision)
            if self._on_failure.has_failed(decision):
                return self._on_failure.answer(self, evaluation, decision)
            if not decision.allowed:
                yield from idempotency.release_marks(self, evaluation)
                return None if waits and not wait else self._refuse(evaluation, decision)
        except StoreError as error:
            return self._on_failure.answer(self, evaluation, error)
        yield from idempotency.make_marks(self, evaluation, decision)
        return (yield from shadow.ask(self, self._allow(evaluation, decision)))

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def _prepare(self, context: RequestContext) -> Evaluation:
        """Collects the entries, keys and costs of all rules that apply."""
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
        evaluation.matched = matched
        evaluation.costs = []
        i: cython.Py_ssize_t
        rule: CompiledRule
        for i in range(len(matched.rules)):
            rule = matched.rules[i]
            if (exempted is not None and rule.name in exempted) or not rule.applies(context):  # type: ignore[operator]
                continue
            key = rule.key_for(context)
            if key is not None:
                self._add(evaluation, rule, context, key)  # type: ignore[arg-type]
        return evaluation

    @cython.cfunc
    def _add(self, evaluation: Evaluation, rule: CompiledRule, context: RequestContext, key: str) -> cython.int:
        """Adds the entries of one rule; a rule in shadow mode, or with an idempotency key, is asked apart."""
        entries: tuple = rule.entries_for(context, key)  # type: ignore[type-arg]
        if not entries:
            return 0
        cost: cython.longlong = rule.cost_for(context)
        if rule.shadow:
            shadow.add(evaluation, rule, entries, key, cost)
        elif rule.idempotent is None or not idempotency.add(evaluation, rule, entries, key, cost):
            i: cython.Py_ssize_t
            for i in range(len(entries)):
                evaluation.entries.append(entries[i])
                evaluation.keys.append(key)
                evaluation.costs.append(cost)  # type: ignore[union-attr]
            if rule.needs_settlement:
                evaluation.needs_settlement = True
        return 0

    @cython.ccall
    def _claims(self, evaluation: Evaluation) -> list:  # type: ignore[type-arg]
        """The claims of an evaluation, created when they are first needed."""
        if evaluation.claims is None:
            found: list = []  # type: ignore[type-arg]
            i: cython.Py_ssize_t
            for i in range(len(evaluation.entries)):
                entry: Entry = evaluation.entries[i]
                found.append(Claim(entry.named, evaluation.keys[i], evaluation.costs[i]))  # type: ignore[index]
            evaluation.claims = found
        return evaluation.claims

    @cython.cfunc
    def _decide(self, evaluation: Evaluation) -> Decision:
        """One decision for all entries, by a store that answers without waiting."""
        if len(evaluation.entries) == 1 and not evaluation.needs_settlement:
            entry: Entry = evaluation.entries[0]
            return self.store.decide_one(entry.named, evaluation.keys[0], evaluation.costs[0], 0, True)  # type: ignore[index]
        if cython.compiled and not evaluation.needs_settlement and not self._busy and isinstance(self.store, MemoryStore):
            store: MemoryStore = self.store
            matched: MatchedRules = evaluation.matched  # type: ignore[assignment]
            self._busy = True  # Python code that runs meanwhile and asks this gate gets claims of its own
            try:
                if store._own and self._fill_claims(evaluation, matched):
                    return store.decide_checked(matched.claims, matched.names, 0, True, 0)  # type: ignore[arg-type]
            finally:
                self._busy = False
        return self.store.decide(self._claims(evaluation), 0)

    @cython.cfunc
    def _fill_claims(self, evaluation: Evaluation, matched: MatchedRules) -> cython.bint:
        """Fills in the claims of the path's last evaluation, so that none has to be created; False when a limit comes twice."""
        claims: list = matched.claims  # type: ignore[type-arg,assignment]
        i: cython.Py_ssize_t
        n: cython.Py_ssize_t = len(evaluation.entries)
        entry: Entry
        claim: Claim
        same: cython.bint = claims is not None and len(claims) == n
        for i in range(n):
            if not same:
                break
            entry = evaluation.entries[i]
            claim = claims[i]
            same = claim.named is entry.named
            claim.key = evaluation.keys[i]
            claim.cost = evaluation.costs[i]  # type: ignore[index]
            claim.charged = claim.cost
        if not same:
            claims = self._claims(evaluation)
            evaluation.claims = None
            matched.names = tuple([claim.named.name for claim in claims])
            matched.claims = claims if len(set(matched.names)) == n else None
        return matched.claims is not None

    def _call(self, evaluation: Evaluation) -> Call:
        """As `_decide`, as a step of a plan."""
        if len(evaluation.entries) == 1 and not evaluation.needs_settlement:
            entry: Entry = evaluation.entries[0]
            return Call(self.store, "decide_one", (entry.named, evaluation.keys[0], evaluation.costs[0], 0, True))  # type: ignore[index]
        return Call(self.store, "decide", (self._claims(evaluation), 0))

    # Results ---------------------------------------------------------------------------------------------------

    @cython.ccall
    def _allow(self, evaluation: Evaluation, decision: Decision | None) -> Evaluation:
        """Counts an allowed request; without a decision when its rules fail open."""
        i: cython.Py_ssize_t
        n: cython.Py_ssize_t = len(evaluation.entries)
        evaluation.decision = decision
        evaluation.allowed = True
        if decision is None:
            evaluation.needs_settlement = False
        elif n == 1:
            self._count_allowed(evaluation, evaluation.entries[0], decision, 0)
        else:
            joined: Decisions = decision  # type: ignore[assignment]
            parts: tuple = joined.parts_of() if cython.compiled else joined.parts  # type: ignore[attr-defined,type-arg]
            for i in range(n):
                self._count_allowed(evaluation, evaluation.entries[i], parts[i], i)
        self._count_time(evaluation)
        self._requests += 1
        self._allowed += 1
        if not evaluation.needs_settlement:
            evaluation.context = None  # a context refers to the request, and that to its evaluation: no reference cycle is left
        return evaluation

    @cython.cfunc
    def _count_allowed(self, evaluation: Evaluation, entry: Entry, part: Decision, i: cython.Py_ssize_t) -> cython.int:
        rule: CompiledRule = entry.compiled_rule
        if entry.label is rule.name:
            rule.passed += 1
        if part.remaining * 5 < part.limit and evaluation.near_rule is not rule:
            rule.near += 1
            evaluation.near_rule = rule
        if rule.alert >= 0:
            used: cython.longlong = part.limit - part.remaining
            cost: cython.longlong = evaluation.costs[i]  # type: ignore[index]
            if used >= part.limit * rule.alert and used - cost < part.limit * rule.alert:
                self._alert(evaluation, entry, part)
        return 0

    @cython.cfunc
    def _allow_unlimited(self, evaluation: Evaluation) -> Evaluation:
        """Counts a request without limits."""
        if not evaluation.needs_settlement:
            evaluation.context = None
        self._requests += 1
        self._allowed += 1
        if evaluation.costs is None:
            self._exempt += 1
        else:
            self._unlimited += 1
        return evaluation

    @cython.ccall
    def _refuse(self, evaluation: Evaluation, decision: Decision) -> Evaluation:
        """Counts a refused request, with the reason and the words of its refusal."""
        entry: Entry = evaluation.entries[0]
        rule: CompiledRule = entry.compiled_rule
        last: CompiledRule | None = None
        refusal: Refusal
        evaluation.decision = decision
        if len(evaluation.entries) == 1:  # the hot path of a client in a retry loop
            rule.refused += 1
            self.offenders.offer(rule.name, evaluation.keys[0])
            refusal = refusal_by(decision, entry, decision, (entry.label,), evaluation.reason)
        else:
            for entry, key, part in zip(evaluation.entries, evaluation.keys, decision.decisions, strict=True):
                rule = entry.compiled_rule
                if not part.allowed and rule is not last:  # the limits of one rule are adjacent, and count once
                    rule.refused += 1
                    self.offenders.offer(rule.name, key)
                    last = rule
            refusal = refusal_of(evaluation.entries, decision, evaluation.reason)
        if refusal.rule.on_refusal.action == DEGRADE:  # type: ignore[union-attr]
            for entry in evaluation.entries:
                if entry.rule is refusal.rule:
                    rule = entry.compiled_rule
                    rule.degraded += 1
                    break
        boxed = self._penalty_box is not None and self._penalty_box.count(evaluation)
        self._count_refused(evaluation, refusal)
        self._publish(REFUSED, evaluation)
        if boxed:
            self._publish(PENALTY_BOX_EVENT, evaluation)
        return evaluation

    def _count_refused(self, evaluation: Evaluation, refusal: Refusal) -> None:
        evaluation.refusal = refusal
        evaluation.allowed = evaluation.needs_settlement = False
        evaluation.context = None
        self._count_time(evaluation)
        self._requests += 1
        self._refused += 1

    def _refuse_boxed(self, refusal: Refusal) -> Evaluation:
        """Counts a request that the penalty box refused, before any rule was asked."""
        evaluation: Evaluation = new_evaluation(self, self.compiled)
        evaluation.allowed = False
        evaluation.refusal = refusal
        self._requests += 1
        self._refused += 1
        return evaluation

    @cython.cfunc
    def _count_time(self, evaluation: Evaluation) -> cython.int:
        """Counts how long the decision took, without the wait in a queue."""
        took: cython.longlong = monotonic_us() - evaluation.began_us - evaluation.wait_us
        if took < 0:  # the store's clock, which measures the wait, is another one
            took = 0
        i: cython.Py_ssize_t = 0
        edge: cython.longlong = 1
        while i < DOUBLING and took > edge:
            i += 1
            edge *= 2
        while DOUBLING <= i < BOUNDS and took > DECISION_BOUNDS_US[i]:
            i += 1
        self._latency[i] += 1
        self._latency_sum += took
        return 0

    def _alert(self, evaluation: Evaluation, entry: Entry, part: Decision) -> None:
        """Counts, logs and publishes that the use of a key has crossed its rule's alert level."""
        rule: CompiledRule = entry.compiled_rule
        rule.alerts += 1
        self._callback_errors.report("%s: a key has used %d of %d", entry.label, part.limit - part.remaining, part.limit)
        self._publish(ALERT, evaluation)

    def _publish(self, kind: str, evaluation: Evaluation | None, error: BaseException | None = None) -> None:
        if self._publisher is not None:
            cost = evaluation.costs[0] if evaluation is not None and evaluation.costs else 1
            keys = tuple(evaluation.keys) if evaluation is not None else None
            self._publisher.publish(kind, self.compiled.policy.name, keys, cost, evaluation, error)


def may_wait(evaluation: Evaluation, decision: Decision) -> bool:
    """Whether every refusing rule waits, and the request can pass at all."""
    if decision.retry_us < 0:
        return False
    for entry, part in zip(evaluation.entries, decision.decisions, strict=True):
        if not part.allowed and not entry.compiled_rule.waits:
            return False
    return True
