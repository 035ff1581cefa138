"""Plans: protocols written once, as generators of calls, and the two drivers that perform them (sync and async).

A plan yields what it needs and is sent the answer:

    Call(target, method, args)   the value; its exception is thrown into the plan
    [Call, Call, …]              a list of values, with a StoreError in the place of a call that failed. The async driver makes
                                 the calls concurrently, the sync driver one after the other (`UntilRefused`: up to a falsy
                                 answer) unless it is given `perform_all`
    Pause(seconds)               None, after that time
    Event-like (`wait`, `await_`)  None, once it is set

`run` and `arun` take a `perform` that makes one call, so that a wrapper can add a deadline or note failures.
Rejected: writing each protocol twice, once with `await`; a plan costs about 0.4 µs a step, so hot paths call stores directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from ..errors import StoreError

T = TypeVar("T")


class Call(NamedTuple):
    """One call of a method of `target`; the async driver calls the method with an `a` in front."""

    target: Any
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})


class UntilRefused(list[Call]):
    """A list of calls of which the sync driver makes no more after a falsy answer: what is all or nothing has then failed."""


class Pause(NamedTuple):
    """Continue after so many seconds."""

    seconds: float


class Waitable(Protocol):
    """Something that other callers complete, such as a batch that is being fetched."""

    def wait(self) -> object: ...

    async def await_(self) -> object: ...


Step = Call | Sequence[Call] | Pause | Waitable
Plan = Generator[Step, Any, T]


def perform_call(call: Call) -> Any:
    return getattr(call.target, call.method)(*call.args, **call.kwargs)


async def aperform_call(call: Call) -> Any:
    return await getattr(call.target, "a" + call.method)(*call.args, **call.kwargs)


def attempt_all(calls: Sequence[Call], attempt: Callable[[Call], Any]) -> list[Any]:
    answers: list[Any] = []
    for call in calls:
        answers.append(attempt(call))
        if not answers[-1] and isinstance(calls, UntilRefused):
            break
    return answers


def run(
    plan: Plan[T],
    perform: Callable[[Call], Any] = perform_call,
    sleep: Callable[[float], object] | None = None,
    perform_all: Callable[[list[Call]], list[Any]] | None = None,
) -> T:
    """Performs a plan with blocking calls. `sleep` is the clock's; a plan that never pauses needs none. `perform_all` makes
    the calls of a list together (all are written before the first reply is read)."""

    def attempt(call: Call) -> Any:
        try:
            return perform(call)
        except StoreError as error:
            return error

    answer: Any = None
    try:
        step = plan.send(None)
        while True:
            try:
                if isinstance(step, Call):
                    answer = perform(step)
                elif isinstance(step, list):
                    answer = attempt_all(step, attempt) if perform_all is None else perform_all(step)
                elif isinstance(step, Pause):
                    assert sleep is not None
                    answer = sleep(step.seconds)
                else:
                    answer = step.wait()  # type: ignore[union-attr]
            except BaseException as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def arun(
    plan: Plan[T],
    perform: Callable[[Call], Awaitable[Any]] = aperform_call,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """Performs a plan on an event loop; the calls of one list run concurrently."""

    async def attempt(call: Call) -> Any:
        try:
            return await perform(call)
        except StoreError as error:
            return error

    answer: Any = None
    try:
        step = plan.send(None)
        while True:
            try:
                if isinstance(step, Call):
                    answer = await perform(step)
                elif isinstance(step, list):
                    answer = [await attempt(step[0])] if len(step) == 1 else await asyncio.gather(*map(attempt, step))
                elif isinstance(step, Pause):
                    answer = await sleep(step.seconds)
                else:
                    answer = await step.await_()  # type: ignore[union-attr]
            except BaseException as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
