"""Batches the decisions of one event-loop iteration into one EVALSHA.

The first request schedules the batch (`loop.call_soon`), the others of the same iteration join it, and all are sent as one
script call over one connection (in a cluster, one write per node). Requests beyond MAX_BATCH go into the next batch, one
iteration later. Each caller awaits a future of its own. A caller that is cancelled before its batch is sent has requested
nothing; one that is cancelled later has been decided: what was charged stays charged. A batch has one deadline; its callers
have none of their own.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from ...errors import ConfigurationError, StoreError, StoreUnavailable
from ...fork import reset_after_fork
from ..sans_io import Plan
from .address import Endpoint
from .async_connection import AsyncConnections
from .command_routing import Route
from .resp import Reply, pack_command
from .script_request import AnyRequest, decode_call, encode_call

#: Two batches let the server decide on one while the client prepares the other: 64 tasks get 88 000 decisions a second in two
#: batches, 62 000 in one (measured on loopback).
MAX_BATCH = 32

Future = asyncio.Future[None]
Requests = Sequence[AnyRequest]


class BatcherHost(Protocol):
    """What a batcher needs of its store."""

    route: Route
    timeout_us: int

    def new_connections(self, loop: asyncio.AbstractEventLoop) -> AsyncConnections: ...


class Batcher:
    """The batches of one event loop and one store."""

    def __init__(self, store: BatcherHost, connections: AsyncConnections) -> None:
        self.store = store
        self.connections = connections
        self.loop = connections.loop
        self._requests: list[AnyRequest] = []
        self._futures: list[Future] = []
        self._deadline: float | None = None
        self._slow: set[asyncio.Task[None]] = set()
        self._shared: dict[Hashable, asyncio.Task[None]] = {}

    def deadline(self) -> float:
        """The deadline of a call that starts now, in the loop's time."""
        return self.loop.time() + self.store.timeout_us / 1e6

    def submit(self, request: AnyRequest, deadline: float | None = None) -> Future:
        """Adds a request to the next batch; the future is done when it is answered. `deadline`: of a call that began earlier."""
        future: Future = self.loop.create_future()
        if not self._requests:
            self.loop.call_soon(self._send_batch)
        if deadline is not None:
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self._requests.append(request)
        self._futures.append(future)
        return future

    async def run_once(self, key: Hashable, plan: Callable[[], Plan[None]], deadline: float) -> None:
        """Runs a plan once for all tasks that want it at the same time: the registration of limits."""
        task = self._shared.get(key)
        if task is None:
            task = self._shared[key] = self.loop.create_task(self.connections.run(plan(), deadline))
            task.add_done_callback(lambda done: self._forget(key, done))
        try:
            await asyncio.shield(task)
        except (StoreError, ConfigurationError) as error:
            raise type(error)(*error.args) from None

    def _forget(self, key: Hashable, task: asyncio.Task[None]) -> None:
        del self._shared[key]
        if not task.cancelled():
            task.exception()  # every waiting task raises it

    def _send_batch(self) -> None:
        requests, futures, deadline = self._requests[:MAX_BATCH], self._futures[:MAX_BATCH], self._deadline
        del self._requests[:MAX_BATCH], self._futures[:MAX_BATCH]
        if self._requests:
            self.loop.call_soon(self._send_batch)
        else:
            self._deadline = None
        for at in range(len(futures) - 1, -1, -1):
            if futures[at].done():  # cancelled meanwhile
                del requests[at], futures[at]
        if not requests:
            return
        latest = self.deadline()
        deadline = latest if deadline is None else min(latest, deadline)
        try:
            endpoint = self.store.route.direct
            if endpoint is None:
                self._execute_slowly(requests, futures, deadline)
            else:
                self._execute(endpoint, requests, futures, deadline)
        except BaseException as error:  # no caller may be left waiting
            _resolve(futures, error)
            raise

    def _execute(self, endpoint: Endpoint, requests: Requests, futures: Sequence[Future], deadline: float) -> None:
        """Hot path, without a plan: one script call to the only server, whose address is known."""
        script, keys, body = encode_call(requests)
        data = pack_command((b"EVALSHA", script.sha, b"%d" % len(keys), *keys, body))

        def done(replies: list[Reply], error: StoreError | None, unsent: bool) -> None:
            if error is not None:
                self.store.route.on_unreachable(endpoint)
                if not unsent or self.loop.is_closed():
                    return _resolve(futures, error)
            elif decode_call(requests, replies[0]) and not any(request.pending for request in requests):
                return _resolve(futures, None)
            return self._execute_slowly(requests, futures, deadline)

        timeout = max(0.001, deadline - self.loop.time())
        self.connections.connection(endpoint, self.store.route.login, timeout).write(data, 1, deadline, done)

    def _execute_slowly(self, requests: Requests, futures: Sequence[Future], deadline: float) -> None:
        """Has the requests that are still pending executed by the plan of the topology."""
        task = self.loop.create_task(self._run_plan(requests, futures, deadline))
        self._slow.add(task)
        task.add_done_callback(self._slow.discard)

    async def _run_plan(self, requests: Requests, futures: Sequence[Future], deadline: float) -> None:
        pending = [at for at, request in enumerate(requests) if request.pending]
        errors: Sequence[Exception | None] = []
        try:
            errors = await self.connections.run(self.store.route.execute([requests[at] for at in pending]), deadline)
        except (StoreError, ConfigurationError) as error:
            errors = [error] * len(pending)
        except BaseException as error:
            _resolve(futures, StoreUnavailable(f"{self.store.route.address}: {error!r}"))
            raise
        for at, failure in zip(pending, errors, strict=True):
            if failure is not None:
                _resolve([futures[at]], failure)
        _resolve(futures, None)


def _resolve(futures: Sequence[Future], error: BaseException | None) -> None:
    for future in futures:
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(type(error)(*error.args))  # each caller raises its own


_of_parent: list[object] = []  # kept alive after a fork, so that nothing of the parent's loops is closed


class BatchersByLoop:
    """The batchers of a store, one per running event loop. A batcher ends with its loop; a store outlives any number of them."""

    def __init__(self, store: BatcherHost) -> None:
        self._store = weakref.ref(store)
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher] = weakref.WeakKeyDictionary()
        self._last: Batcher | None = None  # of the loop that called last: a lookup in a weak dictionary is slow
        reset_after_fork(self)

    def current(self) -> Batcher:
        """The batcher of the running loop."""
        loop = asyncio.get_running_loop()
        last = self._last
        if last is not None and last.loop is loop:
            return last
        found = self._batchers.get(loop)
        if found is None:
            for other in [one for one in self._batchers if one.is_closed()]:
                self._batchers.pop(other).connections.close()
            store = self._store()
            assert store is not None
            found = self._batchers[loop] = Batcher(store, store.new_connections(loop))
        self._last = found
        return found

    def close(self) -> None:
        """Closes all connections; those of a loop that runs in another thread as soon as that loop can."""
        for loop, batcher in list(self._batchers.items()):
            if loop.is_running() and loop is not asyncio._get_running_loop():
                loop.call_soon_threadsafe(batcher.connections.close)
            else:
                batcher.connections.close()
        self._batchers.clear()
        self._last = None

    async def aclose(self) -> None:
        self.close()
        await asyncio.sleep(0)  # transports end in the next iteration

    def _reset_after_fork(self) -> None:
        """In a child process the parent's loops are neither used nor closed."""
        _of_parent.append((self._batchers, self._last))
        self._batchers = weakref.WeakKeyDictionary()
        self._last = None
