"""ShardMap and NodeMap: which service node holds which slots, in versions, and how a node refuses callers of another version.

The members (name, address, weight) fix the home of every slot (slots.py), so a map is its version and its members; maps are
ordered by version, then digest. Every request carries the caller's map. A node answers only requests of its own map, for keys of
its own slots; otherwise StaleMap, which carries the node's map: the caller adopts it when it is newer, sends its own to the node
when that is newer, and asks again. So no two nodes decide on one key under one map, and a node never returns to an older map.

A planned change is two versions. The first has the previous members too: a node that learns of it, from whomever, stops with the
slots that it loses and keeps those that it wins closed, until their states are copied and the coordinator opens them. The second,
without previous members, says that all is done. A new home whose old home can't be reached waits, limit by limit, until a key
that was exhausted at that notice would be as new (`as_new_us`): what the old home has admitted is over by then. Where such a
slot moves on meanwhile, its next home waits for the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self
from zlib import crc32

from ...algorithms.claim import NamedLimit
from ...algorithms.limit import Limit
from ...algorithms.sliding_counter import SlidingWindowCounter
from ...errors import StoreUnavailable
from ..cell_store import turnover_us
from .slots import homes, slot_of


class Member(NamedTuple):
    """A node: its name, its address (host:port) and its weight."""

    name: str
    address: str
    weight: float


class ShardMap(NamedTuple):
    """A version of the members, with the previous ones while states move; version 0 is no map."""

    version: int = 0
    members: tuple[Member, ...] = ()
    previous: tuple[Member, ...] = ()

    @classmethod
    def of(cls, version: int, members: Iterable[Sequence[Any]], previous: Iterable[Sequence[Any]] = ()) -> Self:
        both = [
            tuple(sorted(Member(str(name), str(at), float(weight)) for name, at, weight in one)) for one in (members, previous)
        ]
        return cls(int(version), *both)

    @property
    def id(self) -> tuple[int, int]:
        """Version and digest: what requests carry."""
        return (self.version, crc32(json.dumps(self[1:]).encode())) if self.version else (0, 0)

    def homes(self) -> tuple[str, ...]:
        """The name of each slot's home."""
        return homes(tuple((one.name, one.weight) for one in self.members))

    def moves(self) -> dict[int, tuple[Member, str]]:
        """The slots whose home changes, with the old home and the name of the new one."""
        if not self.previous:
            return {}
        old = {one.name: one for one in self.previous}
        pairs = zip(homes(tuple((one.name, one.weight) for one in self.previous)), self.homes(), strict=True)
        return {slot: (old[before], now) for slot, (before, now) in enumerate(pairs) if before != now}


class StaleMap(StoreUnavailable):
    """The node has another map than the caller, or the key is not on it; `map` is the node's."""

    def __init__(self, message: str, found: ShardMap) -> None:
        super().__init__(message, found)
        self.map = found

    def __str__(self) -> str:
        return str(self.args[0])


class SlotClosed(StoreUnavailable):
    """The key's slot is not open on its new home yet: its state is being handed over."""


class SlotWaiting(StoreUnavailable):
    """The key's slot was taken over without its state, and opens when that state would be over."""


def as_new_us(limit: Limit) -> int:
    """The longest time until an exhausted key is as new; a sliding counter sees two windows."""
    return turnover_us(limit) * (2 if isinstance(limit, SlidingWindowCounter) else 1)


class NodeMap:
    """The map as one node holds it. `closed`: slots won in a change and not handed over yet, with their old homes; `waiting`:
    those whose old home could not be reached, with the time (µs) at which this node got the map."""

    def __init__(self) -> None:
        self.map = ShardMap()
        self.map_id = self.map.id
        self.name = ""
        self.closed: dict[int, Member] = {}
        self.waiting: dict[int, int] = {}
        self._homes: tuple[str, ...] = ()

    def check(self, map_id: tuple[int, int], asked: Iterable[tuple[NamedLimit, str]], now_us: int) -> None:
        """Raises where this node must not decide on a limit and key."""
        if map_id != self.map_id:
            raise StaleMap(
                f"node {self.name!r} has version {self.map.version} of the shard map, the caller {map_id[0]}", self.map
            )
        if self.map_id[0]:
            for named, key in asked:
                self._check_slot(slot_of(key), named.limit, now_us)

    def _check_slot(self, slot: int, limit: Limit, now_us: int) -> None:
        if self._homes[slot] != self.name:
            raise StaleMap(f"the key is on node {self._homes[slot]!r}, not on {self.name!r}", self.map)
        if slot in self.closed:
            raise SlotClosed(f"node {self.name!r} waits for the state of this key from {self.closed[slot].name!r}")
        if slot in self.waiting and (left_us := self.waiting[slot] + as_new_us(limit) - now_us) > 0:
            raise SlotWaiting(f"node {self.name!r} decides on this key in {left_us / 1e6:.3f} s: its old home can't be reached")

    def change(self, message: dict[str, Any], now_us: int) -> None:
        """Applies a message: a `map` with the `name` of this node under it, or names of old homes that are `opened` (their states
        were handed over; `waiting`: slots that waited there, by the time since then) or `lost` (they can't be reached). A map
        that is not newer changes nothing."""
        if "map" in message:
            self._adopt(ShardMap.of(*message["map"]), str(message["name"]))
        lost = message.get("lost", ())
        self.waiting |= {slot: now_us for slot, home in self.closed.items() if home.name in lost}
        for waited_us, slots in message.get("waiting", ()):
            self.waiting |= {slot: now_us - waited_us for slot in slots if slot in self.closed}
        over = {*lost, *message.get("opened", ())}
        self.closed = {slot: home for slot, home in self.closed.items() if home.name not in over}

    def _adopt(self, found: ShardMap, name: str) -> None:
        if found.id <= self.map_id:
            return
        now, moves = found.homes(), found.moves()
        self.closed = {slot: old for slot, (old, new) in moves.items() if new == name}
        leaving = {slot for slot, (old, _) in moves.items() if old.name == name}
        self.waiting = {slot: since for slot, since in self.waiting.items() if now[slot] == name or slot in leaving}
        self.map, self.map_id, self.name, self._homes = found, found.id, name, now

    def status(self, now_us: int) -> dict[str, Any]:
        """The map, the old homes of closed slots, and the slots that wait, by the time since then."""
        waiting: dict[int, list[int]] = {}
        for slot, since in self.waiting.items():
            waiting.setdefault(now_us - since, []).append(slot)
        closed = sorted({home.name for home in self.closed.values()})
        return {"map": self.map, "closed": closed, "waiting": list(waiting.items())}
