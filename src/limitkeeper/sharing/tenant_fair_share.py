"""FairShare: one capacity, divided among tenants.

    share = FairShare("350/s", guarantees={"acme": "200/s"}, weights={"gold": 3})
    share.hit("acme")

`virtual_time_admission.py` has the rule and its bounds. State is in this process, in a file (`file_fair_share.py`) that the
processes of a host share, or in Redis (`redis_fair_share.py`). All FairShares on one store with the same name, rates, weights and
window share one capacity; with other rates they start afresh, because finish times mean nothing under other weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.decision import Decision, filled
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.sharing.virtual_time_admission import Answer, FairAdmission
else:
    from ..clock import monotonic_us
    from ..decision import Decision, filled
    from .virtual_time_admission import Answer, FairAdmission

from ..clock import SYSTEM, Clock, SystemClock
from ..errors import ConfigurationError, InvalidCost, InvalidLimit
from ..fork import reset_after_fork
from ..garbage_collection import uncollected
from ..rate import MAX_COUNT, Duration, Rate, RateValue, duration_us, parse_rate
from ..stores.contract import Store
from ..stores.guarded import GuardedStore
from ..stores.leased import LeasedStore
from ..stores.memory import MemoryStore
from ..stores.urls import store_from_url

ONE: object = 1
#: An Answer of virtual_time_admission.py as Python values.
AnswerFields = tuple[bool, int, int, int]


class Backend(Protocol):
    """Where the state of a capacity is."""

    local: bool

    def decide(self, tenant: str, cost: int, commit: bool) -> AnswerFields: ...

    async def adecide(self, tenant: str, cost: int, commit: bool) -> AnswerFields: ...

    def refund(self, tenant: str, cost: int) -> None: ...

    async def arefund(self, tenant: str, cost: int) -> None: ...

    def close(self) -> None: ...


@cython.cclass
class MemoryBackend:
    """The state in this process, under a lock, which a finaliser may find held by its own thread. In the plain build a finaliser
    could run in the middle of any change, and a signal handler could raise there (`_unbroken`)."""

    local = True

    def __init__(self, queue: FairAdmission, clock: Clock) -> None:
        self.queue = queue
        self._now_us = None if isinstance(clock, SystemClock) else clock.now_us  # None: the monotonic clock, read without a call
        self._start_us = -1  # of the first call: a double holds microseconds since 1970, but not fractions of them
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        self._lock, self._changing = threading.RLock(), not cython.compiled  # in the middle of a change of another thread

    @cython.cfunc
    def _elapsed(self) -> cython.double:
        now_us: cython.longlong = monotonic_us() if self._now_us is None else self._now_us()
        if self._start_us < 0:
            self._start_us = now_us
        elapsed: cython.double = cython.cast(cython.double, now_us - self._start_us)
        if elapsed < self.queue.now:  # the clock went back: time continues from where it was
            elapsed = self.queue.now
            self._start_us = now_us - cython.cast(cython.longlong, int(elapsed))
        return elapsed

    @cython.ccall
    def decide(self, tenant: str, cost: cython.longlong, commit: cython.bint) -> Answer:
        with self._lock:
            if not cython.compiled:
                return self._unbroken(self.queue.decide, tenant, cost, self._elapsed(), commit)  # type: ignore[no-any-return]
            return self.queue.decide(tenant, cost, self._elapsed(), commit)

    @cython.annotation_typing(False)
    def _unbroken(self, call: Callable[..., Any], *args: object) -> Any:
        """A call of the queue that nothing interrupts but a signal handler that raises; what it broke, the next call repairs."""
        if self._changing:
            self.queue.recount()
        self._changing = True
        answer = uncollected(call, *args)
        self._changing = False
        return answer

    async def adecide(self, tenant: str, cost: int, commit: bool) -> AnswerFields:
        return self.decide(tenant, cost, commit)

    def refund(self, tenant: str, cost: int) -> None:
        with self._lock:
            self._unbroken(self.queue.refund, tenant, cost, self._elapsed())

    async def arefund(self, tenant: str, cost: int) -> None:
        self.refund(tenant, cost)

    def close(self) -> None:
        """Nothing is open."""


#: The capacities of each memory store, by their names.
_in_memory: WeakKeyDictionary[Store, dict[str, MemoryBackend]] = WeakKeyDictionary()


@cython.cclass
class FairShare:
    """`FairShare("350/s", guarantees={"acme": "200/s"})`: a tenant gets its guarantee whatever the others do, and of the rest its
    weighted max-min share.

    `weights`: the share of a tenant beside others, 1 by default. `window`: how much of its guarantee a tenant may save up, and
    how much of the capacity all may hold together. `store`: None (this process), or a MemoryStore, SharedStore, RedisStore, or a
    URL of one; behind a LeasedStore or GuardedStore, the store that it wraps.
    """

    @cython.annotation_typing(False)
    def __init__(
        self,
        total: RateValue,
        *,
        weights: Mapping[str, int] | None = None,
        guarantees: Mapping[str, RateValue] | None = None,
        window: Duration = "1s",
        store: Store | str | None = None,
        name: str | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.total = as_rate(total)
        self.window_us = duration_us(window)
        if self.window_us < 1000:
            raise InvalidLimit(f"window must be at least 1 ms, got {window!r}")
        # Sorted: processes with equal settings share one state, which has the guarantees in order.
        self.guarantees = {tenant: as_rate(rate) for tenant, rate in sorted((guarantees or {}).items())}
        self.weights = dict(weights or {})
        self.name = name if name is not None else f"fair share {self.total}"
        check_weights(self.weights)
        check_guarantees(self.total, self.guarantees)
        per_us = self.total.count / self.total.period
        self.size = max(2.0, per_us * self.window_us)
        reserved = {tenant: rate.count / rate.period for tenant, rate in self.guarantees.items()}
        queue = FairAdmission(per_us, self.size, float(self.window_us), self.weights, reserved)
        self._limit = int(self.size / 2 + 1e-9)
        self._limits = {tenant: int(max(2, self.size / 2, rate * self.window_us) + 1e-9) for tenant, rate in reserved.items()}
        self._owns_store = isinstance(store, str)
        self._backend: Backend = MemoryBackend(queue, clock) if store is None else self._in_store(store, queue)
        self._memory = self._backend if isinstance(self._backend, MemoryBackend) else None

    def _in_store(self, store: Store | str, queue: FairAdmission) -> Backend:
        opened = store_from_url(store) if isinstance(store, str) else store
        while isinstance(opened, (GuardedStore, LeasedStore)):
            opened = opened.inner
        # The names of all settings: a state under other weights or rates would mean something else.
        settings = (self.total, sorted(self.weights.items()), list(self.guarantees.items()), self.window_us)
        identity = f"{self.name} {settings}"
        if isinstance(opened, MemoryStore):
            return _in_memory.setdefault(opened, {}).setdefault(identity, MemoryBackend(queue, opened.clock))
        from ..stores.redis import RedisStore  # imported late: both are optional parts
        from ..stores.shared import SharedStore

        if isinstance(opened, RedisStore):
            from .redis_fair_share import RedisBackend

            return RedisBackend(opened, identity, queue)
        if isinstance(opened, SharedStore):
            from .file_fair_share import FileBackend

            return FileBackend(opened, identity, queue)
        kinds = "a MemoryStore, a SharedStore or a RedisStore"
        raise ConfigurationError(f"a capacity is kept in {kinds}, not in {opened!r}; give one of these")

    def __repr__(self) -> str:
        return f"<FairShare {self.name!r} of {self.total}, {len(self.guarantees)} guarantees>"

    @cython.annotation_typing(False)
    def hit(self, tenant: str, cost: int = 1) -> Decision:
        """Charges the cost to a tenant if its guarantee or its share has room."""
        if self._memory is not None and type(tenant) is str and cost is ONE:
            return self._quick_hit(tenant)
        return self._decision(tenant, self._backend.decide(*checked(tenant, cost), True))

    @cython.cfunc
    def _quick_hit(self, tenant: str) -> Decision:
        """A hit of one unit in this process: no argument to check, nothing of the answer is a Python number."""
        answer: Answer = self._memory.decide(tenant, 1, True)  # type: ignore[union-attr]
        limit: cython.longlong = self._limits.get(tenant, self._limit) if self._limits else self._limit
        return filled(self.name, (answer[0], limit, answer[1], answer[2], answer[3], 0), 0)

    @cython.annotation_typing(False)
    def peek(self, tenant: str, cost: int = 1) -> Decision:
        """What a hit would be answered now; stores nothing."""
        return self._decision(tenant, self._backend.decide(*checked(tenant, cost), False))

    def refund(self, tenant: str, cost: int = 1) -> None:
        """Gives back what a tenant was charged, as far as it has not drained yet."""
        self._backend.refund(*checked(tenant, cost))

    @cython.annotation_typing(False)
    async def ahit(self, tenant: str, cost: int = 1) -> Decision:
        return self._decision(tenant, await self._backend.adecide(*checked(tenant, cost), True))

    @cython.annotation_typing(False)
    async def apeek(self, tenant: str, cost: int = 1) -> Decision:
        return self._decision(tenant, await self._backend.adecide(*checked(tenant, cost), False))

    async def arefund(self, tenant: str, cost: int = 1) -> None:
        await self._backend.arefund(*checked(tenant, cost))

    def close(self) -> None:
        """Closes the store if it was given as a URL."""
        if self._owns_store:
            self._backend.close()

    @cython.annotation_typing(False)
    def limit_of(self, tenant: str) -> int:
        """The largest cost of a tenant that could ever pass at once."""
        return self._limits.get(tenant, self._limit)

    @cython.annotation_typing(False)
    def _decision(self, tenant: str, answer: AnswerFields) -> Decision:
        allowed, remaining, retry_us, reset_us = answer
        return Decision(allowed, self._limits.get(tenant, self._limit), remaining, retry_us, reset_us, 0, 0, self.name)


def as_rate(value: RateValue) -> Rate:
    return value if isinstance(value, Rate) else parse_rate(value)[0]


@cython.annotation_typing(False)
def checked(tenant: str, cost: int) -> tuple[str, int]:
    if not isinstance(tenant, str):
        raise TypeError(f"a tenant must be a string, got {tenant!r}")
    if isinstance(cost, bool) or not isinstance(cost, int) or not 0 <= cost <= MAX_COUNT:
        raise InvalidCost(f"cost must be a whole number from 0 to {MAX_COUNT}, got {cost!r}")
    return tenant, cost


def check_weights(weights: Mapping[str, int]) -> None:
    for tenant, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int) or not 1 <= weight <= 1000:
            raise InvalidLimit(f"the weight of {tenant!r} must be a whole number from 1 to 1000, got {weight!r}")


def check_guarantees(total: Rate, guarantees: Mapping[str, Rate]) -> None:
    """All guarantees together must leave something of the capacity, or the others could be starved."""
    promised = sum(rate.count / rate.period for rate in guarantees.values())
    if promised * total.period > total.count + 1e-9:
        added = f"{promised * 1e6:g}/s"
        raise InvalidLimit(f"the guarantees add up to {added}, more than the capacity of {total}: lower one, or raise it")
