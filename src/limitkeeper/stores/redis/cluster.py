"""The topology of a Redis Cluster: 16384 slots, each served by one primary.

Keys of one slot share a script call; the calls for one node share a write. The map of slots is read with CLUSTER SLOTS from the
first node that answers, and again when a node is unreachable. MOVED, ASK, TRYAGAIN and CLUSTERDOWN say that nothing was done, so
the call is sent again to the right node, within its budget.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence

from ...errors import StoreUnavailable
from ..sans_io import Plan
from .address import Address, Endpoint
from .command_routing import AGAIN, FAILED, LATER, Route, RoutedCommands, ScriptCall, script_calls
from .resp import Outcome, Reply, error_kind, exchange, first_reply
from .script_request import AnyRequest

SLOTS = 16384


def slot_of(key: bytes) -> int:
    """The slot of a key: of the text between its first braces, if there is any."""
    begin = key.find(b"{")
    if begin >= 0:
        end = key.find(b"}", begin + 1)
        if end > begin + 1:
            key = key[begin + 1 : end]
    return crc_hqx(key, 0) % SLOTS


class Cluster(Route):
    """The nodes of a cluster."""

    attempts = 6

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.direct = None
        self._slots: list[Endpoint | None] = []
        self._nodes: list[Endpoint] = list(address.endpoints)

    def script_calls(self, requests: Sequence[AnyRequest], most: int) -> list[ScriptCall]:
        by_slot: dict[int, list[AnyRequest]] = {}
        for request in requests:
            by_slot.setdefault(slot_of(request.keys[0]), []).append(request)
        return [call for group in by_slot.values() for call in script_calls(group, most)]

    def locate(self, some: Sequence[RoutedCommands]) -> Plan[None]:
        if not self._slots:
            yield from self._read_map()
        for commands in some:
            if commands.asking or (commands.endpoint is not None and commands.key is None):
                continue
            slot = slot_of(commands.key or b"")
            commands.endpoint = self._slots[slot]
            if commands.endpoint is None:
                self._slots = []
                raise StoreUnavailable(f"{self.address}: no node serves slot {slot}")

    def all_endpoints(self) -> Plan[list[Endpoint]]:
        yield from self._read_map()
        return list({endpoint: None for endpoint in self._slots if endpoint is not None})

    def _read_map(self) -> Plan[None]:
        failures = []
        for node in list(dict.fromkeys([*self._nodes, *self.address.endpoints])):
            outcomes: list[Outcome] = yield [exchange(node, self.login, [["CLUSTER", "SLOTS"]])]
            reply = first_reply(outcomes[0])
            if not isinstance(reply, Exception):
                self._decode_map(reply, node)
                return
            failures.append(f"{node}: {reply}")
            if node in self._nodes:
                self._nodes.remove(node)
        raise StoreUnavailable(f"{self.address}: no node returned the map of slots ({'; '.join(failures)})")

    def _decode_map(self, ranges: Reply, source: Endpoint) -> None:
        slots: list[Endpoint | None] = [None] * SLOTS
        nodes = {source: None}
        for first, last, primary, *_ in ranges:
            node = Endpoint((primary[0] or b"").decode() or source.host, int(primary[1]))
            slots[first : last + 1] = [node] * (last - first + 1)
            nodes[node] = None
        self._slots, self._nodes = slots, list(nodes)

    def on_error(self, commands: RoutedCommands, error: Exception) -> str:
        kind = error_kind(error)
        if kind in ("MOVED", "ASK"):
            _, slot, where = str(error).split(" ", 3)[:3]
            host, _, port = where.rpartition(":")
            node = Endpoint(host or (commands.endpoint.host if commands.endpoint else ""), int(port))
            commands.endpoint = node
            if kind == "ASK":
                commands.asking = True
            elif self._slots:
                self._slots[int(slot)] = node
            return AGAIN
        if kind in ("TRYAGAIN", "CLUSTERDOWN", "LOADING", "READONLY", "MASTERDOWN"):
            if kind != "TRYAGAIN":
                self._slots = []
            return LATER
        return FAILED

    def on_unreachable(self, endpoint: Endpoint | None) -> None:
        """The node may have been replaced: the map is read again, from another node first."""
        self._slots = []
        if endpoint in self._nodes:
            self._nodes.remove(endpoint)
            self._nodes.append(endpoint)
