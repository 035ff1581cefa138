"""DeadlineStore: wraps a store that can't promise a deadline itself (`answers_within`); every call ends within the budget.

Calls run in worker threads (in asyncio: as tasks, or in threads too where the store's async methods block). When the deadline
passes, the caller gets StoreTimeout and the call is abandoned: it goes on by itself, with copies of the claims, and what it
charged after all is given back. A call that no worker has begun is not made. At most 32 calls are in progress; when all of them
hang, a new call fails at once; as many again are kept for probes.
Rejected: concurrent.futures (its threads are joined when the interpreter exits, so a hung store would hang the exit), and
cancelling a hung call (a client cancelled between writing and reading has no good state).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ...algorithms.claim import Claim, NamedLimit
from ...clock import SYSTEM
from ...decision import Decision
from ...errors import StoreError, StoreTimeout, StoreUnavailable
from ..contract import Requests, Store, charges_of
from ..sans_io import UNBOUNDED, Call, LeftOnLoop, Pending, Plan, aperform_call, arun, perform_call, run
from ..wrapper_store import WrapperStore, copy_states

T = TypeVar("T")
#: Seconds after which an idle thread ends.
IDLE = 5.0
#: How many budgets an abandoned task may go on before it is cancelled; threads can't be.
GRACE = 500
#: The options of a probe, which charges nothing. What is to be remembered is asked of the store itself: what leases know says
#: nothing about it.
PROBE = {"commit": False, "remember": True}


class StartThread(Protocol):
    """Starts a thread: what a simulator replaces."""

    def __call__(self, target: Callable[[], object], name: str) -> threading.Thread: ...


def start_daemon(target: Callable[[], object], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


class PooledCall(Pending):
    """One call: in progress, done, or abandoned; the first of the last two stays. An error of the call is its `error`."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.begun = self.abandoned = self.undone = False
        self.error: BaseException | None = None


class DeadlinePool:
    """Threads and tasks that call a store which may hang. Thread-safe; a forked child starts with an empty one."""

    def __init__(self, start_thread: StartThread) -> None:
        self.max_calls = 32
        self.start_thread = start_thread
        self.lost = 0  # late answers that could not be given back
        self.reset()

    def reset(self) -> None:
        """Starts again with no call in progress."""
        self.lock = threading.Lock()
        self.queue: queue.SimpleQueue[PooledCall | None] = queue.SimpleQueue()
        self.threads = 0
        self.free = 0  # idle threads that no queued call counts on
        self.queued = 0  # calls that no thread is free for
        self.hanging = 0  # threads in an abandoned call
        self.tasks: set[asyncio.Task[object]] = set()

    @property
    def abandoned(self) -> int:
        """Abandoned calls that are still in progress. A loop that was closed around its tasks never ends them."""
        for task in list(self.tasks):
            if task.get_loop().is_closed():
                self.tasks.discard(task)
        return self.hanging + len(self.tasks)

    def plan(self, call: Call, budget_us: int, probe: bool) -> Plan[Any]:
        """The answer of a call made by a thread; StoreTimeout when it takes longer than the budget."""
        deadline_us, pooled = SYSTEM.now_us() + budget_us, PooledCall(call)
        self._submit(pooled, probe)
        try:  # starting a thread is in the budget too
            yield Call(pooled, "result", (max(0, deadline_us - SYSTEM.now_us()) / 1e6,))
        except BaseException:
            if not self._abandon(pooled):  # it was answered meanwhile
                try:
                    self._submit(PooledCall(Call(self, "undo", (pooled,))), probe)
                except StoreError:
                    self.lost += 1
            raise
        if not pooled.done and self._abandon(pooled):
            raise timed_out(budget_us)
        if pooled.error is not None:
            raise pooled.error
        return pooled.value

    def _submit(self, pooled: PooledCall, probe: bool) -> None:
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
            self.queue.put(pooled)
        if is_new:
            calls = self.queue
            try:
                self.start_thread(lambda: self._work(calls), "limitkeeper store call")
            except RuntimeError as error:  # the process may not have more threads
                with self.lock:
                    self.threads -= 1
                    self.queued += 1  # until a worker skips it
                    pooled.abandoned = True
                raise StoreUnavailable(f"no worker for a call to the store: {error}") from error

    def _abandon(self, pooled: PooledCall) -> bool:
        """Whether the caller leaves without an answer."""
        with self.lock:
            if pooled.done:
                return False
            pooled.abandoned = True
            self.hanging += pooled.begun
            return True

    def _work(self, calls: queue.SimpleQueue[PooledCall | None]) -> None:
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

    def _perform(self, pooled: PooledCall) -> None:
        try:
            pooled.value = perform_call(pooled.call)
        except BaseException as error:
            pooled.error = error
        with self.lock:
            pooled.done = True
            self.hanging -= pooled.abandoned
        if pooled.abandoned or not pooled.wake():
            self.undo(pooled)

    def undo(self, pooled: PooledCall) -> None:
        """Gives back, once, what a call charged whose caller has left."""
        with self.lock:
            undone, pooled.undone = pooled.undone, True
        if pooled.error is None and not undone:
            try:
                run(give_back_late(pooled.call, pooled.value))
            except Exception:
                self.lost += 1

    async def arun(self, call: Call, budget_us: int, probe: bool) -> Any:
        """As `plan`, for a coroutine: it runs as a task, which goes on by itself when the deadline has passed."""
        if self.abandoned >= self.max_calls * (1 + probe):
            raise all_hang(self.abandoned)
        task, now = asyncio.ensure_future(aperform_call(call)), asyncio.get_running_loop().time
        end = now() + budget_us / 1e6
        left = LeftOnLoop(lambda: end - now())
        try:
            while not task.done() and not await left.is_over():
                await asyncio.wait({task}, timeout=left())
        except BaseException:
            self._abandon_task(call, task, budget_us)
            raise
        finally:
            left.stop()
        if not task.done():
            self._abandon_task(call, task, budget_us)
            raise timed_out(budget_us)
        return task.result()

    def _abandon_task(self, call: Call, task: asyncio.Task[object], budget_us: int) -> None:
        undoing: asyncio.Task[object] = asyncio.ensure_future(self._undo(call, task))
        self.tasks.add(undoing)
        cancelling = asyncio.get_running_loop().call_later(GRACE * budget_us / 1e6, undoing.cancel)

        def end(undoing: asyncio.Task[object]) -> None:
            cancelling.cancel()
            self.tasks.discard(undoing)
            if not undoing.cancelled():
                undoing.exception()  # retrieved, or asyncio logs that it never was

        undoing.add_done_callback(end)

    async def _undo(self, call: Call, task: asyncio.Task[object]) -> None:
        """Gives back what an abandoned call charges, or has charged in the iteration in which its caller was cancelled."""
        answer = await task
        try:
            await arun(give_back_late(call, answer))
        except Exception:
            self.lost += 1

    def close(self) -> None:
        """Ends the idle threads; those that hang end when their call does."""
        with self.lock:
            while self.free:
                self.free -= 1
                self.threads -= 1
                self.queue.put(None)


class DeadlineStore(WrapperStore):
    """`DeadlineStore(store, 20_000)`: every method but `items` and `load` ends within 20 ms, with an answer or StoreTimeout."""

    local = False

    def __init__(self, store: Store, budget_us: int, start_thread: StartThread = start_daemon) -> None:
        super().__init__(store)
        self.budget_us = budget_us
        self.pool = DeadlinePool(start_thread)

    @property
    def blocks_event_loop(self) -> bool:
        """Never: calls of a store that does are made by threads."""
        return False

    def answers_within(self, budget_us: int) -> bool:
        self.budget_us = min(budget_us, self.budget_us)
        return True

    def run_plan(self, plan: Plan[T]) -> T:
        return run(plan, self._perform)

    async def arun_plan(self, plan: Plan[T]) -> T:
        return await arun(plan, self._aperform)

    def _perform(self, call: Call, probe: bool = False) -> Any:
        if call.method in UNBOUNDED:
            return perform_call(call)
        return run(self.pool.plan(call, self.budget_us, probe))

    async def _aperform(self, call: Call, probe: bool = False) -> Any:
        if call.method in UNBOUNDED:
            return await aperform_call(call)
        if self.inner.blocks_event_loop:
            return await arun(self.pool.plan(call, self.budget_us, probe))
        return await self.pool.arun(call, self.budget_us, probe)

    def now_us(self) -> int:
        return self._perform(Call(self.inner, "now_us"))  # type: ignore[no-any-return]

    def register(self, limit: NamedLimit) -> None:
        """In a worker that is kept for probes: after one a guard registers, though older calls may hang for ever."""
        self._perform(Call(self.inner, "register", (limit,)), probe=True)

    def probe(self, claims: Sequence[Claim]) -> None:
        """Decides without charging, in a worker that is kept for this: it works also when all others hang."""
        self._perform(Call(self.inner, "decide", (claims, 0), PROBE), probe=True)

    async def aprobe(self, claims: Sequence[Claim]) -> None:
        await self._aperform(Call(self.inner, "decide", (claims, 0), PROBE), probe=True)

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        return self._perform(Call(self.inner, "decide_one", (named, key, cost, max_wait_us, commit)))  # type: ignore[no-any-return]

    def hit_nowait(self, named: NamedLimit, key: str, cost: int) -> Decision | None:
        return self.inner.hit_nowait(named, key, cost)

    def plan_decide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Plan[Decision]:
        options = {"commit": commit, "remember": remember, "not_before_us": not_before_us}
        copies = [Claim(claim.limit, claim.key, claim.cost, claim.charged) for claim in claims]
        decision: Decision = yield Call(self.inner, "decide", (copies, max_wait_us), options)
        copy_states(claims, copies)
        return decision

    def plan_close(self) -> Plan[None]:
        self.pool.close()
        yield Call(self.inner, "close")


def give_back_late(call: Call, answer: Any) -> Plan[None]:
    """Gives back what an abandoned call charged."""
    charged: Requests = ()
    if call.method == "decide_one" and call.args[4]:
        charged = [[Claim(*call.args[:3])]]
    elif call.method == "decide" and call.kwargs["commit"]:
        charged = [call.args[0]]
    elif call.method == "decide_many":
        charged = call.args[0]
    for claims, decision in zip(charged, answer if isinstance(answer, list) else [answer], strict=False):
        for charge in charges_of(claims, decision) if decision else ():
            yield Call(call.target, "give_back", charge)


def timed_out(budget_us: int) -> StoreTimeout:
    return StoreTimeout(f"the store did not answer within {budget_us / 1000:g} ms")


def all_hang(calls: int) -> StoreTimeout:
    return StoreTimeout(f"{calls} calls to the store hang; no worker is left")
