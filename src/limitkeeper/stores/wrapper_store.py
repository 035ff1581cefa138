"""WrapperStore: base of the stores that wrap others: passes on to the store inside what a subclass does not override."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..algorithms.claim import Claim, NamedLimit
from ..clock import Clock
from ..decision import Decision
from .contract import KeyState, PlannedStore, Requests, Store
from .sans_io import Call, Plan, arun, run
from .store_hash import StoreHash


@cython.cclass
class WrapperStore(PlannedStore):
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
    def blocks_event_loop(self) -> bool:
        return bool(self.inner.blocks_event_loop)

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

    def release(self, leaving: Callable[[str], bool]) -> None:
        self.inner.release(leaving)

    def plan_decide_many(self, asks: Requests, max_wait_us: int | None) -> Plan[list[Decision]]:
        return (yield Call(self.inner, "decide_many", (asks, max_wait_us)))  # type: ignore[no-any-return]

    def plan_give_back(self, claims: Sequence[Claim], charged_at: int, source: str) -> Plan[bool]:
        return (yield Call(self.inner, "give_back", (claims, charged_at, source)))  # type: ignore[no-any-return]

    def plan_reset(self, claims: Sequence[Claim]) -> Plan[None]:
        yield Call(self.inner, "reset", (claims,))

    def plan_load(self, limit: NamedLimit, items: Iterable[KeyState]) -> Plan[None]:
        yield Call(self.inner, "load", (limit, items))

    def plan_close(self) -> Plan[None]:
        yield Call(self.inner, "close")

    def close(self) -> None:
        run(self.plan_close())  # without a budget: what is held goes back, however many calls that takes

    async def aclose(self) -> None:
        await arun(self.plan_close())


def copy_states(into: Sequence[Claim], claims: Sequence[Claim], logs: bool = True) -> None:
    """Copies what claims remember of a charge: the key's last reset, and the states, those of logs only with `logs`."""
    for target, claim in zip(into, claims, strict=True):
        target.reset_id = claim.reset_id
        states = claim.remembered()
        if states is not None and (logs or not claim.limit.limit.logs):
            target.remember(*states, claim.charged_at())
            target.number = claim.number
