"""Answering from RAM: what a leased store has in hand, and what it knows to be refused.

Atomic by construction, as in `memory.py`: compiled, from looking at a lease to spending of it no Python runs; plain, a lock keeps
others out. `remaining` counts what is in hand, because only that is certain: what the parent still has, others may have
taken by now. The first answer after the parent was asked adds what it had left at that moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import PLAIN, REFUSED
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, blank
    from cython.cimports.limitkeeper.stores.contract import Store
    from cython.cimports.limitkeeper.stores.leased.lease import Lease, LeaseTerms
else:
    from ...algorithms.claim import Claim, NamedLimit
    from ...algorithms.constants import PLAIN, REFUSED
    from ...clock import monotonic_us
    from ...decision import Decision
    from ..cell_store import CellStore, blank
    from ..contract import Store
    from .lease import Lease, LeaseTerms

from ...algorithms.all_of import together
from ...clock import SystemClock
from ..cell_store import checked
from .maintenance import Maintenance


@cython.cclass
class LeaseCache(CellStore):
    """What is in hand for every key, before anything is asked of the parent."""

    def __init__(self, store: Store, lease: cython.longlong, life_us: cython.longlong, max_keys: cython.longlong) -> None:
        super().__init__()
        self.store = store
        self.lease = lease
        self.exact = lease == 1
        self.life_us = life_us
        self.max_keys = max_keys
        self.controlled = not isinstance(store.clock, SystemClock) and hasattr(store.clock, "advance")
        self.terms: dict[NamedLimit, LeaseTerms] = {}
        self.trip_us = 1000
        self.apart_us = self.asked = self.failures = 0
        self.begin_again()

    def begin_again(self) -> None:
        """Nothing in hand: at first, and in the child of a fork, whose leases are its parent's."""
        for terms in self.terms.values():
            terms.leases.clear()
        self.last: Any = None
        self.last_named: Any = None
        self.keys = 0
        self.backoff_us = self.quiet_until_us = 0
        self.due: deque[Lease] = deque()
        self.watched: list[Any] = []
        self.spoiled: deque[Any] = deque(maxlen=self.max_keys)
        self.attendant: Any = None if self.controlled else Maintenance(self)

    def _reset_after_fork(self) -> None:
        super()._reset_after_fork()
        self.begin_again()

    # Time: the parent's where a test holds it, otherwise this machine's monotonic clock ------------------------------

    @property
    def clock(self) -> Any:
        return self.store.clock

    @cython.cfunc
    def now(self) -> cython.longlong:
        if self.controlled:
            return self.store.now_us()
        return monotonic_us() + self.offset_us

    @property
    def lock(self) -> Any:
        return self._lock

    def agreed(self, named: NamedLimit) -> LeaseTerms:
        """How a limit is leased."""
        return self.terms_of(named)

    def heard(self, decision: Decision, sent_us: int) -> int:
        """The parent has answered: how long that took, how far its clock is from ours; what time it is here."""
        self.asked += 1
        told_us: cython.longlong = decision.start_us - decision.wait_us
        if self.controlled:
            return told_us
        now_us: cython.longlong = self.now()
        self.trip_us += (now_us - sent_us - self.trip_us) // 4
        if not isinstance(self.store.clock, SystemClock):
            self.apart_us = told_us - (now_us + sent_us) // 2
        return now_us

    def moment_us(self) -> int:
        """The time by which leases begin and end."""
        return self.now()

    def now_us(self) -> int:
        return self.store.now_us()

    @property
    def local(self) -> bool:  # type: ignore[override]
        return bool(self.store.local)

    # Terms -----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def terms_of(self, named: NamedLimit) -> LeaseTerms:
        """How a limit is leased; the last one asked for is remembered."""
        found: LeaseTerms | None = self.terms.get(named)
        if found is None:
            with self._lock:
                found = self.terms.get(named) or LeaseTerms(self, named, self.parents(named), self.lease, self.life_us)
                self.terms[named] = found
        self.last_named = None  # never the one with the terms of the other
        self.last = found
        self.last_named = named
        return found

    def parents(self, named: NamedLimit) -> NamedLimit:
        """The limit that the parent is told."""
        return named

    # From RAM --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def from_hand(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision | None:
        """The answer, when what is in hand or was refused before gives it; otherwise None."""
        terms: LeaseTerms = self.last if self.last_named is named else self.terms_of(named)
        found = terms.leases.get(key)
        if found is None or cost <= 0:
            return None
        lease: Lease = found
        now_us: cython.longlong = self.now()
        if not commit:
            if lease.hand(now_us) >= cost:
                return self.spent(terms, lease, now_us, 0)
        else:
            lease.used += cost
            lease.seen_us = now_us
            if lease.take(now_us, cost):
                if lease.left <= lease.low and not lease.queued and lease.next_left == 0:
                    self.ring(lease)
                return self.spent(terms, lease, now_us, 0)
        if max_wait_us > 0 or lease.retry_us(now_us, cost) == 0 or not self.believes(lease, now_us):
            return None
        return self.refused(terms, lease, now_us)

    @cython.cfunc
    def believes(self, lease: Lease, now_us: cython.longlong) -> cython.bint:
        """Whether a refusal still stands. After a while the background asks again, since others may have given back."""
        if now_us < lease.trusted_until_us:
            return True
        if not self.exact and not lease.queued:
            self.ring(lease)
        return not self.exact

    @cython.cfunc
    def spent(self, terms: LeaseTerms, lease: Lease, now_us: cython.longlong, more: cython.longlong) -> Decision:
        decision: Decision = blank(self, terms)
        decision.allowed = True
        decision.limit = terms.limit.capacity
        decision.remaining = lease.hand(now_us) + more
        decision.retry_us = 0
        decision.wait_us = 0
        decision.reset_us = lease.reset_us - now_us if lease.reset_us > now_us else 0
        decision.start_us = now_us + self.apart_us
        if PLAIN:
            decision.__class__ = Decision
        return decision

    @cython.cfunc
    def refused(self, terms: LeaseTerms, lease: Lease, now_us: cython.longlong) -> Decision:
        decision: Decision = blank(self, terms)
        decision.allowed = False
        decision.limit = terms.limit.capacity
        decision.remaining = lease.hand(now_us) + lease.denied_left
        decision.retry_us = lease.denied_until_us - now_us
        decision.wait_us = 0
        decision.reset_us = lease.reset_us - now_us if lease.reset_us > now_us else 0
        decision.start_us = now_us + self.apart_us
        if PLAIN:
            decision.__class__ = Decision
        return decision

    def told(self, terms: LeaseTerms, lease: Lease, now_us: int, cost: int) -> Decision | None:
        """What a call is told after the parent was asked for a batch."""
        with self._lock:
            if lease.take(now_us, cost):
                return self.spent(terms, lease, now_us, lease.spare)
            retry: cython.longlong = lease.retry_us(now_us, cost)
            return self.refused(terms, lease, now_us) if retry > 0 else None

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        decision: Decision | None = None
        if cython.compiled:
            decision = self.from_hand(named, key, cost, max_wait_us, commit)
        else:
            with self._lock:
                decision = self.from_hand(named, key, cost, max_wait_us, commit)
        if decision is None:
            decision = self.decided([Claim(named, key, cost)], max_wait_us, commit)
        return decision

    @cython.ccall
    def hit_nowait(self, named: NamedLimit, key: str, cost: cython.longlong) -> Decision | None:
        if cython.compiled:
            return self.from_hand(named, key, cost, 0, True)
        with self._lock:
            return self.from_hand(named, key, cost, 0, True)

    def decided(self, claims: list[Claim], max_wait_us: int, commit: bool | int) -> Decision:
        """A decision that RAM could not make."""
        raise NotImplementedError

    @cython.cfunc
    def from_hands(self, claims: list, commit: cython.bint) -> Decision | None:  # type: ignore[type-arg]
        """Several limits: the answer when all of them are in hand, or when one of them is known to refuse; otherwise None."""
        i: cython.Py_ssize_t
        claim: Claim
        lease: Lease
        leases: list = []  # type: ignore[type-arg]
        for claim in claims:
            leases.append(self.terms_of(claim.named).leases.get(claim.key))
            if leases[-1] is None or claim.cost <= 0:
                return None
        now_us: cython.longlong = self.now()
        start_us: cython.longlong = now_us
        missing: cython.bint = False
        doubted: cython.bint = False
        for i in range(len(claims)):  # from here to the end of taking, nothing comes in between
            claim = claims[i]
            lease = leases[i]
            missing = missing or lease.hand(now_us) < claim.cost
        for i in range(len(claims)):
            claim = claims[i]
            lease = leases[i]
            if commit:
                lease.used += claim.cost
                lease.seen_us = now_us
            if commit and not missing:
                lease.take(now_us, claim.cost)
            claim.start = now_us + self.apart_us
            claim.remaining = lease.hand(now_us)
            claim.reset = (lease.reset_us if lease.reset_us > now_us else now_us) + self.apart_us
            if missing and claim.remaining < claim.cost and lease.retry_us(now_us, claim.cost) > 0:
                doubted = doubted or now_us >= lease.trusted_until_us
                claim.start = start_us = REFUSED
                claim.retry = lease.denied_until_us + self.apart_us
        if missing and (start_us >= 0 or not commit):
            return None
        if doubted:
            for lease in leases:
                self.believes(lease, now_us)
        if not missing and commit:
            for lease in leases:
                if lease.left <= lease.low and not lease.queued and lease.next_left == 0:
                    self.ring(lease)
        return together(claims, now_us + self.apart_us, start_us if start_us < 0 else now_us + self.apart_us)

    def ram(self, claims: Sequence[Claim], wait_us: int, commit: bool) -> Any:
        """(the claims, and the answer if RAM has it)."""
        asked = checked(claims)
        if len(asked) > 1 and (wait_us or self.exact):
            return asked, None
        with self._lock:
            if len(asked) > 1:
                return asked, self.from_hands(asked, commit)
            return asked, self.from_hand(asked[0].named, asked[0].key, asked[0].cost, wait_us, commit)

    def ring(self, lease: Lease) -> None:
        """Has the next batch of a lease fetched."""
        lease.queued = True
        self.due.append(lease)
        if self.attendant is not None:
            self.attendant.ring()
