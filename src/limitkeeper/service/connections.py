"""Listener and Connection: what HTTP and the Redis protocol share of serving clients that may be slow, silent or hostile.

Each worker accepts at most `max_connections` per port, those in a TLS handshake included. Once a tick (1 s) a listener closes the
connections that have begun a request and not finished it, or do not read their replies, within `request_timeout`, and those that
were idle for `idle_timeout`.
Times are counted in ticks, so that a request reads no clock. The requests of a connection are answered in order, at most TURN in
one turn of the loop and with at most HIGH_WATER bytes of replies (and one more), so that no client delays the others; while some
wait behind others, or replies are not read, nothing more is read. A client that leaves while its request waits in a queue
leaves that queue (`can_leave`): at once where the connection breaks, after LEAVE where it has only closed its side.

Draining: nothing new is accepted, begun requests are answered, and a connection is closed once it has been idle for two ticks of
50 ms, so that a request that was on its way still is answered.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from email.utils import formatdate
from typing import Any

from .fast_connection import FastConnection
from .settings import Settings

log = logging.getLogger("limitkeeper")

TICK, DRAIN_TICK, LEAVE = 1.0, 0.05, 1.0
BACKLOG, TURN = 1024, 128
#: Bytes of replies that wait for a client before it is no longer read from.
HIGH_WATER = 256 * 1024


class Listener:
    """One port of one worker: its connections, their limits, and the time in ticks. `full` is sent to one too many."""

    def __init__(self, settings: Settings, make: Callable[[Listener], Connection], full: bytes) -> None:
        self.settings, self._make, self.full = settings, make, full
        self.connections: set[Connection] = set()
        self.handshakes: set[asyncio.Task[None]] = set()  # of connections that are not made yet
        self.tasks: set[asyncio.Task[None]] = set()
        self.tick = 0
        self.draining = False
        self.request_ticks = max(1, round(settings.request_timeout / TICK))
        self.idle_ticks = max(1, round(settings.idle_timeout / TICK))
        self.accepted = self.rejected = self.expired = self.malformed = 0
        self.date = b""

    async def start(self, bound: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serves a socket that is bound already."""
        self.loop = asyncio.get_running_loop()
        self._stop: Callable[[], object]
        if tls is None:
            server = await self.loop.create_server(lambda: self._make(self), sock=bound, backlog=BACKLOG)
            self._stop = server.close
        else:
            accepting = self.loop.create_task(self._accept(bound, tls))
            accepting.add_done_callback(lambda _: bound.close())
            self._stop = accepting.cancel
        self._on_tick()

    async def _accept(self, bound: socket.socket, tls: ssl.SSLContext) -> None:
        """Accepts clients of TLS, which count from then on. The loop's own server makes their protocol after the handshake, so
        clients that begin none could take all descriptors of the process."""
        while True:
            try:
                client, _ = await self.loop.sock_accept(bound)
            except OSError:  # the client has gone, or there is no descriptor
                await asyncio.sleep(DRAIN_TICK)
                continue
            if len(self.connections) + len(self.handshakes) >= self.settings.max_connections:
                self.rejected += 1
                client.close()
                continue
            task = self.loop.create_task(self._handshake(client, tls))
            self.handshakes.add(task)
            task.add_done_callback(self.handshakes.discard)

    async def _handshake(self, client: socket.socket, tls: ssl.SSLContext) -> None:
        timeout = self.settings.request_timeout
        with suppress(OSError):  # no TLS, no certificate, or too late
            await self.loop.connect_accepted_socket(lambda: self._make(self), client, ssl=tls, ssl_handshake_timeout=timeout)

    def _on_tick(self) -> None:
        self.tick += 1
        self.date = formatdate(usegmt=True).encode()
        for connection in list(self.connections):
            connection.sweep()
        self._timer = self.loop.call_later(DRAIN_TICK if self.draining else TICK, self._on_tick)

    def stop_accepting(self) -> None:
        """Begins to drain."""
        self.draining = True
        for connection in self.connections:
            connection.fast = None
        self._stop()
        self._timer.cancel()
        self._on_tick()

    async def drain(self, timeout: float) -> None:
        """Waits until all connections are closed; after `timeout` seconds closes the rest."""
        end = self.loop.time() + timeout
        while self.connections and self.loop.time() < end:
            await asyncio.sleep(DRAIN_TICK / 2)
        for connection in list(self.connections):
            connection.abort()
        for handshake in self.handshakes:
            handshake.cancel()
        self._timer.cancel()


class Connection(FastConnection, asyncio.Protocol):
    """One client. A subclass parses the bytes that `receive` takes and adds requests to `waiting`; `answer` gives the reply to
    one, or a coroutine of it, and `failure` the reply to one that raised.

    partial   a request has begun to arrive          pending   a request is decided asynchronously
    unread    the client does not read its replies   since     the last tick with progress
    """

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener)
        self._scheduled = self._paused = False
        self.task: asyncio.Task[None] | None = None  # of the pending request
        self.waiting: deque[Any] = deque()
        self.out: list[bytes] = []

    def answer(self, request: Any) -> bytes | Coroutine[Any, Any, bytes]:
        raise NotImplementedError

    def failure(self, request: Any, error: Exception) -> bytes:
        raise NotImplementedError

    def can_leave(self) -> bool:
        """Whether the pending request waits in a queue, which it may leave."""
        return False

    def expire(self) -> None:
        """Ends a connection whose client is too slow."""
        self.abort()

    # Requests --------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Answers the waiting requests, as far as they need no waiting themselves."""
        self._scheduled = False
        waiting, out, turn, size = self.waiting, self.out, 0, 0
        while waiting and not self.pending and not self.closing and turn < TURN and size < HIGH_WATER:
            request = waiting.popleft()
            turn += 1
            try:
                reply = self.answer(request)
            except Exception as error:
                reply = self.failure(request, error)
            if isinstance(reply, bytes):
                out.append(reply)
                size += len(reply)
            else:
                self.pending = True
                task = self.task = self.listener.loop.create_task(self._answer_later(request, reply))
                self.listener.tasks.add(task)  # a task that nothing refers to may vanish
                task.add_done_callback(self.listener.tasks.discard)
        self.flush()
        if waiting or self.pending or self._paused:
            self._read_or_wait()
        if waiting and not (self.pending or self.unread or self.closing or self._scheduled):
            self._scheduled = True
            self.listener.loop.call_soon(self.work)

    async def _answer_later(self, request: Any, reply: Coroutine[Any, Any, bytes]) -> None:
        try:
            self.out.append(await reply)
        except asyncio.CancelledError:
            self.closing = True  # the client has left
        except Exception as error:
            self.out.append(self.failure(request, error))
        self.pending, self.since = False, self.listener.tick
        self.work()

    def flush(self) -> None:
        """Writes the replies; closes the connection if that was asked for."""
        if self.out:
            if not self.transport.is_closing():
                self.queued = True
                self.transport.write(self.out[0] if len(self.out) == 1 else b"".join(self.out))
            self.out.clear()
        if self.closing and not self.pending:
            self.transport.close()

    def _read_or_wait(self) -> None:
        """Stops reading while requests wait behind others or replies are not read; continues otherwise. While one is pending, the
        connection is read, since otherwise its end would not be noticed."""
        wait = bool(self.waiting or self.unread)
        if wait != self._paused and not self.transport.is_closing():
            self._paused = wait
            if wait:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    # Transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        listener = self.listener
        self.transport = transport
        if len(listener.connections) >= listener.settings.max_connections or listener.draining:
            listener.rejected += 1
            self.transport.write(listener.full)
            self.close()
            return
        listener.accepted += 1
        listener.connections.add(self)
        self.transport.set_write_buffer_limits(HIGH_WATER)
        self.sends_itself(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.closing = True
        self.listener.connections.discard(self)
        self._leave()

    def _leave(self) -> None:
        if self.pending and self.task is not None and self.can_leave():
            self.task.cancel()

    def eof_received(self) -> bool:
        if not self.waiting and not self.pending:
            return False
        self._end(self.listener.loop.time() + LEAVE)  # a client that has closed its side still gets the replies to what it sent
        return self.transport.get_extra_info("ssl_object") is None  # TLS closes both sides

    def _end(self, leave_at: float) -> None:
        if self.listener.loop.time() > leave_at:
            self._leave()
        if (self.waiting or self.pending) and not self.transport.is_closing():
            self.listener.loop.call_later(DRAIN_TICK, self._end, leave_at)
        else:
            self.close()

    def pause_writing(self) -> None:
        self.unread, self.since = True, self.listener.tick
        self._read_or_wait()

    def resume_writing(self) -> None:
        self.unread, self.since = False, self.listener.tick
        self.work()

    def sweep(self) -> None:
        """Closes the connection when it is too slow, idle for too long, or idle while the listener drains."""
        listener = self.listener
        quiet = listener.tick - self.since
        busy = self.partial or self.unread or self.transport.get_write_buffer_size() > 0
        if self.pending and self._paused and self.fd >= 0 and has_hung_up(self.fd):
            self._leave()
        if self.pending or (self.waiting and not self.unread):
            return
        if busy and not listener.draining and quiet > listener.request_ticks:
            listener.expired += 1
            self.expire()
        elif not busy and quiet > (1 if listener.draining else listener.idle_ticks):
            if self.closing:  # over TLS, the client has not answered that; pools of connections read only when they are used
                self.abort()
            else:
                self.close()

    def close(self) -> None:
        """Closes after what was written has been sent."""
        self.closing = True
        self.transport.close()

    def abort(self) -> None:
        self.closing = True
        self.transport.abort()


def has_hung_up(fd: int) -> bool:
    """Whether the other side has closed a connection that is not read."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))
