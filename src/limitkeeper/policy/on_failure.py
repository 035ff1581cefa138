"""`on_failure`: what each rule answers while the store fails.

    open     allows the request, uncounted
    closed   refuses it (503), until the store is asked again
    local    decides on a declared share, in the memory of this process

One closed rule is enough to refuse. The shares of all local rules are charged together, or not at all; they are settled as the
store's charges are (settlement.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..algorithms.claim import Claim
from ..clock import Clock
from ..decision import Decision, Decisions
from ..errors import StoreError
from ..observe.events import STORE_FAILED
from ..stores.guarded import GuardedStore
from ..stores.guarded.fallback import LocalShare
from ..stores.guarded.share import parse_share
from .callback_errors import CallbackErrors
from .compiled_rule import Entry
from .model import CLOSED, LOCAL
from .refusal import STORE, client_delay, degrades, precedence, refusal_without_limit

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator

#: When to retry if the store's guard does not say.
RETRY_US = 1_000_000


class FailureAnswers:
    """Evaluates requests without the store."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._shares: dict[str, LocalShare] = {}
        self._errors = CallbackErrors()

    #: Whether a decision was made by the guard, because its store could not be asked.
    has_failed = staticmethod(GuardedStore.answered_here)

    def _share(self, text: str) -> LocalShare:
        found = self._shares.get(text)
        if found is None:
            found = self._shares[text] = LocalShare(self._clock, lambda: RETRY_US, parse_share(text), 1_000_000)
        return found

    def answer(self, gate: Evaluator, evaluation: Evaluation, failure: Decision | StoreError) -> Evaluation:
        """The evaluation of a request that the store did not decide."""
        refused, charged = self.decide(gate, evaluation, failure)
        return gate._allow(evaluation, charged) if refused is None else refused

    def decide(
        self, gate: Evaluator, evaluation: Evaluation, failure: Decision | StoreError
    ) -> tuple[Evaluation | None, Decision | None]:
        """The request refused, or None and what was charged to shares; all of its rules that are left are local."""
        evaluation.special = evaluation.needs_settlement = False
        error = failure if isinstance(failure, StoreError) else None  # otherwise the guard has logged that the store fails
        if error is not None:
            self._errors.report("policy %r: the store fails, so `on_failure` decides: %s", gate.compiled.policy.name, error)
        gate._publish(STORE_FAILED, evaluation, error)
        closed = [entry for entry in evaluation.entries if entry.rule.on_failure.action == CLOSED]
        if closed:
            return self._refuse(gate, evaluation, max(closed, key=lambda entry: precedence(entry.rule)), failure), None
        assert evaluation.costs is not None
        entries = zip(evaluation.entries, evaluation.keys, evaluation.costs, strict=True)
        local = [one for one in entries if one[0].rule.on_failure.action == LOCAL]
        for entry in evaluation.entries:
            rule = entry.compiled_rule
            if entry.label == rule.name:  # a rule counts once, whatever the number of its limits
                if entry.rule.on_failure.action == LOCAL:
                    rule.failed_local += 1
                else:
                    rule.failed_open += 1
        evaluation.entries, evaluation.keys, evaluation.costs = ([one[i] for one in local] for i in range(3))  # type: ignore[assignment]
        return self._decide(gate, evaluation) if local else (None, None)

    def _decide(self, gate: Evaluator, evaluation: Evaluation) -> tuple[Evaluation | None, Decision | None]:
        """Decides on the declared shares. Limits with different shares are charged one after the other; if one refuses, the
        others are given back and asked again without a charge, so that the retry is the longest of all. The one that refused is
        not asked again: it might admit by then."""
        assert evaluation.costs is not None
        entries = zip(evaluation.entries, evaluation.keys, evaluation.costs, strict=True)
        asked = [(self._share(entry.rule.on_failure.share), [Claim(entry.named, key, cost)]) for entry, key, cost in entries]
        parts: list[Decision] = []
        for share, claims in asked:
            parts.append(share.decide(claims, 0, True))
            if not parts[-1].allowed:
                for (other, back), charged in zip(asked, parts[:-1], strict=False):
                    other.give_back(back, charged.start_us)
                found = [parts[-1] if one is claims else other.decide(one, 0, False) for other, one in asked]
                return gate._refuse(evaluation, Decisions.join(found)), None
        evaluation.claims = [claim for _, claims in asked for claim in claims]
        evaluation.needs_settlement = any(entry.compiled_rule.needs_settlement for entry in evaluation.entries)
        return None, Decisions.join(parts)

    def give_back(self, entry: Entry, claims: list[Claim], charged: Decision) -> None:
        """Gives back what was charged to the share of a rule, also after the store has recovered."""
        self._share(entry.rule.on_failure.share).give_back(claims, charged.start_us)

    def _refuse(self, gate: Evaluator, evaluation: Evaluation, entry: Entry, failure: Decision | StoreError) -> Evaluation:
        retry_us = failure.retry_us if isinstance(failure, Decision) and failure.retry_us > 0 else RETRY_US
        rule = entry.rule
        status = rule.answer.status if rule.answer.status in (500, 502, 503, 504) else 503
        entry.compiled_rule.failed_closed += 1
        entry.compiled_rule.refused += 1
        entry.compiled_rule.degraded += degrades(rule, STORE)
        spread_us = rule.retry_after.spread_us
        delay_us = client_delay(evaluation, self._clock.now_us() + retry_us, spread_us, retry_us) if spread_us else 0
        gate._count_refused(evaluation, refusal_without_limit(STORE, status, retry_us, rule, (entry.label,), delay_us))
        return evaluation
