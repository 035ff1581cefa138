"""Answers without a store: allow (fail open), refuse (fail closed), or decide on a declared share in this process.

Every Decision made here carries its fallback's `source`. A charge is given back with the source of its Decision, so no list of
charges is kept, and what was allowed without a charge is never given back to a store that did not charge it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from ...algorithms.claim import Claim, NamedLimit
from ...clock import Clock
from ...decision import Decision, Decisions
from ...errors import ConfigurationError
from ..memory import MemoryStore
from ..wrapper_store import copy_states
from .share import WRITE, Share, parse_share, shared_limit

#: Limits of which the share is cached: where limits are made per request, the memory store still keeps the states.
MAX_SHARES = 10_000


class Fallback:
    """Base of the three. `until_probe_us()` is the time to the next probe of the store."""

    #: The `source` of its Decisions.
    source = ""
    #: Whether anything is charged here, and can be given back here.
    charges = False

    def __init__(self, clock: Clock, until_probe_us: Callable[[], int]) -> None:
        self.clock = clock
        self.until_probe_us = until_probe_us

    def register(self, named: NamedLimit) -> None:
        """A limiter with this limit was made."""

    def unregister(self, named: NamedLimit) -> None:
        """The limit is used no more."""

    def decide_one(
        self, named: NamedLimit, key: str, cost: int, max_wait_us: int | None, commit: bool, not_before_us: int = 0
    ) -> Decision:
        raise NotImplementedError

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, not_before_us: int = 0) -> Decision:
        parts = [self.decide_one(c.limit, c.key, c.cost, max_wait_us, commit, not_before_us) for c in claims]
        return Decisions.join(parts)

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None) -> list[Decision]:
        return [self.decide(claims, max_wait_us, True) for claims in asks]

    def give_back(self, claims: Sequence[Claim], charged_at: int) -> bool:
        """Nothing was charged, so nothing is given back."""
        return True

    def reset(self, claims: Sequence[Claim]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Frees what is kept."""

    @property
    def overflow(self) -> int:
        return 0


class FailOpen(Fallback):
    """`on_failure="open"`: allows every cost up to the limit's capacity, and counts nothing."""

    source = "open"

    def decide_one(
        self, named: NamedLimit, key: str, cost: int, max_wait_us: int | None, commit: bool, not_before_us: int = 0
    ) -> Decision:
        size = named.limit.capacity
        now_us = self.clock.now_us()
        wait_us = max(0, not_before_us - now_us)
        if cost > size:
            return Decision(False, size, size, -1, 0, 0, now_us, named.name, self.source)
        return Decision(True, size, size, 0, 0, wait_us, now_us + wait_us, named.name, self.source)


class FailClosed(Fallback):
    """`on_failure="closed"`: refuses until the next probe; a cost above the limit's capacity is refused for ever."""

    source = "closed"

    def decide_one(
        self, named: NamedLimit, key: str, cost: int, max_wait_us: int | None, commit: bool, not_before_us: int = 0
    ) -> Decision:
        size, now_us, until_us = named.limit.capacity, self.clock.now_us(), self.until_probe_us()
        retry_us = 0 if cost == 0 else until_us if cost <= size else -1
        return Decision(cost == 0, size, 0, retry_us, until_us, 0, now_us, named.name, self.source)


class LocalShare(Fallback):
    """`on_failure="local"`: decides on a declared share of every limit, in a MemoryStore of its own.

    The state stays when the store recovers, until it is as new by itself. So over any time T, however often the store fails and
    recovers, at most the bound of the share is admitted here: for a bucket, share · (burst + rate · T).
    """

    source = "local_share"
    charges = True

    def __init__(self, clock: Clock, until_probe_us: Callable[[], int], share: Fraction, max_keys: int) -> None:
        super().__init__(clock, until_probe_us)
        self.share = share
        self.memory = MemoryStore(max_keys, clock)
        self._limits: dict[NamedLimit, NamedLimit] = {}

    def limit_of(self, named: NamedLimit) -> NamedLimit:
        """The same name, with this node's share of the limit."""
        found = self._limits.get(named)
        if found is None:
            if len(self._limits) >= MAX_SHARES:
                self._limits.clear()
            found = NamedLimit(named.limiter, named.name, shared_limit(named.limit, self.share))
            self._limits[named] = found
        return found

    def register(self, named: NamedLimit) -> None:
        self.memory.register(self.limit_of(named))

    def unregister(self, named: NamedLimit) -> None:
        shared = self._limits.pop(named, None)
        if shared is not None:
            self.memory.unregister(shared)

    def _claims(self, claims: Sequence[Claim]) -> list[Claim]:
        """The same claims on the shares, with the states that they remember of a charge."""
        found = [Claim(self.limit_of(claim.limit), claim.key, claim.cost, claim.charged) for claim in claims]
        copy_states(found, claims, logs=False)
        return found

    def decide_one(
        self, named: NamedLimit, key: str, cost: int, max_wait_us: int | None, commit: bool, not_before_us: int = 0
    ) -> Decision:
        if max_wait_us is None or not_before_us:
            return self.decide([Claim(named, key, cost)], max_wait_us, commit, not_before_us)
        decision = self.memory.decide_one(self._limits.get(named) or self.limit_of(named), key, cost, max_wait_us, commit)
        return local_part(decision, self.until_probe_us() if decision.retry_us < 0 and cost <= named.limit.capacity else -1)

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, not_before_us: int = 0) -> Decision:
        shared = self._claims(claims)
        decision = self.memory.decide(shared, max_wait_us, commit=commit, not_before_us=not_before_us)
        copy_states(claims, shared, logs=False)
        return self._join(decision, claims)

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None) -> list[Decision]:
        found = self.memory.decide_many([self._claims(claims) for claims in asks], max_wait_us)
        return [self._join(decision, claims) for decision, claims in zip(found, asks, strict=True)]

    def _join(self, decision: Decision, claims: Sequence[Claim]) -> Decision:
        """What is only too large for the share is not refused for ever: the store may be back at the next probe."""
        fits = all(claim.cost <= claim.limit.limit.capacity for claim in claims)
        never_us = self.until_probe_us() if decision.retry_us < 0 and fits else -1
        return Decisions.join([local_part(part, never_us) for part in decision.decisions], decision.wait_us)

    def give_back(self, claims: Sequence[Claim], charged_at: int) -> bool:
        return self.memory.give_back(self._claims(claims), charged_at)

    def reset(self, claims: Sequence[Claim]) -> None:
        self.memory.reset(self._claims(claims))

    def close(self) -> None:
        self.memory.close()

    @property
    def overflow(self) -> int:
        return int(self.memory.overflow)


def local_part(d: Decision, never_us: int) -> Decision:
    """A Decision of the memory store as one of the share; `never_us` takes the place of a refusal for ever."""
    retry_us = never_us if d.retry_us < 0 else d.retry_us
    return Decision(d.allowed, d.limit, d.remaining, retry_us, d.reset_us, d.wait_us, d.start_us, d.name, LocalShare.source)


#: The `source` of every Decision that was made without a store.
FALLBACK_SOURCES = frozenset((FailOpen.source, FailClosed.source, LocalShare.source))


def make_fallback(
    on_failure: str, share: Share | None, max_keys: int, clock: Clock, until_probe_us: Callable[[], int]
) -> Fallback:
    """The fallback that `on_failure=` names, or an error that says what to write."""
    if on_failure not in ("open", "closed", "local"):
        raise ConfigurationError(f"on_failure={on_failure!r}: expected one of 'open', 'closed', 'local'")
    if on_failure == "local":
        if share is None:
            raise ConfigurationError(f"on_failure='local' needs the share that this node may use alone; {WRITE}")
        return LocalShare(clock, until_probe_us, parse_share(share), max_keys)
    if share is not None:
        raise ConfigurationError(f"share={share!r} belongs to on_failure='local'; {on_failure!r} takes no share")
    return (FailOpen if on_failure == "open" else FailClosed)(clock, until_probe_us)
