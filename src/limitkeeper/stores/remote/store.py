"""RemoteStore: a limitkeeper service as a store, which decides in its own store and on its own time.

One command per operation (messages.py) over the connections, batches and budgets of RedisStore (`stores/redis/server_store.py`):
sync callers take a connection each, the requests of one event-loop iteration are pipelined in one write. What may have been
executed is never sent again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from ...clock import SYSTEM, Clock
from ...decision import Decision
from ...errors import StoreError, StoreTimeout, StoreUnavailable
from ...rate import Duration
from ..contract import Booking, Claims, KeyState, Requests, bounded_wait_us, checked
from ..redis.address import SERVICE, Address, Endpoint, read_url
from ..redis.command_routing import MAX_REQUESTS, Route, RoutedCommand
from ..redis.request import Request, T
from ..redis.resp import Reply, ReplyError, pack_command, require_hiredis, unavailable
from ..redis.server_store import ServerStore, checked_connections, checked_timeout
from ..redis.sync_connection import SyncPool
from ..sans_io import Plan
from ..sharded.shard_map import ShardMap, SlotClosed, SlotWaiting, StaleMap
from ..sharded.slots import SLOTS
from . import messages
from .messages import MAX_COMMAND, MAX_REQUEST, PREFIX, Head, MapId, claims_json, encode_json, limit_json

#: So many encoded limits are cached.
MAX_CACHED = 4096
#: So many parts of a request are one write: of more, the service would wait for its replies to be read, and so not read the rest.
PARTS_AT_ONCE = 8


class TooLarge(StoreError):
    """A reply would be too large; fewer slots can be asked for."""


#: Kind of an error reply -> the error that the store raises.
ERRORS: dict[str, type[StoreError]] = {
    "UNAVAILABLE": StoreUnavailable,
    "TIMEOUT": StoreTimeout,
    "TOOLARGE": TooLarge,
    "CLOSED": SlotClosed,
    "WAITING": SlotWaiting,
}
#: Kind of an error reply, or words in it -> what to do about it.
REMEDIES = {
    "NOAUTH": "put the service's admin_token into the URL, as in limitkeeper://:TOKEN@host:7071",
    "NOPERM": "put the service's admin_token into the URL, as in limitkeeper://:TOKEN@host:7071",
    "PROTOCOL": "install the same version of limitkeeper on both sides",
    "unknown command": "it is an older limitkeeper service, or none: install the same version of limitkeeper on both sides",
}


def error_of_reply(reply: Exception, endpoint: Endpoint) -> StoreError:
    """An error reply as the error that the store raises."""
    kind, _, text = str(reply).partition(" ")
    if kind == "STALE":
        return StaleMap(f"{endpoint} has another version of the shard map; use ShardedStore", ShardMap.of(*json.loads(text)))
    if kind in ERRORS:
        return ERRORS[kind](f"{endpoint}: {text}")
    words = next((words for words in REMEDIES if words in str(reply)), None)
    return (
        unavailable(reply, endpoint)
        if words is None
        else StoreUnavailable(f"{endpoint} answered {str(reply)!r}; {REMEDIES[words]}")
    )


class StoreRequest(Request[T]):
    """One LK.STORE command and the decoder of its reply. Reading `answer` raises what the service answered instead."""

    __slots__ = ("_answer", "_decode", "body", "command", "failure")

    def __init__(self, operation: bytes, body: bytes, decode: Callable[[bytes], T]) -> None:
        self.command, self.body, self._decode = PREFIX + operation, body, decode
        self.pending, self.in_flight, self.error = True, False, None
        self.failure: StoreError | None = None

    def take(self, reply: Reply, endpoint: Endpoint) -> bool:
        """Takes the reply. False: there is none, and nothing was sent."""
        if reply is None:
            return False
        try:
            if isinstance(reply, ReplyError):
                self.failure = error_of_reply(reply, endpoint)
            else:
                self._answer = self._decode(reply)
        except messages.MALFORMED as error:
            self.failure = StoreUnavailable(f"{endpoint} gave an unexpected reply: {reply!r:.80} ({error})")
        self.pending = False
        return True

    @property
    def answer(self) -> T:  # type: ignore[override]
        if self.failure is not None:
            raise self.failure
        return self._answer


AnyRequest = StoreRequest[Any]


class ServiceRoute(Route):
    """The way to one service: every request is a command of its own."""

    def pack(self, request: AnyRequest) -> bytes:
        return pack_command((request.command, request.body))

    def decode(self, request: AnyRequest, reply: Reply) -> bool:
        return request.take(reply, self.address.endpoints[0])

    def pack_batch(self, endpoint: Endpoint, requests: Sequence[AnyRequest]) -> tuple[bytes, int, Callable[[list[Reply]], bool]]:
        def decode(replies: list[Reply]) -> bool:
            taken = [request.take(reply, endpoint) for request, reply in zip(requests, replies, strict=True)]
            return all(taken)

        return b"".join(map(self.pack, requests)), len(requests), decode

    def execute(self, requests: Sequence[AnyRequest], most: int = MAX_REQUESTS) -> Plan[None]:
        some = [RoutedCommand([request.command, request.body]) for request in requests]
        yield from self.send(some)
        for request, one in zip(requests, some, strict=True):
            if not self.decode(request, one.reply):
                request.error = one.error or StoreUnavailable(f"{one.endpoint} gave an unexpected reply: {one.reply!r}")


class RemoteStore(ServerStore):
    """State in a limitkeeper service: `RemoteStore("limitkeeper://:TOKEN@host:7071")`; limitkeepers:// uses TLS.

    `timeout` is the budget of one call, at most `max_connections` (50) are open for sync callers; an event loop has one. `clock`
    is for tests: requests then carry its time, which only a service that was made for it accepts. `budget_clock` measures
    budgets of sync calls.
    """

    fences = True

    def __init__(
        self,
        url: str | Address,
        *,
        timeout: Duration | None = None,
        max_connections: int | None = None,
        clock: Clock | None = None,
        budget_clock: Clock = SYSTEM,
    ) -> None:
        require_hiredis("RemoteStore")
        address = read_url(url, SERVICE) if isinstance(url, str) else url
        most = checked_connections(address.options.get("max_connections") if max_connections is None else max_connections)
        timeout_us = checked_timeout(timeout if timeout is not None else address.options.get("timeout", "1s"))
        if address.login.tls is not None:
            address.login.tls.context()  # reads certificates, which takes longer than a call may
        super().__init__(ServiceRoute(address, budget_clock), SyncPool(budget_clock, most), timeout_us, clock, budget_clock)
        self._options: dict[str, Any] = {"max_connections": most, "clock": clock, "budget_clock": budget_clock}
        self._limits: dict[int, tuple[NamedLimit, bytes]] = {}
        self.use_map((0, 0))

    def __repr__(self) -> str:
        return f"RemoteStore({str(self.address)!r})"

    # Requests --------------------------------------------------------------------------------------------------

    def _head_now(self) -> bytes:
        return self._head if self._given_clock is None else Head(self._map_id, self.given_us()).encode()

    def _request(self, operation: bytes, arguments: Any, decode: Callable[[Any], T]) -> StoreRequest[T]:
        body = self._head_now() + encode_json(arguments)
        return self._sized(StoreRequest(operation, body, lambda reply: decode(json.loads(reply))))

    def _sized(self, request: StoreRequest[T]) -> StoreRequest[T]:
        """Refuses a request that is too large: a service would close the connection, which other callers use too."""
        if len(request.body) > MAX_COMMAND - 1000:
            raise StoreUnavailable(
                f"{self.location}: a request of {len(request.body)} bytes is too large; give shorter keys, or fewer at once"
            )
        return request

    def hit_request(self, named: NamedLimit, key: str, cost: int) -> StoreRequest[Decision]:
        known = self._limits.get(id(named))
        if known is None:
            if len(self._limits) >= MAX_CACHED:
                self._limits.clear()
            known = self._limits[id(named)] = (named, encode_json(limit_json(named)))
        body = messages.encode_hit(self._head_now(), known[1], key, cost)
        return self._sized(StoreRequest(b"HIT", body, partial(messages.decode_hit_reply, named=named)))

    def plan_decide(self, claims: Claims, max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int) -> Any:
        arguments = ([claims_json(claims)], bounded_wait_us(max_wait_us), not_before_us, commit)
        return self._request(b"DECIDE", arguments, lambda found: decided(claims, *found[0]))

    def plan_decide_many(self, asks: Requests, max_wait_us: int | None) -> Plan[list[Decision]]:
        """One command, at one time; what is larger than MAX_REQUEST is split into several."""
        asked, wait_us = [checked(claims) for claims in asks], bounded_wait_us(max_wait_us)
        requests = []
        for some in in_parts(asked, lambda claims: sum(len(one.key) + 200 for one in claims)):
            arguments = ([claims_json(claims) for claims in some], wait_us, 0, True)
            requests.append(self._request(b"DECIDE", arguments, partial(decided_all, some)))
        for at in range(0, len(requests), PARTS_AT_ONCE):
            yield from self.route.execute_all(requests[at : at + PARTS_AT_ONCE])
        return [decision for request in requests for decision in request.answer]

    def plan_give_back(self, claims: Sequence[Claim], charged_at: int, source: str) -> Any:
        asked = list(claims)
        return self._request(b"GIVE_BACK", (messages.charged_json(asked), charged_at, source), lambda found: given(asked, *found))

    def plan_rebook(self, bookings: Sequence[Booking]) -> Any:
        some = list(bookings)
        return self._request(b"REBOOK", messages.bookings_json(some), lambda found: list(map(rebooked, some, found)))

    def plan_reset(self, claims: Claims, operation: bytes = b"RESET") -> Plan[None]:
        parts = in_parts(list(claims), lambda claim: len(claim.key) + 200)
        requests = [self._request(operation, claims_json(some), lambda _: None) for some in parts]
        yield from self._answers(requests)

    def plan_load(self, limit: NamedLimit, items: Iterable[KeyState]) -> Plan[None]:
        pairs = list(items)
        for key, _ in pairs:
            if type(key) is not str:
                raise TypeError(f"a key must be a str, got {type(key).__name__}: {key!r}")
        for some in in_parts(pairs, lambda pair: len(encode_json(pair))):
            yield from self._answers([self._request(b"LOAD", (limit_json(limit), some), lambda _: None)])

    def _items(self, limit: NamedLimit, own: bool) -> Plan[list[KeyState]]:
        """Asks for all slots at once, and for halves of them where that is too large for one reply."""
        found, ranges = list[KeyState](), [(0, SLOTS)]
        while ranges:
            first, end = ranges.pop()
            try:
                request = self._request(b"ITEMS", (limit_json(limit), own, first, end), messages.states_of)
                found += (yield from self._answers([request]))[0]
            except TooLarge:
                if end - first < 2:
                    raise
                ranges += [(first, (first + end) // 2), ((first + end) // 2, end)]
        return found

    def _answers(self, requests: Sequence[StoreRequest[T]]) -> Plan[list[T]]:
        yield from self.route.execute_all(requests)
        return [request.answer for request in requests]

    def server_us(self) -> Plan[int]:
        return (yield from self._answers([self._request(b"TIME", None, int)]))[0]

    # Shard map -------------------------------------------------------------------------------------------------

    def use_map(self, map_id: MapId) -> None:
        self._map_id, self._head = map_id, Head(map_id, None).encode()

    def exchange_map(self, message: dict[str, Any]) -> dict[str, Any]:
        return self.run_plan(self._request(b"MAP", message, dict))

    async def aexchange_map(self, message: dict[str, Any]) -> dict[str, Any]:
        return await self.arun_plan(self._request(b"MAP", message, dict))

    @property
    def location(self) -> str:
        return str(self.address.endpoints[0])

    def sibling(self, location: str) -> RemoteStore:
        address = read_url(f"limitkeeper://{location}", SERVICE)
        login = self.address.login
        return RemoteStore(Address(address.kind, address.endpoints, login), timeout=self.timeout_us / 1e6, **self._options)

    def plan_hash(self, name: str, *change: str | None) -> StoreRequest[dict[str, str]]:
        return self._request(b"HASH", (name, *change), lambda found: dict(found or ()))

    # Limits and keys -------------------------------------------------------------------------------------------

    def register(self, limit: NamedLimit) -> None:
        """A service registers a limit at its first use; with a given clock, as old as the limiter."""
        if self._given_clock is not None:
            self.run_plan(self._request(b"REGISTER", limit_json(limit), lambda _: None))

    def unregister(self, limit: NamedLimit) -> None:
        self._limits.pop(id(limit), None)

    def forget(self, claims: Claims) -> None:
        self.run_plan(self.plan_reset(claims, b"FORGET"), long=True)

    def items(self, limit: NamedLimit) -> list[KeyState]:
        return self.run_plan(self._items(limit, False), long=True)

    def rate_items(self, limit: NamedLimit) -> list[KeyState]:
        return self.run_plan(self._items(limit, True), long=True)


# Replies -------------------------------------------------------------------------------------------------------------


def decided(claims: Sequence[Claim], decision: Any, charges: Any) -> Decision:
    if charges is not None:
        messages.set_charges(claims, charges)
    return messages.decision_of(decision, claims)


def decided_all(asks: Sequence[Sequence[Claim]], found: Any) -> list[Decision]:
    return [decided(claims, *one) for claims, one in zip(asks, found, strict=True)]


def given(claims: Sequence[Claim], back: bool, charges: Any) -> bool:
    messages.set_charges(claims, charges)
    return back


def rebooked(booking: Booking, found: Any) -> Decision | None:
    decision, charges = found
    messages.set_charges(booking.claims, charges)
    return None if decision is None else messages.decision_of(decision, booking.claims)


def in_parts(some: Sequence[T], size_of: Callable[[T], int]) -> list[list[T]]:
    """Cuts a list into parts of at most MAX_REQUEST bytes, where single elements allow that."""
    parts: list[list[T]] = [[]]
    size = 0
    for one in some:
        size += size_of(one)
        if size > MAX_REQUEST and parts[-1]:
            parts.append([])
            size = size_of(one)
        parts[-1].append(one)
    return parts
