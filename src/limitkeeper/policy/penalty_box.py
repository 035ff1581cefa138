"""Who is refused too often is shut out for a while: a client in a retry loop costs one look into a dictionary, and no question
to the store.

Refusals are counted in this process, in a memory of their own that is bounded like any other store's. Being refused while shut
out does not make it longer.
"""

from __future__ import annotations

from typing import Any

from ..algorithms.claim import NamedLimit
from ..limiter_base import is_off
from ..observe.events import PENALTY_BOX
from ..stores.memory import MemoryStore
from .compiled_rule import key_of
from .evaluation import SHUT_OUT, Evaluation, Refusal
from .model import Policy
from .refusal import MESSAGES, seconds

#: How many clients are remembered as shut out, and how many refusals are counted at a time.
MOST = 100_000
#: How often a full memory is looked through for those whose time is over: that takes longer than a thousand refusals.
SWEEP_US = 1_000_000


class PenaltyBox:
    """The clients that are shut out, and until when."""

    def __init__(self, policy: Policy, clock: Any) -> None:
        assert policy.penalty_box is not None
        self.said = policy.penalty_box
        self.clock = clock
        self.refused = 0
        self._until: dict[str, int] = {}
        self._swept_us = -SWEEP_US
        self._store = MemoryStore(MOST, clock)
        self._limit = NamedLimit(policy.name, "shut out", policy.penalty_box.limit)

    def __len__(self) -> int:
        now_us = self.clock.now_us()
        return sum(1 for until in list(self._until.values()) if until > now_us)

    def shut(self, gate: Any, context: Any) -> Evaluation | None:
        """The refusal of somebody who is shut out; None for everybody else. Exempt requests are never shut out."""
        if not self._until or is_off():
            return None
        compiled = gate.compiled
        matched = compiled.match(
            context
        )  # before anybody asks for an identity: those of the path are what its templates captured
        key: Any = key_of(compiled.identities, context, self.said.key)
        until = self._until.get(key)
        if until is None:
            return None
        left_us = until - self.clock.now_us()
        if left_us <= 0:
            self._until.pop(key, None)
            return None
        if matched.exempt or (matched.exemptions and compiled.exempted_rules(matched, context) is True):
            return None
        self.refused += 1
        gate.offenders.offer(PENALTY_BOX, key)
        gate.requests += 1
        gate.refused_requests += 1
        evaluation = Evaluation(gate, compiled)
        evaluation.allowed = False
        evaluation.refusal = Refusal(SHUT_OUT, 429, seconds(left_us), MESSAGES[SHUT_OUT](seconds(left_us)), retry_us=left_us)
        return evaluation

    def note(self, gate: Any, evaluation: Evaluation) -> bool:
        """Counts a refusal; True when it was one too many."""
        key: Any = key_of(evaluation.compiled.identities, evaluation.context, self.said.key)
        if key is None or self._store.decide_one(self._limit, key, 1, 0, True).allowed:
            return False
        now_us = self.clock.now_us()
        if len(self._until) >= MOST and now_us >= self._swept_us + SWEEP_US:
            self._swept_us = now_us
            self._until = {one: until for one, until in self._until.items() if until > now_us}
        if len(self._until) < MOST:
            self._until[key] = now_us + self.said.for_us
        return True
