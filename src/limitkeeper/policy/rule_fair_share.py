"""`capacity`: one rate for all keys of a rule together, divided among them (sharing/tenant_fair_share.py).

A capacity is asked after the limits have allowed a request, so a client that has used up its quota is answered 429 and takes
nothing of the capacity. A request that a capacity refuses is answered 503: the client is within its quotas, the service is full.
Everything that the request was charged is given back; Retry-After is exact, and RateLimit fields, which describe quotas, are not
sent: what is left of a capacity depends on the other clients. Such a refusal does not count for the penalty box.

While the store fails: `open` allows, `closed` refuses, `local 1/4` divides a quarter of the capacity in this process.
Rejected: asking the capacity in the script of the limits (its keys are in another slot of a Redis Cluster).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..algorithms.claim import Claim
from ..clock import Clock
from ..decision import Decision
from ..errors import StoreError
from ..observe.events import REFUSED, SHADOW, STORE_FAILED
from ..rate import MAX_COUNT, Rate
from ..sharing import FairShare
from ..stores.contract import Store
from ..stores.guarded import GuardedStore
from ..stores.guarded.share import parse_share
from ..stores.sans_io import Call, Plan
from .idempotency import charges_of, leave, release_marks
from .model import CLOSED, DEGRADE, LOCAL, OPEN, Capacity, Rule
from .refusal import CAPACITY, STORE, client_delay, refusal_by

if TYPE_CHECKING:
    from .compiled_rule import CompiledRule
    from .evaluation import Evaluation, Evaluator

#: When to retry a request that was refused because the store failed.
RETRY_US = 1_000_000
LOCAL_SHARE = "local_share"


def fair_share_of(capacity: Capacity, name: str, store: Store | None, clock: Clock, part: float = 1.0) -> FairShare:
    """The FairShare of a part of a capacity."""

    def scaled(rate: Rate) -> Rate:
        return rate if part == 1.0 else Rate(max(1, int(rate.count * part * 1000)), rate.period * 1000)

    return FairShare(
        scaled(capacity.rate),
        weights=dict(capacity.shares),
        guarantees={key: scaled(rate) for key, rate in capacity.guarantees},
        window=capacity.window_us / 1e6,
        store=store,
        name=name,
        clock=clock,
    )


class RuleCapacity:
    """The capacity of one rule in the store of its policy, and the rule's answer while the store fails."""

    def __init__(self, rule: CompiledRule, capacity: Capacity, store: Store, clock: Clock) -> None:
        self.rule: Rule = rule.config
        self._limit = rule.capacity_entry.named
        self.capacity, self._clock, self.now_us = capacity, clock, clock.now_us
        self.share = fair_share_of(capacity, f"{rule.limiter} {rule.name}", store, clock)
        self._guard = store if isinstance(store, GuardedStore) else None
        self._local: FairShare | None = None

    def plan_call(self, method: str, key: str, cost: int) -> Plan[Decision]:
        """A hit, peek or refund in the store; a StoreError when it fails, or has failed so often that it is not called."""
        call = Call(self.share, method, (key, cost))
        if self._guard is None:
            return (yield call)  # type: ignore[no-any-return]
        return (yield from self._guard.plan_guarded(call, [Claim(self._limit, key, 1)]))  # type: ignore[no-any-return]

    def plan_give_back(self, key: str, cost: int, source: str) -> Plan[None]:
        """Gives a hit back where it was charged, as `source` says; rules that are open charge nothing."""
        if source == LOCAL_SHARE and self._local is not None:
            self._local.refund(key, cost)
        elif source == "store":
            yield from self.plan_call("refund", key, cost)

    def without_store(self, key: str, cost: int) -> Decision:
        """The decision of `on_failure`."""
        action = self.rule.on_failure.action
        if action != LOCAL:
            return Decision(action == OPEN, 0, 0, RETRY_US if action == CLOSED else 0, name=self.rule.name, source=action)
        if self._local is None:
            part = float(parse_share(self.rule.on_failure.share))
            self._local = fair_share_of(self.capacity, self.rule.name, None, self._clock, part)
        found = self._local.hit(key, cost)
        fields = (found.allowed, found.limit, found.remaining, found.retry_us, found.reset_us, 0, found.start_us, self.rule.name)
        return Decision(*fields, source=LOCAL_SHARE)


class CapacityClaim(NamedTuple):
    """What one rule with a capacity asks for a request."""

    rule: CompiledRule
    key: str
    cost: int


def add(evaluation: Evaluation, rule: CompiledRule, key: str, cost: int) -> None:
    """Adds what a request asks of a capacity; more than MAX_COUNT units fit in none."""
    evaluation.special = True
    evaluation.capacity = [*(evaluation.capacity or ()), CapacityClaim(rule, key, min(cost, MAX_COUNT))]


def ask(gate: Evaluator, evaluation: Evaluation, charged: Decision | None, store_fails: bool = False) -> Plan[Evaluation | None]:
    """Charges the capacities of a request that the limits have allowed with the decision `charged`. None: all admit it; otherwise
    its evaluation, refused, with everything given back."""
    taken: list[tuple[CapacityClaim, str]] = []
    for one in evaluation.capacity or ():
        decision = None if store_fails else (yield from _hit(gate, evaluation, one))
        decision = one.rule.capacity.without_store(one.key, one.cost) if decision is None else decision
        if decision.source == OPEN:
            one.rule.failed_open += 1
        elif decision.source == LOCAL_SHARE:
            one.rule.failed_local += 1
        if decision.allowed:
            taken.append((one, decision.source))
            one.rule.passed += 1
        elif one.rule.shadow:
            one.rule.shadow_refused += 1
            evaluation.shadows = (*evaluation.shadows, one.rule.name)
            gate._publish(SHADOW, evaluation)
            decision = Decision(True, decision.limit, decision.remaining, 0, decision.reset_us, name=decision.name)
        else:
            yield from _give_back(gate, evaluation, charged, taken)
            return _refuse(gate, evaluation, one, decision)
        if evaluation.context is None:  # a hit of this rule by its name: the decision is its answer
            evaluation.entries, evaluation.keys, evaluation.decision = [one.rule.capacity_entry], [one.key], decision
    return None


def answer_failure(gate: Evaluator, evaluation: Evaluation, failure: Decision | StoreError) -> Plan[Evaluation]:
    """The evaluation of a request while the store fails: that of its limits, then of its capacities."""
    refused, charged = gate._on_failure.decide(gate, evaluation, failure)
    if refused is None:
        refused = yield from ask(gate, evaluation, charged, store_fails=True)
    return gate._allow(evaluation, charged) if refused is None else refused


def _hit(gate: Evaluator, evaluation: Evaluation, one: CapacityClaim) -> Plan[Decision | None]:
    try:
        return (yield from one.rule.capacity.plan_call("hit", one.key, one.cost))  # type: ignore[no-any-return]
    except StoreError as error:
        gate._publish(STORE_FAILED, evaluation, error)
        return None


def _give_back(
    gate: Evaluator, evaluation: Evaluation, charged: Decision | None, taken: list[tuple[CapacityClaim, str]]
) -> Plan[None]:
    """Gives back what the limits and the other capacities have charged. If the store fails now, it stays charged."""
    try:
        if charged is not None and gate._on_failure.has_failed(charged):
            for entry, claim, part in zip(evaluation.entries, gate._claims(evaluation), charged.decisions, strict=True):
                gate._on_failure.give_back(entry, [claim], part)
        elif charged is not None and evaluation.entries:
            yield leave(evaluation.compiled.store, charges_of(evaluation, charged, enumerate(gate._claims(evaluation))))
        yield from release_marks(gate, evaluation)
        for one, source in taken:
            one.rule.passed -= 1
            yield from one.rule.capacity.plan_give_back(one.key, one.cost, source)
    except StoreError as error:
        gate._publish(STORE_FAILED, evaluation, error)


def _refuse(gate: Evaluator, evaluation: Evaluation, one: CapacityClaim, decision: Decision) -> Evaluation:
    """Counts a refusal by a capacity, or by a closed rule while the store fails."""
    rule, entry, failed = one.rule, one.rule.capacity_entry, decision.source == CLOSED
    rule.refused += 1
    rule.failed_closed += failed
    rule.degraded += rule.config.on_refusal.action == DEGRADE
    gate.offenders.offer(rule.name, one.key)
    evaluation.decision = None
    if evaluation.context is None:
        evaluation.entries, evaluation.keys, evaluation.decision = [entry], [one.key], None if failed else decision
    spread_us, retry_us = rule.spread_us if decision.retry_us >= 0 else 0, decision.retry_us
    delay_us = client_delay(evaluation, rule.capacity.now_us() + retry_us, spread_us, retry_us) if spread_us else 0
    reason = STORE if failed else CAPACITY
    refusal = refusal_by(decision, entry, decision, (entry.label,), reason, retry_us, delay_us)
    gate._count_refused(evaluation, refusal)
    gate._publish(REFUSED, evaluation)
    return evaluation
