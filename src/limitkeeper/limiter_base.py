"""The verbs that never wait: hit, peek, hit_many, refund, reset. A limiter is claims built once, plus these calls.

With one limit in memory a hit is three steps in C: read the clock, find the cell, ask the rule. Anything else (several limits,
another store, a key per limit) becomes a list of claims for the store. Counters are C integers in here, so that no layer
above has to count.
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
    from cython.cimports.limitkeeper.decision import Decision, fresh
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, LimitHandle, blank
    from cython.cimports.limitkeeper.stores.memory import MemoryStore
else:
    from .algorithms.claim import Claim, NamedLimit
    from .clock import monotonic_us
    from .decision import Decision, fresh
    from .stores.cell_store import CellStore, LimitHandle, blank
    from .stores.memory import MemoryStore

from .algorithms.constants import MAX_WAIT
from .algorithms.limit import Limit, refuse_refund
from .errors import ConfigurationError, InvalidCost
from .observe.events import ALLOWED, REFUSED, SHARED_CELL, Publisher
from .stores.contract import Store

Key = str | Mapping[str, str | None]
Cost = int | Mapping[str, int]

#: Whether this build runs compiled.
COMPILED: bool = bool(cython.compiled)
ONE = 1
off = False
_times_off = 0
#: Larger than any capacity: as good as infinite, and it still fits a C integer.
HUGE = 4_000_000_000_000_000_000


def switch(turn_off: bool | int) -> None:
    """Turns limiting off, and on again as often as it was turned off; see `limitkeeper.testing.unlimited`."""
    global off, _times_off
    _times_off += 1 if turn_off else -1
    off = _times_off > 0


def is_off() -> bool:
    """Whether limiting is turned off."""
    return bool(off)


@cython.ccall
def checked_cost(cost: Any) -> cython.longlong:
    """A cost is an int ≥ 0; what is larger than any capacity is as good as infinite."""
    if isinstance(cost, bool) or not isinstance(cost, int):
        raise InvalidCost(f"cost must be a whole number ≥ 0, not {cost!r}; round it first")
    if cost < 0:
        raise InvalidCost(f"cost must be ≥ 0, not {cost}; use refund() to give back")
    return HUGE if cost > HUGE else int(cost)


@cython.ccall
def checked_key(key: Any) -> str:
    """A key is a str, any str."""
    if isinstance(key, str):
        return key if type(key) is str else str.__str__(key)
    raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}; pass str(…), or a mapping of limit names to keys")


@cython.cfunc
def only_str(keys: list) -> cython.bint:  # type: ignore[type-arg]
    """Whether all keys are plain strings."""
    i: cython.Py_ssize_t
    for i in range(len(keys)):
        if type(keys[i]) is not str:
            return False
    return True


@cython.cclass
class LimiterBase:
    """What Limiter and AsyncLimiter share."""

    # fmt: off
    __slots__ = ("__weakref__", "_publisher", "allowed_calls", "busy", "cells", "limits", "memory", "name", "named", "names",
                 "only", "own_claims", "place", "refused_calls", "reserves", "store")
    # fmt: on

    def __init__(self, limits: Mapping[str, Limit], store: Store, name: str | None) -> None:
        self.limits = dict(limits)
        self.name = name if name is not None else "; ".join(str(limit) for limit in limits.values())
        self.names = tuple(limits)
        self.named = tuple([NamedLimit(self.name, key, limit) for key, limit in limits.items()])
        self.store = store
        self.memory: Any = store if type(store) is MemoryStore else None  # a subclass is asked as any other store
        self.place: Any = None
        self.cells: Any = None
        self.own_claims: Any = None
        self.busy = False
        for named in self.named:
            store.register(named)
        if self.memory is not None and len(self.named) == 1:
            self.place = self.named[0].place
        self.only: Any = self.named[0] if len(self.named) == 1 and self.place is None else None  # one limit, another store
        if cython.compiled and getattr(type(store), "decide", None) is CellStore.decide:
            self.cells = store
            self.own_claims = [Claim(named, "") for named in self.named]
        self.reserves = not [named for named in self.named if not store.can_reserve(named)]
        self._publisher: Publisher | None = None
        self.allowed_calls = self.refused_calls = 0

    @property
    def events(self) -> Publisher:
        """Where to listen: `limiter.events.on("refused", listener)`."""
        if self._publisher is None:
            self._publisher = Publisher()
        publisher: Publisher = self._publisher
        return publisher

    # Claims ----------------------------------------------------------------------------------------------------

    def claims(self, key: Any, cost: Any = 1) -> list[Claim]:
        """The claims of one call: a plain key goes to every limit, a mapping names every limit (None skips one)."""
        costs = self._costs(cost)
        if not isinstance(key, Mapping):
            plain = checked_key(key)
            return [Claim(named, plain, one) for named, one in zip(self.named, costs, strict=True)]
        if set(key) != set(self.names):
            raise ConfigurationError(
                f"the keys must name every limit of {self.name!r} ({', '.join(self.names)}), not {', '.join(map(str, key))}; "
                "None skips one"
            )
        return [
            Claim(named, checked_key(key[named.name]), one)
            for named, one in zip(self.named, costs, strict=True)
            if key[named.name] is not None
        ]

    def _costs(self, cost: Any) -> list[int]:
        if not isinstance(cost, Mapping):
            return [checked_cost(cost)] * len(self.named)
        for name in cost:
            if name not in self.limits:
                raise ConfigurationError(
                    f"cost names {name!r}, which is no limit of {self.name!r}; it has {', '.join(self.names)}"
                )
        return [checked_cost(cost.get(name, 1)) for name in self.names]

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def decide_one(self, key: str, cost: Any, max_wait_us: cython.longlong, commit: cython.bint) -> Decision:
        """One limit in memory, a plain key."""
        units: cython.longlong = 1
        if cost is not ONE:
            units = self._costs(cost)[0] if isinstance(cost, Mapping) else checked_cost(cost)
        memory: MemoryStore = self.memory
        if cython.compiled:
            return memory.decide_quickly(blank(memory, self.place), self.place, key, units, max_wait_us, commit, memory.now())
        with memory._lock:
            return memory.decide_quickly(blank(memory, self.place), self.place, key, units, max_wait_us, commit, memory.now())

    @cython.cfunc
    def ask(self, key: Any, cost: Any, max_wait_us: cython.longlong, commit: cython.bint) -> Decision:
        """Any store, any number of limits."""
        if self.place is not None and isinstance(key, str) and not off:
            return self.decide_one(checked_key(key), cost, max_wait_us, commit)
        if self.only is not None and isinstance(key, str) and not off:
            return self.store.decide_one(self.only, checked_key(key), self._costs(cost)[0], max_wait_us, commit)
        if self.cells is not None and not self.busy and not off:
            self.busy = True  # what runs Python meanwhile and comes back here gets claims of its own
            try:
                if self.fill_claims(key, cost):
                    decided: Decision = self.cells.decide_checked(self.own_claims, self.names, max_wait_us, commit, 0)
                    return decided
            finally:
                self.busy = False
        claims = self.claims(key, cost)
        if off or not claims:
            return self.free()
        return self.store.decide(claims, None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)

    @cython.cfunc
    def fill_claims(self, key: Any, cost: Any) -> cython.bint:
        """Fills in this limiter's own claims, so that none has to be made; False when the call is not that plain."""
        units: cython.longlong = 1
        costs: dict | None = None  # type: ignore[type-arg]
        keys: dict | None = None  # type: ignore[type-arg]
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
            claim = self.own_claims[i]
            claim.key = one
            claim.cost = claim.charged = units
        return unnamed == 0

    def free(self) -> Decision:
        """The answer when nothing limits: every limit skipped, or limiting turned off."""
        least = min(self.limits.values(), key=lambda limit: limit.capacity)
        return Decision(True, least.capacity, least.capacity, 0, 0, 0, 0, self.names[0])

    def decide_claims(self, claims: list[Claim], key: Key, cost: Cost, max_wait_us: int) -> Decision:
        """As `decide`, with the claims in hand: they remember what was charged, so that it can be undone exactly."""
        if off or not claims:
            return self.free()
        shared = self.shared
        decision: Decision = self.store.decide(claims, None if max_wait_us >= MAX_WAIT else max_wait_us)
        if self._publisher is not None and self.shared != shared:
            self.events.publish(SHARED_CELL, self.name, key, cost, decision)
        return decision

    def decide(self, key: Key, cost: Cost = 1, max_wait_us: int = 0) -> Decision:
        """A hit that may start later, within `max_wait_us`. Counted and told by whoever waits."""
        if self._publisher is None:
            return self.ask(key, cost, max_wait_us, True)
        shared = self.shared
        decision: Decision = self.ask(key, cost, max_wait_us, True)
        if self.shared != shared:
            self.events.publish(SHARED_CELL, self.name, key, cost, decision)
        return decision

    def count(self, decision: Decision, key: Any, cost: Any) -> Decision:
        """Counts a decision, and tells it when somebody listens."""
        if decision.allowed:
            self.allowed_calls += 1
        else:
            self.refused_calls += 1
        if self._publisher is not None:
            self._publisher.publish(ALLOWED if decision.allowed else REFUSED, self.name, key, cost, decision)
        return decision

    def hit(self, key: Key, cost: Cost = 1) -> Decision:
        """Takes `cost` now, or says when to come back. Never blocks."""
        decision: Decision
        if self._publisher is not None:
            return self.count(self.decide(key, cost), key, cost)
        if self.place is not None and type(key) is str and cost is ONE and not off:
            now_us: cython.longlong
            if self.memory.system is not None:
                now_us = monotonic_us() + self.memory.offset_us
            else:
                now_us = self.memory.now()
            if cython.compiled:
                decision = self.memory.decide_quickly(blank(self.memory, self.place), self.place, key, 1, 0, True, now_us)
            else:
                with self.memory._lock:
                    decision = self.memory.decide_quickly(fresh(self.place.name), self.place, key, 1, 0, True, now_us)
        elif self.only is not None and type(key) is str and cost is ONE and not off:
            decision = self.store.decide_one(self.only, key, 1, 0, True)
        else:
            decision = self.ask(key, cost, 0, True)
        if decision.allowed:
            self.allowed_calls += 1
        else:
            self.refused_calls += 1
        return decision

    def hit_many(self, keys: Iterable[Key], cost: int | Iterable[int] = 1) -> list[Decision]:
        """One hit for each key, in order and at one moment; a key that comes twice sees its first hit."""
        if cost is ONE and self._publisher is None and self.place is not None and not off:
            quick: list[Any] = keys if type(keys) is list else list(keys)
            if only_str(quick):
                return self.many(quick, None, None)
            keys = quick
        asked, costs = self.many_costs(keys, cost)
        strangers: list[int] = []
        if self.place is not None and not off and only_str(asked):
            found = self.many(asked, costs, strangers)
        else:
            found = self.store_many(asked, costs)
        self.tell_many(asked, costs, found, strangers)
        return found

    def many_costs(self, keys: Iterable[Key], cost: int | Iterable[int]) -> tuple[list[Any], list[int]]:
        """The keys, and a checked cost for each of them."""
        asked = list(keys)
        if not isinstance(cost, Iterable):
            return asked, [checked_cost(cost)] * len(asked)
        costs = [checked_cost(one) for one in cost]
        if len(costs) != len(asked):
            raise InvalidCost(f"{len(asked)} keys but {len(costs)} costs; give one cost for all, or one for each key")
        return asked, costs

    def tell_many(self, keys: list[Any], costs: list[int], found: list[Decision], strangers: list[int]) -> None:
        """Tells many decisions, when somebody listens; `strangers` are those that were decided on shared cells."""
        if self._publisher is None:
            return
        for i in strangers:
            self._publisher.publish(SHARED_CELL, self.name, keys[i], costs[i], found[i])
        for decision, key, cost in zip(found, keys, costs, strict=True):
            self._publisher.publish(ALLOWED if decision.allowed else REFUSED, self.name, key, cost, decision)

    @cython.cfunc
    def many(self, keys: list, costs: Any, strangers: Any) -> list:  # type: ignore[type-arg]
        """One limit in memory, plain keys: the clock is read once. No costs: one each."""
        if cython.compiled:
            return self.many_now(keys, costs, strangers)
        with self.memory._lock:
            return self.many_now(keys, costs, strangers)

    @cython.cfunc
    def many_now(self, keys: list, costs: Any, strangers: Any) -> list:  # type: ignore[type-arg]
        units: cython.longlong = 1
        memory: MemoryStore = self.memory
        place: LimitHandle = self.place
        now_us: cython.longlong = memory.now()
        n: cython.Py_ssize_t = len(keys)
        found: list = [None] * n  # type: ignore[type-arg]
        allowed: cython.longlong = 0
        shared: cython.longlong = memory.room.shared
        i: cython.Py_ssize_t
        for i in range(n):
            if costs is not None:
                units = costs[i]
            decision: Decision = memory.decide_quickly(fresh(place.name), place, keys[i], units, 0, True, now_us)
            allowed += decision.allowed
            if strangers is not None and memory.room.shared != shared:
                shared = memory.room.shared
                strangers.append(i)
            found[i] = decision
        self.allowed_calls += allowed
        self.refused_calls += n - allowed
        return found

    def store_many(self, keys: list[Any], costs: list[int]) -> list[Decision]:
        """Any store, any number of limits."""
        claims = self.many_claims(keys, costs)
        asked = [some for some in claims if some]
        return self.all_told(claims, self.store.decide_many(asked, 0) if asked else [])

    def many_claims(self, keys: list[Any], costs: list[int]) -> list[list[Claim]]:
        """The claims of each key; none where every limit is skipped or limiting is turned off."""
        claims = [self.claims(key, one) for key, one in zip(keys, costs, strict=True)]
        return [[] for _ in claims] if off else claims

    def all_told(self, claims: list[list[Claim]], decided: list[Decision]) -> list[Decision]:
        """The answers for all keys, those that nothing limits among them; counted."""
        answers = iter(decided)
        found = [next(answers) if some else self.free() for some in claims]
        for decision in found:
            if decision.allowed:
                self.allowed_calls += 1
            else:
                self.refused_calls += 1
        return found

    def peek(self, key: Key, cost: Cost = 1) -> Decision:
        """What a hit of that cost would be told now. Stores nothing, counts nothing."""
        return self.ask(key, cost, 0, False)

    # Giving back -----------------------------------------------------------------------------------------------

    def refundable(self, key: Key, cost: Cost) -> list[Claim]:
        """The claims of a refund; a queue can't take one."""
        for limit in self.limits.values():
            refuse_refund(limit)
        return [] if off else self.claims(key, cost)

    # Numbers ---------------------------------------------------------------------------------------------------

    @property
    def shared(self) -> int:
        """Decisions made on shared cells, because the store was full."""
        return self.memory.room.shared if self.memory is not None else self.store.overflow

    def counts(self) -> tuple[int, int]:
        """(allowed, refused) since this limiter was made."""
        return self.allowed_calls, self.refused_calls
