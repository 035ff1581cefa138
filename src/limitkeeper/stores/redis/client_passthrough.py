"""Sends commands through a redis-py client whose settings can't be read (see `from_redis_py.py`).

Commands go through its `execute_command`, one after the other; a sync client serves sync callers only, an asyncio client async
ones. Its own timeouts and retries apply, so no budget can be promised. Its errors are recognised by the names of their classes;
redis-py itself is not imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from ...clock import Clock
from ...errors import ConfigurationError, StoreError, StoreTimeout, StoreUnavailable
from .. import sans_io
from ..sans_io import Call, Plan
from .address import Address, Endpoint
from .async_connection import AsyncConnections
from .command_routing import Route
from .from_redis_py import is_async
from .resp import Command, Outcome, Reply, ReplyError
from .sync_connection import SyncPool

#: redis-py removes the first word of an error reply and makes a class of it.
KINDS = {
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


class Client(Protocol):
    """What is used of a client; an asyncio client returns an awaitable."""

    @property
    def execute_command(self) -> Callable[..., Reply]: ...


class ClientRoute(Route):
    """The topology is the client's: every command goes to it."""

    def __init__(self, client: Client) -> None:
        super().__init__(Address("single", (Endpoint(f"the {type(client).__name__} passed in", 0),)))
        self.direct = None


class ClientPool(SyncPool):
    """Sync calls through a client."""

    def __init__(self, clock: Clock, client: Client) -> None:
        super().__init__(clock)
        self._client = client

    def exchange(self, calls: Sequence[Call], deadline_us: int) -> list[Outcome]:
        if is_async(self._client):
            raise ConfigurationError(
                f"{self._client!r} is an asyncio client whose settings can't be read, so this store can't make sync calls; "
                "pass a URL, or a sync client to a store of its own"
            )
        return [sans_io.run(_execute(self._client, call)) for call in calls]


class AsyncClientPool(AsyncConnections):
    """Async calls through a client."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client) -> None:
        super().__init__(loop)
        self._client = client

    async def exchange(self, call: Call, deadline: float) -> Outcome:
        if not is_async(self._client):
            raise ConfigurationError(
                f"{self._client!r} is a sync client whose settings can't be read, so this store can't make asyncio calls; "
                "pass a URL, or an asyncio client to a store of its own"
            )
        return await sans_io.arun(_execute(self._client, call), sans_io.perform_call)


def _execute(client: Client, call: Call) -> Plan[Outcome]:
    replies: list[Reply] = []
    for command in call.args[1]:
        try:
            reply = yield Call(client, "execute_command", tuple(command), {"NEVER_DECODE": True})
        except Exception as error:
            reply = _decode_error(error, call.target)
        if isinstance(reply, StoreError):
            return reply
        replies.append(_as_sent(command, reply))
    return replies


def _decode_error(error: Exception, where: object) -> Exception:
    """A client's error: as an error reply, or as the error that the store raises."""
    names = [kind.__name__ for kind in type(error).__mro__]
    kind = next((KINDS[name] for name in names if name in KINDS), None)
    if kind is not None:
        return ReplyError(f"{kind} {error}")
    if "ResponseError" in names:
        return ReplyError(str(error))
    if "TimeoutError" in names:
        return StoreTimeout(f"{where} timed out: {error}")
    return StoreUnavailable(f"{where}: {type(error).__name__}: {error}")


def _as_sent(command: Command, reply: Reply) -> Reply:
    """A reply as the server sent it: clients convert some."""
    if isinstance(reply, dict):
        return [item for pair in reply.items() for item in pair]
    if command[0] == "SCAN" and isinstance(reply, list | tuple):
        return [str(reply[0]).encode() if not isinstance(reply[0], bytes) else reply[0], reply[1]]
    return reply
