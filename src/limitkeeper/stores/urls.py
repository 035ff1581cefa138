"""A store from configuration: one line of text says where the state lives, and what is wrapped around it.

    memory://?max_keys=50000                                     in this process
    shared:///run/app/limits?max_keys=…&log_entries=…            all processes of this host
    redis://host:6379/0   rediss://…   unix:///run/redis.sock    one server (also valkey://), with prefix=, timeout=, …
    redis+cluster://a,b,c   redis+sentinel://a,b/service         several that belong together
    sharded+redis://a,b,c/0                                      several that know nothing of each other

and on any of them `guard=open|closed|local` with `share=` and `budget=`, `lease=50|auto` with `life=` and `strict=`. The lease is
inside the guard. Every store is imported when it is asked for. A mistake is a ConfigurationError that names the part and what to
write; a password is never shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from ..errors import ConfigurationError, InvalidLimit
from ..rate import duration_us
from .contract import Store

REDIS = ("redis", "rediss", "valkey", "valkeys", "unix", "redis+unix")
REDIS_HOUSES = ("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")
SHARDED = "sharded+"
SCHEMES = ("memory", "shared", *REDIS, *REDIS_HOUSES, *(SHARDED + one for one in REDIS[:4]))
WRAPPERS = {"guard": ("share", "budget"), "lease": ("life", "strict")}
WRAPPING = (*WRAPPERS, *(option for options in WRAPPERS.values() for option in options))
Options = dict[str, str]


def store_from_url(url: str) -> Store:
    """A store from its URL: "memory://", "shared:///run/limits", "redis://host/0?guard=local&share=1/4&lease=50", …"""
    if not isinstance(url, str):
        raise ConfigurationError(f"a store's URL must be a text such as 'memory://', not {url!r}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(f"{masked(url)}: {error}; write it like redis://host:6379/0") from None
    maker = maker_of(parts.scheme, url)
    options = options_of(parts.query, url)
    wrapping = {name: options.pop(name) for name in WRAPPING if name in options}
    for wrapper, more in WRAPPERS.items():
        for name in more:
            if name in wrapping and wrapper not in wrapping:
                raise ConfigurationError(f"{masked(url)}: {name}= belongs to {wrapper}=; write {wrapper}=… too, or leave it out")
    store: Store = maker(url, parts, options)
    try:
        return wrapped(store, wrapping, url)
    except (ConfigurationError, InvalidLimit) as error:
        store.close()
        raise ConfigurationError(f"{masked(url)}: {error}") from None


def maker_of(scheme: str, url: str) -> Callable[..., Store]:
    if scheme == "memory":
        return memory
    if scheme == "shared":
        return shared
    if scheme in REDIS or scheme in REDIS_HOUSES:
        return redis
    if scheme.startswith(SHARDED) and scheme in SCHEMES:
        return sharded
    if scheme == "limitkeeper":
        raise ConfigurationError(
            f"{masked(url)}: a limitkeeper service as a store is not there yet; use redis:// for several hosts"
        )
    word = scheme or url.partition(":")[0]
    meant = nearest(word, SCHEMES)
    there = f"did you mean {meant}://?" if meant else f"there are {', '.join(one + '://' for one in SCHEMES)}"
    raise ConfigurationError(f"{masked(url)}: no store is called {scheme!r}; {there}")


# What stands behind ------------------------------------------------------------------------------------------------


def memory(url: str, parts: Any, options: Options) -> Store:
    from .worker_warning import memory_store

    if parts.netloc or parts.path.strip("/"):
        raise ConfigurationError(f"{masked(url)}: memory:// has no host and no path; it takes only ?max_keys=…")
    only(options, ("max_keys",), url)
    return memory_store(**{name: number(name, value, url) for name, value in options.items()})


def shared(url: str, parts: Any, options: Options) -> Store:
    if parts.netloc or len(parts.path) < 2:
        raise ConfigurationError(
            f"{masked(url)}: write the file's whole path after three slashes, as in shared:///run/app/limits"
        )
    only(options, ("max_keys", "log_entries"), url)
    kind = brought("shared", "SharedStore", url)
    return kind(unquote(parts.path), **{name: number(name, value, url) for name, value in options.items()})  # type: ignore[no-any-return]


def redis(url: str, parts: Any, options: Options) -> Store:
    for name in options:
        meant = nearest(name, WRAPPING, 0.75)
        if meant is not None:
            raise ConfigurationError(f"{masked(url)}: no option is called {name!r}; did you mean {meant}=?")
    kind = brought("redis", "RedisStore", url)
    said = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return kind(f"{said}?{urlencode(options)}" if options else said)  # type: ignore[no-any-return]


def sharded(url: str, parts: Any, options: Options) -> Store:
    """One store for each host; they share credentials, database and options."""
    login, at, hosts = parts.netloc.rpartition("@")
    each = [host for host in hosts.split(",") if host]
    if len(each) < 2:
        raise ConfigurationError(f"{masked(url)}: name at least two hosts, as in {parts.scheme}://one,two,three/0")
    kind = brought("sharded", "ShardedStore", url)
    scheme = parts.scheme.removeprefix(SHARDED)
    stores = [redis(url, parts._replace(scheme=scheme, netloc=login + at + host), options) for host in each]
    return kind(stores)  # type: ignore[no-any-return]


def brought(module: str, name: str, url: str) -> Any:
    """A store's class, imported now; what is missing is named with the way to get it."""
    try:
        return getattr(import_module(f".{module}", __package__), name)
    except ImportError as error:
        remedy = "" if "pip install" in str(error) else "; pip install 'limitkeeper[redis]'" if module == "redis" else ""
        raise ConfigurationError(f"{masked(url)}: {name} can't be used here: {error}{remedy}") from error


# What is wrapped around it -----------------------------------------------------------------------------------------


def wrapped(store: Store, wrapping: Options, url: str) -> Store:
    """The lease first, then the guard around it."""
    if "lease" in wrapping:
        told: dict[str, Any] = {"lease": None if wrapping["lease"] == "auto" else number("lease", wrapping["lease"], url)}
        if "life" in wrapping:
            told["life"] = duration("life", wrapping["life"], url)
        if "strict" in wrapping:
            told["strict"] = truth("strict", wrapping["strict"], url)
        store = brought("leased", "LeasedStore", url)(store, **told)
    if "guard" in wrapping:
        from .guarded import GuardedStore

        told = {"share": wrapping.get("share")}
        if "budget" in wrapping:
            told["budget"] = duration("budget", wrapping["budget"], url)
        store = GuardedStore(store, on_failure=wrapping["guard"], **told)
    return store


# Reading -----------------------------------------------------------------------------------------------------------


def masked(url: str) -> str:
    """A URL as it may be shown."""
    hidden = re.sub(r"://.*@", "://…@", url, flags=re.S)
    return repr(re.sub(r"(password=)[^&#]*", r"\1…", hidden, flags=re.I))


def options_of(query: str, url: str) -> Options:
    found: Options = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in found:
            raise ConfigurationError(f"{masked(url)}: {name}= is said twice; say it once")
        found[name] = value
    return found


def only(options: Options, known: tuple[str, ...], url: str) -> None:
    for name in options:
        if name not in known:
            meant = nearest(name, (*known, *WRAPPING))
            hint = f"did you mean {meant}=?" if meant else f"there are {', '.join(f'{one}=' for one in (*known, *WRAPPING))}"
            raise ConfigurationError(f"{masked(url)}: no option is called {name!r}; {hint}")


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    from difflib import get_close_matches

    found = get_close_matches(word.lower(), list(known), 1, likeness)
    return found[0] if found else None


def number(name: str, text: str, url: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigurationError(f"{masked(url)}: {name} must be a whole number, at least 1, not {text!r}")
    return int(text)


def truth(name: str, text: str, url: str) -> bool:
    if text.lower() not in ("1", "true", "yes", "0", "false", "no"):
        raise ConfigurationError(f"{masked(url)}: {name} must be true or false, not {text!r}")
    return text.lower() in ("1", "true", "yes")


def duration(name: str, text: str, url: str) -> float | str:
    """A duration as text ("20ms") or in seconds ("0.02"), checked."""
    try:
        value: float | str = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text
        duration_us(value)
        return value
    except InvalidLimit:
        raise ConfigurationError(f"{masked(url)}: {name}={text!r} is no duration; write it like {name}=20ms") from None
