"""RESP, the Redis protocol: every Redis client is a client of the service.

    LK.HIT limit key [cost] [TIER tier]        -> [allowed, limit, remaining, retry_after, reset_after]    times in ms, rounded up
    LK.PEEK limit key [cost] [TIER tier]       -> the same; nothing is charged
    LK.RESERVE limit key cost [MAXWAIT ms] …   -> the same, then wait (ms) and a token; the token is "" when it was refused
    LK.SETTLE token used · LK.REFUND token · LK.REFUND limit key [cost] · LK.RESET limit key   -> 1, or 0 when nothing was done
    CL.THROTTLE key max_burst count period [quantity]     -> redis-cell's five integers; times in s, rounded up

allowed is 1 or 0; limit and remaining are -1 where nothing limits; a retry_after of -1 is never (CL.THROTTLE: allowed). Besides:
PING ECHO HELLO AUTH INFO COMMAND CONFIG CLIENT SELECT QUIT, and MULTI EXEC DISCARD: the commands after MULTI are queued, and
decided in order at EXEC, as a pipeline. Commands that arrive together are decided together and answered in one write. On a
remote store all LK.HIT of a pipeline that follow one another are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from hmac import compare_digest
from typing import Any

from ..decision import Decision
from ..errors import StoreError
from ..limiter_base import COMPILED
from ..policy.calls_by_rule_name import RuleHit
from ..policy.evaluation import Evaluation
from ..stores.sans_io import arun
from .app import INVALID, MAX_CHECKS, Application, RequestError, Reserved, decision_of
from .connections import Connection, Listener, log
from .resp_fast import FastHits
from .resp_parser import MAX_ARGUMENTS, CommandParser, ProtocolError

OK, PONG, EMPTY = b"+OK\r\n", b"+PONG\r\n", b"*0\r\n"
FULL = b"-ERR max number of clients reached\r\n"
NO_AUTH = b"-NOAUTH Authentication required.\r\n"
DECISION = b"*5\r\n:%d\r\n:%d\r\n:%d\r\n:%d\r\n:%d\r\n"
#: Commands that need no authentication; and those that are not queued after MULTI.
OPEN = frozenset({b"AUTH", b"HELLO", b"QUIT"})
NOT_QUEUED = frozenset({b"MULTI", b"EXEC", b"DISCARD", b"QUIT"})
#: The largest command, and its most arguments, before authentication.
OPEN_SIZE, OPEN_ARGUMENTS = 16_384, 10
UTF_8 = ("utf-8", "surrogateescape")
USAGE = {
    b"LK.HIT": "LK.HIT limit key [cost] [TIER tier]",
    b"LK.PEEK": "LK.PEEK limit key [cost] [TIER tier]",
    b"LK.RESERVE": "LK.RESERVE limit key cost [MAXWAIT ms] [TIER tier]",
    b"LK.SETTLE": "LK.SETTLE token used",
    b"LK.REFUND": "LK.REFUND token, or LK.REFUND limit key [cost]",
    b"LK.RESET": "LK.RESET limit key",
    b"CL.THROTTLE": "CL.THROTTLE key max_burst count period [quantity]",
}
#: In the place of a command's name: it could not be parsed. Compared by identity, so that no name from a client equals it.
MALFORMED = b"malformed"
Arguments = list[bytes]
Reply = bytes | Coroutine[Any, Any, bytes]
CommandTable = dict[bytes, Callable[["RespConnection", Arguments], Any]]


class RespConnection(Connection):
    """Parses the commands of one client."""

    def __init__(self, commands: Commands, listener: Listener) -> None:
        super().__init__(listener)
        self.commands = commands
        #: The commands that are answered at once: none before authentication and after MULTI.
        self.table: CommandTable = {}
        self.queue: list[Arguments] | None = None  # the commands after MULTI; None: there was no MULTI
        self._queued_bytes = 0  # -1: a command after MULTI had an error
        self.version, self.name, self.id = 2, b"", listener.accepted
        self._parser = CommandParser(min(OPEN_SIZE, listener.settings.max_body), OPEN_ARGUMENTS)
        self.authenticated = self.admin = False
        if commands.token is None:
            self.authenticate()

    def authenticate(self) -> None:
        self.authenticated = True
        self.leave_queue()
        self._parser.max_size, self._parser.max_arguments = self.listener.settings.max_body, MAX_ARGUMENTS
        self._parser.larger = self.commands.larger(self.admin)

    def receive(self, data: bytes) -> None:
        found: list[Arguments] = []
        try:
            self._parser.feed(data, found)
        except ProtocolError as error:
            self.listener.malformed += 1
            found.append([MALFORMED, str(error).encode()])
            self._parser = CommandParser(OPEN_SIZE, OPEN_ARGUMENTS)
        if found or not self.partial:
            self.since = self.listener.tick
        self.partial = self._parser.partial
        self.waiting.extend(found)
        if self.pending:
            self._read_or_wait()
        elif found:
            self.work()

    def answer(self, arguments: Arguments) -> Reply:
        handler = self.table.get(arguments[0])
        return self._answer_other(arguments) if handler is None else handler(self, arguments)

    def _answer_other(self, arguments: Arguments) -> Reply:
        """A command in lower case, before authentication, after MULTI, or none at all."""
        name = arguments[0].upper()
        if arguments[0] is MALFORMED:
            self.closing = True
            return b"-ERR Protocol error: %b\r\n" % arguments[1]
        if not self.authenticated and name not in OPEN:
            return NO_AUTH
        handler = self.commands.table.get(name)
        if handler is None:
            self._queued_bytes = -1
            return error(
                f"unknown command {shown(arguments[0])}; this is the limitkeeper service, not Redis: use LK.HIT limit key, "
                "and as a store limitkeeper://host:port"
            )
        if self.queue is not None and name not in NOT_QUEUED:
            return self._enqueue(self.queue, arguments)
        reply: Reply = handler(self, arguments)
        return reply

    # Transactions ----------------------------------------------------------------------------------------------

    def enter_queue(self) -> None:
        self.table, self.queue, self._queued_bytes, self.fast = {}, [], 0, None

    def leave_queue(self) -> list[Arguments] | None:
        """The queued commands; None when one of them had an error."""
        queue = self.queue if self._queued_bytes >= 0 else None
        self.queue, self._queued_bytes = None, 0
        if self.authenticated:
            self.table, self.fast = self.commands.table, self.commands.fast
        return queue

    def _enqueue(self, queue: list[Arguments], arguments: Arguments) -> bytes:
        if self._queued_bytes >= 0:
            self._queued_bytes += sum(map(len, arguments)) + 8 * len(arguments)
            queue.append(arguments)
        if self._queued_bytes > self.listener.settings.max_body:
            self._queued_bytes = -1
            queue.clear()
            return error(f"a transaction is larger than {self.listener.settings.max_body} bytes; use a pipeline without MULTI")
        return b"+QUEUED\r\n"

    def failure(self, arguments: Arguments, error: Exception) -> bytes:
        return failed(error)


class Commands:
    """The commands over an Application. `token`: what clients must present with AUTH or HELLO, None: nothing."""

    def __init__(self, app: Application, token: str | None = None) -> None:
        self.app = app
        self.token = None if token is None else token.encode()
        self._info_at = -1, b""
        self.sizes: dict[bytes, int] = {}  # of commands that administrators, or with `open_store` all, may make larger
        self.open_store = False
        plain = COMPILED and type(app) is Application  # another one may restrict what a client does
        self.fast = FastHits(app, encoded, failed) if plain else None
        self.table: CommandTable = {
            b"LK.HIT": self._hit,
            b"LK.PEEK": self._peek,
            b"LK.RESERVE": self._reserve,
            b"LK.SETTLE": self._settle,
            b"LK.REFUND": self._refund,
            b"LK.RESET": self._reset,
            b"CL.THROTTLE": self._throttle,
            b"PING": lambda _, arguments: bulk(arguments[1]) if len(arguments) > 1 else PONG,
            b"ECHO": lambda _, arguments: bulk(exactly(arguments, 2)[1]),
            b"HELLO": self._hello,
            b"AUTH": self._auth,
            b"INFO": self._info,
            b"COMMAND": self._command,
            b"CONFIG": lambda _, arguments: EMPTY,
            b"CLIENT": self._client,
            b"SELECT": self._select,
            b"QUIT": self._quit,
            b"MULTI": self._multi,
            b"EXEC": self._exec,
            b"DISCARD": self._discard,
        }

    def larger(self, admin: bool) -> Mapping[bytes, int]:
        """The commands of a connection that may be larger than `max_body`, and their largest sizes."""
        return self.sizes if admin or self.open_store else {}

    def restricted(self) -> list[Commands]:
        """The commands of tokens that may use less than these."""
        return []

    def connection(self, listener: Listener) -> RespConnection:
        return RespConnection(self, listener)

    # Decisions -------------------------------------------------------------------------------------------------

    def _hit(self, connection: RespConnection, arguments: Arguments) -> Reply:
        """LK.HIT: the hot path. On a remote store the hits that follow it are decided in the same call."""
        if len(arguments) == 3:
            evaluation = self.app.hit_nowait(arguments[1].decode(*UTF_8), arguments[2].decode(*UTF_8), 1)
        else:
            evaluation = self.app.gate.hit_rule_nowait(*self._checked_hit(arguments))
        if evaluation is not None:
            return encoded(evaluation)
        batch, waiting = [arguments], connection.waiting
        while len(batch) < MAX_CHECKS and waiting and waiting[0][0].upper() == b"LK.HIT":
            batch.append(waiting.popleft())
        return self._hit_later(batch)

    async def _hit_later(self, batch: list[Arguments]) -> bytes:
        """Hits on a remote store, in one call. A command with an error does not affect the others."""
        replies: list[bytes] = []
        hits: list[RuleHit] = []
        for arguments in batch:
            try:
                hits.append(self._checked_hit(arguments))
                replies.append(b"")
            except RequestError as failure:
                replies.append(failed(failure))
        evaluations = iter(await arun(self.app.hit_many(hits)))
        return b"".join([one or encoded(next(evaluations)) for one in replies])

    def _checked_hit(self, arguments: Arguments, least: int = 3, options: tuple[bytes, ...] = (b"TIER",)) -> RuleHit:
        """limit key [cost] [TIER tier]"""
        if len(arguments) < least:
            raise wrong_number(arguments)
        position = 4 if len(arguments) > 3 and arguments[3].upper() not in options else 3
        cost = number(arguments[3], "cost") if position == 4 else 1
        given = option_values(arguments, position, options)
        tier = given.get(b"TIER")
        return self.app.checked_hit(text(arguments[1]), text(arguments[2]), cost, None if tier is None else text(tier))

    def _peek(self, connection: RespConnection, arguments: Arguments) -> Any:
        return self.app.perform(self.app.peek(self._checked_hit(arguments)), decision)

    def _reserve(self, connection: RespConnection, arguments: Arguments) -> Any:
        options = (b"TIER", b"MAXWAIT")
        hit = self._checked_hit(arguments, 4, options)
        wait = option_values(arguments, 4, options).get(b"MAXWAIT", b"0")
        return self.app.perform(self.app.reserve(hit, number(wait, "MAXWAIT") * 1000), reservation)

    def _settle(self, connection: RespConnection, arguments: Arguments) -> Any:
        _, token, used = exactly(arguments, 3)
        return self.app.perform(self.app.settle(text(token), self.app.checked_cost(number(used, "used"), "used")), one_or_zero)

    def _refund(self, connection: RespConnection, arguments: Arguments) -> Any:
        if len(arguments) == 2:
            return self.app.perform(self.app.cancel(text(arguments[1])), one_or_zero)
        return self.app.perform(self.app.refund(self._checked_hit(arguments)), one_or_zero)

    def _reset(self, connection: RespConnection, arguments: Arguments) -> Any:
        _, limit, key = exactly(arguments, 3)
        return self.app.perform(self.app.reset(text(limit), text(key)), lambda _: b":1\r\n")

    def _throttle(self, connection: RespConnection, arguments: Arguments) -> Any:
        if len(arguments) not in (5, 6):
            raise wrong_number(arguments)
        names = ("max_burst", "count_per_period", "period", "quantity")
        numbers = [number(value, name) for value, name in zip(arguments[2:], names, strict=False)]
        return self.app.perform(self.app.throttle(text(arguments[1]), *numbers), throttled)

    # Connection ------------------------------------------------------------------------------------------------

    def _hello(self, connection: RespConnection, arguments: Arguments) -> bytes:
        """HELLO [2|3 [AUTH user token] [SETNAME name]]"""
        if len(arguments) > 1 and arguments[1] not in (b"2", b"3"):
            return b"-NOPROTO unsupported protocol version\r\n"
        words = [word.upper() for word in arguments]
        if b"AUTH" in words[2:]:
            at = words.index(b"AUTH", 2)
            reply: bytes = self.table[b"AUTH"](connection, [b"AUTH", *arguments[at + 1 : at + 3]])
            if reply != OK:
                return reply
        if not connection.authenticated:
            return NO_AUTH
        if len(arguments) > 1:
            connection.version = int(arguments[1])
        found: dict[bytes, bytes] = {b"server": bulk(b"limitkeeper"), b"version": bulk(self.app.version.encode())}
        found |= {b"proto": b":%d\r\n" % connection.version, b"id": b":%d\r\n" % connection.id, b"mode": bulk(b"standalone")}
        found |= {b"role": bulk(b"master"), b"modules": EMPTY}
        head = b"%%%d\r\n" % len(found) if connection.version == 3 else b"*%d\r\n" % (2 * len(found))
        return head + b"".join([bulk(name) + value for name, value in found.items()])

    def _auth(self, connection: RespConnection, arguments: Arguments) -> bytes:
        """AUTH [user] token; the user's name does not matter."""
        if len(arguments) not in (2, 3):
            raise wrong_number(arguments)
        if self.token is None:
            return error("AUTH was sent, but this service has no token")
        if not compare_digest(arguments[-1], self.token):
            return b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        if not connection.authenticated:
            connection.authenticate()
        return OK

    def _client(self, connection: RespConnection, arguments: Arguments) -> bytes:
        word = arguments[1].upper() if len(arguments) > 1 else b""
        if word == b"SETNAME":
            connection.name = exactly(arguments, 3)[2][:256]
        elif word == b"GETNAME":
            return bulk(connection.name)
        elif word == b"ID":
            return b":%d\r\n" % connection.id
        elif word not in (b"SETINFO", b"NO-EVICT", b"NO-TOUCH"):
            return error(f"unknown subcommand {shown(word)} of CLIENT")
        return OK

    def _select(self, connection: RespConnection, arguments: Arguments) -> bytes:
        return OK if exactly(arguments, 2)[1] == b"0" else error("DB index is out of range; there is only 0")

    def _command(self, connection: RespConnection, arguments: Arguments) -> bytes:
        return b":%d\r\n" % len(self.table) if [one.upper() for one in arguments[1:]] == [b"COUNT"] else EMPTY

    def _quit(self, connection: RespConnection, arguments: Arguments) -> bytes:
        connection.closing = True
        return OK

    def _multi(self, connection: RespConnection, arguments: Arguments) -> bytes:
        if connection.queue is not None:
            return error("MULTI calls can not be nested")
        connection.enter_queue()
        return OK

    def _exec(self, connection: RespConnection, arguments: Arguments) -> bytes:
        """The head of an array; the queued commands come next, and their replies are its elements."""
        if connection.queue is None:
            return error("EXEC without MULTI")
        queue = connection.leave_queue()
        if queue is None:
            return b"-EXECABORT Transaction discarded because of previous errors.\r\n"
        connection.waiting.extendleft(reversed(queue))
        return b"*%d\r\n" % len(queue)

    def _discard(self, connection: RespConnection, arguments: Arguments) -> bytes:
        if connection.queue is None:
            return error("DISCARD without MULTI")
        connection.leave_queue()
        return OK

    def _info(self, connection: RespConnection, arguments: Arguments) -> bytes:
        tick = connection.listener.tick
        if tick != self._info_at[0]:  # made once per tick: it costs more than all other commands
            snapshot = self.app.gate.snapshot()
            lines = [
                *("# Server", "redis_version:7.2.0", "server_name:limitkeeper", f"limitkeeper_version:{self.app.version}"),
                *("redis_mode:standalone", "", "# Stats", f"policy:{snapshot.policy}", f"total_decisions:{snapshot.requests}"),
                *(f"allowed:{snapshot.allowed}", f"refused:{snapshot.refused}", "", "# Replication", "role:master", ""),
            ]
            self._info_at = tick, bulk("\r\n".join(lines).encode())
        return self._info_at[1]


# Replies -------------------------------------------------------------------------------------------------------------


def milliseconds(us: int) -> int:
    return -1 if us < 0 else -(-us // 1000)


def encoded(evaluation: Evaluation) -> bytes:
    """The five integers of a decision."""
    found = evaluation.decision
    if found is None or not found.allowed:
        return decision(decision_of(evaluation))
    return DECISION % (1, found.limit, found.remaining, 0, -(-found.reset_us // 1000))


def decision(found: Decision) -> bytes:
    retry = found.retry_us
    return DECISION % (
        found.allowed, found.limit, found.remaining, milliseconds(retry) if retry else 0, -(-found.reset_us // 1000),
    )  # fmt: skip


def reservation(reserved: Reserved) -> bytes:
    five = encoded(reserved.evaluation)
    return b"*7" + five[2:] + b":%d\r\n" % milliseconds(decision_of(reserved.evaluation).wait_us) + bulk(reserved.token.encode())


def throttled(found: Decision) -> bytes:
    """redis-cell: limited, limit, remaining, retry_after (−1: allowed, or never), reset_after."""
    retry = -1 if found.allowed or found.retry_us < 0 else -(-found.retry_us // 1_000_000)
    return DECISION % (not found.allowed, found.limit, found.remaining, retry, -(-found.reset_us // 1_000_000))


def one_or_zero(done: bool) -> bytes:
    return b":1\r\n" if done else b":0\r\n"


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def error(message: str) -> bytes:
    return b"-ERR %b\r\n" % " ".join(message.split()).encode("utf-8", "replace")


def failed(failure: Exception) -> bytes:
    """The reply to a command that raised."""
    if isinstance(failure, RequestError):
        return error(str(failure))
    if isinstance(failure, StoreError):
        return b"-UNAVAILABLE the store could not be asked; try again later\r\n"
    log.error("a command failed", exc_info=failure)
    return error("the service failed to answer this command")


# Arguments -----------------------------------------------------------------------------------------------------------


def text(value: bytes) -> str:
    """Any bytes are a key; those that are not UTF-8 keep their values."""
    return value.decode(*UTF_8)


def shown(value: bytes) -> str:
    return repr(value[:64].decode("utf-8", "replace"))


def number(value: bytes, name: str) -> int:
    if len(value) > 19 or not value.removeprefix(b"-").isdigit():
        raise RequestError(INVALID, f"{name}: expected a whole number, got {shown(value)}")
    return int(value)


def wrong_number(arguments: Arguments) -> RequestError:
    usage = USAGE.get(arguments[0].upper())
    return RequestError(INVALID, f"wrong number of arguments for {shown(arguments[0])}" + (f"; usage: {usage}" if usage else ""))


def exactly(arguments: Arguments, count: int) -> Arguments:
    if len(arguments) != count:
        raise wrong_number(arguments)
    return arguments


def option_values(arguments: Arguments, position: int, known: tuple[bytes, ...]) -> dict[bytes, bytes]:
    """The values of the options that follow the positional arguments."""
    rest = arguments[position:]
    names = [one.upper() for one in rest[::2]]
    if len(rest) % 2 or any(name not in known for name in names):
        raise RequestError(INVALID, f"expected {' or '.join(one.decode() for one in known)} with a value after the cost")
    return dict(zip(names, rest[1::2], strict=True))
