"""LeaseCache: answers from RAM, by the batches that leases hold and the refusals they know; and when each lease is checked.

Atomic by construction, as in `memory.py`: compiled, no Python runs between reading a lease and spending from it; plain, a lock
excludes other threads. `remaining` counts what this node holds, because other nodes may have taken what the parent still had. The
first answer after a fetch adds what the parent had left then.

A lease is checked when a batch of it ends, and every half of a lease life: what may no longer be spent, or was not used that
long, is put aside for the parent; after a life without demand a key is forgotten. Each new key makes two checks, so that a flood
of keys needs no thread.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import PLAIN
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.leased.lease import Lease, LeaseTerms
else:
    from ...algorithms.claim import Claim, NamedLimit
    from ...algorithms.constants import PLAIN
    from ...clock import monotonic_us
    from ...decision import Decision, fresh
    from .lease import Lease, LeaseTerms

    def blank_leased(cache: LeaseCache, terms: LeaseTerms) -> Decision:
        """A Decision to be filled in."""
        decision: Decision = fresh(terms.name)
        decision.source = "lease"
        return decision


from ...clock import SYSTEM
from ...decision import Decisions
from .lease import Unspent

_order = itertools.count()


@cython.cclass
class LeaseCache:
    """The leases of a node by limit and key.

    `read_clock` gives the time by which leases begin and end, in µs; None: this machine's monotonic clock. `derated` gives the
    limit that is charged at the parent in the place of a limit; None: the limit itself.
    """

    @cython.annotation_typing(False)
    def __init__(
        self,
        fixed_batch: int,
        life_us: int,
        max_keys: int,
        read_clock: Callable[[], int] | None,
        derated: Callable[[NamedLimit], NamedLimit] | None,
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
        self.wake: Callable[[], None] | None = None  # starts the background
        self.terms: dict[NamedLimit, LeaseTerms] = {}

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
        self.last_named = None  # never one limit with the terms of another
        self.last = found
        self.last_named = named
        return found

    # Answers ---------------------------------------------------------------------------------------------------

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
                return self.decision_of(terms, lease, now_us, True, 0)
        else:
            lease.used += cost
            lease.last_used_us = now_us
            if lease.take(now_us, cost):
                if lease.left <= lease.low_mark and not lease.queued and lease.next_left == 0:
                    self.notice_low(lease)
                return self.decision_of(terms, lease, now_us, True, 0)
        if max_wait_us > 0 or not lease.refuses(now_us, cost) or not self.trusts_refusal(lease, now_us):
            return None
        return self.decision_of(terms, lease, now_us, False, lease.refused_left)

    @cython.cfunc
    def trusts_refusal(self, lease: Lease, now_us: cython.longlong) -> cython.bint:
        """Whether a known refusal is answered. When it is due to be rechecked, the background asks the parent meanwhile."""
        if now_us < lease.recheck_us:
            return True
        if not self.exact and not lease.queued:
            self.notice_low(lease)
        return not self.exact

    @cython.cfunc
    def decision_of(
        self, terms: LeaseTerms, lease: Lease, now_us: cython.longlong, allowed: cython.bint, more: cython.longlong
    ) -> Decision:
        """The answer of one lease; `more` is what remains besides what is held."""
        decision: Decision = blank_leased(self, terms)
        decision.allowed = allowed
        decision.limit = terms.limit.capacity
        decision.remaining = lease.held(now_us) + more
        decision.retry_us = 0 if allowed else lease.refused_until_us - now_us
        decision.wait_us = 0
        decision.reset_us = lease.reset_us - now_us if lease.reset_us > now_us else 0
        decision.start_us = now_us + self.clock_offset_us
        if PLAIN:
            decision.__class__ = Decision
        return decision

    @cython.cfunc
    def answer_all(self, claims: list, commit: cython.bint) -> Decision | None:  # type: ignore[type-arg]
        """The answer for several limits, when all of them hold enough or one is known to refuse; otherwise None."""
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
        for i in range(len(claims)):  # from here to the end of taking, no Python runs
            claim = claims[i]
            lease = leases[i]
            if lease.held(now_us) < claim.cost:
                short = True
                refused = refused or lease.refuses(now_us, claim.cost)
        if short and not commit:
            return None
        for i in range(len(claims)):
            claim = claims[i]
            lease = leases[i]
            if commit:
                lease.used += claim.cost
                lease.last_used_us = now_us
                if not short:
                    lease.take(now_us, claim.cost)
        if short and not refused:
            return None
        parts = []
        for i in range(len(claims)):
            claim = claims[i]
            lease = leases[i]
            denies: cython.bint = short and lease.held(now_us) < claim.cost and lease.refuses(now_us, claim.cost)
            if denies:
                self.trusts_refusal(lease, now_us)
            elif commit and not short and lease.left <= lease.low_mark and not lease.queued and lease.next_left == 0:
                self.notice_low(lease)
            parts.append(self.decision_of(lease.terms, lease, now_us, not denies, 0))
        return Decisions.join(parts)

    def answer(self, claims: list[Claim], max_wait_us: int, commit: bool) -> Decision | None:
        """The answer for the claims of one decision, when leases give it; otherwise None."""
        if len(claims) == 1:
            claim: Claim = claims[0]
            return self.answer_one(claim.named, claim.key, claim.cost, max_wait_us, commit)
        if max_wait_us or self.exact:
            return None
        with self.lock:
            return self.answer_all(claims, commit)

    def answer_after_fetch(self, lease: Lease, cost: int) -> Decision | None:
        """The answer to a call that fetched a batch or waited for one."""
        with self.lock:
            now_us: cython.longlong = self.now_us()
            if lease.take(now_us, cost):
                return self.decision_of(lease.terms, lease, now_us, True, lease.parent_left)
            if lease.refuses(now_us, cost):
                return self.decision_of(lease.terms, lease, now_us, False, lease.refused_left)
            return None

    def notice_low(self, lease: Lease) -> None:
        """Has the background fetch the next batch of a lease."""
        lease.queued = True
        self.due.append(lease)
        if self.wake is not None:
            self.wake()

    # Leases by key ---------------------------------------------------------------------------------------------

    def find(self, named: NamedLimit, key: str) -> Lease | None:
        return self.terms_of(named).leases.get(key)

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
                self.keys += 1
                self.check_at(lease, now_us + max(1, self.life_us // 2))
            return lease

    def withdraw(self, lease: Lease | None, cost: int, commit: bool = True) -> int:
        """Takes what a lease holds, up to `cost`, and returns how much; with `commit` False only looks."""
        if lease is None:
            return 0
        with self.lock:
            now_us: cython.longlong = self.now_us()
            return lease.withdraw(now_us, cost) if commit else min(lease.held(now_us), cost)

    def put_back(self, lease: Lease | None, spent_us: int, cost: int) -> int:
        """Returns what was spent at `spent_us` to its batch if that may still be spent; how much was taken back."""
        if lease is None or not cost:
            return 0
        with self.lock:
            return lease.put_back(self.now_us(), spent_us, cost)

    def take_all(self, leases: Iterable[Lease | None]) -> list[Unspent]:
        """Takes out everything that these leases hold."""
        with self.lock:
            return [part for lease in leases if lease is not None for part in lease.take_unspent(0, True)]

    def take_everything(self) -> list[Unspent]:
        """Takes out everything that is held, with what was put aside."""
        found = self.take_put_aside()
        for terms in list(self.terms.values()):
            found += self.take_all(list(terms.leases.values()))
        return found

    def take_put_aside(self) -> list[Unspent]:
        return [self.unspent.popleft() for _ in range(len(self.unspent))]

    # Checks ----------------------------------------------------------------------------------------------------

    def check_at(self, lease: Lease, at_us: int) -> None:
        """Schedules a check of a lease, at this time or before."""
        if not lease.check_us or at_us < lease.check_us:
            lease.check_us = at_us
            heapq.heappush(self.checks, (at_us, next(_order), lease))

    def check(self, now_us: int, budget: int) -> None:
        """Makes scheduled checks, at most so many."""
        while self.checks and budget > 0 and self.checks[0][0] <= now_us:
            budget -= 1
            at_us, _, lease = heapq.heappop(self.checks)
            if at_us == lease.check_us:  # otherwise it was checked before
                lease.check_us = 0
                self.check_lease(lease, now_us)

    def check_lease(self, lease: Lease, now_us: int) -> None:
        """Puts aside what may no longer be spent, forgets the key if it is idle, has a scarce batch followed in time."""
        idle_us = now_us - lease.last_used_us
        self.put_aside(lease, now_us, 2 * idle_us >= self.life_us)
        if idle_us >= self.life_us and lease.recheck_us <= now_us and lease.pending is None:
            self.forget(lease)
            return
        with self.lock:
            has_room = lease.has_room()
        if lease.needs_early_fetch(self.round_trip_us) and lease.left and not lease.queued:
            fetch_us = lease.start_us - 2 * self.round_trip_us
            if has_room and now_us >= fetch_us:
                self.notice_low(lease)
            else:
                self.check_at(lease, max(now_us + self.round_trip_us // 4, fetch_us) + 1)
        next_us = now_us + max(1, self.life_us // 2)
        for end_us in (lease.end_us if lease.left else 0, lease.next_end_us):
            next_us = min(next_us, end_us) if end_us > now_us else next_us
        self.check_at(lease, next_us)

    def put_aside(self, lease: Lease, now_us: int, all_of_it: bool = False) -> None:
        """Puts aside for the parent what may no longer be spent (or everything), unless that is not worth a call."""
        with self.lock:
            parts = lease.take_unspent(now_us, all_of_it)
        for part in parts:
            lease.oversized = True
            if not lease.is_refilled_anyway(part.amount):
                self.unspent.append(part)

    def forget(self, lease: Lease) -> None:
        with self.lock:
            if lease.terms.leases.get(lease.key) is lease:
                del lease.terms.leases[lease.key]
                self.keys -= 1
