"""RESP, the protocol of Redis and Valkey: packs commands, parses replies, and explains error replies.

hiredis does the packing and parsing in C and is imported only here. Commands are sent over connections of our own: one EVALSHA
of a minimal token-bucket script costs the caller 46 µs of CPU through redis-py 8, and 9 µs through a bare non-blocking socket
with hiredis (poll, send, poll, receive, parse).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

try:
    import hiredis
except ModuleNotFoundError:  # reported by `require_hiredis`, when a RedisStore is made
    hiredis = None  # type: ignore[assignment]

from ...errors import StoreError, StoreUnavailable
from ..sans_io import Call
from .address import Endpoint, Login

#: Numbers are passed as bytes: hiredis formats an `int` with `str()`, where a pending signal handler may raise, and crashes then.
Command = Sequence[bytes | str]
#: A parsed reply: bytes, int, None, a ReplyError, or a list of these.
Reply = Any


class _Missing(Exception):
    pass


ReplyError: type[Exception] = getattr(hiredis, "ReplyError", _Missing)
ProtocolError: type[Exception] = getattr(hiredis, "ProtocolError", _Missing)
pack_command: Callable[[tuple[bytes | str, ...]], bytes] = getattr(hiredis, "pack_command", lambda command: b"")


class Unsent(NamedTuple):
    """The result of an exchange that failed before anything was sent: it may be made again."""

    error: StoreError


#: What a plan is sent for an `exchange`: the replies, or why there are none.
Outcome = list[Reply] | StoreError | Unsent


def exchange(endpoint: Endpoint, login: Login, commands: Sequence[Command]) -> Call:
    """For plans (see `sans_io.py`): commands for one server, sent in one write."""
    return Call(endpoint, "exchange", (login, commands))


def first_reply(outcome: Outcome) -> Reply:
    """The only reply of an exchange, or its error."""
    if isinstance(outcome, Unsent):
        return outcome.error
    return outcome[0] if isinstance(outcome, list) else outcome


class Parser(Protocol):
    """`feed` it bytes; `gets` returns a reply, or False when it is incomplete. Error replies are `ReplyError` values."""

    def feed(self, data: bytes, /) -> None: ...

    def gets(self) -> Reply: ...


#: Kind of an error reply -> what to do about it.
REMEDIES = {
    "NOAUTH": "it requires a password: use redis://:password@host or redis://user:password@host",
    "WRONGPASS": "it rejects this user or password: correct those of the URL",
    "NOPERM": "the user lacks a permission: allow +@scripting +@read +@write +@connection +time on the prefix's keys",
    "READONLY": "it is a replica: connect to the primary, or use redis+sentinel:// to find it",
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


def require_hiredis() -> None:
    if hiredis is None:
        raise ModuleNotFoundError("RedisStore needs hiredis: pip install 'limitkeeper[redis]'", name="hiredis")


def pack(commands: Sequence[Command]) -> bytes:
    """Commands as bytes to send."""
    if len(commands) == 1:
        return pack_command(tuple(commands[0]))
    return b"".join([pack_command(tuple(command)) for command in commands])


def new_parser() -> Parser:
    return hiredis.Reader()


def error_kind(error: Exception) -> str:
    """The first word of an error reply."""
    return str(error).split(" ", 1)[0]


def unavailable(error: Exception, where: object) -> StoreUnavailable:
    """An error reply as the error that the store raises, with its remedy."""
    text = str(error)
    remedy = REMEDIES.get(error_kind(error))
    if remedy is None and "without any password" in text:
        remedy = "it has no password set: leave it out of the URL"
    elif remedy is None and "DB index" in text:
        remedy = "it has no such database"
    return StoreUnavailable(f"{where} answered {text!r}" + (f"; {remedy}" if remedy else ""))
