"""Opens a blocking connection in steps: where the budget of a call ends meanwhile, the next call continues.

Otherwise a budget that is enough for a decision, but not for a TLS handshake and a login before it, would fail every call.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

from .. import sans_io
from .address import Endpoint, Login
from .resolver import RESOLVER
from .resp import Parser, Reply, check_accepted, check_login, first_commands, lost, not_connected, pack

Poll = Callable[[float], Sequence[object]]
#: What to wait for, and until when (µs); it is sent whether that came in time.
Steps = Generator[tuple[Poll, int], bool, Any]
#: An opening is given up after so many µs (or the budget of the first call) without a connection, so that the name is looked up
#: again; and so many after that, the time between two calls included, without a login.
CONNECT_US, LOGIN_US = 1_000_000, 10_000_000
CHUNK = 16384
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def poll_of(sock: socket.socket, writing: bool = False) -> Poll:
    """A function that waits up to so many milliseconds until a socket can be read (or written)."""
    if hasattr(select, "poll"):
        watch = select.poll()
        watch.register(sock, select.POLLOUT if writing else select.POLLIN)
        return watch.poll
    reads, writes = ([], [sock]) if writing else ([sock], [])
    return lambda ms: [ready for ready in select.select(reads, writes, [], ms / 1000) if ready]


def is_from_handler(error: BaseException) -> bool:
    """Whether a signal handler raised this TimeoutError while a connection was opened; that of a socket says "timed out"."""
    return isinstance(error, TimeoutError) and error.errno is None and "timed out" not in str(error)


class Opening:
    """A connection that is being opened. `sock` is its socket, `round_trip_us` how long the login took in the last call."""

    def __init__(self, endpoint: Endpoint, login: Login, parser: Parser, now_us: Callable[[], int], deadline_us: int) -> None:
        self._endpoint, self._login, self._parser, self._now_us = endpoint, login, parser, now_us
        self.sock: socket.socket = None  # type: ignore[assignment]  # until it is made
        self.round_trip_us = 0
        self.stale_at_us = max(deadline_us, now_us() + CONNECT_US)
        self._deadline_us = deadline_us
        self._wait: tuple[Poll, int] | None = None
        self._steps = self._open()

    @property
    def goes_on(self) -> bool:
        """Whether it has neither ended nor failed."""
        return self._steps.gi_frame is not None  # type: ignore[attr-defined]

    def run(self, deadline_us: int) -> None:
        """Makes the steps, up to the last. Raises StoreTimeout when the budget ends meanwhile: then it `goes_on`."""
        began_us = self._now_us()
        try:
            if self._wait is None:
                self._wait = next(self._steps)
            while True:
                poll, until_us = self._wait
                left = min(until_us, deadline_us) - self._now_us()
                ready = left > 0 and bool(poll(left / 1000))
                if not ready and until_us >= deadline_us:
                    raise not_connected(self._endpoint)
                self._wait = self._steps.send(ready)
        except StopIteration:  # of a login that an earlier call has begun, the time between the calls says nothing
            self.round_trip_us = min(self.round_trip_us, self._now_us() - began_us)

    def close(self) -> None:
        self._steps.close()
        if self.sock is not None:
            self.sock.close()

    def _open(self) -> Steps:
        endpoint, tls, commands = self._endpoint, self._login.tls, first_commands(self._login)
        if endpoint.path:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.setblocking(False)
            self.sock.connect(endpoint.path)
        else:
            yield from self._connect()
        self.stale_at_us = max(self.stale_at_us, self._now_us() + LOGIN_US)
        if tls is not None:
            name = endpoint.host or "localhost"
            self.sock = tls.context().wrap_socket(self.sock, server_hostname=name, do_handshake_on_connect=False)
            yield from self._until_done(self.sock.do_handshake)
        began_us, data, replies = self._now_us(), pack(commands), list[Reply]()
        while data:
            data = data[(yield from self._until_done(self.sock.send, data)) :]
        for _ in commands:
            replies.append((yield from self._receive()))
            check_accepted(replies[-1], endpoint)
        check_login(replies, endpoint)
        if self._parser.data:
            raise lost(endpoint, "unexpected data")
        self.round_trip_us = self._now_us() - began_us

    def _connect(self) -> Steps:
        """Connects to the first address that accepts it; each has an equal part of the time that is left."""
        host, port = self._endpoint.host, self._endpoint.port
        addresses = sans_io.run(RESOLVER.plan(host, (self._deadline_us - self._now_us()) / 1e6))
        for others, address in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
            self.sock = sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            try:
                sock.setblocking(False)
                code, now_us = sock.connect_ex((address, port)), self._now_us()
                if code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
                    until_us = now_us + (self._deadline_us - now_us) // (others + 1) if others else sys.maxsize
                    if not (yield poll_of(sock, writing=True), until_us):
                        raise TimeoutError("timed out")
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                return
            except BaseException as error:
                sock.close()
                if not others or not isinstance(error, OSError) or is_from_handler(error):
                    RESOLVER.expire(host)
                    raise
        raise OSError("the host has no address")

    def _receive(self) -> Generator[tuple[Poll, int], bool, Reply]:
        while (reply := self._parser.gets()) is False:
            received = yield from self._until_done(self.sock.recv, CHUNK)
            if not received:
                raise lost(self._endpoint, None)
            self._parser.feed(received)
        return reply

    def _until_done(self, call: Callable[..., Any], *arguments: Any) -> Steps:
        """What a call on the socket returns once it does not have to wait."""
        while True:
            try:
                return call(*arguments)
            except WOULD_BLOCK as error:
                writing = isinstance(error, ssl.SSLWantWriteError) or (type(error) is BlockingIOError and call == self.sock.send)
            yield poll_of(self.sock, writing), sys.maxsize
