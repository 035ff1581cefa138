"""Store: the interface of all stores, which keep state and make read, decide and write one atomic step.

A store takes claims and returns Decisions. It contains no algorithm (it calls that of `claim.limit.limit`), it owns the clock,
and it charges all claims of a decision or none. One object serves sync and async callers: in a store that never waits (`local`)
the async methods call the sync ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import MAX_WAIT
    from cython.cimports.limitkeeper.decision import Decision
else:
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.constants import MAX_WAIT
    from ..decision import Decision

from ..clock import Clock
from ..decision import STORE

KeyState = tuple[str, Any]  # a key and its state as plain data


class Booking(NamedTuple):
    """A waiter's charge, for `Store.rebook`. `stays` is False for a waiter that leaves; `deadline_us` None means no deadline."""

    claims: Sequence[Claim]
    charged_at: int
    deadline_us: int | None
    stays: bool
    source: str = STORE


@cython.cclass
class Store:
    """Base class of all stores. `limitkeeper.testing.StoreContract` tests a store against this contract.

    Times are integer microseconds. `max_wait_us` None means without bound. `charged_at` and `source` are the `start_us` and
    `source` of the Decision that made a charge; −1: unknown start.
    """

    #: True if a decision never waits for anything outside this process.
    local = False

    @property
    def can_rebook(self) -> bool:
        """Whether `rebook` works: waiters behind one that leaves its queue then move up; otherwise they keep their starts."""
        return False

    @property
    def clock(self) -> Clock:
        raise NotImplementedError

    def now_us(self) -> int:
        """The store's time, in microseconds since 1970."""
        return self.clock.now_us()

    def register(self, limit: NamedLimit) -> None:
        """Called when a limiter with this limit is created. `initial` counts from the first call."""

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        """Charges all claims at their earliest common start, `not_before_us` or later, if that is within `max_wait_us`; or none.

        `commit` False stores nothing. `remember` keeps the states before and after the charge in the claims, for an exact undo,
        even in a store that omits them by default (they make the reply larger).
        """
        raise NotImplementedError

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        """Makes several independent decisions, in order, at one time."""
        raise NotImplementedError

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        """Decides one limit for one key: the hot path, which a store may override. MAX_WAIT as `max_wait_us` means without
        bound."""
        return self.decide([Claim(named, key, cost)], None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)

    @cython.ccall
    def hit_nowait(self, named: NamedLimit, key: str, cost: cython.longlong) -> Decision | None:
        """A hit if it can be decided without waiting for another process; otherwise None, and nothing is charged."""
        return None

    def answers_within(self, budget_us: int) -> bool:
        """Sets the time within which every call returns or raises `StoreTimeout`. False: the store can't guarantee that."""
        return self.local

    @property
    def overflow(self) -> int:
        """The number of decisions on shared overflow cells, made because the store was full."""
        return 0

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        """Removes the claims' cost from the charge made at `charged_at`; a negative cost charges more, even above the limit."""
        raise NotImplementedError

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        """Gives back the bookings that leave and charges those that stay again, in order, in one atomic step. Returns a new
        Decision for each booking, None where it keeps its start."""
        raise NotImplementedError

    def reset(self, claims: Sequence[Claim]) -> None:
        """Deletes the state of the claims' keys."""
        raise NotImplementedError

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        """(key, state) of every key of a limit, for dashboards and hand-over."""
        raise NotImplementedError

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        """Stores (key, state) pairs returned by `items`, replacing the present state."""
        raise NotImplementedError

    def can_reserve(self, limit: NamedLimit) -> bool:
        """Whether a claim on this limit can be charged at a later start."""
        return limit.limit.reserves

    def close(self) -> None:
        """Releases connections and memory; the store must not be used afterwards."""

    async def adecide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        return self.decide(claims, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us)

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        if self.local:
            return self.decide_one(named, key, cost, max_wait_us, commit)
        return await self.adecide([Claim(named, key, cost)], None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        return self.decide_many(asks, max_wait_us)

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        self.give_back(claims, charged_at, source)

    async def arebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        return self.rebook(bookings)

    async def aload(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        self.load(limit, items)

    async def areset(self, claims: Sequence[Claim]) -> None:
        self.reset(claims)

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
