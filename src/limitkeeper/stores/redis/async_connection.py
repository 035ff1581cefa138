"""Asyncio connections: one per event loop and server, on which the commands of all callers are pipelined.

Replies arrive in the order of the commands, so a deque of pending replies is all the bookkeeping. A write has one deadline
however many callers share it; when it passes, they fail, and the late reply is dropped when it arrives. A connection that has
been silent for a second (or for a longer budget) is left to those who still wait on it; later callers get a new one.

Connections end with their loop: an async generator that was started in it is closed by `loop.shutdown_asyncgens()`, which
`asyncio.run` calls. So two successive `asyncio.run` work, and nothing is left open.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from ...errors import StoreError, StoreTimeout, StoreUnavailable
from .. import sans_io
from ..sans_io import Call, Plan, T
from .address import Endpoint, Login
from .resp import Outcome, ProtocolError, Reply, ReplyError, Unsent, new_parser, pack, unavailable
from .sync_connection import Poll, lost, poll_of, timed_out

#: Called with the replies; or with the error, and whether it is certain that nothing was sent.
Done = Callable[[list[Reply], StoreError | None, bool], None]
SILENCE = 1.0


def _ignore(replies: list[Reply], error: StoreError | None, unsent: bool) -> None:
    """Takes the late reply of a call that timed out."""


class PendingReplies:
    """So many replies, due by a deadline in the loop's time."""

    __slots__ = ("count", "deadline", "done", "replies")

    def __init__(self, count: int, deadline: float, done: Done) -> None:
        self.count = count
        self.deadline = deadline
        self.done = done
        self.replies: list[Reply] = []


class AsyncConnection(asyncio.Protocol):
    """One connection of one loop. `usable` until it is lost, or silent for too long."""

    def __init__(self, endpoint: Endpoint, login: Login, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self.endpoint, self.login, self.loop = endpoint, login, loop
        self.usable = True
        self._timeout = timeout
        self._transport: asyncio.Transport | None = None
        self._poll: Poll | None = None
        self._ready = False
        self._unsent: list[bytes] = []  # written before the connection was ready
        self._pending: deque[PendingReplies] = deque()
        self._parser = new_parser()
        self._timer: asyncio.TimerHandle | None = None
        self._last_read = loop.time()
        self._connecting = loop.create_task(self._connect())

    # Connecting --------------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._open()
                await self._log_in()
        except asyncio.CancelledError:
            self._end(StoreUnavailable(f"{self.endpoint}: the loop ended while connecting"), unsent=True)
            raise
        except TimeoutError:
            self._end(StoreTimeout(f"{self.endpoint} did not accept a connection within the budget"), unsent=True)
        except (OSError, ProtocolError) as error:
            self._end(StoreUnavailable(f"{self.endpoint} can't be reached: {error}"), unsent=True)
        except StoreError as error:
            self._end(error, unsent=True)
        except BaseException as error:
            self._end(StoreUnavailable(f"{self.endpoint}: {error!r}"), unsent=True)
            raise
        else:
            self._ready = True
            if self._unsent and self._transport is not None:
                self._transport.write(b"".join(self._unsent))
                self._unsent.clear()

    async def _open(self) -> None:
        tls = None if self.login.tls is None else self.login.tls.context()
        if self.endpoint.path:
            await self.loop.create_unix_connection(lambda: self, self.endpoint.path)
        elif tls is None:
            await self.loop.create_connection(lambda: self, self.endpoint.host, self.endpoint.port)
        else:
            name = self.endpoint.host or "localhost"
            await self.loop.create_connection(lambda: self, self.endpoint.host, self.endpoint.port, ssl=tls, server_hostname=name)
        if tls is None and self._transport is not None:
            self._poll = poll_of(self._transport.get_extra_info("socket"))

    async def _log_in(self) -> None:
        commands = self.login.commands()
        if not commands:
            return
        logged_in: asyncio.Future[list[Reply]] = self.loop.create_future()

        def done(replies: list[Reply], error: StoreError | None, unsent: bool) -> None:
            if not logged_in.done():
                logged_in.set_exception(error) if error is not None else logged_in.set_result(replies)

        assert self._transport is not None
        self._pending.appendleft(PendingReplies(len(commands), self.loop.time() + self._timeout, done))
        self._transport.write(pack(commands))
        for reply in await logged_in:
            if isinstance(reply, ReplyError):
                raise unavailable(reply, self.endpoint)

    # Writing and reading -------------------------------------------------------------------------------------------------

    def is_fresh(self) -> bool:
        """Whether it can be written to. Data without a pending reply means that the server has closed it."""
        if self._ready and not self._pending and self._poll is not None and self._poll(0):
            self._end(lost(self.endpoint, None), unsent=False)
        return self.usable

    def write(self, data: bytes, count: int, deadline: float, done: Done) -> None:
        """Sends commands with so many replies; calls `done` with them, or with the error."""
        if not self._pending:
            self._last_read = self.loop.time()
        self._pending.append(PendingReplies(count, deadline, done))
        if self._timer is None:
            self._timer = self.loop.call_at(deadline, self._expire)
        elif self._timer.when() > deadline + 0.0005:
            self._timer.cancel()
            self._timer = self.loop.call_at(deadline, self._expire)
        if self._ready and self._transport is not None:
            self._transport.write(data)
        else:
            self._unsent.append(data)

    def data_received(self, data: bytes) -> None:
        self._last_read = self.loop.time()
        self._parser.feed(data)
        try:
            reply = self._parser.gets()
            while reply is not False:
                if not self._pending:
                    return self._end(lost(self.endpoint, "unexpected data"), unsent=False)
                first = self._pending[0]
                first.replies.append(reply)
                if len(first.replies) == first.count:
                    self._pending.popleft()
                    first.done(first.replies, None, False)
                reply = self._parser.gets()
        except ProtocolError as error:
            self._end(lost(self.endpoint, error), unsent=False)
        if not self.usable:
            self._close_if_done()
        return None

    def _expire(self) -> None:
        """Fails the calls whose deadline has passed. Replies leave the timer as it is: when it fires, it is set again."""
        self._timer = None
        now = self.loop.time()
        following: float | None = None
        for one in self._pending:
            if one.done is _ignore:
                continue
            if one.deadline <= now + 0.0005:
                done, one.done = one.done, _ignore
                done([], timed_out(self.endpoint), False)
            elif following is None or one.deadline < following:
                following = one.deadline
        if following is not None:
            self._timer = self.loop.call_at(following, self._expire)
        if self._pending and now - self._last_read >= SILENCE - 0.001:
            self.usable = False
        if not self.usable:
            self._close_if_done()

    def _close_if_done(self) -> None:
        """Closes the connection once nothing is pending."""
        if all(one.done is _ignore for one in self._pending):
            self._end(lost(self.endpoint, "silent"), unsent=False)

    # Ending --------------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self._end(lost(self.endpoint, error), unsent=False)

    def eof_received(self) -> None:
        return None

    def _end(self, error: StoreError, unsent: bool) -> None:
        """Fails all pending calls and closes. What was written before the connection was ready was certainly not sent."""
        self.usable = False
        nothing_sent = unsent or not self._ready
        self._ready = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unsent.clear()
        waiting = list(self._pending)
        self._pending.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        for one in waiting:
            one.done([], error, nothing_sent)

    def close(self) -> None:
        self._connecting.cancel()
        if self._transport is not None and self.loop.is_closed():
            self._abandon()
        self._end(lost(self.endpoint, "the store was closed"), unsent=False)

    def _abandon(self) -> None:
        """Closes the socket of a loop that was closed without closing its generators: nothing can be scheduled in it any more."""
        transport, self._transport = self._transport, None
        with suppress(Exception):
            transport._call_connection_lost(None)  # type: ignore[union-attr]


class AsyncConnections:
    """The connections of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._open: dict[tuple[Endpoint, Login], AsyncConnection] = {}
        self._silent: list[AsyncConnection] = []
        self._closer: AsyncGenerator[None, None] | None = None
        self._starting: asyncio.Task[None] | None = None

    def connection(self, endpoint: Endpoint, login: Login, timeout: float) -> AsyncConnection:
        """The connection to a server; a new one when the last is lost or silent."""
        found = self._open.get((endpoint, login))
        if found is not None and found.is_fresh():
            return found
        if self._closer is None:
            self._closer = self._close_with_loop()
            self._starting = self.loop.create_task(self._start(self._closer))
        if found is not None and found._pending:
            self._silent = [one for one in self._silent if one._pending]
            self._silent.append(found)
        made = self._open[endpoint, login] = AsyncConnection(endpoint, login, self.loop, timeout)
        return made

    async def _start(self, closer: AsyncGenerator[None, None]) -> None:
        await anext(closer)

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.close()
            await asyncio.sleep(0)

    async def run(self, plan: Plan[T], deadline: float) -> T:
        """Performs a plan within a deadline (in the loop's time)."""

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(min(seconds, max(0.0, deadline - self.loop.time())))

        return await sans_io.arun(plan, lambda call: self.exchange(call, deadline), sleep)

    async def exchange(self, call: Call, deadline: float) -> Outcome:
        endpoint, (login, commands) = call.target, call.args
        left = deadline - self.loop.time()
        if left <= 0:
            return Unsent(timed_out(endpoint))
        outcome: asyncio.Future[Outcome] = self.loop.create_future()

        def done(replies: list[Reply], error: StoreError | None, unsent: bool) -> None:
            if not outcome.done():
                outcome.set_result(replies if error is None else Unsent(error) if unsent else error)

        self.connection(endpoint, login, left).write(pack(commands), len(commands), deadline, done)
        return await outcome

    def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        for connection in (*self._open.values(), *self._silent):
            connection.close()
        self._open.clear()
        self._silent.clear()
