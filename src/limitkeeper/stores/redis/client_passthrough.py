"""A client that can only be called through: its connections are of somebody's own kind (see `client.py`).

Commands go through its `execute_command`, one after the other, in its own colour. Its own timeouts and retries apply, so no
budget can be promised. Its errors are told by the names of their classes; redis-py itself is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import ConfigurationError, StoreTimeout, StoreUnavailable
from .address import Address, Endpoint
from .async_connection import AsyncConnections
from .from_redis_py import is_async
from .resp import ReplyError
from .route import Route
from .script_call import RoutedCommands
from .sync_connection import SyncPool
from .trips import Outcome, Plan, Trip

#: redis-py takes the first word off an error reply and makes a class of it.
WORDS = {
    "NoScriptError": "NOSCRIPT",
    "ReadOnlyError": "READONLY",
    "BusyLoadingError": "LOADING",
    "AuthenticationError": "WRONGPASS",
    "AuthenticationWrongNumberOfArgsError": "WRONGPASS",
    "NoPermissionError": "NOPERM",
    "OutOfMemoryError": "OOM",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "TryAgainError": "TRYAGAIN",
}


class ClientRoute(Route):
    """The way that a client knows and we do not."""

    def __init__(self, client: Any) -> None:
        self.name = Endpoint(f"the {type(client).__name__} passed in", 0)
        super().__init__(Address("single", (self.name,)))
        self.direct = None

    def find(self, errands: Sequence[RoutedCommands]) -> Plan[None]:
        for errand in errands:
            errand.place = self.name
        return
        yield []

    def everywhere(self) -> Plan[list[Endpoint]]:
        return [self.name]
        yield []


def told(error: Exception, place: object) -> Any:
    """A client's error: as a reply, or as the error that leaves the store."""
    names = {kind.__name__ for kind in type(error).__mro__}
    word = next((WORDS[name] for name in (kind.__name__ for kind in type(error).__mro__) if name in WORDS), None)
    if word is not None:
        return ReplyError(f"{word} {error}")
    if "ResponseError" in names:
        return ReplyError(str(error))
    if "TimeoutError" in names:
        return StoreTimeout(f"{place} did not answer in its time: {error}")
    return StoreUnavailable(f"{place}: {type(error).__name__}: {error}")


class ClientPool(SyncPool):
    """The sync colour of a client."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client

    def exchange(self, trips: Sequence[Trip], deadline_us: int) -> list[Outcome]:
        if is_async(self._client):
            raise ConfigurationError(
                f"{self._client!r} is an asyncio client and its settings can't be read, so this store has no sync face; "
                "pass a URL, or a sync client to a store of its own"
            )
        return [self._travel(trip) for trip in trips]

    def _travel(self, trip: Trip) -> Outcome:
        replies: list[Any] = []
        for command in trip.commands:
            try:
                reply = self._client.execute_command(*command, NEVER_DECODE=True)
            except Exception as error:
                reply = told(error, trip.place)
            if isinstance(reply, StoreTimeout | StoreUnavailable):
                return Outcome([], reply)
            replies.append(plain(command, reply))
        return Outcome(replies)


class AsyncClientPool(AsyncConnections):
    """The asyncio colour of a client."""

    def __init__(self, loop: Any, client: Any) -> None:
        super().__init__(loop)
        self._client = client

    async def exchange(self, trips: Sequence[Trip], deadline: float) -> list[Outcome]:
        if not is_async(self._client):
            raise ConfigurationError(
                f"{self._client!r} is a sync client and its settings can't be read, so this store has no asyncio face; "
                "pass a URL, or an asyncio client to a store of its own"
            )
        return [await self._atravel(trip) for trip in trips]

    async def _atravel(self, trip: Trip) -> Outcome:
        replies: list[Any] = []
        for command in trip.commands:
            try:
                reply = await self._client.execute_command(*command, NEVER_DECODE=True)
            except Exception as error:
                reply = told(error, trip.place)
            if isinstance(reply, StoreTimeout | StoreUnavailable):
                return Outcome([], reply)
            replies.append(plain(command, reply))
        return Outcome(replies)


def plain(command: Any, reply: Any) -> Any:
    """A reply as the server gave it: clients make other things of some."""
    if isinstance(reply, dict):
        return [item for pair in reply.items() for item in pair]
    if command[0] == "SCAN" and isinstance(reply, list | tuple):
        return [str(reply[0]).encode() if not isinstance(reply[0], bytes) else reply[0], reply[1]]
    return reply
