"""Evaluations made directly from real decisions: limits in a store on a manual clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from limitkeeper import MemoryStore
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.algorithms.limit import Limit
from limitkeeper.policy.compiled_policy import CompiledPolicy
from limitkeeper.policy.compiled_rule import Entry
from limitkeeper.policy.evaluation import Evaluation
from limitkeeper.policy.model import Answer, Headers, OnRefusal, Policy, Rule
from limitkeeper.policy.refusal import QUOTA, Refusal, refusal_of
from limitkeeper.testing import ManualClock
from stand_ins import NOON


class RequestSequence:
    """One request after the other for one key, under limits that are charged together."""

    def __init__(
        self,
        *limits: Limit,
        labels: Any = (),
        headers: Any = None,
        answer: Answer | None = None,
        problem: bool = False,
        on_refusal: OnRefusal | None = None,
        start: float = NOON,
    ) -> None:
        self.clock = ManualClock(start)
        self.store = MemoryStore(clock=self.clock)
        self.policy = Policy(headers=headers or Headers(), problem=problem)
        self.gate = SimpleNamespace(secret=b"sixteen bytes...")
        self.compiled = CompiledPolicy(self.policy, imports=False)
        self.entries = []
        for i, limit in enumerate(limits):
            label = labels[i] if labels else f"limit{i}" if i else "checkout"
            rule = Rule(label, (limit,), answer=answer or Answer(), on_refusal=on_refusal or OnRefusal())
            self.compiled.handlers[label] = rule.on_refusal.handler
            self.entries.append(Entry(rule, NamedLimit("shop", label, limit), label))

    def ask(self, cost: int = 1, key: str = "ann", costs: Any = None) -> Evaluation:
        charged = costs or [cost] * len(self.entries)
        claims = [Claim(entry.named, key, units) for entry, units in zip(self.entries, charged, strict=True)]
        evaluation = Evaluation(self.gate, self.compiled)
        evaluation.origin = True  # a page sends it: with every field
        evaluation.decision = self.store.decide(claims)
        evaluation.entries, evaluation.keys = list(self.entries), [key] * len(claims)
        evaluation.allowed = evaluation.decision.allowed
        if not evaluation.allowed:
            evaluation.refusal = refusal_of(evaluation.entries, evaluation.decision, QUOTA, evaluation.decision.retry_us)
        return evaluation

    def after(self, number: int) -> Evaluation:
        """The last of so many requests at once."""
        for _ in range(number - 1):
            self.ask()
        return self.ask()

    def bare(self, refusal: Refusal) -> Evaluation:
        """A refusal without a decision: by the penalty box, or by a store that failed."""
        evaluation = Evaluation(self.gate, self.compiled)
        evaluation.origin = True  # a page sends it: with every field
        evaluation.allowed = False
        evaluation.refusal = refusal
        return evaluation


def lines(found: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """The fields by name; every name is unique."""
    assert len({name for name, _ in found}) == len(found)
    return {name.decode(): value.decode() for name, value in found}
