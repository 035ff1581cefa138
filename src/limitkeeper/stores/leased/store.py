"""LeasedStore: fetches batches of tokens from a parent store, serves requests from RAM, fetches the next batch in time.

    LeasedStore(RedisStore(url))                 lease=None: the batch follows each key's own demand
    LeasedStore(RedisStore(url), lease=50)       50 hits cost one operation of 50

A token is charged at the parent when it is leased and spent here up to one `life` later. So in any window a node can spend what
it held when the window began, besides what is charged within it:

    plain    over-admission ≤ min(nodes × held, rate × life)         held: a batch and a quarter
    strict   0, and the parent grants count per (W + life) instead of per W: a price of life / (W + life) of the rate

A fixed window's lease ends with its window, so there it is 0 at no price. Refusals are leased too: "nothing before t" is answered
here until t. A crash loses what was held, never more. Rejected: reporting use afterwards (the bound would then be the demand of
an interval, whatever the limit).

`LeaseCache` answers from RAM, `Refill` moves batches between here and the parent, `Maintenance` does so in the background. This
file decides what RAM can't answer: the parent decides a key without demand; for a key in demand a batch is fetched; what may
wait queues at the parent, after everything held for it was given back, so that nothing overtakes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import MAX_WAIT
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.stores.contract import Store
    from cython.cimports.limitkeeper.stores.leased.lease import Lease, LeaseTerms
    from cython.cimports.limitkeeper.stores.leased.lease_cache import LeaseCache
else:
    from ...algorithms.claim import Claim, NamedLimit
    from ...algorithms.constants import MAX_WAIT
    from ...decision import Decision
    from ..contract import Store
    from .lease import Lease, LeaseTerms
    from .lease_cache import LeaseCache

from ...algorithms.limit import Limit as AnyLimit
from ...clock import SYSTEM, Clock, SystemClock
from ...decision import STORE, Decisions
from ...errors import ConfigurationError, StoreError
from ...fork import reset_after_fork
from ...rate import Duration, duration_us
from ..cell_store import checked, only_claims, patience_us
from ..contract import Booking
from ..sans_io import Call, Plan, arun, run
from .derated_limit import DeratedLimits
from .maintenance import Background, Maintenance, ThreadFactory
from .refill import Refill, Want

log = logging.getLogger("limitkeeper")


@cython.cclass
class LeasedStore(Store):
    """Fetches batches from `store` and spends them in RAM.

    `life` is how long a batch may be spent; `max_keys` bounds the keys with a lease. `clock` times the leases (default: this
    machine's, or the parent's if moved by hand; then there is no background, call `tend`). `make_thread` makes its thread.
    """

    @cython.annotation_typing(False)
    def __init__(
        self,
        store: Store,
        lease: int | None = None,
        life: Duration = "100ms",
        strict: bool = False,
        max_keys: int = 100_000,
        *,
        clock: Clock | None = None,
        make_thread: ThreadFactory | None = None,
    ) -> None:
        if not isinstance(store, Store):
            raise ConfigurationError(f"LeasedStore wraps a store, such as RedisStore(url); got {store!r}")
        if lease is not None and (isinstance(lease, bool) or not isinstance(lease, int) or lease < 1):
            raise ConfigurationError(f"lease must be None (the batch follows demand) or an int ≥ 1, got {lease!r}")
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ConfigurationError(f"max_keys must be an int ≥ 1, got {max_keys!r}")
        life_us = duration_us(life)
        if life_us < 1:
            raise ConfigurationError(f"life must be longer than 0, got {life!r}; write life='100ms'")
        self.parent = store
        self.parent_time = clock is None and hasattr(store.clock, "advance")
        read_clock = store.now_us if self.parent_time else None
        same_clock = isinstance(store.clock, SystemClock)
        if clock is not None and not isinstance(clock, SystemClock):
            read_clock, same_clock = clock.now_us, clock is store.clock
        self.derated = DeratedLimits(life_us) if strict else None
        self.cache = LeaseCache(lease or 0, life_us, max_keys, read_clock, self.derated)
        self.refill = Refill(store, self.cache, self.parent_time, same_clock)
        self.sleeper = SYSTEM if clock is None else clock
        self.make_thread = threading.Thread if make_thread is None and not self.parent_time else make_thread
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Holds nothing: at first, and in the child of a fork, whose leases are its parent's."""
        self.cache.clear()
        self.maintenance = Maintenance(self.cache, self.refill)
        self.background = self.cache.wake = None
        if self.make_thread is not None:
            self.background = Background(self.maintenance, self.make_thread, self.sleeper)
            self.cache.wake = self.background.wake

    # What it is ------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        return self.parent.clock  # type: ignore[no-any-return]

    def now_us(self) -> int:
        return self.parent.now_us()

    @property
    def local(self) -> bool:  # type: ignore[override]
        return bool(self.parent.local)

    @property
    def overflow(self) -> int:
        return self.parent.overflow

    @property
    def prices(self) -> dict[str, float]:
        """The part of its rate that each limit loses in strict mode, by its text."""
        return {} if self.derated is None else self.derated.prices

    @property
    def failures(self) -> int:
        """How many rounds of the background failed."""
        return int(self.maintenance.failures)

    def __len__(self) -> int:
        """How many keys have a lease or a known refusal."""
        return self.cache.keys

    def __bool__(self) -> bool:
        return True

    def leased(self, named: NamedLimit, key: str) -> int:
        """How much is held for a key."""
        return self.cache.withdraw(self.cache.find(named, key), MAX_WAIT, False)

    def over_admission(self, limit: AnyLimit, nodes: int) -> float:
        """The most that so many nodes can admit in a window beyond the limit's own bound."""
        named = NamedLimit("", "", limit)
        terms: LeaseTerms = LeaseTerms(named, named, self.cache.fixed_batch, self.cache.life_us)
        if self.derated is not None or self.cache.exact or terms.windowed or not terms.leasable:
            return 0.0
        batch = terms.largest_batch(self.cache.round_trip_us)
        held = nodes * (batch + max(1, batch // 4))
        return float(min(held, terms.tokens_per_us * terms.life_us if terms.continuous else limit.capacity))

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        decision: Decision | None = self.cache.answer_one(named, key, cost, max_wait_us, commit)
        if decision is None:
            terms: LeaseTerms = self.cache.terms_of(named)
            if max_wait_us == 0 and commit and self.has_no_demand(terms, key, cost):
                sent_us = self.sent_us()
                decision = self.parent.decide_one(terms.parent_limit, key, cost, 0, True)
                return self.observe(terms, None, key, cost, sent_us, decision)
            decision = run(self.plan([Claim(named, key, cost)], max_wait_us, commit))
        return decision

    @cython.ccall
    def hit_nowait(self, named: NamedLimit, key: str, cost: cython.longlong) -> Decision | None:
        return self.cache.answer_one(named, key, cost, 0, True)

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        return await self.adecide([Claim(named, key, cost)], max_wait_us, commit=commit)

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        wait_us, asked = patience_us(max_wait_us), checked(claims)
        if remember or not_before_us:
            return run(self.pass_on(asked, wait_us, commit, remember, not_before_us))
        decision = self.cache.answer(asked, wait_us, commit)
        return decision if decision is not None else run(self.plan(asked, wait_us, commit))

    async def adecide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        wait_us, asked = patience_us(max_wait_us), checked(claims)
        if remember or not_before_us:
            return await arun(self.pass_on(asked, wait_us, commit, remember, not_before_us))
        decision = self.cache.answer(asked, wait_us, commit)
        return decision if decision is not None else await arun(self.plan(asked, wait_us, commit))

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        return run(self.plan_many([checked(claims) for claims in asks], patience_us(max_wait_us)))

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        return await arun(self.plan_many([checked(claims) for claims in asks], patience_us(max_wait_us)))

    def plan(self, claims: list[Claim], wait_us: int, commit: bool) -> Plan[Decision]:
        """A decision that leases do not answer."""
        waits = wait_us > 0 and not [claim for claim in claims if not claim.limit.limit.reserves]
        if waits and commit and len(claims) == 1:
            decision = yield from self.decide_in_demand(claims[0])
            if decision:
                return decision
        if waits or (self.cache.exact and len(claims) > 1):
            return (yield from self.pass_on(claims, wait_us, commit))
        if len(claims) > 1:
            return (yield from self.decide_several(claims, commit))
        claim: Claim = claims[0]
        return (yield from self.decide_now(self.cache.terms_of(claim.named), claim.key, claim.cost, commit))

    def plan_many(self, asks: list[list[Claim]], wait_us: int) -> Plan[list[Decision]]:
        """Decides from leases where they answer; the parent decides the others in one call."""
        exact = self.cache.exact
        found = [None if exact else self.cache.answer(claims, wait_us, True) for claims in asks]
        missed = [i for i, decision in enumerate(found) if decision is None]
        if missed:
            for i in missed:
                self.touch(asks[i])
            rest = [self.parent_claims(asks[i]) for i in missed]
            answers = yield Call(self.parent, "decide_many", (rest, None if wait_us >= MAX_WAIT else wait_us))
            for i, decision in zip(missed, answers, strict=True):
                found[i] = decision
                if not exact and not wait_us:
                    self.notice_demand(asks[i], decision)
        return found  # type: ignore[return-value]

    def pass_on(
        self, claims: list[Claim], wait_us: int, commit: bool, remember: bool = False, not_before_us: int = 0
    ) -> Plan[Decision]:
        """The parent's own answer to the claims, after what is held for their keys was given back."""
        if commit:
            held = self.cache.take_all([self.cache.find(claim.limit, claim.key) for claim in claims])
            yield from self.refill.give_back(held)
        return (yield from self.ask_parent(claims, wait_us, commit, remember, not_before_us))

    def ask_parent(
        self, claims: list[Claim], wait_us: int, commit: bool, remember: bool = False, not_before_us: int = 0
    ) -> Plan[Decision]:
        if commit:
            self.touch(claims)
        asked = self.parent_claims(claims)
        options = {"commit": commit, "remember": remember, "not_before_us": not_before_us}
        decision = yield Call(self.parent, "decide", (asked, None if wait_us >= MAX_WAIT else wait_us), options)
        if self.derated is not None:
            for claim, charged in zip(claims, asked, strict=True):
                copy_states(charged, claim)
        return decision  # type: ignore[no-any-return]

    # One limit -------------------------------------------------------------------------------------------------

    def decide_in_demand(self, claim: Claim) -> Plan[Decision | None]:
        """A batch for a call that may wait, if its key is in demand; None when there is no answer without waiting."""
        terms: LeaseTerms = self.cache.terms_of(claim.named)
        if self.cache.exact or not terms.leasable or claim.cost <= 0:
            return None
        lease: Lease | None = terms.leases.get(claim.key)
        now_us = self.cache.now_us()
        if lease is None:
            self.cache.add(terms, claim.key, claim.cost, now_us)
        elif (
            not lease.scarce
            and not lease.refuses(now_us, claim.cost)
            and lease.next_batch(now_us, claim.cost, self.cache.round_trip_us) > claim.cost
        ):
            return (yield from self.decide_now(terms, claim.key, claim.cost, True))
        return None

    def decide_now(self, terms: LeaseTerms, key: str, cost: int, commit: bool) -> Plan[Decision]:
        """One limit, without waiting: fetches a batch, waits for one that is being fetched, or asks the parent for the cost."""
        if not terms.leasable or cost <= 0 or cost > terms.limit.capacity:
            return (yield from self.ask_parent([Claim(terms.named, key, cost)], 0, commit))
        lease: Lease | None = terms.leases.get(key)
        if not commit:
            held = self.cache.withdraw(lease, MAX_WAIT, False)
            decision = yield Call(self.parent, "decide_one", (terms.parent_limit, key, max(0, cost - held), 0, False))
            return add_held(decision, held)
        if lease is None and terms.fixed_batch and not self.cache.exact:
            lease = self.cache.add(terms, key, cost, self.cache.now_us())
        for _ in range(3):
            if lease is None or self.cache.exact:
                break
            pending = lease.pending  # read before what is held: a fetch that ends adds its batch first
            now_us = self.cache.now_us()
            size = lease.next_batch(now_us, cost, self.cache.round_trip_us)
            if size <= cost or lease.held(now_us) or not (pending is None or pending.can_be_awaited()):
                break
            fetched = False
            if pending is None:
                fetched = yield from self.refill.fetch([Want(lease, cost, size)])
            elif (error := (yield pending)) is not None:
                raise error
            decision = self.cache.answer_after_fetch(lease, cost)
            if decision is not None:
                return decision
            if fetched:
                break
        return (yield from self.decide_rest(terms, lease, key, cost))

    def decide_rest(self, terms: LeaseTerms, lease: Lease | None, key: str, cost: int) -> Plan[Decision]:
        """The parent decides about the cost less what is held."""
        generation = 0 if lease is None else lease.generation
        used = 0 if lease is None else lease.used
        held = self.cache.withdraw(lease, cost)
        sent_us, decision = self.sent_us(), None
        try:
            decision = yield Call(self.parent, "decide_one", (terms.parent_limit, key, cost - held, 0, True))
        finally:
            if decision is None or not decision.allowed:
                self.cache.put_back(lease, MAX_WAIT, held)
        return self.observe(terms, lease, key, cost, sent_us, decision, generation, used)

    def has_no_demand(self, terms: LeaseTerms, key: str, cost: cython.longlong) -> bool:
        """Whether the parent decides a hit of this key itself."""
        leases = terms.leasable and (self.cache.exact or not terms.fixed_batch)
        return leases and 0 < cost <= terms.limit.capacity and key not in terms.leases

    def sent_us(self) -> int:
        """When a call was sent; 0 where the parent's reply tells the time."""
        return 0 if self.parent_time else self.cache.now_us()

    def observe(
        self,
        terms: LeaseTerms,
        lease: Lease | None,
        key: str,
        cost: int,
        sent_us: int,
        decision: Decision,
        generation: int = 0,
        used: int = 0,
    ) -> Decision:
        """Learns from the parent's decision about a key, and adds what is held to its answer."""
        now_us = self.refill.record_reply(decision, sent_us)
        if lease is None and not (self.cache.exact and (decision.allowed or decision.retry_us < 0)):
            lease = self.cache.add(terms, key, cost, now_us)
        if lease is None:
            return decision
        lease.exclude_wait(sent_us or now_us, now_us, used)
        lease.reset_us = now_us + decision.reset_us
        if decision.allowed:
            lease.refusals = 0
        elif decision.retry_us > 0 and generation == lease.generation:
            self.refill.refuse(lease, cost, cost, now_us, decision)
        return add_held(decision, lease.held(now_us))

    # Several limits --------------------------------------------------------------------------------------------

    def decide_several(self, claims: list[Claim], commit: bool) -> Plan[Decision]:
        """The parent decides about the cost of all claims together, less what is held for each."""
        leases, held = [self.cache.find(claim.limit, claim.key) for claim in claims], []
        for claim, lease in zip(claims, leases, strict=True):
            leased = 0 < claim.cost <= claim.limit.limit.capacity
            held.append(self.cache.withdraw(lease, claim.cost, commit) if leased else 0)
        rest, decision = claims, None
        if any(held):
            rest = [Claim(claim.limit, claim.key, claim.cost - part) for claim, part in zip(claims, held, strict=True)]
        try:
            decision = yield from self.ask_parent(rest, 0, commit)
        finally:
            if commit and (decision is None or not decision.allowed):
                for lease, part in zip(leases, held, strict=True):
                    self.cache.put_back(lease, MAX_WAIT, part)
        if commit:
            self.notice_demand(claims, decision)
        if not any(held) or (commit and decision.allowed):
            return decision
        return Decisions.join([add_held(one, part) for one, part in zip(decision.decisions, held, strict=True)])

    def notice_demand(self, claims: Sequence[Claim], decision: Decision) -> None:
        """Gives keys that the parent decided a lease, keeps what it refused, and has batches fetched for those in demand."""
        cache, now_us = self.cache, self.cache.now_us()
        for claim, part in zip(claims, decision.decisions, strict=True):
            terms: LeaseTerms = cache.terms_of(claim.limit)
            if not terms.leasable or claim.cost <= 0:
                continue
            lease: Lease | None = terms.leases.get(claim.key) or cache.add(terms, claim.key, claim.cost, now_us)
            if lease is None:
                continue
            if not part.allowed and part.retry_us > 0:
                self.refill.refuse(lease, claim.cost, claim.cost, now_us, part)
            elif lease.queued or lease.pending is not None or not lease.has_room():
                continue
            elif lease.next_batch(now_us, 1, cache.round_trip_us) > 1:
                cache.notice_low(lease)

    # Giving back -----------------------------------------------------------------------------------------------

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        run(self.plan_give_back(list(claims), charged_at, source))

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        await arun(self.plan_give_back(list(claims), charged_at, source))

    def plan_give_back(self, claims: list[Claim], charged_at: int, source: str) -> Plan[None]:
        """Gives back to the batch that was charged while it may be spent, otherwise to the parent."""
        self.touch(claims)
        cache, source = self.cache, STORE if source == "lease" else source
        if cache.exact:
            yield Call(self.parent, "give_back", (self.parent_claims(claims), charged_at, source))
            return
        for claim in claims:
            lease, cost = cache.find(claim.limit, claim.key), claim.cost
            if cost < 0:
                cost += cache.withdraw(lease, -cost)
            elif charged_at >= 0:
                cost -= cache.put_back(lease, charged_at - cache.clock_offset_us, cost)
            if cost:
                rest = claim if cost == claim.cost else Claim(claim.limit, claim.key, cost, claim.charged)
                yield Call(self.parent, "give_back", (self.parent_claims([rest]), charged_at, source))

    @property
    def can_rebook(self) -> bool:
        """Where the parent can; not in strict mode, where the parent's limits are derated."""
        return self.derated is None and self.parent.can_rebook

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        for booking in bookings:
            self.touch(booking.claims)
        return self.parent.rebook(bookings)

    async def arebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        for booking in bookings:
            self.touch(booking.claims)
        return await self.parent.arebook(bookings)

    # State -----------------------------------------------------------------------------------------------------

    def touch(self, claims: Sequence[Claim], drop: bool = False) -> None:
        """Forgets what is known to be refused for keys that are changed at the parent; with `drop` also what is held."""
        only_claims(claims)
        for claim in claims:
            lease = self.cache.find(claim.limit, claim.key)
            if lease is not None:
                lease.drop() if drop else lease.forget_refusal()

    def parent_claims(self, claims: Sequence[Claim]) -> list[Claim]:
        """The claims on the limits that are charged at the parent."""
        if self.derated is None:
            return list(claims)
        found = []
        for claim in claims:
            terms: LeaseTerms = self.cache.terms_of(claim.limit)
            found.append(Claim(terms.parent_limit, claim.key, claim.cost, claim.charged))
            copy_states(claim, found[-1])
        return found

    def register(self, limit: NamedLimit) -> None:
        self.parent.register(self.cache.terms_of(limit).parent_limit)

    def can_reserve(self, limit: NamedLimit) -> bool:
        return self.parent.can_reserve(limit)

    def answers_within(self, budget_us: int) -> bool:
        return self.parent.answers_within(max(1, budget_us // 3))  # a call may ask for a batch, a part of it, and its own cost

    def reset(self, claims: Sequence[Claim]) -> None:
        self.touch(claims, drop=True)
        self.parent.reset(self.parent_claims(claims))

    async def areset(self, claims: Sequence[Claim]) -> None:
        self.touch(claims, drop=True)
        await self.parent.areset(self.parent_claims(claims))

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, object]]:
        return self.parent.items(self.cache.terms_of(limit).parent_limit)

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, object]]) -> None:
        self.parent.load(self.drop_leases(limit), items)

    async def aload(self, limit: NamedLimit, items: Iterable[tuple[str, object]]) -> None:
        await self.parent.aload(self.drop_leases(limit), items)

    def drop_leases(self, limit: NamedLimit) -> NamedLimit:
        """Drops what is held of a limit; returns the parent's limit."""
        terms: LeaseTerms = self.cache.terms_of(limit)
        for lease in list(terms.leases.values()):
            lease.drop()
        return terms.parent_limit

    # Maintenance -----------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """One round of the background: gives back what expired, fetches what runs low, forgets what is idle."""
        run(self.maintenance.round())

    async def atend(self) -> None:
        await arun(self.maintenance.round())

    def return_all(self) -> None:
        """Gives everything that is held back."""
        run(self.refill.give_back(self.cache.take_everything()))

    async def areturn_all(self) -> None:
        await arun(self.refill.give_back(self.cache.take_everything()))

    def close(self) -> None:
        """Ends the background, gives everything that is held back, and closes the parent."""
        run(self.plan_close())

    async def aclose(self) -> None:
        await arun(self.plan_close())

    def plan_close(self) -> Plan[None]:
        if self.background is not None:
            self.background.close()
        try:
            yield from self.refill.give_back(self.cache.take_everything())
        except StoreError as error:
            log.warning("leases of %r could not be given back: %s", self.parent, error)
        yield Call(self.parent, "close")


def add_held(decision: Decision, held: int) -> Decision:
    """The parent's decision with what is held added to what remains."""
    if not held:
        return decision
    times = (decision.retry_us, decision.reset_us, decision.wait_us, decision.start_us)
    remaining = decision.remaining + held
    return Decision(decision.allowed, decision.limit, remaining, *times, decision.name, decision.source)


def copy_states(source: Claim, target: Claim) -> None:
    """Copies the states before and after a charge, for an exact undo."""
    states = source.remembered()
    if states is not None:
        target.remember(*states)
