"""RedisStore on a redis-py client: reads its settings, or calls through it where they can't be read.

Passing a client means this server, this login, this TLS: RedisStore makes connections of its own from them, for sync and async
callers. It can't use the client's: redis-py sends a command again after a timeout, when the first may have been executed.

A client with a custom connection class, or whose credentials come from a provider, is called through its `execute_command`, one
command after the other, within its own timeouts and retries, so no budget can be promised; a sync client then serves sync callers
only, an asyncio client async ones. redis-py is not imported: clients and errors are recognised by attributes and class names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ...clock import Clock
from ...errors import ConfigurationError, StoreError, StoreTimeout, StoreUnavailable
from .. import sans_io
from ..sans_io import Call, LeftOnLoop, Plan
from .address import Address, Endpoint, Login, read_tls
from .async_connection import AsyncConnections
from .command_routing import Route
from .resp import Command, Outcome, Reply, ReplyError
from .sync_connection import CallRecord, SyncPool

READABLE = {"Connection", "SSLConnection", "UnixDomainSocketConnection"}
#: What connections of our own can't do for a login or for TLS.
UNREADABLE = {"credential_provider", "redis_connect_func", "ssl_ca_data", "ssl_ca_path", "ssl_password"}
UNREADABLE |= {"ssl_validate_ocsp", "ssl_validate_ocsp_stapled"}
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


def read_client(client: Any) -> Address | None:
    """The Address of a client (redis-py or valkey-py); None when its settings can't be read."""
    nodes = getattr(client, "nodes_manager", None)
    if nodes is not None:
        return _cluster(client, nodes)
    if not hasattr(client, "execute_command"):
        raise ConfigurationError(f"server: expected a URL such as 'redis://localhost:6379' or a redis-py client, got {client!r}")
    pool = getattr(client, "connection_pool", None)
    settings = dict(getattr(pool, "connection_kwargs", {}))
    manager = getattr(pool, "sentinel_manager", None)
    if manager is not None:
        return _sentinel(settings, pool, manager)
    kind = getattr(pool, "connection_class", None)
    if kind is None or kind.__name__ not in READABLE or not kind.__module__.startswith(("redis.", "valkey.")):
        return None
    login = _login(settings, kind.__name__ == "SSLConnection")
    if login is None:
        return None
    path = settings.get("path")
    return Address("single", (Endpoint("", 0, path) if path else _endpoint(settings, 6379),), login)


def _endpoint(settings: dict[str, Any], port: int) -> Endpoint:
    return Endpoint(settings.get("host", "localhost"), int(settings.get("port", port)))


def _login(settings: dict[str, Any], secure: bool) -> Login | None:
    if any(settings.get(name) for name in UNREADABLE):
        return None
    tls = read_tls(settings) if secure else None
    return Login(settings.get("username"), settings.get("password"), int(settings.get("db") or 0), tls)


def _cluster(client: Any, nodes: Any) -> Address:
    settings = {**getattr(nodes, "connection_kwargs", {}), **getattr(client, "connection_kwargs", {}), "redis_connect_func": None}
    starts = list(getattr(nodes, "startup_nodes", {}).values()) or list(getattr(nodes, "nodes_cache", {}).values())
    kind = settings.get("connection_class")
    login = _login(settings, bool(settings.get("ssl")) or (kind is not None and kind.__name__ == "SSLConnection"))
    if login is None or not starts:
        raise ConfigurationError("this RedisCluster's settings can't be read; pass a redis+cluster:// URL instead")
    return Address("cluster", tuple(Endpoint(node.host, int(node.port)) for node in starts), replace(login, db=0))


def _sentinel(settings: dict[str, Any], pool: Any, manager: Any) -> Address:
    login = _login({**settings, "redis_connect_func": None}, _is_secure(pool))
    pools = [one.connection_pool for one in manager.sentinels]
    found = [one.connection_kwargs for one in pools]
    sentinels = _login({**found[0], "redis_connect_func": None}, _is_secure(pools[0])) if found else None
    if login is None or sentinels is None:
        raise ConfigurationError("this Sentinel client's settings can't be read; pass a redis+sentinel:// URL instead")
    if not getattr(pool, "is_master", True):
        raise ConfigurationError("slave_for() connects to a replica, which accepts no writes; pass Sentinel.master_for(…)")
    return Address("sentinel", tuple(_endpoint(one, 26379) for one in found), login, pool.service_name, sentinels)


def _is_secure(pool: Any) -> bool:
    return "SSL" in getattr(pool.connection_class, "__name__", "")


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

    def exchange(self, calls: Sequence[Call], deadline_us: int, record: CallRecord | None = None) -> list[Outcome]:
        _check_mode(self._client, "a sync", "an asyncio")
        return [sans_io.run(_execute(self._client, call)) for call in calls]


class AsyncClientPool(AsyncConnections):
    """Async calls through a client."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client) -> None:
        super().__init__(loop)
        self._client = client

    async def exchange(self, call: Call, left: LeftOnLoop) -> Outcome:
        _check_mode(self._client, "an asyncio", "a sync")
        return await sans_io.arun(_execute(self._client, call), sans_io.perform_call)


def _check_mode(client: Client, wanted: str, other: str) -> None:
    if any(".asyncio" in base.__module__ for base in type(client).__mro__) is not (wanted == "an asyncio"):
        raise ConfigurationError(
            f"{client!r} is {other} client whose settings can't be read, so this store can't make {wanted.split()[1]} calls; "
            f"pass a URL, or {wanted} client to a store of its own"
        )


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


def _decode_error(error: Exception, where: Endpoint) -> Exception:
    """A client's error: as an error reply, or as the error that the store raises."""
    names = [kind.__name__ for kind in type(error).__mro__]
    kind = next((KINDS[name] for name in names if name in KINDS), None)
    if kind is not None or "ResponseError" in names:
        return ReplyError(f"{kind} {error}" if kind else str(error))
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
