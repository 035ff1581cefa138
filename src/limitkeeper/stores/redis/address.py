"""Parses a Redis URL into the addresses of the servers and how to log in.

    redis://user:password@host:6379/0          rediss://host?ssl_ca_certs=/etc/ca.pem       unix:///run/redis.sock?db=0
    redis+sentinel://host1:26379,host2:26379/service?db=0&sentinel_password=…
    redis+cluster://host1:7000,host2:7000      (rediss+sentinel:// and rediss+cluster:// use TLS)

An `Endpoint` is where one server listens, a `Login` how a connection authenticates. An `Address` is the kind of a topology and
the endpoints to start from.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from functools import cache
from urllib.parse import parse_qsl, unquote, urlsplit

from ...errors import ConfigurationError

SCHEMES = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "valkey": ("single", False),
    "valkeys": ("single", True),
    "unix": ("single", False),
    "redis+unix": ("single", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
TLS_OPTIONS = {
    "ssl_ca": "ca",
    "ssl_ca_certs": "ca",
    "ssl_certfile": "cert",
    "ssl_keyfile": "key",
    "ssl_cert_reqs": "require",
    "ssl_check_hostname": "check_hostname",
}
OPTIONS = {"db", "username", "password", "sentinel_username", "sentinel_password", "prefix", "timeout", *TLS_OPTIONS}


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

    def context(self) -> ssl.SSLContext:
        return _context(self)


@cache
def _context(tls: Tls) -> ssl.SSLContext:
    try:
        made = ssl.create_default_context(cafile=tls.ca)
        if tls.require in ("none", "optional"):
            made.check_hostname = False
            made.verify_mode = ssl.CERT_NONE if tls.require == "none" else ssl.CERT_OPTIONAL
        else:
            made.check_hostname = tls.check_hostname
        if tls.cert is not None:
            made.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"TLS: {error} (ssl_ca_certs={tls.ca!r}, ssl_certfile={tls.cert!r})") from None
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


def read_url(url: str) -> Address:
    """The Address that a URL stands for."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ConfigurationError(f"{_shown(url)}: unknown scheme; expected one of {', '.join(sorted(SCHEMES))}")
    kind, secure = SCHEMES[parts.scheme]
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in OPTIONS:
            raise ConfigurationError(f"{_shown(url)}: unknown option {name!r}; expected one of {', '.join(sorted(OPTIONS))}")
    user, password, hosts = _credentials(parts.netloc)
    path = unquote(parts.path)
    tls = _tls(options, url) if secure else None
    if tls is None and set(options) & set(TLS_OPTIONS):
        raise ConfigurationError(f"{_shown(url)}: ssl_… options need a rediss:// URL")
    login = Login(options.get("username", user), options.get("password", password), tls=tls)
    if parts.scheme.endswith("unix"):
        if not path.startswith("/") or hosts:
            raise ConfigurationError(f"{_shown(url)}: write the socket's path after three slashes, as in unix:///run/redis.sock")
        return Address(kind, (Endpoint("", 0, path),), replace(login, db=_db(options.get("db", "0"), url)), options=options)
    port = 26379 if kind == "sentinel" else 6379
    endpoints = tuple(_endpoint(one, port, url) for one in (hosts or "localhost").split(","))
    if kind == "single" and len(endpoints) > 1:
        raise ConfigurationError(f"{_shown(url)}: several hosts need a redis+sentinel:// or redis+cluster:// URL")
    if kind == "sentinel":
        service, _, number = path.strip("/").partition("/")
        if not service:
            raise ConfigurationError(f"{_shown(url)}: name the service, as in redis+sentinel://host:26379/mymaster")
        sentinels = Login(options.get("sentinel_username"), options.get("sentinel_password"), tls=tls)
        login = replace(login, db=_db(options.get("db", number or "0"), url))
        return Address(kind, endpoints, login, service, sentinels, options)
    db = _db(options.get("db", path.strip("/") or "0"), url)
    if kind == "cluster" and db:
        raise ConfigurationError(f"{_shown(url)}: a cluster has database 0 only")
    return Address(kind, endpoints, replace(login, db=db), options=options)


def _shown(url: str) -> str:
    """A URL without its password, for messages."""
    parts = urlsplit(url)
    _, password, hosts = _credentials(parts.netloc)
    return repr(url if password is None else url.replace(parts.netloc, f"…@{hosts}"))


def _credentials(netloc: str) -> tuple[str | None, str | None, str]:
    before, at, hosts = netloc.rpartition("@")
    if not at:
        return None, None, netloc
    user, colon, password = before.partition(":")
    if not colon:
        return unquote(user) or None, None, hosts
    return unquote(user) or None, unquote(password), hosts


def _endpoint(text: str, port: int, url: str) -> Endpoint:
    host, _, number = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
    if number and not (number.isascii() and number.isdigit() and 0 < int(number) < 65536):
        raise ConfigurationError(f"{_shown(url)}: port: expected a number from 1 to 65535, got {number!r}")
    return Endpoint(unquote(host.strip("[]")) or "localhost", int(number) if number else port)


def _db(text: str, url: str) -> int:
    if not text.isdigit():
        raise ConfigurationError(f"{_shown(url)}: database: expected a number, got {text!r}")
    return int(text)


def _tls(options: dict[str, str], url: str) -> Tls:
    found = {TLS_OPTIONS[name]: value for name, value in options.items() if name in TLS_OPTIONS}
    require = found.get("require", "required").lower().removeprefix("cert_")
    if require not in ("required", "optional", "none"):
        raise ConfigurationError(f"{_shown(url)}: ssl_cert_reqs: expected required, optional or none")
    check_hostname = found.get("check_hostname", "true").lower() in ("1", "true", "yes")
    return Tls(found.get("ca"), found.get("cert"), found.get("key"), require, check_hostname)
