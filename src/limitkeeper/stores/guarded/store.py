"""GuardedStore: wraps a store so that every decision is answered within a budget, also while the store fails.

    budget       no decision takes longer: a store that can't promise that is called by worker threads (deadline_store.py)
    breaker      after some failures the store is not called, until a background probe succeeds (breaker.py)
    on_failure   the answer meanwhile: "open" allows, "closed" refuses, "local" decides on a declared share (fallback.py)

Only a StoreError is a failure; a refusal is an answer. A call that timed out may have been charged and then answered by the
fallback too, so the store may count more than was admitted, never less. Over-admission is what the fallback admits: with "local",
at most the bound of the declared share over any time; with "open", unlimited while the store is down; with "closed", none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ...algorithms.claim import Claim, NamedLimit
from ...clock import SYSTEM, Clock
from ...decision import STORE, Decision
from ...errors import ConfigurationError, StoreError, StoreUnavailable
from ...fork import reset_after_fork
from ...observe.events import GIVE_BACK_DROPPED, Publisher
from ...rate import Duration, duration_us
from ..contract import Booking, KeyState, Requests, Store
from ..sans_io import Call, Plan
from ..wrapper_store import WrapperStore
from .breaker import OPEN, Breaker
from .deadline_store import PROBE, DeadlineStore, StartThread, start_daemon
from .fallback import FALLBACK_SOURCES, Fallback, make_fallback
from .health import StoreHealth
from .share import Share


class GuardStats(NamedTuple):
    """Counters of a guard since it was made. `since_us` is when it entered its state, on the guard's own clock."""

    state: str
    since_us: int
    failures: int
    timeouts: int
    opened: int
    probes: int
    degraded: int
    dropped: int
    abandoned: int


@cython.cclass
class GuardedStore(WrapperStore):
    """`GuardedStore(RedisStore(url), budget="20ms", on_failure="local", share=4)`: answers within the budget, always.

    `on_failure` is what happens while the store is unavailable: "open" allows, "closed" refuses, "local" decides in this
    process within a share of the limit. `share` is this node's share while it decides alone: a number of nodes, or a fraction.
    The breaker opens after `failures` in a row, or when `ratio` of the recent calls failed; probes come after `backoff`,
    doubled up to `max_backoff`, times a random factor; after a probe succeeds, a growing part of the callers is let through
    over `ramp`. `clock`, `rng` and `start_thread` are for tests and simulations: with a clock of your own there is no
    `background` prober, so call `probe()` yourself.
    """

    @cython.annotation_typing(False)
    def __init__(
        self,
        store: Store,
        budget: Duration = "100ms",
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
        start_thread: StartThread = start_daemon,
    ) -> None:
        if not isinstance(store, Store):
            raise ConfigurationError(f"GuardedStore wraps a store, got {store!r}; write GuardedStore(RedisStore(url))")
        self.budget_us = duration_us(budget)
        if not self.budget_us:
            raise ConfigurationError(f"budget={budget!r}: expected a duration above 0, such as '20ms'")
        super().__init__(store)
        self.on_failure = on_failure
        own_clock = SYSTEM if clock is None else clock
        background = clock is None if background is None else background
        self._own_rng = rng is None
        times = (duration_us(backoff), duration_us(max_backoff), duration_us(ramp))
        self._breaker: Breaker = Breaker(Random() if rng is None else rng, failures, ratio, *times)
        name = type(store).__name__ if name is None else name
        self._health: StoreHealth = StoreHealth(self._breaker, own_clock, name, self, background, start_thread)
        self._fallback: Fallback = make_fallback(on_failure, share, max_keys, own_clock, self._health.until_probe_us)
        self._store: Store = self._within_budget()
        self._unregistered: list[NamedLimit] = []
        self._degraded = self._dropped = 0  # incremented without a lock: between reading and writing there is no call
        reset_after_fork(self)

    def _within_budget(self) -> Store:
        """The store itself when it promises the budget, otherwise a wrapper that does."""
        if self.inner.answers_within(self.budget_us):
            return self.inner
        return DeadlineStore(self.inner, self.budget_us, self._health.start_thread)

    def _reset_after_fork(self) -> None:
        """In a new process: no call in progress, no prober, and a random generator of its own."""
        if isinstance(self._store, DeadlineStore):
            self._store.pool.reset()
        self._health.reset_after_fork(Random() if self._own_rng else None)

    def __repr__(self) -> str:
        return f"<GuardedStore {self.state}: {self.inner!r}, {self.budget_us / 1000:g} ms, {self.on_failure}>"

    # Properties ------------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        if self._breaker.closed:
            try:
                return self._store.now_us()
            except StoreError:
                pass
        return self._health.clock.now_us()

    @property
    def blocks_event_loop(self) -> bool:
        return bool(self._store.blocks_event_loop)

    @property
    def state(self) -> str:
        """ "closed" (the store is called), "open", or "half open"."""
        return self._breaker.state

    @property
    def overflow(self) -> int:
        return self.inner.overflow + self._fallback.overflow

    @property
    def events(self) -> Publisher:
        """Where to listen: `store.events.on("opened", listener)`."""
        return self._health.events

    def stats(self) -> GuardStats:
        """Counters since this guard was made; `degraded` counts decisions that the fallback answered."""
        health = self._health
        abandoned = self._store.pool.abandoned if isinstance(self._store, DeadlineStore) else 0
        with health.lock:
            counters = (health.failures, health.timeouts, health.opened, health.probes, self._degraded, self._dropped)
            return GuardStats(self._breaker.state, self._breaker.since_us, *counters, abandoned)

    @staticmethod
    def answered_here(decision: Decision) -> bool:
        """Whether a Decision was made without the store."""
        return decision.source in FALLBACK_SOURCES

    def answers_within(self, budget_us: int) -> bool:
        if budget_us < self.budget_us:
            self.budget_us = budget_us
            if not self._store.answers_within(budget_us):
                self._store = self._within_budget()
        return True

    def register(self, limit: NamedLimit) -> None:
        self._fallback.register(limit)
        if self._breaker.closed or self._health.may_call():
            try:
                self._store.register(limit)
                return
            except StoreError as error:
                self._health.record_failure(error, [Claim(limit, "", 1)])
        self._unregistered.append(limit)

    def unregister(self, limit: NamedLimit) -> None:
        self._unregistered = [one for one in self._unregistered if one is not limit]
        self._fallback.unregister(limit)
        self.inner.unregister(limit)

    # Deciding: direct calls, since a plan would cost 0.4 µs ------------------------------------------------------

    @cython.cfunc
    @cython.inline
    def _answered(self, decision: Decision) -> Decision:
        """Counts an answer as a success of the store. A refusal that a lease knows of is none: it is given during an
        outage. (So is a grant, for one lease life at most.)"""
        if decision.allowed or decision.source == STORE:
            self._breaker.streak += 1
        return decision

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        if self._breaker.closed or self._health.may_call():
            try:
                decision: Decision = self._store.decide_one(named, key, cost, max_wait_us, commit)
                return self._answered(decision)
            except StoreError as error:
                self._health.record_failure(error, [Claim(named, key, 1)])
        self._degraded += 1
        return self._fallback.decide_one(named, key, cost, max_wait_us, commit)

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        if self._breaker.closed or self._health.may_call():
            try:
                decision: Decision = await self._store.adecide_one(named, key, cost, max_wait_us, commit)
                return self._answered(decision)
            except StoreError as error:
                self._health.record_failure(error, [Claim(named, key, 1)])
        self._degraded += 1
        return self._fallback.decide_one(named, key, cost, max_wait_us, commit)

    @cython.ccall
    def hit_nowait(self, named: NamedLimit, key: str, cost: cython.longlong) -> Decision | None:
        if self._breaker.closed:
            try:
                return self._store.hit_nowait(named, key, cost)
            except StoreError as error:
                self._health.record_failure(error, [Claim(named, key, 1)])
        elif self._breaker.state != OPEN or self._health.may_call():
            return None
        self._degraded += 1
        return self._fallback.decide_one(named, key, cost, 0, True)

    @cython.ccall
    @cython.annotation_typing(False)
    def _decide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision:
        if self._breaker.closed or self._health.may_call():
            try:
                decision: Decision = self._store.decide(
                    claims, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us
                )
                return self._answered(decision)
            except StoreError as error:
                self._health.record_failure(error, claims)
        self._degraded += 1
        return self._fallback.decide(claims, max_wait_us, commit, not_before_us)

    async def _adecide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision:
        if self._breaker.closed or self._health.may_call():
            try:
                decision: Decision = await self._store.adecide(
                    claims, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us
                )
                return self._answered(decision)
            except StoreError as error:
                self._health.record_failure(error, claims)
        self._degraded += 1
        return self._fallback.decide(claims, max_wait_us, commit, not_before_us)

    # Plans, for sync and async callers --------------------------------------------------------------------------

    def plan_decide_many(self, asks: Requests, max_wait_us: int | None) -> Plan[list[Decision]]:
        if self._breaker.closed or self._health.may_call():
            try:
                decisions: list[Decision] = yield Call(self._store, "decide_many", (asks, max_wait_us))
                self._breaker.streak += any(one.allowed or one.source == STORE for one in decisions)  # of one call
                return decisions
            except StoreError as error:
                self._health.record_failure(error, asks[0])
        self._degraded += len(asks)
        return self._fallback.decide_many(asks, max_wait_us)

    def plan_give_back(self, claims: Sequence[Claim], charged_at: int, source: str) -> Plan[bool]:
        """Gives back where it was charged. What can't be delivered is dropped, which is the strict side, and published."""
        if source == self._fallback.source:
            return self._fallback.give_back(claims, charged_at)
        failure: StoreError | None = None
        if self._breaker.closed or self._health.may_call():
            try:
                return (yield Call(self._store, "give_back", (claims, charged_at, source)))  # type: ignore[no-any-return]
            except StoreError as error:
                failure = error
                self._health.record_failure(error, claims)
        self._drop(claims, charged_at, failure)
        return True

    def _drop(self, claims: Sequence[Claim], charged_at: int, error: StoreError | None) -> None:
        """A refund, and what is charged on top of an estimate, go to the fallback; the rest is dropped."""
        for claim in claims:
            if self._fallback.charges and (charged_at < 0 or claim.cost < 0):
                self._fallback.give_back([claim], -1)
                continue
            with self._health.lock:
                self._dropped += 1
            self.events.publish(GIVE_BACK_DROPPED, claim.limit.limiter, claim.key, claim.cost, None, error)

    @property
    def can_rebook(self) -> bool:
        """Where the store can, within the budget."""
        return self._store.can_rebook

    def plan_rebook(self, bookings: Sequence[Booking]) -> Plan[list[Decision | None]]:
        """Rebooks when the store is well and charged all bookings; otherwise those that leave give back and the others stay. In
        both cases the store is called once, so that the whole call has one budget."""
        here = self._fallback.source
        asked = bookings
        if not self._breaker.closed or any(one.source == here for one in bookings):
            asked = [one for one in bookings if not one.stays and one.source != here]
            for one in reversed(bookings):
                if not one.stays and one.source == here:
                    self._fallback.give_back(one.claims, one.charged_at)
        failure: StoreError | None = None
        if asked and (self._breaker.closed or self._health.may_call()):
            try:
                decisions: list[Decision | None] = yield Call(self._store, "rebook", (asked,))
                return decisions if asked is bookings else [None] * len(bookings)
            except StoreError as error:
                failure = error
                self._health.record_failure(error, bookings[0].claims)
        for one in reversed(asked):
            if not one.stays:
                self._drop(one.claims, one.charged_at, failure)
        return [None] * len(bookings)

    # What only the store can do: its failures are counted and raised --------------------------------------------

    def plan_reset(self, claims: Sequence[Claim]) -> Plan[None]:
        """Forgets keys here and in the store; raises when the store can't be reached, since it would still know them."""
        self._fallback.reset(claims)
        self._require_store()
        try:
            yield Call(self._store, "reset", (claims,))
        except StoreError as error:
            self._health.record_failure(error, claims)
            raise

    def plan_guarded(self, call: Call, claims: Sequence[Claim]) -> Plan[Any]:
        """A call to something else that is kept in the same store; `claims` are for probes. Raises a StoreError when it fails,
        and while the breaker is open."""
        self._require_store()
        try:
            answer = yield call
        except StoreError as error:
            self._health.record_failure(error, claims)
            raise
        self._breaker.streak += 1
        return answer

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        """The keys and states of the store, without a budget; raises while the store may not be called."""
        self._require_store()
        return self.inner.items(limit)

    def rate_items(self, limit: NamedLimit) -> Iterable[KeyState]:
        self._require_store()
        return self.inner.rate_items(limit)

    def plan_load(self, limit: NamedLimit, items: Iterable[KeyState]) -> Plan[None]:
        self._require_store()
        yield Call(self.inner, "load", (limit, items))

    def forget(self, claims: Sequence[Claim]) -> None:
        self._require_store()
        self.inner.forget(claims)

    def _require_store(self) -> None:
        if not self._breaker.closed and not self._health.may_call():
            until_s = self._health.until_probe_us() / 1e6
            raise StoreUnavailable(f"{self._health.name} fails; the next probe is in {until_s:.3f} s at the earliest")

    # Probes and the end -----------------------------------------------------------------------------------------

    def probe(self) -> bool:
        """Probes the store now, without charging; False when the breaker stays open. Normally the background prober does it."""
        return self._health.probe()

    async def aprobe(self) -> bool:
        return await self._health.aprobe()

    def plan_probe(self, claims: Sequence[Claim]) -> Plan[None]:
        """The calls of one probe; then registers the limits that were made while the store failed."""
        if isinstance(self._store, DeadlineStore):
            yield Call(self._store, "probe", (claims,))
        else:
            yield Call(self._store, "decide", (claims, 0), PROBE)
        while self._unregistered:
            self._store.register(self._unregistered[0])
            self._unregistered.pop(0)

    def leave(self) -> None:
        """Ends the guard alone: its prober stops, and the store behind it stays open."""
        self._health.close()
        self._fallback.close()

    def plan_close(self) -> Plan[None]:
        self.leave()
        yield Call(self._store, "close")
