"""Store: the interface of all stores, which keep state and make read, decide and write one atomic step.

A store takes claims and returns Decisions. It contains no algorithm (it calls that of `claim.limit.limit`), it owns the clock,
and it charges all claims of a decision or none. One object serves sync and async callers: in a store that never waits (`local`)
the async methods call the sync ones; in a PlannedStore both perform the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import MAX_WAIT
    from cython.cimports.limitkeeper.algorithms.limit import I64
    from cython.cimports.limitkeeper.decision import Decision
else:
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.constants import MAX_WAIT
    from ..algorithms.limit import I64
    from ..decision import Decision

from ..clock import Clock
from ..decision import STORE
from ..errors import ConfigurationError
from .sans_io import Left, Plan, T, arun, run

if TYPE_CHECKING:
    from .store_hash import StoreHash

Claims = Sequence[Claim]
Requests = Sequence[Sequence[Claim]]
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

    if not cython.compiled:
        #: The queue of those that wait for a start on this store (wait_queue.py); None before the first limiter.
        wait_queue: Any = None

    #: True if a decision never waits for anything outside this process.
    local = False

    @property
    def never_waits(self) -> bool:
        """Whether a call may be made while a lock is held: it waits for nothing, neither a lock in a file nor keys that move."""
        return bool(self.local)

    @property
    def blocks_event_loop(self) -> bool:
        """Whether its async methods wait without `await`, as those of a store do that has only sync ones."""
        return type(self).adecide is Store.adecide

    @property
    def can_rebook(self) -> bool:
        """Whether `rebook` works: waiters behind one that leaves its queue then move up; otherwise they keep their starts."""
        return False

    #: Whether it is a node that decides only for callers with its own version of the shard map (sharded/shard_map.py).
    fences = False

    @property
    def location(self) -> str:
        """The address of a node, as shard maps name it."""
        raise NotImplementedError

    def sibling(self, location: str) -> Store:
        """Another node, reached with the same settings."""
        raise NotImplementedError

    def use_map(self, map_id: tuple[int, int]) -> None:
        """Sets the version and digest of the shard map that calls carry from now on."""
        raise NotImplementedError

    def exchange_map(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a message to a node's `NodeMap.change`; returns its status and the limits that it has seen."""
        raise NotImplementedError

    @property
    def clock(self) -> Clock:
        raise NotImplementedError

    def now_us(self) -> int:
        """The store's time, in microseconds since 1970."""
        return self.clock.now_us()

    def register(self, limit: NamedLimit) -> None:
        """Called when a limiter with this limit is created. `initial` counts from the first call."""

    def unregister(self, limit: NamedLimit) -> None:
        """Called when a registered limit is used no more (a reload removed it): the store may drop what it keeps of it, but for
        states that are not as new: the limit may come back."""

    def open_hash(self, name: str) -> StoreHash | None:
        """A hash of short texts that all users of this store share (store_hash.py); None: this store keeps none."""
        return None

    def decide(
        self, claims: Claims, max_wait_us: int | None = 0, *, commit: bool = True, remember: bool = False, not_before_us: int = 0
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
    def decide_one(self, named: NamedLimit, key: str, cost: I64, max_wait_us: I64, commit: cython.bint) -> Decision:
        """Decides one limit for one key: the hot path, which a store may override. MAX_WAIT as `max_wait_us` means without
        bound."""
        return self.decide([Claim(named, key, cost)], None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)

    @cython.ccall
    def hit_nowait(self, named: NamedLimit, key: str, cost: I64) -> Decision | None:
        """A hit if it can be decided without waiting for another process; otherwise None, and nothing is charged."""
        return None

    def answers_within(self, budget_us: int) -> bool:
        """Sets the time within which every call returns or raises `StoreTimeout`. False: the store can't guarantee that."""
        return self.local

    @property
    def overflow(self) -> int:
        """The number of decisions on shared overflow cells, made because the store was full."""
        return 0

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> bool:
        """Removes the claims' cost from the charge made at `charged_at`; a negative cost charges more, even above the limit.
        Nothing happens to a key that was reset after the charge; False when that is so for every claim."""
        raise NotImplementedError

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        """Gives back the bookings that leave and charges those that stay again, in order, in one atomic step. Returns a new
        Decision for each booking, None where it keeps its start."""
        raise NotImplementedError

    def reset(self, claims: Sequence[Claim]) -> None:
        """Deletes the states of the claims' keys; charges from before it then give nothing back (`give_back`)."""
        raise NotImplementedError

    def forget(self, claims: Sequence[Claim]) -> None:
        """As `reset`, for keys that were handed over to another store: open charges go with them."""
        self.reset(claims)

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        """(key, state) of every key of a limit, for dashboards and hand-over. A key that has only states of other rates under
        this name has the one that this rate would start with."""
        raise NotImplementedError

    def rate_items(self, limit: NamedLimit) -> Iterable[KeyState]:
        """As `items`, without keys on which this very rate has no state of its own. A store that has one rate per key need not
        implement it."""
        return self.items(limit)

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        """Stores (key, state) pairs returned by `items`, replacing the present state of this rate."""
        raise NotImplementedError

    def release(self, leaving: Callable[[str], bool]) -> None:
        """Gives back what is held of the keys that are handed over to another store, and fetches no more for them."""

    def can_reserve(self, limit: NamedLimit) -> bool:
        """Whether a claim on this limit can be charged at a later start."""
        return limit.limit.reserves

    def close(self) -> None:
        """Releases connections and memory; the store must not be used afterwards."""

    async def adecide(
        self, claims: Claims, max_wait_us: int | None = 0, *, commit: bool = True, remember: bool = False, not_before_us: int = 0
    ) -> Decision:
        return self.decide(claims, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us)

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        if self.local:
            return self.decide_one(named, key, cost, max_wait_us, commit)
        return await self.adecide([Claim(named, key, cost)], None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        return self.decide_many(asks, max_wait_us)

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> bool:
        return self.give_back(claims, charged_at, source)

    async def arebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        return self.rebook(bookings)

    async def aload(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        self.load(limit, items)

    async def areset(self, claims: Sequence[Claim]) -> None:
        self.reset(claims)

    async def aexchange_map(self, message: dict[str, Any]) -> dict[str, Any]:
        return self.exchange_map(message)

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


@cython.cclass
class PlannedStore(Store):
    """A store whose operations are plans, which `sans_io` performs for sync and async callers: the base of wrappers and of the
    stores of a server. A subclass implements the `plan_…` methods, and overrides what must not cost a plan's 0.4 µs a step."""

    def plan_left(self) -> Left | None:
        """The time in which the calls of a plan may begin; None: not bounded."""
        return None

    def run_plan(self, plan: Plan[T]) -> T:
        return run(plan, left=self.plan_left())

    async def arun_plan(self, plan: Plan[T]) -> T:
        return await arun(plan, left=self.plan_left())

    def plan_decide(
        self, claims: Claims, max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision | Plan[Decision]:
        """A plan, or the Decision itself where it needs no call."""
        raise NotImplementedError

    def plan_decide_many(self, asks: Requests, max_wait_us: int | None) -> Plan[list[Decision]]:
        raise NotImplementedError

    def plan_give_back(self, claims: Claims, charged_at: int, source: str) -> Plan[bool]:
        raise NotImplementedError

    def plan_rebook(self, bookings: Sequence[Booking]) -> Plan[list[Decision | None]]:
        raise NotImplementedError

    def plan_reset(self, claims: Claims) -> Plan[None]:
        raise NotImplementedError

    def plan_load(self, limit: NamedLimit, items: Iterable[KeyState]) -> Plan[None]:
        raise NotImplementedError

    def decide(
        self, claims: Claims, max_wait_us: int | None = 0, *, commit: bool = True, remember: bool = False, not_before_us: int = 0
    ) -> Decision:
        return self._decide(claims, max_wait_us, commit, remember, not_before_us)

    def adecide(
        self, claims: Claims, max_wait_us: int | None = 0, *, commit: bool = True, remember: bool = False, not_before_us: int = 0
    ) -> Coroutine[Any, Any, Decision]:
        return self._adecide(claims, max_wait_us, commit, remember, not_before_us)

    @cython.ccall
    @cython.annotation_typing(False)
    def _decide(self, claims: Claims, max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int) -> Decision:
        found = self.plan_decide(claims, max_wait_us, commit, remember, not_before_us)
        return found if isinstance(found, Decision) else self.run_plan(found)

    async def _adecide(
        self, claims: Claims, max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision:
        found = self.plan_decide(claims, max_wait_us, commit, remember, not_before_us)
        return found if isinstance(found, Decision) else await self.arun_plan(found)

    def decide_many(self, asks: Requests, max_wait_us: int | None = 0) -> list[Decision]:
        return self.run_plan(self.plan_decide_many(asks, max_wait_us))

    async def adecide_many(self, asks: Requests, max_wait_us: int | None = 0) -> list[Decision]:
        return await self.arun_plan(self.plan_decide_many(asks, max_wait_us))

    def give_back(self, claims: Claims, charged_at: int = -1, source: str = STORE) -> bool:
        return self.run_plan(self.plan_give_back(claims, charged_at, source))

    async def agive_back(self, claims: Claims, charged_at: int = -1, source: str = STORE) -> bool:
        return await self.arun_plan(self.plan_give_back(claims, charged_at, source))

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        return self.run_plan(self.plan_rebook(bookings))

    async def arebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        return await self.arun_plan(self.plan_rebook(bookings))

    def reset(self, claims: Claims) -> None:
        self.run_plan(self.plan_reset(claims))

    async def areset(self, claims: Claims) -> None:
        await self.arun_plan(self.plan_reset(claims))

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        self.run_plan(self.plan_load(limit, items))

    async def aload(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        await self.arun_plan(self.plan_load(limit, items))


def charges_of(claims: Sequence[Claim], decision: Decision) -> list[tuple[Sequence[Claim], int, str]]:
    """What a decision charged, or some of it: claims with the start and the source of their charge, for `give_back`. Of several
    limits that leases answered, each has its own: a batch of a sliding log is given back to the time at which it was charged."""
    parts = decision.decisions if decision.source == "lease" else ()
    if len(parts) < 2:
        return [(claims, decision.start_us, decision.source)]
    if len(claims) < len(parts):
        named = {part.name: part for part in parts}
        parts = tuple([named[claim.limit.name] for claim in claims])
    return [([claim], part.start_us, part.source) for claim, part in zip(claims, parts, strict=True)]


def bounded_wait_us(max_wait_us: int | None) -> int:
    """A wait in microseconds, at most MAX_WAIT; None means without bound."""
    if max_wait_us is None or max_wait_us > MAX_WAIT:
        return MAX_WAIT
    return int(max_wait_us)


def checked(claims: Iterable[Claim]) -> list[Claim]:
    """The claims of one decision as a list; raises ConfigurationError for no claims and for duplicates of a limit and key."""
    asked = list(claims)
    if not asked:
        raise ConfigurationError("a decision needs at least one claim")
    only_claims(asked)
    if len(asked) > 1 and is_twice(asked):
        raise ConfigurationError(
            "duplicate claim: the same limit and key twice in one decision; claim it once, with the whole cost"
        )
    return asked


@cython.cfunc
def is_twice(claims: list) -> cython.bint:  # type: ignore[type-arg]
    """Whether two claims have the same limit and key. Up to 12 claims are compared in pairs, which is faster than a set."""
    n: cython.Py_ssize_t = len(claims)
    i: cython.Py_ssize_t
    j: cython.Py_ssize_t
    one: Claim
    two: Claim
    if n > 12:
        return len({(claim.limit.identity, claim.key) for claim in claims}) < n
    for i in range(1, n):
        one = claims[i]
        for j in range(i):
            two = claims[j]
            if one.named.name == two.named.name and one.key == two.key and one.named.identity == two.named.identity:
                return True
    return False


def only_claims(claims: Iterable[object]) -> None:
    """Raises TypeError for anything but a Claim: the compiled code below does not check types."""
    for claim in claims:
        if not isinstance(claim, Claim):
            raise TypeError(f"expected a Claim, got {claim!r}")


def listed_claims(claims: Sequence[Claim]) -> list[Claim]:
    listed = list(claims)
    only_claims(listed)
    return listed


def checked_pairs(items: Iterable[KeyState]) -> list[KeyState]:
    pairs = list(items)
    for key, _ in pairs:
        if type(key) is not str:
            raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}")
    return pairs
