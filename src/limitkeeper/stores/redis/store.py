"""RedisStore: state shared by many processes and machines, decided by one script call on the server's own time.

One object serves sync and async callers. Sync callers take a connection each and return it (`sync_connection.py`); the tasks of
an event loop share one, and their requests of one iteration are one script call (`batcher.py`). A call has one budget,
`timeout`: it answers, or raises `StoreTimeout` (the outcome is unknown) or `StoreUnavailable`. What may have been executed is
never sent again. Topologies are plans that sync and async callers share (`command_routing.py`, `sentinel.py`, `cluster.py`); only
a decision that is one call to a known server has hot paths without a plan (`_call` here, `Batcher._execute`): a plan would cost
2 µs of 17.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from random import Random

from ...algorithms.claim import Claim, NamedLimit
from ...clock import SYSTEM, Clock
from ...decision import STORE, Decision
from ...rate import Duration
from ..contract import Booking, bounded_wait_us, checked
from ..sans_io import Plan
from . import script_request
from .address import read_url
from .cluster import Cluster, CrossSlotDecision, groups_of
from .command_routing import BATCH, MAX_REQUESTS_AT_ONCE, Route, RoutedCommand, raise_first
from .hash_in_store import RedisStoreHash
from .key_names import KeyNames
from .limit_and_state_codec import State, decode_item, entry_of, registered_entry
from .redis_py_settings import AsyncClientPool, Client, ClientPool, ClientRoute, read_client
from .resp import Reply, ReplyError, error_kind, require_hiredis
from .script_builder import sha_of
from .script_request import Claims, DecideOptions, encode_decide, encode_hit
from .sentinel import Sentinels
from .server_store import ServerStore, checked_connections, checked_timeout
from .sync_connection import SyncPool

ROUTES = {"single": Route, "sentinel": Sentinels, "cluster": Cluster}


class RedisStore(ServerStore):
    """State in Redis ≥ 6.2 or Valkey ≥ 8: a single server, a primary behind Sentinels, or a Cluster.

    `server` is a URL (`redis://host:6379/0`, `rediss://`, `redis+sentinel://`, `redis+cluster://`) or a redis-py client, whose
    settings are used. `prefix` starts every key. `timeout` is the budget of one call. `clock` is for tests: requests then carry
    its time, and keys are marked and live for an hour. `budget_clock` measures budgets of sync calls, and the time since the
    server's clock was last seen. At most `max_connections` (50) to each server are open for sync callers; an event loop has
    one. `rng` draws the pauses between attempts.
    """

    def __init__(
        self,
        server: str | Client,
        *,
        prefix: str | None = None,
        timeout: Duration | None = None,
        clock: Clock | None = None,
        budget_clock: Clock = SYSTEM,
        max_connections: int | None = None,
        rng: Random | None = None,
    ) -> None:
        require_hiredis()
        address = read_url(server) if isinstance(server, str) else read_client(server)
        options = {} if address is None else address.options
        self.names = KeyNames(options.get("prefix", "limitkeeper") if prefix is None else prefix, marked=clock is not None)
        timeout_us = checked_timeout(timeout if timeout is not None else options.get("timeout", "1s"))
        most = checked_connections(options.get("max_connections") if max_connections is None else max_connections)
        self._passthrough = address is None  # every call goes through the client that was given
        if address is not None:
            if address.login.tls is not None:
                address.login.tls.context()  # reads certificates, which takes longer than a call may
            route = ROUTES[address.kind](address, budget_clock, rng)
            super().__init__(route, SyncPool(budget_clock, most), timeout_us, clock, budget_clock)
        else:
            client: Client = server  # type: ignore[assignment]
            pool, connect = ClientPool(budget_clock, client), partial(AsyncClientPool, client=client)
            super().__init__(ClientRoute(client), pool, timeout_us, clock, budget_clock, connect)
        self.route.on_data_loss = self.names.forget
        self._born_us: dict[NamedLimit, int] = {}

    def __repr__(self) -> str:
        return f"RedisStore({str(self.address)!r}, prefix={self.names.prefix!r})"

    def server_us(self) -> Plan[int]:
        return self.route.server_us()

    def answers_within(self, budget_us: int) -> bool:
        return super().answers_within(budget_us) and not self._passthrough

    # Plans, the same for sync and async callers ----------------------------------------------------------------

    def _unregistered(self, claims: Iterable[Claim]) -> list[NamedLimit]:
        return [named for named in dict.fromkeys(claim.named for claim in claims) if registered_entry(self.names, named) is None]

    def _register(self, limits: Sequence[NamedLimit], given_us: int | None) -> Plan[None]:
        """Registers limits before their first use. A limit is born when its limiter was made (by a given clock), or now."""
        if limits:
            born_us = [given_us if given_us is None else self._born_us.get(named, given_us) for named in limits]
            requests = [script_request.RegisterRequest(self.names, *pair) for pair in zip(limits, born_us, strict=True)]
            yield from self.route.execute_all(requests)

    def _spans_slots(self, claims: Claims) -> bool:
        return len(claims) > 1 and isinstance(self.route, Cluster) and len(groups_of(self.names, claims)) > 1

    def _decide(self, claims: Claims, options: DecideOptions) -> Plan[Decision]:
        """A decision that may take several calls: on limits to be registered first, or over several slots."""
        yield from self._register(self._unregistered(claims), options.now_us)
        if self._spans_slots(claims):
            return (yield from CrossSlotDecision(self.route, self.names, claims, options).decide())
        request = encode_decide(self.names, claims, options)
        yield from self.route.execute_all([request])
        return request.answer

    def _decide_many(self, many: Sequence[Claims], max_wait_us: int | None) -> Plan[list[Decision]]:
        """Decisions at one moment: one script call up to MAX_REQUESTS_AT_ONCE, beyond that several in one write. In a cluster, a
        decision that spans slots is made between those before it and those after it."""
        checked_many = [checked(claims) for claims in many]
        options = DecideOptions(bounded_wait_us(max_wait_us), now_us=self.given_us())
        yield from self._register(self._unregistered(claim for claims in checked_many for claim in claims), options.now_us)
        found: list[Decision] = []
        for spans, group in groupby(checked_many, self._spans_slots):
            if spans:
                for claims in group:
                    found.append((yield from self._decide(claims, options)))  # noqa: PERF401 - in a plan
            else:
                requests = [encode_decide(self.names, claims, options) for claims in group]
                yield from self.route.execute_all(requests, MAX_REQUESTS_AT_ONCE)
                found += [request.answer for request in requests]
        return found

    def _give_back(self, claims: Claims, charged_at: int) -> Plan[bool]:
        if not claims:  # every limit was skipped
            return True
        given_us = self.given_us()
        yield from self._register(self._unregistered(claims), given_us)
        groups = [group.claims for group in groups_of(self.names, claims)] if isinstance(self.route, Cluster) else [claims]
        requests = [script_request.GiveBackRequest(self.names, group, charged_at, given_us) for group in groups]
        yield from self.route.execute_all(requests)
        return any(request.answer for request in requests)

    def _rebook(self, bookings: Sequence[Booking]) -> Plan[list[Decision | None]]:
        """Where bookings span slots of a cluster, those that leave are given back and the others keep their starts."""
        claims, given_us = [claim for booking in bookings for claim in booking.claims], self.given_us()
        if self._spans_slots(claims):
            for booking in reversed(bookings):
                if not booking.stays and not (yield from self._give_back(booking.claims, booking.charged_at)):
                    script_request.mark_as_reset(booking.claims)
            return [None] * len(bookings)
        yield from self._register(self._unregistered(claims), given_us)
        request = script_request.RebookRequest(self.names, bookings, given_us)
        yield from self.route.execute_all([request])
        return request.answer

    def _reset(self, claims: Claims) -> Plan[None]:
        given_us = self.given_us()
        yield from self._register([one for one in self._unregistered(claims) if one.limit.ramp > 0], given_us)
        by_key = {self.names.key(claim.named, claim.key): claim for claim in claims}
        yield from self.route.execute_all([script_request.ResetRequest(self.names, one, given_us) for one in by_key.values()])

    def _items(self, limit: NamedLimit, own: bool = False) -> Plan[list[tuple[str, State]]]:
        """Reads the state of every key under this limit; where it has none, it is that of a rate new to the key (`own`: none)."""
        given_us = self.given_us()
        now_us = given_us if given_us is not None else (yield from self.route.server_us())
        entry, found = entry_of(self.names, limit), dict[str, State]()
        fields = (yield from self.route.read_hashes([entry.registry]))[entry.registry]
        keys = yield from self.route.scan(self.names.pattern(limit))
        for at in range(0, len(keys), BATCH):
            some = keys[at : at + BATCH]
            values = yield from self.route.query([RoutedCommand(["GET", key], key) for key in some])
            pairs = zip(some, values, strict=True)
            items = [decode_item(entry, key, value, fields, now_us, own) for key, value in pairs if value is not None]
            found.update(item for item in items if item is not None)
        return list(found.items())

    def _load(self, limit: NamedLimit, items: Iterable[tuple[str, State]]) -> Plan[None]:
        given_us = self.given_us()
        yield from self._register(self._unregistered([Claim(limit, "", 0)]), given_us)
        requests = [script_request.LoadRequest(self.names, limit, key, state, given_us) for key, state in items]
        for at in range(0, len(requests), BATCH):
            yield from self.route.execute_all(requests[at : at + BATCH])

    # Sync ------------------------------------------------------------------------------------------------------

    def register(self, limit: NamedLimit) -> None:
        """Notes a limit. It is registered in Redis at its first use: the server may be away now."""
        entry_of(self.names, limit).users += 1
        given_us = self.given_us()
        if given_us is not None:
            self._born_us.setdefault(limit, given_us)

    def unregister(self, limit: NamedLimit) -> None:
        """Forgets the entry of a limit with its last user; what is in Redis expires."""
        self.names.registered.pop(id(limit), None)
        entry = self.names.entries.get(limit)
        if entry is not None:
            entry.users -= 1
            if entry.users <= 0:
                self.names.entries.pop(limit, None)
                self._born_us.pop(limit, None)

    def _script(self, source: bytes, keys: Sequence[bytes], args: Sequence[bytes]) -> Plan[Reply]:
        rest = [b"%d" % len(keys), *keys, *args]
        call = RoutedCommand(["EVALSHA", sha_of(source), *rest], keys[0])
        yield from self.route.send([call])
        if isinstance(call.reply, ReplyError) and error_kind(call.reply) == "NOSCRIPT":
            call = RoutedCommand(["EVAL", source, *rest], keys[0])
            yield from self.route.send([call])
        raise_first([call])
        return call.reply

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        found = self.names.registered.get(id(named))
        if max_wait_us or not commit or found is None:
            return self.decide([Claim(named, key, cost)], max_wait_us, commit=commit)
        request = encode_hit(found[1], key, cost, None if self._given_clock is None else self.given_us())
        return self._seen(self._call(request, self._now_us() + self.timeout_us))

    def decide(
        self, claims: Claims, max_wait_us: int | None = 0, *, commit: bool = True, remember: bool = False, not_before_us: int = 0
    ) -> Decision:
        claims = checked(claims)
        options = DecideOptions(bounded_wait_us(max_wait_us), commit, self.given_us(), not_before_us, remember)
        deadline = self._now_us() + self.timeout_us
        if self._needs_plan(claims):
            return self._seen(self.pool.run(self._decide(claims, options), deadline))
        request = encode_decide(self.names, claims, options)
        return self._seen((self._call_to_end if options.max_wait_us and commit else self._call)(request, deadline))

    def _needs_plan(self, claims: Claims) -> bool:
        registered = self.names.registered
        for claim in claims:
            if id(claim.named) not in registered and registered_entry(self.names, claim.named) is None:
                return True
        return self._spans_slots(claims)

    def decide_many(self, asks: Sequence[Claims], max_wait_us: int | None = 0) -> list[Decision]:
        return self._run(self._decide_many(asks, max_wait_us))

    def give_back(self, claims: Claims, charged_at: int = -1, source: str = STORE) -> bool:
        return self._run(self._give_back(list(claims), charged_at))

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        return self._run(self._rebook(bookings))

    def reset(self, claims: Claims) -> None:
        self._run(self._reset(claims))

    def forget(self, claims: Claims) -> None:
        keys = dict.fromkeys(self.names.key(claim.named, claim.key) for claim in claims)
        self._run(self.route.query([RoutedCommand(["UNLINK", key], key) for key in keys]))

    def items(self, limit: NamedLimit) -> list[tuple[str, State]]:
        return self._run(self._items(limit), long=True)

    def rate_items(self, limit: NamedLimit) -> list[tuple[str, State]]:
        return self._run(self._items(limit, own=True), long=True)

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, State]]) -> None:
        self._run(self._load(limit, items), long=True)

    def open_hash(self, name: str) -> RedisStoreHash | None:
        return None if self._passthrough else RedisStoreHash(self, name)  # a client may serve async callers only

    def run_script(self, source: bytes, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        """The reply of a Lua script that is none of this store's own, on keys of one slot."""
        return self._run(self._script(source, keys, args))

    # Async -----------------------------------------------------------------------------------------------------

    async def _aregister(self, claims: Iterable[Claim], given_us: int | None = None) -> float:
        """Registers limits before their first use, once for all tasks that use them then. Returns the seconds that it took."""
        limits = self._unregistered(claims)
        if not limits:
            return 0.0
        given_us = self.given_us() if given_us is None else given_us
        return await self.batchers.current().run_once(tuple(limits), lambda: self._register(limits, given_us))

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        found = self.names.registered.get(id(named))
        if max_wait_us or not commit or found is None:
            return await self.adecide([Claim(named, key, cost)], max_wait_us, commit=commit)
        request = encode_hit(found[1], key, cost, None if self._given_clock is None else self.given_us())
        await self.batchers.current().submit(request)
        return self._seen(request.answer)

    async def adecide(
        self, claims: Claims, max_wait_us: int | None = 0, *, commit: bool = True, remember: bool = False, not_before_us: int = 0
    ) -> Decision:
        claims = checked(claims)
        options = DecideOptions(bounded_wait_us(max_wait_us), commit, self.given_us(), not_before_us, remember)
        batcher, used = self.batchers.current(), 0.0
        if self._needs_plan(claims):
            used = await self._aregister(claims, options.now_us)
            if self._spans_slots(claims):
                return self._seen(await batcher.connections.run(self._decide(claims, options), batcher.deadline() - used))
        request = encode_decide(self.names, claims, options)
        if options.max_wait_us and commit:
            await batcher.submit_to_end(request, used)
        else:
            await batcher.submit(request, used)
        return self._seen(request.answer)

    async def adecide_many(self, asks: Sequence[Claims], max_wait_us: int | None = 0) -> list[Decision]:
        used = await self._aregister(claim for claims in asks for claim in claims)
        return await self._arun(self._decide_many(asks, max_wait_us), used)

    async def agive_back(self, claims: Claims, charged_at: int = -1, source: str = STORE) -> bool:
        if not claims or self._needs_plan(claims):
            used = await self._aregister(claims)
            return await self._arun(self._give_back(list(claims), charged_at), used)
        request = script_request.GiveBackRequest(self.names, claims, charged_at, self.given_us())
        await self.batchers.current().submit(request)  # in a batch: later decisions come after it, whatever happens
        return request.answer

    async def arebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        if self._needs_plan([claim for booking in bookings for claim in booking.claims]):
            return await self._arun(self._rebook(bookings))
        request = script_request.RebookRequest(self.names, bookings, self.given_us())
        await self.batchers.current().submit(request)
        return request.answer

    async def arun_script(self, source: bytes, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        return await self._arun(self._script(source, keys, args))

    async def areset(self, claims: Claims) -> None:
        await self._arun(self._reset(claims))

    async def aload(self, limit: NamedLimit, items: Iterable[tuple[str, State]]) -> None:
        await self._arun(self._load(limit, items))
