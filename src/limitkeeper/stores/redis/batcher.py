"""The coach: decisions that are asked for in the same turn of an event loop travel together.

The first one calls the coach (`loop.call_soon`), the others get in, and when the loop comes to it everything leaves as one
script call over one connection (in a cluster, one write for each node); beyond `SEATS` asks, as several, each a turn of the
loop after the other. Each caller waits on a future of its own. Who is cancelled before the coach leaves has asked nothing;
who is cancelled later has been decided: what was charged stays charged. One deadline for each coach, none for each caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...errors import ConfigurationError, StoreError, StoreUnavailable
from .address import Endpoint, Login
from .async_connection import AsyncConnections
from .operations import ScriptRequest
from .resp import pack
from .route import Route
from .script_call import ScriptCall, parcelled
from .trips import Plan

#: Who finds no seat takes the next coach, a turn of the loop later: then the server decides on one while the client makes
#: ready the other. 64 tasks get 88 000 decisions a second in two coaches, 62 000 in one (measured on loopback).
MAX_BATCH = 32


class BatcherHost(Protocol):
    """What a coach needs of its store."""

    route: Route
    timeout_us: int

    def streams(self, loop: asyncio.AbstractEventLoop) -> AsyncConnections: ...

    def answered(self, asks: Sequence[ScriptRequest]) -> Plan[list[StoreError | None]]: ...


class Batcher:
    """Of one loop and one store."""

    def __init__(self, store: BatcherHost, streams: AsyncConnections) -> None:
        self.store = store
        self.streams = streams
        self.loop = streams.loop
        self._asks: list[ScriptRequest] = []
        self._callers: list[asyncio.Future[None]] = []
        self._journeys: set[asyncio.Task[None]] = set()
        self._until: float | None = None
        self._meetings: dict[Any, asyncio.Task[None]] = {}

    def board(self, ask: ScriptRequest, deadline: float | None = None) -> asyncio.Future[None]:
        """A seat for an ask: the future is done when the ask is answered. A deadline is for those who spent time before."""
        caller: asyncio.Future[None] = self.loop.create_future()
        if not self._asks:
            self.loop.call_soon(self._depart)
        if deadline is not None:
            self._until = deadline if self._until is None else min(self._until, deadline)
        self._asks.append(ask)
        self._callers.append(caller)
        return caller

    async def meet(self, whom: Any, plan: Callable[[], Plan[None]], deadline: float) -> None:
        """Follows a plan once for all tasks that want the same at the same time: limits to be made known to the server."""
        meeting = self._meetings.get(whom)
        if meeting is None:
            meeting = self._meetings[whom] = self.loop.create_task(self.streams.run(plan(), deadline))
            meeting.add_done_callback(lambda done: self._met(whom, done))
        try:
            await asyncio.shield(meeting)
        except (StoreError, ConfigurationError) as error:
            raise type(error)(*error.args) from None

    def _met(self, whom: Any, meeting: asyncio.Task[None]) -> None:
        del self._meetings[whom]
        if not meeting.cancelled():
            meeting.exception()  # whoever waited for it was told

    def _depart(self) -> None:
        asks, callers, until = self._asks[:MAX_BATCH], self._callers[:MAX_BATCH], self._until
        del self._asks[:MAX_BATCH], self._callers[:MAX_BATCH]
        if self._asks:
            self.loop.call_soon(self._depart)
        else:
            self._until = None
        for at in range(len(callers) - 1, -1, -1):
            if callers[at].done():  # cancelled meanwhile
                del asks[at], callers[at]
        if not asks:
            return
        deadline = self.loop.time() + self.store.timeout_us / 1e6
        if until is not None:
            deadline = min(deadline, until)
        try:
            place = self.store.route.direct
            if place is None:
                self._take_the_long_way(asks, callers, deadline)
            else:
                self._drive(place, self.store.route.login, asks, callers, deadline)
        except BaseException as error:  # nobody may wait for a coach that broke down
            _tell(callers, error)
            raise

    def _drive(
        self, place: Endpoint, login: Login, asks: list[ScriptRequest], callers: list[asyncio.Future[None]], deadline: float
    ) -> None:
        """The straight way, to a place that is known."""
        parcels = parcelled(asks)
        stream = self.streams.stream(place, login, max(0.001, deadline - self.loop.time()))

        def arrived(replies: list[Any], error: StoreError | None, unsent: bool) -> None:
            if error is not None:
                self.store.route.gone(place)
            if (error is not None and not unsent) or self.loop.is_closed():
                _tell(callers, error)
            elif error is None and self._read(parcels, replies):
                _tell(callers, None)
            else:
                self._take_the_long_way(asks, callers, deadline)

        stream.write(pack([command for parcel in parcels for command in parcel.commands()]), len(parcels), deadline, arrived)

    def _read(self, parcels: list[ScriptCall], replies: list[Any]) -> bool:
        """Whether all is answered; otherwise all those that are not go the long way."""
        whole = True
        for parcel, reply in zip(parcels, replies, strict=True):
            whole = type(reply) is bytes and parcel.take([reply]) and whole
        return whole and not any(ask.stale is not None for parcel in parcels for ask in parcel.asks)

    def _take_the_long_way(self, asks: list[ScriptRequest], callers: list[asyncio.Future[None]], deadline: float) -> None:
        """Those that are not answered yet: what the plan for the topology says."""
        left = [at for at, ask in enumerate(asks) if ask.answer is None or ask.stale is not None]
        task = self.loop.create_task(self._journey(asks, callers, left, deadline))
        self._journeys.add(task)
        task.add_done_callback(self._journeys.discard)

    async def _journey(
        self, asks: list[ScriptRequest], callers: list[asyncio.Future[None]], left: list[int], deadline: float
    ) -> None:
        errors: Sequence[Exception | None] = []
        try:
            errors = await self.streams.run(self.store.answered([asks[at] for at in left]), deadline)
        except (StoreError, ConfigurationError) as error:
            errors = [error] * len(left)
        except BaseException as error:
            _tell(callers, StoreUnavailable(f"{self.store.route.address}: {error!r}"))
            raise
        for at, failed in zip(left, errors, strict=True):
            if failed is not None:
                _tell([callers[at]], failed)
        _tell(callers, None)


def _tell(callers: Sequence[asyncio.Future[None]], error: BaseException | None) -> None:
    for caller in callers:
        if not caller.done():
            if error is None:
                caller.set_result(None)
            else:
                caller.set_exception(type(error)(*error.args))  # each raises its own
