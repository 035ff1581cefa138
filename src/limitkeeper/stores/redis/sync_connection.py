"""The sync colour: connections of our own, one per thread at a time, reused last in first out.

A socket is never blocking: it is polled, with what is left of the budget of the whole call, so a server that trickles its
answer byte by byte can't exceed it. Before a command is written the socket is polled once: one that the server has closed
meanwhile (or on which something waits that nobody asked for) is thrown away, nothing having been sent. That, and a connection
that was refused, are the only cases in which a call is sent again: after a timeout or a break nobody knows what was done.
Rejected: SO_RCVTIMEO, which saves a system call (8 % of the CPU) and rounds a budget of 5 ms up to 8.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from ...clock import SYSTEM
from ...errors import StoreError, StoreTimeout, StoreUnavailable
from ...fork import reset_after_fork
from .address import Endpoint, Login
from .resp import ProtocolError, ReplyError, pack, reader, unavailable
from .trips import Outcome, Pause, Plan, T, Trip

Poll = Callable[[float], Any]
CHUNK = 16384


def now_us() -> int:
    return int(SYSTEM.now_us())


def poll_of(sock: socket.socket, writing: bool = False) -> Poll:
    """A function that waits up to so many milliseconds until a socket can be read (or written)."""
    if hasattr(select, "poll"):
        watch = select.poll()
        watch.register(sock, select.POLLOUT if writing else select.POLLIN)
        return watch.poll
    lists: tuple[list[Any], list[Any]] = ([], [sock]) if writing else ([sock], [])
    return lambda ms: [ready for ready in select.select(*lists, [], ms / 1000) if ready]


def too_late(place: object) -> StoreTimeout:
    return StoreTimeout(f"{place} did not answer within the budget; nobody knows what was decided")


def lost(place: object, error: object) -> StoreUnavailable:
    return StoreUnavailable(f"{place}: the connection is lost ({error or 'closed by the server'})")


class SyncConnection:
    """One connection, used by one thread at a time."""

    __slots__ = ("_poll", "_reader", "_recv", "_send", "_sock", "generation", "place", "secure")

    def __init__(self, sock: socket.socket, place: Endpoint, generation: int) -> None:
        self._sock = sock
        self._poll = poll_of(sock)
        self._send: Callable[[bytes], int] = sock.send
        self._recv: Callable[[int], bytes] = sock.recv
        self.secure = isinstance(sock, ssl.SSLSocket)
        self._reader = reader()
        self.place = place
        self.generation = generation

    def fresh(self) -> bool:
        """Whether it can be written on: nothing has come, not even its end."""
        return not self._poll(0)

    def ask(self, data: bytes, deadline_us: int) -> Any:
        """One command, one reply, with as few steps as there are. OSError: nothing at all was taken."""
        sent = self._send(data)
        try:
            if sent != len(data):
                self.send(data[sent:], deadline_us)
            if not self._poll(max(0, deadline_us - now_us()) / 1000):  # below zero would be for ever
                raise too_late(self.place)
            some = self._recv(CHUNK)
            if not some:
                raise lost(self.place, None)
            self._reader.feed(some)
            reply = self._reader.gets()
            return self.receive(deadline_us) if reply is False else reply
        except OSError as error:
            raise lost(self.place, error) from None

    def send(self, data: bytes, deadline_us: int) -> None:
        """Writes all of it; what does not go at once waits for room. OSError: nothing at all was taken."""
        sent = self._some(data)
        while sent < len(data):
            self._wait(poll_of(self._sock, True), deadline_us)
            try:
                sent += self._some(data[sent:])
            except OSError as error:
                raise lost(self.place, error) from None

    def _some(self, data: bytes) -> int:
        try:
            return self._send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0

    def receive(self, deadline_us: int) -> Any:
        """The next reply, within the budget."""
        reply = self._reader.gets()
        while reply is False:
            if not (self.secure and self._sock.pending()):  # type: ignore[attr-defined]
                self._wait(self._poll, deadline_us)
            try:
                some = self._recv(CHUNK)
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            if not some:
                raise lost(self.place, None)
            self._reader.feed(some)
            reply = self._reader.gets()
        return reply

    def _wait(self, poll: Poll, deadline_us: int) -> None:
        left = deadline_us - now_us()
        if left <= 0 or not poll(left / 1000):
            raise too_late(self.place)

    def close(self) -> None:
        self._sock.close()

    def __del__(self) -> None:
        self._sock.close()  # a store that nobody closed


def connected(place: Endpoint, login: Login, deadline_us: int, generation: int = 0) -> SyncConnection:
    """A new connection, greeted. Raises StoreUnavailable or StoreTimeout; nothing has been asked of the server then."""
    sock = None
    try:
        sock = _socket(place, deadline_us)
        if login.tls is not None:
            sock.settimeout(max(0.001, (deadline_us - now_us()) / 1e6))
            sock = login.tls.context().wrap_socket(sock, server_hostname=place.host or "localhost")
        sock.setblocking(False)
        link = SyncConnection(sock, place, generation)
        greeting = login.commands()
        if greeting:
            link.send(pack(greeting), deadline_us)
            for _ in greeting:
                reply = link.receive(deadline_us)
                if isinstance(reply, ReplyError):
                    raise unavailable(reply, place)
        return link
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, StoreTimeout | TimeoutError):
            raise StoreTimeout(f"{place} did not take a connection within the budget") from None
        if isinstance(error, OSError | ProtocolError):
            raise StoreUnavailable(f"{place} can't be reached: {error}") from None
        raise


def _socket(place: Endpoint, deadline_us: int) -> socket.socket:
    left = (deadline_us - now_us()) / 1e6
    if left <= 0:
        raise TimeoutError
    if not place.path:
        sock = socket.create_connection((place.host, place.port), left)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(left)
        sock.connect(place.path)
    except BaseException:
        sock.close()
        raise
    return sock


class SyncPool:
    """The connections of a store's sync colour. A child process starts with none of its parent's."""

    def __init__(self) -> None:
        self._idle: dict[tuple[Endpoint, Login], list[SyncConnection]] = {}
        self.generation = 0
        reset_after_fork(self)

    def idle(self, place: Endpoint, login: Login) -> list[SyncConnection]:
        """Those that nobody uses; taking the last and putting it back needs no lock."""
        found = self._idle.get((place, login))
        return found if found is not None else self._idle.setdefault((place, login), [])

    def take(self, place: Endpoint, login: Login, deadline_us: int) -> SyncConnection:
        """A connection that is ready to be written on; of those at hand, the one used last."""
        idle = self.idle(place, login)
        while idle:
            try:
                link = idle.pop()
            except IndexError:
                break
            if link.fresh():
                return link
            link.close()
        return connected(place, login, deadline_us, self.generation)

    def give(self, link: SyncConnection, login: Login) -> None:
        if link.generation == self.generation:
            self.idle(link.place, login).append(link)
        else:
            link.close()

    def call(self, idle: list[SyncConnection], data: bytes, deadline_us: int) -> Any:
        """One command, one reply, on a connection that is at hand: the way of most calls. None: nothing was sent, or there is no
        such connection; a plan may try."""
        try:
            link = idle.pop()
        except IndexError:
            return None
        try:
            reply = None if link.secure or link._poll(0) else link.ask(data, deadline_us)
            if link.generation == self.generation:
                idle.append(link)
            else:
                link.close()
            return reply
        except OSError:
            link.close()
            return None
        except ProtocolError as error:
            link.close()
            raise lost(link.place, error) from None
        except BaseException:
            link.close()
            raise

    def exchange(self, trips: Sequence[Trip], deadline_us: int) -> list[Outcome]:
        """All trips at once: everything is written before anything is read."""
        begun = [self._begin(trip, deadline_us) for trip in trips]
        return [
            one if isinstance(one, Outcome) else self._end(trip, one, deadline_us) for trip, one in zip(trips, begun, strict=True)
        ]

    def _begin(self, trip: Trip, deadline_us: int) -> SyncConnection | Outcome:
        data = pack(trip.commands)
        for attempt in (1, 2):
            try:
                link = self.take(trip.place, trip.login, deadline_us)
            except StoreError as error:
                return Outcome([], error, unsent=True)
            try:
                link.send(data, deadline_us)
                return link
            except StoreError as error:
                link.close()
                return Outcome([], error)
            except OSError as error:  # nothing of it was taken: the server had hung up
                link.close()
                if attempt == 2 or trip.login.tls is not None:
                    return Outcome([], lost(trip.place, error))
            except BaseException:
                link.close()
                raise
        raise AssertionError("unreachable")

    def _end(self, trip: Trip, link: SyncConnection, deadline_us: int) -> Outcome:
        try:
            replies = [link.receive(deadline_us) for _ in trip.commands]
        except BaseException as error:
            link.close()
            if isinstance(error, StoreError):
                return Outcome([], error)
            if isinstance(error, OSError | ProtocolError):
                return Outcome([], lost(trip.place, error))
            raise
        self.give(link, trip.login)
        return Outcome(replies)

    def run(self, plan: Plan[T], deadline_us: int, each_us: int = 0) -> T:
        """Follows a plan to its end. With `each_us`, every step has that time."""
        try:
            step = next(plan)
            while True:
                if isinstance(step, Pause):
                    SYSTEM.sleep(min(step.seconds, max(0.0, (deadline_us - now_us()) / 1e6)))
                    step = plan.send([])
                else:
                    step = plan.send(self.exchange(step, now_us() + each_us if each_us else deadline_us))
        except StopIteration as end:
            found: T = end.value
            return found

    def close(self) -> None:
        self.generation += 1
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    def _reset_after_fork(self) -> None:
        """Closes the child's copies of its parent's sockets, which does not end the connections."""
        self.close()
