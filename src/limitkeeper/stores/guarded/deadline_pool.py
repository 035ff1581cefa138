"""Runs blocking calls in worker threads (or tasks, in asyncio) with a deadline.

When the deadline passes, the caller gets StoreTimeout and the call is abandoned: it goes on by itself, and when it returns after
all, `late` is called with its answer, so that what was charged can be given back. A call that no worker has begun is not made.

At most `max_calls` calls are in progress. When all of them hang, a new call fails at once; as many again are kept for probes.
Rejected: concurrent.futures (its threads are joined when the interpreter exits, so a hung store would hang the exit), and
cancelling a hung call (a client cancelled between writing and reading has no good state).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from ...clock import SYSTEM, Clock
from ...errors import StoreTimeout

T = TypeVar("T")
#: Seconds after which an idle thread ends.
IDLE = 5.0
#: How many budgets an abandoned task may go on before it is cancelled; threads can't be.
GRACE = 500


class StartThread(Protocol):
    """Starts a thread: what a simulator replaces."""

    def __call__(self, target: Callable[[], object], name: str) -> threading.Thread: ...


def start_daemon(target: Callable[[], object], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


class PooledCall(Generic[T]):
    """One call: in progress, done, or abandoned; the first of the last two stays."""

    __slots__ = ("abandoned", "answer", "begun", "call", "done", "error", "late", "wake")

    def __init__(self, call: Callable[[], T], late: Callable[[T], object] | None, wake: Callable[[], object]) -> None:
        self.call = call
        self.late = late
        self.wake = wake
        self.begun = self.done = self.abandoned = False
        self.answer: T
        self.error: BaseException | None = None

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self.answer


class DeadlinePool:
    """Threads and tasks that call a store which may hang. Thread-safe; a forked child starts with an empty one."""

    def __init__(self, max_calls: int = 32, clock: Clock = SYSTEM, start_thread: StartThread = start_daemon) -> None:
        self.max_calls = max_calls
        self.clock = clock
        self.start_thread = start_thread
        self.lost = 0  # late answers that could not be given back
        self.reset()

    def reset(self) -> None:
        """Starts again with no call in progress."""
        self.lock = threading.Lock()
        self.queue: queue.SimpleQueue[PooledCall[object] | None] = queue.SimpleQueue()
        self.threads = 0
        self.free = 0  # idle threads that no queued call counts on
        self.queued = 0  # calls that no thread is free for
        self.hanging = 0  # threads in an abandoned call
        self.tasks: set[asyncio.Task[object]] = set()

    @property
    def abandoned(self) -> int:
        """Abandoned calls that are still in progress."""
        return self.hanging + len(self.tasks)

    # Threads ---------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], T], late: Callable[[T], object] | None, budget_us: int, probe: bool = False) -> T:
        """The answer of `call`; StoreTimeout when it takes longer than the budget, and then `late` gets the answer."""
        latch, deadline_us = threading.Lock(), self.clock.now_us() + budget_us
        latch.acquire()
        pooled = PooledCall(call, late, latch.release)
        self._submit(pooled, probe)
        try:  # starting a thread is in the budget too
            in_time = latch.acquire(timeout=max(0, deadline_us - self.clock.now_us()) / 1e6)
        except BaseException:
            self._abandon(pooled)
            raise
        if not in_time and self._abandon(pooled):
            raise timed_out(budget_us)
        return pooled.result()

    async def run_async(
        self, call: Callable[[], T], late: Callable[[T], object] | None, budget_us: int, probe: bool = False
    ) -> T:
        """The same, awaited: for a store whose async methods block."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        pooled = PooledCall(call, late, lambda: loop.call_soon_threadsafe(over.set))
        self._submit(pooled, probe)
        try:
            async with asyncio.timeout(budget_us / 1e6):
                await over.wait()
        except TimeoutError:
            if self._abandon(pooled):
                raise timed_out(budget_us) from None
        except BaseException:
            self._abandon(pooled)
            raise
        return pooled.result()

    def _submit(self, pooled: PooledCall[T], probe: bool) -> None:
        most = self.max_calls * (1 + probe)
        with self.lock:
            if self.hanging >= most:
                raise all_hang(self.hanging)
            is_new = not self.free and self.threads < most
            if is_new:
                self.threads += 1
            elif self.free:
                self.free -= 1
            else:
                self.queued += 1
            self.queue.put(pooled)  # type: ignore[arg-type]
        if is_new:
            calls = self.queue
            self.start_thread(lambda: self._work(calls), "limitkeeper store call")

    def _abandon(self, pooled: PooledCall[T]) -> bool:
        """Whether the caller leaves without an answer."""
        with self.lock:
            if pooled.done:
                return False
            pooled.abandoned = True
            self.hanging += pooled.begun
            return True

    def _work(self, calls: queue.SimpleQueue[PooledCall[object] | None]) -> None:
        while True:
            try:
                pooled = calls.get(timeout=IDLE)
            except queue.Empty:
                if self._may_end():
                    return
                continue
            if pooled is None:
                return
            with self.lock:
                pooled.begun = not pooled.abandoned
            if pooled.begun:
                self._perform(pooled)
            del pooled
            with self.lock:
                if self.queued:
                    self.queued -= 1
                else:
                    self.free += 1

    def _may_end(self) -> bool:
        """An idle thread ends, unless a call that is being queued counts on it."""
        with self.lock:
            ends = self.free > 0
            self.free -= ends
            self.threads -= ends
            return ends

    def _perform(self, pooled: PooledCall[object]) -> None:
        try:
            pooled.answer = pooled.call()
        except BaseException as error:
            pooled.error = error
        with self.lock:
            pooled.done = True
            self.hanging -= pooled.abandoned
        try:
            if not pooled.abandoned:
                pooled.wake()
                return
        except RuntimeError:  # the caller's event loop is closed
            pass
        if pooled.error is None and pooled.late is not None:
            try:
                pooled.late(pooled.answer)
            except Exception:
                self.lost += 1

    # Tasks -----------------------------------------------------------------------------------------------------

    async def arun(
        self,
        call: Callable[[], Awaitable[T]],
        late: Callable[[T], Awaitable[object]] | None,
        budget_us: int,
        probe: bool = False,
    ) -> T:
        """The same for a coroutine: it runs as a task, which goes on by itself when the deadline has passed."""
        if self.abandoned >= self.max_calls * (1 + probe):
            raise all_hang(self.abandoned)
        abandoned = asyncio.Event()
        task = asyncio.ensure_future(self._perform_async(abandoned, call, late))
        try:
            await asyncio.wait({task}, timeout=budget_us / 1e6)
        except BaseException:
            self._abandon_task(abandoned, task, budget_us)
            raise
        if not task.done():
            self._abandon_task(abandoned, task, budget_us)
            raise timed_out(budget_us)
        return task.result()

    def _abandon_task(self, abandoned: asyncio.Event, task: asyncio.Task[T], budget_us: int) -> None:
        abandoned.set()
        self.tasks.add(task)
        cancelling = asyncio.get_running_loop().call_later(GRACE * budget_us / 1e6, task.cancel)

        def end(task: asyncio.Task[T]) -> None:
            cancelling.cancel()
            self.tasks.discard(task)
            if not task.cancelled():
                task.exception()  # retrieved, or asyncio logs that it never was

        task.add_done_callback(end)

    async def _perform_async(
        self, abandoned: asyncio.Event, call: Callable[[], Awaitable[T]], late: Callable[[T], Awaitable[object]] | None
    ) -> T:
        answer = await call()
        if abandoned.is_set() and late is not None:
            try:
                await late(answer)
            except Exception:
                self.lost += 1
        return answer

    def close(self) -> None:
        """Ends the idle threads; those that hang end when their call does."""
        with self.lock:
            while self.free:
                self.free -= 1
                self.threads -= 1
                self.queue.put(None)


def timed_out(budget_us: int) -> StoreTimeout:
    return StoreTimeout(f"the store did not answer within {budget_us / 1000:g} ms")


def all_hang(calls: int) -> StoreTimeout:
    return StoreTimeout(f"{calls} calls to the store hang; no worker is left")
