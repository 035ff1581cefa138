"""Waiting at a gate: rules that say `wait up to 200ms` hold a request back rather than refuse it.

A request waits only when every rule that refuses it is willing to wait, and no longer than the least patient of them. It makes
one decision that charges at a start to come, and sleeps until then: first come, first served, those behind move up when a client
goes away. How many may wait is bounded by the rule; whoever finds the queue full is refused at once (503).

A turn to come in a fixed window, or in a bucket that paces, closes the time before it to everybody else of that key. So whoever
waits for something else takes no turn there: those limits are asked when the turn has come, and where one of them refuses then,
the turn goes back.

The waiting itself is a limiter's: `Queue` is one whose keys are the claims themselves.
"""

from __future__ import annotations

from typing import Any

from ..algorithms.claim import Claim
from ..algorithms.fixed_window import FixedWindow
from ..algorithms.leaky_queue import LeakyBucketQueue
from ..algorithms.token_bucket import TokenBucket
from ..decision import Decision, Decisions
from ..errors import RateLimited
from ..stores.contract import Store
from ..wait_queue import Waiter
from ..waiting_limiter import WaitingLimiter
from .evaluation import QUEUE_FULL, Evaluation

#: A limiter must have a limit; nobody is ever asked for this one.
NOBODY = TokenBucket("1/s")


class ClaimsKey:
    """The claims of one request, as a limiter's key: equal when they are for the same limits and keys."""

    __slots__ = ("claims", "which")

    def __init__(self, claims: list[Claim]) -> None:
        self.claims = claims
        self.which = frozenset((claim.limit.identity, claim.key) for claim in claims)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClaimsKey) and self.which == other.which

    def __hash__(self) -> int:
        return hash(self.which)


class RequestLimiter(WaitingLimiter):
    """A limiter that waits for tickets."""

    __slots__ = ()

    def __init__(self, store: Store, reserves: bool) -> None:
        super().__init__(NOBODY, store, "limitkeeper queue")
        self.reserves = reserves

    def claims(self, key: Any, cost: Any = 1) -> list[Claim]:
        claims: list[Claim] = key.claims
        return claims


class WaitingRequests:
    """Everybody who waits at a gate, in this process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._patient = RequestLimiter(store, True)
        self._asking = RequestLimiter(store, False)

    def _which(self, claims: list[Claim]) -> RequestLimiter:
        reserves = all(self._store.can_reserve(claim.limit) for claim in claims)
        return self._patient if reserves else self._asking

    def wait(self, gate: Any, evaluation: Evaluation, refused: Decision) -> Decision:
        """Waits for a refused request's turn; the decision that let it pass, or the one that refused it in the end."""
        waiting = enter(evaluation, refused)
        if waiting is None:
            return full(evaluation, refused)
        claims = gate.claims_of(evaluation)
        patient = self._which(claims)
        later = asked_later(claims, refused) if patient.reserves else []
        held = ClaimsKey([claim for i, claim in enumerate(claims) if i not in later])
        try:
            patience, begun_us = patience_of(waiting), gate.clock.now_us()
            decision = patient._acquire(held, 1, patience)  # type: ignore[arg-type]
            if later:
                left = still(patience, evaluation, later, gate.clock.now_us() - begun_us)
                decision = self._rest(gate, claims, later, held, decision, left)
            return waited(evaluation, waiting, decision, gate.clock.now_us() - begun_us)
        except RateLimited as error:
            return self._told(gate, error.decision, refused, later)
        finally:
            leave(waiting)

    def _rest(self, gate: Any, claims: list[Claim], later: list[int], held: ClaimsKey, turn: Decision, left: float) -> Decision:
        """What took no turn, now that the turn has come; where it is refused, the turn goes back."""
        try:
            told = self._patient._acquire(ClaimsKey([claims[i] for i in later]), 1, left)  # type: ignore[arg-type]
        except BaseException as error:
            self._patient._give_up(Waiter(held.claims, turn, None), held, 1, turn)  # type: ignore[arg-type]
            if not isinstance(error, RateLimited):
                raise
            return error.decision if gate.on_failure.has_failed(error.decision) else self._store.decide(claims, 0)
        return told if gate.on_failure.has_failed(told) else mingled(turn, told.decisions, later)

    async def await_(self, gate: Any, evaluation: Evaluation, refused: Decision) -> Decision:
        waiting = enter(evaluation, refused)
        if waiting is None:
            return full(evaluation, refused)
        claims = gate.claims_of(evaluation)
        patient = self._which(claims)
        later = asked_later(claims, refused) if patient.reserves else []
        held = ClaimsKey([claim for i, claim in enumerate(claims) if i not in later])
        try:
            patience, begun_us = patience_of(waiting), gate.clock.now_us()
            decision = await patient._aacquire(held, 1, patience)  # type: ignore[arg-type]
            if later:
                left = still(patience, evaluation, later, gate.clock.now_us() - begun_us)
                decision = await self._arest(gate, claims, later, held, decision, left)
            return waited(evaluation, waiting, decision, gate.clock.now_us() - begun_us)
        except RateLimited as error:
            return self._told(gate, error.decision, refused, later)
        finally:
            leave(waiting)

    async def _arest(
        self, gate: Any, claims: list[Claim], later: list[int], held: ClaimsKey, turn: Decision, left: float
    ) -> Decision:
        try:
            told = await self._patient._aacquire(ClaimsKey([claims[i] for i in later]), 1, left)  # type: ignore[arg-type]
        except BaseException as error:
            await self._patient._agive_up(Waiter(held.claims, turn, None), held, 1, turn)  # type: ignore[arg-type]
            if not isinstance(error, RateLimited):
                raise
            return error.decision if gate.on_failure.has_failed(error.decision) else await self._store.adecide(claims, 0)
        return told if gate.on_failure.has_failed(told) else mingled(turn, told.decisions, later)

    def _told(self, gate: Any, decision: Decision, refused: Decision, later: list[int]) -> Decision:
        """The refusal of a turn, with what the limits said that take none."""
        if not later or gate.on_failure.has_failed(decision):
            return decision
        return mingled(decision, [refused.decisions[i] for i in later], later)


def asked_later(claims: list[Claim], refused: Decision) -> list[int]:
    """Which claims take no turn: nobody waits for them, and a turn to come would close their limit to others."""
    closing = [isinstance(claim.limit.limit, (FixedWindow, LeakyBucketQueue)) for claim in claims]
    return [i for i, part in enumerate(refused.decisions) if closing[i] and part.allowed]


def still(patience: float, evaluation: Evaluation, later: list[int], waited_us: int) -> float:
    """Seconds that may still be waited for them: none where one of their rules does not wait."""
    rules = [evaluation.entries[i].compiled_rule for i in later]
    if not all(compiled_rule.waits for compiled_rule in rules):
        return 0.0
    return max(0.0, min(patience, patience_of(rules)) - waited_us / 1e6)


def mingled(turn: Decision, others: Any, later: list[int]) -> Decision:
    """The decision of a turn and those of the claims that took none, in the order of all claims; dated as the turn was."""
    parts, rest = list(turn.decisions), dict(zip(later, others, strict=True))
    told = Decisions.join([rest[i] if i in rest else parts.pop(0) for i in range(len(parts) + len(rest))])
    fields: Any = (told.allowed, told.limit, told.remaining, told.retry_us, told.reset_us, turn.wait_us, turn.start_us, told.name)
    return Decisions(told.decisions, *fields)


def refusers(evaluation: Evaluation, decision: Decision) -> list[Any]:
    """The rules that refuse, once each."""
    found: dict[str, Any] = {}
    for entry, part in zip(evaluation.entries, decision.decisions, strict=True):
        if not part.allowed:
            found[entry.compiled_rule.name] = entry.compiled_rule
    return list(found.values())


def enter(evaluation: Evaluation, refused: Decision) -> list[Any] | None:
    """Takes a place in the queue of every rule that makes it wait; None when one of them is full."""
    waiting = refusers(evaluation, refused)
    for compiled_rule in waiting:
        if compiled_rule.waiting.waiting >= compiled_rule.config.on_refusal.queue:
            compiled_rule.queue_full += 1
            return None
    for compiled_rule in waiting:
        compiled_rule.waiting.waiting += 1
    return waiting


def leave(waiting: list[Any]) -> None:
    for compiled_rule in waiting:
        compiled_rule.waiting.waiting -= 1


def full(evaluation: Evaluation, refused: Decision) -> Decision:
    """Refused because too many wait already."""
    evaluation.reason = QUEUE_FULL
    return refused


def patience_of(waiting: list[Any]) -> float:
    """Seconds that the least patient rule gives."""
    return min(compiled_rule.config.on_refusal.wait_us for compiled_rule in waiting) / 1e6  # type: ignore[no-any-return]


def waited(evaluation: Evaluation, waiting: list[Any], decision: Decision, waited_us: int) -> Decision:
    evaluation.wait_us = max(0, waited_us)
    for compiled_rule in waiting if decision.allowed else ():
        compiled_rule.waited += 1
    return decision
