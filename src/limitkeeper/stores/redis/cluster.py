"""A cluster: 16384 slots, each kept by one primary. Keys of one slot travel in one call; the calls for one node in one write.

The map of slots is read with CLUSTER SLOTS from whoever answers first, and read again when a node is lost or says MOVED. MOVED,
ASK, TRYAGAIN and CLUSTERDOWN all say that nothing was done, so the call goes on to where it was sent, within its budget.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from typing import Any

from ...errors import StoreUnavailable
from .address import Address, Endpoint
from .operations import ScriptRequest
from .resp import ReplyError, word
from .route import AGAIN, FAILED, LATER, Route
from .script_call import RoutedCommands, ScriptCall, parcelled
from .trips import Plan, Trip

SLOTS = 16384


def slot_of(key: bytes) -> int:
    """The slot of a key: of what stands between its first braces, if anything does."""
    begin = key.find(b"{")
    if begin >= 0:
        end = key.find(b"}", begin + 1)
        if end > begin + 1:
            key = key[begin + 1 : end]
    return crc_hqx(key, 0) % SLOTS


class Cluster(Route):
    """The ways to the nodes of a cluster."""

    tries = 6

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.direct = None
        self._slots: list[Endpoint | None] = []
        self._known: list[Endpoint] = list(address.places)

    def parcels(self, asks: Sequence[ScriptRequest], most: int) -> list[ScriptCall]:
        by_slot: dict[int, list[ScriptRequest]] = {}
        for ask in asks:
            by_slot.setdefault(slot_of(ask.keys[0]), []).append(ask)
        return [parcel for some in by_slot.values() for parcel in parcelled(some, most)]

    def find(self, errands: Sequence[RoutedCommands]) -> Plan[None]:
        if not self._slots:
            yield from self._read_map()
        for errand in errands:
            if errand.asking or (errand.place is not None and errand.key is None):
                continue
            errand.place = self._slots[slot_of(errand.key or b"")]
            if errand.place is None:
                self._slots = []
                raise StoreUnavailable(f"{self.address}: no node serves slot {slot_of(errand.key or b'')}")

    def everywhere(self) -> Plan[list[Endpoint]]:
        yield from self._read_map()
        return list({place: None for place in self._slots if place is not None})

    def _read_map(self) -> Plan[None]:
        said = []
        for place in list(dict.fromkeys([*self._known, *self.address.places])):
            (told,) = yield [Trip(place, self.login, [["CLUSTER", "SLOTS"]])]
            if told.error is None and not isinstance(told.replies[0], ReplyError):
                self._learn(told.replies[0], place)
                return
            said.append(f"{place}: {told.error or told.replies[0]}")
            if place in self._known:
                self._known.remove(place)
        raise StoreUnavailable(f"{self.address}: no node says who serves what ({'; '.join(said)})")

    def _learn(self, ranges: list[Any], told_by: Endpoint) -> None:
        slots: list[Endpoint | None] = [None] * SLOTS
        known = {told_by: None}
        for first, last, primary, *_ in ranges:
            place = Endpoint((primary[0] or b"").decode() or told_by.host, int(primary[1]))
            slots[first : last + 1] = [place] * (last - first + 1)
            known[place] = None
        self._slots, self._known = slots, list(known)

    def wrong(self, errand: RoutedCommands, error: Any) -> str:
        kind = word(error)
        if kind in ("MOVED", "ASK"):
            _, slot, where = str(error).split(" ", 3)[:3]
            host, _, port = where.rpartition(":")
            place = Endpoint(host or (errand.place.host if errand.place else ""), int(port))
            errand.place = place
            if kind == "ASK":
                errand.asking = True
            elif self._slots:
                self._slots[int(slot)] = place
            return AGAIN
        if kind in ("TRYAGAIN", "CLUSTERDOWN", "LOADING", "READONLY", "MASTERDOWN"):
            if kind != "TRYAGAIN":
                self._slots = []
            return LATER
        return FAILED

    def gone(self, place: Endpoint | None) -> None:
        """A node that can't be reached may have been replaced: the map is read again, and not first from that node."""
        self._slots = []
        if place in self._known:
            self._known.remove(place)
            self._known.append(place)
