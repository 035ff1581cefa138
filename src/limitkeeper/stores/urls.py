"""store_from_url: creates a store, and the wrappers around it, from a URL.

    memory://?max_keys=50000                                     in this process
    shared:///dev/shm/app.limits?max_keys=…&log_entries=…        all processes of this host
    redis://host:6379/0   rediss://…   unix:///run/redis.sock    one server (also valkey://), with prefix=, timeout=, …
    redis+cluster://a,b,c   redis+sentinel://a,b/service         a cluster, or a primary found by Sentinel
    sharded+redis://a,b,c/0   sharded+limitkeeper://a,b,c        independent servers, or nodes of a service
    limitkeeper://:token@host:7071   limitkeepers://…            a limitkeeper service, with timeout=, …

All of them take `guard=open|closed|local` with `share=` and `budget=`, and `lease=50|auto` with `life=` and `strict=`; the guard
wraps the lease. An invalid URL raises a ConfigurationError that names the part and what was expected, without passwords.
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
SERVICE = ("limitkeeper", "limitkeepers")
SHARDED = "sharded+"
WRAPPERS = {"guard": ("share", "budget"), "lease": ("life", "strict")}
WRAPPING = (*WRAPPERS, *(option for options in WRAPPERS.values() for option in options))
Options = dict[str, str]


def store_from_url(url: str) -> Store:
    """Creates a store from its URL: "memory://", "shared:///dev/shm/a", "redis://host/0?guard=local&share=1/4&lease=50", …"""
    if not isinstance(url, str):
        raise ConfigurationError(f"a store's URL must be a string such as 'memory://', got {url!r}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(f"{masked(url)}: {error}; write it like redis://host:6379/0") from None
    if url.startswith("${"):
        raise ConfigurationError(f"{url!r}: variables are replaced in policy files only; write os.environ[{url.strip('${}')!r}]")
    make = maker_of(parts.scheme, url)
    try:
        check_login(parts)
    except ConfigurationError as error:
        raise ConfigurationError(f"{masked(url)}: {error}") from None
    options = options_of(parts.query, url)
    wrapping = {name: options.pop(name) for name in WRAPPING if name in options}
    for wrapper, more in WRAPPERS.items():
        for name in more:
            if name in wrapping and wrapper not in wrapping:
                raise ConfigurationError(f"{masked(url)}: {name}= requires {wrapper}=; add {wrapper}=… or remove it")
    store = make(url, parts, options)
    try:
        return wrapped(store, wrapping, url)
    except (ConfigurationError, InvalidLimit) as error:
        store.close()
        message = str(error).removeprefix(f"{masked(url)}: ")
        raise ConfigurationError(f"{masked(url)}: {message}") from None


def open_store(store: Store | str | None) -> Store:
    """The store of a `store=` argument: a store, its URL, or None for a new one in this process."""
    if isinstance(store, Store):
        return store
    if not isinstance(store, str | None):
        remedy = ""
        if isinstance(store, type):
            remedy = f"; write {store.__name__}(…)"
        elif type(store).__module__.partition(".")[0] in ("redis", "valkey"):
            remedy = "; write RedisStore(client)"
        raise ConfigurationError(f"store must be a store or a URL such as 'memory://', got {store!r}{remedy}")
    return store_from_url("memory://" if store is None else store)


# Stores ------------------------------------------------------------------------------------------------------------


def memory(url: str, parts: SplitResult, options: Options) -> Store:
    from .worker_warning import memory_store

    if parts.netloc or parts.path.strip("/"):
        raise ConfigurationError(f"{masked(url)}: memory:// takes no host and no path, only ?max_keys=…")
    only(options, ("max_keys",), url)
    return memory_store(**{name: number(name, value, url) for name, value in options.items()})


def shared(url: str, parts: SplitResult, options: Options) -> Store:
    if parts.netloc or len(parts.path) < 2:
        raise ConfigurationError(
            f"{masked(url)}: expected an absolute path after three slashes, as in shared:///dev/shm/app.limits"
        )
    only(options, ("max_keys", "log_entries"), url)
    kind = import_store("shared", "SharedStore", url)
    return kind(unquote(parts.path), **{name: number(name, value, url) for name, value in options.items()})  # type: ignore[no-any-return]


def redis(url: str, parts: SplitResult, options: Options) -> Store:
    for name in options:
        meant = nearest(name, WRAPPING, 0.75)
        if meant is not None:
            raise ConfigurationError(f"{masked(url)}: unknown option {name!r}; did you mean {meant}=?")
    is_service = parts.scheme in SERVICE
    kind = import_store(*(("remote", "RemoteStore") if is_service else ("redis", "RedisStore")), url)
    base = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return kind(f"{base}?{urlencode(options)}" if options else base)  # type: ignore[no-any-return]


def sharded(url: str, parts: SplitResult, options: Options) -> Store:
    """One store per host, with the same credentials, database and options."""
    login, at, hosts = parts.netloc.rpartition("@")
    each = [host for host in hosts.split(",") if host]
    if len(each) < 2:
        raise ConfigurationError(f"{masked(url)}: expected at least two hosts, as in {parts.scheme}://one,two,three/0")
    kind = import_store("sharded", "ShardedStore", url)
    scheme = parts.scheme.removeprefix(SHARDED)
    stores = [redis(url, parts._replace(scheme=scheme, netloc=login + at + host), options) for host in each]
    return kind(stores)  # type: ignore[no-any-return]


Maker = Callable[[str, SplitResult, Options], Store]
SCHEMES: dict[str, Maker] = {"memory": memory, "shared": shared, **dict.fromkeys((*REDIS, *REDIS_TOPOLOGIES, *SERVICE), redis)}
SCHEMES |= {SHARDED + scheme: sharded for scheme in (*REDIS[:4], *SERVICE)}


def maker_of(scheme: str, url: str) -> Maker:
    if scheme in SCHEMES:
        return SCHEMES[scheme]
    meant = nearest(scheme or url.partition(":")[0], SCHEMES)
    remedy = f"did you mean {meant}://?" if meant else f"expected one of {', '.join(one + '://' for one in SCHEMES)}"
    if url and not meant and "://" not in url:
        remedy = f"did you mean {masked(('shared://' if url.startswith('/') else 'redis://') + url)}?"
    if scheme in ("http", "https"):
        remedy = "a store asks the Redis port of a service: write limitkeeper://host:7071"
    raise ConfigurationError(f"{masked(url)}: unknown scheme {scheme!r}; {remedy}")


def import_store(module: str, name: str, url: str) -> Any:
    """Imports a store's class; the error for a missing dependency names the extra to install."""
    try:
        return getattr(import_module(f".{module}", __package__), name)
    except ImportError as error:
        remedy = (
            "" if "pip install" in str(error) else "; pip install 'limitkeeper[redis]'" if module in ("redis", "remote") else ""
        )
        raise ConfigurationError(f"{masked(url)}: can't import {name}: {error}{remedy}") from error


# Wrappers ----------------------------------------------------------------------------------------------------------


def wrapped(store: Store, wrapping: Options, url: str) -> Store:
    """Wraps the store in a LeasedStore, then in a GuardedStore, as the options say."""
    given = {name: PARSERS[name](name, value, url) for name, value in wrapping.items()}
    if "lease" in given:
        lease = {name: given[name] for name in ("lease", *WRAPPERS["lease"]) if name in given}
        store = import_store("leased", "LeasedStore", url)(store, **lease)
    if "guard" in given:
        guard = {name: given[name] for name in WRAPPERS["guard"] if name in given}
        store = import_store("guarded", "GuardedStore", url)(store, on_failure=given["guard"], **guard)
    return store


# Parsing -----------------------------------------------------------------------------------------------------------


def without_passwords(url: str) -> str:
    hidden = re.sub(r"^((?:[^:/?#]*://)?).*@", r"\1…@", url, flags=re.S)
    return re.sub(r"(password=)[^&#]*", r"\1…", hidden, flags=re.I)


def check_login(parts: SplitResult) -> None:
    """Refuses an '@' behind the address: a '/', '?' or '#' in the password has ended that, and messages would show the rest of it
    as a port, a database or an option."""
    rest = "" if parts.scheme.endswith(("unix", "shared")) else parts.path
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if parts.fragment or "@" in "".join([rest, *names]):
        raise ConfigurationError("in a user name, a password or a path write '/', '?', '#' and '@' as %2F, %3F, %23 and %40")


def masked(url: str) -> str:
    """The repr of a URL without passwords, for messages."""
    return repr(without_passwords(url))


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


#: Option of a wrapper -> how its text is read.
PARSERS: dict[str, Callable[[str, str, str], Any]] = {
    "lease": lambda name, text, url: None if text == "auto" else number(name, text, url),
    **dict.fromkeys(("life", "budget"), duration),
    "strict": truth,
    **dict.fromkeys(("guard", "share"), lambda name, text, url: text),
}
