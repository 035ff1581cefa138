"""Blocking connections: one per thread at a time, reused last in, first out.

A socket is never blocking: it is polled with what is left of the budget of the whole call, so a server that sends its reply byte
by byte can't exceed it. Before a command is written the socket is polled once: one that the server has closed meanwhile (or on
which unexpected data waits) is closed, nothing having been sent. That and a refused connection are the only cases in which a call
is sent again: after a timeout or a broken connection the outcome is unknown.
Rejected: SO_RCVTIMEO, which saves a system call (8 % of the CPU) and rounds a budget of 5 ms up to 8.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Sequence

from ...clock import Clock
from ...errors import StoreError, StoreTimeout, StoreUnavailable
from ...fork import reset_after_fork
from .. import sans_io
from ..sans_io import Call, Plan, T
from .address import Endpoint, Login
from .resp import Outcome, ProtocolError, Reply, ReplyError, Unsent, new_parser, pack, unavailable

Poll = Callable[[float], Sequence[object]]
CHUNK = 16384


def poll_of(sock: socket.socket, writing: bool = False) -> Poll:
    """A function that waits up to so many milliseconds until a socket can be read (or written)."""
    if hasattr(select, "poll"):
        watch = select.poll()
        watch.register(sock, select.POLLOUT if writing else select.POLLIN)
        return watch.poll
    reads, writes = ([], [sock]) if writing else ([sock], [])
    return lambda ms: [ready for ready in select.select(reads, writes, [], ms / 1000) if ready]


def timed_out(endpoint: object) -> StoreTimeout:
    return StoreTimeout(f"{endpoint} did not answer within the budget; the outcome is unknown")


def lost(endpoint: object, error: object) -> StoreUnavailable:
    return StoreUnavailable(f"{endpoint}: the connection is lost ({error or 'closed by the server'})")


class SyncConnection:
    """One connection, used by one thread at a time."""

    __slots__ = ("_now_us", "_parser", "_poll", "_recv", "_send", "_sock", "endpoint", "generation", "secure")

    def __init__(self, sock: socket.socket, endpoint: Endpoint, generation: int, now_us: Callable[[], int]) -> None:
        self._sock = sock
        self._poll = poll_of(sock)
        self._send: Callable[[bytes], int] = sock.send
        self._recv: Callable[[int], bytes] = sock.recv
        self._parser = new_parser()
        self._now_us = now_us
        self.secure = isinstance(sock, ssl.SSLSocket)
        self.endpoint = endpoint
        self.generation = generation

    def is_fresh(self) -> bool:
        """Whether it can be written to: nothing has arrived, not even its end."""
        return not self._poll(0)

    def call(self, data: bytes, deadline_us: int) -> Reply:
        """Hot path: one command, one reply. OSError: nothing was sent."""
        sent = self._send(data)
        try:
            if sent != len(data):
                self.send(data[sent:], deadline_us)
            if not self._poll(max(0, deadline_us - self._now_us()) / 1000):  # a negative time would wait for ever
                raise timed_out(self.endpoint)
            received = self._recv(CHUNK)
            if not received:
                raise lost(self.endpoint, None)
            self._parser.feed(received)
            reply = self._parser.gets()
            return self.receive(deadline_us) if reply is False else reply
        except OSError as error:
            raise lost(self.endpoint, error) from None

    def send(self, data: bytes, deadline_us: int) -> None:
        """Writes all of the data. OSError: nothing was sent."""
        sent = self._try_send(data)
        while sent < len(data):
            self._wait(poll_of(self._sock, True), deadline_us)
            try:
                sent += self._try_send(data[sent:])
            except OSError as error:
                raise lost(self.endpoint, error) from None

    def _try_send(self, data: bytes) -> int:
        try:
            return self._send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0

    def receive(self, deadline_us: int) -> Reply:
        """The next reply."""
        reply = self._parser.gets()
        while reply is False:
            if not (self.secure and self._sock.pending()):  # type: ignore[attr-defined]
                self._wait(self._poll, deadline_us)
            try:
                received = self._recv(CHUNK)
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            if not received:
                raise lost(self.endpoint, None)
            self._parser.feed(received)
            reply = self._parser.gets()
        return reply

    def _wait(self, poll: Poll, deadline_us: int) -> None:
        left = deadline_us - self._now_us()
        if left <= 0 or not poll(left / 1000):
            raise timed_out(self.endpoint)

    def close(self) -> None:
        self._sock.close()

    def __del__(self) -> None:
        self._sock.close()  # of a store that was never closed


class SyncPool:
    """The blocking connections of a store. A forked child starts with none of its parent's. `clock` measures budgets."""

    def __init__(self, clock: Clock) -> None:
        self._idle: dict[tuple[Endpoint, Login], list[SyncConnection]] = {}
        self._now_us, self._sleep = clock.now_us, clock.sleep
        self.generation = 0
        reset_after_fork(self)

    def idle(self, endpoint: Endpoint, login: Login) -> list[SyncConnection]:
        """The unused connections; taking the last and putting it back needs no lock."""
        found = self._idle.get((endpoint, login))
        return found if found is not None else self._idle.setdefault((endpoint, login), [])

    def call(self, idle: list[SyncConnection], data: bytes, deadline_us: int) -> Reply:
        """Hot path: one command, one reply, on an idle connection. None: nothing was sent, and a plan may try."""
        try:
            connection = idle.pop()
        except IndexError:
            return None
        try:
            reply = None if connection.secure or connection._poll(0) else connection.call(data, deadline_us)
            if connection.generation == self.generation:
                idle.append(connection)
            else:
                connection.close()
            return reply
        except OSError:
            connection.close()
            return None
        except ProtocolError as error:
            connection.close()
            raise lost(connection.endpoint, error) from None
        except BaseException:
            connection.close()
            raise

    def run(self, plan: Plan[T], deadline_us: int, step_us: int = 0) -> T:
        """Performs a plan. With `step_us`, every step has that budget instead of one deadline for all."""

        def perform_all(calls: list[Call]) -> list[Outcome]:
            return self.exchange(calls, self._now_us() + step_us if step_us else deadline_us)

        def sleep(seconds: float) -> None:
            self._sleep(min(seconds, max(0.0, (deadline_us - self._now_us()) / 1e6)))

        return sans_io.run(plan, sleep=sleep, perform_all=perform_all)

    def exchange(self, calls: Sequence[Call], deadline_us: int) -> list[Outcome]:
        """Makes several exchanges: everything is written before anything is read."""
        sent = [self._write(call, deadline_us) for call in calls]
        pairs = zip(calls, sent, strict=True)
        return [self._read(call, one, deadline_us) if isinstance(one, SyncConnection) else one for call, one in pairs]

    def _write(self, call: Call, deadline_us: int) -> SyncConnection | StoreError | Unsent:
        endpoint, (login, commands) = call.target, call.args
        data = pack(commands)
        for attempt in (1, 2):
            try:
                connection = self._take(endpoint, login, deadline_us)
            except StoreError as error:
                return Unsent(error)
            try:
                connection.send(data, deadline_us)
                return connection
            except StoreError as error:
                connection.close()
                return error
            except OSError as error:  # the server had closed it: nothing was sent
                connection.close()
                if attempt == 2 or login.tls is not None:
                    return lost(endpoint, error)
            except BaseException:
                connection.close()
                raise
        raise AssertionError("unreachable")

    def _read(self, call: Call, connection: SyncConnection, deadline_us: int) -> Outcome:
        login, commands = call.args
        try:
            replies = [connection.receive(deadline_us) for _ in commands]
        except BaseException as error:
            connection.close()
            if isinstance(error, StoreError):
                return error
            if isinstance(error, OSError | ProtocolError):
                return lost(connection.endpoint, error)
            raise
        if connection.generation == self.generation:
            self.idle(connection.endpoint, login).append(connection)
        else:
            connection.close()
        return replies

    def _take(self, endpoint: Endpoint, login: Login, deadline_us: int) -> SyncConnection:
        """A connection that can be written to: the idle one used last, or a new one."""
        idle = self.idle(endpoint, login)
        while idle:
            try:
                connection = idle.pop()
            except IndexError:
                break
            if connection.is_fresh():
                return connection
            connection.close()
        return self._connect(endpoint, login, deadline_us)

    def _connect(self, endpoint: Endpoint, login: Login, deadline_us: int) -> SyncConnection:
        """A new connection, logged in. Raises StoreUnavailable or StoreTimeout."""
        sock = None
        try:
            sock = _socket(endpoint, (deadline_us - self._now_us()) / 1e6)
            if login.tls is not None:
                sock.settimeout(max(0.001, (deadline_us - self._now_us()) / 1e6))
                sock = login.tls.context().wrap_socket(sock, server_hostname=endpoint.host or "localhost")
            sock.setblocking(False)
            connection = SyncConnection(sock, endpoint, self.generation, self._now_us)
            commands = login.commands()
            if commands:
                connection.send(pack(commands), deadline_us)
                for _ in commands:
                    reply = connection.receive(deadline_us)
                    if isinstance(reply, ReplyError):
                        raise unavailable(reply, endpoint)
            return connection
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, StoreTimeout | TimeoutError):
                raise StoreTimeout(f"{endpoint} did not accept a connection within the budget") from None
            if isinstance(error, OSError | ProtocolError):
                raise StoreUnavailable(f"{endpoint} can't be reached: {error}") from None
            raise

    def close(self) -> None:
        self.generation += 1
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    def _reset_after_fork(self) -> None:
        """Closes the child's copies of its parent's sockets, which does not end the parent's connections."""
        self.close()


def _socket(endpoint: Endpoint, timeout: float) -> socket.socket:
    if timeout <= 0:
        raise TimeoutError
    if not endpoint.path:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        sock.connect(endpoint.path)
    except BaseException:
        sock.close()
        raise
    return sock
