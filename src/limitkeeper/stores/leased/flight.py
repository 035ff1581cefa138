"""Plans, and who drives them: what is asked of a parent store, told apart from how it is asked.

A plan is a generator. It yields a call for the parent, `(verb, arguments)`, or a `Flight` to wait for, and is sent the answer.
`run` drives it with the parent's sync face, `arun` with its async one, so that both colours follow the same plan.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import Any

from ...errors import StoreError
from ..contract import Store

Plan = Generator[Any, Any, Any]


class Flight:
    """A batch on its way. Others who need it wait for it instead of asking as well."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.error: StoreError | None = None
        self._landed = threading.Event()
        self._waiters: list[tuple[Any, Any]] = []

    def land(self) -> None:
        self._landed.set()
        while self._waiters:
            loop, future = self._waiters.pop()
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # that loop is gone, and whoever waited in it
                pass

    def can_be_awaited(self, loop: Any) -> bool:
        """A thread must not wait for a loop: it may be that loop's own."""
        return loop is not None or self.loop is None

    def wait(self) -> None:
        self._landed.wait()

    async def await_it(self) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiters.append((loop, future))
        if self._landed.is_set():
            self.land()
        await future


def _wake(future: Any) -> None:
    if not future.done():
        future.set_result(None)


def run(parent: Store, plan: Plan) -> Any:
    """Follows a plan with the parent's sync face."""
    answer: Any = None
    try:
        step = plan.send(None)
        while True:
            try:
                if isinstance(step, Flight):
                    step.wait()
                else:
                    answer = getattr(parent, step[0])(*step[1], **(step[2] if len(step) > 2 else {}))
            except BaseException as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as end:
        return end.value


async def arun(parent: Store, plan: Plan) -> Any:
    """Follows a plan with the parent's async face."""
    answer: Any = None
    try:
        step = plan.send(None)
        while True:
            try:
                if isinstance(step, Flight):
                    await step.await_it()
                else:
                    answer = await getattr(parent, "a" + step[0])(*step[1], **(step[2] if len(step) > 2 else {}))
            except BaseException as error:
                step = plan.throw(error)
            else:
                step = plan.send(answer)
    except StopIteration as end:
        return end.value
