"""Router: finds the shard of a key by its slot, and translates claims to the limits as that shard knows them.

`table[slot]` is the shard that holds a slot, so a route costs a CRC and an index. A slot that is being moved has a shard with a
`gate` in the table: a caller that finds it leaves, waits for the gate, and starts again.

A move has to know that no caller that read the table before it is still deciding. So every caller enters before it reads the
table and leaves after it has decided, on one of two counters; the move closes its gates, switches new callers to the other
counter, and waits until the first is 0. Rejected: a lock around every decision (remote shards would be called one at a time).

In plain Python a signal handler may raise between entering and `try`, or before `leave`. There a caller holds a `Visit`, which
leaves when it is collected. (Compiled, no handler runs at these moments, and a caller holds the number of its counter.)
"""

from __future__ import annotations

import threading
from weakref import WeakSet

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.stores.sharded.router import ascii_slot

from ...algorithms.claim import Claim, NamedLimit
from ...decision import Decision
from ...errors import StoreUnavailable
from ...fork import reset_after_fork
from ..contract import Store
from ..sans_io import Pending
from .hot_key_detector import HotKeys
from .slots import slot_of


@cython.cclass
class Shard:
    """One store under its name. In the table, a shard with a `gate` stands for slots that are being moved.

    `leased` is the same shard through a LeasedStore, for keys that `hot_keys` has found to be hot; its `base` is this shard.
    """

    __slots__ = ("base", "gate", "hot_keys", "leased", "name", "number", "store", "weight")

    @cython.annotation_typing(False)
    def __init__(
        self,
        number: int,
        name: str,
        weight: float,
        store: Store | None,
        hot_keys: HotKeys | None = None,
        gate: Pending | None = None,
    ) -> None:
        self.number = number
        self.name = name
        self.weight = weight
        self.store: Store = store  # type: ignore[assignment]
        self.hot_keys = hot_keys
        self.gate = gate
        self.leased: Shard | None = None
        self.base: Shard | None = None

    def __repr__(self) -> str:
        return f"<shard {self.name!r}>"


@cython.cclass
class ShardLimits:
    """A limit for each shard: a NamedLimit of its own, in which that shard's store may keep its handle."""

    __slots__ = ("limits", "named", "router")

    def __init__(self, router: Router, named: NamedLimit) -> None:
        self.router = router
        self.named = named
        self.limits: list[NamedLimit] = []

    def extend(self, number: int) -> None:
        """Makes the limits of shards up to this number."""
        named = self.named
        more = [NamedLimit(named.limiter, named.name, named.limit) for _ in range(len(self.limits), number + 1)]
        self.limits = self.limits + more


class Visit:
    """A caller that uses the table, on the plain build."""

    __slots__ = ("__weakref__",)


@cython.cclass
class Router:
    """The table of slots, and the counters of callers that are using it."""

    __slots__ = ("__weakref__", "_lock", "_visits", "entered_0", "entered_1", "side", "table")

    def __init__(self) -> None:
        self.table: list[Shard] = []
        self.side = 0
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """No caller of the parent process is deciding in its child."""
        self._lock = threading.Lock()
        self._visits: tuple[WeakSet[Visit], WeakSet[Visit]] = (WeakSet(), WeakSet())
        self.entered_0 = self.entered_1 = 0

    @cython.ccall
    def enter(self) -> cython.int:
        """Before the table is read; the answer is for `leave`."""
        if cython.compiled:
            return self.count(self.side, 1)
        visit = Visit()
        with self._lock:
            self._visits[self.side].add(visit)
        return visit  # type: ignore[return-value]

    @cython.ccall
    def leave(self, side: cython.int) -> cython.int:
        """After deciding."""
        if cython.compiled:
            return self.count(side, -1)
        for visits in self._visits:
            visits.discard(side)  # type: ignore[arg-type]
        return 0

    @cython.cfunc
    @cython.inline
    def count(self, side: cython.int, change: cython.int) -> cython.int:
        if side:
            self.entered_1 += change
        else:
            self.entered_0 += change
        return side

    def switch_side(self) -> int:
        """Sends new callers to the other counter; returns the one that is to reach 0."""
        with self._lock:
            old = int(self.side)
            self.side = 1 - old
            return old

    def callers(self, side: int) -> int:
        """How many callers have entered on this counter and not left."""
        return int(self.entered_1 if side else self.entered_0) + len(self._visits[side])

    @cython.ccall
    def find(self, key: str) -> Shard:
        """The shard of a key, or the one with a gate in its place."""
        if cython.compiled:
            slot: cython.int = ascii_slot(key)
            if slot >= 0:
                return self.table[slot]
        return self.table[slot_of(key)]

    @cython.ccall
    def limit_at(self, named: NamedLimit, shard: Shard) -> NamedLimit:
        """A limit as this shard knows it."""
        limits: ShardLimits
        if isinstance(named.handle, ShardLimits):
            limits = named.handle
            if limits.router is not self:
                limits = named.handle = ShardLimits(self, named)
        else:
            limits = named.handle = ShardLimits(self, named)
        if shard.number >= len(limits.limits):
            limits.extend(shard.number)
        return limits.limits[shard.number]

    @cython.ccall
    def copy_claims(self, claims: list, shard: Shard) -> list:  # type: ignore[type-arg]
        """The claims as this shard knows them, with the states that they remember."""
        copies: list[Claim] = []
        claim: Claim
        copy: Claim
        for claim in claims:
            if cython.compiled:
                copy = Claim.__new__(Claim)  # as Claim(…), without building its arguments: a third of what a route costs
                copy.named = self.limit_at(claim.named, shard)
                copy.key = claim.key
                copy.cost = claim.cost
                copy.charged = claim.charged
            else:
                copy = Claim(self.limit_at(claim.named, shard), claim.key, claim.cost, claim.charged)
            copy_state(copy, claim)
            copies.append(copy)
        return copies

    @cython.ccall
    def copy_states(self, claims: list, copies: list) -> cython.int:  # type: ignore[type-arg]
        """Copies the states that the copies remember of a charge into the claims that they were made of."""
        i: cython.Py_ssize_t
        for i in range(len(claims)):
            copy_state(claims[i], copies[i])
        return 0

    @cython.ccall
    def only_shard(self, claims: list) -> Shard | None:  # type: ignore[type-arg]
        """The shard of all claims (or the one with a gate in its place); None when they are on several shards."""
        claim: Claim = claims[0]
        first: str = claim.key
        shard: Shard = self.find(first)
        i: cython.Py_ssize_t
        for i in range(1, len(claims)):
            claim = claims[i]
            if claim.key is not first and claim.key != first and self.find(claim.key) is not shard:
                return None
        return shard

    @cython.ccall
    def lease_of(self, shard: Shard, key: str) -> Shard:
        """The shard through its leases when the key is hot; otherwise itself."""
        hot_keys: HotKeys = shard.hot_keys  # type: ignore[assignment]
        if hot_keys is None or not hot_keys.hot or shard.leased is None or key not in hot_keys.hot:
            return shard
        return shard.leased

    @cython.ccall
    def lease_of_all(self, shard: Shard, claims: list) -> Shard:  # type: ignore[type-arg]
        """The same for several claims: they all have to be of one hot key."""
        claim: Claim = claims[0]
        first: str = claim.key
        found: Shard = self.lease_of(shard, first)
        if found is not shard:
            for claim in claims:
                if claim.key != first:
                    return shard
        return found

    @cython.ccall
    def count_hit(self, shard: Shard, key: str, decision: Decision) -> cython.int:
        """Counts a decision for its key, where hot keys are looked for."""
        hot_keys: HotKeys = shard.hot_keys  # type: ignore[assignment]
        if hot_keys is not None and decision is not None:
            hot_keys.hit(key, decision.start_us - decision.wait_us)
        return 0


@cython.cfunc
def copy_state(into: Claim, claim: Claim) -> cython.int:
    """Copies what a claim remembers of its charge."""
    into.undoable = claim.undoable
    into.reset_id = claim.reset_id
    into.a = claim.a
    into.b = claim.b
    into.c = claim.c
    into.new_a = claim.new_a
    into.new_b = claim.new_b
    into.new_c = claim.new_c
    into.others = claim.others
    into.start = claim.start
    return 0


class ShardUnavailable(StoreUnavailable):
    """A call of this shard failed, or (with `error` None) the slot of a key is being moved. Never leaves the store."""

    def __init__(self, shard: Shard, error: StoreUnavailable | None = None) -> None:
        super().__init__(str(error))
        self.shard = shard
        self.error = error


def require_open(shard: Shard) -> Shard:
    if shard.gate is not None:
        raise ShardUnavailable(shard)
    return shard
