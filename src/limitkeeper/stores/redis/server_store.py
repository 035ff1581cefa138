"""ServerStore: a store whose operations are requests to a server; the base class of RedisStore and RemoteStore.

It has the connections of sync callers (`sync_connection.py`), the batches of each event loop (`batcher.py`), the budget of a
call, and the server's time. A `plan_…` method returns a Request where one will do, which is made without a plan; what it is and
how it is sent is the `Route`'s part (`command_routing.py`).
"""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, cast

from ...algorithms.claim import Claim, NamedLimit
from ...clock import SYSTEM, Clock, ServerClock
from ...decision import Decision
from ...errors import ConfigurationError, InvalidLimit, StoreError
from ...rate import Duration, duration_us
from ..contract import Claims, KeyState, PlannedStore, checked
from ..sans_io import Pending, Plan, T
from .async_connection import AsyncConnections
from .batcher import BatchersByLoop
from .command_routing import Route
from .request import Request
from .resp import Reply
from .sync_connection import MAX_CONNECTIONS, CallRecord, ServerConnections, SyncPool

MAX_TIMEOUT_US = 86_400_000_000
HASH_BUDGET_US = 1_000_000


class FirstUse(NamedTuple):
    """An operation on limits that have to be registered first: the plan that does it, once for all tasks that want it at the same
    time, and what follows."""

    limits: tuple[NamedLimit, ...]
    register: Callable[[], Plan[None]]
    then: Callable[[], Any]  # a plan or a request


#: What a `plan_…` method of a ServerStore returns.
Work = Plan[T] | Request[T] | FirstUse


def checked_timeout(timeout: Duration) -> int:
    """A budget in microseconds."""
    try:
        found = duration_us(timeout)
    except InvalidLimit as error:
        raise ConfigurationError(f"timeout: {error}") from None
    if not 0 < found <= MAX_TIMEOUT_US:
        raise ConfigurationError(f"timeout: expected more than 0 and at most a day, got {timeout!r}")
    return found


def checked_connections(most: int | str | None) -> int:
    most = MAX_CONNECTIONS if most is None else most
    if not str(most).isdecimal() or int(most) < 1:
        raise ConfigurationError(f"max_connections: expected at least 1, got {most!r}")
    return int(most)


class ServerStore(PlannedStore):
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
        route.on_full = pool.close_idle
        self._now_us = budget_clock.now_us
        self._idle: tuple[object, ServerConnections | None] = (None, None)  # the direct server and its connections
        self._given_clock = clock
        self._given_lock = threading.Lock()
        self._given_shift_us = self._given_last_us = 0
        self._server_time: tuple[int, int] | None = None  # the server's time when it was last seen, and ours then
        self._clock: Clock = clock or ServerClock(budget_clock.now_us, budget_clock.sleep, budget_clock.asleep)

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
            self._server_time = (self.run_plan(self.server_us()), self._now_us())
        server_us, seen_us = self._server_time
        return server_us + self._now_us() - seen_us

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

    def seen(self, decision: Decision) -> Decision:
        """Notes the server's time, which every decision shows."""
        self._server_time = (decision.start_us - decision.wait_us, self._now_us())
        return decision

    def answers_within(self, budget_us: int) -> bool:
        self.timeout_us = min(self.timeout_us, max(1000, budget_us))
        return True

    # Calls -----------------------------------------------------------------------------------------------------

    def run_plan(self, plan: Work[T], long: bool = False, to_end: bool = False, budget_us: int = 0) -> T:
        """Performs a plan or makes a request (if need be `to_end`) within the budget; a `long` plan has it for each step."""
        deadline, left_us = self._now_us() + (budget_us or self.timeout_us), self.timeout_us
        if isinstance(plan, FirstUse):
            self.pool.run(plan.register(), deadline)
            plan = cast(Plan[T] | Request[T], plan.then())
            left_us = deadline - self._now_us()
        if isinstance(plan, Request):
            return (self._call_to_end if to_end else self._call)(plan, deadline, left_us)
        if to_end and threading.current_thread() is threading.main_thread():
            return self._run_to_end(plan, deadline)
        return self.pool.run(plan, deadline, self.timeout_us if long else 0)

    async def arun_plan(self, plan: Work[T], to_end: bool = False) -> T:
        """The same; requests of one iteration are sent in one batch."""
        batcher, used = self.batchers.current(), 0.0
        if isinstance(plan, FirstUse):
            used = await batcher.run_once(plan.limits, plan.register)
            plan = cast(Plan[T] | Request[T], plan.then())
        if not isinstance(plan, Request):
            work = batcher.connections.run(plan, batcher.deadline() - used)
            return await (batcher.run_to_end(work) if to_end else work)
        await (batcher.submit_to_end if to_end else batcher.submit)(plan, used)
        return plan.answer

    def hit_request(self, named: NamedLimit, key: str, cost: int) -> Request[Decision] | None:
        """A hit on one limit; None: only `decide` can make it."""
        raise NotImplementedError

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        request = None if max_wait_us or not commit else self.hit_request(named, key, cost)
        if request is None:
            return self.decide([Claim(named, key, cost)], max_wait_us, commit=commit)
        return self.seen(self._call(request, self._now_us() + self.timeout_us, self.timeout_us))

    def hit_nowait(self, named: NamedLimit, key: str, cost: int) -> Decision | None:
        """None: a server is always waited for."""
        return None

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        request = None if max_wait_us or not commit else self.hit_request(named, key, cost)
        if request is None:
            return await self.adecide([Claim(named, key, cost)], max_wait_us, commit=commit)
        await self.batchers.current().submit(request)
        return self.seen(request.answer)

    def _decide(self, claims: Claims, max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int) -> Decision:
        plan: Any = self.plan_decide(checked(claims), max_wait_us, commit, remember, not_before_us)
        return self.seen(self.run_plan(plan, to_end=commit and (remember or max_wait_us != 0)))

    async def _adecide(
        self, claims: Claims, max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision:
        plan: Any = self.plan_decide(checked(claims), max_wait_us, commit, remember, not_before_us)
        return self.seen(await self.arun_plan(plan, to_end=commit and (remember or max_wait_us != 0)))

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        self.run_plan(self.plan_load(limit, items), long=True)

    def open_hash(self, name: str) -> ServerHash | None:
        return ServerHash(self, name)

    def plan_hash(self, name: str, *change: str | None) -> Work[dict[str, str]]:
        """Reads a hash; with a field and its value (None removes it), writes it."""
        raise NotImplementedError

    def _call(self, request: Request[T], deadline: int, left_us: int) -> T:
        """Hot path: one request to the only server, on an idle connection, with `left_us` from the moment of sending; a plan when
        that is not possible."""
        if not self.route.decode(request, self._call_directly(request, deadline, left_us)):
            self.pool.run(self.route.execute_all([request]), deadline)
        return request.answer

    def _call_directly(self, request: Request[T], deadline: int, left_us: int, record: CallRecord | None = None) -> Reply:
        """The reply of the only server on an idle connection; None: nothing was sent."""
        endpoint = self.route.direct
        if endpoint is None or left_us <= 0 or deadline - self.timeout_us >= self.route.confirm_at_us:
            return None
        known, idle = self._idle
        if known is not endpoint or idle is None:
            idle = self.pool.idle(endpoint, self.route.login)
            self._idle = (endpoint, idle)
        try:
            return self.pool.call(idle, self.route.pack(request), left_us, record)
        except StoreError:
            self.route.on_unreachable(endpoint)
            raise

    def _call_to_end(self, request: Request[T], deadline: int, left_us: int) -> T:
        """As `_call`, for a charge that may be ahead of time. When a signal handler raises, its exception goes on once the
        outcome is known: the claims then show what was charged, and the caller gives it back."""
        record = CallRecord()
        try:
            if not self.route.decode(request, self._call_directly(request, deadline, left_us, record)):
                self.pool.run(self.route.execute_all([request]), deadline, record=record)
            return request.answer
        except BaseException:
            record.finish(deadline)
            with suppress(StoreError):
                if request.pending:
                    self.route.decode(request, record.reply)
                if not request.pending:
                    self.seen(cast(Decision, request.answer))
            raise

    def _run_to_end(self, plan: Plan[T], deadline: int) -> T:
        """Performs a plan that charges in a thread, where no signal handler runs. What one raises here goes on when the outcome
        is known, as in `_call_to_end`. (A thread costs 0.1 ms, beside one round trip to each of several servers.)"""
        pending, by_thread = Pending(), list[bool]()  # the first entry: whether the thread performs the plan, or nothing does

        def work() -> None:
            by_thread.append(True)
            if by_thread[0]:
                try:
                    pending.finish(self.pool.run(plan, deadline))
                except BaseException as error:
                    pending.finish(error)

        try:
            _thread.start_new_thread(work, ())  # in C: a handler that raises in Thread.start leaves its lock broken
            pending.result()
        except BaseException:
            by_thread.append(False)
            while by_thread[0] and not pending.done:
                with suppress(BaseException):  # of a signal handler again; the first one's exception goes on
                    pending.result()
            raise
        if isinstance(pending.value, BaseException):
            raise pending.value
        return pending.value  # type: ignore[no-any-return]

    def close(self) -> None:
        self.pool.close()
        self.batchers.close()

    async def aclose(self) -> None:
        self.close()
        await asyncio.sleep(0)  # transports end in the next iteration


class ServerHash:
    """A hash of short texts on the server (stores/store_hash.py). It has a budget of its own: that of a decision may be a few
    milliseconds, and no caller waits for this."""

    polled, quick = True, False

    def __init__(self, store: ServerStore, name: str) -> None:
        self._store, self._name = store, name

    def read(self) -> dict[str, str]:
        return self._call()

    def write(self, field: str, value: str | None) -> None:
        self._call(field, value)

    def _call(self, *change: str | None) -> dict[str, str]:
        store = self._store
        return store.run_plan(store.plan_hash(self._name, *change), budget_us=max(store.timeout_us, HASH_BUDGET_US))
