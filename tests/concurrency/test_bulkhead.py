"""Bulkhead: the number of running calls, the queue, and every way of leaving."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable

import pytest

from limitkeeper.concurrency import Bulkhead, BulkheadFull
from limitkeeper.concurrency.bulkhead import PlaceWaiter
from limitkeeper.errors import InvalidLimit
from limitkeeper.observe.prometheus import LimitkeeperCollector
from virtual_time import VirtualClock


def until(true: Callable[[], object]) -> None:
    """Waits until another thread fulfils a condition."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.001)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_forty_run_and_the_forty_first_starts_when_one_leaves():
    """`Bulkhead(40)` runs 40 calls; the 41st waits, and starts when one of them ends."""

    async def main():
        bulkhead, started, ends = Bulkhead(40), [], [asyncio.Event() for _ in range(41)]

        async def call(number):
            async with bulkhead:
                started.append(number)
                await ends[number].wait()

        async with asyncio.TaskGroup() as tasks:
            for number in range(41):
                tasks.create_task(call(number))
            await turns()
            assert (started, bulkhead.in_use, bulkhead.waiting) == (list(range(40)), 40, 1)
            ends[17].set()
            await turns()
            assert (started[40:], bulkhead.in_use, bulkhead.waiting) == ([40], 40, 0)
            for end in ends:
                end.set()
        assert bulkhead.in_use == 0

    asyncio.run(main())


def test_threads_wait_in_order_of_arrival():
    """Threads that wait are served first come, first served."""
    bulkhead, order = Bulkhead(1), []

    def call(number):
        with bulkhead:
            order.append(number)

    bulkhead.acquire()
    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=call, args=(number,)))
        threads[-1].start()
        until(lambda: bulkhead.waiting == len(threads))
    bulkhead.release()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]
    assert bulkhead.in_use == 0


def test_a_thread_and_a_task_share_a_bulkhead():
    """A task that waits gets the place of a thread, and a thread that of a task."""
    bulkhead = Bulkhead(1)
    bulkhead.acquire()
    held, leave = threading.Event(), threading.Event()

    async def task():
        async with bulkhead:
            held.set()
            await asyncio.to_thread(leave.wait)

    runner = threading.Thread(target=lambda: asyncio.run(task()))
    runner.start()
    until(lambda: bulkhead.waiting == 1)
    bulkhead.release()
    assert held.wait(60)
    waiter = threading.Thread(target=bulkhead.acquire)
    waiter.start()
    until(lambda: bulkhead.waiting == 1)
    leave.set()
    waiter.join()
    runner.join()
    assert (bulkhead.in_use, bulkhead.waiting) == (1, 0)


def test_newcomers_do_not_overtake():
    """A place that becomes free belongs to the first waiter, even before it runs again."""

    async def main():
        bulkhead = Bulkhead(1)
        await bulkhead.aacquire()
        waiter = asyncio.create_task(bulkhead.aacquire())
        await turns()
        bulkhead.release()
        assert not bulkhead.try_acquire()
        await waiter
        assert bulkhead.in_use == 1

    asyncio.run(main())


def test_a_full_queue_refuses():
    """With `max_waiting` callers in the queue, the next one is refused at once."""

    async def main():
        bulkhead = Bulkhead(2, max_waiting=1, name="db")
        waiting = [asyncio.create_task(bulkhead.aacquire()) for _ in range(3)]
        await turns()
        with pytest.raises(BulkheadFull, match="bulkhead 'db' of 2 is full: 2 running, 1 waiting") as refused:
            await bulkhead.aacquire()
        with pytest.raises(BulkheadFull):
            bulkhead.acquire()
        assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
        waiting[2].cancel()
        await turns()
        assert bulkhead.waiting == 0

    asyncio.run(main())


@pytest.mark.parametrize("options", [{"max_waiting": 0}, {"timeout": 0}])
def test_no_waiting_at_all(options):
    """With no queue, or no time to wait, a full bulkhead refuses at once."""
    bulkhead = Bulkhead(1, **options)
    with bulkhead, pytest.raises(BulkheadFull):
        bulkhead.acquire()
    with bulkhead:
        assert bulkhead.in_use == 1


def test_a_timeout_on_the_virtual_clock():
    """A waiter gives up after its timeout, to the microsecond, and leaves the queue."""

    async def main():
        clock = VirtualClock()
        begun_us = clock.now_us()
        bulkhead = Bulkhead(1, timeout="250ms", clock=clock)
        await bulkhead.aacquire()
        waiter = asyncio.create_task(bulkhead.aacquire())
        await clock.run_until(begun_us + 249_999, turns)
        assert not waiter.done()
        await clock.run_until(begun_us + 250_000, turns)
        with pytest.raises(BulkheadFull, match=r"had no free place for 0\.25 s"):
            await waiter
        assert bulkhead.stats().timed_out == 1
        bulkhead.release()
        assert (bulkhead.in_use, bulkhead.waiting) == (0, 0)

    asyncio.run(main())


def test_a_timeout_of_a_thread(clock):
    """A thread gives up after its timeout."""
    bulkhead = Bulkhead(1, timeout=2, clock=clock)
    began_us = clock.now_us()
    with bulkhead, pytest.raises(BulkheadFull):
        bulkhead.acquire()
    assert clock.now_us() - began_us == 2_000_000
    assert bulkhead.in_use == bulkhead.waiting == 0


def test_cancelled_while_queued():
    """A task that is cancelled in the queue leaves it; those behind it keep their order."""

    async def main():
        bulkhead, order = Bulkhead(1), []

        async def call(number):
            async with bulkhead:
                order.append(number)

        await bulkhead.aacquire()
        tasks = [asyncio.create_task(call(number)) for number in range(3)]
        await turns()
        tasks[1].cancel()
        await turns()
        assert bulkhead.waiting == 2
        bulkhead.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (order, bulkhead.in_use) == ([0, 2], 0)

    asyncio.run(main())


def test_cancelled_after_the_place_was_granted():
    """A task that is cancelled before it notices its place passes it on."""

    async def main():
        bulkhead = Bulkhead(1)
        await bulkhead.aacquire()
        first, second = (asyncio.create_task(bulkhead.aacquire()) for _ in range(2))
        await turns()
        bulkhead.release()
        first.cancel()
        await second
        assert first.cancelled()
        assert (bulkhead.in_use, bulkhead.waiting) == (1, 0)

    asyncio.run(main())


def test_interrupted_thread(held):
    """An exception that ends a thread's wait (Ctrl-C) takes it out of the queue."""
    bulkhead, raised = Bulkhead(1, timeout=1000, clock=held), []

    def call():
        try:
            bulkhead.acquire()
        except KeyboardInterrupt:
            raised.append(True)

    bulkhead.acquire()
    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: bulkhead.waiting == 1)
    held.interrupt(thread)
    thread.join()
    assert (raised, bulkhead.waiting) == ([True], 0)
    bulkhead.release()
    assert bulkhead.in_use == 0


@pytest.mark.parametrize("method", ["_grant", "wake"])
def test_an_interrupted_release_wakes_the_waiter(method, monkeypatch):
    """A signal handler raises while a place is handed over: the waiter still gets it."""
    bulkhead = Bulkhead(1)
    bulkhead.acquire()
    waiting = threading.Thread(target=bulkhead.acquire, daemon=True)
    waiting.start()
    until(lambda: bulkhead.waiting)
    with monkeypatch.context() as patch:

        def interrupted(*_):
            patch.undo()
            raise KeyboardInterrupt

        patch.setattr(Bulkhead if method == "_grant" else PlaceWaiter, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            bulkhead.release()
    until(lambda: not waiting.is_alive())
    assert (bulkhead.in_use, bulkhead.waiting) == (1, 0)


@pytest.mark.parametrize("method", ["_join", "_begin"])
def test_an_interrupted_acquire_leaves_the_queue(method, monkeypatch):
    """A signal handler raises after a caller has joined the queue, or was given its place: it no longer waits, and holds none."""
    bulkhead = Bulkhead(1, timeout=60)
    bulkhead.acquire()
    if method == "_begin":
        threading.Thread(target=lambda: until(lambda: bulkhead.waiting) or bulkhead.release(), daemon=True).start()
    with monkeypatch.context() as patch:
        inner = getattr(Bulkhead, method)

        def interrupted(*args):
            inner(*args)
            raise KeyboardInterrupt

        patch.setattr(Bulkhead, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            bulkhead.acquire()
    assert (bulkhead.in_use, bulkhead.waiting) == (int(method == "_join"), 0)


def test_an_exception_inside_gives_the_place_back():
    """A call that raises leaves its place, sync and async."""
    bulkhead = Bulkhead(1)

    async def fail():
        async with bulkhead:
            raise KeyError

    with pytest.raises(KeyError), bulkhead:
        raise KeyError
    with pytest.raises(KeyError):
        asyncio.run(fail())
    assert bulkhead.in_use == 0


def test_release_without_acquire():
    """A release too many is an error, and creates no place."""
    bulkhead = Bulkhead(1, name="db")
    with pytest.raises(RuntimeError, match="release\\(\\) of 'db' without acquire"):
        bulkhead.release()
    assert bulkhead.try_acquire()
    assert not bulkhead.try_acquire()


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None, "40", 10**10])
def test_invalid_sizes(size):
    """Sizes are whole numbers from 1; resizing checks them too, and changes nothing."""
    with pytest.raises(InvalidLimit, match="max_concurrent must be"):
        Bulkhead(size)
    bulkhead = Bulkhead(3)
    with pytest.raises(InvalidLimit):
        bulkhead.resize(size)
    assert bulkhead.max_concurrent == 3


@pytest.mark.parametrize("options", [{"max_waiting": -1}, {"max_waiting": 0.5}, {"timeout": -1}, {"timeout": "soon"}])
def test_invalid_options(options):
    """A negative queue or timeout is refused."""
    with pytest.raises(InvalidLimit):
        Bulkhead(1, **options)


def test_resizing_while_in_use():
    """A smaller size lets running calls continue and admits none until they are fewer; a larger one starts waiters at once."""

    async def main():
        bulkhead = Bulkhead(3)
        for _ in range(3):
            await bulkhead.aacquire()
        waiters = [asyncio.create_task(bulkhead.aacquire()) for _ in range(4)]
        await turns()
        bulkhead.resize(1)
        bulkhead.release()
        bulkhead.release()
        await turns()
        assert (bulkhead.in_use, bulkhead.waiting) == (1, 4)
        bulkhead.release()
        await turns()
        assert (bulkhead.in_use, bulkhead.waiting, waiters[0].done()) == (1, 3, True)
        bulkhead.resize(3)
        await turns()
        assert (bulkhead.in_use, bulkhead.waiting) == (3, 1)
        waiters[3].cancel()
        await turns()

    asyncio.run(main())


def test_the_decorator_holds_a_place_during_a_call():
    """`@bulkhead.limit` wraps functions, coroutines and generators; each holds a place until it ends."""
    bulkhead = Bulkhead(2)

    @bulkhead.limit
    def call(x):
        return x, bulkhead.in_use

    @bulkhead.limit
    async def acall(x):
        await asyncio.sleep(0)
        return x, bulkhead.in_use

    @bulkhead.limit
    def numbers():
        yield bulkhead.in_use
        yield bulkhead.in_use

    assert call(1) == (1, 1)
    assert asyncio.run(acall(2)) == (2, 1)
    assert list(numbers()) == [1, 1]
    assert bulkhead.in_use == 0


def test_an_abandoned_generator_gives_its_place_back():
    """A generator that is dropped half way leaves its place when it is collected."""
    bulkhead = Bulkhead(1)

    @bulkhead.limit
    def numbers():
        yield 1
        yield 2

    @bulkhead.limit
    async def anumbers():
        yield 1
        yield 2

    generator = numbers()
    assert next(generator) == 1
    assert bulkhead.in_use == 1
    del generator
    gc.collect()
    assert bulkhead.in_use == 0

    async def main():
        agenerator = anumbers()
        assert await anext(agenerator) == 1
        assert bulkhead.in_use == 1
        del agenerator
        gc.collect()
        await turns()
        assert bulkhead.in_use == 0

    asyncio.run(main())


def test_a_closed_loop_with_waiters():
    """Waiters whose event loop was closed are passed over; a place is not lost to them."""
    bulkhead = Bulkhead(1)
    bulkhead.acquire()
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(bulkhead.aacquire()) for _ in range(3)]
    loop.run_until_complete(turns())
    assert bulkhead.waiting == 3
    loop.close()
    bulkhead.release()
    assert (bulkhead.in_use, bulkhead.waiting) == (0, 0)
    for task in tasks:
        task._log_destroy_pending = False
    del tasks, task
    gc.collect()
    assert bulkhead.in_use == 0
    assert bulkhead.try_acquire()


def test_a_stopped_loop_with_waiters():
    """A place that was granted to a task of a loop that never runs again comes back when the task is collected."""
    bulkhead = Bulkhead(1)
    bulkhead.acquire()
    loop = asyncio.new_event_loop()
    task = loop.create_task(bulkhead.aacquire())
    loop.run_until_complete(turns())
    bulkhead.release()
    assert bulkhead.in_use == 1
    loop.close()
    task._log_destroy_pending = False
    del task, loop
    gc.collect()
    assert bulkhead.in_use == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fork_with_held_places():
    """A forked child has all places free and no waiters; releasing what its parent took is harmless in it."""
    bulkhead = Bulkhead(2)
    waiter = threading.Thread(target=bulkhead.acquire)
    with bulkhead, bulkhead:
        waiter.start()
        until(lambda: bulkhead.waiting == 1)
        child = os.fork()
        if child == 0:
            good = (bulkhead.in_use, bulkhead.waiting) == (0, 0) and bulkhead.try_acquire()
            bulkhead.release()
            bulkhead.release()
            bulkhead.release()
            try:
                bulkhead.release()
            except RuntimeError:
                os._exit(0 if good and bulkhead.in_use == 0 else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bulkhead.in_use == 2
    waiter.join()
    bulkhead.release()
    assert bulkhead.in_use == 0


def test_events_and_counters():
    """Listeners are called for every event of a call, and the counters agree."""
    bulkhead, heard = Bulkhead(1, max_waiting=0, name="db"), []
    bulkhead.events.on("*", lambda event: heard.append((event.kind, event.limiter)))
    with bulkhead:
        assert not bulkhead.try_acquire()
        with pytest.raises(BulkheadFull):
            bulkhead.acquire()
    bulkhead.resize(2)
    assert heard == [(kind, "db") for kind in ("allowed", "refused", "refused", "finished", "resized")]
    stats = bulkhead.stats()
    assert (stats.max_concurrent, stats.max_waiting, stats.in_use, stats.permitted, stats.rejected) == (2, 0, 0, 1, 2)
    assert repr(bulkhead) == "<Bulkhead 'db': 0 of 2 in use, 0 waiting>"


def test_a_listener_may_use_the_bulkhead():
    """Listeners are called without the lock: a listener may wait for another thread that uses the bulkhead."""
    bulkhead = Bulkhead(1, max_waiting=0)

    def listener(event):
        thread = threading.Thread(target=bulkhead.stats)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    bulkhead.events.on("*", listener)
    with bulkhead, pytest.raises(BulkheadFull):
        bulkhead.acquire()
    assert bulkhead.events.failures == 0


def test_prometheus_reads_a_bulkhead():
    """A bulkhead is a source of metrics: its size, use, queue and outcomes, and no policy's."""
    from prometheus_client import CollectorRegistry

    registry, bulkhead = CollectorRegistry(), Bulkhead(3, name="db")
    LimitkeeperCollector(bulkhead, registry=registry)
    with bulkhead:
        values = {
            sample.name: sample.value for metric in registry.collect() for sample in metric.samples if "bulkhead" in sample.labels
        }
        others = [sample for metric in registry.collect() for sample in metric.samples if "bulkhead" not in sample.labels]
    assert values == {
        "limitkeeper_bulkhead_size": 3,
        "limitkeeper_bulkhead_in_use": 1,
        "limitkeeper_bulkhead_waiting": 0,
        "limitkeeper_bulkhead_permitted_total": 1,
        "limitkeeper_bulkhead_rejected_total": 0,
    }
    assert others == []


def test_many_threads_never_exceed_the_size():
    """Threads that wait, time out, fail and resize never run more than the size at a time, and leave nothing behind."""
    bulkhead, running, most = Bulkhead(3, max_waiting=4, timeout="1ms"), [], []

    def work():
        for i in range(60):
            try:
                with bulkhead:
                    running.append(None)
                    most.append(len(running))
                    time.sleep(0.0002)
                    running.pop()
                    if i % 7 == 0:
                        raise KeyError
            except (BulkheadFull, KeyError):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 3
    assert (bulkhead.in_use, bulkhead.waiting) == (0, 0)
    stats = bulkhead.stats()
    assert stats.permitted + stats.rejected == 480
    assert stats.permitted == len(most)


def test_ten_thousand_waiters():
    """Ten thousand waiters are served in order, and half of them can leave from anywhere in the queue."""

    async def main():
        bulkhead, order = Bulkhead(1), []

        async def call(number):
            async with bulkhead:
                order.append(number)

        await bulkhead.aacquire()
        tasks = [asyncio.create_task(call(number)) for number in range(10_000)]
        await turns()
        assert bulkhead.waiting == 10_000
        for task in tasks[::2]:
            task.cancel()
        await turns()
        bulkhead.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == list(range(1, 10_000, 2))
        assert (bulkhead.in_use, bulkhead.waiting) == (0, 0)

    asyncio.run(main())
