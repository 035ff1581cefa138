"""GuardedStore: a store that answers in time, whatever happens to the one behind it.

    budget       no decision takes longer: a store that can't promise that is asked by others, and left alone when it is late
    breaker      after some failures nobody asks any more, until a probe in the background is answered (see breaker.py)
    on_failure   what is answered meanwhile: "open" lets through, "closed" refuses, "local" decides on a declared share

Only a StoreError is a failure; a refusal is an answer. While the store is well, the guard changes nothing: the same answers, the
same exact undoing, one attribute looked at and one number added to per decision.

What it costs in exactness: a call that timed out may have been charged and then answered here too, so that the store counts more
than was let through, never less. Over-admission is what is decided here: with "local", at most the bound of the declared share
over any time, however often the store comes and goes; with "open", unlimited while it is away; with "closed", none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

from ...algorithms.claim import Claim, NamedLimit
from ...clock import SYSTEM, Clock
from ...decision import STORE, Decision
from ...errors import ConfigurationError, StoreError, StoreUnavailable
from ...fork import reset_after_fork
from ...observe.events import GIVE_BACK_DROPPED, Publisher
from ...rate import Duration, duration_us
from ..contract import Booking, Store
from .breaker import OPEN, Breaker
from .deadline_store import DeadlineStore
from .fallback import Fallback, made_here, without_a_store
from .health import StoreHealth
from .share import Share


class GuardStats(NamedTuple):
    """What a guard counted since it was made. `since_us` is when it came into its state, on the guard's own clock."""

    state: str
    since_us: int
    failures: int
    timeouts: int
    opened: int
    probes: int
    degraded: int
    dropped: int
    abandoned: int


class GuardedStore(Store):
    """`GuardedStore(RedisStore(url), budget="20ms", on_failure="local", share=4)`: never later than the budget, never down.

    `share` is this node's part while it decides alone: a number of nodes, or a fraction. The breaker opens after `failures` in
    a row, or when `ratio` of the recent calls failed; probes come after `backoff`, doubled up to `max_backoff`, times chance;
    when one is answered, callers are let through bit by bit over `ramp`. `clock` and `rng` are for tests: on a clock of your
    own nobody probes in the `background`, so call `probe()` yourself.
    """

    def __init__(
        self,
        store: Store,
        budget: Duration = "20ms",
        on_failure: str = "open",
        share: Share | None = None,
        *,
        failures: int = 5,
        ratio: float = 0.5,
        backoff: Duration = "100ms",
        max_backoff: Duration = "5s",
        ramp: Duration = "1s",
        max_keys: int = 1_000_000,
        clock: Clock | None = None,
        rng: Random | None = None,
        background: bool | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(store, Store):
            raise ConfigurationError(f"a guard needs a store, not {store!r}; write GuardedStore(RedisStore(url))")
        self.budget_us = duration_us(budget)
        if not self.budget_us:
            raise ConfigurationError(f"budget={budget!r}: a decision needs some time; write '20ms'")
        self.inner = store
        self.on_failure = on_failure
        own_clock: Any = SYSTEM if clock is None else clock
        background = clock is None if background is None else background
        self._own_rng = rng is None
        times = (duration_us(backoff), duration_us(max_backoff), duration_us(ramp))
        self._breaker = Breaker(Random() if rng is None else rng, failures, ratio, *times)
        self._watch = StoreHealth(self._breaker, own_clock, type(store).__name__ if name is None else name, self, background)
        self._fallback: Fallback = without_a_store(on_failure, share, max_keys, own_clock, self._watch.until_probe_us)
        self._store: Store = store if store.answers_within(self.budget_us) else DeadlineStore(store, self.budget_us)
        self._untold: list[NamedLimit] = []
        self._degraded = self._dropped = 0  # added to without a lock: between reading and writing there is no call
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """In a new process: nobody in the background, and a chance of its own."""
        if isinstance(self._store, DeadlineStore):
            self._store.errands.renew()
        self._watch.renew(Random() if self._own_rng else None)

    def __repr__(self) -> str:
        return f"<GuardedStore {self.state}: {self.inner!r}, {self.budget_us / 1000:g} ms, {self.on_failure}>"

    # What it is ------------------------------------------------------------------------------------------------

    @property
    def local(self) -> bool:  # type: ignore[override]
        return bool(self.inner.local)

    @property
    def clock(self) -> Any:
        return self.inner.clock

    def now_us(self) -> int:
        if self._breaker.closed:
            try:
                return self.inner.now_us()
            except StoreError:
                pass
        return int(self._watch.clock.now_us())

    @property
    def state(self) -> str:
        """ "closed" (all is well), "open", or "half open"."""
        return self._breaker.state

    @property
    def overflow(self) -> int:
        return self.inner.overflow + self._fallback.overflow

    @property
    def events(self) -> Publisher:
        """Where to listen: `store.events.on("opened", listener)`."""
        return self._watch.events

    def stats(self) -> GuardStats:
        """Numbers since this guard was made; `degraded` are decisions that were answered here."""
        watch = self._watch
        abandoned = self._store.errands.abandoned if isinstance(self._store, DeadlineStore) else 0
        with watch.lock:
            counted = (watch.failures, watch.timeouts, watch.opened, watch.probes, self._degraded, self._dropped)
            return GuardStats(self._breaker.state, self._breaker.since_us, *counted, abandoned)

    @staticmethod
    def answered_here(decision: Decision) -> bool:
        """Whether a Decision was made without the store."""
        return made_here(decision.start_us)

    def answers_within(self, budget_us: int) -> bool:
        if budget_us < self.budget_us:
            self.budget_us = budget_us
            if not self._store.answers_within(budget_us):
                self._store = DeadlineStore(self.inner, budget_us)
        return True

    def can_reserve(self, limit: NamedLimit) -> bool:
        return self.inner.can_reserve(limit)

    def register(self, limit: NamedLimit) -> None:
        self._fallback.register(limit)
        if self._breaker.closed or self._watch.may_ask():
            try:
                self._store.register(limit)
                return
            except StoreError as error:
                self._watch.failed(error, [Claim(limit, "", 1)])
        self._untold.append(limit)

    # Deciding --------------------------------------------------------------------------------------------------

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        if self._breaker.closed or self._watch.may_ask():
            try:
                decision = self._store.decide_one(named, key, cost, max_wait_us, commit)
            except StoreError as error:
                self._watch.failed(error, [Claim(named, key, 1)])
            else:
                self._breaker.streak += 1
                return decision
        self._degraded += 1
        return self._fallback.decide_one(named, key, cost, max_wait_us, commit)

    def hit_nowait(self, named: NamedLimit, key: str, cost: int) -> Decision | None:
        if self._breaker.closed:
            try:
                return self._store.hit_nowait(named, key, cost)
            except StoreError as error:
                self._watch.failed(error, [Claim(named, key, 1)])
        elif self._breaker.state != OPEN or self._watch.may_ask():
            return None
        self._degraded += 1
        return self._fallback.decide_one(named, key, cost, 0, True)

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        if self._breaker.closed or self._watch.may_ask():
            try:
                decision = self._store.decide(claims, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us)
            except StoreError as error:
                self._watch.failed(error, claims)
            else:
                self._breaker.streak += 1
                return decision
        self._degraded += 1
        return self._fallback.decide(claims, max_wait_us, commit)

    async def adecide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        if self._breaker.closed or self._watch.may_ask():
            try:
                decision = await self._store.adecide(
                    claims, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us
                )
            except StoreError as error:
                self._watch.failed(error, claims)
            else:
                self._breaker.streak += 1
                return decision
        self._degraded += 1
        return self._fallback.decide(claims, max_wait_us, commit)

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        if self._breaker.closed or self._watch.may_ask():
            try:
                found = self._store.decide_many(asks, max_wait_us)
            except StoreError as error:
                self._watch.failed(error, asks[0])
            else:
                self._breaker.streak += 1
                return found
        self._degraded += len(asks)
        return self._fallback.decide_many(asks, max_wait_us)

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        if self._breaker.closed or self._watch.may_ask():
            try:
                found = await self._store.adecide_many(asks, max_wait_us)
            except StoreError as error:
                self._watch.failed(error, asks[0])
            else:
                self._breaker.streak += 1
                return found
        self._degraded += len(asks)
        return self._fallback.decide_many(asks, max_wait_us)

    # Giving back -----------------------------------------------------------------------------------------------

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        """To where it was charged. What can't be delivered is dropped, which is the strict side, and told as an event."""
        lost: StoreError | None = None
        if made_here(charged_at):
            self._fallback.give_back(claims, charged_at)
            return
        if self._breaker.closed or self._watch.may_ask():
            try:
                self._store.give_back(claims, charged_at)
                return
            except StoreError as error:
                lost = error
                self._watch.failed(error, claims)
        self._undelivered(claims, charged_at, lost)

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        lost: StoreError | None = None
        if made_here(charged_at):
            self._fallback.give_back(claims, charged_at)
            return
        if self._breaker.closed or self._watch.may_ask():
            try:
                await self._store.agive_back(claims, charged_at)
                return
            except StoreError as error:
                lost = error
                self._watch.failed(error, claims)
        self._undelivered(claims, charged_at, lost)

    def _undelivered(self, claims: Sequence[Claim], charged_at: int, error: StoreError | None) -> None:
        """A refund goes to whoever decides now, and so does what is charged on top of an estimate; the rest is dropped."""
        for claim in claims:
            if self._fallback.charges and (charged_at < 0 or claim.cost < 0):
                self._fallback.give_back([claim], -1)
                continue
            with self._watch.lock:
                self._dropped += 1
            self.events.publish(GIVE_BACK_DROPPED, claim.limit.limiter, claim.key, claim.cost, None, error)

    # Moving up: offered when the store behind offers it, and keeps to the budget ---------------------------------------

    @property
    def can_rebook(self) -> bool:
        return self._store.can_rebook

    def rebook(self, turns: Sequence[Booking]) -> list[Decision | None]:
        if self._all_there(turns):
            try:
                return self._store.rebook(turns)
            except StoreError as error:
                return self._stayed(turns, error)
        for claims, charged_at in left(turns):
            self.give_back(claims, charged_at)
        return [None] * len(turns)

    async def arebook(self, turns: Sequence[Booking]) -> list[Decision | None]:
        if self._all_there(turns):
            try:
                return await self._store.arebook(turns)
            except StoreError as error:
                return self._stayed(turns, error)
        for claims, charged_at in left(turns):
            await self.agive_back(claims, charged_at)
        return [None] * len(turns)

    def _all_there(self, turns: Sequence[Booking]) -> bool:
        """Whether the store is well, and all of these were charged by it; otherwise who leaves gives back and nobody moves."""
        return self._breaker.closed and not any(made_here(turn.charged_at) for turn in turns)

    def _stayed(self, turns: Sequence[Booking], error: StoreError) -> list[Decision | None]:
        self._watch.failed(error, turns[0].claims)
        for claims, charged_at in left(turns):
            self._undelivered(claims, charged_at, error)
        return [None] * len(turns)

    # What only the store can do: its failures count, and are the caller's to know ----------------------------------

    def reset(self, claims: Sequence[Claim]) -> None:
        """Forgets keys here and in the store; raises when the store can't be told, since they would not be forgotten."""
        self._fallback.reset(claims)
        self._reachable()
        try:
            self._store.reset(claims)
        except StoreError as error:
            self._watch.failed(error, claims)
            raise

    async def areset(self, claims: Sequence[Claim]) -> None:
        self._fallback.reset(claims)
        self._reachable()
        try:
            await self._store.areset(claims)
        except StoreError as error:
            self._watch.failed(error, claims)
            raise

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, Any]]:
        """What the store knows, in its own time; raises while it can't be asked."""
        self._reachable()
        return self.inner.items(limit)

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        self._reachable()
        self.inner.load(limit, items)

    def _reachable(self) -> None:
        if not self._breaker.closed and not self._watch.may_ask():
            until = self._watch.until_probe_us() / 1e6
            raise StoreUnavailable(f"{self._watch.name} fails, and is asked again in {until:.3f} s at the earliest")

    # Looking after it ------------------------------------------------------------------------------------------

    def probe(self) -> bool:
        """Asks the store now whether it is back, without charging; True when it may be. Otherwise done in the background."""
        return self._watch.probe()

    async def aprobe(self) -> bool:
        return await self._watch.aprobe()

    def ask_again(self, claims: Sequence[Claim]) -> None:
        """What a probe does."""
        if isinstance(self._store, DeadlineStore):
            self._store.look(claims)
        else:
            self._store.decide(claims, 0, commit=False)
        self._introduce()

    async def aask_again(self, claims: Sequence[Claim]) -> None:
        if isinstance(self._store, DeadlineStore):
            await self._store.alook(claims)
        else:
            await self._store.adecide(claims, 0, commit=False)
        self._introduce()

    def _introduce(self) -> None:
        """Tells the store of limits that were made while it was away."""
        while self._untold:
            self._store.register(self._untold[0])
            self._untold.pop(0)

    def leave(self) -> None:
        """Ends the guard alone: nobody probes any more, and the store behind stays open."""
        self._watch.end()
        self._fallback.close()

    def close(self) -> None:
        self.leave()
        self._store.close()

    async def aclose(self) -> None:
        self.leave()
        await self._store.aclose()


def left(turns: Sequence[Booking]) -> list[tuple[Sequence[Claim], int]]:
    """The charges of those who leave a line, the last first."""
    return [(booking.claims, booking.charged_at) for booking in reversed(turns) if not booking.stays]
