"""The store contract: where state lives, and who makes read, decide, write one step.

A store takes claims and gives Decisions. It never contains a rule (it asks `claim.limit.limit`), it owns the clock, and it
either charges every claim of a decision or none. Sync and async are two faces of one object: a store that answers
without waiting (`local`) has its async face for free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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

from ..decision import STORE


class Booking(NamedTuple):
    """One waiter's charge, for `Store.rebook`: `stays` False leaves; `deadline_us` None waits without bound."""

    claims: Sequence[Claim]
    charged_at: int
    deadline_us: int | None
    stays: bool
    source: str = STORE


@cython.cclass
class Store:
    """The base of every store. `limitkeeper.testing.StoreContract` holds any of them to the laws.

    Times are integer microseconds. `max_wait_us` None means: wait without bound. `charged_at` and `source` are the `start_us` and
    `source` of the Decision that made a charge; −1: unknown start.
    """

    #: True when a decision never waits for anything outside this process.
    local = False

    @property
    def can_rebook(self) -> bool:
        """Whether `rebook` works: waiters behind one that leaves its queue then move up; otherwise they keep their starts."""
        return False

    @property
    def clock(self) -> Any:
        raise NotImplementedError

    def now_us(self) -> int:
        """This store's time."""
        return int(self.clock.now_us())

    def register(self, limit: NamedLimit) -> None:
        """A limiter with this limit was made: its birth, for those that do not start full."""

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

        `commit` False only looks. `remember` keeps the states before and after the charge in the claims, for an exact undo, also
        where a store would not (it costs a larger reply).
        """
        raise NotImplementedError

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        """Several decisions at one moment, in order, each on its own."""
        raise NotImplementedError

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        """One limit, one plain key: the way of most calls, so that a store can be quick about it. `max_wait_us` is at most
        MAX_WAIT, which is without bound."""
        return self.decide([Claim(named, key, cost)], None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)

    @cython.ccall
    def hit_nowait(self, named: NamedLimit, key: str, cost: cython.longlong) -> Decision | None:
        """A hit, when it can be answered without waiting for anybody outside this process; otherwise None, nothing done."""
        return None

    def answers_within(self, budget_us: int) -> bool:
        """Asks the store to answer or fail (`StoreTimeout`) within this time, always. False: it can't promise that."""
        return self.local

    @property
    def overflow(self) -> int:
        """How many decisions were made on shared cells, because the store was full."""
        return 0

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        """Takes the claims' cost away from where it was charged; a negative cost charges more, whatever the level."""
        raise NotImplementedError

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        """Gives back the bookings that leave and charges those that stay again, in order, as one step. Answers with a new
        Decision for each booking, None where it keeps its start."""
        raise NotImplementedError

    def reset(self, claims: Sequence[Claim]) -> None:
        """Forgets the claims' keys."""
        raise NotImplementedError

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, Any]]:
        """(key, state) of every key that a limit knows, for dashboards and hand-over."""
        raise NotImplementedError

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        """Takes over what `items` gave."""
        raise NotImplementedError

    def can_reserve(self, limit: NamedLimit) -> bool:
        """Whether a claim on this limit can be charged at a later start."""
        return limit.limit.reserves

    def close(self) -> None:
        """Lets go of connections and memory; a closed store is not used again."""

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

    async def aload(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        self.load(limit, items)

    async def areset(self, claims: Sequence[Claim]) -> None:
        self.reset(claims)

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
