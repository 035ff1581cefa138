"""LimiterBase: what Limiter and AsyncLimiter share, compiled: hit, peek and hit_many, which never wait, and checks of arguments.

With one limit in a MemoryStore a hit is three steps in C: read the clock, look up the cell, run the algorithm. All other cases
(several limits, another store, a key per limit) build a list of claims for the store. The counters are C integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.limit import I64
    from cython.cimports.limitkeeper.decision import Decision, fresh
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, blank
    from cython.cimports.limitkeeper.stores.memory import MemoryStore
    from cython.cimports.limitkeeper.stores.several_rates_per_key import LimitHandle
else:
    from .algorithms.claim import Claim, NamedLimit
    from .algorithms.limit import I64
    from .clock import monotonic_us
    from .decision import Decision, fresh
    from .stores.cell_store import CellStore
    from .stores.memory import MemoryStore
    from .stores.several_rates_per_key import LimitHandle

from .algorithms.constants import MAX_WAIT
from .algorithms.limit import Limit, refuse_refund
from .algorithms.no_key import NO_KEY
from .errors import ConfigurationError, InvalidCost
from .observe.events import ALLOWED, OVERFLOW, REFUSED, Publisher
from .stores.contract import Store

Key = str | Mapping[str, str | None]
Cost = int | Mapping[str, int]
Integers = list[int]

COMPILED: bool = bool(cython.compiled)
"""Whether the compiled core is in use."""
ONE = 1
off = False
_times_off = 0
#: Larger than any capacity, and fits a C integer; larger costs are clamped to it.
HUGE = 4_000_000_000_000_000_000


def switch(turn_off: bool | int) -> None:
    """Turns limiting off, or on again; calls nest. See `limitkeeper.testing.unlimited`."""
    global off, _times_off
    _times_off += 1 if turn_off else -1
    off = _times_off > 0


def is_off() -> bool:
    """Whether limiting is turned off."""
    return bool(off)


@cython.ccall
def checked_cost(cost: object) -> I64:
    """Validates a cost, an int ≥ 0; clamps it to HUGE."""
    if isinstance(cost, str):
        remedy = "a call takes one key: use hit_many for several, or a mapping of limit names to keys"
        raise InvalidCost(f"cost must be a whole number ≥ 0, got the text {cost!r}; {remedy}")
    if isinstance(cost, bool) or not isinstance(cost, int):
        raise InvalidCost(f"cost must be a whole number ≥ 0, got {cost!r}; round it first")
    if cost < 0:
        raise InvalidCost(f"cost must be ≥ 0, got {cost}; use refund() to give back")
    return HUGE if cost > HUGE else int(cost)


def key_list(keys: Iterable[Key]) -> list[Key]:
    """The keys of `hit_many`; refuses a single key, over whose characters or names it would iterate."""
    if isinstance(keys, str) or isinstance(keys, dict):  # noqa: SIM101 - Cython does not check a union for exceptions
        raise TypeError(f"expected a list of keys, got one key: {keys!r}; write [key]")
    return list(keys)


@cython.ccall
def checked_key(key: object) -> str:
    """Validates a key, any str; a subclass of str is converted."""
    if isinstance(key, str):
        return key if type(key) is str else str.__str__(key)
    remedy = "pass str(…), or a mapping of limit names to keys"
    if key is None:  # str(None) would count all of them, and a user of that name, together unseen
        remedy = "callers without a key need one: their address, or 'anonymous' for all together"
    raise TypeError(f"a key must be a str, got {type(key).__name__}: {key!r}; {remedy}")


@cython.cfunc
def only_str(keys: list) -> cython.bint:
    """Whether all keys are plain strings."""
    i: cython.Py_ssize_t
    for i in range(len(keys)):
        if type(keys[i]) is not str:
            return False
    return True


@cython.cclass
class LimiterBase:
    """Compiled base of Limiter and AsyncLimiter."""

    # fmt: off
    __slots__ = ("__weakref__", "_allowed", "_busy", "_cell_store", "_handle", "_memory", "_own_claims", "_publisher", "_refused",
                 "_reserves", "_single", "limits", "name", "named", "names", "store")
    # fmt: on

    def __init__(self, limits: Mapping[str, Limit], store: Store, name: str | None) -> None:
        self.limits = dict(limits)
        self.name = name if name is not None else "; ".join(str(limit) for limit in limits.values())
        self.names = tuple(limits)
        self.named = tuple([NamedLimit(self.name, key, limit) for key, limit in limits.items()])
        self.store = store
        self._memory: Any = store if type(store) is MemoryStore else None  # a subclass is treated like any other store
        self._handle: Any = None
        self._cell_store: Any = None
        self._own_claims: Any = None
        self._busy = False
        for named in self.named:
            store.register(named)
        self._single: Any = self.named[0] if len(self.named) == 1 else None
        if self._memory is not None and self._single is not None:
            self._handle = self._single.handle
        if cython.compiled and getattr(type(store), "decide", None) is CellStore.decide:
            self._cell_store = store
            self._own_claims = [Claim(named, "") for named in self.named]
        self._reserves = not [named for named in self.named if not store.can_reserve(named)]
        self._publisher: Publisher | None = None
        self._allowed = self._refused = 0

    @property
    def events(self) -> Publisher:
        """The publisher of this limiter's events: `limiter.events.on("refused", listener)`."""
        if self._publisher is None:
            self._publisher = Publisher()
        publisher: Publisher = self._publisher
        return publisher

    # Claims ----------------------------------------------------------------------------------------------------

    def claims(self, key: Key, cost: Cost = 1) -> list[Claim]:
        """The claims of one call: a str is the key for every limit; a mapping has a key for every limit (None skips one)."""
        costs = self._costs(cost)
        if not isinstance(key, Mapping):
            plain = checked_key(key)
            return [Claim(named, plain, one) for named, one in zip(self.named, costs, strict=True)]
        if set(key) != set(self.names):
            raise ConfigurationError(
                f"expected a key for every limit of {self.name!r} ({', '.join(self.names)}), got {', '.join(map(str, key))}; "
                "None skips one"
            )
        return [
            Claim(named, checked_key(key[named.name]), one)
            for named, one in zip(self.named, costs, strict=True)
            if key[named.name] is not None
        ]

    def _costs(self, cost: Cost) -> list[int]:
        if not isinstance(cost, Mapping):
            return [checked_cost(cost)] * len(self.named)
        for name in cost:
            if name not in self.limits:
                raise ConfigurationError(f"cost: unknown limit {name!r}; {self.name!r} has {', '.join(self.names)}")
        return [checked_cost(cost.get(name, 1)) for name in self.names]

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def _decide_any(self, key: Key, cost: Cost, max_wait_us: I64, commit: cython.bint) -> Decision:
        """Decides in any store, for any number of limits."""
        if self._single is not None and isinstance(key, str) and not off:
            units: I64 = 1
            if cost is not ONE:
                units = self._costs(cost)[0] if isinstance(cost, Mapping) else checked_cost(cost)
            return self.store.decide_one(self._single, checked_key(key), units, max_wait_us, commit)
        if self._cell_store is not None and not self._busy and not off:
            self._busy = True  # a re-entrant call (from a finaliser or a clock) makes claims of its own
            try:
                if self._fill_claims(key, cost):
                    decided: Decision = self._cell_store.decide_checked(self._own_claims, self.names, max_wait_us, commit, 0)
                    return decided
            finally:
                self._busy = False
        claims = self.claims(key, cost)
        if off or not claims:
            return self._unlimited()
        return self.store.decide(claims, None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)

    @cython.cfunc
    def _fill_claims(self, key: Key, cost: Cost) -> cython.bint:
        """Sets keys and costs of this limiter's own claims, which saves allocating them; False for arguments of other types."""
        units: I64 = 1
        costs: dict | None = None
        keys: dict | None = None
        unnamed: cython.Py_ssize_t = 0
        if type(cost) is dict:
            costs = cost
            unnamed = len(costs)
        elif cost is not ONE:
            if type(cost) is not int:
                return False
            units = checked_cost(cost)
        if type(key) is dict:
            keys = key
            if len(keys) != len(self.names):
                return False
        elif type(key) is not str:
            return False
        i: cython.Py_ssize_t
        claim: Claim
        one: object = key
        for i in range(len(self.names)):
            if keys is not None:
                one = keys.get(self.names[i])
                if type(one) is not str:
                    return False
            if costs is not None:
                price = costs.get(self.names[i])
                unnamed -= price is not None
                units = 1 if price is None else checked_cost(price)
            claim = self._own_claims[i]
            claim.key = one  # type: ignore[assignment]  # a str, checked above
            claim.cost = claim.charged = units
        return unnamed == 0

    def _unlimited(self) -> Decision:
        """The Decision when every limit is skipped or limiting is turned off."""
        least = min(self.limits.values(), key=lambda limit: limit.capacity)
        return Decision(True, least.capacity, least.capacity, 0, 0, 0, 0, self.names[0])

    def _decide_claims(self, claims: list[Claim], key: Key, cost: Cost, max_wait_us: int) -> Decision:
        """As `_decide`, for given claims, which keep the states before and after the charge for an exact undo."""
        if off or not claims:
            return self._unlimited()
        shared = self._overflow
        decision: Decision = self.store.decide(claims, None if max_wait_us >= MAX_WAIT else max_wait_us)
        if self._publisher is not None and self._overflow != shared:
            self.events.publish(OVERFLOW, self.name, key, cost, decision)
        return decision

    def _decide(self, key: Key, cost: Cost = 1, max_wait_us: int = 0) -> Decision:
        """Charges at a start within `max_wait_us`. The caller counts and publishes the result."""
        if self._publisher is None:
            return self._decide_any(key, cost, max_wait_us, True)
        shared = self._overflow
        decision: Decision = self._decide_any(key, cost, max_wait_us, True)
        if self._overflow != shared:
            self.events.publish(OVERFLOW, self.name, key, cost, decision)
        return decision

    def _count(self, decision: Decision, key: Key, cost: Cost) -> Decision:
        """Counts a decision and publishes it if there are listeners."""
        if decision.allowed:
            self._allowed += 1
        else:
            self._refused += 1
        if self._publisher is not None:
            self._publisher.publish(ALLOWED if decision.allowed else REFUSED, self.name, key, cost, decision)
        return decision

    def hit(self, key: Key = NO_KEY, cost: Cost = 1) -> Decision:
        """Charges `cost` now, or returns a refusal with the time to retry. Never blocks.

        `key` is a str for all limits, or a mapping with a key for each (None skips a limit); `cost` is an int ≥ 0, or a mapping.
        """
        decision: Decision
        if self._publisher is not None:
            return self._count(self._decide(key, cost), key, cost)
        if self._handle is not None and type(key) is str and cost is ONE and not off:
            now_us: I64
            if self._memory.system is not None:
                now_us = monotonic_us() + self._memory.offset_us
            else:
                now_us = self._memory.now()
            if cython.compiled:
                decision = self._memory.decide_quickly(blank(self._memory, self._handle), self._handle, key, 1, 0, True, now_us)
            else:
                with self._memory._lock:
                    decision = self._memory.decide_quickly(fresh(self._handle.name), self._handle, key, 1, 0, True, now_us)
        elif self._single is not None and type(key) is str and cost is ONE and not off:
            decision = self.store.decide_one(self._single, key, 1, 0, True)
        else:
            decision = self._decide_any(key, cost, 0, True)
        if decision.allowed:
            self._allowed += 1
        else:
            self._refused += 1
        return decision

    def hit_many(self, keys: Iterable[Key], cost: int | Iterable[int] = 1) -> list[Decision]:
        """One hit per key, in order and at one time; a duplicate key sees its earlier hits."""
        if cost is ONE and self._publisher is None and self._handle is not None and not off:
            quick: list[Key] = keys if type(keys) is list else key_list(keys)
            if only_str(quick):
                return self._hit_many_in_memory(quick, None, None)
            keys = quick
        wanted, costs = self._keys_and_costs(keys, cost)
        overflow: list[int] = []
        if self._handle is not None and not off and only_str(wanted):
            found = self._hit_many_in_memory(wanted, costs, overflow)
        else:
            found = self._hit_many_in_store(wanted, costs)
        self._publish_many(wanted, costs, found, overflow)
        return found

    def _keys_and_costs(self, keys: Iterable[Key], cost: int | Iterable[int]) -> tuple[list[Key], list[int]]:
        """The keys, and a validated cost for each."""
        wanted = key_list(keys)
        if not isinstance(cost, Iterable):
            return wanted, [checked_cost(cost)] * len(wanted)
        costs = [checked_cost(one) for one in cost]
        if len(costs) != len(wanted):
            raise InvalidCost(f"expected one cost, or one for each of {len(wanted)} keys, got {len(costs)}")
        return wanted, costs

    def _publish_many(self, keys: list[Key], costs: list[int], found: list[Decision], overflow: list[int]) -> None:
        """Publishes many decisions if there are listeners; `overflow` has the indices of those made on overflow cells."""
        if self._publisher is None:
            return
        for i in overflow:
            self._publisher.publish(OVERFLOW, self.name, keys[i], costs[i], found[i])
        for decision, key, cost in zip(found, keys, costs, strict=True):
            self._publisher.publish(ALLOWED if decision.allowed else REFUSED, self.name, key, cost, decision)

    @cython.cfunc
    def _hit_many_in_memory(self, keys: list, costs: Integers | None, overflow: Integers | None) -> list:
        """Hits one limit in a MemoryStore for several str keys; the clock is read once. Without costs, each is 1."""
        units: I64 = 1
        memory: MemoryStore = self._memory
        handle: LimitHandle = self._handle
        n: cython.Py_ssize_t = len(keys)
        found: list = [None] * n
        allowed: I64 = 0
        i: cython.Py_ssize_t
        with memory._lock:
            now_us: I64 = memory.now()
            shared: I64 = memory.capacity.overflow
            for i in range(n):
                if costs is not None:
                    units = costs[i]
                decision: Decision = memory.decide_quickly(fresh(handle.name), handle, keys[i], units, 0, True, now_us)
                allowed += decision.allowed
                if overflow is not None and memory.capacity.overflow != shared:
                    shared = memory.capacity.overflow
                    overflow.append(i)
                found[i] = decision
        self._allowed += allowed
        self._refused += n - allowed
        return found

    def _hit_many_in_store(self, keys: list[Key], costs: list[int]) -> list[Decision]:
        """Hits several keys in any store, for any number of limits."""
        claims = self._claims_of_each(keys, costs)
        wanted = [some for some in claims if some]
        return self._merge_decisions(claims, self.store.decide_many(wanted, 0) if wanted else [])

    def _claims_of_each(self, keys: list[Key], costs: list[int]) -> list[list[Claim]]:
        """The claims of each key; an empty list if every limit is skipped or limiting is turned off."""
        claims = [self.claims(key, one) for key, one in zip(keys, costs, strict=True)]
        return [[] for _ in claims] if off else claims

    def _merge_decisions(self, claims: list[list[Claim]], decided: list[Decision]) -> list[Decision]:
        """Merges the store's decisions with those of keys without claims, in order, and counts them."""
        answers = iter(decided)
        found = [next(answers) if some else self._unlimited() for some in claims]
        for decision in found:
            if decision.allowed:
                self._allowed += 1
            else:
                self._refused += 1
        return found

    def peek(self, key: Key = NO_KEY, cost: Cost = 1) -> Decision:
        """The Decision that a hit of that cost would get now. Stores and counts nothing."""
        return self._decide_any(key, cost, 0, False)

    # Giving back -----------------------------------------------------------------------------------------------

    def _refund_claims(self, key: Key, cost: Cost) -> list[Claim]:
        """The claims of a refund; raises ConfigurationError for a leaky bucket queue."""
        for limit in self.limits.values():
            refuse_refund(limit)
        return [] if off else self.claims(key, cost)

    # Numbers ---------------------------------------------------------------------------------------------------

    @property
    def _overflow(self) -> int:
        """The number of the store's decisions on shared overflow cells, made because it was full."""
        return self._memory.capacity.overflow if self._memory is not None else self.store.overflow

    def _counts(self) -> tuple[int, int]:
        """(allowed, refused) since this limiter was created."""
        return self._allowed, self._refused
