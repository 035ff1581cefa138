"""LeasedStore: fetches batches of tokens from a parent store, serves requests from RAM, fetches the next batch in time.

A token is charged at the parent when it is leased and spent here up to one `life` later. So in any window a node can spend what
it held when the window began, besides what is charged within it (a fixed window's lease ends with its window: 0 at no price):

    plain    over-admission ≤ min(nodes × held, rate × life)         held: two batches; with a fixed size of them nodes × held
    strict   0, and the parent grants count per (W + life) instead of per W: a price of life / (W + life) of the rate

Refusals are leased too: "nothing before t" is answered here until t. A crash loses what was held, never more. Rejected: reporting
use afterwards (the bound would then be the demand of an interval, whatever the limit).

`LeaseCache` answers from RAM, `Refill` moves batches, `Maintenance` does so in the background. This file decides what RAM can't
answer: the parent decides a key without demand; for a key in demand a batch is fetched; what may wait queues at the parent,
after everything held for it was given back, so that nothing overtakes it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.constants import MAX_WAIT, UNKNOWN, WAS_RESET
from ...algorithms.limit import Limit as AnyLimit
from ...clock import SYSTEM, Clock, SystemClock
from ...decision import STORE, Decision, Decisions
from ...errors import ConfigurationError, StoreError
from ...fork import reset_after_fork
from ...rate import Duration, duration_us
from ..contract import Booking, Claims, KeyState, Requests, Store, bounded_wait_us, charges_of, checked, only_claims
from ..sans_io import Call, Left, Pause, Plan, arun, finish, left_of, run
from ..wrapper_store import WrapperStore, copy_states
from .key_lease import Lease, LeaseTerms, Unspent, add_held, amount_of, less
from .lease_cache import LeaseCache
from .lease_maintenance import Background, Maintenance, ThreadFactory
from .lease_refill import Refill, Want
from .strict_mode_derating import DeratedLimits

log = logging.getLogger("limitkeeper")
#: How long a hand-over waits for a round of the background; what a longer one moves is lost.
RELEASE_S = 1.0
Seen = tuple[int, int]  # a lease's generation, and what it had counted as used, when a call was sent


@cython.cclass
class LeasedStore(WrapperStore):
    """Fetches batches of units from `store` and spends them in RAM.

    `lease` is the size of a batch (of a bucket in strict mode, the largest); None follows the demand. `life` is how long a batch
    may be spent. With `strict`, no window exceeds the limit, at the price of a lower rate (`prices`). `max_keys` bounds the keys
    with a lease. `clock` times the leases (default: this machine's, or the parent's if moved by hand; then there is no
    background, call `tend`). `make_thread` makes its thread.
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
        super().__init__(store)
        self.parent = store
        self.budget_us = 0
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
        return self.cache.held(self.cache.find(named, key))

    def over_admission(self, limit: AnyLimit, nodes: int) -> float:
        """The most that so many nodes can admit in a window beyond the limit's own bound."""
        named = NamedLimit("", "", limit)
        terms: LeaseTerms = LeaseTerms(named, named, self.cache.fixed_batch, self.cache.life_us)
        if self.derated is not None or self.cache.exact or terms.windowed or not terms.leasable:
            return 0.0
        held = nodes * 2 * terms.largest_batch(self.cache.round_trip_us, terms.tokens_per_us)
        if terms.continuous and terms.fixed_batch:  # whole batches that are held in turn, and returned while the bucket refills
            return float(held)
        return float(min(held, terms.tokens_per_us * terms.life_us if terms.continuous else limit.capacity))

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        decision: Decision | None = self.cache.answer_one(named, key, cost, max_wait_us, commit)
        if decision is None:
            terms: LeaseTerms = self.cache.terms_of(named)
            leases = terms.leasable and (self.cache.exact or not terms.fixed_batch)
            if max_wait_us == 0 and commit and leases and 0 < cost <= terms.limit.capacity and key not in terms.leases:
                sent_us, seen = self.sent_us(), (self.cache.generation, 0)
                decision = self.parent.decide_one(terms.parent_limit, key, cost, 0, True)
                return self.observe(terms, None, key, cost, sent_us, decision, seen)
            decision = self.run_plan(self.plan([Claim(named, key, cost)], max_wait_us, commit))
        return decision

    @cython.ccall
    def hit_nowait(self, named: NamedLimit, key: str, cost: cython.longlong) -> Decision | None:
        return self.cache.answer_one(named, key, cost, 0, True)

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        return await self.adecide([Claim(named, key, cost)], max_wait_us, commit=commit)

    def plan_decide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision | Plan[Decision]:
        wait_us, asked = bounded_wait_us(max_wait_us), checked(claims)
        if remember or not_before_us:
            return self.pass_on(asked, wait_us, commit, remember, not_before_us)
        decision = self.cache.answer(asked, wait_us, commit)
        return self.plan(asked, wait_us, commit) if decision is None else decision

    async def _adecide(
        self, claims: Claims, max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision:
        """A task that is cancelled is so when the outcome is known, and has given it back: the batch of a fetch stays here. A
        charge that the claims show, of a call that may wait, is given back by the caller."""
        found = self.plan_decide(claims, max_wait_us, commit, remember, not_before_us)
        if isinstance(found, Decision):
            return found
        task = asyncio.ensure_future(self.arun_plan(found))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            decision = await finish(task)
            if commit and decision and not (max_wait_us != 0 and [claim for claim in claims if claim.charged_at() >= 0]):
                for charge in charges_of(claims, decision):
                    await finish(asyncio.ensure_future(self.agive_back(*charge)))
                for claim in claims:
                    claim.forget_charge()
            raise

    def plan(self, claims: list[Claim], wait_us: int, commit: bool) -> Plan[Decision]:
        """A decision that leases do not answer."""
        waits = wait_us > 0 and not [claim for claim in claims if not claim.limit.limit.reserves]
        if waits and commit:
            decision = self.cache.answer_ahead(claims, wait_us)
            if decision is None and len(claims) == 1:
                found = yield from self.decide_in_demand(claims[0])
                decision = found or self.cache.answer_ahead(claims, wait_us)  # what it fetched may begin later
            if decision is not None:
                return decision
        if waits or (self.cache.exact and len(claims) > 1):
            return (yield from self.pass_on(claims, wait_us, commit))
        if len(claims) > 1:
            return (yield from self.decide_several(claims, commit))
        return (yield from self.decide_now(claims[0], commit))

    def plan_decide_many(self, asks: Requests, max_wait_us: int | None) -> Plan[list[Decision]]:
        """Decides from leases where they answer; the parent decides the others in one call."""
        asked, wait_us, exact = [checked(claims) for claims in asks], bounded_wait_us(max_wait_us), self.cache.exact
        found = [None if exact else self.cache.answer(claims, wait_us, True) for claims in asked]
        missed = [i for i, decision in enumerate(found) if decision is None]
        if missed:
            for i in missed:
                self.touch(asked[i], changed=wait_us > 0)
            seen = [self.generations(asked[i]) for i in missed]
            rest, answers = [self.parent_claims(asked[i]) for i in missed], None
            try:
                answers = yield Call(self.parent, "decide_many", (rest, None if wait_us >= MAX_WAIT else wait_us))
            finally:
                if answers is None:  # no caller is answered: what leases gave goes back
                    self.cache.undo((asked[i], decision) for i, decision in enumerate(found) if decision)
            for i, sent, decision, generations in zip(missed, rest, answers, seen, strict=True):
                found[i] = decision
                copy_states(asked[i], sent)
                if not exact and not wait_us:
                    self.notice_demand(asked[i], decision, generations)
        return found  # type: ignore[return-value]

    def pass_on(
        self, claims: list[Claim], wait_us: int, commit: bool, remember: bool = False, not_before_us: int = 0
    ) -> Plan[Decision]:
        """The parent's own answer to the claims, after what is held for their keys was given back, but for batches that begin
        later: those would be lost to the nodes that have reserved behind them."""
        if commit and not self.cache.exact:  # which holds nothing
            held = self.cache.take_all([self.cache.find(claim.limit, claim.key) for claim in claims], self.cache.now_us())
            yield from self.refill.give_back(held)
        return (yield from self.ask_parent(claims, wait_us, commit, remember, not_before_us))

    def ask_parent(
        self, claims: list[Claim], wait_us: int, commit: bool, remember: bool = False, not_before_us: int = 0
    ) -> Plan[Decision]:
        if commit:
            self.touch(claims, changed=wait_us > 0)
        asked = self.parent_claims(claims)
        options = {"commit": commit, "remember": remember, "not_before_us": not_before_us}
        decision = yield Call(self.parent, "decide", (asked, None if wait_us >= MAX_WAIT else wait_us), options)
        copy_states(claims, asked)
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
            return None
        if lease.scarce or lease.refused_until(now_us, claim.cost, False):
            return None
        in_demand = lease.next_batch(now_us, claim.cost, self.cache.round_trip_us) > claim.cost
        return (yield from self.decide_now(claim, True)) if in_demand else None

    def decide_now(self, claim: Claim, commit: bool) -> Plan[Decision]:
        """One limit, without waiting: fetches a batch, waits for one that is being fetched, or asks the parent for the cost."""
        terms: LeaseTerms = self.cache.terms_of(claim.named)
        key, cost = claim.key, claim.cost
        if not terms.leasable or cost <= 0 or cost > terms.limit.capacity:
            return (yield from self.ask_parent([claim], 0, commit))
        lease: Lease | None = terms.leases.get(key)
        if not commit:
            held = self.cache.held(lease)
            decision = yield Call(self.parent, "decide_one", (terms.parent_limit, key, max(0, cost - held), 0, False))
            return add_held(decision, held)
        if lease is None and terms.fixed_batch and not self.cache.exact:
            lease = self.cache.add(terms, key, cost, self.cache.now_us())
        for _ in range(3):
            if lease is None or self.cache.exact:
                break
            pending = lease.fetching()  # read before what is held: a fetch that ends adds its batch first
            now_us = self.cache.now_us()
            size = lease.next_batch(now_us, cost, self.cache.round_trip_us)
            full = lease.left and lease.next_left  # two batches that begin later: a third has no place
            if full or lease.held(now_us) or not (pending is None or pending.can_be_awaited()):
                break
            if size <= cost and not lease.reserves_ahead(now_us, cost):
                break
            fetched = False
            if pending is None:
                fetched = yield from self.refill.fetch([Want(lease, cost, size)])
            elif (error := (yield pending)) is not None:
                raise error
            decision = self.cache.answer_after_fetch(lease, claim)
            if decision is not None:
                return decision
            if fetched:
                break
        return (yield from self.decide_rest(terms, lease, claim))

    def decide_rest(self, terms: LeaseTerms, lease: Lease | None, claim: Claim) -> Plan[Decision]:
        """The parent decides about the cost less what is held (of a log about all of it: a charge has one time)."""
        seen: Seen = (self.cache.generation_of(lease), 0 if lease is None else lease.used)
        sent_us, decision, parts = self.sent_us(), None, []
        try:
            parts += [] if terms.dated else self.cache.withdraw(lease, claim.cost)
            asked = self.parent_claims([less(claim, amount_of(parts))])
            decision = yield Call(self.parent, "decide", (asked, 0))
        finally:
            if not decision:
                self.cache.restore(parts)
        if (yield from (self.undo_late(parts, asked, decision) if decision else self.return_unusable([lease]))):
            return (yield from self.decide_rest(terms, lease, claim))
        claim.reset_id = (parts or asked)[0].reset_id
        return self.observe(terms, lease, claim.key, claim.cost, sent_us, decision, seen)

    def undo_late(self, parts: Sequence[Unspent], asked: Sequence[Claim], decision: Decision) -> Plan[bool]:
        """Undoes the rest of a charge that came after the window in which a part of it is held has ended. False: none has."""
        now_us = self.cache.now_us()
        if not [part for part in parts if part.lease.terms.windowed and part.end_us <= now_us]:
            return False
        self.cache.restore(parts)
        for charge in charges_of(asked, decision):
            yield Call(self.parent, "give_back", charge)
        return True

    def return_unusable(self, leases: Sequence[Lease | None]) -> Plan[bool]:
        """Gives back what a refused call could not spend: expired batches, and those of logs. False: nothing."""
        cache, now_us, parts = self.cache, self.cache.now_us(), []
        for lease in leases:
            if lease is not None:
                parts += cache.take_expired(lease, now_us, lease.terms.dated and bool(cache.held(lease)))
        yield from self.refill.give_back(parts)
        return bool(parts)

    def sent_us(self) -> int:
        """When a call was sent; 0 where the parent's reply tells the time."""
        return 0 if self.parent_time else self.cache.now_us()

    def observe(
        self, terms: LeaseTerms, lease: Lease | None, key: str, cost: int, sent_us: int, decision: Decision, seen: Seen
    ) -> Decision:
        """Learns from the parent's decision about a key, and adds what is held to its answer."""
        now_us = self.refill.record_reply(decision, sent_us)
        if decision.allowed and terms.has_siblings:
            self.cache.forget_refusals(terms.named, key, others=True)
        if lease is None and not (self.cache.exact and (decision.allowed or decision.retry_us < 0)):
            lease = self.cache.add(terms, key, cost, now_us)
        if lease is None:
            return decision
        lease.exclude_wait(sent_us or now_us, now_us, seen[1])
        lease.reset_us, lease.parent_left = now_us + decision.reset_us, decision.remaining
        if decision.allowed:
            lease.refusals = lease.refused_until_us = 0
        elif decision.retry_us > 0 and seen[0] == lease.generation:
            self.refill.refuse(lease, cost, cost, now_us, decision)
        return add_held(decision, lease.held(now_us))

    # Several limits --------------------------------------------------------------------------------------------

    def decide_several(self, claims: list[Claim], commit: bool) -> Plan[Decision]:
        """The parent decides about the cost of all claims together, less what is held for each."""
        cache, leases = self.cache, [self.cache.find(claim.limit, claim.key) for claim in claims]
        taken: list[list[Unspent]] = []
        held, decision = [], None
        seen = self.generations(claims)
        try:
            for claim, lease in zip(claims, leases, strict=True):
                usable = 0 < claim.cost <= claim.limit.limit.capacity and not (commit and lease and lease.terms.dated)
                taken.append(cache.withdraw(lease, claim.cost) if usable and commit else [])
                held.append(amount_of(taken[-1]) if commit or not usable else cache.held(lease))
            rest = claims
            if any(held):  # copies: of an interrupted call, the caller would give back what leases have taken back
                rest = [Claim(one.named, one.key, max(0, one.cost - amount)) for one, amount in zip(claims, held, strict=True)]
            decision = yield from self.ask_parent(rest, 0, commit)
        finally:
            if not decision:
                cache.restore(part for parts in taken for part in parts)
        parts = [part for some in taken for part in some]
        late = self.undo_late(parts, self.parent_claims(rest), decision) if decision else self.return_unusable(leases)
        if commit and (yield from late):
            return (yield from self.decide_several(claims, commit))
        if commit:
            for claim, asked, parts in zip(claims, rest, taken, strict=True):
                if parts:
                    claim.reset_id = parts[0].reset_id
                else:
                    copy_states([claim], [asked])
            self.notice_demand(claims, decision, seen)
        if commit and decision:
            return decision
        return Decisions.join([add_held(one, amount) for one, amount in zip(decision.decisions, held, strict=True)])

    def generations(self, claims: Sequence[Claim]) -> list[int]:
        """The generation of the lease of each claim."""
        cache = self.cache
        return [cache.generation_of(cache.find(claim.limit, claim.key)) for claim in claims]

    def notice_demand(self, claims: Sequence[Claim], decision: Decision, seen: Sequence[int]) -> None:
        """Gives keys that the parent decided a lease, keeps what it refused, unless the state was changed meanwhile (`seen` are
        the generations when the parent was asked), and has batches fetched for those in demand."""
        cache, now_us = self.cache, self.cache.now_us()
        for claim, part, generation in zip(claims, decision.decisions, seen, strict=True):
            terms: LeaseTerms = cache.terms_of(claim.limit)
            if not terms.leasable or claim.cost <= 0:
                continue
            lease: Lease | None = terms.leases.get(claim.key) or cache.add(terms, claim.key, claim.cost, now_us)
            if lease is None:
                continue
            lease.parent_left = part.remaining
            if not part.allowed and part.retry_us > 0:
                if generation == lease.generation:
                    self.refill.refuse(lease, claim.cost, claim.cost, now_us, part)
            elif lease.queued or lease.fetching() is not None or not lease.has_room():
                continue
            elif lease.next_batch(now_us, 1, cache.round_trip_us) > 1:
                cache.notice_low(lease)

    # Giving back -----------------------------------------------------------------------------------------------

    def plan_give_back(self, claims: Sequence[Claim], charged_at: int, source: str) -> Plan[bool]:
        """Gives back to the batch that was charged while it may be spent, otherwise to the parent."""
        only_claims(claims)
        try:
            return (yield from self.give_claims_back(claims, charged_at, STORE if source == "lease" else source))
        finally:  # once it is done: a refusal from before it may be known, or on its way
            self.touch(claims)

    def give_claims_back(self, claims: Sequence[Claim], charged_at: int, source: str) -> Plan[bool]:
        cache = self.cache
        if cache.exact:
            return (yield Call(self.parent, "give_back", (self.parent_claims(claims), charged_at, source)))  # type: ignore[no-any-return]
        found = not claims
        for claim in claims:
            lease, cost = cache.find(claim.limit, claim.key), claim.cost
            if lease is not None and claim.reset_id not in (UNKNOWN, lease.reset_id):
                lease = None  # the charge is from before a reset, or the batch is
            if charged_at < 0 and claim.limit.limit.logs:  # a refund takes the newest entries, which must not be of a batch
                rates = cache.rates_of(claim.limit)  # which have one log
                yield from self.refill.give_back(cache.take_all([rate.leases.get(claim.key) for rate in rates]))
            parts = cache.withdraw(lease, -cost) if cost < 0 else []
            cost += amount_of(parts) - (cache.put_back(lease, charged_at, cost) if cost > 0 else 0)
            if cost or lease is None:
                rest = claim if cost == claim.cost else Claim(claim.limit, claim.key, cost, claim.charged, claim.reset_id)
                start_us = cache.exchange(lease, charged_at, cost)
                try:
                    found |= yield Call(self.parent, "give_back", (self.parent_claims([rest]), start_us, source))
                except BaseException:
                    cache.restore(parts)
                    raise
            else:
                found = True
        return found

    @property
    def can_rebook(self) -> bool:
        """Where the parent can; not in strict mode, where the parent's limits are derated."""
        return self.derated is None and self.parent.can_rebook

    def plan_rebook(self, bookings: Sequence[Booking]) -> Plan[list[Decision | None]]:
        """The parent rebooks what is charged behind all batches that are held. Of the others, those that leave give back, also to
        these batches, and the rest keep their starts."""
        found: list[Decision | None] = [None] * len(bookings)
        order = [at for at, one in enumerate(bookings) if not self.has_batch_behind(one)]
        if any(not bookings[at].stays for at in order):
            try:
                decisions = yield Call(self.parent, "rebook", ([bookings[at] for at in order],))
            finally:
                for one in bookings:
                    self.touch(one.claims)
            for at, decision in zip(order, decisions, strict=True):
                found[at] = decision
        for at in sorted({*range(len(bookings))}.difference(order), reverse=True):
            claims, charged_at, _, stays, source = bookings[at]
            if not stays and not (yield from self.plan_give_back(claims, charged_at, source)):
                for claim in claims:
                    claim.reset_id = WAS_RESET
        return found

    def has_batch_behind(self, booking: Booking) -> bool:
        """Whether a batch is held for a key of a booking and was charged at its start or a later one."""
        leases = [self.cache.find(claim.limit, claim.key) for claim in booking.claims]
        return any(lease is not None and lease.charged_from(booking.charged_at) for lease in leases)

    # State -----------------------------------------------------------------------------------------------------

    def touch(self, claims: Sequence[Claim], drop: bool = False, changed: bool = True) -> None:
        """Forgets what is known to be refused for keys that are changed at the parent; with `drop` also what is held. Without
        `changed` a refusal that is on its way holds: it is from before a charge, not from before something was given back."""
        only_claims(claims)
        for claim in claims:
            if drop:
                self.cache.drop(claim.limit, (claim.key,))
            else:
                self.cache.forget_refusals(claim.limit, claim.key, changed=changed)

    def parent_claims(self, claims: Sequence[Claim]) -> list[Claim]:
        """The claims on the limits that are charged at the parent."""
        if self.derated is None:
            return list(claims)
        found = [Claim(self.cache.terms_of(one.limit).parent_limit, one.key, one.cost, one.charged) for one in claims]
        copy_states(found, claims)
        return found

    def register(self, limit: NamedLimit) -> None:
        self.parent.register(self.cache.register(limit).parent_limit)

    def unregister(self, limit: NamedLimit) -> None:
        self.parent.unregister(self.cache.unregister(limit).parent_limit)

    def answers_within(self, budget_us: int) -> bool:
        """A third of the budget for every call of the parent, of which none begins after two thirds."""
        self.budget_us = budget_us
        return self.parent.answers_within(max(1, budget_us // 3))

    def plan_left(self) -> Left | None:
        return left_of(0.667, self.budget_us, self.parent.clock if self.parent_time else self.sleeper)

    def plan_reset(self, claims: Sequence[Claim]) -> Plan[None]:
        self.touch(claims, drop=True)
        try:
            yield Call(self.parent, "reset", (self.parent_claims(claims),))
        finally:
            self.touch(claims)

    def forget(self, claims: Sequence[Claim]) -> None:
        self.touch(claims, drop=True)
        self.parent.forget(self.parent_claims(claims))

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        return self.parent.items(self.cache.terms_of(limit).parent_limit)

    def rate_items(self, limit: NamedLimit) -> Iterable[KeyState]:
        return self.parent.rate_items(self.cache.terms_of(limit).parent_limit)

    def plan_load(self, limit: NamedLimit, items: Iterable[KeyState]) -> Plan[None]:
        """Drops what every rate of the limit's name holds of these keys (each batch is charged to all), then loads into the
        parent."""
        pairs = list(items)
        self.cache.drop(limit, {key for key, _ in pairs})
        yield Call(self.parent, "load", (self.cache.terms_of(limit).parent_limit, pairs))

    def release(self, leaving: Callable[[str], bool]) -> None:
        run(self.plan_release(leaving), sleep=self.sleeper.sleep)
        self.parent.release(leaving)

    def plan_release(self, leaving: Callable[[str], bool]) -> Plan[None]:
        """Forgets the leases of some keys and gives back what they hold, with what the background is just moving."""
        cache, left_s = self.cache, RELEASE_S
        leases = [lease for terms in list(cache.terms.values()) for lease in list(terms.leases.values()) if leaving(lease.key)]
        for lease in leases:
            cache.forget(lease)
        while self.maintenance.rounds and left_s > 0:
            yield Pause(0.001)
            left_s -= 0.001
        put_aside = cache.take_put_aside(lambda lease: leaving(lease.key))
        yield from self.refill.give_back(put_aside + cache.take_all(leases))

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

    def plan_close(self) -> Plan[None]:
        """Ends the background, gives everything that is held back, and closes the parent."""
        self.maintenance.closed = True
        if self.background is not None:
            self.background.close()
        try:
            leases = [lease for terms in self.cache.terms.values() for lease in list(terms.leases.values())]
            for pending in dict.fromkeys([*self.maintenance.rounds, *(lease.fetching() for lease in leases)]):
                if pending is not None and pending.can_be_awaited():  # what it gives back comes before, what it fetches goes back
                    yield pending
            yield from self.refill.give_back(self.cache.take_everything())
        except StoreError as error:
            log.warning("leases of %r could not be given back: %s", self.parent, error)
        yield Call(self.parent, "close")
