"""The topology of a Redis Cluster, 16384 slots, each served by one primary; and decisions over several slots.

Keys of one slot share a script call; the calls for one node share a write. The map of slots is read with CLUSTER SLOTS from the
first node that answers, and again when a node is unreachable. MOVED, ASK and CLUSTERDOWN say that nothing was done, so the call
is sent again to the right node, within its budget. TRYAGAIN says that the slot moves and that some of the call's keys are not on
this node, or are new; a call with one key never gets this error. Its requests are then sent again one by one, and a request of
several keys is split by key, as a decision over several slots is.
No script may touch two slots, so a decision over, say, a user and a tenant has two phases (stores/two_phase_decision.py); one
script call gives back and decides again.

Where keys have several rates under one name, a peek comes first and finds a refusal, or the common start, without a charge:
giving back is exact only for the caller's own rate.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from random import Random

from ...algorithms.claim import Claim
from ...clock import SYSTEM, Clock
from ...decision import Decision
from ...errors import StoreError, StoreUnavailable
from ..sans_io import Plan
from ..two_phase_decision import Group, TwoPhaseDecision, group_claims
from .address import Address, Endpoint
from .command_routing import AGAIN, DONE, LATER, MAX_REQUESTS, Route, RoutedCommand, ScriptCall
from .key_names import KeyNames
from .limit_and_state_codec import entry_of
from .resp import NotYet, Reply, ask, decode_endpoint, decode_reply, error_kind
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
#: How many charges of logs whose start differs from that of their decision are noted.
MAX_STARTS = 10_000


def slot_of(key: bytes) -> int:
    """The slot of a key: of the text between its first braces, if there is any."""
    begin = key.find(b"{")
    if begin >= 0:
        end = key.find(b"}", begin + 1)
        if end > begin + 1:
            key = key[begin + 1 : end]
    return crc_hqx(key, 0) % SLOTS


def decode_map(ranges: Reply, source: Endpoint) -> tuple[list[Endpoint | None], list[Endpoint]]:
    """The node of each slot, and all nodes, from the reply of one to CLUSTER SLOTS."""
    slots: list[Endpoint | None] = [None] * SLOTS
    nodes = {source: None}
    for first, last, primary, *_ in ranges:
        node = decode_endpoint(primary[0] or source.host, primary[1])
        slots[checked_slot(first) : checked_slot(last) + 1] = [node] * (last - first + 1)
        nodes[node] = None
    return slots, list(nodes)


def decode_redirection(text: str, source: Endpoint | None) -> tuple[int, Endpoint]:
    """The slot and the node of a MOVED or ASK; a node without a host is at that of the `source`."""
    _, slot, where = text.split(" ", 3)[:3]
    host, _, port = where.rpartition(":")
    return checked_slot(int(slot)), decode_endpoint(host or (source.host if source else ""), port)


def checked_slot(slot: int) -> int:
    if not 0 <= slot < SLOTS:
        raise ValueError(f"no slot: {slot}")
    return slot


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
        slots = self._slots or (yield from self._read_map())  # another thread may drop the map at any moment
        for command in some:
            if command.asking or (command.endpoint is not None and command.key is None):
                continue
            slot = slot_of(command.key or b"")
            command.endpoint = slots[slot]
            if command.endpoint is None:
                self._slots = []
                raise NotYet(f"{self.address}: no node serves slot {slot}")

    def by_server(self, requests: Sequence[AnyRequest]) -> Plan[list[list[AnyRequest]]]:
        try:
            slots = self._slots or (yield from self._read_map())
        except NotYet:  # `execute` tries again
            return [list(requests)]
        found: dict[Endpoint | None, list[AnyRequest]] = {}
        for request in requests:
            found.setdefault(slots[slot_of(request.keys[0])], []).append(request)
        return list(found.values())

    def all_endpoints(self) -> Plan[list[Endpoint]]:
        slots = yield from self._read_map()
        return list({endpoint: None for endpoint in slots if endpoint is not None})

    def _read_map(self) -> Plan[list[Endpoint | None]]:
        failures, later = [], False
        nodes = list(dict.fromkeys([*self._nodes, *self.address.endpoints]))
        for at, node in enumerate(nodes):
            reply = yield from ask(node, self.login, ["CLUSTER", "SLOTS"], share=min(4, len(nodes) - at))
            try:
                if not isinstance(reply, Exception):
                    slots, self._nodes = decode_reply(reply, partial(decode_map, source=node), node)
                    self._slots = slots
                    return slots
            except StoreUnavailable as error:
                reply = error
            no_cluster = "cluster support disabled" in str(reply)
            failures.append(f"{node}: {reply}" + ("; use redis://" if no_cluster else ""))
            later = self.takes_a_moment(node, reply) or later
            self._ask_last(node)
        kind = NotYet if later else StoreUnavailable
        raise kind(f"{self.address}: no node returned the map of slots ({'; '.join(failures)})")

    def on_error(self, command: RoutedCommand, error: Exception) -> str:
        kind = error_kind(error)
        if kind in ("MOVED", "ASK"):
            try:
                slot, node = decode_reply(str(error), partial(decode_redirection, source=command.endpoint), command.endpoint)
            except StoreUnavailable as unexpected:
                command.error = unexpected
                return DONE
            command.endpoint = node
            command.asking = kind == "ASK"
            slots = self._slots
            if kind == "MOVED" and slots:
                slots[slot] = node
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
        self._ask_last(endpoint)

    def _ask_last(self, node: Endpoint | None) -> None:
        """Asks the other nodes first. None is forgotten: it may be the caller that has no time left."""
        nodes = [one for one in self._nodes if one != node]
        self._nodes = nodes if node is None or len(nodes) == len(self._nodes) else [*nodes, node]


def groups_of(names: KeyNames, claims: Claims, by_key: bool = False) -> list[Group]:
    """Claims by slot (or by key), in order."""

    def place_of(claim: Claim) -> bytes | int:
        key = names.key(claim.named, claim.key)
        return key if by_key else slot_of(key)

    return group_claims(claims, place_of)


class CrossSlotDecision(TwoPhaseDecision):
    """One decision over several slots (or `by_key`, over the keys of a slot that moves)."""

    def __init__(self, route: Route, names: KeyNames, claims: Claims, options: DecideOptions, by_key: bool = False) -> None:
        max_wait_us = options.max_wait_us if all(claim.named.limit.reserves for claim in claims) else 0
        groups = groups_of(names, claims, by_key)
        super().__init__(groups, max_wait_us, options.commit, options.not_before_us, route.clock, route.random)
        self._route, self._names, self._options = route, names, options
        self._most = 1 if by_key else MAX_REQUESTS
        self.peeks_first = any(entry_of(names, claim.named).without_fast_path for claim in claims)

    def queue_of(self, group: Group, claim: Claim) -> Hashable:
        return id(self._route), self._names.key(claim.named, claim.key)

    def decide(self) -> Plan[Decision]:
        """Notes the starts of logs, whose entries are given back by them: a caller knows that of the decision, or the latest."""
        joined = yield from super().decide()
        starts, latest_us = self._names.starts, max(group.decision.start_us for group in self.groups)
        for group in self.groups:
            for claim in group.claims if group.charged else ():
                own_us = claim.charged_at()  # while its slot moves, not that of its group
                for start_us in {joined.start_us, latest_us} - {own_us} if claim.limit.limit.logs and own_us >= 0 else ():
                    starts[start_us, self._names.key(claim.limit, claim.key)] = own_us
        with suppress(RuntimeError):  # another thread has added one
            while len(starts) > MAX_STARTS:
                starts.pop(next(iter(starts)), None)
        return joined

    def ask(
        self, groups: Sequence[Group], not_before_us: Sequence[int], commit: bool, undo: bool, first: bool
    ) -> Plan[list[Decision | StoreError]]:
        """Every charge remembers the states around it, so that it can be undone exactly."""
        options = self._options._replace(max_wait_us=self.max_wait_us or 0, commit=commit, remember=commit, first=first)
        decides = [
            encode_decide(self._names, group.claims, options._replace(not_before_us=moment))
            for group, moment in zip(groups, not_before_us, strict=True)
        ]
        backs = self._give_backs(groups) if undo else []
        requests = [one for pair in zip(backs, decides, strict=True) for one in pair] if undo else decides
        yield from self._route.execute(requests, self._most)
        return [request.error or request.answer for request in decides]

    def give_back(self, groups: Iterable[Group]) -> Plan[None]:
        yield from self._route.execute(self._give_backs(groups), self._most)

    def _give_backs(self, groups: Iterable[Group]) -> list[GiveBackRequest]:
        charged = [(group.claims, group.decision.start_us) for group in groups if group.charged]
        return [GiveBackRequest(self._names, claims, start_us, self._options.now_us) for claims, start_us in charged]
