"""Every way of leaving a call gives its place back, whatever kind of bulkhead holds it: none is ever lost, none is created."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import BulkheadFull, MemoryStore
from limitkeeper.concurrency import (
    AIMD,
    AdaptiveBulkhead,
    Bulkhead,
    Dependencies,
    DependencyCap,
    DistributedBulkhead,
    LoadShedder,
)
from limitkeeper.decorators import decorated


class Kind(NamedTuple):
    """`call()` is the context of one call, of two at a time; any number may wait."""

    call: Callable[[], Any]
    in_use: Callable[[], int]
    waiting: Callable[[], int]


def adaptive(partition: str | None) -> Kind:
    made = AdaptiveBulkhead(AIMD(2, 2, 2), max_waiting=None, partitions={"live": 0.5})
    return Kind(lambda: made.call(partition), lambda: made.bulkhead.in_use, lambda: made.bulkhead.waiting)


def shedder() -> Kind:
    made = LoadShedder(Bulkhead(2))
    return Kind(lambda: made.call("critical"), lambda: made.bulkhead.in_use, lambda: made.bulkhead.waiting)


def distributed() -> Kind:
    made = DistributedBulkhead(2, MemoryStore(), name="db", poll="1ms")
    return Kind(lambda: made, lambda: max(made.in_use, made.taken()), lambda: made.waiting)


def dependency() -> Kind:
    made = Dependencies({"db": DependencyCap("1000000/s", concurrent=2, timeout="60s")})["db"]
    assert made.bulkhead is not None
    return Kind(lambda: made, lambda: made.bulkhead.in_use, lambda: made.bulkhead.waiting)


def bulkhead() -> Kind:
    made = Bulkhead(2)
    return Kind(lambda: made, lambda: made.in_use, lambda: made.waiting)


KINDS: dict[str, Callable[[], Kind]] = {
    "bulkhead": bulkhead,
    "adaptive": lambda: adaptive(None),
    "adaptive, partition": lambda: adaptive("live"),
    "shedder": shedder,
    "distributed": distributed,
    "dependency": dependency,
}


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]()


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def hold(kind: Kind, until: asyncio.Event) -> None:
    async with kind.call():
        await until.wait()


def test_cancelled_while_queued(kind):
    """A waiter that is cancelled leaves the queue, and the next one gets the place."""

    async def main():
        ends = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(hold(kind, end)) for end in ends]
        await turns()
        assert (kind.in_use(), kind.waiting()) == (2, 2)
        tasks[2].cancel()
        for end in ends:
            end.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert (kind.in_use(), kind.waiting()) == (0, 0)

    asyncio.run(main())


def test_leaving_without_entering(kind):
    """Leaving a call that was not entered is an error, and creates no place."""
    with pytest.raises(RuntimeError, match="without acquire"):
        kind.call().__exit__(None, None, None)
    with kind.call(), kind.call():
        assert kind.in_use() == 2
    assert kind.in_use() == 0


@pytest.mark.parametrize("error", [KeyError, TimeoutError, KeyboardInterrupt])
def test_an_exception_inside(kind, error):
    """A call that raises gives its place back, in threads and tasks."""

    async def fail():
        async with kind.call():
            raise error

    async def caught():
        with pytest.raises(error):
            await fail()

    with pytest.raises(error), kind.call():
        raise error
    asyncio.run(caught())
    assert kind.in_use() == 0


def test_an_abandoned_generator(kind):
    """A decorated generator that is dropped half way gives its place back when it is collected."""

    def numbers():
        yield 1
        yield 2

    generator = decorated(numbers, lambda args, kwargs: kind.call())()
    assert next(generator) == 1
    assert kind.in_use() == 1
    del generator
    gc.collect()
    assert kind.in_use() == 0


def test_an_event_loop_that_is_closed_with_waiters(kind):
    """Waiters and holders of a loop that never runs again give their places back when they are collected."""
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(hold(kind, asyncio.Event())) for _ in range(5)]
    loop.run_until_complete(turns())
    assert (kind.in_use(), kind.waiting()) == (2, 3)
    loop.close()
    for task in tasks:
        task._log_destroy_pending = False
    del tasks, task, loop
    gc.collect()
    assert (kind.in_use(), kind.waiting()) == (0, 0)
    with kind.call():
        assert kind.in_use() == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in KINDS if name != "distributed"])  # which has a test with a store of both
def test_fork_with_held_places(name):
    """A forked child has all places free; leaving a call that its parent entered changes nothing in it."""
    kind = KINDS[name]()
    held = kind.call()
    held.__enter__()
    child = os.fork()
    if child == 0:
        free = kind.in_use() == 0
        held.__exit__(None, None, None)
        with kind.call(), kind.call():
            free = free and kind.in_use() == 2
        os._exit(0 if free and kind.in_use() == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kind.in_use() == 1
    held.__exit__(None, None, None)
    assert kind.in_use() == 0


STEP = st.tuples(st.sampled_from(["come", "come", "come", "end", "fail", "cancel", "turn"]), st.integers(0, 20))


@pytest.mark.parametrize("name", KINDS)
@effort(30)
@given(steps=st.lists(STEP, max_size=40))
def test_no_place_is_lost(name, steps):
    """Whatever comes, ends, fails and is cancelled, at most two run, and at the end all places are free."""
    kind = KINDS[name]()

    async def main():
        calls = []
        for step, number in steps:
            if step == "come":
                end = asyncio.get_running_loop().create_future()
                calls.append((asyncio.create_task(run(end)), end))
            elif step == "turn":
                await turns(number % 4)
            elif calls:
                task, end = calls[number % len(calls)]
                if step == "cancel":
                    task.cancel()
                elif not end.done():
                    end.set_result(None) if step == "end" else end.set_exception(KeyError())
            assert kind.in_use() <= 2
        for _, end in calls:
            with suppress(asyncio.InvalidStateError):
                end.set_result(None)
        await asyncio.wait_for(asyncio.gather(*(task for task, _ in calls), return_exceptions=True), 60)
        for _, end in calls:
            if not end.cancelled():
                end.exception()

    async def run(end: asyncio.Future[None]) -> None:
        with suppress(BulkheadFull):
            async with kind.call():
                await end

    asyncio.run(main())
    assert (kind.in_use(), kind.waiting()) == (0, 0)
