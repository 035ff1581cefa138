"""A simulated network: servers with real MemoryStores, links that delay, lose and cut, and the client that a node's stores call.

A request takes a random time to its server, is executed there at one instant, and its reply takes a random time back. A caller
that gets no reply within its timeout raises StoreTimeout; the request may be executed all the same, before or after that. A cut
link refuses at once (StoreUnavailable) or swallows the request. Arguments are copied, as a real network does: what a request's
execution writes into its claims reaches the caller with the reply or not at all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from random import Random
from typing import Any, NamedTuple

from ..algorithms.claim import Claim, NamedLimit
from ..clock import Clock
from ..decision import STORE, Decision
from ..errors import StoreError, StoreTimeout, StoreUnavailable
from ..stores.contract import KeyState, Store
from ..stores.memory import MemoryStore
from ..stores.sharded.shard_map import NodeMap
from .virtual_time import SimulatedClock, VirtualTimeLoop, block_on

ANY = "*"
#: Seconds that one way takes: the least, and the mean of what is added at random.
LEAST_S, MEAN_S = 0.0002, 0.0006
#: How far ahead a charge may start (µs): with the size of a limit, that bounds what one key has used.
MAX_AHEAD_US = 400_000
#: (start_us of a Decision or GIVEN_BACK, virtual µs of its execution) of the replies that a caller got.
GIVEN_BACK = -1
replies: ContextVar[list[tuple[int, int]] | None] = ContextVar("replies", default=None)
Copies = list[tuple[Claim, Claim]]
#: Called when a server has executed a give-back, with the µs since its charge (−1: unknown).
OnReturn = Callable[[Claim, int], object]


class LinkFault(NamedTuple):
    """What is wrong between a node and a server (ANY: all of them), while it lasts."""

    node: str
    server: str
    cut: bool = False
    request_loss: float = 0.0
    reply_loss: float = 0.0
    delay_s: float = 0.0


class SimulatedNetwork:
    """All links, by the faults that are in force, and what went wrong on them."""

    def __init__(self, loop: VirtualTimeLoop, rng: Random, timeout_s: float, on_return: OnReturn) -> None:
        self.loop, self.rng, self.timeout_s, self.on_return = loop, rng, timeout_s, on_return
        self.servers: dict[str, SimulatedServer] = {}
        self.faults: list[LinkFault] = []
        self.crashed: set[object] = set()
        self.failed_calls = 0
        self.calls = 0

    def faults_of(self, node: str, server: str) -> list[LinkFault]:
        return [one for one in self.faults if one.node in (ANY, node) and one.server in (ANY, server)]

    def is_cut(self, node: str, server: str) -> bool:
        return any(one.cut for one in self.faults_of(node, server))

    def loses(self, node: str, server: str, reply: bool) -> bool:
        """Whether a message is lost on its way."""
        found = self.faults_of(node, server)
        lost = any(self.rng.random() < (one.reply_loss if reply else one.request_loss) for one in found)
        return lost or any(one.cut for one in found)

    def delay_s(self, node: str, server: str) -> float:
        slow = sum(one.delay_s * self.rng.random() for one in self.faults_of(node, server))
        return LEAST_S + self.rng.expovariate(1 / MEAN_S) + slow


class SimulatedServer:
    """A store process: a MemoryStore, its clock, its shard map. `lost` counts by (name of a limit, key) what failovers forgot."""

    def __init__(self, name: str, network: SimulatedNetwork) -> None:
        self.name, self.network = name, network
        self.clock = SimulatedClock(network.loop)
        self.store = MemoryStore(clock=self.clock)
        self.map = NodeMap()
        self.takeovers = 0
        self.lost: Counter[tuple[str, str]] = Counter()
        self._limits: dict[NamedLimit, NamedLimit] = {}
        self._replica: list[tuple[NamedLimit, list[KeyState]]] = []
        self._charged: Counter[tuple[str, str]] = Counter()
        self._capacities: dict[str, int] = {}
        self._old: MemoryStore | None = None
        self._old_callers: frozenset[str] = frozenset()
        network.servers[name] = self

    # Failovers -------------------------------------------------------------------------------------------------

    def replicate(self) -> None:
        """What the replica has: nothing later reaches it before the next `fail_over`."""
        self._replica = [(named, list(self.store.items(named))) for named in self._limits]
        self._charged.clear()

    def fail_over(self, old_callers: Iterable[str] = ()) -> None:
        """The replica becomes the primary. `old_callers` use the old one until `retire`: what it grants them is lost too."""
        for (name, key), cost in self._charged.items():
            self.lost[name, key] += min(cost, self._capacities[name])
        self._charged.clear()
        self._old, self._old_callers = self.store, frozenset(old_callers)
        self.store = MemoryStore(clock=self.clock)
        for named, states in self._replica:
            self.store.load(named, states)

    def restart_empty(self) -> None:
        """A crash that loses all counters, and the shard map."""
        self._replica = []
        for named in self._limits:
            for key, _ in self.store.items(named):
                self._charged[named.name, key] = self._capacities[named.name]
        self.fail_over()
        self.map = NodeMap()

    def retire(self) -> None:
        self._old_callers = frozenset()

    # Requests --------------------------------------------------------------------------------------------------

    def limit(self, named: NamedLimit) -> NamedLimit:
        """A limit as this server knows it: a store keeps its handle in it."""
        found = self._limits.get(named)
        if found is None:
            found = self._limits[named] = NamedLimit(named.limiter, named.name, named.limit)
            ahead = MAX_AHEAD_US * int(named.limit.count) // int(named.limit.period) + 1
            self._capacities[named.name] = int(named.limit.capacity) + ahead
        return found

    def execute(self, caller: str, map_id: tuple[int, int], method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        store = self._old if caller in self._old_callers and self._old is not None else self.store
        claims = list(claims_in(method, args))
        if method not in ("forget", "items", "rate_items", "load", "exchange_map"):
            self.map.check(map_id, [(claim.named, claim.key) for claim in claims], store.now_us())
        if method == "exchange_map":
            return self.exchange_map(args[0], store.now_us())
        if method in ("items", "rate_items"):
            return list(getattr(store, method)(self.limit(args[0])))
        if method == "load":
            args = (self.limit(args[0]), args[1])
        answer = getattr(store, method)(*args, **options)
        for claim in claims if method == "give_back" else ():
            self.network.on_return(claim, store.now_us() - args[1] if args[1] >= 0 else -1)
        decisions = answer if method == "decide_many" else [answer]
        if method in ("decide", "decide_many") and options.get("commit", True):
            asks = args[0] if method == "decide_many" else [args[0]]
            for asked, decision in zip(asks, decisions, strict=True):
                for claim in asked if decision else ():
                    found = self._charged if store is self.store else self.lost
                    found[claim.named.name, claim.key] += claim.cost
        return answer

    def exchange_map(self, message: dict[str, Any], now_us: int) -> dict[str, Any]:
        self.takeovers += bool(message.get("lost"))
        self.map.change(message, now_us)
        limits = [(named.limiter, named.name, str(named.limit)) for named in self._limits]
        return {**self.map.status(now_us), "limits": limits}


def claims_in(method: str, args: tuple[Any, ...]) -> Iterable[Claim]:
    if method in ("decide", "give_back", "reset", "forget"):
        return args[0]  # type: ignore[no-any-return]
    return [claim for claims in args[0] for claim in claims] if method == "decide_many" else ()


class SimulatedClient(Store):
    """The store of one node that calls a server over the network. `promises`: whether it ends its calls within a budget itself
    (a store that does not is called through a DeadlineStore)."""

    def __init__(self, network: SimulatedNetwork, node: str, process: object, server: str, promises: bool = True) -> None:
        self.network, self.node, self.process, self.server, self.promises = network, node, process, server, promises
        self.timeout_s = network.timeout_s
        self.map_id = (0, 0)
        self.fences = False

    @property
    def clock(self) -> Clock:
        return self.network.servers[self.server].clock

    def __repr__(self) -> str:
        return f"<{self.node} to {self.server}>"

    def answers_within(self, budget_us: int) -> bool:
        if self.promises:
            self.timeout_s = min(self.timeout_s, budget_us / 1e6)
        return self.promises

    # One call --------------------------------------------------------------------------------------------------

    async def call(self, method: str, args: tuple[Any, ...], options: dict[str, Any] | None = None, copies: Copies = ()) -> Any:  # type: ignore[assignment]
        net, loop = self.network, self.network.loop
        net.calls += 1
        if self.process in net.crashed:
            raise StoreUnavailable("the process has crashed")
        reply: asyncio.Future[tuple[int, Any]] = loop.create_future()
        cut = net.is_cut(self.node, self.server)
        if cut and net.rng.random() < 0.5:
            net.failed_calls += 1
            await asyncio.sleep(net.delay_s(self.node, self.server))
            raise StoreUnavailable(f"{self.server}: connection refused")
        if not cut and not net.loses(self.node, self.server, False):
            loop.call_later(net.delay_s(self.node, self.server), self._deliver, reply, (self.map_id, method, args, options or {}))
        timer = loop.call_later(self.timeout_s, self._time_out, reply)
        try:
            executed_us, answer = await reply
        finally:
            timer.cancel()
        if self.process in net.crashed:
            raise StoreUnavailable("the process has crashed")
        if isinstance(answer, StoreError):
            raise answer
        for own, copy in copies:
            own.set_charge(copy.charge())
        seen = replies.get()
        if seen is not None and isinstance(answer, Decision):
            seen.extend((part.start_us, executed_us) for part in (answer, *answer.decisions))
        elif seen is not None and method == "give_back":
            seen.append((GIVEN_BACK, executed_us))
        return answer

    def _time_out(self, reply: asyncio.Future[tuple[int, Any]]) -> None:
        if not reply.done():
            self.network.failed_calls += 1
            reply.set_exception(StoreTimeout(f"{self.server} did not answer within {self.timeout_s:g} s"))

    def _deliver(self, reply: asyncio.Future[Any], request: tuple[Any, ...]) -> None:
        """The request arrives: it is executed, and the reply sent."""
        net = self.network
        if net.is_cut(self.node, self.server):
            return
        try:
            answer = net.servers[self.server].execute(self.node, *request)
        except StoreError as error:
            answer = error
        executed_us = net.loop.now_us()
        if not net.loses(self.node, self.server, True):
            net.loop.call_later(net.delay_s(self.node, self.server), self._arrive, reply, executed_us, answer)

    def _arrive(self, reply: asyncio.Future[Any], executed_us: int, answer: Any) -> None:
        if not reply.done() and not self.network.is_cut(self.node, self.server):
            reply.set_result((executed_us, answer))

    def copied(self, claims: Sequence[Claim]) -> tuple[list[Claim], Copies]:
        """Claims as the server knows them, and the pairs of both."""
        server = self.network.servers[self.server]
        pairs = [(claim, Claim(server.limit(claim.named), claim.key, claim.cost, claim.charged)) for claim in claims]
        for claim, copy in pairs:
            copy.set_charge(claim.charge())
        return [copy for _, copy in pairs], pairs

    # Async -----------------------------------------------------------------------------------------------------

    async def adecide(self, claims: Sequence[Claim], max_wait_us: int | None = 0, **options: Any) -> Decision:
        asked, pairs = self.copied(claims)
        return await self.call("decide", (asked, max_wait_us), options, pairs)  # type: ignore[no-any-return]

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        return await self.adecide([Claim(named, key, cost)], max_wait_us, commit=commit)

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        copies = [self.copied(claims) for claims in asks]
        pairs = [pair for _, some in copies for pair in some]
        return await self.call("decide_many", ([asked for asked, _ in copies], max_wait_us), None, pairs)  # type: ignore[no-any-return]

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> bool:
        asked, pairs = self.copied(claims)
        return await self.call("give_back", (asked, charged_at, source), None, pairs)  # type: ignore[no-any-return]

    async def areset(self, claims: Sequence[Claim]) -> None:
        await self.call("reset", (self.copied(claims)[0],))

    async def aload(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        await self.call("load", (limit, list(items)))

    async def aexchange_map(self, message: dict[str, Any]) -> dict[str, Any]:
        return await self.call("exchange_map", (message,))  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """A client holds nothing open."""

    # Sync, in a thread of `run_in_thread` ------------------------------------------------------------------------

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None = 0, **options: Any) -> Decision:
        return block_on(self.adecide(claims, max_wait_us, **options))

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> bool:
        return block_on(self.agive_back(claims, charged_at, source))

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        block_on(self.aload(limit, items))

    def forget(self, claims: Sequence[Claim]) -> None:
        block_on(self.call("forget", (self.copied(claims)[0],)))

    def items(self, limit: NamedLimit) -> list[KeyState]:
        return block_on(self.call("items", (limit,)))

    def rate_items(self, limit: NamedLimit) -> list[KeyState]:
        return block_on(self.call("rate_items", (limit,)))

    # A node of a shard map ---------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return self.server

    def sibling(self, location: str) -> SimulatedClient:
        found = SimulatedClient(self.network, self.node, self.process, location, self.promises)
        found.fences = self.fences
        return found

    def use_map(self, map_id: tuple[int, int]) -> None:
        self.map_id = map_id

    def exchange_map(self, message: dict[str, Any]) -> dict[str, Any]:
        return block_on(self.aexchange_map(message))


#: Makes the client of a node for a server.
Connect = Callable[[str], SimulatedClient]
