"""Runs a fault schedule: nodes with the real LeasedStore, ShardedStore and GuardedStore, traffic, faults; notes what they did.

Every node is a process: a clock of its own, a store made of simulated clients, and callers that come in phases of silence, usual
load and overload. A crash drops the process with all that it holds; nothing that it does afterwards reaches the network. At the
end all faults are healed and every node that lives closes its store, so that what the servers have left can be compared.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Any

from ..algorithms.claim import Claim, NamedLimit
from ..algorithms.limit_parser import parse_limit
from ..decision import Decision
from ..errors import LimitkeeperError, StoreError
from ..rate import duration_us
from ..stores import GuardedStore, LeasedStore, ShardedStore, Store
from .fault_schedule import CLOCKS, CRASHES, LINKS, MEMBERS, SERVERS, TRAFFIC_S, Fault, Schedule, make_schedule
from .network import ANY, GIVEN_BACK, LinkFault, SimulatedClient, SimulatedNetwork, SimulatedServer, replies
from .virtual_time import SimulatedClock, VirtualTimeLoop, run_in_thread, run_virtual

#: Calls that overload is made of, in the whole run, and seconds after the traffic in which everything comes to rest.
CALLS, REST_S = 700, 1.5
TIGHT: tuple[str, ...] = ("token bucket {rate}/s burst {burst}",) * 3
TIGHT += ("leaky bucket {rate}/s capacity {burst}", "fixed window {rate}/s")
TIGHT += ("sliding window log {rate}/s", "sliding window counter {rate}/s")
#: Limits that are never full and never empty: what is left at the end is what was not charged.
WIDE = {"token bucket": "5000/5000 s", "leaky bucket": "5000/5000 s capacity 5000"}
SIZE, USED = 5000, 2500
#: Drift of a node's clock, as a part of time.
MAX_DRIFT = Fraction(200, 1_000_000)


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to put stores together. `make` makes the store of a node; `kinds` are the faults that it has a stated bound for.
    `hoards`: nodes hold large leases, ask just often enough to keep them while the bucket fills, and then spend everything."""

    make: Callable[[FaultRun, Node], Store]
    kinds: tuple[str, ...]
    servers: int = 1
    max_nodes: int = 4
    fences: bool = False
    leases_tokens: bool = False
    hoards: bool = False


@dataclass(slots=True)
class Admission:
    """A part of an admitted call: virtual µs at which it started, and what decided it: a server (or a lease of one), or a node
    alone (`share_us`: on its clock without steps)."""

    limit: str
    key: str
    at_us: int
    cost: int
    source: str
    process: int
    share_us: int


@dataclass(slots=True)
class History:
    """What a run did, for `history_check`."""

    schedule: Schedule
    limits: dict[str, NamedLimit]
    admitted: list[Admission] = field(default_factory=list)
    #: What came back to a server, a lease or a share, when it did; and what callers gave back.
    returned: list[Admission] = field(default_factory=list)
    settled: list[Admission] = field(default_factory=list)
    calls: int = 0
    failed_calls: int = 0
    errors: list[str] = field(default_factory=list)
    #: The largest bound of the leases, by limit; steps of clocks (µs) of servers, and of nodes by process.
    leased: dict[str, float] = field(default_factory=dict)
    server_steps: list[int] = field(default_factory=list)
    node_steps: dict[int, list[int]] = field(default_factory=dict)
    #: By (limit, key): what failovers forgot, and at the end what is left on the key's server.
    lost: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: dict[tuple[str, str], int] = field(default_factory=dict)
    #: What callers gave back without getting a reply: it may have come back at any time.
    unsure: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: What leases gave back late, because they could not reach the server.
    late: Counter[tuple[str, str]] = field(default_factory=Counter)
    crashes: int = 0
    failovers: int = 0
    losses: int = 0
    takeovers: int = 0
    end_us: int = 0
    life_us: int = 0


class Node:
    """One machine: its clock stays, its process may be another one after a crash."""

    def __init__(self, run: FaultRun, name: str, rng: Random) -> None:
        self.name = name
        self.clock = SimulatedClock(run.loop, rng.randrange(-500_000, 500_000), rng.randrange(-200, 201))
        self.tasks: set[asyncio.Task[Any]] = set()
        self.process = 0
        self.up = False
        self.lost: set[str] = set()

    def start(self, run: FaultRun) -> None:
        self.process, self.up = run.new_process(self), True
        self.changing = asyncio.Lock()  # a thread that waited for a store's own lock would stop the loop
        self.store = run.mode.make(run, self)
        for named in run.limits.values():
            self.store.register(named)

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class FaultRun:
    """One run of a schedule."""

    def __init__(self, schedule: Schedule, loop: VirtualTimeLoop) -> None:
        self.schedule, self.loop = schedule, loop
        self.mode = MODES[schedule.mode]
        self.rng = rng = Random(f"{schedule.mode} {schedule.seed}")
        self.timeout_s = rng.choice((0.02, 0.05, 0.1))
        self.promises = rng.random() < 0.5
        self.lease, self.life = rng.choice((None, None, 5, 20)), rng.choice(("50ms", "100ms", "400ms"))
        tight = rng.choice(TIGHT).format(rate=rng.choice((20, 60, 200)), burst=rng.choice((4, 20, 100)))
        if self.mode.hoards:
            self.lease, self.life, tight = 50, "100ms", "token bucket 60/s burst 100"
        kind = " ".join(word for word in tight.split("/")[0].split()[:-1])
        wide = f"{kind} {WIDE.get(kind, f'{SIZE}/h')}"
        self.limits = {name: NamedLimit("sim", name, parse_limit(text)) for name, text in (("tight", tight), ("wide", wide))}
        self.keys = [f"key{i}" for i in range(rng.choice((1, 2, 3)))]
        self.network = SimulatedNetwork(
            loop, Random(f"{schedule.mode} {schedule.seed} network"), self.timeout_s, self.note_return
        )
        for name in schedule.servers:
            SimulatedServer(name, self.network)
        self.history = History(schedule, self.limits, life_us=duration_us(self.life))
        self.processes = 0
        self.nodes = {name: Node(self, name, rng) for name in schedule.nodes}

    # Processes -------------------------------------------------------------------------------------------------

    def new_process(self, node: Node) -> int:
        self.processes += 1
        node.clock.forget_steps()
        self.history.node_steps[self.processes] = node.clock.steps
        return self.processes

    def client(self, node: Node, server: str = "server0", fences: bool = False) -> SimulatedClient:
        found = SimulatedClient(self.network, node.name, node.process, server, self.promises)
        found.fences = fences
        return found

    def leases(self, node: Node, **options: Any) -> LeasedStore:
        return LeasedStore(self.client(node), life=self.life, clock=node.clock, **options)

    def random_of(self, node: Node) -> Random:
        return Random(f"{self.schedule.seed} {node.process}")

    def guard(self, node: Node, store: Store, on_failure: str) -> GuardedStore:
        share = len(self.schedule.nodes) if on_failure == "local" else None
        times = {"backoff": "20ms", "max_backoff": "400ms", "ramp": "200ms"}
        rng = self.random_of(node)
        return GuardedStore(store, self.timeout_s, on_failure, share, clock=node.clock, rng=rng, background=True, **times)  # type: ignore[arg-type]

    def shards(self, node: Node, on_loss: str = "fail", hot: bool | int = False, fences: bool = False) -> ShardedStore:
        stores = {name: self.client(node, name, fences) for name in self.schedule.servers[:2]}
        options = {
            "life": self.life,
            "pause": 0.5,
            "clock": node.clock,
            "run_in_thread": run_in_thread,
            "rng": self.random_of(node),
        }
        return ShardedStore(stores, on_loss=on_loss, hot=hot, **options)  # type: ignore[arg-type]

    def crash(self, node: Node) -> None:
        self.network.crashed.add(node.process)
        for task in node.tasks:
            task.cancel()
        node.up = False
        self.history.crashes += 1

    # Traffic ---------------------------------------------------------------------------------------------------

    async def traffic(self, node: Node) -> None:
        rng, end_s = Random(f"{self.schedule.seed} {node.name} traffic"), TRAFFIC_S
        usual = CALLS / TRAFFIC_S / len(self.nodes)
        while self.mode.hoards and self.loop.time() < end_s - 1:
            for gap_s, count in ((0.04, 25), (0.0001, 150 // len(self.nodes))):
                for _ in range(count):
                    await asyncio.sleep(gap_s)
                    for key in self.keys if node.up else ():
                        node.spawn(self.call(node, 0.5, key, 1, 0.0, 1))
        while self.loop.time() < end_s:
            rate, phase_end_s = usual * rng.choice((0, 0.3, 1, 1, 3)), self.loop.time() + rng.uniform(0.02, 0.6)
            while rate and (at_s := self.loop.time() + rng.expovariate(rate)) < min(phase_end_s, end_s):
                await asyncio.sleep(at_s - self.loop.time())
                kind, key, cost = rng.random(), rng.choice(self.keys), rng.choice((1, 1, 1, 1, 2, 4))
                if node.up:
                    node.spawn(self.call(node, kind, key, cost, rng.uniform(0, 0.05), rng.randrange(0, cost + 1)))
            await asyncio.sleep(max(0.0, min(phase_end_s, end_s) - self.loop.time()))

    async def call(self, node: Node, kind: float, key: str, cost: int, hold_s: float, used: int) -> None:
        """A hit, mostly; or one on both limits, a reservation with a wait, or one that is settled later."""
        names = ["tight", "wide"] if 0.8 <= kind < 0.85 else ["wide"] if kind < 0.2 else ["tight"]
        keys = [key, self.keys[-1]] if len(names) == 2 else [key]
        claims = [Claim(self.limits[name], one, cost) for name, one in zip(names, keys, strict=True)]
        process, store = node.process, node.store
        seen: list[tuple[int, int]] = []
        replies.set(seen)
        self.history.calls += 1
        try:
            decision = await store.adecide(claims, 100_000 if kind >= 0.97 else 0)
            self.note_bounds(node)
            if not decision:
                return
            self.admit(node, process, claims, decision, seen)
            if 0.9 <= kind < 0.97:
                await asyncio.sleep(hold_s)
                await self.settle(node, process, store, claims, decision, used)
        except StoreError:
            pass
        except (LimitkeeperError, AssertionError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.history.errors.append(f"{type(error).__name__}: {error}")
        self.note_bounds(node)

    def admit(self, node: Node, process: int, claims: list[Claim], decision: Decision, seen: list[tuple[int, int]]) -> None:
        for claim, part in zip(claims, decision.decisions, strict=True):
            executed = [at_us for start_us, at_us in seen if start_us == part.start_us] if part.source == "store" else []
            at_us = (executed or [self.loop.now_us()])[-1] + decision.wait_us
            share_us = node.clock.steady_us() + decision.wait_us
            admission = Admission(claim.named.name, claim.key, at_us, claim.cost, part.source, process, share_us)
            self.history.admitted.append(admission)

    async def settle(self, node: Node, process: int, store: Store, claims: list[Claim], decision: Decision, used: int) -> None:
        """Gives the unused part back. What comes back to a lease or a share is noted here, when it does; what comes back
        to a server, by `note_return`. A part of a lease mode whose return fails may come back at any time."""
        for claim, part in zip(claims, decision.decisions, strict=True):
            back = Claim(claim.named, claim.key, claim.cost - used, claim.cost, claim.reset_id)
            if not back.cost:
                continue
            seen: list[tuple[int, int]] = []
            replies.set(seen)
            place = (part.source, process, node.clock.steady_us())
            found = Admission(claim.named.name, claim.key, self.loop.now_us(), back.cost, *place)
            self.history.settled.append(found)
            if self.mode.leases_tokens or part.source == "local_share":
                self.history.returned.append(found)
            unsure = (claim.named.name, claim.key)
            self.history.unsure[unsure] += back.cost * self.mode.leases_tokens
            await store.agive_back([back], part.start_us, part.source)
            found.at_us = max([found.at_us, *[at_us for what, at_us in seen if what == GIVEN_BACK]])
            self.history.unsure[unsure] -= back.cost * self.mode.leases_tokens

    def note_return(self, claim: Claim, age_us: int) -> None:
        """A server got something back: of a charge that a caller knows of, or of a lease, on time (within two lives) or late."""
        named = (claim.named.name, claim.key)
        if not self.mode.leases_tokens:
            self.history.returned.append(Admission(*named, self.loop.now_us(), claim.cost, "store", 0, 0))
        elif not 0 <= age_us <= 2 * self.history.life_us:
            self.history.late[named] += claim.cost

    def note_bounds(self, node: Node) -> None:
        """Leases state their bound by the round trips that they have seen; a sharded store says which shards it has lost."""
        inner = node.store.inner if isinstance(node.store, GuardedStore) else node.store
        leases = [inner] if isinstance(inner, LeasedStore) else []
        if isinstance(inner, ShardedStore):
            leases = [one for one in inner.membership.outer_stores() if isinstance(one, LeasedStore)]
            self.history.losses += len(set(inner.lost) - node.lost)
            node.lost = set(inner.lost)
        for store in leases:
            for name, named in self.limits.items():
                most = store.over_admission(named.limit, len(self.nodes))
                self.history.leased[name] = max(most, self.history.leased.get(name, 0.0))

    # Faults ----------------------------------------------------------------------------------------------------

    async def fault(self, fault: Fault) -> None:
        node, server = self.nodes.get(fault.node), self.network.servers.get(fault.server)
        lag_s = fault.amount if fault.kind in SERVERS else 0.0
        await asyncio.sleep(max(0.0, fault.at_s - lag_s))
        if fault.kind in LINKS:
            await self.link_fault(fault)
        elif fault.kind in CRASHES and node is not None and node.up:
            self.crash(node)
            await asyncio.sleep(fault.lasts_s)
            node.start(self)
        elif fault.kind == "node clock" and node is not None:
            node.clock.step(round(fault.amount * 1e6))
        elif server is not None and fault.kind == "server clock":
            server.clock.step(round(fault.amount * 1e6))
            self.history.server_steps.append(round(fault.amount * 1e6))
        elif server is not None and fault.kind in SERVERS:
            server.replicate()
            await asyncio.sleep(lag_s)
            server.fail_over(self.old_callers(fault))
            self.history.failovers += 1
            await asyncio.sleep(fault.lasts_s)
            server.retire()
        elif server is not None and fault.kind == "restart":
            server.restart_empty()
            self.history.failovers += 1
            await self.link_fault(fault._replace(kind="cut", node=ANY))
        elif node is not None and node.up and fault.kind in MEMBERS:
            node.spawn(self.change_members(node, fault))

    async def link_fault(self, fault: Fault) -> None:
        loss = fault.amount if fault.kind == "loss" else 0.0
        slow_s = fault.amount if fault.kind == "slow" else 0.0
        link = LinkFault(fault.node, fault.server, fault.kind == "cut", loss / 2, loss, slow_s)
        self.network.faults.append(link)
        await asyncio.sleep(fault.lasts_s)
        self.network.faults.remove(link)

    def old_callers(self, fault: Fault) -> list[str]:
        """With "split", half of the nodes do not notice the failover."""
        return list(self.schedule.nodes[::2]) if fault.kind == "split" else []

    async def change_members(self, node: Node, fault: Fault) -> None:
        store = node.store
        assert isinstance(store, ShardedStore)
        async with node.changing:
            try:
                if fault.kind == "rebalance":
                    for name in store.lost:
                        await store.arestore(name)
                    await store.arebalance()
                elif fault.kind == "add" and fault.server not in store.shards:
                    await store.aadd(fault.server, self.client(node, fault.server, self.mode.fences))
                elif fault.kind == "remove" and fault.server in store.shards and len(store.shards) > 1:
                    await store.aremove(fault.server)
            except LimitkeeperError:  # a move that failed is continued by the next change, or by the end
                pass

    # The whole -------------------------------------------------------------------------------------------------

    async def run(self) -> History:
        for node in self.nodes.values():
            node.start(self)
        await self.use_wide_limits()
        work = [self.traffic(node) for node in self.nodes.values()] + [self.fault(one) for one in self.schedule.active()]
        await asyncio.gather(*work)
        self.network.faults.clear()
        await asyncio.sleep(REST_S)
        await self.close()
        history = self.history
        history.failed_calls, history.end_us = self.network.failed_calls, self.loop.now_us()
        history.takeovers = sum(server.takeovers for server in self.network.servers.values())
        for server in self.network.servers.values():
            history.lost.update(server.lost)
        return history

    async def use_wide_limits(self) -> None:
        """Uses a half of each wide limit, so that its bucket is not full from here on."""
        node = next(iter(self.nodes.values()))
        for key in self.keys:
            claim, seen = Claim(self.limits["wide"], key, USED), list[tuple[int, int]]()
            replies.set(seen)
            decision = await node.store.adecide([claim])
            assert decision
            self.admit(node, node.process, [claim], decision, seen)
        replies.set(None)

    async def close(self) -> None:
        """Closes what lives, and reads what the servers have left."""
        living = [node for node in self.nodes.values() if node.up]
        homes: dict[str, str] = dict.fromkeys(self.keys, self.schedule.servers[0])
        for node in living:
            inner = node.store
            if isinstance(inner, ShardedStore):
                await self.change_members(node, Fault(0, "rebalance"))
                homes = {key: inner.home_of(key) for key in self.keys}
        for node in living:
            while node.tasks:
                await asyncio.wait(tuple(node.tasks))
            await node.store.aclose()
        for key, server in homes.items():
            for name, named in self.limits.items():
                found = self.network.servers[server]
                self.history.left[name, key] = found.store.decide([Claim(found.limit(named), key, 1)], commit=False).remaining


MODES: dict[str, Mode] = {
    "central": Mode(lambda run, node: run.client(node), (*LINKS, *CRASHES, *CLOCKS, *SERVERS, "restart")),
    "leased": Mode(
        lambda run, node: run.leases(node, lease=run.lease), (*LINKS, *CRASHES, *CLOCKS, *SERVERS), leases_tokens=True
    ),
    "leased-hoarding": Mode(
        lambda run, node: run.leases(node, lease=run.lease), (*LINKS, *CRASHES), 1, 2, leases_tokens=True, hoards=True
    ),
    "strict": Mode(
        lambda run, node: run.leases(node, lease=run.lease, strict=True), (*LINKS, *CRASHES, "server clock"), leases_tokens=True
    ),
    "guarded-closed": Mode(
        lambda run, node: run.guard(node, run.client(node), "closed"), (*LINKS, *CRASHES, *CLOCKS, *SERVERS, "restart")
    ),
    "guarded-open": Mode(lambda run, node: run.guard(node, run.client(node), "open"), (*LINKS, *CRASHES, *SERVERS)),
    "guarded-local": Mode(
        lambda run, node: run.guard(node, run.client(node), "local"), (*LINKS, *CRASHES, *CLOCKS, *SERVERS, "restart")
    ),
    "guarded-leased": Mode(
        lambda run, node: run.guard(node, run.leases(node, lease=run.lease), "local"),
        (*LINKS, *CRASHES, *CLOCKS, *SERVERS),
        leases_tokens=True,
    ),
    "sharded": Mode(lambda run, node: run.shards(node), (*LINKS, *MEMBERS, *MEMBERS), 4, 1),
    "sharded-fixed": Mode(lambda run, node: run.shards(node), (*LINKS, *CRASHES, *SERVERS), 2),
    "sharded-hot": Mode(lambda run, node: run.shards(node, hot=10), (*LINKS, *CRASHES), 2, leases_tokens=True),
    "sharded-rehash": Mode(lambda run, node: run.shards(node, "rehash"), (*LINKS, "rebalance", "rebalance"), 3, 1),
    "fenced": Mode(
        lambda run, node: run.shards(node, fences=True), (*LINKS, *CRASHES, *MEMBERS, *MEMBERS, "restart"), 4, 3, True
    ),
}


def schedule_of(mode: str, seed: int) -> Schedule:
    """The schedule of a seed."""
    found = MODES[mode]
    return make_schedule(mode, seed, 1 + seed % found.max_nodes, found.servers, found.kinds)


def run_schedule(schedule: Schedule) -> History:
    """Runs a schedule in virtual time."""

    async def main() -> History:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return await FaultRun(schedule, loop).run()

    return run_virtual(main())
