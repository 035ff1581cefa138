"""store_from_url: creates a store, and the wrappers around it, from a URL.

    memory://?max_keys=50000                                     in this process
    shared:///run/app/limits?max_keys=…&log_entries=…            all processes of this host
    redis://host:6379/0   rediss://…   unix:///run/redis.sock    one server (also valkey://), with prefix=, timeout=, …
    redis+cluster://a,b,c   redis+sentinel://a,b/service         a cluster, or a primary found by Sentinel
    sharded+redis://a,b,c/0                                      independent servers

All of them take `guard=open|closed|local` with `share=` and `budget=`, and `lease=50|auto` with `life=` and `strict=`. The guard
wraps the lease. Stores are imported on use. An invalid URL raises a ConfigurationError that names the part and what was expected;
passwords are masked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from ..errors import ConfigurationError, InvalidLimit
from ..rate import duration_us
from .contract import Store

REDIS = ("redis", "rediss", "valkey", "valkeys", "unix", "redis+unix")
REDIS_TOPOLOGIES = ("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")
SHARDED = "sharded+"
SCHEMES = ("memory", "shared", *REDIS, *REDIS_TOPOLOGIES, *(SHARDED + one for one in REDIS[:4]))
WRAPPERS = {"guard": ("share", "budget"), "lease": ("life", "strict")}
WRAPPING = (*WRAPPERS, *(option for options in WRAPPERS.values() for option in options))
Options = dict[str, str]


def store_from_url(url: str) -> Store:
    """Creates a store from its URL: "memory://", "shared:///run/limits", "redis://host/0?guard=local&share=1/4&lease=50", …"""
    if not isinstance(url, str):
        raise ConfigurationError(f"a store's URL must be a string such as 'memory://', got {url!r}")
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
                raise ConfigurationError(f"{masked(url)}: {name}= requires {wrapper}=; add {wrapper}=… or remove it")
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
    if scheme in REDIS or scheme in REDIS_TOPOLOGIES:
        return redis
    if scheme.startswith(SHARDED) and scheme in SCHEMES:
        return sharded
    if scheme == "limitkeeper":
        raise ConfigurationError(
            f"{masked(url)}: a limitkeeper service as a store is not available yet; use redis:// for several hosts"
        )
    word = scheme or url.partition(":")[0]
    meant = nearest(word, SCHEMES)
    remedy = f"did you mean {meant}://?" if meant else f"expected one of {', '.join(one + '://' for one in SCHEMES)}"
    raise ConfigurationError(f"{masked(url)}: unknown scheme {scheme!r}; {remedy}")


# Stores ------------------------------------------------------------------------------------------------------------


def memory(url: str, parts: SplitResult, options: Options) -> Store:
    from .worker_warning import memory_store

    if parts.netloc or parts.path.strip("/"):
        raise ConfigurationError(f"{masked(url)}: memory:// takes no host and no path, only ?max_keys=…")
    only(options, ("max_keys",), url)
    return memory_store(**{name: number(name, value, url) for name, value in options.items()})


def shared(url: str, parts: SplitResult, options: Options) -> Store:
    if parts.netloc or len(parts.path) < 2:
        raise ConfigurationError(f"{masked(url)}: expected an absolute path after three slashes, as in shared:///run/app/limits")
    only(options, ("max_keys", "log_entries"), url)
    kind = import_store("shared", "SharedStore", url)
    return kind(unquote(parts.path), **{name: number(name, value, url) for name, value in options.items()})  # type: ignore[no-any-return]


def redis(url: str, parts: SplitResult, options: Options) -> Store:
    for name in options:
        meant = nearest(name, WRAPPING, 0.75)
        if meant is not None:
            raise ConfigurationError(f"{masked(url)}: unknown option {name!r}; did you mean {meant}=?")
    kind = import_store("redis", "RedisStore", url)
    base = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return kind(f"{base}?{urlencode(options)}" if options else base)  # type: ignore[no-any-return]


def sharded(url: str, parts: SplitResult, options: Options) -> Store:
    """One Redis store per host, with the same credentials, database and options."""
    login, at, hosts = parts.netloc.rpartition("@")
    each = [host for host in hosts.split(",") if host]
    if len(each) < 2:
        raise ConfigurationError(f"{masked(url)}: expected at least two hosts, as in {parts.scheme}://one,two,three/0")
    kind = import_store("sharded", "ShardedStore", url)
    scheme = parts.scheme.removeprefix(SHARDED)
    stores = [redis(url, parts._replace(scheme=scheme, netloc=login + at + host), options) for host in each]
    return kind(stores)  # type: ignore[no-any-return]


def import_store(module: str, name: str, url: str) -> Any:
    """Imports a store's class; the error for a missing dependency names the extra to install."""
    try:
        return getattr(import_module(f".{module}", __package__), name)
    except ImportError as error:
        remedy = "" if "pip install" in str(error) else "; pip install 'limitkeeper[redis]'" if module == "redis" else ""
        raise ConfigurationError(f"{masked(url)}: can't import {name}: {error}{remedy}") from error


# Wrappers ----------------------------------------------------------------------------------------------------------


def wrapped(store: Store, wrapping: Options, url: str) -> Store:
    """Wraps the store in a LeasedStore, then in a GuardedStore, as the options say."""
    if "lease" in wrapping:
        keywords: dict[str, Any] = {"lease": None if wrapping["lease"] == "auto" else number("lease", wrapping["lease"], url)}
        if "life" in wrapping:
            keywords["life"] = duration("life", wrapping["life"], url)
        if "strict" in wrapping:
            keywords["strict"] = truth("strict", wrapping["strict"], url)
        store = import_store("leased", "LeasedStore", url)(store, **keywords)
    if "guard" in wrapping:
        from .guarded import GuardedStore

        keywords = {"share": wrapping.get("share")}
        if "budget" in wrapping:
            keywords["budget"] = duration("budget", wrapping["budget"], url)
        store = GuardedStore(store, on_failure=wrapping["guard"], **keywords)
    return store


# Parsing -----------------------------------------------------------------------------------------------------------


def masked(url: str) -> str:
    """The repr of a URL without passwords, for messages."""
    hidden = re.sub(r"://.*@", "://…@", url, flags=re.S)
    return repr(re.sub(r"(password=)[^&#]*", r"\1…", hidden, flags=re.I))


def options_of(query: str, url: str) -> Options:
    found: Options = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in found:
            raise ConfigurationError(f"{masked(url)}: duplicate option {name}=; give it once")
        found[name] = value
    return found


def only(options: Options, known: tuple[str, ...], url: str) -> None:
    for name in options:
        if name not in known:
            meant = nearest(name, (*known, *WRAPPING))
            hint = (
                f"did you mean {meant}=?" if meant else f"expected one of {', '.join(f'{one}=' for one in (*known, *WRAPPING))}"
            )
            raise ConfigurationError(f"{masked(url)}: unknown option {name!r}; {hint}")


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    from difflib import get_close_matches

    found = get_close_matches(word.lower(), list(known), 1, likeness)
    return found[0] if found else None


def number(name: str, text: str, url: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigurationError(f"{masked(url)}: {name} must be a whole number, at least 1, got {text!r}")
    return int(text)


def truth(name: str, text: str, url: str) -> bool:
    if text.lower() not in ("1", "true", "yes", "0", "false", "no"):
        raise ConfigurationError(f"{masked(url)}: {name} must be true or false, got {text!r}")
    return text.lower() in ("1", "true", "yes")


def duration(name: str, text: str, url: str) -> float | str:
    """Validates a duration given as text ("20ms") or in seconds ("0.02")."""
    try:
        value: float | str = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text
        duration_us(value)
        return value
    except InvalidLimit:
        raise ConfigurationError(f"{masked(url)}: {name} must be a duration, got {text!r}; write it like {name}=20ms") from None
