"""WrapperStore: base of the stores that wrap others. What only passes on is forwarded; the rest is a plan, written once.

A subclass overrides the `plan_…` methods, which `sans_io` performs for sync and async callers, and methods that must not cost a
plan's 0.4 µs a step. `plan_decide` may return the Decision itself where it needs no call.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..algorithms.claim import Claim, NamedLimit
from ..clock import Clock
from ..decision import STORE, Decision
from .contract import Booking, KeyState, Store
from .sans_io import Call, Left, Plan, arun, run
from .store_hash import StoreHash

T = TypeVar("T")
Requests = Sequence[Sequence[Claim]]


@cython.cclass
class WrapperStore(Store):
    """A store around `inner`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def local(self) -> bool:  # type: ignore[override]
        return bool(self.inner.local)

    @property
    def never_waits(self) -> bool:
        return bool(self.inner.never_waits)

    @property
    def clock(self) -> Clock:
        return self.inner.clock

    def now_us(self) -> int:
        return self.inner.now_us()

    @property
    def overflow(self) -> int:
        return self.inner.overflow

    def open_hash(self, name: str) -> StoreHash | None:
        return self.inner.open_hash(name)

    def can_reserve(self, limit: NamedLimit) -> bool:
        return self.inner.can_reserve(limit)

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        return self.inner.items(limit)

    def rate_items(self, limit: NamedLimit) -> Iterable[KeyState]:
        return self.inner.rate_items(limit)

    # Plans -----------------------------------------------------------------------------------------------------

    def plan_left(self) -> Left | None:
        """The time in which the calls of a plan may begin; None: not bounded."""
        return None

    def run_plan(self, plan: Plan[T]) -> T:
        return run(plan, left=self.plan_left())

    async def arun_plan(self, plan: Plan[T]) -> T:
        return await arun(plan, left=self.plan_left())

    def plan_decide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision | Plan[Decision]:
        raise NotImplementedError

    def plan_decide_many(self, asks: Requests, max_wait_us: int | None) -> Plan[list[Decision]]:
        return (yield Call(self.inner, "decide_many", (asks, max_wait_us)))  # type: ignore[no-any-return]

    def plan_give_back(self, claims: Sequence[Claim], charged_at: int, source: str) -> Plan[bool]:
        return (yield Call(self.inner, "give_back", (claims, charged_at, source)))  # type: ignore[no-any-return]

    def plan_rebook(self, bookings: Sequence[Booking]) -> Plan[list[Decision | None]]:
        raise NotImplementedError

    def plan_reset(self, claims: Sequence[Claim]) -> Plan[None]:
        yield Call(self.inner, "reset", (claims,))

    def plan_load(self, limit: NamedLimit, items: Iterable[KeyState]) -> Plan[None]:
        yield Call(self.inner, "load", (limit, items))

    def plan_close(self) -> Plan[None]:
        yield Call(self.inner, "close")

    # Sync and async --------------------------------------------------------------------------------------------

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        return self._decide(claims, max_wait_us, commit, remember, not_before_us)

    def adecide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Coroutine[Any, Any, Decision]:
        return self._adecide(claims, max_wait_us, commit, remember, not_before_us)

    @cython.ccall
    @cython.annotation_typing(False)
    def _decide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision:
        found = self.plan_decide(claims, max_wait_us, commit, remember, not_before_us)
        return found if isinstance(found, Decision) else self.run_plan(found)

    async def _adecide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision:
        found = self.plan_decide(claims, max_wait_us, commit, remember, not_before_us)
        return found if isinstance(found, Decision) else await self.arun_plan(found)

    def decide_many(self, asks: Requests, max_wait_us: int | None = 0) -> list[Decision]:
        return self.run_plan(self.plan_decide_many(asks, max_wait_us))

    async def adecide_many(self, asks: Requests, max_wait_us: int | None = 0) -> list[Decision]:
        return await self.arun_plan(self.plan_decide_many(asks, max_wait_us))

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> bool:
        return self.run_plan(self.plan_give_back(claims, charged_at, source))

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> bool:
        return await self.arun_plan(self.plan_give_back(claims, charged_at, source))

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        return self.run_plan(self.plan_rebook(bookings))

    async def arebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        return await self.arun_plan(self.plan_rebook(bookings))

    def reset(self, claims: Sequence[Claim]) -> None:
        self.run_plan(self.plan_reset(claims))

    async def areset(self, claims: Sequence[Claim]) -> None:
        await self.arun_plan(self.plan_reset(claims))

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        self.run_plan(self.plan_load(limit, items))

    async def aload(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        await self.arun_plan(self.plan_load(limit, items))

    def close(self) -> None:
        self.run_plan(self.plan_close())

    async def aclose(self) -> None:
        await self.arun_plan(self.plan_close())


def copy_states(into: Sequence[Claim], claims: Sequence[Claim], logs: bool = True) -> None:
    """Copies what claims remember of a charge: the key's last reset, and the states, those of logs only with `logs`."""
    for target, claim in zip(into, claims, strict=True):
        target.reset_id = claim.reset_id
        states = claim.remembered()
        if states is not None and (logs or not claim.limit.limit.logs):
            target.remember(*states, claim.charged_at())
