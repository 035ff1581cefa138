"""Shaper: an executor whose calls start at a steady pace, in order, on a pool of threads.

    with Shaper("100/s", capacity=500, workers=8) as shaper:
        future = shaper.submit(write, order)

A worker takes the first call when it is free, and then waits for the start: no call starts less than an interval after the one
before, also after a time in which all workers were busy. `submit` refuses when the queue is full, for callers that can't wait;
`submit_wait` and `map` wait. It is a `concurrent.futures.Executor`: `loop.run_in_executor(shaper, write, order)` works too.
For coroutines, `AsyncLimiter(LeakyBucketQueue(…)).acquire` does the same without a pool.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from ..algorithms import Limit
from ..fork import reset_after_fork
from ..observe.events import Publisher
from ..stores import Store
from .bulkhead import checked_size
from .paced_queue import Entry, PacedQueue, QueueClosed

P = ParamSpec("P")
T = TypeVar("T")


class ShapedCall(Future[T]):
    """The future of a call; cancelling it takes the call out of the queue, and those behind move up. Who takes a cancelled call
    out of the queue (a worker, `cancel`, `shutdown`) also wakes those that wait for it (`concurrent.futures.wait`)."""

    def __init__(self, queue: PacedQueue[ShapedCall[Any]], call: Callable[[], T]) -> None:
        super().__init__()
        self._queue, self._call = queue, call
        self.entry: Entry[ShapedCall[Any]] | None = None

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled and self.entry is not None and self._queue.remove(self.entry) is not None:
            self.set_running_or_notify_cancel()
        return cancelled

    def run(self) -> None:
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self._call())
            except BaseException as error:
                self.set_exception(error)


def _work(queue: PacedQueue[ShapedCall[Any]]) -> None:
    """A worker; it has no reference to the shaper, which may be garbage collected. A call for which the store can't decide a
    start fails with the store's error, or with its refusal (a guarded store that fails closed)."""
    while True:
        try:
            call = queue.get()
        except QueueClosed:
            return
        except Exception as error:  # the worker goes on with the next call
            first = queue.remove()
            if first is not None and first.set_running_or_notify_cancel():
                first.set_exception(error)
        else:
            call.run()
            del call


class Shaper(Executor):
    """`Shaper("100/s", capacity=500, workers=8)`: 100 calls start per second, evenly; 500 wait or leave, eight run at a time.

    `cost` is what a call costs, or a function of its arguments. Shapers with the same `store` and `name` share one rate. Leaving
    the `with` block drains the queue; calls that wait when the process ends are lost.
    """

    def __init__(
        self,
        rate: str | Limit,
        capacity: int | None = None,
        workers: int = 1,
        *,
        cost: int | Callable[..., int] = 1,
        store: Store | str | None = None,
        name: str = "shaper",
    ) -> None:
        self.workers = checked_size(workers, "workers", 1)
        self._queue: PacedQueue[ShapedCall[Any]] = PacedQueue(rate, capacity, name, store)
        self._cost = cost
        self._finalizer = weakref.finalize(self, self._queue.close)
        self._finalizer.atexit = False
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """A child starts with no threads and no calls."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def __repr__(self) -> str:
        return repr(self._queue).replace("PacedQueue", type(self).__name__)

    @property
    def queued(self) -> int:
        """The cost of the calls that have not started; their number, where each costs 1."""
        return self._queue.units

    @property
    def capacity(self) -> int | None:
        """How much may wait or leave; None: without bound."""
        return self._queue.capacity

    @property
    def events(self) -> Publisher:
        """The publisher of the limiter's events: "allowed" has a decision with the start of a call, "refused" a full queue."""
        return self._queue.events

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queues a call. Raises `RateLimited`, with the time to retry, when the queue is full."""
        return self._submit(self._queue.put_nowait, fn, args, kwargs)

    def submit_wait(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `submit`, but waits for room in a full queue."""
        return self._submit(self._queue.put, fn, args, kwargs)

    def _submit(self, put: Callable[..., Entry[Any]], fn: Callable[..., T], args: Any, kwargs: Any) -> Future[T]:
        call = ShapedCall(self._queue, lambda: fn(*args, **kwargs))
        cost = self._cost(*args, **kwargs) if callable(self._cost) else self._cost
        try:
            call.entry = put(call, cost)
        except QueueClosed:
            raise RuntimeError(f"{self!r} is closed: it takes no more calls") from None
        if len(self._threads) < self.workers:
            self._start_worker()
        return call

    def _start_worker(self) -> None:
        with self._lock:
            if len(self._threads) < self.workers:
                name = f"limitkeeper {self._queue.name} {len(self._threads)}"
                thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)
                thread.start()  # there may be no room for one more
                self._threads.append(thread)

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1, **more: Any
    ) -> Iterator[T]:
        """Calls `fn` for the arguments, in order, and waits for room in a full queue; the results are in the same order."""
        calls = [self.submit_wait(fn, *args) for args in zip(*iterables, strict=False)]
        return (call.result(timeout) for call in calls)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls. Those in the queue still start, at their pace, or are cancelled; `wait` waits for their end."""
        self._queue.close()
        if cancel_futures:
            for call in self._queue.clear():
                if call.cancel():
                    call.set_running_or_notify_cancel()
        if wait:
            for thread in self._threads:
                thread.join()
            self._queue.limiter.close()
