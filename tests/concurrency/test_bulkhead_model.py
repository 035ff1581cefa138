"""Bulkhead against a model, step by step: running and waiting calls are always exactly known, and no place is ever lost."""

from __future__ import annotations

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from limitkeeper.concurrency import Bulkhead, BulkheadFull
from virtual_time import VirtualClock

TIMEOUT_US = 1000


class BulkheadMachine(RuleBasedStateMachine):
    """Tasks that come, end, fail, are cancelled, time out, while the size changes. The model is two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = VirtualClock()
        self.size, self.room = 2, 3
        self.bulkhead = Bulkhead(self.size, self.room, TIMEOUT_US / 1e6, clock=self.clock)
        self.running: list[int] = []
        self.queue: list[tuple[int, int]] = []  # (number, deadline)
        self.really: set[int] = set()
        self.refused: set[int] = set()
        self.modelled_refused: set[int] = set()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.ends: dict[int, asyncio.Future[None]] = {}

    async def turns(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    async def call(self, number: int) -> None:
        try:
            async with self.bulkhead:
                self.really.add(number)
                try:
                    await self.ends[number]
                finally:
                    self.really.discard(number)
        except BulkheadFull:
            self.refused.add(number)

    def settle(self) -> None:
        while self.queue and len(self.running) < self.size:
            self.running.append(self.queue.pop(0)[0])
        self.loop.run_until_complete(self.turns())

    @rule()
    def come(self) -> None:
        number = len(self.tasks)
        self.ends[number] = self.loop.create_future()
        self.tasks[number] = self.loop.create_task(self.call(number))
        if len(self.running) >= self.size and len(self.queue) >= self.room:
            self.modelled_refused.add(number)
        else:
            self.queue.append((number, self.clock.now_us() + TIMEOUT_US))
        self.settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["end", "fail", "cancel"]))
    def leave(self, data, how) -> None:
        number = data.draw(st.sampled_from(self.running))
        self.running.remove(number)
        if how == "end":
            self.ends[number].set_result(None)
        elif how == "fail":
            self.ends[number].set_exception(KeyError(number))
            self.tasks[number].add_done_callback(lambda task: task.exception())
        else:
            self.tasks[number].cancel()
        self.settle()

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def give_up(self, data) -> None:
        entry = data.draw(st.sampled_from(self.queue))
        self.queue.remove(entry)
        self.tasks[entry[0]].cancel()
        self.settle()

    @precondition(lambda self: self.queue and self.running)
    @rule()
    def granted_and_cancelled_in_one_turn(self) -> None:
        """One ends, and the waiter that gets its place is cancelled before it runs: the place passes to the next."""
        self.ends[self.running.pop(0)].set_result(None)
        first = self.queue[0][0]
        if len(self.running) < self.size:
            self.loop.run_until_complete(asyncio.sleep(0))  # the place is granted, and not noticed yet
            self.queue.pop(0)
            self.tasks[first].cancel()
        self.settle()

    @rule(size=st.integers(1, 5))
    def resize(self, size) -> None:
        self.size = size
        self.bulkhead.resize(size)
        self.settle()

    @rule(step_us=st.integers(1, TIMEOUT_US))
    def time_passes(self, step_us) -> None:
        end_us = self.clock.now_us() + step_us
        late = [entry for entry in self.queue if entry[1] <= end_us]
        self.queue = [entry for entry in self.queue if entry not in late]
        self.modelled_refused |= {number for number, _ in late}
        self.loop.run_until_complete(self.clock.run_until(end_us, self.turns))
        self.settle()

    @invariant()
    def agrees(self) -> None:
        assert self.really == set(self.running)
        assert self.refused == self.modelled_refused
        assert (self.bulkhead.in_use, self.bulkhead.waiting) == (len(self.running), len(self.queue))

    def teardown(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        self.loop.run_until_complete(self.turns())
        assert (self.bulkhead.in_use, self.bulkhead.waiting) == (0, 0)
        self.loop.close()


TestBulkheadMachine = BulkheadMachine.TestCase
