"""Performs plans (stores/sans_io.py) in simulated time: the real code of gates and stores, with a round trip for each call.

A decision of a LeasedStore is a plan of its own. A call of any other store arrives there after half of its round trip, is
decided, and its answer is back after the other half. Calls of one list travel together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..algorithms.claim import Claim
from ..decision import Decision
from ..errors import StoreError, StoreUnavailable
from ..stores.leased import LeasedStore
from ..stores.sans_io import Call, Pause, Pending, Plan, perform_call
from .event_loop import EventLoop

#: `latency_us(store)` is the round trip to a store, in µs; None: it can't be reached.
Latency = Callable[[Any], int | None]
Answered = Callable[[object], object]


class PlanDriver:
    """Drives any number of plans. `latency_us` is asked for every call."""

    def __init__(self, loop: EventLoop, latency_us: Latency) -> None:
        self.loop, self.latency_us = loop, latency_us

    def drive(self, plan: Plan[Any], done: Answered) -> None:
        """Performs a plan; `done(result)` is called with its value, or with the exception that it raised."""
        self._resume(plan, done, None)

    def _resume(self, plan: Plan[Any], done: Answered, answer: object) -> None:
        try:
            step = plan.throw(answer) if isinstance(answer, BaseException) else plan.send(answer)
        except StopIteration as end:
            done(end.value)
            return
        except Exception as error:
            done(error)
            return
        resume = partial(self._resume, plan, done)
        if isinstance(step, Call):
            self._call(step, resume)
        elif isinstance(step, list):
            self._call_all(step, resume)
        elif isinstance(step, Pause):
            self.loop.after(round(step.seconds * 1e6), resume)
        elif isinstance(step, Pending):
            self._wait(step, resume)
        else:
            raise TypeError(f"a plan yielded {step!r}, which a simulation can't perform")

    def _wait(self, pending: Pending, resume: Answered) -> None:
        if pending.done:
            resume(pending.value)
        else:
            pending._wakers.append(lambda: self.loop.after(0, lambda _: resume(pending.value)))

    def _call_all(self, calls: list[Call], resume: Answered) -> None:
        answers: list[object] = [None] * len(calls)
        left = len(calls)

        def answered(number: int, answer: object) -> None:
            nonlocal left
            answers[number] = answer
            left -= 1
            if not left:
                failed = [one for one in answers if isinstance(one, BaseException) and not isinstance(one, StoreError)]
                resume(failed[0] if failed else answers)

        for number, call in enumerate(calls):
            self._call(call, partial(answered, number))

    def _call(self, call: Call, resume: Answered) -> None:
        if isinstance(call.target, LeasedStore) and call.method in ("decide", "decide_one"):
            found = decision_of(call)
            if isinstance(found, Decision):
                resume(found)
            else:
                self.drive(found, resume)
            return
        latency_us = self.latency_us(call.target)
        if latency_us == 0:
            resume(attempt(call))
        elif latency_us is None:
            resume(StoreUnavailable("the store is down"))
        else:
            self.loop.after(latency_us // 2, self._arrive, (call, latency_us - latency_us // 2, resume))

    def _arrive(self, sent: tuple[Call, int, Answered]) -> None:
        call, back_us, resume = sent
        reached = self.latency_us(call.target) is not None
        self.loop.after(back_us, resume, attempt(call) if reached else StoreUnavailable("the store is down"))


def attempt(call: Call) -> object:
    try:
        return perform_call(call)
    except StoreError as error:
        return error


def decision_of(call: Call) -> Decision | Plan[Any]:
    """What a LeasedStore does for a decision: it answers from RAM, or has a plan."""
    store, args = call.target, call.args
    if call.method == "decide_one":
        named, key, cost, max_wait_us, commit = args
        return store.plan_decide([Claim(named, key, cost)], max_wait_us, commit, False, 0)  # type: ignore[no-any-return]
    return store.plan_decide(*args, True, False, 0)  # type: ignore[no-any-return]
