"""LeaseCache: decides hits in RAM, from the tokens and refusals in the leases of this node, by limit and key.

Atomic by construction, as in `memory.py`: compiled, no Python runs between reading a lease and spending from it; plain, a lock
excludes other threads. `remaining` counts what this node holds; the first answer after a fetch adds what the parent had left.

A lease is checked when a batch of it ends, and every half of a lease life: what expired or was not used that long is put aside
for the parent; after a life without demand a key is forgotten. Each new key makes two checks, so a flood of keys needs no thread.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.monotonic import monotonic_us
else:
    from ...clock import monotonic_us
    from ...decision import fresh

    def blank_leased(cache: LeaseCache, terms: LeaseTerms) -> Decision:
        """A Decision to be filled in."""
        decision: Decision = fresh(terms.name)
        decision.source = "lease"
        return decision


from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.constants import TOP, UNKNOWN
from ...clock import SYSTEM
from ...decision import STORE, Decision, Decisions
from .key_lease import Lease, LeaseTerms, Unspent
from .strict_mode_derating import DeratedLimits

_order = itertools.count()


@cython.cclass
class LeaseCache:
    """The leases of a node by limit and key.

    `read_clock` gives the time by which leases begin and end, in µs; None: this machine's monotonic clock. `derated` gives the
    limit that is charged at the parent in the place of a limit; None: the limit itself.
    """

    @cython.annotation_typing(False)
    def __init__(
        self, fixed_batch: int, life_us: int, max_keys: int, read_clock: Callable[[], int] | None, derated: DeratedLimits | None
    ) -> None:
        self.fixed_batch = fixed_batch
        self.exact = fixed_batch == 1  # every hit asks the parent; only refusals are kept
        self.life_us = life_us
        self.max_keys = max_keys
        self.read_clock = read_clock
        self.derated = derated
        self.system_offset_us = SYSTEM.offset_us
        self.round_trip_us = 1000
        self.clock_offset_us = 0  # the parent's clock − ours
        self.generation = 0  # of keys without a lease: how often any key was changed at the parent
        self.wake: Callable[[], None] | None = None  # starts the background
        self.terms: dict[NamedLimit, LeaseTerms] = {}
        self.rates: dict[tuple[str, str, str], list[LeaseTerms]] = {}  # the terms of every rate of a name

    def clear(self) -> None:
        """Holds nothing and renews the lock: at first, and in the child of a fork, whose leases are its parent's."""
        self.lock = threading.RLock()
        for terms in self.terms.values():
            terms.leases.clear()
        self.last: LeaseTerms | None = None
        self.last_named: NamedLimit | None = None
        self.keys = 0
        self.due: deque[Lease] = deque()
        self.checks: list[tuple[int, int, Lease]] = []
        self.unspent: deque[Unspent] = deque(maxlen=self.max_keys)

    @cython.ccall
    def now_us(self) -> cython.longlong:
        """The time by which leases begin and end."""
        if self.read_clock is None:
            return monotonic_us() + self.system_offset_us
        return self.read_clock()

    @cython.cfunc
    def terms_of(self, named: NamedLimit) -> LeaseTerms:
        """How a limit is leased; the last one looked up is cached."""
        found: LeaseTerms | None = self.terms.get(named)
        if found is None:
            with self.lock:
                found = self.terms.get(named)
                if found is None:
                    parent_limit = named if self.derated is None else self.derated(named)
                    found = LeaseTerms(named, parent_limit, self.fixed_batch, self.life_us)
                    self.terms[named] = found
                    self.add_rate(found)
        self.last_named = None  # never one limit with the terms of another
        self.last = found
        self.last_named = named
        return found

    def add_rate(self, terms: LeaseTerms) -> None:
        """Adds the terms of a rate to those of its name. With the second one, what is known to be refused may change."""
        rates = self.rates.setdefault(terms.named.identity, [])
        for other in rates if len(rates) == 1 else ():
            other.has_siblings = True
            for lease in list(other.leases.values()):
                lease.forget_refusal()
        terms.has_siblings = bool(rates)
        rates.append(terms)

    def register(self, named: NamedLimit) -> LeaseTerms:
        """The terms of a limit, with one user more."""
        with self.lock:
            terms: LeaseTerms = self.terms_of(named)
            terms.users = max(terms.users, 0) + 1
            return terms

    def unregister(self, named: NamedLimit) -> LeaseTerms:
        """The terms of a limit, with one user less. Without users they go, once no lease is left."""
        with self.lock:
            terms: LeaseTerms = self.terms_of(named)
            terms.users = max(terms.users - 1, 0)
            self.remove_unused(terms)
            return terms

    def remove_unused(self, terms: LeaseTerms) -> None:
        if terms.users == 0 and not terms.leases and self.terms.get(terms.named) is terms:
            del self.terms[terms.named]
            rates = self.rates[terms.named.identity]
            rates.remove(terms)
            if not rates:
                del self.rates[terms.named.identity]
            self.last_named = None

    @cython.cfunc
    def answer_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision | None:
        """The answer for one limit, when the lease of the key gives it; otherwise None."""
        if cython.compiled:
            return self.spend_or_refuse(named, key, cost, max_wait_us, commit)
        with self.lock:
            return self.spend_or_refuse(named, key, cost, max_wait_us, commit)

    @cython.cfunc
    def spend_or_refuse(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision | None:
        terms: LeaseTerms | None = self.last if self.last_named is named else None
        if terms is None:
            terms = self.terms_of(named)
        found = terms.leases.get(key)
        if found is None or cost <= 0:
            return None
        lease: Lease = found
        now_us: cython.longlong = self.now_us()
        if not commit:
            if lease.held(now_us) >= cost:
                return self.decision_of(terms, lease, now_us, 0, 0)
        else:
            lease.used += cost
            lease.last_used_us = now_us
            if lease.take(now_us, cost):
                if lease.left <= lease.low_mark and not lease.queued and lease.next_left == 0:
                    self.notice_low(lease)
                return self.decision_of(terms, lease, now_us, 0, 0)
        until_us: cython.longlong = 0 if max_wait_us > 0 else lease.refused_until(now_us, cost, False)
        if until_us == 0 or ((commit or self.exact) and not self.trusts_refusal(lease, now_us)):
            return None
        return self.decision_of(terms, lease, now_us, until_us, lease.refused_left)

    @cython.cfunc
    def trusts_refusal(self, lease: Lease, now_us: cython.longlong) -> cython.bint:
        """Whether a known refusal is answered. When it is due to be rechecked, or in two round trips a batch begins that is to be
        followed from its first call on, the background asks the parent meanwhile."""
        if now_us < lease.recheck_us and lease.refused_until_us:
            return True
        if lease.refused_until_us == 0 and (lease.left > lease.low_mark or now_us < lease.start_us - 2 * self.round_trip_us):
            return True
        if not self.exact and not lease.queued and lease.next_left == 0:
            self.notice_low(lease)
        return not self.exact

    @cython.cfunc
    def decision_of(
        self, terms: LeaseTerms, lease: Lease, now_us: cython.longlong, until_us: cython.longlong, more: cython.longlong
    ) -> Decision:
        """The answer of one lease: allowed, or refused until `until_us`; `more` is what remains besides what is held."""
        decision: Decision = blank_leased(self, terms)
        allowed: cython.bint = until_us == 0
        decision.allowed = allowed
        decision.limit = terms.limit.capacity
        decision.remaining = lease.held(now_us) + more
        decision.retry_us = 0 if allowed else until_us - now_us
        decision.wait_us = 0
        decision.reset_us = lease.reset_us - now_us if lease.reset_us > now_us else 0
        decision.start_us = lease.charged_at if allowed and terms.dated else now_us + self.clock_offset_us
        if not cython.compiled:
            decision.__class__ = Decision
        return decision

    @cython.cfunc
    def answer_all(self, claims: list, may_wait: cython.bint, commit: cython.bint) -> Decision | None:  # type: ignore[type-arg]
        """The answer for several limits, when all of them hold enough, or one is known to refuse (a call that may not wait) and
        none may refuse for longer, as far as is known; otherwise None."""
        i: cython.Py_ssize_t
        claim: Claim
        lease: Lease
        leases: list = []  # type: ignore[type-arg]
        for claim in claims:
            leases.append(self.terms_of(claim.named).leases.get(claim.key))
            if leases[-1] is None or claim.cost <= 0:
                return None
        now_us: cython.longlong = self.now_us()
        short: cython.bint = False
        refused: cython.bint = False
        unknown: cython.bint = False  # the parent may refuse one of these costs for longer, or never allow it
        for i in range(len(claims)):  # from here to the end of taking, no Python runs
            claim = claims[i]
            lease = leases[i]
            held: cython.longlong = lease.most_at_once(now_us)
            if held < claim.cost:
                short = True
                denies: cython.bint = lease.refused_until(now_us, claim.cost, False) > 0
                refused = refused or denies
                unknown = unknown or not (denies or held + lease.parent_left >= claim.cost)
            unknown = unknown or claim.cost > lease.terms.limit.capacity
        if short and not commit:
            return None
        unknown = unknown or (short and not refused)
        for i in range(len(claims)):
            claim = claims[i]
            lease = leases[i]
            if commit:
                lease.used += claim.cost
                lease.last_used_us = now_us
                if not short and not unknown:
                    lease.take(now_us, claim.cost)
        if unknown or (short and may_wait):
            return None
        parts = []
        for i in range(len(claims)):
            claim = claims[i]
            lease = leases[i]
            until_us: cython.longlong = 0
            if short and lease.most_at_once(now_us) < claim.cost:
                until_us = lease.refused_until(now_us, claim.cost, False)
            if until_us:
                self.trusts_refusal(lease, now_us)
            elif commit and not short and lease.left <= lease.low_mark and not lease.queued and lease.next_left == 0:
                self.notice_low(lease)
            parts.append(self.decision_of(lease.terms, lease, now_us, until_us, 0))
        return Decisions.join(parts)

    def answer(self, claims: list[Claim], max_wait_us: int, commit: bool) -> Decision | None:
        """The answer for the claims of one decision, when leases give it; otherwise None."""
        claim: Claim = claims[0]
        decision: Decision | None = None
        if len(claims) == 1:
            decision = self.answer_one(claim.named, claim.key, claim.cost, max_wait_us, commit)
        elif not self.exact:
            with self.lock:
                decision = self.answer_all(claims, max_wait_us > 0, commit)
        if decision is not None and commit and decision.allowed:
            for claim in claims:
                lease: Lease | None = self.find(claim.named, claim.key)
                claim.reset_id = UNKNOWN if lease is None else lease.reset_id
        return decision

    def answer_after_fetch(self, lease: Lease, claim: Claim) -> Decision | None:
        """The answer to a call that fetched a batch or waited for one."""
        with self.lock:
            now_us: cython.longlong = self.now_us()
            cost: cython.longlong = claim.cost
            if lease.take(now_us, cost):
                claim.reset_id = lease.reset_id
                return self.decision_of(lease.terms, lease, now_us, 0, lease.parent_left)
            until_us: cython.longlong = lease.refused_until(now_us, cost, True)
            return self.decision_of(lease.terms, lease, now_us, until_us, lease.refused_left) if until_us else None

    def answer_ahead(self, claims: list[Claim], max_wait_us: int) -> Decision | None:
        """The answer to a call that may wait, at the first time at which one batch of each lease holds enough; None: there is
        none. Given back, the batches would be lost to the nodes that have reserved behind them."""
        found = [lease for claim in claims if (lease := self.find(claim.named, claim.key)) is not None]
        if self.exact or len(found) < len(claims) or min([claim.cost for claim in claims]) <= 0:
            return None
        parts = []
        with self.lock:
            now_us: cython.longlong = self.now_us()
            firsts = [lease.earliest(now_us, claim.cost) for lease, claim in zip(found, claims, strict=True)]
            start_us = max(firsts)
            late = start_us - now_us > max_wait_us
            ends = max([lease.earliest(start_us, claim.cost) for lease, claim in zip(found, claims, strict=True)]) > start_us
            if start_us == TOP or (ends and not late):  # a batch ends before the others begin
                return None
            for claim, lease, first_us in zip(claims, found, firsts, strict=True):
                charged_at = -1 if late else lease.take_at(start_us, claim.cost)
                until_us = first_us - max_wait_us if first_us - now_us > max_wait_us else 0
                part: Decision = self.decision_of(lease.terms, lease, now_us, until_us, 0)
                if not late:
                    claim.reset_id = lease.reset_id
                    times = (0, part.reset_us, start_us - now_us, charged_at)
                    part = Decision(True, part.limit, part.remaining, *times, part.name, part.source)
                parts.append(part)
        one = Decisions.join(parts)
        if late or len(parts) == 1:
            return one
        times = (0, one.reset_us, one.wait_us, start_us + self.clock_offset_us)  # the parts have the times of their charges
        return Decisions(parts, True, one.limit, one.remaining, *times, one.name, one.source)

    def notice_low(self, lease: Lease) -> None:
        """Has the background fetch the next batch of a lease."""
        lease.queued = True
        self.due.append(lease)
        if self.wake is not None:
            self.wake()

    def find(self, named: NamedLimit, key: str) -> Lease | None:
        return self.terms_of(named).leases.get(key)

    def generation_of(self, lease: Lease | None) -> int:
        """Until when a refusal by the parent is known to be out of date: when this has changed before it arrives."""
        return int(self.generation if lease is None else lease.generation)

    def add(self, terms: LeaseTerms, key: str, cost: int, now_us: int) -> Lease | None:
        """The lease of a key, new and empty if it had none; None when there are too many keys."""
        self.check(now_us, 2)
        if self.keys >= self.max_keys:
            return None
        with self.lock:
            lease: Lease | None = terms.leases.get(key)
            if lease is None:
                lease = terms.leases[key] = Lease(terms, key, now_us)
                lease.used = cost
                lease.generation = self.generation
                self.keys += 1
                self.check_at(lease, now_us + max(1, self.life_us // 2))
            return lease

    def held(self, lease: Lease | None) -> int:
        """How much of a lease can be spent now."""
        if lease is None:
            return 0
        with self.lock:
            return lease.held(self.now_us())

    def withdraw(self, lease: Lease | None, cost: int) -> list[Unspent]:
        """Takes what a lease holds, up to `cost`."""
        if lease is None:
            return []
        with self.lock:
            return lease.withdraw(self.now_us(), cost)

    def restore(self, parts: Iterable[Unspent]) -> None:
        """Returns what was withdrawn to its batch; what may no longer be spent is put aside for the parent."""
        with self.lock:
            for part in parts:
                rest = part.amount
                if part.reset_id == part.lease.reset_id:
                    rest -= part.lease.restore(self.now_us(), part.charged_at, rest)
                if rest:
                    self.unspent.append(part._replace(amount=rest))

    def put_back(self, lease: Lease | None, charged_at: int, cost: int) -> int:
        """Returns a caller's charge to the batch it came from if that may still be spent; how much was taken back."""
        if lease is None or charged_at < 0:
            return 0
        with self.lock:
            return lease.put_back(self.now_us(), charged_at - self.clock_offset_us, charged_at, cost)

    def exchange(self, lease: Lease | None, charged_at: int, cost: int) -> int:
        """The start that is given back to the parent in the place of this one."""
        start_us = charged_at - self.clock_offset_us
        if lease is None or cost <= 0 or start_us <= self.now_us():
            return charged_at
        with self.lock:
            return lease.exchange(start_us, charged_at, cost)

    def undo(self, charges: Iterable[tuple[list[Claim], Decision]]) -> None:
        """Undoes answers that leases gave: into the batch, or put aside for the parent."""
        for claims, decision in charges:
            for claim, part in zip(claims, decision.decisions, strict=True):
                lease = self.find(claim.named, claim.key)
                rest = claim.cost - self.put_back(lease, part.start_us, claim.cost)
                if rest and lease is not None:
                    self.unspent.append(Unspent(lease, rest, rest, part.start_us, STORE, claim.reset_id))

    def drop(self, named: NamedLimit, keys: Collection[str]) -> None:
        """Forgets what every rate of the name holds or put aside for these keys: their charges are gone."""
        with self.lock:
            rates = self.rates_of(named)
            for lease in [rate.leases.get(key) for rate in rates for key in keys]:
                if lease is not None:
                    lease.drop()
            self.take_put_aside(lambda lease: lease.terms in rates and lease.key in keys)

    def rates_of(self, named: NamedLimit) -> list[LeaseTerms]:
        """The terms of every rate of the name that is known."""
        return list(self.rates.get(named.identity, ()))

    def forget_refusals(self, named: NamedLimit, key: str, others: bool = False, changed: bool = True) -> None:
        """Forgets what is known to be refused for a key that was changed at the parent: by every rate of the name, or by the
        others than this one. `changed` as in `Lease.forget_refusal`."""
        terms: LeaseTerms
        self.generation += int(changed and not others)
        for terms in self.rates_of(named):
            lease: Lease | None = terms.leases.get(key)
            if lease is not None and not (others and terms.named == named):
                lease.forget_refusal(changed)

    def take_all(self, leases: Iterable[Lease | None], latest_us: int = TOP) -> list[Unspent]:
        """Takes out everything that these leases hold and that begins by `latest_us`."""
        with self.lock:
            return [part for lease in leases if lease is not None for part in lease.take_unspent(0, True, latest_us)]

    def take_everything(self) -> list[Unspent]:
        """Takes out everything that is held, with what was put aside. Every lease that holds something is due to be checked."""
        return self.take_put_aside() + self.take_all(dict.fromkeys(lease for _, _, lease in list(self.checks)))

    def take_put_aside(self, of: Callable[[Lease], bool] | None = None) -> list[Unspent]:
        """Takes what was put aside; with `of` only that of some leases."""
        parts: list[Unspent] = []
        for _ in range(len(self.unspent)):
            with suppress(IndexError):  # another thread takes them too
                parts.append(self.unspent.popleft())
        if of is not None:
            self.unspent.extend(part for part in parts if not of(part.lease))
            parts = [part for part in parts if of(part.lease)]
        return parts

    def take_due(self) -> Lease | None:
        """The next lease that the background is to fetch for."""
        with suppress(IndexError):  # another thread was quicker
            lease: Lease = self.due.popleft()
            lease.queued = False
            return lease
        return None

    def next_check_us(self) -> int | None:
        """When the next lease is to be checked; None: there is none. A slice: another thread may take the last meanwhile."""
        first = self.checks[:1]
        return first[0][0] if first else None

    def check_at(self, lease: Lease, at_us: int) -> None:
        """Schedules a check of a lease, at this time or before."""
        if not lease.check_us or at_us < lease.check_us:
            lease.check_us = at_us
            heapq.heappush(self.checks, (at_us, next(_order), lease))

    def check(self, now_us: int, budget: int) -> None:
        """Makes scheduled checks, at most so many."""
        while budget > 0:
            budget -= 1
            with self.lock:
                next_us = self.next_check_us()
                if next_us is None or next_us > now_us:
                    return
                at_us, _, lease = heapq.heappop(self.checks)
            if at_us == lease.check_us:  # otherwise it was checked before
                lease.check_us = 0
                self.check_lease(lease, now_us)

    def check_lease(self, lease: Lease, now_us: int) -> None:
        """Puts aside what may no longer be spent, forgets the key if it is idle."""
        idle_us = now_us - lease.last_used_us
        self.put_aside(lease, now_us, lease.is_idle(now_us))
        if (
            idle_us >= self.life_us
            and lease.recheck_us <= now_us
            and not lease.left + lease.next_left
            and lease.fetching() is None
        ):
            self.forget(lease)
            return
        with self.lock:
            lease.promote_if_empty()
        next_us = now_us + max(1, self.life_us // 2)
        for end_us in (lease.end_us if lease.left else 0, lease.next_end_us):
            next_us = min(next_us, end_us) if end_us > now_us else next_us
        self.check_at(lease, next_us)

    def put_aside(self, lease: Lease, now_us: int, all_of_it: bool = False) -> None:
        """Puts aside for the parent what may no longer be spent, or everything."""
        self.unspent.extend(self.take_expired(lease, now_us, all_of_it))

    def take_expired(self, lease: Lease, now_us: int, all_of_it: bool = False) -> list[Unspent]:
        """Takes out what may no longer be spent, or everything; the next batch then follows demand."""
        with self.lock:
            parts = lease.take_unspent(now_us, all_of_it)
        if parts:
            lease.oversized = True
        return parts

    def keep(self, lease: Lease) -> bool:
        """Puts a lease that was forgotten meanwhile in its place again; False when there is another."""
        terms: LeaseTerms = lease.terms
        if lease.key not in terms.leases:
            terms.leases[lease.key] = lease
            self.keys += 1
        return terms.leases[lease.key] is lease

    def forget(self, lease: Lease) -> None:
        with self.lock:
            if lease.terms.leases.get(lease.key) is lease:
                del lease.terms.leases[lease.key]
                self.keys -= 1
                self.remove_unused(lease.terms)
