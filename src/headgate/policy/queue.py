"""Waiting at a gate: rules that say `wait up to 200ms` hold a request back rather than refuse it.

A request waits only when every rule that refuses it is willing to wait, and no longer than the least patient of them. It makes
one decision that charges at a start to come, and sleeps until then: first come, first served, those behind move up when a client
goes away. How many may wait is bounded by the rule; whoever finds the queue full is refused at once (503).

The waiting itself is a limiter's: `Queue` is one whose keys are the claims themselves.
"""

from __future__ import annotations

from typing import Any

from ..algorithms.claim import Claim
from ..algorithms.token_bucket import TokenBucket
from ..decision import Decision
from ..errors import RateLimited
from ..stores.contract import Store
from ..waiting import Waits
from .passage import QUEUE_FULL, Passage

#: A limiter must have a limit; nobody is ever asked for this one.
NOBODY = TokenBucket("1/s")


class Ticket:
    """The claims of one request, as a limiter's key: equal when they are for the same limits and keys."""

    __slots__ = ("claims", "which")

    def __init__(self, claims: list[Claim]) -> None:
        self.claims = claims
        self.which = frozenset((claim.limit.identity, claim.key) for claim in claims)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ticket) and self.which == other.which

    def __hash__(self) -> int:
        return hash(self.which)


class Patient(Waits):
    """A limiter that waits for tickets."""

    __slots__ = ()

    def __init__(self, store: Store, reserves: bool) -> None:
        super().__init__(NOBODY, store, "headgate queue")
        self.reserves = reserves

    def claims(self, key: Any, cost: Any = 1) -> list[Claim]:
        claims: list[Claim] = key.claims
        return claims


class Queue:
    """Everybody who waits at a gate, in this process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._patient = Patient(store, True)
        self._asking = Patient(store, False)

    def _which(self, claims: list[Claim]) -> Patient:
        reserves = all(self._store.can_reserve(claim.limit) for claim in claims)
        return self._patient if reserves else self._asking

    def wait(self, gate: Any, passage: Passage, refused: Decision) -> Decision:
        """Waits for a refused request's turn; the decision that let it pass, or the one that refused it in the end."""
        waiting = enter(passage, refused)
        if waiting is None:
            return full(passage, refused)
        claims = gate.claims_of(passage)
        try:
            patience, begun_us = patience_of(waiting), gate.clock.now_us()
            decision = self._which(claims)._acquire(Ticket(claims), 1, patience)  # type: ignore[arg-type]
            return waited(passage, waiting, decision, gate.clock.now_us() - begun_us)
        except RateLimited as error:
            return error.decision
        finally:
            leave(waiting)

    async def await_(self, gate: Any, passage: Passage, refused: Decision) -> Decision:
        waiting = enter(passage, refused)
        if waiting is None:
            return full(passage, refused)
        claims = gate.claims_of(passage)
        try:
            patience, begun_us = patience_of(waiting), gate.clock.now_us()
            decision = await self._which(claims)._aacquire(Ticket(claims), 1, patience)  # type: ignore[arg-type]
            return waited(passage, waiting, decision, gate.clock.now_us() - begun_us)
        except RateLimited as error:
            return error.decision
        finally:
            leave(waiting)


def refusers(passage: Passage, decision: Decision) -> list[Any]:
    """The clauses that refuse, once each."""
    found: dict[str, Any] = {}
    for entry, part in zip(passage.entries, decision.decisions, strict=True):
        if not part.allowed:
            found[entry.clause.name] = entry.clause
    return list(found.values())


def enter(passage: Passage, refused: Decision) -> list[Any] | None:
    """Takes a place in the queue of every rule that makes it wait; None when one of them is full."""
    waiting = refusers(passage, refused)
    for clause in waiting:
        if clause.crowd.waiting >= clause.rule.on_refusal.queue:
            clause.queue_full += 1
            return None
    for clause in waiting:
        clause.crowd.waiting += 1
    return waiting


def leave(waiting: list[Any]) -> None:
    for clause in waiting:
        clause.crowd.waiting -= 1


def full(passage: Passage, refused: Decision) -> Decision:
    """Refused because too many wait already."""
    passage.reason = QUEUE_FULL
    return refused


def patience_of(waiting: list[Any]) -> float:
    """Seconds that the least patient rule gives."""
    return min(clause.rule.on_refusal.wait_us for clause in waiting) / 1e6  # type: ignore[no-any-return]


def waited(passage: Passage, waiting: list[Any], decision: Decision, waited_us: int) -> Decision:
    passage.wait_us = max(0, waited_us)
    for clause in waiting:
        clause.waited += 1
    return decision
