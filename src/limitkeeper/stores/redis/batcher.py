"""Batches the decisions of one event-loop iteration into one EVALSHA.

The first request schedules the batch (`loop.call_soon`), the others of the same iteration join it, and all are sent as one
script call over one connection (in a cluster, one write per node). Requests beyond MAX_BATCH go into the next batch, one
iteration later. Each caller awaits a future of its own. A caller that is cancelled before its batch is sent has requested
nothing. One that is cancelled later has been decided: a hit stays charged, and who asked for a later start learns the outcome
(`submit_to_end`) and gives it back. A batch has one deadline, which is that of each of its callers: only those that have used the
same part of their budgets (none, or what a registration took) share one. It is counted from the moment of sending: the time that
100 000 tasks take to submit their requests is the loop's, not the server's.

When a server does not know a script, or has closed the connection, the batches that failed are repeated in the order in which
they were made, after those in flight are answered and before any later one: first come, first served holds then too. The first
is repeated alone, since it loads the script, or finds the server; the others follow without waiting for one another's replies,
or batches would come faster than they are repeated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from ...errors import ConfigurationError, StoreError, StoreUnavailable
from ...fork import reset_after_fork
from ..sans_io import LeftOnLoop, Plan, T, finish, start_task
from .address import Endpoint
from .async_connection import AsyncConnections
from .request import AnyRequest
from .resp import Outcome, Unsent, error_of, out_of_time

if TYPE_CHECKING:
    from .server_store import ServerStore

#: Two batches let the server decide on one while the client prepares the other: 64 tasks get 88 000 decisions a second in two
#: batches, 62 000 in one (measured on loopback).
MAX_BATCH = 32

Requests = Sequence[AnyRequest]
#: Its number, its requests, and its deadline.
Batch = tuple[int, Requests, float]


class Batcher:
    """The batches of one event loop and one store."""

    def __init__(self, store: ServerStore, connections: AsyncConnections) -> None:
        self.store = store
        self.connections = connections
        self.loop = connections.loop
        self._requests: list[AnyRequest] = []
        self._slow: set[asyncio.Task[None]] = set()
        self._sent = 0  # batches sent so far
        self._unanswered = 0
        self._to_repeat: list[Batch] = []  # a heap
        self._to_send: deque[Batch] = deque()  # those made meanwhile, in order
        self._repeating = False
        self._all_answered = asyncio.Event()
        self._shared: dict[Hashable, asyncio.Task[float]] = {}
        self._registering: dict[Hashable, int] = {}  # how many tasks wait for a registration
        self._resuming = 0  # tasks whose registration is done and whose requests are still to be submitted
        self._front = 0  # how many requests of such tasks are at the front of the next batch

    def deadline(self) -> float:
        """The deadline of a call that starts now, in the loop's time."""
        return self.loop.time() + self.store.timeout_us / 1e6

    def submit(self, request: AnyRequest, used: float = 0.0) -> asyncio.Future[None]:
        """Adds a request to the next batch; the future is done when it is answered. `used`: seconds of its budget, so far: one
        that has waited for a registration goes before those that came meanwhile."""
        future = request.future = self.loop.create_future()
        if not self._requests:
            self.loop.call_soon(self._send_batch)
        request.used = used
        if used:
            self._requests.insert(self._front, request)
            self._front += 1
        else:
            self._requests.append(request)
        return future

    async def submit_to_end(self, request: AnyRequest, used: float = 0.0) -> None:
        """As submit, for a charge that may be ahead of time: a caller that is cancelled after the request was sent is cancelled
        when the outcome is known, so that it can give back what the claims then show as charged."""
        future = self.submit(request, used)
        try:
            await future
        except asyncio.CancelledError:
            while request.in_flight:  # within the budget, also when it is cancelled again
                request.future = self.loop.create_future()
                with suppress(asyncio.CancelledError, StoreError, ConfigurationError):
                    await request.future
            if not request.pending:
                with suppress(StoreError):
                    self.store.seen(request.answer)  # the caller needs the time to give it back
            raise

    async def run_to_end(self, work: Coroutine[object, object, T]) -> T:
        """As submit_to_end, for a decision that takes several requests."""
        task = self.loop.create_task(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if (decision := await finish(task)) is not None:
                self.store.seen(decision)
            raise

    async def run_once(self, key: Hashable, plan: Callable[[], Plan[None]]) -> float:
        """Runs a plan once for all tasks that want it at the same time: the registration of limits. Returns how long it took."""
        task = self._shared.get(key)
        if task is None:
            task = self._shared[key] = start_task(self._timed(plan()), self.loop)
            task.add_done_callback(lambda done: self._forget(key, done))
        self._registering[key] = self._registering.get(key, 0) + 1
        try:
            return await asyncio.shield(task)
        except (StoreError, ConfigurationError) as error:
            raise type(error)(*error.args) from None
        finally:
            if task.done():
                self._resuming -= 1
            else:
                self._registering[key] -= 1

    async def _timed(self, plan: Plan[None]) -> float:
        deadline = self.deadline()
        left = LeftOnLoop(lambda: deadline - self.loop.time())
        allowed = left()
        try:
            await self.connections.run(plan, deadline)
            return max(1e-6, allowed - left())  # never nothing: uvloop's clock moves once a millisecond
        finally:
            left.stop()

    def _forget(self, key: Hashable, task: asyncio.Task[float]) -> None:
        del self._shared[key]
        self._resuming += self._registering.pop(key)
        if not task.cancelled():
            task.exception()  # every waiting task raises it

    def _send_batch(self) -> None:
        if self._resuming:
            self.loop.call_soon(self._send_batch)
            return
        size, used = MAX_BATCH, self._requests[0].used
        if self._front:
            size = next((n for n, request in enumerate(self._requests[:MAX_BATCH]) if request.used != used), MAX_BATCH)
            self._front = max(0, self._front - size)
        requests = [request for request in self._requests[:size] if not request.future.done()]  # without the cancelled ones
        for request in requests:
            request.in_flight = True
        del self._requests[:size]
        deadline = self.deadline() - used
        if self._requests:
            self.loop.call_soon(self._send_batch)
        if not requests:
            return
        self._sent += 1
        self._send((self._sent, requests, deadline))

    def _send(self, batch: Batch) -> None:
        _, requests, deadline = batch
        try:
            endpoint = self.store.route.direct
            if endpoint is not None and self.store.route.is_due():
                self._start(self._confirm(deadline))
            if endpoint is None:
                self._start(self._run_plan(requests, deadline))
            elif self._repeating:
                self._to_send.append(batch)
            else:
                self._execute(endpoint, batch)
        except BaseException as error:  # no caller may be left waiting
            _resolve(requests, as_store_error(error, self.store.route.address))
            raise

    def _execute(self, endpoint: Endpoint, batch: Batch) -> None:
        """Hot path, without a plan: one write to the only server, whose address is known."""
        _, requests, deadline = batch
        data, replies, decode = self.store.route.pack_batch(endpoint, requests)

        def done(outcome: Outcome) -> None:
            self._unanswered -= 1
            if not self._unanswered:
                self._all_answered.set()
            if isinstance(outcome, list):
                try:
                    answered = decode(outcome)
                except StoreError as error:
                    return _resolve(requests, error)
                except BaseException as error:  # no caller may be left waiting
                    _resolve(requests, as_store_error(error, endpoint))
                    raise
                if answered:
                    return _resolve(requests, None)
            else:
                self.store.route.on_unreachable(endpoint)
                if not isinstance(outcome, Unsent) or self.loop.is_closed():
                    return _resolve(requests, error_of(outcome))
            return self._repeat(batch)

        timeout = max(0.001, deadline - self.loop.time())
        self.connections.connection(endpoint, self.store.route.login, timeout).write(data, replies, deadline, done)
        self._unanswered += 1
        self._all_answered.clear()

    def _repeat(self, batch: Batch) -> None:
        """Has the pending requests of a batch executed by the plan of the topology, in the order of the batches."""
        heappush(self._to_repeat, batch)
        if not self._repeating:
            self._repeating = True
            self._start(self._repeat_all())

    async def _repeat_all(self) -> None:
        try:
            while self._to_repeat:
                if self._unanswered:
                    with suppress(TimeoutError):  # the plan then fails at once
                        async with asyncio.timeout_at(self._to_repeat[0][2]):
                            await self._all_answered.wait()
                _, requests, deadline = heappop(self._to_repeat)  # now: an earlier batch may have come meanwhile
                await self._run_plan(requests, deadline)
                others = [heappop(self._to_repeat) for _ in range(0 if self._unanswered else len(self._to_repeat))]
                await asyncio.gather(*[self._run_plan(requests, deadline) for _, requests, deadline in others])
            self._repeating = False
            for _ in range(len(self._to_send)):
                batch = self._to_send.popleft()
                if batch[2] > self.loop.time():
                    self._send(batch)
                else:
                    _resolve(batch[1], out_of_time(self.store.route.address.endpoints[0]))
        except BaseException as error:
            self._repeating = False
            for _, requests, _ in (*self._to_repeat, *self._to_send):
                _resolve(requests, as_store_error(error, self.store.route.address))
            self._to_repeat.clear()
            self._to_send.clear()
            raise

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = start_task(work, self.loop)
        self._slow.add(task)
        task.add_done_callback(self._slow.discard)

    async def _confirm(self, deadline: float) -> None:
        """Has the address of the server confirmed while batches go on: none is overtaken."""
        with suppress(StoreError):
            await self.connections.run(self.store.route.all_endpoints(), deadline)

    async def _run_plan(self, requests: Requests, deadline: float) -> None:
        """Has requests executed, those of each server by a plan of their own: none waits for another server's replies."""
        pending = [request for request in requests if request.pending]
        try:
            groups = await self.connections.run(self.store.route.by_server(pending), deadline)
            await asyncio.gather(*[self._run_group(group, deadline) for group in groups])
        except (StoreError, ConfigurationError) as error:
            _resolve(pending, error)
        except BaseException as error:
            _resolve(requests, as_store_error(error, self.store.route.address))
            raise
        _resolve(requests, None)

    async def _run_group(self, requests: Requests, deadline: float) -> None:
        try:
            await self.connections.run(self.store.route.execute(requests), deadline)
        except (StoreError, ConfigurationError) as error:
            _resolve(requests, error)
        else:
            for request in requests:
                _resolve([request], request.error)


def as_store_error(error: BaseException, source: object) -> StoreUnavailable:
    """What the callers of a batch get when it ends with another error than one of the store."""
    return StoreUnavailable(f"{source}: {error!r}")


def _resolve(requests: Requests, error: BaseException | None) -> None:
    for request in requests:
        request.in_flight = False
        if not request.future.done():
            if error is None:
                request.future.set_result(None)
            else:
                request.future.set_exception(type(error)(*error.args))  # each caller raises its own


_of_parent: list[object] = []  # kept alive after a fork, so that nothing of the parent's loops is closed


class BatchersByLoop:
    """The batchers of a store, one per running event loop. A batcher ends with its loop; a store outlives any number of them."""

    def __init__(self, store: ServerStore, connect: Callable[[asyncio.AbstractEventLoop], AsyncConnections]) -> None:
        self._store, self._connect = store, connect
        self._batchers: dict[asyncio.AbstractEventLoop, Batcher] = {}
        reset_after_fork(self)

    def current(self) -> Batcher:
        """The batcher of the running loop."""
        loop = asyncio.get_running_loop()
        found = self._batchers.get(loop)
        if found is None:
            for other in [one for one in list(self._batchers) if one.is_closed()]:
                if (ended := self._batchers.pop(other, None)) is not None:  # None: a loop of another thread was quicker
                    ended.connections.close()
            found = self._batchers[loop] = Batcher(self._store, self._connect(loop))
        return found

    def close(self) -> None:
        """Closes all connections; those of a loop that runs in another thread as soon as that loop can."""
        for loop, batcher in list(self._batchers.items()):
            if loop.is_running() and loop is not asyncio._get_running_loop():
                loop.call_soon_threadsafe(batcher.connections.close)
            else:
                batcher.connections.close()
        self._batchers.clear()

    def _reset_after_fork(self) -> None:
        """In a child process the parent's loops are neither used nor closed."""
        _of_parent.append(self._batchers)
        self._batchers = {}
