"""Penalty box: a client that is refused too often is refused for a while without asking the store.

A client in a retry loop then costs one dictionary lookup. Refusals are counted in a MemoryStore of this process, which is bounded
like any other. Refusals by the penalty box do not extend the penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..algorithms.claim import NamedLimit
from ..clock import Clock
from ..limiter_base import is_off
from ..stores.memory import MemoryStore
from .compiled_policy import key_of
from .model import Policy
from .refusal import MESSAGES, PENALTY_BOX, Refusal, seconds
from .request_context import RequestContext

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator

#: The most clients in the box, and the most whose refusals are counted.
MAX_CLIENTS = 100_000
#: The shortest interval between two sweeps of a full box: one takes longer than a thousand refusals.
SWEEP_US = 1_000_000


class PenaltyBox:
    """The clients in the penalty box, and until when."""

    def __init__(self, policy: Policy, clock: Clock) -> None:
        assert policy.penalty_box is not None
        self.config = policy.penalty_box
        self.refused = 0
        self._clock = clock
        self._until: dict[object, int] = {}
        self._swept_us = -SWEEP_US
        self._store = MemoryStore(MAX_CLIENTS, clock)
        self._limit = NamedLimit(policy.name, "penalty box", self.config.limit)

    def __len__(self) -> int:
        now_us = self._clock.now_us()
        return sum(1 for until in list(self._until.values()) if until > now_us)

    def refuse(self, gate: Evaluator, context: RequestContext) -> Evaluation | None:
        """The refusal of a client in the box; None for all others, and for exempt requests."""
        if not self._until or is_off():
            return None
        compiled = gate.compiled
        matched = compiled.match(context)  # before identities are computed: those of the path need the captured segments
        key = key_of(compiled.identities, context, self.config.key)
        until = self._until.get(key)
        if until is None:
            return None
        left_us = until - self._clock.now_us()
        if left_us <= 0:
            self._until.pop(key, None)
            return None
        if matched.exempt or (matched.exemptions and compiled.exempted_rules(matched, context) is True):
            return None
        self.refused += 1
        gate.offenders.offer(PENALTY_BOX, str(key))
        return gate._refuse_boxed(
            Refusal(PENALTY_BOX, 429, seconds(left_us), MESSAGES[PENALTY_BOX](seconds(left_us)), retry_us=left_us)
        )

    def count(self, evaluation: Evaluation) -> bool:
        """Counts a refusal; True when it puts the client into the box."""
        assert evaluation.context is not None
        key = key_of(evaluation.compiled.identities, evaluation.context, self.config.key)
        if key is None or self._store.decide_one(self._limit, str(key), 1, 0, True).allowed:
            return False
        now_us = self._clock.now_us()
        if len(self._until) >= MAX_CLIENTS and now_us >= self._swept_us + SWEEP_US:
            self._swept_us = now_us
            self._until = {one: until for one, until in self._until.items() if until > now_us}
        if len(self._until) < MAX_CLIENTS:
            self._until[key] = now_us + self.config.for_us
        return True
