"""ServerStore: a store whose operations are requests to a server; the base class of RedisStore and RemoteStore.

It has the connections of sync callers (`sync_connection.py`), the batches of each event loop (`batcher.py`), the budget of a
call, and the server's time. What a request is and how it is sent is its `Route`'s part (`command_routing.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

from ...algorithms.claim import NamedLimit
from ...clock import SYSTEM, Clock
from ...decision import Decision
from ...errors import ConfigurationError, StoreError
from ...rate import Duration, duration_us
from ..contract import Store
from ..sans_io import Plan, T
from .async_connection import AsyncConnections
from .batcher import BatchersByLoop
from .command_routing import Route
from .request import Request
from .resp import Reply
from .sync_connection import MAX_CONNECTIONS, CallRecord, ServerConnections, SyncPool

MAX_TIMEOUT_US = 86_400_000_000


class ServerClock(NamedTuple):
    """The clock of a store: its time is an estimate of the server's; it sleeps in real time."""

    now_us: Callable[[], int]
    sleep: Callable[..., None]
    asleep: Callable[..., Coroutine[Any, Any, None]]


def checked_timeout(timeout: Duration) -> int:
    """A budget in microseconds."""
    found = duration_us(timeout)
    if not 0 < found <= MAX_TIMEOUT_US:
        raise ConfigurationError(f"timeout: expected more than 0 and at most a day, got {timeout!r}")
    return found


def checked_connections(most: int | str | None) -> int:
    most = MAX_CONNECTIONS if most is None else most
    if not str(most).isdecimal() or int(most) < 1:
        raise ConfigurationError(f"max_connections: expected at least 1, got {most!r}")
    return int(most)


class ServerStore(Store):
    """Requests over `pool` (sync) and over the connections that `connect` makes for an event loop, on the way of `route`."""

    can_rebook = True

    def __init__(
        self,
        route: Route,
        pool: SyncPool,
        timeout_us: int,
        clock: Clock | None,
        budget_clock: Clock = SYSTEM,
        connect: Callable[[asyncio.AbstractEventLoop], AsyncConnections] = AsyncConnections,
    ) -> None:
        self.route, self.pool, self.timeout_us, self.address = route, pool, timeout_us, route.address
        self.batchers = BatchersByLoop(self, connect)
        self._now_us = budget_clock.now_us
        self._idle: tuple[object, ServerConnections | None] = (None, None)  # the direct server and its connections
        self._given_clock = clock
        self._given_lock = threading.Lock()
        self._given_shift_us = self._given_last_us = 0
        self._server_time: tuple[int, int] | None = None  # the server's time when it was last seen, and ours then
        self._clock: Clock = clock or ServerClock(self.estimated_us, budget_clock.sleep, budget_clock.asleep)

    # Time ------------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        return self._clock

    def server_us(self) -> Plan[int]:
        """The server's time in microseconds."""
        raise NotImplementedError

    def now_us(self) -> int:
        """The server's time: that of its last reply plus what has passed since; read when there was no reply yet."""
        if self._given_clock is not None:
            return self.given_us() or 0
        if self._server_time is None:
            self._server_time = (self._run(self.server_us()), self._now_us())
        return self.estimated_us()

    def estimated_us(self) -> int:
        """The server's time as far as it is known; this machine's until the first reply."""
        seen = self._server_time
        return self._now_us() if seen is None else seen[0] + self._now_us() - seen[1]

    def given_us(self) -> int | None:
        """The time that a request carries, of the `clock` given; None: the server's time counts. It never goes back."""
        if self._given_clock is None:
            return None
        with self._given_lock:
            now_us = int(self._given_clock.now_us()) + self._given_shift_us
            if now_us < self._given_last_us:
                self._given_shift_us += self._given_last_us - now_us
            self._given_last_us = max(now_us, self._given_last_us)
            return self._given_last_us

    def _seen(self, decision: Decision) -> Decision:
        """Notes the server's time, which every decision shows."""
        self._server_time = (decision.start_us - decision.wait_us, self._now_us())
        return decision

    def answers_within(self, budget_us: int) -> bool:
        self.timeout_us = min(self.timeout_us, max(1000, budget_us))
        return True

    # Calls -----------------------------------------------------------------------------------------------------

    def _run(self, plan: Plan[T], long: bool = False) -> T:
        """Performs a plan within the budget; a `long` one has it for each of its steps."""
        return self.pool.run(plan, self._now_us() + self.timeout_us, self.timeout_us if long else 0)

    async def _arun(self, plan: Plan[T], used: float = 0.0) -> T:
        batcher = self.batchers.current()
        return await batcher.connections.run(plan, batcher.deadline() - used)

    def _call(self, request: Request[T], deadline: int) -> T:
        """Hot path: one request to the only server, on an idle connection; a plan when that is not possible."""
        if not self.route.decode(request, self._call_directly(request, deadline)):
            self.pool.run(self.route.execute_all([request]), deadline)
        return request.answer

    def _call_directly(self, request: Request[T], deadline: int, record: CallRecord | None = None) -> Reply:
        """The reply of the only server on an idle connection; None: nothing was sent."""
        endpoint = self.route.direct
        if endpoint is None or deadline - self.timeout_us >= self.route.confirm_at_us:
            return None
        known, idle = self._idle
        if known is not endpoint or idle is None:
            idle = self.pool.idle(endpoint, self.route.login)
            self._idle = (endpoint, idle)
        try:
            return self.pool.call(idle, self.route.pack(request), deadline, record)
        except StoreError:
            self.route.on_unreachable(endpoint)
            raise

    def _call_to_end(self, request: Request[T], deadline: int) -> T:
        """As `_call`, for a charge that may be ahead of time. When a signal handler raises, its exception goes on once the
        outcome is known: the claims then show what was charged, and the caller gives it back."""
        record = CallRecord()
        try:
            reply = self._call_directly(request, deadline, record)
            if not self.route.decode(request, reply) and not record.raised:
                self.pool.run(self.route.execute_all([request]), deadline, record=record)
            if record.raised:
                raise record.raised[0]
            return request.answer
        except BaseException:
            if request.pending:
                with suppress(StoreError):
                    record.finish(deadline)
                self.route.decode(request, record.reply)
            raise

    def hit_nowait(self, named: NamedLimit, key: str, cost: int) -> Decision | None:
        return None

    def close(self) -> None:
        self.pool.close()
        self.batchers.close()

    async def aclose(self) -> None:
        self.close()
        await asyncio.sleep(0)  # transports end in the next iteration
