"""PacedQueue against a model: whatever is put, taken and removed, order, pace and bound hold, and no start is lost."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from effort import scaled
from interrupts import interrupted_at
from limitkeeper import MemoryStore, RateLimited
from limitkeeper.concurrency.paced_queue import Entry, PacedQueue
from limitkeeper.testing import ManualClock

CAPACITY, INTERVAL_US = 12, 200_000


class PacedQueueMachine(RuleBasedStateMachine):
    """The model: a list of (number, cost), and the time until which the last item that left keeps its place."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1000)
        self.queue: PacedQueue[int] = PacedQueue("5/s", CAPACITY, "model", MemoryStore(clock=self.clock))
        self.model: deque[Entry[int]] = deque()
        self.number = 0
        self.free_us = self.clock.now_us()

    @rule(cost=st.integers(1, CAPACITY))
    def put(self, cost: int) -> None:
        """An item is accepted exactly when it fits beside the waiting and the leaving ones; a refusal has the time at which it
        will fit.
        """
        leaving_us = max(0, self.free_us - self.clock.now_us())
        held_us = sum(entry.cost for entry in self.model) * INTERVAL_US + leaving_us
        over_us = held_us + cost * INTERVAL_US - CAPACITY * INTERVAL_US
        try:
            entry = self.queue.put_nowait(self.number, cost)
        except RateLimited as refused:
            retry_us = refused.decision.retry_us
            assert retry_us == over_us > 0
        else:
            assert over_us <= 0
            self.model.append(entry)
            self.number += 1

    @precondition(lambda self: self.model)
    @rule()
    def get(self) -> None:
        """The first item comes, at the first moment that the pace allows."""
        expected, start_us = self.model.popleft(), max(self.clock.now_us(), self.free_us)
        assert self.queue.get() == expected.item
        assert self.clock.now_us() == start_us
        self.free_us = start_us + expected.cost * INTERVAL_US

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Any item can leave once; it is not handed over any more."""
        entry = data.draw(st.sampled_from(list(self.model)))
        assert self.queue.remove(entry) == entry.item
        assert self.queue.remove(entry) is None
        self.model.remove(entry)

    @rule(milliseconds=st.integers(0, 2000))
    def advance(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds / 1000)

    @invariant()
    def units_are_the_sum_of_the_costs(self) -> None:
        assert self.queue.units == sum(entry.cost for entry in self.model) <= CAPACITY
        assert len(self.queue) == len(self.model)

    @invariant()
    def no_start_is_lost(self) -> None:
        """The limiter holds what has left, and nothing else."""
        held = self.queue.limiter.peek("model").reset_after * 1e6
        assert round(held) == max(0, self.free_us - self.clock.now_us())
        assert self.queue.limiter.waiting() == 0


TestPacedQueue = PacedQueueMachine.TestCase
TestPacedQueue.settings = settings(max_examples=scaled(60), stateful_step_count=30, deadline=None)
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("call", ["put", "put_nowait", "get", "remove", "clear"])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a wait"])
def test_an_interrupt_at_any_moment_leaves_a_queue_that_works(call: str, waits: bool) -> None:
    """A signal handler raises at any moment of a call: the units are those of the items, and the next calls have their turns."""
    number, going = 0, True
    while going:
        number += 1
        queue: PacedQueue[str] = PacedQueue("5/s", CAPACITY, "model", MemoryStore(clock=ManualClock(1000)))
        queue.put_nowait("first", 2)
        if waits:
            queue.put_nowait("second")
            queue.get()
        arguments = ("one more", 3) if "put" in call else ()
        going = interrupted_at(number, lambda: getattr(queue, call)(*arguments))  # noqa: B023
        assert queue.units == sum(entry.cost for entry in queue._entries), number
        assert queue._put_turn.in_use == queue._get_turn.in_use == 0, number
        queue.put("last", CAPACITY - queue.units)
        while queue.get() != "last":
            pass
    assert number > 5
