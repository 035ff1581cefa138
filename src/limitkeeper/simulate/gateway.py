"""The gateway: nodes that enforce a policy, each with the real Gate, on a store of one of four kinds.

    central    one store, a round trip away, exact
    leased     a LeasedStore on every node, over that store
    sharded    a ShardedStore over several stores, each a round trip away
    per-node   a store of its own on every node: the limit times the number of nodes

The stores are the real classes over memory stores on the simulated clock; plans of theirs are performed with the latency of their
calls (sans_io_driver.py). A crashed node loses its memory and gets no requests; while a store is down, on_failure decides.
Rejected: a wait inside the stores: other requests go on while one waits for a round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..algorithms import Limit
from ..algorithms.claim import NamedLimit
from ..policy import Gate, Policy
from ..policy.evaluation import Evaluation
from ..stores import LeasedStore, MemoryStore, ShardedStore, Store
from .clients import Request
from .event_loop import EventLoop, SkewedClock
from .over_admission import OverAdmission
from .sans_io_driver import PlanDriver
from .services import OK, REFUSED, UNAVAILABLE, Reply, Service

CENTRAL, LEASED, SHARDED, PER_NODE = "central", "leased", "sharded", "per-node"
#: Rounds of a lease's maintenance within its life.
ROUNDS = 20


@dataclass(frozen=True)
class StoreSettings:
    """The store of the gateways. `latency_us` are round trips from each node (one for all, or one each)."""

    kind: str = CENTRAL
    latency_us: tuple[int, ...] = (0,)
    shards: int = 4
    lease: int | None = None
    life_us: int = 100_000
    strict: bool = False


@dataclass(frozen=True)
class Fault:
    """A crash of node `node`, or of the store (None), for `down_us`. A store that `loses` its memory restarts empty."""

    at_us: int
    down_us: int
    node: int | None = None
    loses: bool = True


@dataclass(frozen=True)
class GatewaySettings:
    """`policy` None: nothing is limited. `skew_us` are the errors of the nodes' clocks."""

    nodes: int = 1
    policy: Policy | None = None
    store: StoreSettings = StoreSettings()
    skew_us: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()


class Node:
    """One gateway: its gate, and the store that the gate asks."""

    def __init__(self, number: int, gateway: Gateway) -> None:
        self.number, self.up = number, True
        settings, loop = gateway.settings, gateway.loop
        skew_us = settings.skew_us[number % len(settings.skew_us)] if settings.skew_us else 0
        self.clock = SkewedClock(loop, skew_us) if skew_us else loop
        self.latency_us = settings.store.latency_us[number % len(settings.store.latency_us)]
        self.driver = PlanDriver(loop, self.round_trip)
        self.gateway = gateway
        self.store: Store
        self.open()

    def open(self) -> None:
        """A gate with empty memory of its own: at first, and after a crash."""
        gateway, settings = self.gateway, self.gateway.settings.store
        if settings.kind == PER_NODE:
            self.store = MemoryStore(clock=self.clock)
        elif settings.kind == LEASED:
            life = settings.life_us / 1e6
            self.store = LeasedStore(gateway.central, settings.lease, life, settings.strict)
            self.gateway.loop.after(settings.life_us // ROUNDS, self._tend, self.store)
        else:
            self.store = gateway.central
        assert gateway.settings.policy is not None
        self.gate = Gate(gateway.settings.policy, store=self.store, imports=False, secret=b"simulated")
        self.at_once = settings.kind == PER_NODE or (settings.kind == CENTRAL and not self.latency_us)

    def round_trip(self, store: object) -> int | None:
        if self.gateway.settings.store.kind == PER_NODE:
            return 0
        return None if self.gateway.store_down else self.latency_us

    def _tend(self, store: LeasedStore) -> None:
        """One round of the leases' maintenance, and the next after a while."""
        if store is self.store:
            self.driver.drive(store.maintenance.attempt_round(), partial(self._tended, store))

    def _tended(self, store: LeasedStore, _: object) -> None:
        self.gateway.loop.after(self.gateway.settings.store.life_us // ROUNDS, self._tend, store)


class Gateway:
    """All nodes. Requests go to the nodes in turn; what a gate admits goes to `service`, which may be None: answered at once."""

    def __init__(self, settings: GatewaySettings, loop: EventLoop, service: Service | None) -> None:
        self.settings, self.loop, self.service = settings, loop, service
        self.store_down = False
        self.admissions: dict[tuple[str, Limit], OverAdmission] = {}
        self._next = 0
        self.nodes: list[Node] = []
        self.central: Store
        self.open_store()
        if settings.policy is not None:
            self.nodes = [Node(number, self) for number in range(settings.nodes)]
        for fault in settings.faults:
            loop.at(loop.now + fault.at_us, self._crash, fault)

    def open_store(self) -> None:
        settings, loop = self.settings.store, self.loop
        if settings.kind == SHARDED:
            self.central = ShardedStore([MemoryStore(clock=loop) for _ in range(settings.shards)], hot=False, clock=loop)
        else:
            self.central = MemoryStore(clock=loop)

    def send(self, request: Request, reply: Reply) -> None:
        """A request arrives."""
        if not self.nodes:
            self._forward(request, reply)
            return
        node = self._choose()
        if node is None:
            reply(UNAVAILABLE)
            return
        evaluation = node.gate.ask_nowait(request.context) if node.at_once and not self.store_down else None
        if evaluation is not None:
            self._decided(request, reply, evaluation)
        else:
            node.driver.drive(node.gate._whole_plan(request.context, False), partial(self._decided, request, reply))

    def _choose(self) -> Node | None:
        """The next node that is up."""
        for _ in range(len(self.nodes)):
            number = self._next
            self._next = 0 if number + 1 == len(self.nodes) else number + 1
            if self.nodes[number].up:
                return self.nodes[number]
        return None

    def _decided(self, request: Request, reply: Reply, evaluation: object) -> None:
        if not isinstance(evaluation, Evaluation):
            assert isinstance(evaluation, BaseException)
            raise evaluation
        if not evaluation.allowed:
            refusal = evaluation.refusal
            assert refusal is not None
            request.retry_us = refusal.retry_us
            request.rule = refusal.violated[0] if refusal.violated else refusal.reason
            reply(REFUSED)
            return
        if evaluation.decision is not None:
            self._count(evaluation)
        if evaluation.needs_settlement:
            reply = partial(self._settle, evaluation, reply)
        self._forward(request, reply)

    def _forward(self, request: Request, reply: Reply) -> None:
        if self.service is None:
            reply(OK)
        else:
            self.service.submit(request, reply)

    def _settle(self, evaluation: Evaluation, reply: Reply, status: int) -> None:
        evaluation.settle(status)
        reply(status)

    def _count(self, evaluation: Evaluation) -> None:
        """Notes what was admitted under which limits."""
        now_us, costs = self.loop.now, evaluation.costs or ()
        for entry, key, cost in zip(evaluation.entries, evaluation.keys, costs, strict=False):
            named: NamedLimit = entry.named
            name = (entry.label, named.limit)
            if name not in self.admissions:
                self.admissions[name] = OverAdmission(named.limit)
            self.admissions[name].add(key, cost, now_us)

    # Faults ----------------------------------------------------------------------------------------------------

    def _crash(self, fault: Fault) -> None:
        if fault.node is None:
            self.store_down = True
        else:
            self.nodes[fault.node].up = False
        self.loop.after(fault.down_us, self._restart, fault)

    def _restart(self, fault: Fault) -> None:
        crashed: Sequence[Node] = [] if fault.node is None else [self.nodes[fault.node]]
        if fault.node is None:
            self.store_down = False
            if fault.loses:
                self.open_store()
                crashed = self.nodes
        for node in crashed:
            node.open()
            node.up = True
