"""Penalty box: a client that is refused too often is refused for a while without asking the store.

A client in a retry loop then costs a few dictionary lookups. Refusals are counted in a MemoryStore of this process, which is
bounded like any other. Refusals by the penalty box do not extend the penalty.

The retry of a refusal is the later of two times: the end of the penalty, and the retry of the rules that refused the keys of this
request before. Both are known without asking the store. It is spread as those rules spread it, or clients that were refused
together would come back together. A blocked key has no retry: its rule refuses it, which asks no store either.

Penalties may grow: a client that gets there again is refused for the next step. Its step is remembered for the length of the
longest step after its penalty has ended, for at most MAX_CLIENTS clients; a client beyond that begins with the first step each
time, and no remembered one is forgotten for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..algorithms.claim import NamedLimit
from ..clock import Clock
from ..decision import Decision
from ..limiter_base import is_off
from ..stores.memory import MemoryStore
from .compiled_policy import CompiledPolicy
from .compiled_rule import CompiledRule, bounded, identity_of, key_of
from .model import Policy
from .refusal import PENALTY_BOX, delay_of, part_retry_us, refusal_without_limit
from .request_context import RequestContext

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: The most clients in the box, the most whose refusals are counted, and the most retries of rules that are remembered.
MAX_CLIENTS = 100_000
#: The shortest interval between two sweeps of a full box: one takes longer than a thousand refusals.
SWEEP_US = 1_000_000


class Penalty(NamedTuple):
    """What is left of the penalty of a request's client: its key, when to retry, in microseconds, and the rules that apply."""

    key: object
    retry_us: int
    rules: list[tuple[CompiledRule, str]]


class PenaltyBox:
    """The clients in the penalty box, and until when."""

    def __init__(self, policy: Policy, clock: Clock) -> None:
        assert policy.penalty_box is not None
        self.config = policy.penalty_box
        self.refused = 0
        self._clock = clock
        self._until: dict[object, int] = {}
        self._retry_at: dict[tuple[str, object], int] = {}  # by rule and its key: many users may share the box's key, an address
        self._steps_us = (self.config.for_us, *self.config.then_us)
        self._offences: dict[object, tuple[int, int]] = {}  # the last step, and until when it is remembered
        self._swept_us = -SWEEP_US
        self._store = MemoryStore(MAX_CLIENTS, clock)
        self._limit = NamedLimit(policy.name, "penalty box", self.config.limit)

    def __len__(self) -> int:
        now_us = self._clock.now_us()
        return sum(1 for until in list(self._until.values()) if until > now_us)

    def refuse(self, gate: Evaluator, context: RequestContext) -> Evaluation | None:
        """The refusal of a client in the box; None for all others, and for exempt requests."""
        penalty = self.penalty_of(gate.compiled, context)
        if penalty is None:
            return None
        self.refused += 1
        if gate._attempts is not None:
            gate._attempts.count(gate.compiled, context)
        gate.offenders.offer(PENALTY_BOX, str(penalty.key))
        delay_us = self._delay_us(gate, context, penalty)
        return gate._refuse_boxed(refusal_without_limit(PENALTY_BOX, 429, penalty.retry_us, delay_us=delay_us))

    def _delay_us(self, gate: Evaluator, context: RequestContext, penalty: Penalty) -> int:
        """The delay of the retry by the longest spread of the rules that refused this request before."""
        spread_us = max([rule.spread_us for rule, own in penalty.rules if (rule.name, bounded(own)) in self._retry_at], default=0)
        if not spread_us:
            return 0
        asked = [(rule, own) for rule, own in penalty.rules if not rule.shadow and rule.capacity is None]
        keys = [bounded(own) for rule, own in asked if rule.entries_for(context, own)]
        address = identity_of(gate.compiled.identities, context, "ip")
        return delay_of(gate.secret, address, keys, self._clock.now_us() + penalty.retry_us, spread_us, penalty.retry_us)

    def penalty_of(self, compiled: CompiledPolicy, context: RequestContext) -> Penalty | None:
        """The penalty of a request whose client is in the box, unless its key is blocked. Counts nothing."""
        if not self._until or is_off():
            return None
        matched = compiled.match(context)  # before identities are computed: those of the path need the captured segments
        key = key_of(compiled.identities, context, self.config.key)
        until = self._until.get(key)
        if until is None:
            return None
        now_us = self._clock.now_us()
        if until <= now_us:
            self._until.pop(key, None)
            return None
        exempted: Any = matched.exempt or compiled.exempted_rules(matched, context)
        if exempted is True:
            return None
        applying = [rule for rule in matched.rules if not (exempted and rule.name in exempted) and rule.applies(context)]
        rules: list[tuple[CompiledRule, Any]] = [(rule, rule.key_for(context)) for rule in applying]
        rules = [(rule, own) for rule, own in rules if own is not None]
        if any(rule.entries_for(context, own) is rule.blocked for rule, own in rules):
            return None
        retry_at = max([until, *(self._retry_at.get((rule.name, bounded(own)), 0) for rule, own in rules)])
        return Penalty(key, retry_at - now_us, rules)

    def count(self, evaluation: Evaluation, decision: Decision) -> tuple[int, bool]:
        """Counts a refusal by rules. Returns the rest of the client's penalty in microseconds, and whether it begins now."""
        if evaluation.context is None:  # a hit of a single rule, without a request
            return 0, False
        key = key_of(evaluation.compiled.identities, evaluation.context, self.config.key)
        if key is None:
            return 0, False
        now_us = self._clock.now_us()
        if max(len(self._until), len(self._offences), len(self._retry_at)) >= MAX_CLIENTS and now_us >= self._swept_us + SWEEP_US:
            self._swept_us = now_us
            sweep(self._until, lambda until: until <= now_us)
            sweep(self._offences, lambda offence: offence[1] <= now_us)
            sweep(self._retry_at, lambda at: at <= now_us)
        retries: dict[tuple[str, object], int] = {}  # of a rule with several limits the longest
        for entry, own, part in zip(evaluation.entries, evaluation.keys, decision.decisions, strict=True):
            if not part.allowed and len(self._retry_at) < MAX_CLIENTS:
                rule = (entry.rule.name, own)
                retries[rule] = max(retries.get(rule, 0), now_us + part_retry_us(entry, part))
        self._retry_at |= retries
        boxed, left_us = False, self._until.get(key, 0) - now_us
        if left_us > 0:  # a request that was under way: no second offence
            return left_us, False
        shared = self._store.overflow  # counts decisions on cells that clients share: refusals of others box nobody
        allowed = self._store.decide_one(self._limit, str(key), 1, 0, True).allowed
        if not allowed and self._store.overflow == shared and len(self._until) < MAX_CLIENTS:
            boxed, left_us = True, self._penalty(key, now_us)
            self._until[key] = now_us + left_us
        return max(0, left_us), boxed

    def _penalty(self, key: object, now_us: int) -> int:
        """The length of a client's penalty; where penalties grow, remembers its step."""
        if len(self._steps_us) == 1:
            return self._steps_us[0]
        step, remembered = self._offences.get(key, (-1, 0))
        step = min(step + 1, len(self._steps_us) - 1) if remembered > now_us else 0
        penalty_us = self._steps_us[step]
        if key in self._offences or len(self._offences) < MAX_CLIENTS:
            self._offences[key] = (step, now_us + penalty_us + self._steps_us[-1])
        return penalty_us


def sweep(entries: dict[K, V], is_over: Callable[[V], bool]) -> None:
    """Removes entries that are over. In place, from a copy: other threads add and remove meanwhile."""
    for key, value in list(entries.items()):
        if is_over(value):
            entries.pop(key, None)
