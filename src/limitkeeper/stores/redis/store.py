"""RedisStore: state shared by many processes and machines, decided by one script call on the server's own time.

One object serves sync and async callers. Sync callers take a connection each and return it (`sync_connection.py`); the tasks of
an event loop share one, and their requests of one iteration are one script call (`batcher.py`). A call has one budget,
`timeout`: it answers, or raises `StoreTimeout` (the outcome is unknown) or `StoreUnavailable`. What may have been executed is
never sent again. Topologies are plans that sync and async callers share (`command_routing.py`, `sentinel.py`, `cluster.py`); only
an operation that is one call to a known server has hot paths without a plan (`ServerStore._call`, `Batcher._execute`): a plan
would cost 2 µs of 17.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from random import Random
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from ...clock import SYSTEM, Clock
from ...decision import Decision
from ...rate import Duration
from ..contract import Booking, bounded_wait_us, checked
from ..sans_io import Plan
from ..two_phase_decision import Group
from . import script_request
from .address import read_url
from .cluster import Cluster, CrossSlotDecision, groups_of
from .command_routing import BATCH, MAX_REQUESTS_AT_ONCE, Route, RoutedCommand, raise_first
from .key_names import KeyNames, key_bytes
from .limit_and_state_codec import State, decode_item, entry_of, registered_entry
from .redis_py_settings import AsyncClientPool, Client, ClientPool, ClientRoute, read_client
from .request import Request
from .resp import Reply, ReplyError, decode_reply, error_kind, require_hiredis
from .script_builder import sha_of
from .script_request import Claims, DecideOptions, encode_decide, encode_hit
from .sentinel import Sentinels
from .server_store import FirstUse, ServerHash, ServerStore, checked_connections, checked_timeout
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

    def _first_use(self, claims: Iterable[Claim], given_us: int | None, then: Callable[[], Any]) -> Any:
        """What `then` returns, after limits that are used for the first time are registered."""
        claimed = dict.fromkeys(claim.named for claim in claims)
        limits = tuple([named for named in claimed if registered_entry(self.names, named) is None])
        return FirstUse(limits, lambda: self._register(limits, given_us), then) if limits else then()

    def _register(self, limits: Sequence[NamedLimit], given_us: int | None) -> Plan[None]:
        """A limit is born when its limiter was made (by a given clock), or now."""
        born_us = [given_us if given_us is None else self._born_us.get(named, given_us) for named in limits]
        requests = [script_request.RegisterRequest(self.names, *pair) for pair in zip(limits, born_us, strict=True)]
        yield from self.route.execute_all(requests)

    def _spans_slots(self, claims: Claims) -> bool:
        return len(claims) > 1 and isinstance(self.route, Cluster) and len(groups_of(self.names, claims)) > 1

    def plan_decide(self, claims: Claims, max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int) -> Any:
        options = DecideOptions(bounded_wait_us(max_wait_us), commit, self.given_us(), not_before_us, remember)
        registered = self.names.registered
        for claim in claims:
            if id(claim.named) not in registered:
                return self._first_use(claims, options.now_us, lambda: self._decide_registered(claims, options))
        return self._decide_registered(claims, options)

    def _decide_registered(self, claims: Claims, options: DecideOptions) -> Request[Decision] | Plan[Decision]:
        if self._spans_slots(claims):
            return CrossSlotDecision(self.route, self.names, claims, options).decide()
        return encode_decide(self.names, claims, options)

    def plan_decide_many(self, asks: Sequence[Claims], max_wait_us: int | None) -> Any:
        asked = [checked(claims) for claims in asks]
        options = DecideOptions(bounded_wait_us(max_wait_us), now_us=self.given_us())
        claims = (claim for claims in asked for claim in claims)
        return self._first_use(claims, options.now_us, lambda: self._decide_many_registered(asked, options))

    def _decide_many_registered(self, asks: Sequence[Claims], options: DecideOptions) -> Plan[list[Decision]]:
        """Decisions at one moment: one script call up to MAX_REQUESTS_AT_ONCE, beyond that several in one write. In a cluster, a
        decision that spans slots is made between those before it and those after it."""
        found: list[Decision] = []
        for spans, group in groupby(asks, self._spans_slots):
            if spans:
                for claims in group:
                    found.append((yield from CrossSlotDecision(self.route, self.names, claims, options).decide()))  # noqa: PERF401
            else:
                requests = [encode_decide(self.names, claims, options) for claims in group]
                yield from self.route.execute_all(requests, MAX_REQUESTS_AT_ONCE)
                found += [request.answer for request in requests]
        return found

    def plan_give_back(self, claims: Claims, charged_at: int, source: str) -> Any:
        given_us = self.given_us()
        return self._first_use(claims, given_us, lambda: self._give_back_registered(list(claims), charged_at, given_us))

    def _give_back_registered(self, claims: Claims, charged_at: int, given_us: int | None) -> Request[bool] | Plan[bool]:
        if claims and not self._spans_slots(claims):
            return script_request.GiveBackRequest(self.names, claims, charged_at, given_us)
        return self._give_back_by_slot(claims, charged_at, given_us)

    def _give_back_by_slot(self, claims: Claims, charged_at: int, given_us: int | None) -> Plan[bool]:
        groups = groups_of(self.names, claims)
        requests = self._give_backs(groups, charged_at, given_us)
        yield from self.route.execute_all(requests)
        return not claims or any(request.answer for request in requests)  # no claims: every limit was skipped

    def _give_backs(self, groups: Sequence[Group], charged_at: int, given_us: int | None) -> list[script_request.GiveBackRequest]:
        return [script_request.GiveBackRequest(self.names, one.claims, charged_at, given_us) for one in groups]

    def plan_rebook(self, bookings: Sequence[Booking]) -> Any:
        claims, given_us = [claim for booking in bookings for claim in booking.claims], self.given_us()
        rebook = self._rebook_by_slot if self._spans_slots(claims) else partial(script_request.RebookRequest, self.names)
        return self._first_use(claims, given_us, partial(rebook, bookings, given_us))

    def _rebook_by_slot(self, bookings: Sequence[Booking], given_us: int | None) -> Plan[list[Decision | None]]:
        """Each slot of a cluster rebooks what is charged in it alone, all slots at once. Bookings that span slots are given back,
        or keep their starts."""
        found: list[Decision | None] = [None] * len(bookings)
        by_slot: dict[Any, list[int]] = {}
        backs: list[tuple[Booking, list[script_request.GiveBackRequest]]] = []  # all in one round trip, however many leave
        for at in reversed(range(len(bookings))):
            booking = bookings[at]
            groups = groups_of(self.names, booking.claims)
            if len(groups) == 1:
                by_slot.setdefault(groups[0].place, []).append(at)
            elif not booking.stays:
                backs.append((booking, self._give_backs(groups, booking.charged_at, given_us)))
        yield from self.route.execute_all([request for _, some in backs for request in some])
        for booking, some in backs:
            if not any(request.answer for request in some):
                script_request.mark_as_reset(booking.claims)
        places = [some[::-1] for some in by_slot.values() if not all(bookings[at].stays for at in some)]
        requests = [script_request.RebookRequest(self.names, [bookings[at] for at in some], given_us) for some in places]
        yield from self.route.execute_all(requests)
        for ats, request in zip(places, requests, strict=True):
            for at, decision in zip(ats, request.answer, strict=True):
                found[at] = decision
        return found

    def plan_reset(self, claims: Claims) -> Any:
        given_us = self.given_us()
        ramps = [claim for claim in claims if claim.named.limit.ramp > 0]
        return self._first_use(ramps, given_us, lambda: self._reset_registered(claims, given_us))

    def _reset_registered(self, claims: Claims, given_us: int | None) -> Plan[None]:
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
            decode = partial(decode_item, entry, registry=fields, now_us=now_us, own=own)
            items = [decode_reply(value, partial(decode, key), self.address) for key, value in pairs if value is not None]
            found.update(item for item in items if item is not None)
        return list(found.items())

    def plan_load(self, limit: NamedLimit, items: Iterable[tuple[str, State]]) -> Any:
        given_us = self.given_us()
        return self._first_use([Claim(limit, "", 0)], given_us, lambda: self._load_registered(limit, items, given_us))

    def _load_registered(self, limit: NamedLimit, items: Iterable[tuple[str, State]], given_us: int | None) -> Plan[None]:
        requests = [script_request.LoadRequest(self.names, limit, key, state, given_us) for key, state in items]
        for at in range(0, len(requests), BATCH):
            yield from self.route.execute_all(requests[at : at + BATCH])

    # Limits ----------------------------------------------------------------------------------------------------

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

    # Calls -----------------------------------------------------------------------------------------------------

    def hit_request(self, named: NamedLimit, key: str, cost: int) -> Request[Decision] | None:
        found = self.names.registered.get(id(named))
        if found is None:
            return None
        return encode_hit(found[1], key, cost, None if self._given_clock is None else self.given_us())

    def forget(self, claims: Claims) -> None:
        keys = dict.fromkeys(self.names.key(claim.named, claim.key) for claim in claims)
        self.run_plan(self.route.query([RoutedCommand(["UNLINK", key], key) for key in keys]))

    def items(self, limit: NamedLimit) -> list[tuple[str, State]]:
        return self.run_plan(self._items(limit), long=True)

    def rate_items(self, limit: NamedLimit) -> list[tuple[str, State]]:
        return self.run_plan(self._items(limit, own=True), long=True)

    def open_hash(self, name: str) -> ServerHash | None:
        return None if self._passthrough else super().open_hash(name)  # a client may serve async callers only

    def plan_hash(self, name: str, *change: str | None) -> Plan[dict[str, str]]:
        """A Redis hash, such as `limitkeeper:=overrides:shop`: no digest of a limit begins with "=", so no limit has this key."""
        key = self.names.start + b"=" + key_bytes(name)
        if not change:
            found = yield from self.route.read_hashes([key])
            return {field.decode("utf-8", "replace"): value.decode("utf-8", "replace") for field, value in found[key].items()}
        fields = [key_bytes(text) for text in change if text is not None]
        yield from self.route.query([RoutedCommand(["HSET" if len(fields) > 1 else "HDEL", key, *fields], key)])
        return {}

    def read_hash(self, name: str) -> dict[bytes, bytes]:
        """All fields of a hash of the application."""
        key = key_bytes(name)
        return dict(self.run_plan(self.route.read_hashes([key]))[key])

    def run_script(self, source: bytes, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        """The reply of a Lua script that is none of this store's own, on keys of one slot."""
        return self.run_plan(self._script(source, keys, args))

    async def arun_script(self, source: bytes, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        return await self.arun_plan(self._script(source, keys, args))
