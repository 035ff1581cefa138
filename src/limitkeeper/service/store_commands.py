"""LK.STORE commands: the service's store for RemoteStore, other limitkeeper processes (messages.py has the formats).

They reach every key of every limit, so they are for administrators: with `admin_token`, connections that have presented it
(AUTH); without one, all clients of a loopback address, and none of any other. As a node of a ShardedStore the service decides
only for callers with its own version of the shard map (stores/sharded/shard_map.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from hmac import compare_digest
from typing import Any

from ..algorithms.claim import NamedLimit
from ..decision import Decision
from ..errors import ConfigurationError, StoreError, StoreTimeout
from ..limiter_base import checked_cost
from ..stores.contract import Claims
from ..stores.remote import messages
from ..stores.remote.messages import MAX_COMMAND, PREFIX, Head, OtherProtocol, decode_head, encode_json
from ..stores.sans_io import Call, Plan
from ..stores.sharded.shard_map import NodeMap, SlotClosed, SlotWaiting, StaleMap
from ..stores.sharded.slots import slot_of
from .app import INVALID, Application, RequestError, available
from .resp import OK, Arguments, Commands, RespConnection, bulk, exactly
from .settings import Settings

#: The most limits of a store, and the largest reply of ITEMS, in bytes.
MAX_LIMITS, MAX_ITEMS = 100_000, 8 << 20
NO_PERMISSION = b"-NOPERM LK.STORE commands need the service's admin_token, or a loopback address without one\r\n"
#: Error -> the kind of the error reply.
KINDS: dict[type[StoreError], str] = {SlotClosed: "CLOSED", SlotWaiting: "WAITING", StoreTimeout: "TIMEOUT"}
Operation = Callable[[Head, Any], Plan[Any]]


class StoreCommands:
    """The commands over the store of an Application. `set_time`: for tests, takes the time that requests carry."""

    def __init__(self, app: Application, settings: Settings, set_time: Callable[[int], None] | None = None) -> None:
        self.app, self.node, self._set_time = app, NodeMap(), set_time
        self._token = None if settings.admin_token is None else settings.admin_token.encode()
        self._open = self._token is None and (settings.resp is None or settings.resp.loopback)
        self._single = settings.workers == 1
        self._limits: dict[tuple[str, str, str], NamedLimit] = {}
        self._by_text: dict[bytes, NamedLimit] = {}

    def add_to(self, commands: Commands) -> None:
        """Adds the commands to those of a listener, and `admin_token` to its AUTH."""
        operations: dict[bytes, Operation] = {
            b"DECIDE": self._decide, b"GIVE_BACK": self._give_back, b"REBOOK": self._rebook, b"RESET": self._reset,
            b"FORGET": self._forget, b"REGISTER": self._register, b"ITEMS": self._items, b"LOAD": self._load,
            b"TIME": self._time, b"MAP": self._map, b"HASH": self._hash,
        }  # fmt: skip
        for name, operation in operations.items():
            commands.table[PREFIX + name] = partial(self._answer, operation)
            commands.sizes[PREFIX + name] = MAX_COMMAND
        commands.table[PREFIX + b"HIT"], commands.sizes[PREFIX + b"HIT"] = self._hit, MAX_COMMAND
        commands.open_store = self._open
        self._commands = commands
        for others in commands.restricted():
            others.table |= dict.fromkeys((*[PREFIX + name for name in operations], PREFIX + b"HIT"), refuse)
        if self._token is not None:
            ordinary = commands.table[b"AUTH"]
            commands.table[b"AUTH"] = lambda connection, arguments: (
                self._auth(connection, arguments) or ordinary(connection, arguments)
            )

    def _auth(self, connection: RespConnection, arguments: Arguments) -> bytes | None:
        if self._token is None or not compare_digest(arguments[-1], self._token):
            return None
        connection.admin, connection.commands = True, self._commands
        connection.authenticate()
        return OK

    # Requests --------------------------------------------------------------------------------------------------

    def _hit(self, connection: RespConnection, arguments: Arguments) -> Any:
        """The hot path: one limit, at once on a local store."""
        if not (self._open or connection.admin):
            return NO_PERMISSION
        try:
            body = exactly(arguments, 2)[1]
            head, at = self._head(body)
            text, key, cost = messages.decode_hit(body, at)
            named = self._by_text.get(text)
            if named is None:
                if len(self._by_text) >= MAX_LIMITS:
                    self._by_text.clear()
                named = self._by_text[text] = self.limit(*json.loads(text))
            checked_cost(cost)
            if self.node.map_id != head.map_id or self.node.map_id[0]:
                self.node.check(head.map_id, ((named, key),), self._now_us())
            if self.app.local:
                return bulk(messages.encode_hit_reply(self.app.store.decide_one(named, key, cost, 0, True)))
        except Exception as error:
            return refused(error)
        return self.app.perform(self._guarded(self._decide_one(named, key, cost), messages.encode_hit_reply), bulk_or_error)

    def _answer(self, operation: Operation, connection: RespConnection, arguments: Arguments) -> Any:
        if not (self._open or connection.admin):
            return NO_PERMISSION
        try:
            body = exactly(arguments, 2)[1]
            head, at = self._head(body)
            given = json.loads(body[at:])
        except Exception as error:
            return refused(error)
        return self.app.perform(self._guarded(operation(head, given), encode_json), bulk_or_error)

    def _guarded(self, plan: Plan[Any], encode: Callable[[Any], bytes]) -> Plan[bytes | Exception]:
        """The encoded result of a plan, or its error."""
        try:
            return encode((yield from plan))
        except Exception as error:
            return error

    def _head(self, body: bytes) -> tuple[Head, int]:
        head, at = decode_head(body)
        if head.now_us is not None:
            if self._set_time is None:
                raise RequestError(INVALID, "a request carries a time, and this service decides on its own; leave out clock=")
            self._set_time(head.now_us)
        return head, at

    def _now_us(self) -> int:
        return self.app.store.clock.now_us()

    def limit(self, limiter: str, name: str, text: str) -> NamedLimit:
        """A limit, registered when it is first named."""
        found = self._limits.get((limiter, name, text))
        if found is None:
            if len(self._limits) >= MAX_LIMITS:
                raise RequestError(INVALID, f"more than {MAX_LIMITS} limits are in use; give limits that differ by key one name")
            found = self._limits[limiter, name, text] = messages.limit_of(limiter, name, text)
            self.app.store.register(found)
        return found

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def acall(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A call that has no async form."""
        return await asyncio.to_thread(function, *arguments)

    def _check(self, head: Head, claims: Claims) -> None:
        self.node.check(head.map_id, [(claim.named, claim.key) for claim in claims], self._now_us())

    # Operations ------------------------------------------------------------------------------------------------

    def _decide_one(self, named: NamedLimit, key: str, cost: int) -> Plan[Decision]:
        return available((yield Call(self.app.store, "decide_one", (named, key, cost, 0, True))))

    def _decide(self, head: Head, given: Any) -> Plan[Any]:
        asks, max_wait_us, not_before_us, commit = given
        asked = [messages.claims_of(claims, self.limit) for claims in asks]
        for claim in (claim for claims in asked for claim in claims):
            checked_cost(claim.cost)
        self._check(head, [claim for claims in asked for claim in claims])
        if len(asked) == 1:
            options = {"commit": commit, "remember": True, "not_before_us": not_before_us}
            decisions = [(yield Call(self.app.store, "decide", (asked[0], max_wait_us), options))]
        else:
            decisions = yield Call(self.app.store, "decide_many", (asked, max_wait_us))
        return [[messages.decision_json(available(made)), charges_of(claims) if made and commit else None]
                for claims, made in zip(asked, decisions, strict=True)]  # fmt: skip

    def _give_back(self, head: Head, given: Any) -> Plan[Any]:
        claims = messages.claims_of(given[0], self.limit)
        self._check(head, claims)
        back = yield Call(self.app.store, "give_back", (claims, *given[1:]))
        return [back, charges_of(claims)]

    def _rebook(self, head: Head, given: Any) -> Plan[Any]:
        bookings = messages.bookings_of(given, self.limit)
        self._check(head, [claim for booking in bookings for claim in booking.claims])
        decisions = yield Call(self.app.store, "rebook", (bookings,))
        return [[None if made is None else messages.decision_json(made), charges_of(booking.claims)]
                for booking, made in zip(bookings, decisions, strict=True)]  # fmt: skip

    def _reset(self, head: Head, given: Any) -> Plan[Any]:
        claims = messages.claims_of(given, self.limit)
        self._check(head, claims)
        yield Call(self.app.store, "reset", (claims,))

    def _forget(self, head: Head, given: Any) -> Plan[Any]:
        yield Call(self, "call", (self.app.store.forget, messages.claims_of(given, self.limit)))

    def _register(self, head: Head, given: Any) -> Plan[Any]:
        self.limit(*given)
        yield from ()

    def _items(self, head: Head, given: Any) -> Plan[Any]:
        limit, own, first, end = given
        store, named = self.app.store, self.limit(*limit)
        found = []
        size = 0
        for key, state in (yield Call(self, "call", (store.rate_items if own else store.items, named))):
            if first <= slot_of(key) < end:
                size += len(encode_json((key, state)))
                if size > MAX_ITEMS:
                    raise TooManyItems(f"more than {MAX_ITEMS} bytes; ask for fewer slots")
                found.append((key, state))
        return found

    def _load(self, head: Head, given: Any) -> Plan[Any]:
        limit, pairs = given
        yield Call(self.app.store, "load", (self.limit(*limit), messages.states_of(pairs)))

    def _time(self, head: Head, given: Any) -> Plan[Any]:
        return (yield Call(self, "call", (self.app.store.now_us,)))

    def _hash(self, head: Head, given: Any) -> Plan[Any]:
        name, *written = given
        found = self.app.store.open_hash(name)
        if found is None:
            raise RequestError(INVALID, "the store of this service keeps no hashes, so its overrides can't be shared")
        if written:
            field, value = written
            return (yield Call(self, "call", (found.write, str(field), None if value is None else str(value))))
        return (yield Call(self, "call", (found.read,)))

    def _map(self, head: Head, message: Any) -> Plan[Any]:
        if message and not (self._single and self.app.local):
            raise RequestError(INVALID, "a node of a shard map needs workers = 1 and a memory:// or shared:// store of its own")
        now_us = self._now_us()
        self.node.change(message, now_us)
        yield from ()
        return {**self.node.status(now_us), "limits": list(self._limits)}


class TooManyItems(StoreError):
    """A reply of ITEMS would be too large."""


def charges_of(claims: Claims) -> list[Any]:
    return list(map(messages.charge_json, claims))


def bulk_or_error(found: bytes | Exception) -> bytes:
    return bulk(found) if isinstance(found, bytes) else refused(found)


def refuse(connection: RespConnection, arguments: Arguments) -> bytes:
    """The reply to a token with scopes: none of them allows the store's own commands."""
    return NO_PERMISSION


def refused(error: Exception) -> bytes:
    """An error as a reply; those of the caller, and unknown ones, are raised for the connection to answer."""
    if isinstance(error, StaleMap):
        return b"-STALE %b\r\n" % encode_json(error.map)
    if isinstance(error, StoreError):
        kind = "TOOLARGE" if isinstance(error, TooManyItems) else KINDS.get(type(error), "UNAVAILABLE")
        return f"-{kind} {' '.join(str(error).split())}\r\n".encode("utf-8", "replace")
    if isinstance(error, OtherProtocol):
        return f"-PROTOCOL {error}\r\n".encode()
    if isinstance(error, RequestError):
        raise error
    if isinstance(error, (*messages.MALFORMED, ConfigurationError)):
        raise RequestError(INVALID, f"expected a message of the store protocol, version {messages.PROTOCOL}: {error}") from None
    raise error
