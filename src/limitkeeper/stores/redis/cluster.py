"""The topology of a Redis Cluster, 16384 slots, each served by one primary; and decisions over several slots.

Keys of one slot share a script call; the calls for one node share a write. The map of slots is read with CLUSTER SLOTS from the
first node that answers, and again when a node is unreachable. MOVED, ASK and CLUSTERDOWN say that nothing was done, so the call
is sent again to the right node, within its budget. TRYAGAIN says that the slot moves and that some of the call's keys are not on
this node, or are new; a call with one key never gets this error. Its requests are then sent again one by one, and a request of
several keys is split by key, as a decision over several slots is.
No script may touch two slots, so a decision over, say, a user and a tenant has two steps where one limit refuses:

1. Every slot charges its own claims (one write per node). All of them allow it now: done, in one round trip.
2. One refuses: those that were charged give it back and report what is there. Starts differ: those with an earlier one give back
   and decide again, in one script call, not before the latest start of all; this is repeated until all have the same.

Where keys have several rates under one name, a peek comes first and finds a refusal, or the common start, without a charge:
giving back is exact only for the caller's own rate.

Between the two steps others may see the charge and be refused because of it, never admitted. A caller that dies in between
leaves at most the costs of this one decision charged, in the slots that had allowed it: too strict, never too lax. Times are
compared as waits, since every node has its own clock.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from ...algorithms.claim import Claim
from ...clock import SYSTEM, Clock
from ...decision import Decision, Decisions
from ...errors import StoreError, StoreUnavailable
from ..sans_io import Plan
from .address import Address, Endpoint
from .command_routing import AGAIN, DONE, LATER, MAX_REQUESTS, Route, RoutedCommand, ScriptCall
from .key_names import KeyNames
from .limit_and_state_codec import entry_of
from .resp import NotYet, Reply, ask, error_kind
from .script_request import (
    AnyRequest,
    Claims,
    DecideOptions,
    DecideRequest,
    GiveBackRequest,
    RebookRequest,
    encode_decide,
    mark_as_reset,
)

SLOTS = 16384
#: How often a common start is looked for while other callers take theirs.
ROUNDS = 12


def slot_of(key: bytes) -> int:
    """The slot of a key: of the text between its first braces, if there is any."""
    begin = key.find(b"{")
    if begin >= 0:
        end = key.find(b"}", begin + 1)
        if end > begin + 1:
            key = key[begin + 1 : end]
    return crc_hqx(key, 0) % SLOTS


class KeysApart(StoreUnavailable):
    """TRYAGAIN: while their slot moves, the keys of a script call are not on one node. Nothing was done."""


class Cluster(Route):
    """The nodes of a cluster."""

    attempts = 6
    slot_of = staticmethod(slot_of)

    def __init__(self, address: Address, clock: Clock = SYSTEM, rng: Random | None = None) -> None:
        super().__init__(address, clock, rng)
        self.direct = None
        self._slots: list[Endpoint | None] = []
        self._nodes: list[Endpoint] = list(address.endpoints)

    def locate(self, some: Sequence[RoutedCommand]) -> Plan[None]:
        if not self._slots:
            yield from self._read_map()
        for command in some:
            if command.asking or (command.endpoint is not None and command.key is None):
                continue
            slot = slot_of(command.key or b"")
            command.endpoint = self._slots[slot]
            if command.endpoint is None:
                self._slots = []
                raise NotYet(f"{self.address}: no node serves slot {slot}")

    def all_endpoints(self) -> Plan[list[Endpoint]]:
        yield from self._read_map()
        return list({endpoint: None for endpoint in self._slots if endpoint is not None})

    def _read_map(self) -> Plan[None]:
        failures = []
        nodes = list(dict.fromkeys([*self._nodes, *self.address.endpoints]))
        for at, node in enumerate(nodes):
            reply = yield from ask(node, self.login, ["CLUSTER", "SLOTS"], share=min(4, len(nodes) - at))
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

    def on_error(self, command: RoutedCommand, error: Exception) -> str:
        kind = error_kind(error)
        if kind in ("MOVED", "ASK"):
            _, slot, where = str(error).split(" ", 3)[:3]
            host, _, port = where.rpartition(":")
            node = Endpoint(host or (command.endpoint.host if command.endpoint else ""), int(port))
            command.endpoint = node
            command.asking = kind == "ASK"
            if kind == "MOVED" and self._slots:
                self._slots[int(slot)] = node
            return AGAIN
        if kind in ("CLUSTERDOWN", "LOADING", "READONLY", "MASTERDOWN"):
            self._slots = []
            return LATER
        if kind == "TRYAGAIN" and isinstance(command, ScriptCall):
            command.error = KeysApart(*command.error.args if command.error else ())
            return DONE
        return super().on_error(command, error)

    def execute(self, requests: Sequence[AnyRequest], most: int = MAX_REQUESTS) -> Plan[None]:
        yield from super().execute(requests, most)
        apart = [request for request in requests if isinstance(request.error, KeysApart)]
        if apart and most > 1:
            yield from super().execute(apart, 1)
        for request in apart:
            if isinstance(request.error, KeysApart):
                try:
                    yield from self._execute_by_key(request)
                except StoreError as error:
                    request.error = error

    def _execute_by_key(self, request: AnyRequest) -> Plan[None]:
        """Executes a request of several keys with one script call for each of them. Bookings that stay keep their starts."""
        answer: object = None
        if isinstance(request, DecideRequest):
            names, claims, options = request._arguments[:3]
            answer = yield from CrossSlotDecision(self, names, claims, options, by_key=True).decide()
        else:
            names, parts, *times = request._arguments[:4]
            charges = [(parts, *times)]
            if isinstance(request, RebookRequest):
                charges = [(one.claims, one.charged_at, *times) for one in reversed(parts) if not one.stays]
                answer = [None] * len(parts)
            for claims, *when in charges:
                backs = [GiveBackRequest(names, [claim], *when) for claim in claims]
                yield from self.execute_all(backs, 1)
                if not isinstance(request, RebookRequest):
                    answer = any(back.answer for back in backs)
                elif not any(back.answer for back in backs):
                    mark_as_reset(claims)
        request._done(answer)
        request.stale = request.error = None

    def on_unreachable(self, endpoint: Endpoint | None) -> None:
        """The node may have been replaced: the map is read again, from another node first."""
        self._slots = []
        if endpoint in self._nodes:
            self._nodes.remove(endpoint)
            self._nodes.append(endpoint)


@dataclass(slots=True)
class SlotGroup:
    """The claims of one slot, with their positions in the whole decision, and their latest decision."""

    claims: list[Claim]
    positions: list[int]
    decision: Decision = field(init=False)
    now_us: int | None = None  # the node's time when it was first asked
    charged: bool = False

    def wait_us(self, decision: Decision) -> int:
        """The wait of a decision, counted from when the group was first asked."""
        return decision.start_us - (self.now_us or 0)


def groups_of(names: KeyNames, claims: Claims, by_key: bool = False) -> list[SlotGroup]:
    """Claims by slot (or by key), in order."""
    found: dict[object, list[int]] = {}
    for at, claim in enumerate(claims):
        key = names.key(claim.named, claim.key)
        found.setdefault(key if by_key else slot_of(key), []).append(at)
    return [SlotGroup([claims[at] for at in positions], positions) for positions in found.values()]


class CrossSlotDecision:
    """One decision over several slots (or `by_key`, over the keys of a slot that moves); `decide` is a plan."""

    def __init__(self, route: Route, names: KeyNames, claims: Claims, options: DecideOptions, by_key: bool = False) -> None:
        self._route, self._names = route, names
        self._most = 1 if by_key else MAX_REQUESTS
        reserves = all(claim.named.limit.reserves for claim in claims)
        self._options = options if reserves else options._replace(max_wait_us=0)
        self._groups = groups_of(names, claims, by_key)
        self._several = any(entry_of(names, claim.named).without_fast_path for claim in claims)

    def decide(self) -> Plan[Decision]:
        groups, not_before_us = self._groups, [self._options.not_before_us] * len(self._groups)
        if self._options.commit and self._several:
            yield from self._update(groups, False, not_before_us, first=True)
            if not all(group.decision.allowed for group in groups):
                return self._joined(False)
            latest = max(group.wait_us(group.decision) for group in groups)
            not_before_us = [(group.now_us or 0) + latest for group in groups]
        yield from self._update(groups, self._options.commit, not_before_us)
        for _ in range(ROUNDS):
            if not all(group.decision.allowed for group in groups):
                yield from self._withdraw()
                return self._joined(False)
            waits = [group.wait_us(group.decision) for group in groups]
            latest = max(waits)
            early = [group for group, wait in zip(groups, waits, strict=True) if wait < latest]
            if not early or not self._options.commit:
                return self._joined(True)
            yield from self._update(early, True, [(group.now_us or 0) + latest for group in early], undo=True)
        yield from self._withdraw()
        raise StoreUnavailable(f"no common start was found in {ROUNDS} rounds: too many callers use these keys; try again")

    def _withdraw(self) -> Plan[None]:
        """Gives back what was charged, and peeks at what is there then."""
        charged = [group for group in self._groups if group.charged]
        if charged:
            yield from self._update(charged, False, [self._options.not_before_us] * len(charged), undo=True)

    def _update(
        self, groups: Sequence[SlotGroup], commit: bool, not_before_us: Sequence[int], undo: bool = False, first: bool = False
    ) -> Plan[None]:
        """Decides again for some groups (`undo`: after giving back). If one fails, the others give back what they charged.

        Every charge remembers the states around it, so that it can be undone exactly."""
        options = self._options._replace(commit=commit, remember=commit, first=first)
        decides = [
            encode_decide(self._names, group.claims, options._replace(not_before_us=moment))
            for group, moment in zip(groups, not_before_us, strict=True)
        ]
        backs = self._give_back(groups) if undo else []
        requests = [one for pair in zip(backs, decides, strict=True) for one in pair] if undo else decides
        yield from self._route.execute(requests, self._most)
        for group, request in zip(groups, decides, strict=True):
            if request.error is None:
                group.decision = request.answer
                if group.now_us is None:
                    group.now_us = group.decision.start_us - group.decision.wait_us
            group.charged = request.error is None and commit and group.decision.allowed
        failed = next((request.error for request in decides if request.error is not None), None)
        if failed is not None:
            charged = [group for group in self._groups if group.charged]
            if charged:
                yield from self._route.execute(self._give_back(charged), self._most)
            raise failed

    def _give_back(self, groups: Sequence[SlotGroup]) -> list[GiveBackRequest]:
        return [GiveBackRequest(self._names, group.claims, group.decision.start_us, self._options.now_us) for group in groups]

    def _joined(self, allowed: bool) -> Decision:
        parts: dict[int, Decision] = {}
        for group in self._groups:
            for position, part in zip(group.positions, group.decision.decisions, strict=True):
                if allowed:
                    fields = (part.limit, part.remaining, part.retry_us, part.reset_us, group.wait_us(part), part.start_us)
                    part = Decision(True, *fields, part.name)
                parts[position] = part
        return Decisions.join([parts[position] for position in range(len(parts))])
