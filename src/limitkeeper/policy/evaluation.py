"""Evaluation of a request by a policy: which rules apply, one decision of the store for all of them, and what was counted.

    match      the rules of the path (compiled_policy.py)
    entries    of each rule that applies: its limits, the key and the cost
    decision   of all entries together, in one call of the store: all are charged, or none
    result     an `Evaluation`, counted and published, for the caller that writes the response

`ask_nowait` answers whatever needs no waiting; `ask` and `aask` perform the rest as one plan (stores/sans_io.py). Steps that
most requests skip have files of their own: shadow_rules.py, idempotency.py, waiting_requests.py, on_failure.py, settlement.py.

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
    from cython.cimports.limitkeeper.policy.compiled_policy import CompiledPolicy, MatchedRules
    from cython.cimports.limitkeeper.policy.compiled_rule import CompiledRule, Entry, bounded
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
    from .compiled_policy import CompiledPolicy, MatchedRules
    from .compiled_rule import CompiledRule, Entry, bounded
    from .refusal import Refusal, refusal_by
    from .request_context import RequestContext

from ..errors import StoreError
from ..observe.events import ALERT, REFUSED
from ..observe.events import PENALTY_BOX as PENALTY_BOX_EVENT
from ..observe.offenders import Offenders
from ..observe.snapshot import DECISION_BOUNDS_US, RESPONSE_BOUNDS_MS
from ..stores.sans_io import Call, Plan, arun, run
from . import idempotency, rule_fair_share, settlement
from .callback_errors import CallbackErrors
from .model import Policy
from .on_failure import FailureAnswers
from .penalty_box import PenaltyBox
from .refusal import BLOCKED, QUOTA, block, blocked_decision, call_message, client_delay, degrades, refusal_of, retry_of
from .retry_amplification import AttemptCounter
from .shadow_rules import ShadowRule, ask_shadow, passed_apart
from .waiting_requests import WaitingRequests, may_wait

if TYPE_CHECKING:
    from ..clock import Clock
    from ..observe.events import Publisher

BOUNDS = len(DECISION_BOUNDS_US)
#: So many of the bounds are 1, 2, 4, 8 …: found without reading the table.
DOUBLING = 10
assert DECISION_BOUNDS_US[:DOUBLING] == tuple([1 << i for i in range(DOUBLING)])
RESPONSE_BOUNDS = len(RESPONSE_BOUNDS_MS)


@cython.cclass
class Evaluation:
    """The result of one request.

    Attributes:
        allowed: whether the request goes on to the handler.
        decision: of all limits together; None when nothing limits it (exempt, no rule, in the penalty box, store failed open).
        entries: the limits that were asked, in the order of `decision.decisions`.
        keys: their keys, in the same order.
        policy: the version of the policy that evaluated this request.
        refusal: the `Refusal`, when not allowed.
        shadows: names of the rules in shadow mode that would have refused.
        wait_us: how long the request waited, in microseconds.
        origin: whether the request names the page that made it: its script may read only what the response exposes.
        needs_settlement: True: `settle` (or `asettle`) must be called when the response is known.
        declined: whether a degrade handler leaves the response to the refusal.
    """

    # fmt: off
    __slots__ = ("alerting", "allowed", "began_us", "capacity", "claims", "compiled", "context", "costs", "decision", "declined",
                 "entries", "gate", "idempotent", "keys", "marks", "matched", "near_rule", "needs_settlement", "origin", "reason",
                 "refusal", "shadow", "shadows", "special", "wait_us")
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
        self.wait_us = self.began_us = 0
        self.origin = self.needs_settlement = self.declined = False
        # State of the evaluation: costs in the order of the entries, claims, and rules that are asked apart (special).
        self.costs: list[int] | None = None
        self.claims: list[Claim] | None = None
        self.shadow: list[ShadowRule] | None = None
        self.idempotent: list[idempotency.Mark] | None = None
        self.marks: list[idempotency.Mark] | None = None
        self.capacity: list[rule_fair_share.CapacityClaim] | None = None
        self.special = False
        self.matched: MatchedRules | None = None
        self.near_rule: CompiledRule | None = None  # counted as near its limit: once per rule
        self.alerting: Entry | None = None  # the limit whose alert level was crossed last
        self.reason = QUOTA

    def __bool__(self) -> bool:
        return self.allowed

    @property
    def policy(self) -> Policy:
        return self.compiled.policy

    @property
    def degrade(self) -> Callable[..., Any] | None:
        """The handler that answers instead of the application, when the refusing rule degrades."""
        refusal = self.refusal
        if refusal is None or refusal.rule is None or self.declined or not degrades(refusal.rule, refusal.reason):
            return None
        handler: Callable[..., Any] = self.compiled.handlers[refusal.rule.name]
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
        took_ms = took / 1000.0
        k: cython.Py_ssize_t
        for k in range(len(self.entries)):
            entry: Entry = self.entries[k]
            if entry.label is entry.compiled_rule.name:
                entry.compiled_rule.count_response(i, family, took_ms)
        if self.capacity is not None or self.shadow is not None:
            for rule in passed_apart(self):
                rule.count_response(i, family, took_ms)

    def afford(self, status: int, size: int) -> bool:
        """Charges a response whose size is known before it is sent. False: it is refused, and must not be sent."""
        return not self.needs_settlement or run(settlement.afford(self, status, size))

    async def aafford(self, status: int, size: int) -> bool:
        """As `afford`, awaited."""
        return not self.needs_settlement or await arun(settlement.afford(self, status, size))

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

    def __init__(self, compiled: CompiledPolicy, clock: Clock, offenders: Offenders, secret: bytes) -> None:
        self.compiled = compiled
        self.offenders = offenders
        self.secret = secret
        self._busy = False
        self._on_failure = FailureAnswers(clock)
        self._waiting = WaitingRequests(compiled.store, clock)
        policy: Policy = compiled.policy
        self._penalty_box = None if policy.penalty_box is None else PenaltyBox(policy, clock)
        self._attempts = AttemptCounter.of(policy, secret, clock, None)
        self._publisher: Publisher | None = None
        self._callback_errors = CallbackErrors()
        self._requests = self._allowed = self._refused = self._exempt = self._unlimited = 0
        self._latency = [0] * (BOUNDS + 1)
        self._latency_sum = 0

    # Asking ----------------------------------------------------------------------------------------------------

    def ask_nowait(self, context: RequestContext) -> Evaluation | None:
        """Evaluates a request if that needs no wait, in a queue or for a remote store; otherwise None, and nothing is charged."""
        if self._penalty_box is not None:
            refused = self._penalty_box.refuse(self, context)
            if refused is not None:
                return refused
        return self._evaluate_nowait(self._prepare(context), True)

    def hit_rule_nowait(self, rule: CompiledRule, key: str, cost: int, tier: str | None = None) -> Evaluation | None:
        """A hit of one rule under a given key: no request is matched, and it never waits in the rule's queue. `tier` is the value
        of the identity by which the rule chooses its limits. None: the store has to be awaited (calls_by_rule_name.py)."""
        return self._evaluate_nowait(self.prepare_rule(rule, key, cost, tier), False)

    @cython.cfunc
    def _evaluate_nowait(self, evaluation: Evaluation, may_queue: cython.bint) -> Evaluation | None:
        """`may_queue`: the result is None for a request that would wait in a queue; otherwise that is refused."""
        if evaluation.special:
            at_once = not evaluation.compiled.remote or evaluation.reason is BLOCKED
            return run(self._plan(evaluation, False)) if at_once else None
        if not evaluation.entries:
            return self._allow_unlimited(evaluation)
        decision: Decision
        remote: cython.bint = evaluation.compiled.remote
        try:
            decision = self._hit_lease(evaluation) if remote else self._decide(evaluation)
        except StoreError as error:
            return self._on_failure.answer(self, evaluation, error)
        if decision is None:
            return None
        if remote and self._on_failure.has_failed(decision):
            return self._on_failure.answer(self, evaluation, decision)
        if decision.allowed:
            return self._allow(evaluation, decision)
        return None if may_queue and may_wait(evaluation, decision) else self._refuse(evaluation, decision)

    @cython.cfunc
    def _hit_lease(self, evaluation: Evaluation) -> Decision:
        """A remote store answers one plain hit at once when it holds a lease for it; otherwise None."""
        if len(evaluation.entries) > 1 or evaluation.needs_settlement:
            return None  # type: ignore[return-value]
        entry: Entry = evaluation.entries[0]
        return evaluation.compiled.store.hit_nowait(entry.named, evaluation.keys[0], evaluation.costs[0])  # type: ignore[index,return-value]

    def ask(self, context: RequestContext) -> Evaluation:
        """Evaluates a request; waits in a rule's queue, or for a remote store."""
        found = None if self.compiled.remote else self.ask_nowait(context)  # nearly always that is all
        return run(self._whole_plan(context, True)) if found is None else found

    async def aask(self, context: RequestContext, in_thread: bool = False) -> Evaluation:
        """As `ask`, awaited. `in_thread`: a thread is held until this returns."""
        return await arun(self._whole_plan(context, in_thread))

    def _whole_plan(self, context: RequestContext, in_thread: bool) -> Plan[Evaluation]:
        found = None if self._penalty_box is None else self._penalty_box.refuse(self, context)
        if found is None:
            found = yield from self._plan(self._prepare(context), True, in_thread)
        return found  # type: ignore[return-value]

    def _plan(self, evaluation: Evaluation, wait: bool, in_thread: bool = False) -> Plan[Evaluation | None]:
        """The whole evaluation. Without `wait`, the result of a request that would wait is None."""
        decision: Decision
        if evaluation.reason is BLOCKED:
            return self._refuse(evaluation, blocked_decision(evaluation))
        try:
            yield from idempotency.find_marks(self, evaluation)
            if not evaluation.entries:
                refused = yield from rule_fair_share.ask(self, evaluation, None)
                return (yield from ask_shadow(self, self._allow_unlimited(evaluation))) if refused is None else refused
            decision = yield self._call(evaluation)
            waits = not decision.allowed and not self._on_failure.has_failed(decision) and may_wait(evaluation, decision)
            if waits and wait:
                decision = yield from self._waiting.wait(self, evaluation, decision, in_thread)
            if self._on_failure.has_failed(decision):
                return (yield from rule_fair_share.answer_failure(self, evaluation, decision))
            if not decision.allowed:
                yield from idempotency.release_marks(self, evaluation)
                return None if waits and not wait else self._refuse(evaluation, decision)
        except StoreError as error:
            return (yield from rule_fair_share.answer_failure(self, evaluation, error))
        refused = yield from rule_fair_share.ask(self, evaluation, decision)
        if refused is not None:
            return refused
        yield from idempotency.make_marks(self, evaluation, decision)
        return (yield from ask_shadow(self, self._allow(evaluation, decision)))

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def _prepare(self, context: RequestContext) -> Evaluation:
        """Collects the entries, keys and costs of all rules that apply."""
        compiled: CompiledPolicy = self.compiled
        evaluation: Evaluation = new_evaluation(self, compiled)
        evaluation.began_us = monotonic_us()
        evaluation.context = context
        matched: MatchedRules = compiled.match(context)
        evaluation.matched = matched
        if matched.exempt or limiter_base.off:
            return evaluation
        exempted: object = None
        if matched.exemptions:
            exempted = compiled.exempted_rules(matched, context)
            if exempted is True:
                return evaluation
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

    @cython.ccall
    def prepare_rule(self, rule: CompiledRule, key: str, cost: cython.longlong, tier: str | None) -> Evaluation:
        """The evaluation of a hit of one rule under a given key, ready to be decided."""
        evaluation: Evaluation = new_evaluation(self, self.compiled)
        evaluation.began_us = monotonic_us()
        if limiter_base.off:
            return evaluation
        entries: tuple = rule.default_entries  # type: ignore[type-arg]
        if rule.varies():
            context = RequestContext("", "")
            context.identities[rule.tier_identity or ""] = tier
            entries = rule.entries_for(context, key)
        evaluation.costs = []
        if rule.capacity is not None:
            rule_fair_share.add(evaluation, rule, key, cost)
            return evaluation
        if rule.blocked is not None and entries is rule.blocked:
            block(evaluation, entries, key, cost)
            return evaluation
        if rule.shadow and entries:
            evaluation.special = True
            evaluation.shadow = [ShadowRule(rule, [Claim(entry.named, key, cost) for entry in entries])]
            return evaluation
        evaluation.entries, evaluation.keys, evaluation.costs = list(entries), [key] * len(entries), [cost] * len(entries)
        return evaluation

    @cython.cfunc
    def _add(self, evaluation: Evaluation, rule: CompiledRule, context: RequestContext, key: str) -> cython.int:
        """Adds the entries of one rule; a rule in shadow mode, or with an idempotency key, is asked apart."""
        if rule.capacity is not None:
            rule_fair_share.add(evaluation, rule, bounded(key), rule.cost_for(context))
            return 0
        entries: tuple = rule.entries_for(context, key)  # type: ignore[type-arg]
        if not entries or evaluation.reason is BLOCKED:
            return 0
        key = bounded(key)
        cost: cython.longlong = rule.cost_for(context)
        if rule.blocked is not None and entries is rule.blocked:
            block(evaluation, entries, key, cost)
        elif rule.shadow:
            evaluation.special = True
            evaluation.needs_settlement = evaluation.needs_settlement or rule.needs_settlement
            claims = [Claim(entry.named, key, cost) for entry in entries]
            evaluation.shadow = [*(evaluation.shadow or ()), ShadowRule(rule, claims)]
        elif rule.idempotent is None or not idempotency.add(evaluation, rule, entries, key, cost):
            i: cython.Py_ssize_t
            for i in range(len(entries)):
                evaluation.entries.append(entries[i])
                evaluation.keys.append(key)
                evaluation.costs.append(cost)  # type: ignore[union-attr]
            evaluation.needs_settlement = evaluation.needs_settlement or rule.needs_settlement
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
        """One decision for all entries, by a store that answers without waiting: that of the request's version, as in `_call`."""
        own: Store = evaluation.compiled.store
        if len(evaluation.entries) == 1 and not evaluation.needs_settlement:
            entry: Entry = evaluation.entries[0]
            return own.decide_one(entry.named, evaluation.keys[0], evaluation.costs[0], 0, True)  # type: ignore[index]
        matched: MatchedRules = evaluation.matched  # type: ignore[assignment]
        usual: cython.bint = matched is not None and not evaluation.needs_settlement and not self._busy
        if cython.compiled and usual and isinstance(own, MemoryStore):
            store: MemoryStore = own
            self._busy = True  # Python code that runs meanwhile and asks this gate gets claims of its own
            try:
                if store._own and self._fill_claims(evaluation, matched):
                    return store.decide_checked(matched.claims, matched.names, 0, True, 0)  # type: ignore[arg-type]
            finally:
                self._busy = False
        return own.decide(self._claims(evaluation), 0)

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
        """As `_decide`, as a step of a plan; by the store of the request's version, which a reload may have replaced."""
        if len(evaluation.entries) == 1 and not evaluation.needs_settlement:
            entry: Entry = evaluation.entries[0]
            arguments = (entry.named, evaluation.keys[0], evaluation.costs[0], 0, True)  # type: ignore[index]
            return Call(evaluation.compiled.store, "decide_one", arguments)
        return Call(evaluation.compiled.store, "decide", (self._claims(evaluation), 0))

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
            self._count_allowed(evaluation, 0, decision.limit, decision.remaining)
        else:
            joined: Decisions = decision  # type: ignore[assignment]
            for i in range(n):
                if cython.compiled:
                    self._count_allowed(evaluation, i, joined.part_at(i)[1], joined.part_at(i)[2])  # type: ignore[attr-defined]
                else:
                    self._count_allowed(evaluation, i, joined.decisions[i].limit, joined.decisions[i].remaining)
        self._count_decision(evaluation)
        self._requests += 1
        self._allowed += 1
        if not evaluation.needs_settlement:
            evaluation.context = None  # a context refers to the request, and that to its evaluation: no reference cycle is left
        return evaluation

    @cython.cfunc
    def _count_allowed(
        self, evaluation: Evaluation, i: cython.Py_ssize_t, limit: cython.longlong, remaining: cython.longlong
    ) -> cython.int:
        entry: Entry = evaluation.entries[i]
        rule: CompiledRule = entry.compiled_rule
        if entry.label is rule.name:
            rule.passed += 1
        if remaining * 5 < limit and evaluation.near_rule is not rule:
            rule.near += 1
            evaluation.near_rule = rule
        if rule.alert >= 0:
            used: cython.longlong = limit - remaining
            cost: cython.longlong = evaluation.costs[i]  # type: ignore[index]
            if used >= limit * rule.alert and used - cost < limit * rule.alert:
                self._alert(evaluation, entry, used, limit)
        return 0

    @cython.ccall
    def _allow_unlimited(self, evaluation: Evaluation) -> Evaluation:
        """Counts a request without limits."""
        if self._attempts is not None and evaluation.costs is not None:
            self._attempts.count(self.compiled, evaluation.context)
        if not evaluation.needs_settlement:
            evaluation.context = None
        self._requests += 1
        self._allowed += 1
        if evaluation.costs is None:
            self._exempt += 1
        elif evaluation.capacity is None:
            self._unlimited += 1
        return evaluation

    @cython.ccall
    def _refuse(self, evaluation: Evaluation, decision: Decision) -> Evaluation:
        """Counts a refused request, with the reason and the words of its refusal."""
        entry: Entry = evaluation.entries[0]
        rule: CompiledRule = entry.compiled_rule
        last: CompiledRule | None = None
        refusal: Refusal
        spread_us: cython.longlong = rule.spread_us
        evaluation.decision = decision
        penalty_us: cython.longlong
        penalty_us, boxed = (0, False) if self._penalty_box is None else self._penalty_box.count(evaluation, decision)
        if len(evaluation.entries) == 1:  # the hot path of a client in a retry loop
            rule.refused += 1
            self.offenders.offer(rule.name, evaluation.keys[0])
        else:
            spread_us = 0  # the longest of the rules that refuse
            for entry, key, part in zip(evaluation.entries, evaluation.keys, decision.decisions, strict=True):
                rule = entry.compiled_rule
                if not part.allowed and rule is not last:  # the limits of one rule are adjacent, and count once
                    rule.refused += 1
                    self.offenders.offer(rule.name, key)
                    spread_us = max(spread_us, rule.spread_us)
                    last = rule
        concurrent: cython.bint = evaluation.compiled.concurrent
        retry_us: cython.longlong = retry_of(evaluation.entries, decision) if concurrent else decision.retry_us
        retry_us = max(retry_us, penalty_us) if retry_us >= 0 else retry_us
        earliest_us: cython.longlong = decision.start_us - decision.wait_us + retry_us
        delay_us: cython.longlong = client_delay(evaluation, earliest_us, spread_us, retry_us) if spread_us else 0
        if len(evaluation.entries) == 1:
            refusal = refusal_by(decision, entry, decision, (entry.label,), evaluation.reason, retry_us, delay_us)
        else:
            refusal = refusal_of(evaluation.entries, decision, evaluation.reason, retry_us, delay_us)
        if degrades(refusal.rule, refusal.reason):  # type: ignore[arg-type]
            for entry in evaluation.entries:
                if entry.rule is refusal.rule:
                    entry.compiled_rule.degraded += 1
                    break
        self._count_refused(evaluation, refusal)
        self._publish(REFUSED, evaluation)
        if boxed:
            self._publish(PENALTY_BOX_EVENT, evaluation)
        return evaluation

    def _count_refused(self, evaluation: Evaluation, refusal: Refusal) -> None:
        call_message(refusal, evaluation.context)
        evaluation.refusal, evaluation.allowed, evaluation.needs_settlement = refusal, False, False
        self._count_decision(evaluation)
        evaluation.context = None
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
    def _count_decision(self, evaluation: Evaluation) -> cython.int:
        """Counts the attempt, and how long its decision took, without the wait in a queue."""
        if self._attempts is not None:
            self._attempts.count(self.compiled, evaluation.context)
        took: cython.longlong = monotonic_us() - evaluation.began_us - evaluation.wait_us
        return self._count_latency(0 if took < 0 else took)  # the store's clock, which measures the wait, is another one

    @cython.cfunc
    def _count_latency(self, took: cython.longlong) -> cython.int:
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

    def _alert(self, evaluation: Evaluation, entry: Entry, used: int, limit: int) -> None:
        """Counts, logs and publishes that the use of a key has crossed its rule's alert level."""
        entry.compiled_rule.alerts += 1
        evaluation.alerting = entry
        self._callback_errors.report("%s: a key has used %d of %d", entry.label, used, limit)
        self._publish(ALERT, evaluation)

    def _alert_override(self, rule: CompiledRule, error: Exception) -> None:
        """Counts, logs and publishes that the rule's own limit holds for a key in the place of its override."""
        rule.alerts += 1
        self._callback_errors.report("%s: an override does not hold, the rule's own limit does: %s", rule.name, error)
        self._publish(ALERT, None, error)

    def _publish(self, kind: str, evaluation: Evaluation | None, error: BaseException | None = None) -> None:
        if self._publisher is not None:
            cost = evaluation.costs[0] if evaluation is not None and evaluation.costs else 1
            keys = tuple(evaluation.keys) if evaluation is not None else None
            self._publisher.publish(kind, self.compiled.policy.name, keys, cost, evaluation, error)
