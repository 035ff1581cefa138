"""When the store fails: every rule answers as it says itself.

    open     lets the request pass, uncounted
    closed   refuses it (503), until the store is asked again
    local    decides on a declared share, in the memory of this process

One closed rule is enough to refuse. The shares of all local rules are charged together, or not at all.
"""

from __future__ import annotations

from typing import Any

from ..algorithms.claim import Claim
from ..decision import Decision, Decisions
from ..errors import StoreError
from ..observe.events import STORE_FAILED
from ..stores.guarded import GuardedStore
from ..stores.guarded.fallback import LocalShare
from ..stores.guarded.share import parse_share
from .evaluation import STORE, Evaluation, Refusal
from .model import CLOSED, LOCAL
from .refusal import MESSAGES, refused, seconds

#: How soon to come back when nobody knows better.
SOON_US = 1_000_000


class FailureAnswers:
    """Answers without a store."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self._shares: dict[str, LocalShare] = {}

    def has_failed(self, decision: Decision) -> bool:
        """Whether a decision was made by the guard, because its store could not be asked."""
        return GuardedStore.answered_here(decision)

    def share(self, text: str) -> LocalShare:
        found = self._shares.get(text)
        if found is None:
            found = self._shares[text] = LocalShare(self.clock, lambda: SOON_US, parse_share(text), 1_000_000)
        return found

    def answer(self, gate: Any, evaluation: Evaluation, failure: Decision | StoreError) -> Evaluation:
        """The evaluation of a request that the store did not answer."""
        evaluation.special = evaluation.needs_settlement = False
        gate.publish(STORE_FAILED, evaluation, failure if isinstance(failure, StoreError) else None)
        for entry in evaluation.entries:
            if entry.rule.on_failure.action == CLOSED:
                entry.compiled_rule.failed_closed += 1
                return self.closed(gate, evaluation, entry, failure)
        local = [i for i, entry in enumerate(evaluation.entries) if entry.rule.on_failure.action == LOCAL]
        for i, entry in enumerate(evaluation.entries):
            if i not in local and entry.label == entry.rule.name:  # a rule counts once, whatever the number of its limits
                entry.compiled_rule.failed_open += 1
        evaluation.entries = [evaluation.entries[i] for i in local]
        evaluation.keys = [evaluation.keys[i] for i in local]
        evaluation.costs = [evaluation.costs[i] for i in local]
        if not local:
            return gate.let_pass(evaluation, None)  # type: ignore[no-any-return]
        return self.local(gate, evaluation)

    def local(self, gate: Any, evaluation: Evaluation) -> Evaluation:
        """On the declared shares. Limits with different shares are charged one after the other; where one refuses, the others get
        theirs back and say what they would have told, so that the longest wait is the one that is promised."""
        asks: list[tuple[LocalShare, list[Claim]]] = []
        for entry, key, cost in zip(evaluation.entries, evaluation.keys, evaluation.costs, strict=True):
            if entry.label == entry.rule.name:
                entry.compiled_rule.failed_local += 1
            asks.append((self.share(entry.rule.on_failure.share), [Claim(entry.named, key, cost)]))
        parts: list[Decision] = []
        for share, claims in asks:
            parts.append(share.decide(claims, 0, True))
            if not parts[-1].allowed:
                for (other, back), charged in zip(asks, parts[:-1], strict=False):
                    other.give_back(back, charged.start_us)
                return refused(gate, evaluation, Decisions.join([one.decide(asked, 0, False) for one, asked in asks]))
        return gate.let_pass(evaluation, Decisions.join(parts))  # type: ignore[no-any-return]

    def closed(self, gate: Any, evaluation: Evaluation, entry: Any, failure: Decision | StoreError) -> Evaluation:
        retry_us = failure.retry_us if isinstance(failure, Decision) and failure.retry_us > 0 else SOON_US
        rule = entry.rule
        status = rule.answer.status if rule.answer.status in (500, 502, 503, 504) else 503
        message = MESSAGES[STORE](seconds(retry_us))
        evaluation.allowed = False
        evaluation.refusal = Refusal(STORE, status, seconds(retry_us), message, rule, (entry.label,), retry_us=retry_us)
        entry.compiled_rule.refused += 1
        gate.refused_one(evaluation)
        return evaluation
