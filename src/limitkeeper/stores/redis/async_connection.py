"""Asyncio connections: one per event loop and server, on which the commands of all callers are pipelined.

Replies arrive in the order of the commands, so a deque of pending replies is all the bookkeeping. A write has one deadline
however many callers share it; when it passes, they fail, and the late reply is dropped when it arrives. A connection that has
been silent for a second (or for a longer budget) is left to those who still wait on it; later callers get a new one.

Connections end with their loop: an async generator that was started in it is closed by `loop.shutdown_asyncgens()`, which
`asyncio.run` calls. So two successive `asyncio.run` work, and nothing is left open.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ...errors import StoreError, StoreUnavailable
from .. import sans_io
from ..sans_io import Call, LeftOnLoop, Plan, T
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
    check_accepted,
    check_login,
    connect_error,
    first_commands,
    is_replica,
    lost,
    not_connected,
    out_of_time,
    pack,
    timed_out,
)
from .sync_opening import Poll, poll_of

Done = Callable[[Outcome], None]
SILENCE = 1.0
#: Seconds after which a timer was called late.
LATE = 0.002
#: Bytes that are parsed at a time: a few milliseconds.
PART = 1 << 14


def _ignore(outcome: Outcome) -> None:
    """Takes the late reply of a call that timed out."""


@dataclass(slots=True)
class PendingReplies:
    """So many replies, due by a deadline in the loop's time. `done` is called with them, or with the error."""

    count: int
    deadline: float
    done: Done
    replies: list[Reply] = field(default_factory=list)


def resolve(future: asyncio.Future[Outcome]) -> Done:
    return lambda outcome: None if future.done() else future.set_result(outcome)


class AsyncConnection(asyncio.Protocol):
    """One connection of one loop. `usable` until it is lost, or silent for too long."""

    def __init__(self, endpoint: Endpoint, login: Login, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self.endpoint, self.login, self.loop = endpoint, login, loop
        self.usable = True
        self._timeout, self._longest = timeout, max(timeout, SILENCE)
        self._transport: asyncio.Transport | None = None
        self._poll: Poll | None = None
        self._ready = False
        self._unsent: list[tuple[PendingReplies, bytes]] = []  # written before the connection was ready
        self._pending: deque[PendingReplies] = deque()
        self._parser = Parser()
        self._timer: asyncio.Handle | None = None  # uvloop's may lack `when`: see `_expires`
        self._expires = 0.0
        self._late_at = 0.0
        self._last_read = began = loop.time()
        self._opening = LeftOnLoop(lambda: began + timeout - loop.time())
        self._delay = 0.0  # of the loop, while it was being opened
        self._connecting = sans_io.start_task(self._connect(), loop)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._longest):
                await self._open()
        except BaseException as error:
            known = connect_error(error, self.endpoint)
            text = "the loop ended while connecting" if isinstance(error, asyncio.CancelledError) else repr(error)
            self._end(known or StoreUnavailable(f"{self.endpoint}: {text}"))
            if known is None:
                raise
        else:
            self._extend_deadlines()
            self._opening.stop()
            self._ready = True
            self._send_unsent()

    def _extend_deadlines(self) -> None:
        """While the connection is being opened, in several steps, the loop's delay does not count."""
        delay, self._delay = self._opening.delay() - self._delay, self._opening.delay()
        for one in self._pending:
            one.deadline += delay

    def _send_unsent(self) -> None:
        """Sends what was written while it was being opened, but for calls whose deadline has passed since."""
        waiting = [(one, data) for one, data in self._unsent if one.done is not _ignore]
        self._unsent.clear()
        self._pending = deque(one for one, _ in waiting)
        if waiting and self._transport is not None:
            self._transport.write(b"".join([data for _, data in waiting]))
        if not self.usable:
            self._close_if_done()

    async def _open(self) -> None:
        endpoint, tls, commands = self.endpoint, self.login.tls, first_commands(self.login)
        if endpoint.path:
            await self.loop.create_unix_connection(lambda: self, endpoint.path)
        else:
            context, name = (None, None) if tls is None else (tls.context(), endpoint.host or "localhost")
            await self._connect_tcp(context, name)
        assert self._transport is not None
        if tls is None:
            self._poll = poll_of(self._transport.get_extra_info("socket"))
        replies: asyncio.Future[Outcome] = self.loop.create_future()
        self._pending.appendleft(PendingReplies(len(commands), self.loop.time() + self._longest, resolve(replies)))
        self._transport.write(pack(commands))
        check_login(await replies, endpoint)

    async def _connect_tcp(self, context: ssl.SSLContext | None, name: str | None) -> None:
        """As `connect_tcp` in sync_connection.py."""
        end, (host, port) = self.loop.time() + self._timeout, (self.endpoint.host, self.endpoint.port)
        addresses = await sans_io.arun(RESOLVER.plan(host, self._timeout))
        for others, address in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
            try:
                async with asyncio.timeout((end - self.loop.time()) / (others + 1) if others else None):
                    await self.loop.create_connection(lambda: self, address, port, ssl=context, server_hostname=name)
                return
            except OSError:  # TimeoutError is one
                if not others:
                    RESOLVER.expire(host)
                    raise

    def is_fresh(self) -> bool:
        """Whether it can be written to. Data without a pending reply means that the server has closed it."""
        if self._ready and not self._pending and self._poll is not None and self._poll(0):
            self._end(lost(self.endpoint, None))
        return self.usable

    def write(self, data: bytes, count: int, deadline: float, done: Done) -> None:
        """Sends commands with so many replies; calls `done` with them, or with the error."""
        if not self._pending:
            self._last_read = self.loop.time()
        if not self._ready:
            self._extend_deadlines()
        one = PendingReplies(count, deadline, done)
        if self._timer is None or self._expires > deadline + 0.0005:
            self._expire_at(deadline)
        if self._ready and self._transport is not None:
            self._transport.write(data)
        else:
            self._unsent.append((one, data))
        self._pending.append(one)  # last: each entry is a command that was sent, or the replies would be others'

    def data_received(self, data: bytes) -> None:
        self._last_read = self.loop.time()
        if len(data) > PART:
            return self._take_parts(data)
        parser = self._parser
        try:
            short = SHORT.get(data[:5])
            if short and short[0] == len(data) and not (parser.data or parser.arrays):
                reply: Reply = data[short[1] : -2]  # hot path: one decision
            else:
                parser.feed(data)
                reply = parser.gets()
            while reply is not False:
                if not self._pending:
                    return self._end(lost(self.endpoint, "unexpected data"))
                if not self._ready:
                    check_accepted(reply, self.endpoint)
                first = self._pending[0]
                first.replies.append(reply)
                if len(first.replies) == first.count:
                    self._pending.popleft()
                    first.done(first.replies)
                reply = parser.gets() if parser.data else False
        except TooManyConnections as error:
            self._end(error)
        except BaseException as error:  # replies that were taken in part can't be distinguished any more
            self._end(lost(self.endpoint, error))
            if not isinstance(error, ProtocolError):
                raise
        if not self.usable:
            self._close_if_done()
        return None

    def _take_parts(self, data: bytes) -> None:
        """Takes much data in parts, and no more of it where one array fills a whole part after all deadlines: the loop calls no
        timer meanwhile, and has 256 KiB at a time. The replies to a login are short."""
        before: list[Reply] | None = None
        for at in range(0, len(data), PART):
            if self._transport is None or self._transport.is_closing():
                break
            self.data_received(data[at : at + PART])
            array = self._parser.arrays[0][0] if self._parser.arrays else None
            if not self._ready:
                self._end(lost(self.endpoint, "unexpected data"))
            elif array and array is before and self.loop.time() > max([one.deadline for one in self._pending], default=0):
                self._end(timed_out(self.endpoint))
            before = array

    def _expire_at(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._expires, self._timer = deadline, self.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        """Fails the calls whose deadline has passed. Replies leave the timer as it is: when it fires, it is set again. A late
        loop first reads what has arrived (uvloop calls timers before it reads): what is due by then fails the next time."""
        now, due, self._timer = self.loop.time(), self._late_at, None
        if not self._ready:
            self._extend_deadlines()
        if now - self._expires > LATE:
            self._late_at, soonest = now, now + LATE
        else:
            due = soonest = now
        for one in self._pending:
            if one.done is not _ignore and one.deadline <= due + 0.0005:
                done, one.done = one.done, _ignore
                done(timed_out(self.endpoint) if self._ready else Unsent(not_connected(self.endpoint)))
        deadlines = [one.deadline for one in self._pending if one.done is not _ignore]
        if deadlines:
            self._expire_at(max(min(deadlines), soonest))
        if self._pending and due - self._last_read >= SILENCE - 0.001:
            self.usable = False
        if not self.usable:
            self._close_if_done()

    def leave(self) -> None:
        """Has later callers use a new connection."""
        self.usable = False
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Closes the connection once nothing is pending."""
        if all(one.done is _ignore for one in self._pending):
            self._end(lost(self.endpoint, "silent"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self._end(lost(self.endpoint, error))

    def _end(self, error: StoreError) -> None:
        """Fails all pending calls and closes. What was written before the connection was ready was certainly not sent."""
        self._opening.stop()
        outcome = error if self._ready else Unsent(error)
        self.usable = self._ready = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unsent.clear()
        waiting = list(self._pending)
        self._pending.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        for one in waiting:
            with suppress(*[RuntimeError] if self.loop.is_closed() else ()):  # of tasks that will never run again
                one.done(outcome)

    def close(self) -> None:
        if not self.loop.is_closed():
            self._connecting.cancel()
        elif self._transport is not None:  # its generators were not closed: nothing can be scheduled
            transport, self._transport = self._transport, None
            with suppress(Exception):
                transport._call_connection_lost(None)  # type: ignore[attr-defined]
        self._end(lost(self.endpoint, "the store was closed"))


class AsyncConnections:
    """The connections of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._open: dict[tuple[Endpoint, Login], AsyncConnection] = {}
        self._silent: list[AsyncConnection] = []
        self._closer: AsyncGenerator[None, None] | None = None
        self._starting: asyncio.Future[None] | None = None

    def connection(self, endpoint: Endpoint, login: Login, timeout: float) -> AsyncConnection:
        """The connection to a server; a new one when the last is lost or silent."""
        found = self._open.get((endpoint, login))
        if found is not None and found.is_fresh():
            return found
        if self._closer is None:
            self._closer = self._close_with_loop()
            self._starting = asyncio.ensure_future(anext(self._closer), loop=self.loop)
        if found is not None and found._pending:
            self._silent = [one for one in self._silent if one._pending]
            self._silent.append(found)
        made = self._open[endpoint, login] = AsyncConnection(endpoint, login, self.loop, timeout)
        return made

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.close()
            await asyncio.sleep(0)

    async def run(self, plan: Plan[T], deadline: float) -> T:
        """Performs a plan within a deadline (in the loop's time)."""
        left = LeftOnLoop(lambda: deadline - self.loop.time())

        async def sleep(seconds: float) -> bool:
            if left() <= seconds:
                return False
            await asyncio.sleep(seconds)
            return True

        try:
            return await sans_io.arun(plan, lambda call: self.exchange(call, left), sleep)
        finally:
            left.stop()

    async def exchange(self, call: Call, left: LeftOnLoop) -> Outcome:
        endpoint, (login, commands, share) = call.target, call.args
        if await left.is_over():
            return Unsent(out_of_time(endpoint))
        seconds = left() / share
        outcome: asyncio.Future[Outcome] = self.loop.create_future()
        connection = self.connection(endpoint, login, seconds)
        connection.write(pack(commands), len(commands), self.loop.time() + seconds, resolve(outcome))
        replies = await outcome
        if isinstance(replies, list) and is_replica(replies):
            connection.leave()
            RESOLVER.expire(endpoint.host)
        return replies

    def close(self) -> None:
        if self._starting is not None and not self.loop.is_closed():
            self._starting.cancel()
        for connection in (*self._open.values(), *self._silent):
            connection.close()
        self._open.clear()
        self._silent.clear()
