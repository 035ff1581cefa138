"""Plans: protocols written once, as generators of calls, and the two drivers that perform them (sync and async).

A plan yields what it needs and is sent the answer:

    Call(target, method, args)   the value; its exception is thrown into the plan
    [Call, Call, …]              a list of values, with a StoreError in the place of a call that failed. The async driver makes
                                 the calls concurrently, the sync driver one after the other (`UntilRefused`: up to a falsy
                                 answer) unless it is given `perform_all`
    Pause(seconds)               after that time, what the driver's `sleep` returns (where there is a budget: whether it lasts)
    Event-like (`wait`, `await_`)  None, once it is set

`run` and `arun` take a `perform` that makes one call, so that a wrapper can add a deadline or note failures, and `left`, the
seconds in which a step may still begin or be waited for: after that, StoreTimeout is thrown into the plan at its next step.
Rejected: writing each protocol twice, once with `await`; a plan costs about 0.4 µs a step, so hot paths call stores directly.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from ..clock import SYSTEM, Clock
from ..errors import StoreError, StoreTimeout

T = TypeVar("T")
#: Methods without a deadline.
UNBOUNDED = ("load", "close")


class Call(NamedTuple):
    """One call of a method of `target`; the async driver calls the method with an `a` in front."""

    target: Any
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, object] = MappingProxyType({})


class CallToEnd(Call):
    """A call whose answer is in `answer` also when an async caller is cancelled meanwhile: that goes on once it is known."""

    answer: Any = None


class Recorded(list[Call]):
    """A list of calls whose answers so far are in `answers`, for a plan that an exception interrupts between two of them."""

    def __init__(self, calls: Iterable[Call]) -> None:
        super().__init__(calls)
        self.answers: list[object] = []


class UntilRefused(Recorded):
    """A list of calls of which the sync driver makes no more after a falsy answer: what is all or nothing has then failed."""


class Pause(NamedTuple):
    """Continue after so many seconds."""

    seconds: float


class Waitable(Protocol):
    """Something that other callers complete, such as a batch that is being fetched. A timeout is given where `left` is."""

    def wait(self, timeout: float | None = None) -> object: ...

    async def await_(self, timeout: float | None = None) -> object: ...


class Pending:
    """A value that another thread or task is getting (a Waitable): an error is a value too, and so is StoreTimeout after
    `timeout` seconds.

    Every waiter waits on an event of its own, and looks for itself once in RECHECK_S: a signal handler that raises in a
    waiter, or in the middle of `finish`, delays no other waiter. (It can leave the lock of a `concurrent.futures.Future` locked.)
    """

    RECHECK_S = 0.1

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.value: Any = None
        self.done = False
        self._clock = clock
        self._wakers: list[Callable[[], object]] = []

    def finish(self, value: object) -> None:
        self.value = value
        self.done = True
        self.wake()

    def wake(self) -> bool:
        """Wakes the waiters, once `done` is set; False: one can't be woken any more."""
        all_woken = True
        while self._wakers:
            try:
                self._wakers.pop()()
            except IndexError:  # another thread was quicker
                pass
            except RuntimeError:  # its event loop is closed
                all_woken = False
        return all_woken

    def result(self, timeout: float | None = None) -> Any:
        woken = WakeEvent()
        for seconds in self._waits(timeout, woken.set):
            self._clock.sleep(seconds, woken)
        return self.value if self.done else out_of_time()

    async def aresult(self, timeout: float | None = None) -> Any:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        for seconds in self._waits(timeout, lambda: loop.call_soon_threadsafe(woken.set)):
            await self._clock.asleep(seconds, woken)
        return self.value if self.done else out_of_time()

    def _waits(self, timeout: float | None, waker: Callable[[], object]) -> Iterator[float]:
        """How long a waiter waits before it looks again, until the value is there or the time is over."""
        self._wakers.append(waker)
        left = math.inf if timeout is None else timeout
        while not self.done and left > 0:
            yield min(self.RECHECK_S, left)
            left -= self.RECHECK_S

    wait, await_ = result, aresult


def out_of_time() -> StoreTimeout:
    return StoreTimeout("the store did not answer within the budget of the call")


#: Seconds that are left.
Left = Callable[[], float]


def left_of(part: float, budget_us: int, clock: Clock) -> Left | None:
    """What is left of a part of a budget that begins now; None when there is no budget."""
    if not budget_us:
        return None
    end_us = clock.now_us() + part * budget_us
    return lambda: (end_us - clock.now_us()) / 1e6


class LeftOnLoop:
    """`left` on an event loop whose own delays don't count: a callback that keeps the loop busy takes at most one of PARTS of the
    time. `stop` ends it."""

    PARTS = 16
    LEAST_S = 0.001

    def __init__(self, left: Left) -> None:
        self._left, self._loop = left, asyncio.get_running_loop()
        self._interval = max(self.LEAST_S, left() / self.PARTS)
        self._delay = 0.0
        self._set_timer()

    def _set_timer(self) -> None:
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._measure)

    def _measure(self) -> None:
        self._delay, self._due = self.delay(), math.inf
        if self() > 0:
            self._set_timer()

    def delay(self) -> float:
        """By how much the timers so far were late."""
        return self._delay + max(0.0, self._loop.time() - self._due)

    def __call__(self) -> float:
        return self._left() + self.delay()

    async def is_over(self) -> bool:
        """Whether nothing is left, also in the next iteration: uvloop's time stands still within one."""
        if self() <= 0:
            await asyncio.sleep(0)
        return self() <= 0

    async def wait_for(self, step: Waitable) -> object:
        """Waits again when the loop was late: what it waits for may be done a few iterations later. It yields first, since
        `delay` grows until overdue timers have run. A timeout that is the value, of a batch that failed, is returned when it
        comes again."""
        seen = self.delay()
        answer = await step.await_(max(0.0, self()))
        while isinstance(answer, StoreTimeout) and self.delay() > seen:
            seen, before = self.delay(), answer
            await asyncio.sleep(0)
            answer = await step.await_(max(0.0, self()))
            if answer is before:
                break
        return answer

    def stop(self) -> None:
        self._timer.cancel()


Step = Call | Sequence[Call] | Pause | Waitable
Plan = Generator[Step, Any, T]


class WakeEvent(threading.Event):
    """An event that may be set where a signal handler raises: the lock inside `threading.Event` could stay locked then. Every
    waiter that is woken wakes the next. Rejected: a SimpleQueue, whose `get` never returns when its timeout is over before it
    has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._unset = threading.Lock()  # locked while the event is not set
        self._unset.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with suppress(RuntimeError):  # it was set before
            self._unset.release()

    def clear(self) -> None:
        self._is_set = False
        self._unset.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        if self._unset.acquire(timeout=-1 if timeout is None else timeout):
            with suppress(RuntimeError):
                self._unset.release()
        return self._is_set


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def start_task(
    work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None, name: str | None = None
) -> asyncio.Task[T]:
    """A task that begins in the next iteration of the loop, once its maker has noted it; also where the tasks of the loop begin
    at once (`asyncio.eager_task_factory`). asyncio logs no error when the loop is closed while it is pending: callers don't know
    of it."""
    task = asyncio.Task(work, loop=loop or asyncio.get_running_loop(), name=name)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


def perform_call(call: Call) -> Any:
    return getattr(call.target, call.method)(*call.args, **call.kwargs)


async def aperform_call(call: Call) -> Any:
    return await getattr(call.target, "a" + call.method)(*call.args, **call.kwargs)


async def finish(task: asyncio.Future[Any]) -> Any:
    """The answer of a task, None if it fails. It is waited for also when the caller is cancelled again."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    return None if task.cancelled() or task.exception() else task.result()


async def aperform_to_end(call: CallToEnd, perform: Callable[[Call], Awaitable[object]]) -> object:
    task = asyncio.ensure_future(perform(call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        call.answer = await finish(task)
        raise


def in_time(perform: Callable[[Call], T], left: Left) -> Callable[[Call], T]:
    """`perform`, which makes no call when no time is left."""

    def check(call: Call) -> T:
        if call.method not in UNBOUNDED and left() <= 0:
            raise out_of_time()
        return perform(call)

    return check


def ain_time(perform: Callable[[Call], Awaitable[T]], left: LeftOnLoop) -> Callable[[Call], Awaitable[T]]:
    async def check(call: Call) -> T:
        if call.method not in UNBOUNDED and await left.is_over():
            raise out_of_time()
        return await perform(call)

    return check


def together(plans: Sequence[Plan[T]]) -> Plan[list[T | StoreError]]:
    """Makes plans, each of exactly one list of calls, as one list. A StoreError replaces the answer of one that fails."""
    lists, found = [next(plan) for plan in plans], list[T | StoreError]()
    answers = iter((yield list(chain.from_iterable(lists))))  # type: ignore[arg-type]
    for plan, calls in zip(plans, lists, strict=True):
        try:
            plan.send(list(islice(answers, len(calls))))  # type: ignore[arg-type]
        except StopIteration as end:
            found.append(end.value)
        except StoreError as error:
            found.append(error)
    return found


def attempt_all(calls: Sequence[Call], attempt: Callable[[Call], object]) -> list[object]:
    answers = calls.answers if isinstance(calls, Recorded) else []
    for call in calls:
        answers.append(attempt(call))
        if not answers[-1] and isinstance(calls, UntilRefused):
            break
    return answers


def run(
    plan: Plan[T],
    perform: Callable[[Call], object] = perform_call,
    sleep: Callable[[float], object] | None = None,
    perform_all: Callable[[list[Call]], Sequence[object]] | None = None,
    left: Left | None = None,
) -> T:
    """Performs a plan with blocking calls. `sleep` is the clock's; a plan that never pauses needs none. `perform_all` makes
    the calls of a list together (all are written before the first reply is read)."""
    if left is not None:
        perform = in_time(perform, left)

    def attempt(call: Call) -> object:
        try:
            return perform(call)
        except StoreError as error:
            return error

    answer: object = None
    raised: BaseException | None = None
    while True:
        try:
            while True:  # in here: a handler may raise where a loop begins again, too
                step = plan.send(answer) if raised is None else plan.throw(raised)
                raised = None
                if isinstance(step, Call):
                    answer = perform(step)
                elif isinstance(step, list):
                    answer = attempt_all(step, attempt) if perform_all is None else perform_all(step)
                elif isinstance(step, Pause):
                    assert sleep is not None
                    answer = sleep(step.seconds)
                else:
                    answer = step.wait() if left is None else step.wait(max(0.0, left()))  # type: ignore[union-attr]
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except BaseException as error:  # of the call, or of a signal handler: the plan gives back what it has charged
            raised = error if plan.gi_frame is not None else None  # type: ignore[attr-defined]
            if raised is None:  # of the plan itself, which is over
                raise


async def arun(
    plan: Plan[T],
    perform: Callable[[Call], Awaitable[object]] = aperform_call,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    left: Left | None = None,
) -> T:
    """Performs a plan on an event loop; the calls of one list run concurrently."""
    if left is None:
        return await _arun(plan, perform, sleep, None)
    left_on_loop = LeftOnLoop(left)
    try:
        return await _arun(plan, ain_time(perform, left_on_loop), sleep, left_on_loop)
    finally:
        left_on_loop.stop()


async def _arun(
    plan: Plan[T],
    perform: Callable[[Call], Awaitable[object]],
    sleep: Callable[[float], Awaitable[object]],
    left: LeftOnLoop | None,
) -> T:
    async def attempt(call: Call) -> object:
        try:
            return await perform(call)
        except StoreError as error:
            return error

    answer: object = None
    raised: BaseException | None = None
    while True:
        try:
            while True:
                step = plan.send(answer) if raised is None else plan.throw(raised)
                raised = None
                if isinstance(step, Call):
                    answer = await (aperform_to_end(step, perform) if isinstance(step, CallToEnd) else perform(step))
                elif isinstance(step, list):
                    answer = [await attempt(step[0])] if len(step) == 1 else await asyncio.gather(*map(attempt, step))
                elif isinstance(step, Pause):
                    answer = await sleep(step.seconds)
                else:
                    answer = await (step.await_() if left is None else left.wait_for(step))  # type: ignore[union-attr, arg-type]
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except BaseException as error:  # of the call, or of a signal handler: the plan gives back what it has charged
            raised = error if plan.gi_frame is not None else None  # type: ignore[attr-defined]
            if raised is None:  # of the plan itself, which is over
                raise
