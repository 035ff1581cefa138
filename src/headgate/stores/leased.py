"""LeasedStore: the wholesaler. Takes batches from a parent store, serves requests from RAM, fetches the next before it runs out.

    LeasedStore(RedisStore(url))                 lease=None: the batch follows each key's own demand
    LeasedStore(RedisStore(url), lease=50)       50 hits cost one operation of 50

A token is charged at the parent when it is leased and spent here up to one `life` later. So in any window a node can spend
what it held when the window began, beside what is charged within it:

    plain    over-admission ≤ min(nodes × held, rate × life)         held: a batch and a quarter
    strict   0, and the parent grants count per (W + life) instead of per W: a price of life / (W + life) of the rate

A fixed window's lease ends with its window, so there it is 0 at no price. A refusal is leased too: "nothing before t" is
answered here until t. A crash loses what was in hand, never more. Rejected: reporting use afterwards (the bound is then the
demand of an interval, whatever the limit).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from headgate import _plain as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.headgate.algorithms.claim import Claim, NamedLimit
    from cython.cimports.headgate.algorithms.verdict import PLAIN, REFUSED
    from cython.cimports.headgate.decision import Decision
    from cython.cimports.headgate.monotonic import monotonic_us
    from cython.cimports.headgate.stores.contract import Store
    from cython.cimports.headgate.stores.lease import Lease, Terms
    from cython.cimports.headgate.stores.near import Near, blank
else:
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.verdict import PLAIN, REFUSED
    from ..clock import monotonic_us
    from ..decision import Decision
    from .contract import Store
    from .lease import Lease, Terms
    from .near import Near, blank

from ..algorithms.all_of import together
from ..algorithms.leaky_bucket import LeakyBucket
from ..algorithms.token_bucket import TokenBucket
from ..clock import SystemClock
from ..errors import ConfigurationError, InvalidLimit, StoreError
from ..rate import Duration, Rate, duration_us
from . import wholesale
from .attendant import Attendant
from .near import checked, only_claims, patience_us

log = logging.getLogger("headgate")
#: The longest that the background waits after failures.
MOST_BACKOFF_US = 5_000_000


@cython.cclass
class LeasedStore(Near):
    """Batches from `store`, spent in RAM. `life` is how long a batch may be spent; `max_keys` bounds the keys with a lease."""

    @cython.annotation_typing(False)
    def __init__(
        self,
        store: Store,
        lease: int | None = None,
        life: Duration = "100ms",
        strict: bool = False,
        max_keys: int = 100_000,
    ) -> None:
        if not isinstance(store, Store):
            raise ConfigurationError(f"LeasedStore wraps a store, such as RedisStore(url), not {store!r}")
        if lease is not None and (isinstance(lease, bool) or not isinstance(lease, int) or lease < 1):
            raise ConfigurationError(f"lease must be None (it follows demand) or a whole number ≥ 1, not {lease!r}")
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ConfigurationError(f"max_keys must be a whole number of keys, at least 1, not {max_keys!r}")
        self.store = store
        super().__init__()
        self.lease = lease or 0
        self.exact = lease == 1
        self.life_us = duration_us(life)
        if self.life_us < 1:
            raise ConfigurationError(f"life={life!r}: a lease must live longer than nothing; write life='100ms'")
        self.strict = bool(strict)
        self.max_keys = max_keys
        self.controlled = not isinstance(store.clock, SystemClock) and hasattr(store.clock, "advance")
        self.prices: dict[str, float] = {}
        self.terms: dict[NamedLimit, Terms] = {}
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
        self.attendant: Any = None if self.controlled else Attendant(self)

    def _renew_lock(self) -> None:
        super()._renew_lock()
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

    def agreed(self, named: NamedLimit) -> Terms:
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
    def terms_of(self, named: NamedLimit) -> Terms:
        """How a limit is leased; the last one asked for is remembered."""
        found: Terms | None = self.terms.get(named)
        if found is None:
            with self._lock:
                found = self.terms.get(named) or Terms(self, named, self.stretched(named), self.lease, self.life_us)
                self.terms[named] = found
        self.last_named = None  # never the one with the terms of the other
        self.last = found
        self.last_named = named
        return found

    def stretched(self, named: NamedLimit) -> NamedLimit:
        """The limit that the parent is told: in strict mode the same count in a longer time."""
        limit = named.limit
        if not self.strict or not limit.refunds or limit.kind == "fixed window":
            return named
        slower = stretched(limit, self.life_us)
        price = 1 - limit.period / slower.period
        self.prices[str(limit)] = price
        log.info("strict leases of %s: never more in any window, at a price of %.2f %% of its rate", limit, 100 * price)
        return NamedLimit(named.limiter, named.name, slower)

    def over_admission(self, limit: Any, nodes: int) -> float:
        """The most that so many nodes can admit in a window beyond what the limit itself says."""
        terms = Terms(self, NamedLimit("", "", limit), NamedLimit("", "", limit), self.lease, self.life_us)
        if self.strict or self.exact or terms.walled or not terms.leased:
            return 0.0
        held = nodes * (terms.most + max(1, terms.most // 4))
        return float(min(held, terms.tokens_us * self.life_us)) if terms.paced else float(min(held, limit.capacity))

    # From RAM --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def from_hand(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision | None:
        """The answer, when what is in hand or was refused before gives it; otherwise None."""
        terms: Terms = self.last if self.last_named is named else self.terms_of(named)
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
        retry: cython.longlong = lease.retry_us(now_us, cost)
        if retry > 0 and max_wait_us <= 0:
            return self.refused(terms, lease, now_us)
        return None

    @cython.cfunc
    def spent(self, terms: Terms, lease: Lease, now_us: cython.longlong, more: cython.longlong) -> Decision:
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
    def refused(self, terms: Terms, lease: Lease, now_us: cython.longlong) -> Decision:
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

    def told(self, terms: Terms, lease: Lease, now_us: int, cost: int) -> Decision | None:
        """What a call is told after the parent was asked for a batch."""
        with self._lock:
            if lease.take(now_us, cost):
                return self.spent(terms, lease, now_us, lease.spare)
            retry: cython.longlong = lease.retry_us(now_us, cost)
            return self.refused(terms, lease, now_us) if retry > 0 else None

    @cython.ccall
    def one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        decision: Decision | None = None
        if cython.compiled:
            decision = self.from_hand(named, key, cost, max_wait_us, commit)
        else:
            with self._lock:
                decision = self.from_hand(named, key, cost, max_wait_us, commit)
        if decision is None:
            decision = wholesale.run(self, wholesale.deciding(self, [Claim(named, key, cost)], max_wait_us, commit))
        return decision

    @cython.ccall
    def at_once(self, named: NamedLimit, key: str, cost: cython.longlong) -> Decision | None:
        if cython.compiled:
            return self.from_hand(named, key, cost, 0, True)
        with self._lock:
            return self.from_hand(named, key, cost, 0, True)

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
                claim.start = start_us = REFUSED
                claim.retry = lease.denied_until_us + self.apart_us
        if missing and start_us >= 0:
            return None
        if not missing and commit:
            for lease in leases:
                if lease.left <= lease.low and not lease.queued and lease.next_left == 0:
                    self.ring(lease)
        return together(claims, now_us + self.apart_us, start_us if start_us < 0 else now_us + self.apart_us)

    # Deciding --------------------------------------------------------------------------------------------------

    def ram(self, claims: Sequence[Claim], wait_us: int, commit: bool) -> Any:
        """(the claims, and the answer if RAM has it)."""
        asked = checked(claims)
        if len(asked) > 1 and (wait_us or self.exact):
            return asked, None
        with self._lock:
            if len(asked) > 1:
                return asked, self.from_hands(asked, commit)
            return asked, self.from_hand(asked[0].named, asked[0].key, asked[0].cost, wait_us, commit)

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None = 0, commit: bool | int = True) -> Decision:
        wait_us = patience_us(max_wait_us)
        asked, decision = self.ram(claims, wait_us, bool(commit))
        if decision is not None:
            return decision  # type: ignore[no-any-return]
        return wholesale.run(self, wholesale.deciding(self, asked, wait_us, bool(commit)))  # type: ignore[no-any-return]

    async def adecide(self, claims: Sequence[Claim], max_wait_us: int | None = 0, commit: bool | int = True) -> Decision:
        wait_us = patience_us(max_wait_us)
        asked, decision = self.ram(claims, wait_us, bool(commit))
        if decision is not None:
            return decision  # type: ignore[no-any-return]
        return await wholesale.arun(self, wholesale.deciding(self, asked, wait_us, bool(commit)))  # type: ignore[no-any-return]

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        plan = wholesale.deciding_many(self, [checked(claims) for claims in asks], patience_us(max_wait_us))
        return wholesale.run(self, plan)  # type: ignore[no-any-return]

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        plan = wholesale.deciding_many(self, [checked(claims) for claims in asks], patience_us(max_wait_us))
        return await wholesale.arun(self, plan)  # type: ignore[no-any-return]

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1) -> None:
        wholesale.run(self, wholesale.giving_back(self, list(claims), charged_at))

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1) -> None:
        await wholesale.arun(self, wholesale.giving_back(self, list(claims), charged_at))

    @property
    def rebook(self) -> Any:
        """A line moves up where the parent's does; not in strict mode, where the parent knows other limits."""
        if self.strict or not hasattr(self.store, "rebook"):
            raise AttributeError("rebook")
        return self._rebook

    def _rebook(self, turns: Sequence[Any]) -> Any:
        for claims, *_ in turns:
            self.touch(claims)
        return self.store.rebook(turns)  # type: ignore[attr-defined]

    # Keeping house ---------------------------------------------------------------------------------------------

    def know(self, limit: NamedLimit) -> None:
        self.store.know(self.terms_of(limit).theirs)

    def can_reserve(self, limit: NamedLimit) -> bool:
        return self.store.can_reserve(limit)

    def answers_within(self, budget_us: int) -> bool:
        return self.store.answers_within(max(1, budget_us // 3))  # a call may ask for a batch, for a part of it, and for itself

    @property
    def strangers(self) -> int:
        return self.store.strangers

    def __len__(self) -> int:
        """How many keys have a lease, or a refusal that is remembered."""
        return int(self.keys)

    def leased(self, named: NamedLimit, key: str) -> int:
        """How much is in hand for a key."""
        lease: Lease | None = self.terms_of(named).leases.get(key)
        return 0 if lease is None else lease.in_hand(self.now())

    def touch(self, claims: Sequence[Claim], drop: bool = False) -> None:
        """Something else is done to these keys at the parent: refusals are forgotten; dropped, what is in hand is as well."""
        only_claims(claims)
        for claim in claims:
            lease: Lease | None = self.terms_of(claim.limit).leases.get(claim.key)
            if lease is not None:
                lease.drop() if drop else lease.forgive()

    def theirs(self, claims: Sequence[Claim]) -> list[Claim]:
        """The claims as the parent knows them."""
        if not self.strict:
            return list(claims)
        return [Claim(self.terms_of(claim.limit).theirs, claim.key, claim.cost, claim.charged) for claim in claims]

    def reset(self, claims: Sequence[Claim]) -> None:
        self.touch(claims, drop=True)
        self.store.reset(self.theirs(claims))

    async def areset(self, claims: Sequence[Claim]) -> None:
        self.touch(claims, drop=True)
        await self.store.areset(self.theirs(claims))

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, Any]]:
        return self.store.items(self.terms_of(limit).theirs)

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        terms = self.terms_of(limit)
        for lease in list(terms.leases.values()):
            lease.drop()
        self.store.load(terms.theirs, items)

    # In the background -----------------------------------------------------------------------------------------

    def ring(self, lease: Lease) -> None:
        """Has the next batch of a lease fetched."""
        lease.queued = True
        self.due.append(lease)
        if self.attendant is not None:
            self.attendant.ring()

    def pause_s(self) -> float | None:
        """Seconds until the background has something to do; None: until somebody rings."""
        now_us: cython.longlong = self.now()
        at: Any = self.watched[0][0] if self.watched else None
        if self.due or self.spoiled:
            at = self.quiet_until_us
        return None if at is None else max(0, at - now_us) / 1e6

    def failed(self, error: Exception) -> None:
        """The background could not reach the parent: it is counted, and left in peace for a while, longer each time."""
        self.failures += 1
        self.backoff_us = min(MOST_BACKOFF_US, max(self.life_us, 2 * self.backoff_us))
        self.quiet_until_us = self.now() + self.backoff_us
        log.warning("leases of %r: %s; asking again in %.1f s", self.store, error, self.backoff_us / 1e6)

    def tend(self) -> None:
        """What the background does, in one step: gives back what expired, fetches what runs low, forgets what is idle."""
        wholesale.run(self, wholesale.tending(self))

    async def atend(self) -> None:
        await wholesale.arun(self, wholesale.tending(self))

    def return_all(self) -> None:
        """Gives everything in hand back."""
        wholesale.run(self, wholesale.returning(self, wholesale.everything(self)))

    async def areturn_all(self) -> None:
        await wholesale.arun(self, wholesale.returning(self, wholesale.everything(self)))

    def close(self) -> None:
        """Gives everything in hand back, ends the background, and closes the parent."""
        if self.attendant is not None:
            self.attendant.close()
        try:
            self.return_all()
        except StoreError as error:
            log.warning("leases of %r could not be given back: %s", self.store, error)
        self.store.close()

    async def aclose(self) -> None:
        if self.attendant is not None:
            self.attendant.close()
        try:
            await self.areturn_all()
        except StoreError as error:
            log.warning("leases of %r could not be given back: %s", self.store, error)
        await self.store.aclose()


def stretched(limit: Any, life_us: int) -> Any:
    """The same limit with its count in a period longer by one lease life, or by a little more where that can't be counted."""
    step = 1
    while step <= limit.period + life_us:
        period = -(-(limit.period + life_us) // step) * step
        try:
            return remade(limit, Rate(int(limit.count), period))
        except InvalidLimit:
            step *= 10
    raise ConfigurationError(f"{limit} can't be leased strictly with a life of {life_us} µs; choose a life in round milliseconds")


def remade(limit: Any, rate: Rate) -> Any:
    """The same kind of limit at another rate."""
    if isinstance(limit, TokenBucket):
        return TokenBucket(rate, limit.capacity, limit.initial)
    return type(limit)(rate, limit.capacity) if isinstance(limit, LeakyBucket) else type(limit)(rate)
