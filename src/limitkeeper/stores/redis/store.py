"""RedisStore: state shared by many processes and machines, decided by one script call on the server's own time.

    RedisStore("redis://localhost:6379/0")      RedisStore("redis+cluster://a:7000,b:7000", timeout="50ms")

One object serves sync and async callers. Sync callers take a connection each and return it (`sync_connection.py`); the tasks of
an event loop share one, and their requests of one iteration are one script call (`batcher.py`). A call has one budget,
`timeout`: it answers, or raises `StoreTimeout` (the outcome is unknown) or `StoreUnavailable`. What may have been executed is
never sent again. Topologies are plans that sync and async callers share (`route.py`, `sentinel.py`, `cluster.py`,
`cross_slot.py`); only a decision that is one call to a known server has hot paths without a plan (`_call` here,
`Batcher._execute`): a plan would cost 2 µs of 17.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from itertools import groupby

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.constants import MAX_WAIT
from ...clock import SYSTEM, Clock
from ...decision import STORE, Decision
from ...errors import ConfigurationError, StoreError
from ...rate import Duration, duration_us
from ..cell_store import bounded_wait_us, checked
from ..contract import Booking, Store
from ..sans_io import Plan, T
from . import stored_keys
from .address import read_url
from .async_connection import AsyncConnections
from .batcher import BatchersByLoop
from .client_passthrough import AsyncClientPool, Client, ClientPool, ClientRoute
from .cluster import Cluster
from .codec import State, entry_of
from .command_routing import MAX_REQUESTS_AT_ONCE, Route, raise_first
from .cross_slot import CrossSlotDecision, groups_of
from .from_redis_py import is_client, read_client
from .key_names import KeyNames
from .limit_record import RegisterRequest
from .resp import pack_command, require_hiredis
from .script_builder import script_of
from .script_request import (
    DecideRequest,
    GiveBackRequest,
    HitRequest,
    RebookRequest,
    decode_call,
    encode_decide,
    encode_hit,
    registered_entry,
)
from .sentinel import Sentinels
from .sync_connection import SyncConnection, SyncPool

MAX_TIMEOUT_US = 86_400_000_000
ROUTES = {"single": Route, "sentinel": Sentinels, "cluster": Cluster}


class ServerClock:
    """The clock of a store: its time is an estimate of the server's; it sleeps in real time."""

    def __init__(self, store: RedisStore, clock: Clock) -> None:
        self._store = store
        self.sleep, self.asleep = clock.sleep, clock.asleep

    def now_us(self) -> int:
        return self._store.estimated_us()


class RedisStore(Store):
    """State in Redis ≥ 6.2 or Valkey ≥ 8: a single server, a primary behind Sentinels, or a Cluster.

    `server` is a URL (see `address.py`) or a redis-py client, whose settings are used. `prefix` starts every key. `timeout` is
    the budget of one call. `clock` is for tests: requests then carry its time, and keys are marked and live for an hour.
    """

    def __init__(
        self,
        server: str | Client,
        *,
        prefix: str | None = None,
        timeout: Duration | None = None,
        clock: Clock | None = None,
    ) -> None:
        require_hiredis()
        address = read_url(server) if isinstance(server, str) else read_client(_checked_client(server))
        options = {} if address is None else address.options
        self.names = KeyNames(options.get("prefix", "limitkeeper") if prefix is None else prefix, marked=clock is not None)
        self.timeout_us = duration_us(timeout if timeout is not None else options.get("timeout", "1s"))
        if not 0 < self.timeout_us <= MAX_TIMEOUT_US:
            raise ConfigurationError(f"timeout: expected more than 0 and at most a day, got {timeout!r}")
        system: Clock = SYSTEM  # measures budgets, and the time since the server's clock was last seen
        self._now_us = system.now_us
        self._client: Client | None = None
        if isinstance(server, str) or address is not None:
            assert address is not None
            self.route = ROUTES[address.kind](address)
            self.pool = SyncPool(system)
        else:
            self._client = server
            self.route = ClientRoute(server)
            self.pool = ClientPool(system, server)
        self.route.on_data_loss = self.names.forget
        self.address = self.route.address
        self._idle: tuple[object, list[SyncConnection]] = (None, [])  # the direct server and its idle connections
        self.batchers = BatchersByLoop(self)
        self._given_clock = clock
        self._given_lock = threading.Lock()
        self._given_shift_us = self._given_last_us = 0
        self._born_us: dict[NamedLimit, int] = {}
        self._server_time: tuple[int, int] | None = None  # the server's time when it was last seen, and ours then
        self._clock: Clock = clock if clock is not None else ServerClock(self, system)

    def __repr__(self) -> str:
        return f"RedisStore({str(self.address)!r}, prefix={self.names.prefix!r})"

    # Time ------------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        return self._clock

    def now_us(self) -> int:
        """The server's time: that of its last reply plus what has passed since; read when there was no reply yet."""
        if self._given_clock is not None:
            return self._given_us() or 0
        if self._server_time is None:
            self._server_time = (self._run(stored_keys.server_time(self.route)), self._now_us())
        return self.estimated_us()

    def estimated_us(self) -> int:
        """The server's time as far as it is known; this machine's until the first reply."""
        seen = self._server_time
        return self._now_us() if seen is None else seen[0] + self._now_us() - seen[1]

    def _given_us(self) -> int | None:
        """The time that a request carries, of the `clock` given; None: the server's time counts. It never goes back."""
        if self._given_clock is None:
            return None
        with self._given_lock:
            now_us = int(self._given_clock.now_us()) + self._given_shift_us
            if now_us < self._given_last_us:
                self._given_shift_us += self._given_last_us - now_us
            self._given_last_us = max(now_us, self._given_last_us)
            return self._given_last_us

    def _seen(self, decision: Decision) -> Decision:
        """Notes the server's time, which every decision shows."""
        self._server_time = (decision.start_us - decision.wait_us, self._now_us())
        return decision

    def answers_within(self, budget_us: int) -> bool:
        self.timeout_us = min(self.timeout_us, max(1000, budget_us))
        return self._client is None

    # Plans, the same for sync and async callers ----------------------------------------------------------------

    def _unregistered(self, claims: Iterable[Claim]) -> list[NamedLimit]:
        return [named for named in dict.fromkeys(claim.named for claim in claims) if registered_entry(self.names, named) is None]

    def _register(self, limits: Sequence[NamedLimit], given_us: int | None) -> Plan[None]:
        """Registers limits before their first use. A limit is born when its limiter was made (by a given clock), or now."""
        if limits:
            born_us = [given_us if given_us is None else self._born_us.get(named, given_us) for named in limits]
            requests = [RegisterRequest(self.names, *pair) for pair in zip(limits, born_us, strict=True)]
            raise_first((yield from self.route.execute(requests)))

    def _spans_slots(self, claims: Sequence[Claim]) -> bool:
        return len(claims) > 1 and isinstance(self.route, Cluster) and len(groups_of(self.names, claims)) > 1

    def _decide(
        self,
        claims: Sequence[Claim],
        wait_us: int,
        commit: bool,
        given_us: int | None,
        not_before_us: int = 0,
        remember: bool = False,
    ) -> Plan[Decision]:
        """A decision that may take several calls: on limits to be registered first, or over several slots."""
        yield from self._register(self._unregistered(claims), given_us)
        if self._spans_slots(claims):
            parts = CrossSlotDecision(self.route, self.names, claims, wait_us, commit, not_before_us, given_us)
            return (yield from parts.decide())
        request = encode_decide(self.names, claims, wait_us, commit, given_us, not_before_us, remember=remember)
        raise_first((yield from self.route.execute([request])))
        return request.answer

    def _decide_many(self, many: Sequence[Sequence[Claim]], max_wait_us: int | None) -> Plan[list[Decision]]:
        """Decisions at one moment: one script call up to MAX_REQUESTS_AT_ONCE, beyond that several in one write. In a cluster, a
        decision that spans slots is made between those before it and those after it."""
        checked_many, wait_us, given_us = [checked(claims) for claims in many], bounded_wait_us(max_wait_us), self._given_us()
        yield from self._register(self._unregistered(claim for claims in checked_many for claim in claims), given_us)
        found: list[Decision] = []
        for spans, group in groupby(checked_many, self._spans_slots):
            if spans:
                for claims in group:
                    found.append((yield from self._decide(claims, wait_us, True, given_us)))  # noqa: PERF401 - in a plan
            else:
                requests = [encode_decide(self.names, claims, wait_us, True, given_us) for claims in group]
                raise_first((yield from self.route.execute(requests, MAX_REQUESTS_AT_ONCE)))
                found += [request.answer for request in requests]
        return found

    def _give_back(self, claims: Sequence[Claim], charged_at: int) -> Plan[None]:
        if not claims:  # every limit was skipped
            return
        given_us = self._given_us()
        yield from self._register(self._unregistered(claims), given_us)
        groups = [group.claims for group in groups_of(self.names, claims)] if isinstance(self.route, Cluster) else [claims]
        requests = [GiveBackRequest(self.names, group, charged_at, given_us) for group in groups]
        raise_first((yield from self.route.execute(requests)))

    def _rebook(self, bookings: Sequence[Booking]) -> Plan[list[Decision | None]]:
        """Where bookings span slots of a cluster, those that leave are given back and the others keep their starts."""
        if self._spans_slots([claim for booking in bookings for claim in booking.claims]):
            for booking in reversed(bookings):
                if not booking.stays:
                    yield from self._give_back(booking.claims, booking.charged_at)
            return [None] * len(bookings)
        request = RebookRequest(self.names, bookings, self._given_us())
        raise_first((yield from self.route.execute([request])))
        return request.answer

    def _load(self, limit: NamedLimit, items: Sequence[tuple[str, State]]) -> Plan[None]:
        given_us = self._given_us()
        yield from self._register(self._unregistered([Claim(limit, "", 0)]), given_us)
        yield from stored_keys.write_items(self.route, self.names, limit, items, given_us)

    # Sync ------------------------------------------------------------------------------------------------------

    def register(self, limit: NamedLimit) -> None:
        """Notes a limit. It is registered in Redis at its first use: the server may be away now."""
        entry_of(self.names, limit)
        given_us = self._given_us()
        if given_us is not None:
            self._born_us.setdefault(limit, given_us)

    def _run(self, plan: Plan[T], long: bool = False) -> T:
        """Performs a plan within the budget; a `long` one has it for each of its steps."""
        return self.pool.run(plan, self._now_us() + self.timeout_us, self.timeout_us if long else 0)

    def _call(self, request: HitRequest | DecideRequest, deadline: int) -> Decision:
        """Hot path: one script call to the only server, on an idle connection; a plan when that is not possible."""
        endpoint = self.route.direct
        if endpoint is not None:
            idle = self._idle
            if idle[0] is not endpoint:
                idle = self._idle = (endpoint, self.pool.idle(endpoint, self.route.login))
            keys = request.keys
            data = pack_command((b"EVALSHA", script_of(request.parts).sha, b"%d" % len(keys), *keys, request.body))
            try:
                reply = self.pool.call(idle[1], data, deadline)
            except StoreError:
                self.route.on_unreachable(endpoint)
                raise
            if decode_call((request,), reply) and not request.pending:
                return self._seen(request.answer)
        raise_first(self.pool.run(self.route.execute([request]), deadline))
        return self._seen(request.answer)

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        found = self.names.registered.get(id(named))
        if max_wait_us or not commit or found is None:
            return self.decide([Claim(named, key, cost)], None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)
        request = encode_hit(found[1], key, cost, None if self._given_clock is None else self._given_us())
        return self._call(request, self._now_us() + self.timeout_us)

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        claims, wait_us, given_us = checked(claims), bounded_wait_us(max_wait_us), self._given_us()
        deadline = self._now_us() + self.timeout_us
        if self._needs_plan(claims):
            plan = self._decide(claims, wait_us, commit, given_us, not_before_us, remember)
            return self._seen(self.pool.run(plan, deadline))
        return self._call(
            encode_decide(self.names, claims, wait_us, commit, given_us, not_before_us, remember=remember), deadline
        )

    def _needs_plan(self, claims: Sequence[Claim]) -> bool:
        registered = self.names.registered
        for claim in claims:
            if id(claim.named) not in registered and registered_entry(self.names, claim.named) is None:
                return True
        return self._spans_slots(claims)

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        return self._run(self._decide_many(asks, max_wait_us))

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        self._run(self._give_back(list(claims), charged_at))

    @property
    def can_rebook(self) -> bool:
        return True

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        return self._run(self._rebook(list(bookings)))

    def reset(self, claims: Sequence[Claim]) -> None:
        self._run(stored_keys.delete_keys(self.route, self.names, claims))

    def items(self, limit: NamedLimit) -> list[tuple[str, State]]:
        return self._run(stored_keys.read_items(self.route, self.names, limit, self._given_us()), long=True)

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, State]]) -> None:
        self._run(self._load(limit, list(items)), long=True)

    def close(self) -> None:
        self.pool.close()
        self.batchers.close()

    # Async -----------------------------------------------------------------------------------------------------

    def new_connections(self, loop: asyncio.AbstractEventLoop) -> AsyncConnections:
        return AsyncConnections(loop) if self._client is None else AsyncClientPool(loop, self._client)

    async def _arun(self, plan: Plan[T], deadline: float | None = None) -> T:
        batcher = self.batchers.current()
        return await batcher.connections.run(plan, deadline or batcher.deadline())

    def hit_nowait(self, named: NamedLimit, key: str, cost: int) -> Decision | None:
        return None

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        found = self.names.registered.get(id(named))
        if max_wait_us or not commit or found is None:
            return await self.adecide([Claim(named, key, cost)], None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)
        request = encode_hit(found[1], key, cost, None if self._given_clock is None else self._given_us())
        await self.batchers.current().submit(request)
        return self._seen(request.answer)

    async def adecide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        claims, wait_us, given_us = checked(claims), bounded_wait_us(max_wait_us), self._given_us()
        batcher, deadline = self.batchers.current(), None
        if self._needs_plan(claims):
            deadline = batcher.deadline()
            unregistered = self._unregistered(claims)
            if unregistered:
                await batcher.run_once(tuple(unregistered), lambda: self._register(unregistered, given_us), deadline)
            if self._spans_slots(claims):
                plan = self._decide(claims, wait_us, commit, given_us, not_before_us, remember)
                return self._seen(await batcher.connections.run(plan, deadline))
        request = encode_decide(self.names, claims, wait_us, commit, given_us, not_before_us, remember=remember)
        await batcher.submit(request, deadline)
        return self._seen(request.answer)

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        return await self._arun(self._decide_many(asks, max_wait_us))

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        await self._arun(self._give_back(list(claims), charged_at))

    async def arebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        return await self._arun(self._rebook(list(bookings)))

    async def areset(self, claims: Sequence[Claim]) -> None:
        await self._arun(stored_keys.delete_keys(self.route, self.names, claims))

    async def aload(self, limit: NamedLimit, items: Iterable[tuple[str, State]]) -> None:
        await self._arun(self._load(limit, list(items)))

    async def aclose(self) -> None:
        self.pool.close()
        await self.batchers.aclose()


def _checked_client(server: object) -> Client:
    if not is_client(server):
        raise ConfigurationError(f"server: expected a URL such as 'redis://localhost:6379' or a redis-py client, got {server!r}")
    return server  # type: ignore[return-value]
