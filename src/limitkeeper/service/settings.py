"""Settings of the service: one table, read from flags, environment variables and a TOML file, in this order, checked at start.

    limitkeeper serve --http 0.0.0.0:7070          flag
    LIMITKEEPER_HTTP=0.0.0.0:7070                  environment variable
    http = "0.0.0.0:7070"                          line of the file that --config names

An address beyond loopback needs a token: the service does not start wide open. `Settings.table` is what `--check` prints; secrets
are not shown.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigurationError, InvalidLimit
from ..rate import duration_us
from ..stores.urls import without_passwords
from .access import read_tokens

PREFIX = "LIMITKEEPER_"
#: Settings whose values are not printed.
SECRET = ("token", "admin_token", "secret")
MIN_SECRET = 16
OFF = "off"


class Address(NamedTuple):
    """Where a listener binds; port 0 picks a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        try:
            return ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host == "localhost"


def address(text: str) -> Address | None:
    host, colon, port = text.rpartition(":")
    if text == OFF:
        return None
    inner = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    readable = not set("[]") & set(inner) and (":" not in inner or inner != host)
    if not colon or not readable or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT such as 127.0.0.1:7070 or [::1]:7070, or off, got {text!r}")
    return Address(inner or "0.0.0.0", int(port))


def integer(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ValueError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return read


def seconds(text: str) -> float:
    try:
        value: float | str = float(text) if text.replace(".", "", 1).isdigit() else text
        found = duration_us(value) / 1e6
    except InvalidLimit:
        found = 0.0
    if not 0.001 <= found <= 31_536_000:
        raise ValueError(f"expected a duration from 1ms to a year, such as 10s, got {text!r}")
    return found


def size(text: str) -> int:
    units = {"": 1, "k": 1024, "kb": 1024, "kib": 1024, "m": 1 << 20, "mb": 1 << 20, "mib": 1 << 20}
    number = text.lower().rstrip("kmib ")
    unit = text.lower()[len(number) :].strip()
    if not number.isascii() or not number.isdigit() or unit not in units or not 256 <= int(number) * units[unit] <= 1 << 26:
        raise ValueError(f"expected a size from 256 to 64MiB, such as 64KiB, got {text!r}")
    return int(number) * units[unit]


def secret(text: str) -> str:
    if len(text) < MIN_SECRET or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"expected at least {MIN_SECRET} printable characters without spaces; `openssl rand -hex 32` makes one")
    return text


def switch(text: str) -> bool:
    if text.lower() not in ("on", "true", "yes", "1", "off", "false", "no", "0"):
        raise ValueError(f"expected on or off, got {text!r}")
    return text.lower() in ("on", "true", "yes", "1")


def setting(parse: Callable[[str], Any], default: str | None, help: str, metavar: str = "") -> Any:
    value = None if default is None else parse(default)
    return field(default=value, metadata={"parse": parse, "text": default, "help": help, "metavar": metavar})


@dataclass(frozen=True)
class Settings:
    """All settings, checked. `sources` says where each one came from."""

    policy: str | None = setting(str, None, "policy file; default: limitkeeper.yaml in this folder, if there is one", "POLICY")
    envoy: str | None = setting(str, None, "limits of the Envoy rate limit service: a YAML file, or a folder of them", "FILE")
    store: str | None = setting(str, None, "store of all limits; default: the policy's", "URL")
    workers: int = setting(integer(1, 256), "1", "worker processes; several share a memory:// store through a file", "N")
    http: Address | None = setting(address, "127.0.0.1:7070", "HTTP, or off", "HOST:PORT")  # noqa: RUF009
    resp: Address | None = setting(address, "127.0.0.1:7071", "Redis protocol, or off", "HOST:PORT")  # noqa: RUF009
    grpc: Address | None = setting(address, "127.0.0.1:7072", "Envoy rate limit service (gRPC), or off", "HOST:PORT")  # noqa: RUF009
    admin: Address | None = setting(address, "127.0.0.1:7073", "dashboard, metrics, operators' actions, or off", "HOST:PORT")  # noqa: RUF009
    token: str | None = setting(secret, None, "token that clients must present; required beyond loopback", "TOKEN")
    tokens: str | None = setting(str, None, "file of more tokens, with scopes and limits", "FILE")
    admin_token: str | None = setting(secret, None, "token of LK.STORE commands (RemoteStore); required beyond loopback", "TOKEN")
    secret: str | None = setting(secret, None, "key of reservation tokens, the same on every replica; default: random", "SECRET")
    reservation_ttl: float = setting(seconds, "1h", "how long a reservation can be settled", "DURATION")
    max_keys: int = setting(integer(1, 2**31), "1000000", "keys of the embedded store", "N")
    max_connections: int = setting(integer(1, 1_000_000), "10240", "connections of one worker and port", "N")
    max_body: int = setting(size, "256KiB", "largest HTTP body or RESP command", "SIZE")
    max_headers: int = setting(size, "32KiB", "largest HTTP request line and headers", "SIZE")
    request_timeout: float = setting(seconds, "10s", "time in which a begun request must arrive, and a reply be read", "DURATION")
    idle_timeout: float = setting(seconds, "300s", "time after which an idle connection is closed", "DURATION")
    drain_timeout: float = setting(seconds, "10s", "time for open requests after SIGTERM", "DURATION")
    watch: bool = setting(switch, "on", "reload the policy when its file changes", "on|off")
    tls_cert: str | None = setting(str, None, "certificate chain (PEM) of HTTP and RESP", "FILE")
    tls_key: str | None = setting(str, None, "its private key (PEM)", "FILE")
    tls_client_ca: str | None = setting(str, None, "CA (PEM) that must have signed clients' certificates: mutual TLS", "FILE")
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def table(self) -> list[tuple[str, str, str]]:
        """(name, value, source) of every setting, as readable text."""
        return [(one.name, self.shown(one), self.sources.get(one.name, "default")) for one in settings_fields()]

    def shown(self, one: Field[Any]) -> str:
        value = getattr(self, one.name)
        if value is None:
            return OFF if one.metadata["parse"] is address else "-"
        if one.name in SECRET:
            return f"({len(value)} characters)"
        if one.name == "store":
            return without_passwords(value)
        if isinstance(value, bool):
            return "on" if value else OFF
        return f"{value:g}s" if isinstance(value, float) else str(value)

    def listeners(self) -> dict[str, Address]:
        """The addresses to bind, by name."""
        found = {name: getattr(self, name) for name in ("http", "resp", "grpc", "admin")}
        return {name: one for name, one in found.items() if one is not None}


def settings_fields() -> list[Field[Any]]:
    return [one for one in fields(Settings) if "parse" in one.metadata]


def load(flags: Mapping[str, str | None], environment: Mapping[str, str], config: str | None = None) -> Settings:
    """Reads all settings; ConfigurationError lists every mistake with its place."""
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    given = read_file(config) if config else {}
    known = {one.name: one for one in settings_fields()}
    for name in given:
        if name not in known:
            meant = get_close_matches(str(name), known, 1)
            mistakes.append(f"{config}: unknown setting {name!r}" + (f"; did you mean {meant[0]!r}?" if meant else ""))
    for name, one in known.items():
        candidates = (
            (flags.get(name), "POLICY" if name == "policy" else f"--{name.replace('_', '-')}"),
            (environment.get(PREFIX + name.upper()), PREFIX + name.upper()),
            (given.get(name), config or ""),
        )
        text, source = next(((text, source) for text, source in candidates if text not in (None, "")), (None, ""))
        if text is not None:
            sources[name] = source
            try:
                values[name] = one.metadata["parse"](text)
            except ValueError as error:
                mistakes.append(f"{source}: {error}" if source != config else f"{source}: {name}: {error}")
    settings = Settings(**values, sources=sources)
    mistakes += conflicts(settings)
    if mistakes:
        raise ConfigurationError("the settings have errors:\n  " + "\n  ".join(mistakes))
    return settings


def read_file(path: str) -> dict[str, str]:
    """The settings of a TOML file, as text; a table `[limitkeeper]` is optional."""
    try:
        found = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: can't read the settings: {error}") from None
    section = found.get("limitkeeper", found)
    outside = [name for name in found if name != "limitkeeper" and name in {one.name for one in settings_fields()}]
    if not isinstance(section, dict):
        raise ConfigurationError(f"{path}: limitkeeper: expected a table [limitkeeper], got {section!r:.80}")
    if section is not found and outside:
        raise ConfigurationError(f"{path}: {outside[0]!r} is outside of the table [limitkeeper]; write it below that line")
    return {name: ("on" if value else OFF) if isinstance(value, bool) else str(value) for name, value in section.items()}


def conflicts(settings: Settings) -> Iterable[str]:
    """Settings that do not fit together."""
    for name, one in settings.listeners().items():
        if not one.loopback and settings.token is None and settings.tokens is None:
            yield (
                f"{name}: {one} is reachable from other hosts, so a token is required; "
                f"set {PREFIX}TOKEN, or bind a loopback address such as 127.0.0.1:{one.port}"
            )
    if settings.http is None and settings.resp is None and (settings.grpc is None or settings.envoy is None):
        yield "no port is served; set http or resp, or grpc with envoy"
    taken: dict[Address, str] = {}
    for name, one in settings.listeners().items():
        if one.port and taken.setdefault(one, name) != name:
            yield f"{name}: {one} is already the address of {taken[one]}"
    if (settings.tls_cert is None) != (settings.tls_key is None):
        yield "tls_cert and tls_key belong together; set both or neither"
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        yield "tls_client_ca needs tls_cert and tls_key"
    for name in ("tls_cert", "tls_key", "tls_client_ca", "policy", "envoy", "tokens"):
        path = getattr(settings, name)
        if path is not None and not (Path(path).is_file() or (name == "envoy" and Path(path).is_dir())):
            yield f"{name}: there is no file {path!r}"
        elif path is not None and name == "tokens":
            yield from read_tokens(path)[1]


assert all(one.default is not MISSING for one in settings_fields())
