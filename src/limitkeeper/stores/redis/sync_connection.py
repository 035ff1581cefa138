"""Blocking connections: one per thread at a time, reused last in, first out, and at most `max_connections` to a server.

A caller that finds none idle opens one (`sync_opening.py`); where no more may be open, or the server accepts no more
(`maxclients`), callers wait in order of arrival, within their budgets, and a connection that is returned goes to the first.

A socket is never blocking: it is polled with what is left of the budget of the whole call, so a server that sends its reply byte
by byte can't exceed it. Before a command is written the socket is polled once: one that the server has closed meanwhile (or on
which unexpected data waits) is closed, nothing having been sent. That and a refused connection are the only cases in which a call
is sent again: after a timeout or a broken connection the outcome is unknown.
Rejected: SO_RCVTIMEO, which saves a system call (8 % of the CPU) and rounds a budget of 5 ms up to 8.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakSet, ref

from ...clock import Clock
from ...errors import StoreError, StoreTimeout
from ...fork import reset_after_fork
from .. import sans_io
from ..sans_io import Call, Plan, T, WakeEvent
from .address import Endpoint, Login
from .resolver import RESOLVER
from .resp import (
    SHORT,
    Outcome,
    Parser,
    ProtocolError,
    Reply,
    TooManyConnections,
    Unsent,
    connect_error,
    is_replica,
    lost,
    out_of_time,
    pack,
    timed_out,
)
from .sync_opening import CHUNK, WOULD_BLOCK, Opening, Poll, is_from_handler, poll_of

#: Connections to one server, by default: more threads than that rarely wait for a server at the same moment.
MAX_CONNECTIONS = 50
#: So long (µs) no connection is opened to a server that has refused one for lack of room, while others to it are open.
FULL_US = 1_000_000
#: Callers that wait look so often (µs) whether there is room again, or a connection whose return was interrupted by a signal.
AGAIN_US = 50_000


def is_from_system(error: BaseException) -> bool:
    """Whether the operating system raised this error, and not a signal handler: `raise TimeoutError` is an OSError as well."""
    return isinstance(error, OSError) and error.errno is not None


def not_yet(ms: float) -> Sequence[object]:
    """The poll of a connection that is not open."""
    return (None,)


class CallRecord:
    """How far a call has come, so that its outcome can be learnt after a signal handler has raised anywhere in it."""

    __slots__ = ("connection", "due", "reply", "sent", "size")

    def __init__(self) -> None:
        self.begin(None, 0, 0)

    def begin(self, connection: SyncConnection | None, size: int, due: int) -> None:
        """So many bytes are being sent, and so many replies due."""
        self.connection, self.size, self.due = connection, size, due
        self.sent: list[int] = []
        self.reply: Reply = None

    def finish(self, deadline_us: int) -> None:
        """Receives the replies that are still due, and closes the connection, which no other caller uses."""
        connection = self.connection
        if connection is None or not self.due or sum(self.sent) < self.size:
            return
        while self.due and not connection.is_closed:
            try:
                connection.receive_to_end(deadline_us, self)
            except StoreError:
                return
            except BaseException:  # of a signal handler again; the first one's exception goes on
                continue
        connection.close()


class SyncConnection:
    """One connection, used by one thread at a time; any exception closes it, but for a StoreTimeout while it is being opened.
    When `poll` reports something while no reply is due, it can't be used: not any more, or not yet."""

    # fmt: off
    __slots__ = ("__weakref__", "_now_us", "_opening", "_parser", "_received", "_recv", "_send", "_server", "_sock", "endpoint",
                 "generation", "poll", "secure")
    # fmt: on

    def __init__(self, server: ServerConnections) -> None:
        self._server, self.endpoint = ref(server), server.endpoint
        self.generation, self._now_us = server.generation, server.now_us
        self._sock: socket.socket = None  # type: ignore[assignment]  # until it is opened
        self._parser = Parser()
        self._received: list[bytes] = []  # of a reply that `receive_to_end` has not got whole
        self._opening: Opening | None = None
        self.poll: Poll = not_yet
        self.secure = False

    @property
    def is_open(self) -> bool:
        return self._sock is not None

    @property
    def is_opening(self) -> bool:
        return self._opening is not None and self._opening.goes_on

    @property
    def is_closed(self) -> bool:
        return self._sock.fileno() < 0

    @property
    def has_more(self) -> bool:
        """Whether more has arrived than the replies that were read: the next one would be taken for another's."""
        return self.is_open and bool(self._parser.data)

    def open(self, login: Login, deadline_us: int) -> int:
        """Connects and logs in; returns how long the login took. Raises StoreUnavailable, or StoreTimeout: it may be continued
        while it `is_opening`."""
        if self._opening is None or self._opening.stale_at_us <= self._now_us():
            self.abandon()
            self._opening = Opening(self.endpoint, login, self._parser, self._now_us, deadline_us)
        opening = self._opening
        try:
            opening.run(deadline_us)
            self._sock = sock = opening.sock
            self.secure = login.tls is not None
            self._send: Callable[[bytes], int] = sock.send
            self._recv: Callable[[int], bytes] = sock.recv
            self.poll = poll_of(sock)
            self._opening = None
            return opening.round_trip_us
        except BaseException as error:
            if isinstance(error, StoreTimeout) and opening.goes_on:
                raise
            self.close()
            if is_from_handler(error):
                raise
            raise connect_error(error, self.endpoint) or error from None

    def abandon(self) -> None:
        """Gives up what has been opened so far."""
        if self._opening is not None:
            self._opening.close()
        self._opening, self._parser = None, Parser()

    def send(self, data: bytes, deadline_us: int, record: CallRecord | None = None, due: int = 1) -> None:
        """Writes all of the data, to which so many replies are due. OSError: nothing was sent. With a record, the connection
        stays open when a signal handler raises after all was sent."""
        rest = data
        if record is not None:
            record.begin(self, len(data), due)
        try:
            while True:
                try:
                    if record is None:
                        rest = rest[self._send(rest) :]
                    else:
                        record.sent.extend(map(self._send, (rest,)))  # in C: no handler runs before the number is kept
                        rest = data[sum(record.sent) :]
                except WOULD_BLOCK:
                    pass
                if not rest:
                    return
                left = deadline_us - self._now_us()
                if left <= 0 or not poll_of(self._sock, writing=True)(left / 1000):
                    raise timed_out(self.endpoint)
        except BaseException as error:
            if record is not None and sum(record.sent) == len(data):
                raise
            self.close()
            if is_from_system(error) and len(rest) < len(data):
                raise lost(self.endpoint, error) from None
            raise

    def receive(self, deadline_us: int) -> Reply:
        """The next reply. When the budget is over, what has arrived by then is taken; also while this thread waited to run again,
        hence the second poll."""
        parser, received = self._parser, b""
        try:
            reply = parser.gets() if parser.data else False
            while reply is False:
                if not self.secure or not self._sock.pending():  # type: ignore[attr-defined]
                    left = deadline_us - self._now_us()
                    if not (self.poll(left / 1000) or self.poll(0) if left > 0 else self.poll(0) and not received):
                        raise timed_out(self.endpoint)
                first = not received and not parser.data
                try:
                    received = self._recv(CHUNK)
                except WOULD_BLOCK:
                    continue
                if not received:
                    raise lost(self.endpoint, None)
                if first and (short := SHORT.get(received[:5])) and short[0] == len(received):
                    reply = received[short[1] : -2]
                else:
                    parser.feed(received)
                    reply = parser.gets()
            return reply
        except BaseException as error:
            self.close()
            if is_from_system(error) or isinstance(error, ProtocolError):
                raise lost(self.endpoint, error) from None
            raise

    def receive_to_end(self, deadline_us: int, record: CallRecord) -> Reply:
        """As `receive`. When a signal handler raises, what has arrived is kept: it may be called again."""
        received = self._received
        if not received:
            received.append(bytes(self._parser.data))
        while True:
            try:
                parser = Parser()
                parser.feed(b"".join(received))
                reply = parser.gets()
                if reply is not False:
                    record.reply, self._parser, self._received = reply, parser, []
                    record.due -= 1
                    return reply
                if not self.secure or not self._sock.pending():  # type: ignore[attr-defined]
                    left = deadline_us - self._now_us()
                    if not (self.poll(left / 1000) or self.poll(0) if left > 0 else self.poll(0) and len(received) == 1):
                        raise timed_out(self.endpoint)
                received.extend(map(self._recv, (CHUNK,)))  # in C: no handler runs before the bytes are kept
                if not received[-1]:
                    raise lost(self.endpoint, None)
            except WOULD_BLOCK:
                continue
            except BaseException as error:
                if is_from_system(error) or isinstance(error, StoreError | ProtocolError):
                    self.close()
                    raise error if isinstance(error, StoreError) else lost(self.endpoint, error) from None
                raise

    def close(self) -> None:
        if self._opening is not None:
            self._opening.close()
        if self._sock is not None:
            self._sock.close()
        server = self._server()
        if server is not None:
            server.closed(self)

    def __del__(self) -> None:
        """Of a store that was never closed. What a signal handler raises here, or raised before it was made, is of no use to
        anyone: a finaliser can only print it."""
        with suppress(BaseException):
            self.close()


class WaitingCaller(WakeEvent):
    """A caller that wants a connection: set when it has been given one."""

    connection: SyncConnection | None = None


class ServerConnections(list[SyncConnection]):
    """The idle connections to one server: taking the last and putting it back needs no lock while no caller waits."""

    def __init__(self, endpoint: Endpoint, most: int, clock: Clock) -> None:
        self.endpoint, self._most, self._sleep, self.now_us = endpoint, most, clock.sleep, clock.now_us
        self.generation = 0
        self.full_until_us = 0
        self._start()

    def _start(self) -> None:
        self.waiting: deque[WaitingCaller] = deque()
        self.open: WeakSet[SyncConnection] = WeakSet()  # idle, in use, or being opened
        self._lock = threading.RLock()  # reentrant: a connection may be collected, and so closed, anywhere

    def take(self, deadline_us: int) -> SyncConnection:
        """A connection that is idle, or to be opened. Raises TooManyConnections when there is none within the budget."""
        if self and not self.waiting:
            with suppress(IndexError):
                return self.pop()
        caller = WaitingCaller()
        try:
            self.waiting.append(caller)
            self._serve()
            while caller.connection is None and (left_us := deadline_us - self.now_us()) > 0:
                self._sleep(min(left_us, AGAIN_US) / 1e6, caller)
                self._serve()
        finally:
            with self._lock:
                if caller in self.waiting:
                    self.waiting.remove(caller)
        if caller.connection is None:
            raise TooManyConnections(
                f"{self.endpoint}: no connection came free within the budget, {len(self.open)} are in use; raise max_connections"
            )
        return caller.connection

    def put(self, connection: SyncConnection) -> None:
        """Takes back a connection that is not used any more."""
        if connection.generation != self.generation or connection.has_more:
            return connection.close()
        self.insert(len(self) if connection.is_open else 0, connection)
        if self.waiting:
            self._serve()
        return None

    def closed(self, connection: SyncConnection) -> None:
        """Another connection may be opened in the place of one that was closed."""
        self.open.discard(connection)
        if self.waiting:
            self._serve()

    def _serve(self) -> None:
        """Gives idle connections, and new ones as far as they are allowed, to the callers that wait, in order of arrival."""
        with self._lock:
            while self.waiting and (self or self._has_room()):
                self._serve_first()

    def _serve_first(self) -> None:
        """Serves the first caller, and only then removes it: a signal handler that raises in between loses none. In between, a
        connection that is collected may serve callers, too."""
        try:
            caller = self.waiting[0]
        except IndexError:  # it was served meanwhile
            return
        if caller.connection is None:
            try:
                connection = self.pop()
            except IndexError:
                connection = SyncConnection(self)
                self.open.add(connection)
            caller.connection = connection
        caller.set()
        if self.waiting and self.waiting[0] is caller:
            self.waiting.popleft()

    def _has_room(self) -> bool:
        count = len(self.open)
        return count < self._most and (count == 0 or self.now_us() >= self.full_until_us)

    def close(self, forked: bool = False) -> None:
        """Closes the idle connections now, and those in use when they are put back."""
        self.generation += 1
        if forked:  # the callers and connections of other threads are the parent's
            self._start()
        while self:
            with suppress(IndexError):
                self.pop().close()


class SyncPool:
    """The blocking connections of a store. A forked child starts with none of its parent's. `clock` measures budgets."""

    def __init__(self, clock: Clock, max_connections: int = MAX_CONNECTIONS) -> None:
        self._servers: dict[tuple[Endpoint, Login], ServerConnections] = {}
        self._clock, self._now_us = clock, clock.now_us
        self._most = max_connections
        reset_after_fork(self)

    def idle(self, endpoint: Endpoint, login: Login) -> ServerConnections:
        """The connections to a server."""
        found = self._servers.get((endpoint, login))
        if found is None:
            found = self._servers.setdefault((endpoint, login), ServerConnections(endpoint, self._most, self._clock))
        return found

    def call(self, idle: ServerConnections, data: bytes, budget_us: int, record: CallRecord | None = None) -> Reply:
        """Hot path: one command, one reply, on an idle connection. The budget is counted from the moment of sending: so far,
        the caller has waited for nothing but its own process. None: nothing was sent, and a plan may try."""
        if idle.waiting:
            return None
        try:
            connection = idle.pop()
        except IndexError:
            return None
        reply = None
        try:
            if not (connection.secure or connection.poll(0)):
                deadline_us = self._now_us() + budget_us
                connection.send(data, deadline_us, record)
                reply = connection.receive(deadline_us) if record is None else connection.receive_to_end(deadline_us, record)
        except OSError as error:
            if is_from_system(error):
                return None
            raise
        idle.put(connection)
        return reply

    def run(self, plan: Plan[T], deadline_us: int, step_us: int = 0, record: CallRecord | None = None) -> T:
        """Performs a plan. With `step_us`, every step has that budget instead of one deadline for all."""

        paused_us = 0  # with `step_us`, all pauses together are shorter than one step

        def perform_all(calls: list[Call]) -> list[Outcome]:
            return self.exchange(calls, self._now_us() + step_us if step_us else deadline_us, record)

        def sleep(seconds: float) -> bool:
            nonlocal paused_us
            paused_us += int(seconds * 1e6)
            if paused_us >= step_us if step_us else self._now_us() + seconds * 1e6 >= deadline_us:
                return False
            self._clock.sleep(seconds)
            return True

        return sans_io.run(plan, sleep=sleep, perform_all=perform_all)

    def exchange(self, calls: Sequence[Call], deadline_us: int, record: CallRecord | None = None) -> list[Outcome]:
        """Makes several exchanges: everything is written before anything is read. Connections are taken in the order of their
        endpoints, so that no two callers wait for one another's."""
        order = sorted(calls, key=lambda call: str(call.target)) if len(calls) > 1 else calls
        sent = {call.target: self._write(call, deadline_us, record) for call in order}
        pairs = [(call, sent[call.target]) for call in calls]
        return [self._read(call, one, deadline_us, record) if isinstance(one, SyncConnection) else one for call, one in pairs]

    def _due_us(self, share: int, deadline_us: int) -> int:
        """When an exchange must be over that may take 1/share of what is left of the budget."""
        if share == 1:
            return deadline_us
        now_us = self._now_us()
        return now_us + max(0, deadline_us - now_us) // share

    def _write(self, call: Call, deadline_us: int, record: CallRecord | None) -> SyncConnection | StoreError | Unsent:
        login, commands, share = call.args
        due_us = self._due_us(share, deadline_us)
        if self._now_us() >= due_us:
            return Unsent(out_of_time(call.target))
        try:
            connection = self._take(call.target, login, due_us)
        except StoreError as error:
            return Unsent(error)
        try:
            connection.send(pack(commands), due_us, record, len(commands))
            return connection
        except StoreError as error:
            return error
        except OSError as error:  # the server has closed it: nothing was sent, as far as TLS shows that
            if not is_from_system(error):
                raise
            broken = lost(call.target, error)
            return Unsent(broken) if login.tls is None else broken

    def _read(self, call: Call, connection: SyncConnection, deadline_us: int, record: CallRecord | None) -> Outcome:
        login, commands, share = call.args
        due_us = self._due_us(share, deadline_us)
        try:
            receive = connection.receive if record is None else partial(connection.receive_to_end, record=record)
            replies = [receive(due_us) for _ in commands]
        except StoreError as error:
            return error
        server = self.idle(call.target, login)
        if is_replica(replies):
            server.close()
            RESOLVER.expire(call.target.host)
        server.put(connection)
        return replies

    def _take(self, endpoint: Endpoint, login: Login, deadline_us: int) -> SyncConnection:
        """A connection that can be written to: an idle one, a new one, or one that another caller returns."""
        server = self.idle(endpoint, login)
        while True:
            connection = server.take(deadline_us)
            least_us = 0
            try:
                if not connection.is_open:
                    least_us = connection.open(login, deadline_us)
                elif connection.poll(0):
                    connection.close()
                    continue
            except TooManyConnections:
                server.full_until_us = self._now_us() + FULL_US
                if not server.open:
                    raise
                continue
            except StoreTimeout:
                if connection.is_opening:
                    server.put(connection)
                raise
            if self._now_us() + least_us < deadline_us:
                return connection
            server.put(connection)  # for the next caller: a command that has no time left would be charged without an answer
            raise out_of_time(endpoint)

    def close_idle(self, endpoint: Endpoint) -> None:
        """Closes an idle connection to a server that accepts no more: a caller that can't share it, an event loop, needs the
        place."""
        for (target, _), server in list(self._servers.items()):
            if target == endpoint:
                with suppress(IndexError):
                    server.pop().close()
                    server.full_until_us = self._now_us() + FULL_US

    def close(self) -> None:
        for server in list(self._servers.values()):
            server.close()

    def _reset_after_fork(self) -> None:
        """Closes the child's copies of its parent's sockets, which does not end the parent's connections."""
        for server in list(self._servers.values()):
            server.close(forked=True)
