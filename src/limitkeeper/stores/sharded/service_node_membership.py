"""FencedMembership: membership of shards that are service nodes, which hold the shard map themselves (shard_map.py).

A process that starts, or missed a change, learns the map from the first node that refuses it: the error carries the map. Slots
that a node wins in a planned change stay closed until the coordinator, the process that called `add` or `remove`, has copied
their states from a node that has confirmed the map and so decides on them no more. Callers of such keys ask again, for at most
`pause`. When the coordinator fails on the way, slots stay closed, and `rebalance()` in any process continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...algorithms.claim import NamedLimit
from ...algorithms.limit_parser import parse_limit
from ...errors import ConfigurationError, StoreError, StoreTimeout, StoreUnavailable
from ..contract import Store
from ..leased import LeasedStore
from ..sans_io import Call, Pause, Plan
from .membership import Copy, Listener, Membership, Progress, named_shards
from .router import Shard
from .shard_map import Member, ShardMap, SlotClosed, SlotWaiting, StaleMap

log = logging.getLogger("limitkeeper")
#: Seconds between two attempts at a closed slot, and the most attempts at nodes that do not agree.
PAUSE, MAX_ATTEMPTS = 0.005, 100
Status = dict[str, Any]


class FencedMembership(Membership):
    """The nodes by name; `map` is the newest map that this process knows."""

    def __init__(self, router: Any, shards: Any, weights: Mapping[str, float], rehash: bool, *more: Any) -> None:
        if rehash:
            raise ConfigurationError("on_loss='rehash' would count keys apart; for service nodes use 'fail', and remove(name)")
        self._offered: dict[str, Store] = {}
        self._retired: list[Shard] = []
        super().__init__(router, shards, weights, rehash, *more)
        self.map = ShardMap.of(1, [(name, one.store.location, one.weight) for name, one in self.shards.items()])
        self._use_map()

    def outer_stores(self) -> list[Store]:
        return [*super().outer_stores(), *[(shard.leased or shard).store for shard in self._retired]]

    # Callers ---------------------------------------------------------------------------------------------------

    def lose(self, shard: Shard, error: StoreUnavailable | None) -> None:
        if isinstance(error, SlotWaiting):
            raise error
        if not isinstance(error, StaleMap | SlotClosed):  # those a plan recovers from
            super().lose(shard, error)

    def plan_recovery(self, shard: Shard, error: StoreUnavailable | None, attempt: int, since_us: int) -> Plan[None]:
        if isinstance(error, StaleMap):
            if attempt >= MAX_ATTEMPTS:
                raise StoreUnavailable(f"the nodes do not agree on a shard map ({error}); call rebalance()")
            if error.map.id > self.map.id:
                self.adopt(error.map)
            elif error.map.id < self.map.id:
                yield Call(shard.base or shard, "exchange_map", (self._message(shard.name),))
        elif isinstance(error, SlotClosed):
            if self.clock.now_us() - since_us >= self.pause_us:
                raise StoreTimeout(
                    f"{error}; try again, call rebalance() if no process does, or give ShardedStore a longer pause="
                )
            yield Pause(PAUSE)
        else:
            self.lose(shard, error)

    def adopt(self, found: ShardMap) -> None:
        """Uses a newer map: makes the nodes that are new to this process, and points all slots to their homes."""
        with self._writing:
            if found.id <= self.map.id:
                return
            if found.version == self.map.version:
                log.warning("this process was started with another list of shards; the one that the nodes have is used")
            before, self.shards = self.shards, {one.name: self._shard_of(one) for one in found.members}
            self._retired += [shard for name, shard in before.items() if self.shards.get(name) is not shard]
            self.map = found
            self._point({slot: self.shards[name] for slot, name in enumerate(found.homes())})
            self._use_map()

    def _shard_of(self, member: Member) -> Shard:
        shard = self.shards.get(member.name)
        if shard is not None and shard.store.location == member.address:
            return shard
        store = self._offered.pop(member.name, None) or next(iter(self.shards.values())).store.sibling(member.address)
        shard = self._make_shard(member.name, store, member.weight)
        if self.budget_us:
            self._keeps_budget(shard)
        for limit in self._registered():
            self._register_at(limit, shard)
        return shard

    def _node_of(self, member: Member) -> Shard:
        """A member of the map, or a previous one."""
        known = {(one.name, one.store.location): one for one in (*self._retired, *self.shards.values())}.get(member[:2])
        if known is None:
            known = self._shard_of(member)
            self._retired.append(known)  # closed at the end
        return known

    def _use_map(self) -> None:
        for shard in self.shards.values():
            shard.store.use_map(self.map.id)

    def _message(self, name: str) -> dict[str, Any]:
        return {"map": self.map, "name": name}

    # Planned changes -------------------------------------------------------------------------------------------

    def add(self, name: str, store: Store, weight: float, handoff: bool, progress: Listener | None) -> None:
        with self._changing:
            self._begin(handoff, progress)
            named_shards({name: store})
            if name in self.shards or not store.fences:
                raise ConfigurationError(f"shard {name!r}: expected a new name, and a RemoteStore as the other nodes")
            self._offered[name] = store
            self._change([*self.map.members, Member(name, store.location, weight)], progress)

    def remove(self, name: str, handoff: bool, progress: Listener | None) -> Store:
        with self._changing:
            self._begin(handoff, progress)
            if name not in self.shards or len(self.shards) == 1:
                raise ConfigurationError(f"shard {name!r}: expected one of several shards; there are {', '.join(self.shards)}")
            shard = self.shards[name]
            self._change([one for one in self.map.members if one.name != name], progress)
            self._retired = [one for one in self._retired if one is not shard]  # the caller closes it
            return shard.store

    def restore(self, name: str, handoff: bool, progress: Listener | None) -> None:
        raise ConfigurationError("service nodes are not given up when they fail, so there is none to restore")

    def rebalance(self, handoff: bool, progress: Listener | None) -> None:
        with self._changing:
            self._begin(handoff, progress)
            self._tell(self.shards.values())

    def _begin(self, handoff: bool, progress: Listener | None) -> None:
        """Learns the newest map, and finishes a change that another process has left."""
        if not handoff:
            raise ConfigurationError("service nodes hand state over; a node that can't be reached is noticed, its slots wait")
        for shard in list(self.shards.values()):
            try:
                self.adopt(ShardMap.of(*shard.store.exchange_map({})["map"]))
            except StoreError as error:
                log.warning("shard %r did not say which map it has: %s", shard.name, error)
        if self.map.previous:
            self._finish(progress)

    def _change(self, members: Sequence[Member], progress: Listener | None) -> None:
        for shard in self.shards.values():
            if shard.leased is not None and isinstance(shard.leased.store, LeasedStore):
                shard.leased.store.return_all()  # what hot keys still hold of their homes
        found = ShardMap.of(self.map.version + 1, members, self.map.members)
        for name in sorted({new for _, new in found.moves().values()}):
            (self._offered.get(name) or self.shards[name].store).exchange_map({})  # raises where a new home can't be reached
        self.adopt(found)
        self._finish(progress)

    def _finish(self, progress: Listener | None) -> None:
        """Has all nodes confirm a map with previous members, hands the states over, and publishes the map without them."""
        moves, done = self.map.moves(), 0
        members = {one.name: one for one in (*self.map.previous, *self.map.members)}
        nodes = {name: self._node_of(one) for name, one in members.items()}
        statuses = self._tell(nodes.values())
        for new in sorted({new for _, new in moves.values()}):
            if new not in statuses:
                raise StoreUnavailable(f"shard {new!r} wins slots and can't be reached; call rebalance() when it can")
        for source in sorted({old.name for old, _ in moves.values()}):
            closed = {new for new, status in statuses.items() if source in status["closed"]}
            targets = {slot: nodes[new] for slot, (old, new) in moves.items() if old.name == source and new in closed}
            keys = self._hand_over_slots(nodes[source], targets, statuses.get(source))
            done += len(targets)
            if progress is not None:
                progress(Progress(source, keys, done, len(moves)))
        self.adopt(ShardMap.of(self.map.version + 1, self.map.members))
        self._tell(nodes.values())

    def _tell(self, nodes: Iterable[Shard]) -> dict[str, Status]:
        """Sends the map to nodes; the status of those that have it, by name."""
        found: dict[str, Status] = {}
        for node in nodes:
            try:
                status = node.store.exchange_map(self._message(node.name))
            except (StoreUnavailable, StoreTimeout) as error:
                log.warning("shard %r did not get version %d of the shard map: %s", node.name, self.map.version, error)
                continue
            if ShardMap.of(*status["map"]).id != self.map.id:
                raise ConfigurationError("another process has changed the shard map meanwhile; try again")
            found[node.name] = status
        return found

    def _hand_over_slots(self, source: Shard, targets: dict[int, Shard], status: Status | None) -> int:
        """Copies the states of slots from a node that has stopped to decide on them, and opens them; the number of keys."""
        copy, new_homes = Copy(source, targets, self.router), dict.fromkeys(targets.values())
        if status is not None:
            try:
                for rates in self._limits_of(status):
                    copy.copy_name(rates, int)
            except BaseException:
                copy.reset(new_homes=True)
                raise
        for home in new_homes:
            if status is None:
                home.store.exchange_map({"lost": [source.name]})
                continue
            waiting = [(us, [slot for slot in slots if targets.get(slot) is home]) for us, slots in status.get("waiting", ())]
            home.store.exchange_map({"opened": [source.name], "waiting": waiting})
        if status is not None:
            copy.reset(new_homes=False)
        return copy.keys

    def _limits_of(self, status: Status) -> list[list[NamedLimit]]:
        """The limits that a node has seen since its start, and those of this process; those of one name together."""
        seen = [NamedLimit(limiter, name, parse_limit(text)) for limiter, name, text in status["limits"]]
        by_name: dict[tuple[str, str, str], list[NamedLimit]] = {}
        for named in dict.fromkeys([*seen, *self._registered()]):
            by_name.setdefault(named.identity, []).append(named)
        return list(by_name.values())
