"""RedisStore: one truth for many processes and machines, decided by one script call on the server's own time.

    RedisStore("redis://localhost:6379/0")      RedisStore("redis+cluster://a:7000,b:7000", timeout="50ms")

One object serves both colours. Sync callers take a connection each and give it back (`link.py`); the tasks of a loop share one,
and what they ask for in the same turn of the loop travels as one script call (`coach.py`). A call has one budget, `timeout`,
whatever happens on its way: it answers, or raises `StoreTimeout` (nobody knows what was decided) or `StoreUnavailable`. Nothing
that may have been done is ever sent again. What a topology has to say is a plan that both colours follow (`route.py`,
`sentinel.py`, `cluster.py`, `spanning.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.constants import MAX_WAIT
from ...clock import SYSTEM
from ...decision import STORE, Decision
from ...errors import ConfigurationError, StoreError
from ...rate import Duration, duration_us
from ..cell_store import checked, patience_us
from ..contract import Store
from . import executor, key_scan
from .address import Address, read_url
from .async_connection import AsyncConnections
from .batcher import Batcher
from .batchers_by_loop import BatchersByLoop
from .client_passthrough import AsyncClientPool, ClientPool, ClientRoute
from .cluster import Cluster
from .codec import LimitEntry, entry_of
from .cross_slot import CrossSlotDecision, groups_of
from .from_redis_py import is_client, read_client
from .key_names import KeyNames
from .operations import ScriptRequest, deciding, giving_back, hitting, rebooking
from .resp import call_bytes, required
from .route import Route
from .script_builder import script_of
from .script_call import MANY, understood
from .sentinel import Sentinels
from .sync_connection import SyncPool, now_us
from .trips import Plan, T

LONGEST_US = 86_400_000_000
ROUTES = {"single": Route, "sentinel": Sentinels, "cluster": Cluster}


class ServerClock:
    """The clock of a store: its time is the server's, as far as it was told; it sleeps in real time."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.sleep, self.asleep = SYSTEM.sleep, SYSTEM.asleep

    def now_us(self) -> int:
        return self._store.estimated_us()


class RedisStore(Store):
    """State in Redis ≥ 6.2 or Valkey ≥ 8: a single server, one behind Sentinels, or a Cluster.

    `server` is a URL (see `address.py`) or a redis-py client, whose settings are used. `prefix` stands before every key.
    `timeout` is the budget of one call. `clock` is for tests: then its time is sent along, and keys are marked and live for an
    hour.
    """

    def __init__(self, server: Any, *, prefix: str | None = None, timeout: Duration | None = None, clock: Any = None) -> None:
        required()
        self._client = server if not isinstance(server, str) else None
        address = _address(server)
        options = {} if address is None else address.options
        self.names = KeyNames(options.get("prefix", "limitkeeper") if prefix is None else prefix, marked=clock is not None)
        self.timeout_us = duration_us(timeout if timeout is not None else options.get("timeout", "1s"))
        if not 0 < self.timeout_us <= LONGEST_US:
            raise ConfigurationError(f"timeout={timeout!r}: the budget of a call must be more than nothing and at most a day")
        self.borrowed = address is None
        self.route: Route = ClientRoute(server) if address is None else ROUTES[address.kind](address)
        self.route.forgotten = self.forget
        self.address = self.route.address
        self.links = ClientPool(server) if address is None else SyncPool()
        self._near: tuple[Any, list[Any]] = (None, [])  # the place where everything is, and the connections at hand to it
        self.loops = BatchersByLoop(self)
        self._clock = clock
        self._clock_lock = threading.Lock()
        self._shift_us = self._last_us = 0
        self._known_since: dict[NamedLimit, int] = {}
        self._heard: tuple[int, int] | None = None  # the server's time, and ours when it said so
        self._waiting_clock = clock if clock is not None else ServerClock(self)

    def __repr__(self) -> str:
        return f"RedisStore({str(self.address)!r}, prefix={self.names.prefix!r})"

    # Time ------------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Any:
        return self._waiting_clock

    def now_us(self) -> int:
        """The server's time: as it said with its last answer and what has passed since; asked for when it said nothing yet."""
        if self._clock is not None:
            return self._given_us() or 0
        if self._heard is None:
            self._hear(self._run(key_scan.server_time(self.route)))
        return self.estimated_us()

    def estimated_us(self) -> int:
        """The server's time as far as it is known; this machine's until it has said anything."""
        heard = self._heard
        return now_us() if heard is None else heard[0] + now_us() - heard[1]

    def _hear(self, server_us: int) -> None:
        self._heard = (server_us, now_us())

    def _given_us(self) -> int | None:
        """The time of a clock of one's own, read once for each decision; one that went back is carried on from where it was."""
        if self._clock is None:
            return None
        with self._clock_lock:
            told = int(self._clock.now_us()) + self._shift_us
            if told < self._last_us:
                self._shift_us += self._last_us - told
            self._last_us = max(told, self._last_us)
            return self._last_us

    def answers_within(self, budget_us: int) -> bool:
        self.timeout_us = min(self.timeout_us, max(1000, budget_us))
        return not self.borrowed

    def streams(self, loop: asyncio.AbstractEventLoop) -> AsyncConnections:
        """The connections for a loop."""
        return AsyncClientPool(loop, self._client) if self.borrowed else AsyncConnections(loop)

    # Knowing limits --------------------------------------------------------------------------------------------

    def register(self, limit: NamedLimit) -> None:
        """The server hears of a limit at its first use: it may be away now."""
        entry_of(self.names, limit)
        given_us = self._given_us()
        if given_us is not None:
            self._known_since.setdefault(limit, given_us)

    def _strangers(self, claims: Iterable[Claim]) -> list[NamedLimit]:
        """The limits of which the server has not heard yet."""
        return [named for named in dict.fromkeys(claim.named for claim in claims) if entry_of(self.names, named).since_us is None]

    def _introduced(self, strangers: Sequence[NamedLimit], given_us: int | None) -> Plan[None]:
        """Under a clock of one's own, a limit is as old as its limiter; by the server's time, as its first use."""
        since = [(named, given_us if given_us is None else self._known_since.get(named, given_us)) for named in strangers]
        return executor.introduced(self.route, self.names, since)

    # Asking ----------------------------------------------------------------------------------------------------

    def answered(self, asks: Sequence[ScriptRequest]) -> Plan[list[StoreError | None]]:
        return executor.answered(self.route, asks)

    def forget(self) -> None:
        """The server has lost what it knew: limits are made known to it again before their next use."""
        for place in self.names.places.values():
            place.since_us = None

    def _run(self, plan: Plan[T], long: bool = False) -> T:
        """Follows a plan within the budget; a `long` one has it for each of its steps."""
        return self.links.run(plan, now_us() + self.timeout_us, self.timeout_us if long else 0)

    def _ask(self, ask: ScriptRequest, deadline: int) -> Decision:
        """The answer to an ask. A call to a known place, on a connection at hand, goes the straight way."""
        place = self.route.direct
        if place is not None:
            near = self._near
            if near[0] is not place:
                near = self._near = (place, self.links.idle(place, self.route.login))
            try:
                reply = self.links.call(near[1], call_bytes(script_of(ask.rules).sha, ask.keys, ask.body), deadline)
            except StoreError:
                self.route.gone(place)
                raise
            if type(reply) is bytes and understood((ask,), reply) and ask.stale is None:
                return self._told(ask.answer)
        executor.raise_first(self.links.run(self.answered([ask]), deadline))
        return self._told(ask.answer)

    def _spans(self, claims: Sequence[Claim]) -> bool:
        return len(claims) > 1 and isinstance(self.route, Cluster) and len(groups_of(self.names, claims)) > 1

    def _span(self, claims: Sequence[Claim], wait_us: int, commit: bool, given_us: int | None) -> Plan[Decision]:
        return CrossSlotDecision(self.names, self.answered, claims, wait_us, commit, given_us).answer()

    def _told(self, decision: Decision) -> Decision:
        self._heard = (decision.start_us - decision.wait_us, now_us())
        return decision

    # Sync ------------------------------------------------------------------------------------------------------

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        place: LimitEntry | None = self.names.places.get(named)
        if max_wait_us or not commit or place is None or place.since_us is None:
            return self.decide([Claim(named, key, cost)], None if max_wait_us >= MAX_WAIT else max_wait_us, commit=commit)
        ask = hitting(self.names, named, key, cost, None if self._clock is None else self._given_us())
        return self._ask(ask, now_us() + self.timeout_us)

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        asked, wait_us, given_us = checked(claims), patience_us(max_wait_us), self._given_us()
        deadline = now_us() + self.timeout_us
        strangers = self._strangers(asked)
        if strangers or self._spans(asked):
            return self._told(self.links.run(self._first(strangers, asked, wait_us, commit, given_us), deadline))
        return self._ask(deciding(self.names, asked, wait_us, commit, given_us, not_before_us, remember=remember), deadline)

    def _first(
        self, strangers: Sequence[NamedLimit], claims: Sequence[Claim], wait_us: int, commit: bool, given_us: int | None
    ) -> Plan[Decision]:
        """A decision that takes more than one trip: on limits of which the server has to hear first, or over several slots."""
        if strangers:
            yield from self._introduced(strangers, given_us)
        if self._spans(claims):
            return (yield from self._span(claims, wait_us, commit, given_us))
        ask = deciding(self.names, claims, wait_us, commit, given_us)
        executor.raise_first((yield from self.answered([ask])))
        decision: Decision = ask.answer
        return decision

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        return self._run(self._many(asks, max_wait_us))

    def _many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None) -> Plan[list[Decision]]:
        """Several decisions at one moment, in one script call up to `MANY`, beyond that in several of one write; in a cluster,
        one that spans slots is decided between those before it and those behind it."""
        asked, wait_us, given_us = [checked(claims) for claims in asks], patience_us(max_wait_us), self._given_us()
        strangers = self._strangers(claim for claims in asked for claim in claims)
        if strangers:
            yield from self._introduced(strangers, given_us)
        found: list[Decision] = []
        for spans, run in groupby(asked, self._spans):
            if spans:
                for claims in run:
                    found.append((yield from self._span(claims, wait_us, True, given_us)))  # noqa: PERF401 - a plan goes on in between
            else:
                whole = [deciding(self.names, claims, wait_us, True, given_us) for claims in run]
                executor.raise_first((yield from executor.answered(self.route, whole, MANY)))
                found += [ask.answer for ask in whole]
        return found

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        self._run(self._returned(list(claims), charged_at))

    def _returned(self, claims: Sequence[Claim], charged_at: int) -> Plan[None]:
        given_us = self._given_us()
        strangers = self._strangers(claims)
        if strangers:
            yield from self._introduced(strangers, given_us)
        groups = [group.claims for group in groups_of(self.names, claims)] if isinstance(self.route, Cluster) else [claims]
        errors = yield from self.answered([giving_back(self.names, group, charged_at, given_us) for group in groups])
        executor.raise_first(errors)

    @property
    def can_rebook(self) -> bool:
        return True

    def rebook(self, turns: Sequence[Any]) -> list[Decision | None]:
        """Some leave a line and the others move up, in one script call: see `MemoryStore.rebook`."""
        return self._run(self._rebooked(list(turns)))

    def _rebooked(self, turns: Sequence[Any]) -> Plan[list[Decision | None]]:
        """Where turns span slots of a cluster, those who leave give back and nobody moves."""
        claims = [claim for turn in turns for claim in turn[0]]
        if self._spans(claims):
            for asked, charged_at, _, stays, _ in reversed(turns):
                if not stays:
                    yield from self._returned(asked, charged_at)
            return [None] * len(turns)
        ask = rebooking(self.names, turns, self._given_us())
        executor.raise_first((yield from self.answered([ask])))
        found: list[Decision | None] = ask.answer
        return found

    def reset(self, claims: Sequence[Claim]) -> None:
        self._run(key_scan.forgotten(self.route, self.names, claims))

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, Any]]:
        return self._run(self._kept(limit), long=True)

    def _kept(self, limit: NamedLimit) -> Plan[list[tuple[str, Any]]]:
        given_us = self._given_us()
        return (yield from key_scan.kept(self.route, self.names, limit, given_us))

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        self._run(self._loaded(limit, list(items)), long=True)

    def _loaded(self, limit: NamedLimit, items: Sequence[tuple[str, Any]]) -> Plan[None]:
        given_us = self._given_us()
        if entry_of(self.names, limit).since_us is None:
            yield from self._introduced([limit], given_us)
        yield from key_scan.taken_over(self.route, self.names, limit, items, given_us)

    def close(self) -> None:
        self.links.close()
        self.loops.close()

    # Async -----------------------------------------------------------------------------------------------------

    def _coach(self) -> Batcher:
        return self.loops.coach()

    async def _arun(self, plan: Plan[T], deadline: float | None = None) -> T:
        coach = self._coach()
        return await coach.streams.run(plan, deadline or coach.loop.time() + self.timeout_us / 1e6)

    async def adecide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        asked, wait_us, given_us = checked(claims), patience_us(max_wait_us), self._given_us()
        coach, deadline = self._coach(), None
        strangers = self._strangers(asked)
        if strangers:
            deadline = coach.loop.time() + self.timeout_us / 1e6
            await coach.meet(tuple(strangers), lambda: self._introduced(strangers, given_us), deadline)
        if self._spans(asked):
            return self._told(await self._arun(self._span(asked, wait_us, commit, given_us), deadline))
        ask = deciding(self.names, asked, wait_us, commit, given_us, not_before_us, remember=remember)
        await coach.board(ask, deadline)
        return self._told(ask.answer)

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        return await self._arun(self._many(asks, max_wait_us))

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        await self._arun(self._returned(list(claims), charged_at))

    async def arebook(self, turns: Sequence[Any]) -> list[Decision | None]:
        return await self._arun(self._rebooked(list(turns)))

    async def areset(self, claims: Sequence[Claim]) -> None:
        await self._arun(key_scan.forgotten(self.route, self.names, claims))

    async def aclose(self) -> None:
        self.links.close()
        await self.loops.aclose()


def _address(server: Any) -> Address | None:
    """Where the servers are; None for a client that can only be called through."""
    if isinstance(server, str):
        return read_url(server)
    if not is_client(server):
        raise ConfigurationError(
            f"RedisStore takes a URL such as 'redis://localhost:6379/0' or a redis-py client, not {server!r}"
        )
    return read_client(server)
