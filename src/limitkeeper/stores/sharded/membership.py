"""Membership: the shards of a ShardedStore, planned changes that hand state over, and shards that are lost.

A slot is decided where the router's table points. Where state moves along, one shard hands over at a time, and only the slots
whose home changes: their gates are closed, decisions in progress end, the keys are read from the old home, loaded into the new
ones and reset in the old; then the table points to the new homes and the gates open. So a key is decided in one home at any
moment; callers of such a key wait at the gate, no longer than `pause`, then get StoreTimeout.

When a shard fails on the way, its slots stay where they were and the gates open; `rebalance()` continues later. Times in a state
are those of the old home's clock: shards whose clocks differ by d may grant rate × d more or less, once.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from ...algorithms.claim import Claim, NamedLimit
from ...clock import Clock
from ...errors import ConfigurationError, StoreError, StoreTimeout, StoreUnavailable
from ..contract import KeyState, Store
from ..leased import LeasedStore
from ..sans_io import Pending, Plan
from .hot_key_detector import HotKeys
from .router import Router, Shard
from .slots import Members, homes, slot_of

log = logging.getLogger("limitkeeper")
#: Keys per call of `load` and `reset`.
BATCH = 1000


class Progress(NamedTuple):
    """Progress of a move: the shard that hands over, keys moved so far, slots moved, slots in all."""

    shard: str
    keys: int
    slots: int
    of: int


Listener = Callable[[Progress], object]


def drain(callers: Callable[[], int], seconds: float, clock: Clock) -> None:
    """Waits until no caller is left, looking at intervals that double up to 10 ms."""
    wait = 0.000_05
    while callers():
        if seconds <= 0:
            raise StoreTimeout("decisions that began before the move are still in progress; call rebalance() later")
        clock.sleep(min(wait, seconds))
        seconds -= wait
        wait = min(2 * wait, 0.01)


class Copy:
    """The keys copied from one shard to others, so that they can be reset in the old home or in the new ones."""

    def __init__(self, source: Shard, targets: dict[int, Shard], router: Router) -> None:
        self.source = source
        self.targets = targets
        self.keys = 0
        self._router = router
        self._copied: list[tuple[NamedLimit, Shard, list[str]]] = []

    def copy_name(self, rates: Sequence[NamedLimit], progress: Callable[[int], object]) -> None:
        """Loads the keys of one name into their new homes: the state of every rate that this process knows; of a key that has
        only others, the one that the latest rate would start with."""
        store, seen = self.source.store, set[str]()
        for named in rates if len(rates) > 1 else ():
            self._copy(named, store.rate_items(self._router.limit_at(named, self.source)), progress, seen.add)
        rest = store.items(self._router.limit_at(rates[-1], self.source))
        self._copy(rates[-1], (pair for pair in rest if pair[0] not in seen), progress)

    def _copy(
        self,
        named: NamedLimit,
        found: Iterable[KeyState],
        progress: Callable[[int], object],
        note: Callable[[str], object] = str,
    ) -> None:
        moving = (pair for pair in found if slot_of(pair[0]) in self.targets)
        while batch := list(islice(moving, BATCH)):
            by_home: dict[Shard, list[KeyState]] = {}
            for key, state in batch:
                note(key)
                by_home.setdefault(self.targets[slot_of(key)], []).append((key, state))
            for target, pairs in by_home.items():
                self._copied.append((named, target, [key for key, _ in pairs]))
                target.store.load(self._router.limit_at(named, target), pairs)
            self.keys += len(batch)
            progress(self.keys)

    def reset(self, new_homes: bool) -> None:
        """Resets what was copied: in the new homes after a failure, in the old one after a success."""
        for named, target, keys in self._copied:
            shard = target if new_homes else self.source
            try:
                shard.store.forget([Claim(self._router.limit_at(named, shard), key, 0) for key in keys])
            except StoreError as error:  # what stays there are charges that were made: it only errs on the strict side
                log.warning("shard %r kept %d keys that have moved: %s", shard.name, len(keys), error)


class Membership:
    """The shards by name, and the changes of the router's table."""

    def __init__(
        self,
        router: Router,
        shards: Mapping[str, Store] | Sequence[Store],
        weights: Mapping[str, float],
        rehash: bool,
        hot_rate: int,
        make_lease: Callable[[Store], LeasedStore],
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
        self._timed_by = ""
        self._rehash = rehash
        self._hot_rate = hot_rate
        self._make_lease = make_lease
        #: The rates of each name, in order of their registration, and how many use each.
        self._limits: dict[tuple[str, str, str], dict[NamedLimit, int]] = {}
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
            shard.leased = Shard(next(self._numbers), name, float(weight), self._make_lease(store))
            shard.leased.base = shard
        return shard

    def _members(self) -> Members:
        return tuple((name, shard.weight) for name, shard in self.shards.items() if name not in self.lost)

    def now_us(self) -> int:
        """The time of one shard: of the one that answered before, or of the first that answers."""
        failure = StoreUnavailable("no shard tells the time")
        for name in dict.fromkeys((self._timed_by, *self.shards)):
            shard = self.shards.get(name)
            try:
                if shard is not None:
                    now_us = shard.store.now_us()
                    self._timed_by = name
                    return now_us
            except StoreUnavailable as error:
                failure = error
        raise failure

    def outer_stores(self) -> list[Store]:
        """The store of each shard, or the LeasedStore around it, which passes on deadlines and closing."""
        return [(shard.leased or shard).store for shard in self.shards.values()]

    def items(self, limit: NamedLimit, of_rate: bool = False) -> Iterable[KeyState]:
        """The items of a limit that are at home on their shard, of shards that are not lost; `of_rate`: the `rate_items`."""
        for shard in self.shards.values():
            if shard.name not in self.lost:
                store, named = shard.store, self.router.limit_at(limit, shard)
                found = store.rate_items(named) if of_rate else store.items(named)
                yield from [(key, state) for key, state in found if self.router.find(key) is shard]

    def register(self, limit: NamedLimit) -> None:
        rates = self._limits.setdefault(limit.identity, {})
        rates[limit] = rates.get(limit, 0) + 1
        for shard in self.shards.values():
            self._register_at(limit, shard)

    def unregister(self, limit: NamedLimit) -> None:
        """Forgets a rate with its last user, but for the last one of a name: its keys may have states, which move with it."""
        rates = self._limits.get(limit.identity, {})
        if rates.get(limit, 0) > 1:
            rates[limit] -= 1
        elif len(rates) > 1:
            rates.pop(limit, None)
        for shard in self.shards.values():
            for place in (shard, shard.leased):
                if place is not None:
                    place.store.unregister(self.router.limit_at(limit, place))

    def _registered(self) -> list[NamedLimit]:
        return [limit for rates in tuple(self._limits.values()) for limit in tuple(rates)]

    def _register_at(self, limit: NamedLimit, shard: Shard) -> None:
        shard.store.register(self.router.limit_at(limit, shard))
        if shard.leased is not None:
            shard.leased.store.register(self.router.limit_at(limit, shard.leased))

    def answers_within(self, budget_us: int) -> bool:
        """A quarter of the budget for every call of a shard, and for waiting at a gate: two phases make several calls."""
        self.budget_us = budget_us
        self.pause_us = min(self.pause_us, budget_us // 4)
        promises = [self._keeps_budget(shard) for shard in self.shards.values()]  # all of them are asked
        return all(promises)

    def _keeps_budget(self, shard: Shard) -> bool:
        """Whether a shard promises a quarter of the budget for each call. The leases of its hot keys begin none later than after
        two thirds of a quarter."""
        if shard.leased is not None and isinstance(shard.leased.store, LeasedStore):
            shard.leased.store.budget_us = self.budget_us // 4
        return shard.store.answers_within(self.budget_us // 4)

    def lose(self, shard: Shard, error: StoreUnavailable | None) -> None:
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

    def plan_recovery(self, shard: Shard, error: StoreUnavailable | None, attempt: int, since_us: int) -> Plan[None]:
        """What to do about a call of a shard that failed, before it is made again; raises when there is nothing. `since_us` is
        the time of the first failure."""
        self.lose(shard, error)
        yield from ()

    def add(self, name: str, store: Store, weight: float, handoff: bool, progress: Listener | None) -> None:
        with self._changing:
            if name in self.shards:
                raise ConfigurationError(f"there is a shard {name!r} already; remove it first, or give this one another name")
            named_shards({name: store})
            if self.local and not store.local:
                raise ConfigurationError(f"shard {name!r} is remote and all others are local; make a new ShardedStore of them")
            shard = self._make_shard(name, store, weight)
            if self.budget_us:
                self._keeps_budget(shard)
            for limit in self._registered():
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
            shard = self.lost[name]
            (shard.leased or shard).store.release(lambda _: True)  # before the states from elsewhere take their place
            del self.lost[name]
            for limit in self._registered():
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
        gate = Pending(self.clock)  # what callers of these keys wait for
        copied = False
        try:
            self._close_gate(dict.fromkeys(targets, Shard(-1, source.name, 1.0, None, gate=gate)))
            (source.leased or source).store.release(lambda key: slot_of(key) in targets)
            for rates in tuple(self._limits.values()):
                copy.copy_name(tuple(rates), report)
            copied = True
        finally:
            self._point(targets if copied else dict.fromkeys(targets, source))
            gate.finish(None)
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
