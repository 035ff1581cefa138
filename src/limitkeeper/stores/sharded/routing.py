"""The way of one decision to its shard: a slot, a look at a table, the shard's own answer.

`table[slot]` is the shard that a slot lives on, so a route costs a CRC and an index; there is nothing to cache and nothing to
go stale. A slot that is on its way to another shard has a closed door in the table: who meets it leaves, waits for the move to
end, and asks again.

A move has to know that nobody who read the table before is still deciding. So everybody steps in before reading it and steps
out after deciding, on one of two counters; the move closes its doors, sends newcomers to the other counter, and waits until
the first is empty. Rejected: a lock around every decision (far shards would be asked one at a time).
"""

from __future__ import annotations

import threading
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.stores.contract import Store
    from cython.cimports.limitkeeper.stores.memory import MemoryStore
    from cython.cimports.limitkeeper.stores.sharded.hot_keys import HotKeys
else:
    from ...algorithms.claim import Claim, NamedLimit
    from ...decision import Decision
    from ..contract import Store
    from ..memory import MemoryStore
    from .hot_keys import HotKeys

from zlib import crc32

from ...algorithms import TokenBucket
from ...algorithms.claim import NamedLimit as Named
from ...errors import StoreUnavailable
from ...fork import reset_after_fork
from ..memory import MemoryStore as Memory

#: What holds a shard back until a common start (see span.py): a token every microsecond.
PACE = TokenBucket("1 per 1us burst 1")


@cython.cclass
class Shard:
    """One store under its name. A door that is closed (`open` False) stands in the table for a slot that is being moved.

    `leasing` is the same shard through a store that leases from it, for keys that `heavy` has found to be hot; `base` leads
    back from there.
    """

    __slots__ = ("base", "gate", "heavy", "leasing", "memory", "name", "number", "open", "pacer", "store", "weight")

    def __init__(self, number: int, name: str, weight: float, store: Any, heavy: Any = None) -> None:
        self.number = number
        self.name = name
        self.weight = weight
        self.store = store
        self.memory: Any = store if type(store) is Memory else None
        self.heavy: Any = heavy
        self.leasing: Any = None
        self.base: Any = None
        self.gate: Any = None
        self.pacer: Any = Named("limitkeeper", "pacer", PACE)
        self.open = store is not None

    def __repr__(self) -> str:
        return f"<shard {self.name!r}>"


@cython.cclass
class Spread:
    """A limit as each shard knows it: a NamedLimit of its own for every shard, in which that store may keep its place."""

    __slots__ = ("named", "owner", "parts")

    def __init__(self, owner: Any, named: Any) -> None:
        self.owner = owner
        self.named = named
        self.parts: list[Any] = []

    @cython.cfunc
    def at(self, shard: Shard) -> NamedLimit:
        if shard.number >= len(self.parts):
            self.grow(shard.number)
        return self.parts[shard.number]  # type: ignore[no-any-return]

    def grow(self, number: int) -> None:
        named = self.named
        self.parts = self.parts + [Named(named.limiter, named.name, named.limit) for _ in range(len(self.parts), number + 1)]


@cython.cclass
class Routed(Store):
    """What of a ShardedStore is on the way of every decision."""

    def __init__(self) -> None:
        self.table: list[Any] = []
        self.side = 0
        self.inside_0 = self.inside_1 = 0
        self._count = threading.Lock()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """For the child of a fork, in which nobody else is under way."""
        self._count = threading.Lock()
        self.inside_0 = self.inside_1 = 0

    # Steps -----------------------------------------------------------------------------------------------------

    def step_in(self) -> int:
        """Before the table is read; the answer is for stepping out."""
        return self.enter()

    def step_out(self, side: int) -> None:
        """After deciding."""
        self.leave(side)

    @cython.cfunc
    def enter(self) -> cython.int:
        if cython.compiled:
            side: cython.int = self.side
            if side:
                self.inside_1 += 1
            else:
                self.inside_0 += 1
            return side
        with self._count:
            if self.side:
                self.inside_1 += 1
            else:
                self.inside_0 += 1
            return self.side

    @cython.cfunc
    def leave(self, side: cython.int) -> cython.int:
        if cython.compiled:
            if side:
                self.inside_1 -= 1
            else:
                self.inside_0 -= 1
            return 0
        with self._count:
            if side:
                self.inside_1 -= 1
            else:
                self.inside_0 -= 1
            return 0

    def turn_side(self) -> int:
        """Sends newcomers to the other counter; answers with the one that is to become empty."""
        with self._count:
            old = int(self.side)
            self.side = 1 - old
            return old

    def within(self, side: int) -> int:
        """How many are between their steps on this counter."""
        return int(self.inside_1 if side else self.inside_0)

    # Routes ----------------------------------------------------------------------------------------------------

    def home(self, key: str) -> Shard:
        """The shard of a key, or a closed door."""
        return self.find(key)

    @cython.cfunc
    def find(self, key: str) -> Shard:
        crc: cython.ulonglong = crc32(key.encode("utf-8", "surrogatepass"))
        return self.table[((crc * 0x9E3779B1) >> 18) & 16_383]  # type: ignore[no-any-return]

    @cython.cfunc
    def spread(self, named: NamedLimit) -> Spread:
        spread: Spread
        if isinstance(named.place, Spread):
            spread = named.place
            if spread.owner is self:
                return spread
        spread = Spread(self, named)
        named.place = spread
        return spread

    @cython.ccall
    def at(self, named: NamedLimit, shard: Shard) -> NamedLimit:
        """A limit as this shard knows it."""
        return self.spread(named).at(shard)

    def sent(self, claims: list[Claim], shard: Shard) -> list[Claim]:
        """The claims as this shard knows them, with what they remember."""
        return self.copies(claims, shard)

    @cython.cfunc
    def copies(self, claims: list, shard: Shard) -> list:  # type: ignore[type-arg]
        found: list = []  # type: ignore[type-arg]
        claim: Claim
        copy: Claim
        for claim in claims:
            copy = another(claim, self.spread(claim.named).at(shard))
            found.append(copy)
        return found

    def kept(self, claims: list[Claim], copies: list[Claim]) -> int:
        """What the copies remember of a charge goes back into the claims they were made of."""
        return self.keep(claims, copies)

    @cython.cfunc
    def keep(self, claims: list, copies: list) -> cython.int:  # type: ignore[type-arg]
        i: cython.Py_ssize_t
        for i in range(len(claims)):
            remember(claims[i], copies[i])
        return 0

    def only(self, claims: list[Claim]) -> Shard | None:
        """The shard on which all claims live (or the closed door that all of them meet); None when they live on several."""
        return self.together(claims)

    @cython.cfunc
    def together(self, claims: list) -> Shard | None:  # type: ignore[type-arg]
        claim: Claim = claims[0]
        first: str = claim.key
        shard: Shard = self.find(first)
        i: cython.Py_ssize_t
        for i in range(1, len(claims)):
            claim = claims[i]
            if claim.key is not first and claim.key != first and self.find(claim.key) is not shard:
                return None
        return shard

    # One limit, one key ----------------------------------------------------------------------------------------

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        shard: Shard
        side: cython.int = self.enter()
        try:
            shard = self.find(key)
            if shard.open:
                return self.asked(shard, named, key, cost, max_wait_us, commit)
        except StoreUnavailable as error:
            lost: Any = error
        else:
            lost = None
        finally:
            self.leave(side)
        self.elsewhere(shard, lost)
        return self.decide_one(named, key, cost, max_wait_us, commit)

    @cython.cfunc
    def asked(
        self,
        shard: Shard,
        named: NamedLimit,
        key: str,
        cost: cython.longlong,
        max_wait_us: cython.longlong,
        commit: cython.bint,
    ) -> Decision:
        """A shard's own answer; that of its leases for a hot key."""
        decision: Decision
        heavy: HotKeys = shard.heavy
        if heavy is not None and heavy.hot and key in heavy.hot and shard.leasing is not None:
            shard = shard.leasing
        known: NamedLimit = self.spread(named).at(shard)
        if shard.memory is not None:
            memory: MemoryStore = shard.memory
            return memory.decide_one(known, key, cost, max_wait_us, commit)
        decision = shard.store.decide_one(known, key, cost, max_wait_us, commit)
        if heavy is not None:
            heavy.hit(key, decision.start_us - decision.wait_us)
        return decision

    @cython.ccall
    def straight(self, claims: list, max_wait_us: Any, commit: Any) -> Decision | None:  # type: ignore[type-arg]
        """The answer to claims that all live on one shard; None when that can't be had straight away, and nothing is done."""
        lost: Any = None
        shard: Shard = None  # type: ignore[assignment]
        side: cython.int = self.enter()
        try:
            shard = self.together(claims)  # type: ignore[assignment]
            if shard is None or not shard.open:
                return None
            way: Shard = self.through(shard, claims)
            sent: list = self.copies(claims, way)  # type: ignore[type-arg]
            decision: Decision = way.store.decide(sent, max_wait_us, commit=commit)
            self.keep(claims, sent)
            if shard.heavy is not None:
                self.count(shard, claims, decision)
            return decision
        except StoreUnavailable as error:
            lost = error
        finally:
            self.leave(side)
        self.elsewhere(shard, lost)
        return None

    def way(self, shard: Shard, claims: list[Claim]) -> Shard:
        """A shard through its leases, when all claims are of one hot key; otherwise itself."""
        return self.through(shard, claims)

    @cython.cfunc
    def through(self, shard: Shard, claims: list) -> Shard:  # type: ignore[type-arg]
        heavy: HotKeys = shard.heavy
        if heavy is None or shard.leasing is None or not heavy.hot:
            return shard
        claim: Claim = claims[0]
        first: str = claim.key
        if first not in heavy.hot:
            return shard
        for claim in claims:
            if claim.key != first:
                return shard
        return shard.leasing  # type: ignore[no-any-return]

    def counted(self, shard: Shard, claims: list[Claim], decision: Decision) -> int:
        """Counts a decision for its first key."""
        return self.count(shard, claims, decision)

    @cython.cfunc
    def count(self, shard: Shard, claims: list, decision: Decision) -> cython.int:  # type: ignore[type-arg]
        heavy: HotKeys = shard.heavy
        claim: Claim = claims[0]
        heavy.hit(claim.key, decision.start_us - decision.wait_us)
        return 0

    @cython.ccall
    def hit_nowait(self, named: NamedLimit, key: str, cost: cython.longlong) -> Decision | None:
        side: cython.int = self.enter()
        try:
            shard: Shard = self.find(key)
            if not shard.open:
                return None
            if shard.memory is not None:
                return self.asked(shard, named, key, cost, 0, True)
            heavy: HotKeys = shard.heavy
            if heavy is not None and heavy.hot and key in heavy.hot and shard.leasing is not None:
                shard = shard.leasing
            decision: Decision = shard.store.hit_nowait(self.spread(named).at(shard), key, cost)
            if decision is not None and heavy is not None:
                heavy.hit(key, decision.start_us - decision.wait_us)
            return decision
        finally:
            self.leave(side)

    def elsewhere(self, shard: Any, lost: Any) -> None:
        """The shard could not be asked: its door is closed, or it is lost. Returns when it is time to ask again, or raises."""
        raise NotImplementedError


@cython.cfunc
def another(claim: Claim, named: NamedLimit) -> Claim:
    """The same claim on a shard's own name for its limit."""
    copy: Claim
    if cython.compiled:
        copy = Claim.__new__(Claim)  # as Claim(…), without building its arguments: a third of what a route costs
        copy.named = named
        copy.key = claim.key
        copy.cost = claim.cost
        copy.charged = claim.charged
    else:
        copy = Claim(named, claim.key, claim.cost, claim.charged)
    remember(copy, claim)
    return copy


@cython.cfunc
def remember(into: Claim, of: Claim) -> cython.int:
    """Copies what a claim remembers of its charge."""
    into.undoable = of.undoable
    into.a = of.a
    into.b = of.b
    into.c = of.c
    into.new_a = of.new_a
    into.new_b = of.new_b
    into.new_c = of.new_c
    return 0
