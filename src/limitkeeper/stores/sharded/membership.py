"""Who is a shard: lost ones, and planned changes that hand state over.

The table of routing.py is what counts: a slot is decided where it points. Every change here is a change of that table, made
slot by slot: at once where state may start anew, behind closed doors where it moves along (handoff.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ...algorithms.claim import NamedLimit
from ...errors import ConfigurationError, StoreTimeout, StoreUnavailable
from ..contract import Store
from ..leased import LeasedStore
from .handoff import Copy, KeyGate, Listener, Progress, drain
from .hot_keys import HotKeys
from .routing import Routed, Shard
from .slots import Members, homes

log = logging.getLogger("limitkeeper")


class Membership(Routed):
    """The shards of a ShardedStore, and the table that says where each slot lives."""

    def __init__(self, shards: Any, weights: Any, rehash: bool, hot_rate: int, leases: dict[str, Any], pause_us: int) -> None:
        super().__init__()
        named = named_shards(shards)
        unknown = set(weights or {}) - set(named)
        if unknown:
            raise ConfigurationError(f"weights name {', '.join(sorted(map(str, unknown)))}; the shards are {', '.join(named)}")
        self._rehash = rehash
        self._hot_rate = hot_rate
        self._leases = leases
        self._pause_us = pause_us
        self._budget_us = 0
        self._known: dict[Any, NamedLimit] = {}
        self._numbers = itertools.count()
        self._changing = threading.RLock()
        self._writing = threading.RLock()
        self._lost: dict[str, Shard] = {}
        self._shards = {name: self._shard(name, store, (weights or {}).get(name, 1.0)) for name, store in named.items()}
        self.local = all(shard.store.local for shard in self._shards.values())
        self.table = [self._shards[name] for name in homes(self._members())]

    def _shard(self, name: str, store: Store, weight: float) -> Shard:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight > 0:
            raise ConfigurationError(f"shard {name!r}: a weight must be a number above 0, not {weight!r}")
        far = self._hot_rate > 0 and not store.local
        shard = Shard(next(self._numbers), name, float(weight), store, HotKeys(self._hot_rate) if far else None)
        if far:
            shard.leasing = Shard(next(self._numbers), name, float(weight), LeasedStore(store, **self._leases))
            shard.leasing.base = shard
        return shard

    def _hurry(self, shard: Shard) -> bool:
        """Asks a shard for a quarter of the budget; whoever leases from it asks it for less."""
        return bool((shard.leasing or shard).store.answers_within(self._budget_us // 4))

    def _tell(self, limit: NamedLimit, shard: Shard) -> None:
        """Lets a shard know a limit, and whoever leases from it."""
        shard.store.register(self.at(limit, shard))
        if shard.leasing is not None:
            shard.leasing.store.register(self.at(limit, shard.leasing))

    def _members(self) -> Members:
        return tuple((name, shard.weight) for name, shard in self._shards.items() if name not in self._lost)

    @property
    def shards(self) -> dict[str, Store]:
        """The stores by their names."""
        return {name: shard.store for name, shard in self._shards.items()}

    @property
    def lost(self) -> list[str]:
        """Names of shards that could not be reached and whose keys went elsewhere; `restore` brings one back."""
        return list(self._lost)

    def home_of(self, key: str) -> str:
        """The name of the shard on which a key lives."""
        return str(self.home(key).name)

    def hot_keys(self) -> dict[str, int]:
        """The keys that are hot now, with their hits a second from this process."""
        found: dict[str, int] = {}
        for shard in self._shards.values():
            found |= shard.heavy.hot if shard.heavy is not None else {}
        return found

    # Doors and losses ---------------------------------------------------------------------------------------------------

    def elsewhere(self, shard: Any, lost: Any) -> None:
        if lost is not None:
            self._lose(shard, lost)
        elif not shard.gate.wait(self._pause_us / 1e6):
            raise self._too_long(shard)

    async def _aelsewhere(self, shard: Any, lost: Any) -> None:
        if lost is not None:
            self._lose(shard, lost)
        elif not await shard.gate.await_open(self._pause_us / 1e6):
            raise self._too_long(shard)

    def _too_long(self, shard: Shard) -> StoreTimeout:
        return StoreTimeout(
            f"shard {shard.name!r} is handing keys over, and this one was not there after {self._pause_us / 1e6:g} s; "
            "try again, or give ShardedStore a longer pause="
        )

    def _lose(self, shard: Shard, error: StoreUnavailable) -> None:
        """A shard can't be reached: its keys fail, or go to the next shard."""
        if not self._rehash:
            raise StoreUnavailable(
                f"shard {shard.name!r}: {error} (its keys fail until it is back; on_loss='rehash' sends them to the next shard)"
            ) from error
        with self._writing:
            if shard.name not in self._lost:
                log.warning("shard %r is lost, its keys start anew on the next: %s", shard.name, error)
                self._lost[shard.name] = shard
            left = self._members()
            if not left:
                raise StoreUnavailable(f"every shard is lost, the last was {shard.name!r}: {error}") from error
            for slot, name in enumerate(homes(left)):
                if self.table[slot] is shard:
                    self.table[slot] = self._shards[name]

    # Planned changes ----------------------------------------------------------------------------------------------------

    def add(
        self, name: str, store: Store, weight: float = 1.0, *, handoff: bool = True, progress: Listener | None = None
    ) -> None:
        """Adds a shard; the keys of the slots it wins move there, from one shard after the other. Without `handoff` they
        start anew."""
        with self._changing:
            if name in self._shards:
                raise ConfigurationError(f"there is a shard {name!r} already; remove it first, or give this one another name")
            named_shards({name: store})
            if self.local and not store.local:
                raise ConfigurationError(f"shard {name!r} is far away and all others are near; make a new ShardedStore of them")
            shard = self._shard(name, store, weight)
            if self._budget_us:
                self._hurry(shard)
            for limit in tuple(self._known.values()):
                self._tell(limit, shard)
            self._shards = {**self._shards, name: shard}
            self.rebalance(handoff=handoff, progress=progress)

    def remove(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> Store:
        """Takes a shard out, its keys moving to the others; answers with its store, which is the caller's to close."""
        with self._changing:
            shard = self._shards.get(name)
            if shard is None:
                raise ConfigurationError(f"there is no shard {name!r}; there are {', '.join(self._shards)}")
            left = {other: kept for other, kept in self._shards.items() if other != name}
            if not left:
                raise ConfigurationError(f"{name!r} is the last shard; a ShardedStore needs at least one")
            self._shards = left
            self._lost.pop(name, None)
            try:
                self.rebalance(handoff=handoff, progress=progress)
            except BaseException:
                self._shards = {**left, name: shard}  # part of its keys may have moved; removing it again carries on
                raise
            return shard.store  # type: ignore[no-any-return]

    def restore(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """A lost shard is back: its keys return, with the state that they have where they went."""
        with self._changing:
            if name not in self._lost:
                raise ConfigurationError(f"shard {name!r} is not lost; lost are: {', '.join(self._lost) or 'none'}")
            shard = self._lost.pop(name)
            for limit in tuple(self._known.values()):
                self._tell(limit, shard)
            self.rebalance(handoff=handoff, progress=progress)

    def rebalance(self, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """Moves every slot that is not on its shard to it; carries on with a move that failed half-way."""
        with self._changing:
            moves: dict[Shard, dict[int, Shard]] = {}
            for slot, name in enumerate(homes(self._members())):
                if self.table[slot].name != name:
                    moves.setdefault(self.table[slot], {})[slot] = self._shards[name]
            done, of = 0, sum(map(len, moves.values()))
            for source, targets in moves.items():
                keys = self._move(source, targets, Told(progress, source.name, done, of)) if handoff else self._point(targets)
                done += len(targets)
                if progress is not None:
                    progress(Progress(source.name, keys, done, of))

    def _move(self, source: Shard, targets: dict[int, Shard], told: Told) -> int:
        """One shard hands slots over: close, wait for those under way, copy, point, open, forget."""
        door = Shard(-1, source.name, 1.0, None)
        door.gate = KeyGate()
        copy = Copy(source, targets, self.at)
        moved = False
        try:
            self._wait_for_those_inside(dict.fromkeys(targets, door))
            give_leases_back(source)
            for limit in tuple(self._known.values()):
                copy.take(limit, told.keys)
            moved = True
        finally:
            self._point(targets if moved else dict.fromkeys(targets, source))
            door.gate.open()
            copy.forget(everywhere_new=not moved)
        return copy.keys

    def _wait_for_those_inside(self, doors: dict[int, Shard]) -> None:
        """Closes doors, and returns when everybody who came before is done. What an earlier, broken off move left is waited
        for first, so that the counter to which newcomers are sent holds nobody else."""
        seconds = max(1.0, self._pause_us / 1e6)
        drain(lambda: self.within(1 - self.side), seconds)
        self._point(doors)
        side = self.turn_side()
        drain(lambda: self.within(side), seconds)

    def _point(self, targets: Mapping[int, Shard]) -> int:
        with self._writing:
            for slot, shard in targets.items():
                self.table[slot] = shard
        return 0

    async def aadd(
        self, name: str, store: Store, weight: float = 1.0, *, handoff: bool = True, progress: Listener | None = None
    ) -> None:
        """As `add`, in a thread: decisions of this loop go on. `progress` is called in that thread."""
        await asyncio.to_thread(self.add, name, store, weight, handoff=handoff, progress=progress)

    async def aremove(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> Store:
        """As `remove`, in a thread."""
        return await asyncio.to_thread(self.remove, name, handoff=handoff, progress=progress)

    async def arestore(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """As `restore`, in a thread."""
        await asyncio.to_thread(self.restore, name, handoff=handoff, progress=progress)

    async def arebalance(self, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """As `rebalance`, in a thread."""
        await asyncio.to_thread(self.rebalance, handoff=handoff, progress=progress)


def named_shards(shards: Any) -> dict[str, Store]:
    """Stores by name; those of a list are called by their positions."""
    named = dict(shards) if isinstance(shards, Mapping) else {str(i): store for i, store in enumerate(listed(shards))}
    if not named:
        raise ConfigurationError("a ShardedStore needs at least one shard")
    for name, store in named.items():
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"a shard's name must be a text, not {name!r}")
        if not isinstance(store, Store):
            raise ConfigurationError(f"shard {name!r} must be a store, not {store!r}; store_from_url(…) makes one of a URL")
    if len({id(store) for store in named.values()}) < len(named):
        raise ConfigurationError("the same store is named as two shards; name it once, with a weight")
    return named


def listed(shards: Any) -> Sequence[Any]:
    if isinstance(shards, (str, bytes, Store)) or not isinstance(shards, Sequence):
        raise ConfigurationError(f"shards are a list of stores or a mapping of names to stores, not {shards!r}")
    return shards


def give_leases_back(shard: Shard) -> None:
    """What hot keys still hold of a shard goes back before its state is handed over."""
    if shard.leasing is not None:
        shard.leasing.store.return_all()


class Told:
    """Tells how far a move has come, a batch of keys at a time."""

    def __init__(self, progress: Listener | None, shard: str, slots: int, of: int) -> None:
        self._progress = progress
        self._shard, self._slots, self._of = shard, slots, of

    def keys(self, moved: int) -> None:
        if self._progress is not None:
            self._progress(Progress(self._shard, moved, self._slots, self._of))
