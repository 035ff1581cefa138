"""Waiting requests: rules with `on_refusal: wait up to 200ms` delay a request instead of refusing it.

A request waits only when every rule that refuses it waits, and no longer than the shortest of their waits. It makes one decision
that charges at a later start, and sleeps until then: first come, first served, and those behind move up when a client goes away.
Each rule bounds how many requests wait; beyond that a request is refused at once (503).

A later start in a fixed window, or in a leaky bucket queue, closes the time before it to all other requests of that key. So
limits of these kinds that did not refuse are left out of the wait and asked after it; if one of them refuses then, the start is
given back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..algorithms.claim import Claim
from ..algorithms.fixed_window import FixedWindow
from ..algorithms.leaky_queue import LeakyBucketQueue
from ..algorithms.token_bucket import TokenBucket
from ..clock import Clock
from ..decision import Decision, Decisions
from ..errors import RateLimited
from ..stores.contract import Store
from ..stores.sans_io import Call, Plan
from ..wait_queue import Waiter
from ..waiting_limiter import WaitingLimiter
from .compiled_policy import CompiledRule
from .refusal import QUEUE_FULL

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator


class ClaimsKey:
    """The claims of one request as the key of a limiter: equal for the same limits and keys."""

    __slots__ = ("claims", "pairs")

    def __init__(self, claims: list[Claim]) -> None:
        self.claims = claims
        self.pairs = frozenset((claim.limit.identity, claim.key) for claim in claims)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClaimsKey) and self.pairs == other.pairs

    def __hash__(self) -> int:
        return hash(self.pairs)


class RequestLimiter(WaitingLimiter):
    """A limiter that waits for the claims of requests. The limit of its own that a limiter must have is never asked."""

    __slots__ = ()

    def __init__(self, store: Store, reserves: bool) -> None:
        super().__init__(TokenBucket("1/s"), store, "limitkeeper queue")
        self.reserves = reserves

    def claims(self, key: Any, cost: Any = 1) -> list[Claim]:
        claims: list[Claim] = key.claims
        return claims

    def acquire_claims(self, key: Any, seconds: float) -> Decision:
        return self._acquire(key, 1, seconds)

    async def aacquire_claims(self, key: Any, seconds: float) -> Decision:
        return await self._aacquire(key, 1, seconds)

    def give_up(self, key: Any, start: Decision) -> None:
        self._give_up(Waiter(key.claims, start, None), key, 1, start)

    async def agive_up(self, key: Any, start: Decision) -> None:
        await self._agive_up(Waiter(key.claims, start, None), key, 1, start)


class WaitingRequests:
    """The requests of a gate that wait, in this process."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._reserving = RequestLimiter(store, True)
        self._polling = RequestLimiter(store, False)

    def wait(self, gate: Evaluator, evaluation: Evaluation, refused: Decision) -> Plan[Decision]:
        """Waits for the start of a refused request; the decision that allowed it, or that refused it in the end."""
        rules = refusing_rules(evaluation, refused)
        full = [rule for rule in rules if rule.waiting.count >= rule.config.on_refusal.queue]
        if full:
            full[0].queue_full += 1
            evaluation.reason = QUEUE_FULL
            return refused
        claims = gate._claims(evaluation)
        reserves = all(self._store.can_reserve(claim.limit) for claim in claims)
        limiter = self._reserving if reserves else self._polling
        later = asked_after(claims, refused) if reserves else []
        key = ClaimsKey([claim for i, claim in enumerate(claims) if i not in later])
        with counted(rules):
            try:
                seconds, began_us = shortest_wait(rules), self._clock.now_us()
                decision = yield Call(limiter, "acquire_claims", (key, seconds))
                if later:
                    left = remaining_wait(seconds, evaluation, later, self._clock.now_us() - began_us)
                    decision = yield from self._ask_after(gate, claims, later, key, decision, left)
            except RateLimited as error:
                if not later or gate._on_failure.has_failed(error.decision):
                    return error.decision
                return join(error.decision, [refused.decisions[i] for i in later], later)
            evaluation.wait_us = max(0, self._clock.now_us() - began_us)
        for rule in rules if decision.allowed else ():
            rule.waited += 1
        return decision  # type: ignore[no-any-return]

    def _ask_after(
        self, gate: Evaluator, claims: list[Claim], later: list[int], key: ClaimsKey, start: Decision, seconds: float
    ) -> Plan[Decision]:
        """Asks the claims that were left out, now that the start has come; if they are refused, the start is given back."""
        try:
            rest = yield Call(self._reserving, "acquire_claims", (ClaimsKey([claims[i] for i in later]), seconds))
        except BaseException as error:
            yield Call(self._reserving, "give_up", (key, start))
            if not isinstance(error, RateLimited):
                raise
            if gate._on_failure.has_failed(error.decision):
                return error.decision
            return (yield Call(self._store, "decide", (claims, 0)))  # type: ignore[no-any-return]
        return rest if gate._on_failure.has_failed(rest) else join(start, rest.decisions, later)


def refusing_rules(evaluation: Evaluation, decision: Decision) -> list[CompiledRule]:
    """The rules that refuse, once each."""
    parts = zip(evaluation.entries, decision.decisions, strict=True)
    return list({entry.rule.name: entry.compiled_rule for entry, part in parts if not part.allowed}.values())


@contextmanager
def counted(rules: list[CompiledRule]) -> Iterator[None]:
    """Counts a request as waiting for these rules."""
    for rule in rules:
        rule.waiting.count += 1
    try:
        yield
    finally:
        for rule in rules:
            rule.waiting.count -= 1


def asked_after(claims: list[Claim], refused: Decision) -> list[int]:
    """Which claims are left out of the wait: they did not refuse, and a later start would close their limit to others."""
    closing = [isinstance(claim.limit.limit, (FixedWindow, LeakyBucketQueue)) for claim in claims]
    return [i for i, part in enumerate(refused.decisions) if closing[i] and part.allowed]


def shortest_wait(rules: Sequence[CompiledRule]) -> float:
    """The shortest wait of these rules, in seconds."""
    waits_us: list[int] = [rule.config.on_refusal.wait_us for rule in rules]
    return min(waits_us) / 1e6


def remaining_wait(seconds: float, evaluation: Evaluation, later: list[int], waited_us: int) -> float:
    """Seconds that the claims left out may still wait: none where one of their rules does not wait."""
    rules = [evaluation.entries[i].compiled_rule for i in later]
    if not all(rule.waits for rule in rules):
        return 0.0
    return max(0.0, min(seconds, shortest_wait(rules)) - waited_us / 1e6)


def join(start: Decision, others: Sequence[Decision], later: list[int]) -> Decision:
    """The decision of a wait and those of the claims left out of it, in the order of all claims; dated as the wait's."""
    parts, rest = list(start.decisions), dict(zip(later, others, strict=True))
    joined = Decisions.join([rest[i] if i in rest else parts.pop(0) for i in range(len(parts) + len(rest))])
    fields = (joined.allowed, joined.limit, joined.remaining, joined.retry_us, joined.reset_us)
    return Decisions(joined.decisions, *fields, start.wait_us, start.start_us, joined.name, joined.source)
