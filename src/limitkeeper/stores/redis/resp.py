"""RESP, the language of Redis and Valkey: how commands are written, how answers are read, and what an error reply means.

hiredis does both in C and is imported here and nowhere else. Commands travel over connections of our own: one EVALSHA of a
minimal token-bucket script costs the caller 46 µs of CPU through redis-py 8, 9 µs through a bare non-blocking socket with
hiredis (poll, send, poll, receive, parse), and a decision is nothing but such calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

try:
    import hiredis
except ModuleNotFoundError:  # told to whoever makes a RedisStore, not to whoever imports its name
    hiredis = None  # type: ignore[assignment]

from ...errors import StoreUnavailable

ReplyError: Any = Exception if hiredis is None else hiredis.ReplyError
ProtocolError: Any = Exception if hiredis is None else hiredis.ProtocolError
#: Numbers are passed as bytes: hiredis formats an `int` with `str()`, where a pending signal handler may raise, and crashes then.
Command = Sequence[bytes | str]

#: What these replies say was not done: it may be asked again, here or elsewhere, without being done twice.
UNDONE = frozenset(
    (
        "ASK",
        "BUSY",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MOVED",
        "NOSCRIPT",
        "READONLY",
        "TRYAGAIN",
        "NOREPLICAS",
        "CROSSSLOT",
    )
)
REMEDIES = {
    "NOAUTH": "it asks for a password: write redis://:password@host or redis://user:password@host",
    "WRONGPASS": "it does not know this user or password: correct those of the URL",
    "NOPERM": "this user may not do that: allow it +@scripting +@read +@write +@connection +time on the prefix's keys",
    "READONLY": "it is a replica: connect to the primary, or use redis+sentinel:// to be led there",
    "LOADING": "it is still loading its data",
    "BUSY": "another script is running for too long",
    "OOM": "it is out of memory: raise maxmemory, or set a maxmemory-policy that evicts",
    "MISCONF": "it refuses writes because it can't save: see its log",
    "NOREPLICAS": "it refuses writes while too few replicas are connected",
    "CLUSTERDOWN": "its cluster does not serve all slots",
    "MASTERDOWN": "it has lost its primary",
    "CROSSSLOT": "it is a node of a cluster: use redis+cluster://",
    "MOVED": "it is a node of a cluster: use redis+cluster://",
}


def required() -> None:
    """Says what to install, where it is not."""
    if hiredis is None:
        raise ModuleNotFoundError("RedisStore needs hiredis: pip install 'limitkeeper[redis]'", name="hiredis")


_packed: Callable[[tuple[bytes | str, ...]], bytes] = getattr(hiredis, "pack_command", lambda command: b"")


def pack(commands: Sequence[Command]) -> bytes:
    """Commands as they travel."""
    if len(commands) == 1:
        return _packed(tuple(commands[0]))
    return b"".join([_packed(tuple(command)) for command in commands])


def call_bytes(sha: bytes, keys: list[bytes], body: bytes) -> bytes:
    """EVALSHA as it travels."""
    return _packed((b"EVALSHA", sha, b"%d" % len(keys), *keys, body))


def reader() -> Any:
    """A parser: `feed` it bytes, `gets` gives a reply or False. Error replies come as `ReplyError` values."""
    return hiredis.Reader()


def word(error: Any) -> str:
    """The first word of an error reply, which says its kind."""
    return str(error).split(" ", 1)[0]


def unavailable(error: Any, where: object) -> StoreUnavailable:
    """An error reply as the error that leaves the store, with the remedy in its text."""
    kind, text = word(error), str(error)
    remedy = REMEDIES.get(kind)
    if remedy is None and "without any password" in text:
        remedy = "it has no password set: leave it out of the URL"
    elif remedy is None and "DB index" in text:
        remedy = "it has no such database"
    return StoreUnavailable(f"{where} answered {text!r}" + (f"; {remedy}" if remedy else ""))
