"""Parses a Redis URL into the addresses of the servers and how to log in.

    redis://user:password@host:6379/0          rediss://host?ssl_ca_certs=/etc/ca.pem       unix:///run/redis.sock?db=0
    redis+sentinel://host1:26379,host2:26379/service?db=0&sentinel_password=…
    redis+cluster://host1:7000,host2:7000      (rediss+sentinel:// and rediss+cluster:// use TLS)
    limitkeeper://:token@host:7071             limitkeepers:// uses TLS (RemoteStore)

An `Endpoint` is where one server listens, a `Login` how a connection authenticates. An `Address` is the kind of a topology and
the endpoints to start from.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from ...errors import ConfigurationError
from ..urls import WRAPPING, check_login, masked

KINDS = {
    "single": ("redis", "rediss", "valkey", "valkeys", "unix", "redis+unix"),
    "sentinel": ("redis+sentinel", "rediss+sentinel"),
    "cluster": ("redis+cluster", "rediss+cluster"),
}
SCHEMES = {scheme: kind for kind, schemes in KINDS.items() for scheme in schemes}
#: Those of a limitkeeper service.
SERVICE = {"limitkeeper": "single", "limitkeepers": "single"}
TLS_OPTIONS = {"ssl_ca", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
LOGIN_OPTIONS = {"db", "username", "password", "sentinel_username", "sentinel_password"}
OPTIONS = {"prefix", "timeout", "max_connections", *LOGIN_OPTIONS, *TLS_OPTIONS}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one server listens: a host and port, or the path of a UNIX socket."""

    host: str
    port: int = 6379
    path: str = ""

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings: how the server is verified, and our certificate."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    require: str = "required"
    check_hostname: bool = True

    @cache  # noqa: B019 - few settings are in use
    def context(self) -> ssl.SSLContext:
        try:
            made = ssl.create_default_context(cafile=self.ca)
            if self.require in ("none", "optional"):
                made.check_hostname = False
                made.verify_mode = ssl.CERT_NONE if self.require == "none" else ssl.CERT_OPTIONAL
            else:
                made.check_hostname = self.check_hostname
            if self.cert is not None:
                made.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"TLS: {error} (ssl_ca_certs={self.ca!r}, ssl_certfile={self.cert!r})") from None
        return made


@dataclass(frozen=True, slots=True)
class Login:
    """How a connection authenticates. The password is not in the repr."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: Tls | None = None

    def commands(self) -> list[list[str]]:
        """The first commands on a new connection."""
        commands: list[list[str]] = []
        if self.password is not None:
            commands.append(["AUTH", self.password] if self.username is None else ["AUTH", self.username, self.password])
        if self.db:
            commands.append(["SELECT", str(self.db)])
        return commands


@dataclass(frozen=True, slots=True)
class Address:
    """The kind of a topology ("single", "sentinel", "cluster"), the endpoints to start from, and how to log in."""

    kind: str
    endpoints: tuple[Endpoint, ...]
    login: Login = Login()
    service: str = ""
    sentinels: Login = Login()
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        where = ", ".join(map(str, self.endpoints))
        if self.kind == "sentinel":
            return f"the primary of {self.service!r} (sentinels {where})"
        return f"the cluster at {where}" if self.kind == "cluster" else where


def read_url(url: str, schemes: Mapping[str, str] = SCHEMES) -> Address:
    """The Address that a URL with one of these schemes stands for."""
    if url and "://" not in url:
        raise ConfigurationError(f"{masked(url)}: expected a URL; did you mean {masked(f'{next(iter(schemes))}://{url}')}?")
    try:
        parts = urlsplit(url)
        check_login(parts)
        return _read(parts, schemes)
    except ConfigurationError as error:
        raise ConfigurationError(f"{masked(url)}: {error}") from None


def _read(parts: SplitResult, schemes: Mapping[str, str]) -> Address:
    kind = schemes.get(parts.scheme)
    if kind is None:
        raise ConfigurationError(f"unknown scheme; expected one of {', '.join(sorted(schemes))}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = OPTIONS if schemes is not SERVICE else OPTIONS - {"db", "prefix", "sentinel_username", "sentinel_password"}
    for name in options:
        if name not in known:
            raise ConfigurationError(f"unknown option {name!r}; expected one of {', '.join(sorted(known))}")
    before, _, hosts = parts.netloc.rpartition("@")
    user, colon, password = before.partition(":")
    path = unquote(parts.path)
    service, number = "", path.strip("/")
    if parts.scheme.endswith("unix"):
        if not path.startswith("/") or hosts:
            raise ConfigurationError("write the socket's path after three slashes, as in unix:///run/redis.sock")
        endpoints, number = [Endpoint("", 0, path)], ""
    else:
        port = 26379 if kind == "sentinel" else 7071 if schemes is SERVICE else 6379
        endpoints = [_endpoint(one, port) for one in (hosts or "localhost").split(",")]
    if kind == "single" and len(endpoints) > 1:
        remedy = "redis+sentinel:// or redis+cluster:// URL; independent servers are the shards of a ShardedStore"
        raise ConfigurationError(f"several hosts need a {remedy if schemes is not SERVICE else 'sharded+limitkeeper:// URL'}")
    if schemes is SERVICE and number:
        raise ConfigurationError(f"a service has no databases; leave out the path {path!r}")
    if kind == "sentinel":
        service, _, number = number.partition("/")
        if not service:
            raise ConfigurationError("name the service, as in redis+sentinel://host:26379/mymaster")
    db = options.get("db", number or "0")
    if not (db.isascii() and db.isdigit() and len(db) < 10):
        raise ConfigurationError(f"database: expected a number, got {db!r}")
    if kind == "cluster" and int(db):
        raise ConfigurationError("a cluster has database 0 only")
    tls = read_tls(options) if parts.scheme.startswith(("rediss", "valkeys", "limitkeepers")) else None
    if tls is None and TLS_OPTIONS & options.keys():
        raise ConfigurationError("ssl_… options need a URL with TLS: rediss://, or limitkeepers:// for a service")
    user, word = options.get("username", unquote(user)), options.get("password", unquote(password) if colon else None)
    sentinels = Login(options.get("sentinel_username"), options.get("sentinel_password"), tls=tls)
    return Address(kind, tuple(endpoints), Login(user or None, word, int(db), tls), service, sentinels, options)


def _endpoint(text: str, port: int) -> Endpoint:
    host, _, number = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
    if number and not (number.isascii() and number.isdigit() and len(number) < 6 and 0 < int(number) < 65536):
        raise ConfigurationError(f"port: expected a number from 1 to 65535, got {number!r}")
    return Endpoint(unquote(host.strip("[]")) or "localhost", int(number) if number else port)


def read_tls(settings: Mapping[str, Any]) -> Tls:
    """TLS settings by redis-py's names, as values or as text."""
    found = settings.get("ssl_cert_reqs", "required")
    require = {0: "none", 1: "optional", 2: "required", None: "none"}.get(found, str(found).lower().removeprefix("cert_"))
    if require not in ("required", "optional", "none"):
        raise ConfigurationError("ssl_cert_reqs: expected required, optional or none")
    check_hostname = str(settings.get("ssl_check_hostname", True)).lower() in ("1", "true", "yes")
    ca = settings.get("ssl_ca_certs", settings.get("ssl_ca"))
    return Tls(ca, settings.get("ssl_certfile"), settings.get("ssl_keyfile"), require, check_hostname)


def address_only(url: str) -> str:
    """The URL of a store without the options of its wrappers (guard=, lease=, …)."""
    parts = urlsplit(url)
    left = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name not in WRAPPING]
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{urlencode(left)}" if left else "")
