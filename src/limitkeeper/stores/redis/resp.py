"""RESP, the protocol of Redis and Valkey: packs commands, parses replies, and explains error replies.

hiredis packs commands in C and is imported only here. Commands are sent over connections of our own: one EVALSHA of a minimal
token-bucket script costs the caller 46 µs of CPU through redis-py 8, and 9 µs through a bare non-blocking socket (poll, send,
poll, receive, parse). Replies are parsed here: hiredis allocates what a header declares, so that the 13 bytes `*1000000000` of a
corrupt reply cost it 8 GB and 6 s with the interpreter locked. Nearly all replies are one short bulk string, which `SHORT` finds
in less time than hiredis.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

try:
    import hiredis
except ModuleNotFoundError:  # reported by `require_hiredis`, when a RedisStore is made
    hiredis = None  # type: ignore[assignment]

from ...errors import StoreError, StoreTimeout, StoreUnavailable
from ..sans_io import Call, Plan
from .address import Endpoint, Login

#: Numbers are passed as bytes: hiredis formats an `int` with `str()`, where a pending signal handler may raise, and crashes then.
Command = Sequence[bytes | str]
#: A parsed reply: bytes, int, None, a ReplyError, or a list of these.
Reply = Any
T = TypeVar("T")


class _Missing(Exception):
    pass


ReplyError: type[Exception] = getattr(hiredis, "ReplyError", _Missing)
ProtocolError: type[Exception] = getattr(hiredis, "ProtocolError", _Missing)
pack_command: Callable[[tuple[bytes | str, ...]], bytes] = getattr(hiredis, "pack_command", lambda command: b"")


#: First five bytes of a bulk string of 10 to 999 bytes -> the length of the whole reply, and where its content begins.
SHORT = {(b"$%d\r\n" % size)[:5]: (size + len(b"$%d\r\n\r\n" % size), len(b"$%d\r\n" % size)) for size in range(10, 1000)}
#: Most bytes of one reply (each element counts as 256 more) and of one line, and the deepest nesting of arrays.
MAX_REPLY, MAX_LINE, MAX_DEPTH = 64 << 20, 64 << 10, 8


class Parser:
    """Parses replies in time and memory that follow what has arrived. `feed` it bytes; `gets` returns a reply, or False when it
    is incomplete. Error replies are `ReplyError` values. `data` is what is not parsed yet, `arrays` what is incomplete."""

    __slots__ = ("_size", "arrays", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self.arrays: list[tuple[list[Reply], int]] = []  # incomplete arrays with their lengths, the outermost first
        self._size = 0  # of the elements that these hold

    def feed(self, data: bytes) -> None:
        self.data += data
        if self._size + len(self.data) > MAX_REPLY:
            raise ProtocolError(f"a reply is larger than {MAX_REPLY} bytes")

    def gets(self) -> Reply:
        data, arrays = self.data, self.arrays
        while (end := data.find(b"\r\n", 0, MAX_LINE)) >= 0:
            kind, line, used = data[:1], bytes(data[1:end]), end + 2
            try:
                number = int(line) if kind in b":$*" else 0
            except ValueError:
                raise ProtocolError(f"expected a number, got {line[:32]!r}") from None
            if number > (MAX_REPLY if kind == b"$" else MAX_REPLY // 256) and kind in b"$*":
                raise ProtocolError(f"{bytes(kind)!r} declares {number}: a reply is larger than {MAX_REPLY} bytes")
            reply: Reply = None
            if kind == b"$" and number >= 0:
                used += number + 2
                if len(data) < used:
                    return False
                reply = bytes(data[end + 2 : used - 2])
            elif kind == b"*" and number >= 0:
                reply = []
            elif kind not in b"$*":
                reply = number if kind == b":" else line if kind == b"+" else ReplyError(line.decode(errors="replace"))
            if kind == b"H" and line.startswith(b"TTP/"):
                raise ProtocolError("the server speaks HTTP; write its Redis port, which is 7071 in a limitkeeper service")
            if kind not in b"+-:$*" or len(arrays) > MAX_DEPTH:
                raise ProtocolError(f"unexpected {line[:32]!r} after {bytes(kind)!r}")
            del data[:used]
            self._size += used + 256
            if kind == b"*" and number > 0:
                arrays.append((reply, number))
                continue
            while arrays:
                arrays[-1][0].append(reply)
                if len(arrays[-1][0]) < arrays[-1][1]:
                    break
                reply = arrays.pop()[0]
            else:
                self._size = 0
                return reply
        if len(data) >= MAX_LINE:
            raise ProtocolError(f"a line is longer than {MAX_LINE} bytes")
        return False


class Unsent(NamedTuple):
    """The result of an exchange that failed before anything was sent: it may be made again."""

    error: StoreError


#: What a plan is sent for an `exchange`: the replies, or why there are none.
Outcome = list[Reply] | StoreError | Unsent


class NotYet(StoreUnavailable):
    """Nothing was done because of something that takes a moment."""


class OutOfTime(StoreTimeout):
    """The budget was over before anything was sent: this says nothing about the server."""


class TooManyConnections(NotYet):
    """No connection is free: neither one of ours nor one of the server's."""


def exchange(endpoint: Endpoint, login: Login, commands: Sequence[Command], share: int = 1) -> Call:
    """For plans (see `sans_io.py`): commands for one server, sent in one write. It may take 1/share of what is left of the
    budget."""
    return Call(endpoint, "exchange", (login, commands, share))


def error_of(outcome: Outcome) -> StoreError | None:
    return outcome.error if isinstance(outcome, Unsent) else None if isinstance(outcome, list) else outcome


def ask(endpoint: Endpoint, login: Login, command: Command, share: int = 1) -> Plan[Reply]:
    """The reply of one server to one command, or the error."""
    (outcome,) = yield [exchange(endpoint, login, [command], share)]
    return outcome[0] if isinstance(outcome, list) else error_of(outcome)


def decode_reply(reply: Reply, decode: Callable[[Reply], T], source: object) -> T:
    """What `decode` makes of a reply; StoreUnavailable where the reply has another shape than it expects."""
    try:
        return decode(reply)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, struct.error):
        raise StoreUnavailable(f"{source} gave an unexpected reply: {str(reply)[:200]!r}") from None


def decode_endpoint(host: bytes | str, port: bytes | int | str) -> Endpoint:
    """A server that another one names; ValueError when it can't be one."""
    if not 0 < int(port) < 65536:
        raise ValueError(f"no port: {port!r}")
    return Endpoint(host if isinstance(host, str) else host.decode(), int(port))


#: Error replies of a replica: nothing was done.
REPLICA = ("READONLY", "MASTERDOWN")
_LACKS = "the user lacks a permission: allow +@scripting +@read +@write +@connection +time on the prefix's keys"
#: Kind of an error reply, or words in it -> what to do about it.
REMEDIES = {
    "NOAUTH": "it requires a password: use redis://:password@host or redis://user:password@host",
    "WRONGPASS": "it rejects this user or password: correct those of the URL",
    "NOPERM": _LACKS,
    "ACL failure": _LACKS,
    "user executing the script": _LACKS,  # the same in Redis 6.2
    "READONLY": "it is a replica: connect to the primary, or use redis+sentinel:// to find it",
    "LOADING": "it is still loading its data",
    "BUSY": "another script is running for too long",
    "OOM": "it is out of memory: raise maxmemory; leave maxmemory-policy at noeviction, since evicting a key resets its limit",
    "MISCONF": "it refuses writes because it can't save: see its log",
    "NOREPLICAS": "it refuses writes while too few replicas are connected",
    "CLUSTERDOWN": "its cluster does not serve all slots",
    "MASTERDOWN": "it has lost its primary",
    "CROSSSLOT": "it is a node of a cluster: use redis+cluster://",
    "MOVED": "it is a node of a cluster: use redis+cluster://",
    "max number of clients": "raise its maxclients, or lower max_connections of this and other clients",
    "without any password": "it has no password set: leave it out of the URL",
    "DB index": "it has no such database: lower the number in the URL, or raise its databases",
}


def require_hiredis(store: str = "RedisStore") -> None:
    if hiredis is None:
        raise ModuleNotFoundError(f"{store} needs hiredis: pip install 'limitkeeper[redis]'", name="hiredis")


def pack(commands: Sequence[Command]) -> bytes:
    """Commands as bytes to send."""
    return b"".join([pack_command(tuple(command)) for command in commands])


def error_kind(error: Exception) -> str:
    """The first word of an error reply."""
    return str(error).split(" ", 1)[0]


def is_replica(replies: Sequence[Reply]) -> bool:
    """Whether a server says that it is a replica. Its name, or a proxy at its address, may lead to the new primary by now."""
    return any(isinstance(reply, ReplyError) and error_kind(reply) in REPLICA for reply in replies)


def unavailable(error: Exception, where: object) -> StoreUnavailable:
    """An error reply as the error that the store raises, with its remedy."""
    text = str(error)
    words = next((words for words in REMEDIES if words in text and " " in words), error_kind(error))
    return StoreUnavailable(f"{where} answered {text!r}" + (f"; {REMEDIES[words]}" if words in REMEDIES else ""))


def first_commands(login: Login) -> list[list[str]]:
    """What is sent on a new connection: the login, and PING, since a server without room for a client says so in a reply."""
    return [*login.commands(), ["PING"]]


def check_accepted(reply: Reply, endpoint: Endpoint) -> None:
    """Raises the error that a server sends, before it closes a new connection, when it has no room for another client."""
    if isinstance(reply, ReplyError) and "max number of clients" in str(reply):
        raise TooManyConnections(*unavailable(reply, endpoint).args)


def check_login(outcome: Outcome, endpoint: Endpoint) -> None:
    """Raises the error in the replies to `first_commands`. A user may lack the permission for PING: any reply to it will do."""
    for reply in outcome[:-1] if isinstance(outcome, list) else [error_of(outcome)]:
        if isinstance(reply, Exception):
            raise unavailable(reply, endpoint) if isinstance(reply, ReplyError) else reply


def connect_error(error: BaseException, endpoint: Endpoint) -> StoreError | None:
    """What the store raises when connecting ends with this error; None: the error itself."""
    if isinstance(error, StoreTimeout | TimeoutError):
        return not_connected(endpoint)
    if isinstance(error, OSError | ProtocolError):
        return StoreUnavailable(f"{endpoint} can't be reached: {error}")
    return error if isinstance(error, StoreError) else None


def not_connected(endpoint: Endpoint) -> StoreTimeout:
    return StoreTimeout(
        f"{endpoint} did not accept a connection within the budget: it hangs or is busy, or only one side uses TLS"
    )


def out_of_time(endpoint: Endpoint) -> OutOfTime:
    return OutOfTime(f"{endpoint}: the budget was over before the request was sent")


def timed_out(endpoint: Endpoint) -> StoreTimeout:
    return StoreTimeout(f"{endpoint} did not answer within the budget; the outcome is unknown")


def lost(endpoint: Endpoint, error: object) -> StoreUnavailable:
    return StoreUnavailable(f"{endpoint}: the connection is lost ({error or 'closed by the server'})")
