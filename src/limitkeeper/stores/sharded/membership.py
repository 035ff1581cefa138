"""Membership: the shards of a ShardedStore, planned changes that hand state over, and shards that are lost.

A slot is decided where the router's table points. Every change here is a change of that table, slot by slot: at once where
state may start again, behind gates where it moves along (handoff.py).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from ...algorithms.claim import NamedLimit
from ...clock import Clock
from ...errors import ConfigurationError, StoreUnavailable
from ...rate import Duration
from ..contract import Store
from ..leased import LeasedStore
from .handoff import Copy, KeyGate, Listener, Progress, drain
from .hot_keys import HotKeys
from .router import Router, Shard
from .slots import Members, homes

log = logging.getLogger("limitkeeper")


class LeaseOptions(TypedDict, total=False):
    """Options of the LeasedStore of hot keys."""

    lease: int
    life: Duration


class Membership:
    """The shards by name, and the changes of the router's table."""

    def __init__(
        self,
        router: Router,
        shards: Mapping[str, Store] | Sequence[Store],
        weights: Mapping[str, float],
        rehash: bool,
        hot_rate: int,
        leases: LeaseOptions,
        pause_us: int,
        clock: Clock,
    ) -> None:
        named = named_shards(shards)
        unknown = set(weights) - set(named)
        if unknown:
            raise ConfigurationError(f"weights name {', '.join(sorted(map(str, unknown)))}; the shards are {', '.join(named)}")
        self.router = router
        self.clock = clock
        self.pause_us = pause_us
        self.budget_us = 0
        self.lost: dict[str, Shard] = {}
        self._rehash = rehash
        self._hot_rate = hot_rate
        self._leases = leases
        self._limits: dict[tuple[str, str, str], NamedLimit] = {}
        self._numbers = itertools.count()
        self._changing = threading.RLock()
        self._writing = threading.RLock()
        self.shards = {name: self._make_shard(name, store, weights.get(name, 1.0)) for name, store in named.items()}
        self.local = all(store.local for store in named.values())
        router.table = [self.shards[name] for name in homes(self._members())]

    def _make_shard(self, name: str, store: Store, weight: float) -> Shard:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight > 0:
            raise ConfigurationError(f"shard {name!r}: expected a weight above 0, got {weight!r}")
        leases = self._hot_rate > 0 and not store.local
        shard = Shard(next(self._numbers), name, float(weight), store, HotKeys(self._hot_rate) if leases else None)
        if leases:
            shard.leased = Shard(next(self._numbers), name, float(weight), LeasedStore(store, **self._leases))
            shard.leased.base = shard
        return shard

    def _members(self) -> Members:
        return tuple((name, shard.weight) for name, shard in self.shards.items() if name not in self.lost)

    def outer_stores(self) -> list[Store]:
        """The store of each shard, or the LeasedStore around it, which passes on deadlines and closing."""
        return [(shard.leased or shard).store for shard in self.shards.values()]

    def register(self, limit: NamedLimit) -> None:
        self._limits[limit.identity] = limit
        for shard in self.shards.values():
            self._register_at(limit, shard)

    def _register_at(self, limit: NamedLimit, shard: Shard) -> None:
        shard.store.register(self.router.limit_at(limit, shard))
        if shard.leased is not None:
            shard.leased.store.register(self.router.limit_at(limit, shard.leased))

    def answers_within(self, budget_us: int) -> bool:
        """A quarter of the budget for every call of a shard, and for waiting at a gate: two phases make several calls."""
        self.budget_us = budget_us
        self.pause_us = min(self.pause_us, budget_us // 4)
        promises = [store.answers_within(budget_us // 4) for store in self.outer_stores()]  # all of them are asked
        return all(promises)

    def lose(self, shard: Shard, error: StoreUnavailable) -> None:
        """Handles a shard that can't be reached: raises, or points its slots to the next shards."""
        shard = shard.base or shard
        if not self._rehash:
            raise StoreUnavailable(
                f"shard {shard.name!r}: {error} (its keys fail until it is back; on_loss='rehash' sends them to the next shard)"
            ) from error
        with self._writing:
            if shard.name not in self.lost:
                log.warning("shard %r is lost; its keys start again on the next shards: %s", shard.name, error)
                self.lost[shard.name] = shard
            members = self._members()
            if not members:
                raise StoreUnavailable(f"every shard is lost, the last was {shard.name!r}: {error}") from error
            table = self.router.table
            self._point({slot: self.shards[name] for slot, name in enumerate(homes(members)) if table[slot] is shard})

    # Planned changes --------------------------------------------------------------------------------------------

    def add(self, name: str, store: Store, weight: float, handoff: bool, progress: Listener | None) -> None:
        with self._changing:
            if name in self.shards:
                raise ConfigurationError(f"there is a shard {name!r} already; remove it first, or give this one another name")
            named_shards({name: store})
            if self.local and not store.local:
                raise ConfigurationError(f"shard {name!r} is remote and all others are local; make a new ShardedStore of them")
            shard = self._make_shard(name, store, weight)
            if self.budget_us:
                (shard.leased or shard).store.answers_within(self.budget_us // 4)
            for limit in tuple(self._limits.values()):
                self._register_at(limit, shard)
            self.shards = {**self.shards, name: shard}
            self.rebalance(handoff, progress)

    def remove(self, name: str, handoff: bool, progress: Listener | None) -> Store:
        with self._changing:
            shard = self.shards.get(name)
            if shard is None:
                raise ConfigurationError(f"there is no shard {name!r}; there are {', '.join(self.shards)}")
            others = {other: kept for other, kept in self.shards.items() if other != name}
            if not others:
                raise ConfigurationError(f"{name!r} is the last shard; a ShardedStore needs at least one")
            self.shards = others
            self.lost.pop(name, None)
            try:
                self.rebalance(handoff, progress)
            except BaseException:
                self.shards = {**others, name: shard}  # part of its keys may have moved; removing it again continues
                raise
            return shard.store

    def restore(self, name: str, handoff: bool, progress: Listener | None) -> None:
        with self._changing:
            if name not in self.lost:
                raise ConfigurationError(f"shard {name!r} is not lost; lost are: {', '.join(self.lost) or 'none'}")
            shard = self.lost.pop(name)
            for limit in tuple(self._limits.values()):
                self._register_at(limit, shard)
            self.rebalance(handoff, progress)

    def rebalance(self, handoff: bool, progress: Listener | None) -> None:
        with self._changing:
            moves: dict[Shard, dict[int, Shard]] = {}
            for slot, name in enumerate(homes(self._members())):
                if self.router.table[slot].name != name:
                    moves.setdefault(self.router.table[slot], {})[slot] = self.shards[name]
            done, of = 0, sum(map(len, moves.values()))

            def report(keys: int) -> None:
                if progress is not None:
                    progress(Progress(source.name, keys, done, of))

            for source, targets in moves.items():
                copy = Copy(source, targets, self.router)
                if handoff:
                    self._hand_over(copy, report)
                else:
                    self._point(targets)
                done += len(targets)
                report(copy.keys)

    def _hand_over(self, copy: Copy, report: Callable[[int], None]) -> None:
        """One shard hands slots over: close the gate, wait for callers, copy, point, open, reset."""
        source, targets = copy.source, copy.targets
        gate = KeyGate(source.name, self.clock)
        copied = False
        try:
            self._close_gate(dict.fromkeys(targets, Shard(-1, source.name, 1.0, None, gate=gate)))
            if source.leased is not None and isinstance(source.leased.store, LeasedStore):
                source.leased.store.return_all()  # what hot keys still hold of the shard
            for limit in tuple(self._limits.values()):
                copy.copy_limit(limit, report)
            copied = True
        finally:
            self._point(targets if copied else dict.fromkeys(targets, source))
            gate.open()
            copy.reset(new_homes=not copied)

    def _close_gate(self, gates: dict[int, Shard]) -> None:
        """Returns when all callers that came before the gate have left. Those that an earlier, interrupted move did not wait for
        are waited for first, so that the counter to which new callers are sent holds no others."""
        seconds = max(1.0, self.pause_us / 1e6)
        router = self.router
        drain(lambda: router.callers(1 - router.side), seconds, self.clock)
        self._point(gates)
        side = router.switch_side()
        drain(lambda: router.callers(side), seconds, self.clock)

    def _point(self, targets: Mapping[int, Shard]) -> None:
        with self._writing:
            for slot, shard in targets.items():
                self.router.table[slot] = shard


def named_shards(shards: object) -> dict[str, Store]:
    """Stores by name; those of a list are named by their positions."""
    if isinstance(shards, (str, bytes, Store)) or not isinstance(shards, (Mapping, Sequence)):
        raise ConfigurationError(f"shards: expected a list of stores or a mapping of names to stores, got {shards!r}")
    named = dict(shards) if isinstance(shards, Mapping) else {str(i): store for i, store in enumerate(shards)}
    if not named:
        raise ConfigurationError("a ShardedStore needs at least one shard")
    for name, store in named.items():
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"a shard's name must be a string that is not empty, got {name!r}")
        if not isinstance(store, Store):
            raise ConfigurationError(f"shard {name!r}: expected a store, got {store!r}; store_from_url(…) makes one of a URL")
    if len({id(store) for store in named.values()}) < len(named):
        raise ConfigurationError("the same store is named as two shards; name it once, with a weight")
    return named
