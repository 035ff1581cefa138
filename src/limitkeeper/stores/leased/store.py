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
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.stores.contract import Store
    from cython.cimports.limitkeeper.stores.leased.lease import Lease, LeaseTerms
    from cython.cimports.limitkeeper.stores.leased.lease_cache import LeaseCache
else:
    from ...algorithms.claim import Claim, NamedLimit
    from ...decision import Decision
    from ..contract import Store
    from .lease import Lease, LeaseTerms
    from .lease_cache import LeaseCache

from ...algorithms.fixed_window import FixedWindow
from ...decision import STORE
from ...errors import ConfigurationError, StoreError
from ...rate import Duration, duration_us
from ..cell_store import checked, only_claims, patience_us
from ..contract import Booking
from . import lease_table, parent_calls, refill
from .derated_limit import stretched
from .flight import arun, run

log = logging.getLogger("limitkeeper")
#: The longest that the background waits after failures.
MOST_BACKOFF_US = 5_000_000


@cython.cclass
class LeasedStore(LeaseCache):
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
        life_us = duration_us(life)
        if life_us < 1:
            raise ConfigurationError(f"life={life!r}: a lease must live longer than nothing; write life='100ms'")
        self.strict = bool(strict)
        self.prices: dict[str, float] = {}
        super().__init__(store, lease or 0, life_us, max_keys)

    def parents(self, named: NamedLimit) -> NamedLimit:
        """The limit that the parent is told: in strict mode the same count in a longer time."""
        limit = named.limit
        if not self.strict or not limit.refunds or isinstance(limit, FixedWindow):
            return named
        slower = stretched(limit, self.life_us)
        price = 1 - limit.period / slower.period
        self.prices[str(limit)] = price
        log.info("strict leases of %s: never more in any window, at a price of %.2f %% of its rate", limit, 100 * price)
        return NamedLimit(named.limiter, named.name, slower)

    def over_admission(self, limit: Any, nodes: int) -> float:
        """The most that so many nodes can admit in a window beyond what the limit itself says."""
        terms = LeaseTerms(self, NamedLimit("", "", limit), NamedLimit("", "", limit), self.lease, self.life_us)
        if self.strict or self.exact or terms.walled or not terms.leased:
            return 0.0
        batch = terms.ceiling(self.trip_us)
        held = nodes * (batch + max(1, batch // 4))
        return float(min(held, terms.tokens_us * self.life_us)) if terms.paced else float(min(held, limit.capacity))

    # Deciding --------------------------------------------------------------------------------------------------

    def decided(self, claims: list[Claim], max_wait_us: int, commit: bool | int) -> Decision:
        return run(self.store, parent_calls.deciding(self, claims, max_wait_us, bool(commit)))  # type: ignore[no-any-return]

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        wait_us = patience_us(max_wait_us)
        asked, decision = self.ram(claims, wait_us, commit)
        if decision is not None:
            return decision  # type: ignore[no-any-return]
        return run(self.store, parent_calls.deciding(self, asked, wait_us, commit))  # type: ignore[no-any-return]

    async def adecide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        wait_us = patience_us(max_wait_us)
        asked, decision = self.ram(claims, wait_us, commit)
        if decision is not None:
            return decision  # type: ignore[no-any-return]
        return await arun(self.store, parent_calls.deciding(self, asked, wait_us, commit))  # type: ignore[no-any-return]

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        plan = parent_calls.deciding_many(self, [checked(claims) for claims in asks], patience_us(max_wait_us))
        return run(self.store, plan)  # type: ignore[no-any-return]

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        plan = parent_calls.deciding_many(self, [checked(claims) for claims in asks], patience_us(max_wait_us))
        return await arun(self.store, plan)  # type: ignore[no-any-return]

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        run(self.store, parent_calls.giving_back(self, list(claims), charged_at))

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        await arun(self.store, parent_calls.giving_back(self, list(claims), charged_at))

    @property
    def can_rebook(self) -> bool:
        """Where the parent can; not in strict mode, where the parent knows other limits."""
        return not self.strict and self.store.can_rebook

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        for booking in bookings:
            self.touch(booking.claims)
        return self.store.rebook(bookings)

    async def arebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        for booking in bookings:
            self.touch(booking.claims)
        return await self.store.arebook(bookings)

    # Keeping house ---------------------------------------------------------------------------------------------

    def register(self, limit: NamedLimit) -> None:
        self.store.register(self.terms_of(limit).theirs)

    def can_reserve(self, limit: NamedLimit) -> bool:
        return self.store.can_reserve(limit)

    def answers_within(self, budget_us: int) -> bool:
        return self.store.answers_within(max(1, budget_us // 3))  # a call may ask for a batch, for a part of it, and for itself

    @property
    def overflow(self) -> int:
        return self.store.overflow

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
        run(self.store, refill.tending(self))

    async def atend(self) -> None:
        await arun(self.store, refill.tending(self))

    def return_all(self) -> None:
        """Gives everything in hand back."""
        run(self.store, refill.returning(self, lease_table.everything(self)))

    async def areturn_all(self) -> None:
        await arun(self.store, refill.returning(self, lease_table.everything(self)))

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
