"""Calls that may hang, made by others: the caller waits so long and no longer.

A store that can't promise to answer in time is asked by one of a few daemon threads (or, in asyncio, by a task of its own). When
the caller's time is up, the call is abandoned: its caller goes on, and when the answer comes after all, `late` is told it, so
that what was charged can be given back. A call that nobody has begun yet is simply not made.

There are at most `most` calls under way. When all of them hang there is nobody left to ask, and a new caller is told so at once;
as many again are kept for those who look whether the store is back.
Rejected: concurrent.futures (its threads are waited for when the interpreter ends, so a hung store would hang the exit), and
cancelling what hangs (a client cancelled between writing and reading has no good state).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from ...clock import SYSTEM
from ...errors import StoreTimeout

#: Seconds after which an idle thread ends.
IDLE = 5.0
#: How many budgets an abandoned task may go on before it is cancelled; threads can't be.
GRACE = 500


class PooledCall:
    """One call: under way, done, or abandoned; whichever comes first stays."""

    __slots__ = ("abandoned", "answer", "begun", "call", "done", "error", "late", "wake")

    def __init__(self, call: Callable[[], Any], late: Callable[[Any], object] | None, wake: Callable[[], object]) -> None:
        self.call = call
        self.late = late
        self.wake = wake
        self.begun = self.done = self.abandoned = False
        self.answer: Any = None
        self.error: BaseException | None = None

    def end(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.answer


class DeadlinePool:
    """Threads and tasks that ask a store which may hang. Safe for threads; a forked child makes its own."""

    def __init__(self, most: int = 32) -> None:
        self.most = most
        self.lost = 0  # late answers that could not be given back
        self.renew()

    def renew(self) -> None:
        """Starts again with nobody under way."""
        self.lock = threading.Lock()
        self.jobs: queue.SimpleQueue[PooledCall | None] = queue.SimpleQueue()
        self.threads = 0
        self.free = 0  # threads that wait for work and are promised to nobody
        self.queued = 0  # errands that no thread is promised to
        self.hanging = 0
        self.tasks: set[asyncio.Task[Any]] = set()

    @property
    def abandoned(self) -> int:
        """Calls that go on although nobody waits for them."""
        return self.hanging + len(self.tasks)

    # Threads ---------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], Any], late: Callable[[Any], object] | None, budget_us: int, looks: bool = False) -> Any:
        """The answer of `call`, or StoreTimeout when it takes longer; then `late` hears the answer."""
        latch, end_us = threading.Lock(), SYSTEM.now_us() + budget_us
        latch.acquire()
        errand = PooledCall(call, late, latch.release)
        self._hand_over(errand, self.most * (1 + looks))
        try:
            in_time = latch.acquire(timeout=max(0, end_us - SYSTEM.now_us()) / 1e6)  # a thread's start is in the budget too
        except BaseException:
            self._abandon(errand)
            raise
        if not in_time and self._abandon(errand):
            raise too_late(budget_us)
        return errand.end()

    async def run_async(
        self, call: Callable[[], Any], late: Callable[[Any], object] | None, budget_us: int, looks: bool = False
    ) -> Any:
        """The same, awaited: for a store whose async face is its sync one."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        errand = PooledCall(call, late, lambda: loop.call_soon_threadsafe(over.set))
        self._hand_over(errand, self.most * (1 + looks))
        try:
            async with asyncio.timeout(budget_us / 1e6):
                await over.wait()
        except TimeoutError:
            if self._abandon(errand):
                raise too_late(budget_us) from None
        except BaseException:
            self._abandon(errand)
            raise
        return errand.end()

    def _hand_over(self, errand: PooledCall, most: int) -> None:
        with self.lock:
            if self.hanging >= most:
                raise StoreTimeout(f"{self.hanging} calls to the store hang; nobody is left to ask it")
            fresh = not self.free and self.threads < most
            if fresh:
                self.threads += 1
            elif self.free:
                self.free -= 1
            else:
                self.queued += 1
            self.jobs.put(errand)
        if fresh:
            threading.Thread(target=self._work, args=(self.jobs,), name="limitkeeper errand", daemon=True).start()

    def _abandon(self, errand: PooledCall) -> bool:
        """Whether the caller leaves without an answer."""
        with self.lock:
            if errand.done:
                return False
            errand.abandoned = True
            self.hanging += errand.begun
            return True

    def _work(self, jobs: queue.SimpleQueue[PooledCall | None]) -> None:
        while True:
            try:
                errand = jobs.get(timeout=IDLE)
            except queue.Empty:
                if self._may_leave():
                    return
                continue
            if errand is None:
                return
            with self.lock:
                errand.begun = not errand.abandoned
            if errand.begun:
                self._carry_out(errand)
            del errand
            with self.lock:
                if self.queued:
                    self.queued -= 1
                else:
                    self.free += 1

    def _may_leave(self) -> bool:
        """An idle thread ends, unless an errand on its way was promised to it."""
        with self.lock:
            leaves = self.free > 0
            self.free -= leaves
            self.threads -= leaves
            return leaves

    def _carry_out(self, errand: PooledCall) -> None:
        try:
            errand.answer = errand.call()
        except BaseException as error:
            errand.error = error
        with self.lock:
            errand.done = True
            self.hanging -= errand.abandoned
        if errand.abandoned:
            self._tell_late(errand)
            return
        try:
            errand.wake()
        except RuntimeError:  # its event loop is closed: nobody waits any more
            self._tell_late(errand)

    def _tell_late(self, errand: PooledCall) -> None:
        if errand.error is None and errand.late is not None:
            try:
                errand.late(errand.answer)
            except Exception:
                self.lost += 1

    # Tasks -----------------------------------------------------------------------------------------------------

    async def arun(
        self,
        call: Callable[[], Awaitable[Any]],
        late: Callable[[Any], Awaitable[object]] | None,
        budget_us: int,
        looks: bool = False,
    ) -> Any:
        """The same for a coroutine: it becomes a task, which goes on by itself when the caller's time is up."""
        if self.abandoned >= self.most * (1 + looks):
            raise StoreTimeout(f"{self.abandoned} calls to the store hang; nobody is left to ask it")
        errand = PooledCall(nothing, None, nothing)
        task = asyncio.ensure_future(self._acarry_out(errand, call, late))
        try:
            await asyncio.wait({task}, timeout=budget_us / 1e6)
        except BaseException:
            self._aabandon(errand, task, budget_us)
            raise
        if not task.done():
            self._aabandon(errand, task, budget_us)
            raise too_late(budget_us)
        return task.result()

    def _aabandon(self, errand: PooledCall, task: asyncio.Task[Any], budget_us: int) -> None:
        errand.abandoned = True
        self.tasks.add(task)
        last = asyncio.get_running_loop().call_later(GRACE * budget_us / 1e6, task.cancel)

        def end(task: asyncio.Task[Any]) -> None:
            last.cancel()
            self.tasks.discard(task)
            if not task.cancelled():
                task.exception()  # looked at, so that nobody calls it forgotten

        task.add_done_callback(end)

    async def _acarry_out(self, errand: PooledCall, call: Callable[[], Awaitable[Any]], late: Any) -> Any:
        answer = await call()
        if errand.abandoned and late is not None:
            try:
                await late(answer)
            except Exception:
                self.lost += 1
        return answer

    def close(self) -> None:
        """Lets idle threads go; those that hang end when their call does."""
        with self.lock:
            while self.free:
                self.free -= 1
                self.threads -= 1
                self.jobs.put(None)


def nothing() -> None:
    """A task does its own work and wakes its caller itself."""


def too_late(budget_us: int) -> StoreTimeout:
    return StoreTimeout(f"the store did not answer within {budget_us / 1000:g} ms")
