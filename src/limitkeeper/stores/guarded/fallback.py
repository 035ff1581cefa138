"""What a guard answers when its store can't be asked: let through, refuse, or decide here on a declared share.

Every answer made here is dated in an era of its own, HERE + the true moment, which no clock will ever show. A charge is given
back by the date of its start, so that date alone tells where it was made: no list of charges has to be kept, none can be
forgotten, and what was let through without a charge is never given back to a store that did not charge it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from ...clock import Clock
from ...decision import Decision, Decisions
from ...errors import ConfigurationError
from ..memory import MemoryStore
from .share import WRITE, Share, share_of_nodes, shared_limit

#: The era of what was decided here: true times are below 2^53.
HERE = 1 << 56


def made_here(charged_at: int) -> bool:
    return charged_at >= HERE


def dated_here(decision: Decision) -> Decision:
    """The same answer, dated in the era of what is decided here."""
    fields = (
        decision.allowed,
        decision.limit,
        decision.remaining,
        decision.retry_us,
        decision.reset_us,
        decision.wait_us,
        decision.start_us + HERE,
        decision.name,
    )
    return Decision(*fields) if type(decision) is Decision else Decisions(decision.decisions, *fields)


class Fallback:
    """The base of the three: what to do without a store. `until_us()` is the time to the next probe."""

    #: Whether anything is charged here, and can be given back here.
    charges = False

    def __init__(self, clock: Clock, until_us: Callable[[], int]) -> None:
        self.clock = clock
        self.until_us = until_us

    def register(self, named: NamedLimit) -> None:
        """A limiter with this limit was made."""

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        raise NotImplementedError

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool) -> Decision:
        raise NotImplementedError

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None) -> list[Decision]:
        return [self.decide(claims, max_wait_us, True) for claims in asks]

    def give_back(self, claims: Sequence[Claim], charged_at: int) -> None:
        """Nothing was charged, nothing goes back."""

    def reset(self, claims: Sequence[Claim]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Lets go of what is kept."""

    @property
    def overflow(self) -> int:
        return 0


class FailOpen(Fallback):
    """`on_failure="open"`: everything that could ever pass is let through. All of the limit is there, for the next one too."""

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        size = named.limit.capacity
        fits = cost <= size
        return Decision(fits, size, size, 0 if fits else -1, 0, 0, HERE + self.clock.now_us(), named.name)

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool) -> Decision:
        return spoken([self.decide_one(claim.limit, claim.key, claim.cost, 0, commit) for claim in claims])


class FailClosed(Fallback):
    """`on_failure="closed"`: refused until the next probe, and what can never fit is told so."""

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        size = named.limit.capacity
        free, now_us, until = cost == 0, HERE + self.clock.now_us(), self.until_us()
        return Decision(free, size, 0, 0 if free else until if cost <= size else -1, until, 0, now_us, named.name)

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool) -> Decision:
        return spoken([self.decide_one(claim.limit, claim.key, claim.cost, 0, commit) for claim in claims])


class LocalShare(Fallback):
    """`on_failure="local"`: a declared part of every limit, kept in a MemoryStore of this guard's own.

    Its state stays when the store comes back, until it is as new by itself. So over any time T, however often the store comes and
    goes, what is let through here is at most the bound of the share: for a bucket, share · (burst + rate · T).
    """

    charges = True

    def __init__(self, clock: Clock, until_us: Callable[[], int], part: Fraction, max_keys: int) -> None:
        super().__init__(clock, until_us)
        self.part = part
        self.memory = MemoryStore(max_keys, clock)
        self.shares: dict[NamedLimit, NamedLimit] = {}

    def share(self, named: NamedLimit) -> NamedLimit:
        """The same name, with this node's part of the limit."""
        found = self.shares.get(named)
        if found is None:
            if len(self.shares) >= 10_000:  # limits made per request by somebody: the memory store keeps the states
                self.shares.clear()
            found = NamedLimit(named.limiter, named.name, shared_limit(named.limit, self.part))
            self.shares[named] = found
        return found

    def register(self, named: NamedLimit) -> None:
        self.memory.register(self.share(named))

    def claims(self, claims: Sequence[Claim]) -> list[Claim]:
        """The same claims on the shares, with what they remember of a charge."""
        found = []
        for claim in claims:
            mine = Claim(self.share(claim.limit), claim.key, claim.cost, claim.charged)
            before_and_after = claim.remembered()
            if before_and_after is not None and not mine.limit.limit.logs:
                mine.remember(*before_and_after)
            found.append(mine)
        return found

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        d = self.memory.decide_one(self.shares.get(named) or self.share(named), key, cost, max_wait_us, commit)
        if d.retry_us < 0:
            return self._told(d, cost <= named.limit.capacity)
        # as dated_here, without the calls: this is the way of every hit while the store is away
        return Decision(d.allowed, d.limit, d.remaining, d.retry_us, d.reset_us, d.wait_us, d.start_us + HERE, d.name)

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool) -> Decision:
        mine = self.claims(claims)
        decision = self.memory.decide(mine, max_wait_us, commit=commit)
        self._remember(claims, mine)
        return self._told(decision, all(claim.cost <= claim.limit.limit.capacity for claim in claims))

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None) -> list[Decision]:
        mine = [self.claims(claims) for claims in asks]
        told = self.memory.decide_many(mine, max_wait_us)
        fits = [all(claim.cost <= claim.limit.limit.capacity for claim in claims) for claims in asks]
        return [self._told(decision, fit) for decision, fit in zip(told, fits, strict=True)]

    def _remember(self, claims: Sequence[Claim], mine: Sequence[Claim]) -> None:
        for claim, own in zip(claims, mine, strict=True):
            before_and_after = own.remembered()
            if before_and_after is not None and not own.limit.limit.logs:
                claim.remember(*before_and_after)

    def _told(self, decision: Decision, fits: bool) -> Decision:
        """Dated here; what is only too large for the share is not told never: the store may be back at the next probe."""
        if decision.retry_us >= 0 or not fits:
            return dated_here(decision)
        until = self.until_us()
        parts = [retried(part, until) for part in decision.decisions]
        return dated_here(parts[0] if len(parts) == 1 else spoken(parts))

    def give_back(self, claims: Sequence[Claim], charged_at: int) -> None:
        self.memory.give_back(self.claims(claims), charged_at - HERE if made_here(charged_at) else -1)

    def reset(self, claims: Sequence[Claim]) -> None:
        self.memory.reset(self.claims(claims))

    def close(self) -> None:
        self.memory.close()

    @property
    def overflow(self) -> int:
        return int(self.memory.overflow)


ON_FAILURE: dict[str, type[Fallback]] = {"open": FailOpen, "closed": FailClosed, "local": LocalShare}


def without_a_store(on_failure: str, share: Share | None, max_keys: int, clock: Clock, until_us: Callable[[], int]) -> Fallback:
    """The answer to on_failure=, or an error that says what to write."""
    if on_failure not in ON_FAILURE:
        raise ConfigurationError(f"on_failure={on_failure!r}: write one of {', '.join(map(repr, ON_FAILURE))}")
    if on_failure == "local":
        if share is None:
            raise ConfigurationError(f"on_failure='local' needs the share that this node may use alone; {WRITE}")
        return LocalShare(clock, until_us, share_of_nodes(share), max_keys)
    if share is not None:
        raise ConfigurationError(f"share={share!r} belongs to on_failure='local'; {on_failure!r} has no use for it")
    return ON_FAILURE[on_failure](clock, until_us)


def retried(part: Decision, until_us: int) -> Decision:
    """A part that was told never, told to come back at the next probe."""
    if part.retry_us >= 0:
        return part
    return Decision(False, part.limit, part.remaining, until_us, part.reset_us, 0, part.start_us, part.name)


def spoken(parts: list[Decision]) -> Decision:
    """One Decision for several limits, as everywhere: refused, the longest retry speaks; allowed, the one closest to its end."""
    if len(parts) == 1:
        return parts[0]
    allowed = all(part.retry_us == 0 for part in parts)
    if allowed:
        speaker = min(parts, key=lambda part: Fraction(part.remaining, part.limit))
    else:
        never = [part for part in parts if part.retry_us < 0]
        speaker = never[0] if never else max(parts, key=lambda part: part.retry_us)
    fields: Any = (
        allowed,
        speaker.limit,
        speaker.remaining,
        speaker.retry_us,
        speaker.reset_us,
        0,
        speaker.start_us,
        speaker.name,
    )
    return Decisions(parts, *fields)
