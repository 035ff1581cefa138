"""Reads the settings of a redis-py client, from which RedisStore makes connections of its own, for sync and async callers.

Passing a client means this server, this login, this TLS. A limiter can't use its connections: redis-py sends a command again
after a timeout, when the first may have been executed, and its timeouts are per read. A client with a custom connection class,
or whose credentials come from a provider, is called through instead (`client_passthrough.py`).

redis-py itself is not imported: a client is recognised by its attributes.
"""

from __future__ import annotations

from typing import Any

from ...errors import ConfigurationError
from .address import Address, Endpoint, Login, Tls

MIRRORED = {"Connection", "SSLConnection", "UnixDomainSocketConnection"}


def is_client(thing: object) -> bool:
    """Whether this is a redis-py (or valkey-py) client."""
    return hasattr(thing, "execute_command") or hasattr(thing, "nodes_manager")


def is_async(client: Any) -> bool:
    return ".asyncio" in type(client).__module__ or any(".asyncio" in base.__module__ for base in type(client).__mro__)


def read_client(client: Any) -> Address | None:
    """The Address of a client; None when its settings can't be read."""
    nodes = getattr(client, "nodes_manager", None)
    if nodes is not None:
        return _cluster(client, nodes)
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        return None
    settings = dict(getattr(pool, "connection_kwargs", {}))
    manager = getattr(pool, "sentinel_manager", None)
    if manager is not None:
        return _sentinel(settings, pool, manager)
    kind = getattr(pool, "connection_class", None)
    if kind is None or kind.__name__ not in MIRRORED or not kind.__module__.startswith(("redis.", "valkey.")):
        return None
    login = _login(settings, kind.__name__ == "SSLConnection")
    if login is None:
        return None
    if settings.get("path"):
        return Address("single", (Endpoint("", 0, settings["path"]),), login)
    return Address("single", (Endpoint(settings.get("host", "localhost"), int(settings.get("port", 6379))),), login)


def _login(settings: dict[str, Any], secure: bool) -> Login | None:
    if settings.get("credential_provider") is not None or settings.get("redis_connect_func") not in (None,):
        return None
    tls = None
    if secure:
        require = settings.get("ssl_cert_reqs", "required")
        tls = Tls(
            settings.get("ssl_ca_certs"),
            settings.get("ssl_certfile"),
            settings.get("ssl_keyfile"),
            {0: "none", 1: "optional", 2: "required", None: "none"}.get(require, str(require).lower()),
            bool(settings.get("ssl_check_hostname", True)),
        )
        if settings.get("ssl_ca_data") or settings.get("ssl_ca_path") or settings.get("ssl_password"):
            return None
    return Login(settings.get("username"), settings.get("password"), int(settings.get("db") or 0), tls)


def _cluster(client: Any, nodes: Any) -> Address:
    settings = {**getattr(nodes, "connection_kwargs", {}), **getattr(client, "connection_kwargs", {})}
    starts = list(getattr(nodes, "startup_nodes", {}).values()) or list(getattr(nodes, "nodes_cache", {}).values())
    settings.pop("redis_connect_func", None)
    kind = settings.get("connection_class")
    secure = bool(settings.get("ssl")) or (kind is not None and kind.__name__ == "SSLConnection")
    login = _login(settings, secure)
    if login is None or not starts:
        raise ConfigurationError("this RedisCluster's settings can't be read; pass a redis+cluster:// URL instead")
    endpoints = tuple(Endpoint(node.host, int(node.port)) for node in starts)
    return Address("cluster", endpoints, Login(login.username, login.password, 0, login.tls))


def _sentinel(settings: dict[str, Any], pool: Any, manager: Any) -> Address:
    secure = "SSL" in getattr(pool.connection_class, "__name__", "")
    login = _login({**settings, "redis_connect_func": None}, secure)
    found = [one.connection_pool.connection_kwargs for one in manager.sentinels]
    if login is None or not found:
        raise ConfigurationError("this Sentinel client's settings can't be read; pass a redis+sentinel:// URL instead")
    if not getattr(pool, "is_master", True):
        raise ConfigurationError("slave_for() connects to a replica, which accepts no writes; pass Sentinel.master_for(…)")
    endpoints = tuple(Endpoint(one.get("host", "localhost"), int(one.get("port", 26379))) for one in found)
    sentinels = _login({**found[0], "redis_connect_func": None}, False) or Login()
    return Address("sentinel", endpoints, login, pool.service_name, sentinels)
