"""The asyncio colour: one connection for each running loop and place, on which everybody's commands follow one another.

Replies come in the order of the commands, so a deque of those who wait is all the bookkeeping there is. A write has one deadline
however many callers share it; when it passes, they are told, and the late reply is thrown away when it comes. A connection
that has been silent for a second (or for a longer budget) is left to those who still wait on it; newcomers get another.

Connections end with their loop: an async generator that was begun in it is closed by `loop.shutdown_asyncgens()`, which
`asyncio.run` calls. So two successive `asyncio.run` work, and nothing is left open.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any

from ...errors import StoreError
from .address import Endpoint, Login
from .resp import ProtocolError, ReplyError, pack, reader, unavailable
from .sync_connection import StoreTimeout, StoreUnavailable, lost, poll_of, too_late
from .trips import Outcome, Pause, Plan, T, Trip

#: Told the replies; or the error, and whether it is certain that nothing was done.
Done = Callable[[list[Any], StoreError | None, bool], None]
SILENCE = 1.0


def _nobody(replies: list[Any], error: StoreError | None, unsent: bool) -> None:
    """For whom a late reply is."""


class Expected:
    """So many replies that somebody waits for until a deadline, in the loop's time."""

    __slots__ = ("count", "deadline", "done", "replies")

    def __init__(self, count: int, deadline: float, done: Done) -> None:
        self.count = count
        self.deadline = deadline
        self.done = done
        self.replies: list[Any] = []


class AsyncConnection(asyncio.Protocol):
    """One connection of one loop. `usable` until it is lost or left."""

    def __init__(self, place: Endpoint, login: Login, loop: asyncio.AbstractEventLoop, patience: float) -> None:
        self.place, self.login, self.loop = place, login, loop
        self.usable = True
        self._patience = patience
        self._transport: Any = None
        self._poll: Any = None
        self._ready = False
        self._held: list[bytes] = []  # written before the connection was there
        self._expected: deque[Expected] = deque()
        self._reader = reader()
        self._timer: asyncio.TimerHandle | None = None
        self._heard = loop.time()
        self._connecting = loop.create_task(self._connect())

    # Connecting --------------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._open()
                await self._greet()
        except asyncio.CancelledError:
            self._end(StoreUnavailable(f"{self.place}: the loop ended while connecting"), unsent=True)
            raise
        except TimeoutError:
            self._end(StoreTimeout(f"{self.place} did not take a connection within the budget"), unsent=True)
        except (OSError, ProtocolError) as error:
            self._end(StoreUnavailable(f"{self.place} can't be reached: {error}"), unsent=True)
        except StoreError as error:
            self._end(error, unsent=True)
        except BaseException as error:
            self._end(StoreUnavailable(f"{self.place}: {error!r}"), unsent=True)
            raise
        else:
            self._ready = True
            if self._held:
                self._transport.write(b"".join(self._held))
                self._held.clear()

    async def _open(self) -> None:
        tls = None if self.login.tls is None else self.login.tls.context()
        if self.place.path:
            await self.loop.create_unix_connection(lambda: self, self.place.path)
        elif tls is None:
            await self.loop.create_connection(lambda: self, self.place.host, self.place.port)
        else:
            name = self.place.host or "localhost"
            await self.loop.create_connection(lambda: self, self.place.host, self.place.port, ssl=tls, server_hostname=name)
        if tls is None and self._transport is not None:
            self._poll = poll_of(self._transport.get_extra_info("socket"))

    async def _greet(self) -> None:
        greeting = self.login.commands()
        if not greeting:
            return
        heard: asyncio.Future[list[Any]] = self.loop.create_future()

        def told(replies: list[Any], error: StoreError | None, unsent: bool) -> None:
            if not heard.done():
                heard.set_exception(error) if error is not None else heard.set_result(replies)

        self._expected.appendleft(Expected(len(greeting), self.loop.time() + self._patience, told))
        self._transport.write(pack(greeting))
        for reply in await heard:
            if isinstance(reply, ReplyError):
                raise unavailable(reply, self.place)

    # Writing and reading -------------------------------------------------------------------------------------------------

    def fresh(self) -> bool:
        """Whether it can be written on. One on which nobody waits and something has come has been closed by the server."""
        if self._ready and not self._expected and self._poll is not None and self._poll(0):
            self._end(lost(self.place, None), unsent=False)
        return self.usable

    def write(self, data: bytes, count: int, deadline: float, done: Done) -> None:
        """Commands with so many replies; `done` is told them, or why there are none."""
        if not self._expected:
            self._heard = self.loop.time()
        self._expected.append(Expected(count, deadline, done))
        if self._timer is None:
            self._timer = self.loop.call_at(deadline, self._overdue)
        elif self._timer.when() > deadline + 0.0005:
            self._timer.cancel()
            self._timer = self.loop.call_at(deadline, self._overdue)
        if self._ready:
            self._transport.write(data)
        else:
            self._held.append(data)

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        self._reader.feed(data)
        try:
            reply = self._reader.gets()
            while reply is not False:
                if not self._expected:
                    return self._end(lost(self.place, "it said something that nobody asked for"), unsent=False)
                first = self._expected[0]
                first.replies.append(reply)
                if len(first.replies) == first.count:
                    self._expected.popleft()
                    first.done(first.replies, None, False)
                reply = self._reader.gets()
        except ProtocolError as error:
            self._end(lost(self.place, error), unsent=False)
        if not self.usable:
            self._leave()
        return None

    def _overdue(self) -> None:
        """Tells those whose time is over. The timer is not moved by every reply: it looks who is next when it rings."""
        self._timer = None
        now = self.loop.time()
        following: float | None = None
        for one in self._expected:
            if one.done is _nobody:
                continue
            if one.deadline <= now + 0.0005:
                done, one.done = one.done, _nobody
                done([], too_late(self.place), False)
            elif following is None or one.deadline < following:
                following = one.deadline
        if following is not None:
            self._timer = self.loop.call_at(following, self._overdue)
        if self._expected and now - self._heard >= SILENCE - 0.001:
            self.usable = False
        if not self.usable:
            self._leave()

    def _leave(self) -> None:
        """Hangs up once nobody waits any more."""
        if all(one.done is _nobody for one in self._expected):
            self._end(lost(self.place, "left"), unsent=False)

    # Ending --------------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._end(lost(self.place, error), unsent=False)

    def eof_received(self) -> None:
        return None

    def _end(self, error: StoreError, unsent: bool) -> None:
        """Tells everybody, and hangs up. What was held back was certainly not done."""
        self.usable = False
        nothing_sent = unsent or not self._ready
        self._ready = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._held.clear()
        waiting = list(self._expected)
        self._expected.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        for one in waiting:
            one.done([], error, nothing_sent)

    def close(self) -> None:
        self._connecting.cancel()
        if self._transport is not None and self.loop.is_closed():
            self._forsake()
        self._end(lost(self.place, "the store was closed"), unsent=False)

    def _forsake(self) -> None:
        """Closes the socket of a loop that was closed without ending its generators: nothing can be scheduled in it any more."""
        transport, self._transport = self._transport, None
        with suppress(Exception):
            transport._call_connection_lost(None)


class AsyncConnections:
    """The connections of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._open: dict[tuple[Endpoint, Login], AsyncConnection] = {}
        self._left: list[AsyncConnection] = []
        self._keeper: AsyncGenerator[None, None] | None = None
        self._beginning: asyncio.Task[None] | None = None

    def stream(self, place: Endpoint, login: Login, patience: float) -> AsyncConnection:
        """The connection to a place; another one when the last is lost or left."""
        found = self._open.get((place, login))
        if found is not None and found.fresh():
            return found
        if self._keeper is None:
            self._keeper = self._kept()
            self._beginning = self.loop.create_task(self._begin())
        if found is not None and found._expected:
            self._left = [one for one in self._left if one._expected]
            self._left.append(found)
        made = self._open[place, login] = AsyncConnection(place, login, self.loop, patience)
        return made

    async def _begin(self) -> None:
        assert self._keeper is not None
        await anext(self._keeper)

    async def _kept(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.close()
            await asyncio.sleep(0)

    async def exchange(self, trips: Sequence[Trip], deadline: float) -> list[Outcome]:
        """All trips at once."""
        if len(trips) == 1:
            return [await self._travel(trips[0], deadline)]
        return list(await asyncio.gather(*[self._travel(trip, deadline) for trip in trips]))

    def _travel(self, trip: Trip, deadline: float) -> asyncio.Future[Outcome]:
        back: asyncio.Future[Outcome] = self.loop.create_future()

        def told(replies: list[Any], error: StoreError | None, unsent: bool) -> None:
            if not back.done():
                back.set_result(Outcome(replies, error, unsent))

        left = deadline - self.loop.time()
        if left <= 0:
            told([], too_late(trip.place), True)
        else:
            self.stream(trip.place, trip.login, left).write(pack(trip.commands), len(trip.commands), deadline, told)
        return back

    async def run(self, plan: Plan[T], deadline: float) -> T:
        """Follows a plan to its end."""
        try:
            step = next(plan)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(min(step.seconds, max(0.0, deadline - self.loop.time())))
                    step = plan.send([])
                else:
                    step = plan.send(await self.exchange(step, deadline))
        except StopIteration as end:
            found: T = end.value
            return found

    def close(self) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        for stream in (*self._open.values(), *self._left):
            stream.close()
        self._open.clear()
        self._left.clear()
