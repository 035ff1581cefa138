"""Tasks that wait: in order, each key on its own, in any number of event loops; a cancelled task gives its place back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref

import pytest

from limitkeeper import (
    AsyncLimiter,
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    RateLimited,
    RedisStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.testing import ManualClock
from operations import operations
from stand_ins import WrappedStore

ONE_A_SECOND = [
    TokenBucket("1/s"),
    LeakyBucket("1/s", 1),
    LeakyBucketQueue("1/s"),
    FixedWindow("1/s"),
    FixedWindow("1/s", align="first"),
    SlidingWindowLog("1/s"),
]
each = pytest.mark.parametrize("limit", ONE_A_SECOND, ids=str)


async def turns(count=20):
    """Runs a few iterations of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def start_waiters(limiter, names, **options):
    """A task for each name that acquires "a", and the list to which each appends its name when served."""
    served = []

    async def one(name):
        await limiter.acquire("a", **options)
        served.append(name)

    tasks = {name: asyncio.create_task(one(name)) for name in names}
    await turns()
    return tasks, served


async def gone(tasks):
    """Ends the remaining waiters."""
    for task in tasks.values():
        task.cancel()
    return await asyncio.gather(*tasks.values(), return_exceptions=True)


@each
def test_tasks_are_served_in_order_of_arrival(limit, held):
    """Three waiting tasks get one start each second, first come, first served."""

    async def main():
        limiter = AsyncLimiter(limit, store=MemoryStore(clock=held))
        await limiter.acquire("a")
        tasks, served = await start_waiters(limiter, ["first", "second", "third"])
        counts = []
        for _ in range(3):
            counts.append((limiter.waiting("a"), len(served)))
            held.advance(1)
            await turns()
        await gone(tasks)
        assert counts == [(3, 0), (2, 1), (1, 2)]
        assert served == ["first", "second", "third"]

    asyncio.run(main())


@each
def test_a_cancelled_task_gives_its_place_back(limit, held):
    """Cancellation propagates, and the key is as if the task had never called."""

    async def main():
        limiter = AsyncLimiter(limit, store=MemoryStore(clock=held))
        await limiter.acquire("a")
        before = await limiter.peek("a")
        tasks, _ = await start_waiters(limiter, ["first"])
        tasks["first"].cancel()
        await turns()
        assert tasks["first"].cancelled()
        assert await limiter.peek("a") == before
        assert limiter.waiting() == 0

    asyncio.run(main())


@each
@pytest.mark.parametrize("leaving", ["first", "second", "third"])
def test_those_behind_a_cancelled_task_move_up(limit, leaving, held):
    """Whichever of three leaves, the other two start after 1 and 2 seconds, in order, and the key is then as new."""

    async def main():
        limiter = AsyncLimiter(limit, store=MemoryStore(clock=held))
        await limiter.acquire("a")
        names = ["first", "second", "third"]
        tasks, served = await start_waiters(limiter, names)
        tasks[leaving].cancel()
        await turns()
        assert served == []
        left = [name for name in names if name != leaving]
        for count in (1, 2):
            held.advance(0.999999)
            await turns()
            assert served == left[: count - 1]
            held.advance(0.000001)
            await turns()
            assert served == left[:count]
        assert (await limiter.hit("a")).retry_after == 1.0

    asyncio.run(main())


def test_a_place_given_back_can_be_taken_by_a_newcomer(held):
    """After the last in the queue left, a newcomer gets its start."""

    async def main():
        limiter = AsyncLimiter("1/s", store=MemoryStore(clock=held))
        await limiter.acquire("a")
        tasks, _ = await start_waiters(limiter, ["first", "second"])
        tasks["second"].cancel()
        await turns()
        assert (await limiter.reserve("a")).wait == 2.0
        await gone(tasks)

    asyncio.run(main())


def test_costs_move_up_by_what_left(held):
    """When a cost of 3 leaves, a cost of 2 behind it starts 3 intervals earlier."""

    async def main():
        limiter = AsyncLimiter("1/s burst 5", store=MemoryStore(clock=held))
        await limiter.acquire("a", cost=5)
        big, _ = await start_waiters(limiter, ["big"], cost=3)
        small, served = await start_waiters(limiter, ["small"], cost=2)
        big["big"].cancel()
        await turns()
        held.advance(2)
        await turns()
        assert served == ["small"]
        await gone(small)

    asyncio.run(main())


def test_a_shorter_deadline_refuses_at_once(held):
    """A task whose deadline is before its start is refused at once, and those behind it do not notice."""

    async def main():
        limiter = AsyncLimiter("1/s", store=MemoryStore(clock=held))
        await limiter.acquire("a")
        tasks, _ = await start_waiters(limiter, ["first"])
        with pytest.raises(RateLimited):
            await limiter.acquire("a", timeout=1.5)
        assert (await limiter.reserve("a", max_wait=2)).wait == 2.0
        await gone(tasks)

    asyncio.run(main())


def test_a_task_cancelled_by_a_timeout_of_its_own_gives_its_place_back(held):
    """`asyncio.timeout` around an acquire is a cancellation as any other."""

    async def main():
        limiter = AsyncLimiter("1/h")
        await limiter.acquire("a")
        before = await limiter.peek("a", cost=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await limiter.acquire("a")
        await turns()
        after = await limiter.peek("a")
        assert after.retry_after <= before.retry_after

    asyncio.run(main())


@pytest.mark.parametrize("rounds", range(14))
def test_a_cancelled_task_is_cancelled_even_while_it_moves_up(rounds):
    """On the system clock too, a task cancelled at any moment of its moving up ends cancelled and leaves no trace."""

    async def main():
        limiter = AsyncLimiter("1/h")
        await limiter.acquire("a")
        tasks, _ = await start_waiters(limiter, ["first", "second"])
        tasks["first"].cancel()
        await turns(rounds)
        tasks["second"].cancel()
        await turns()
        ended = tasks["second"].cancelled()
        waiting = limiter.waiting()
        await gone(tasks)
        assert (ended, waiting) == (True, 0)

    asyncio.run(main())


def test_waiting_on_one_key_never_delays_another(held):
    """While a hundred tasks wait on one key, another key is served at once."""

    async def main():
        limiter = AsyncLimiter("1/h", store=MemoryStore(clock=held))
        await limiter.acquire("a")
        tasks, _ = await start_waiters(limiter, range(100))
        assert limiter.waiting() == 100
        assert (await limiter.acquire("b", timeout=0)).wait == 0.0
        await gone(tasks)

    asyncio.run(main())


def test_two_event_loops_one_after_the_other():
    """A limiter outlives its event loop: the next loop shares the state of the first, and both can wait and cancel."""
    limiter = AsyncLimiter("1/h burst 2")

    async def wait_and_leave():
        await limiter.hit("a")
        tasks, _ = await start_waiters(limiter, ["first", "second"])
        waiting = limiter.waiting()
        ends = await gone(tasks)
        await turns()
        return waiting, [type(end) for end in ends], (await limiter.peek("a")).remaining

    assert asyncio.run(wait_and_leave())[0] == 1
    limiter_after = asyncio.run(wait_and_leave())
    assert limiter_after == (2, [asyncio.CancelledError] * 2, 0)
    assert limiter.waiting() == 0


def test_tasks_left_over_when_a_loop_ends_give_their_places_back(held):
    """Tasks that `asyncio.run` cancels at its end leave no place taken for the next loop."""
    limiter = AsyncLimiter("1/s", store=MemoryStore(clock=held))

    async def leave_tasks_behind():
        await limiter.hit("a")
        await start_waiters(limiter, range(5))

    asyncio.run(leave_tasks_behind())
    assert limiter.waiting() == 0
    assert asyncio.run(limiter.hit("a")).retry_after == 1.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("rounds", range(6))
def test_a_loop_closed_too_early_does_not_keep_others_from_leaving(rounds):
    """A loop that is closed while a cancelled task leaves does not stop other tasks from leaving."""
    limiter = AsyncLimiter("1/h")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(limiter.hit("a"))
    tasks, _ = loop.run_until_complete(start_waiters(limiter, ["first"]))
    before = limiter.waiting()
    tasks["first"].cancel()
    loop.run_until_complete(turns(rounds))
    loop.close()
    left = limiter.waiting()

    async def come_and_go():
        tasks, _ = await start_waiters(limiter, ["second"])
        await gone(tasks)
        await turns()
        return limiter.waiting()

    assert (before, asyncio.run(come_and_go())) == (1, left)


def test_a_loop_that_stops_before_a_task_has_left_does_not_keep_others_from_leaving():
    """A loop stops in the iteration in which a cancelled task leaves: the next task to leave, on another loop, leaves with it."""
    limiter = AsyncLimiter("1/h")
    loop = asyncio.new_event_loop()

    async def wait_until_cancelled():
        try:
            await limiter.acquire("a")
        finally:
            loop.stop()

    loop.run_until_complete(limiter.hit("a"))
    task = loop.create_task(wait_until_cancelled())
    loop.run_until_complete(turns())
    task.cancel()
    loop.run_forever()

    async def come_and_go():
        tasks, _ = await start_waiters(limiter, ["second"])
        await gone(tasks)
        await turns()
        return limiter.waiting()

    assert (task.cancelled(), asyncio.run(come_and_go())) == (True, 0)
    assert asyncio.run(limiter.peek("a")).retry_after <= 3600
    loop.close()


def test_a_blocked_loop_does_not_keep_tasks_of_another_loop_from_moving_up(held):
    """The first waiter is a task of a loop that is blocked: a task of another loop is woken at once when both move up."""
    store = MemoryStore(clock=held)
    limiter, before = AsyncLimiter("1/s", store=store), Limiter("1/s", store=store)
    before.acquire("a")
    reserved = before.reserve("a")
    blocked = asyncio.new_event_loop()
    tasks, _ = blocked.run_until_complete(start_waiters(limiter, ["blocked"]))

    async def main():
        tasks, served = await start_waiters(limiter, ["behind"])
        reserved.cancel()
        await turns()
        held.advance(2)
        await turns()
        await gone(tasks)
        return served

    assert asyncio.run(main()) == ["behind"]
    blocked.run_until_complete(gone(tasks))
    blocked.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["memory", "redis"])
@pytest.mark.asyncio_only(reason="uvloop warns when it is closed with a connection")
def test_a_task_that_is_collected_after_its_loop_was_closed_waits_no_more(kind, request):
    """Three tasks wait on a loop that is closed: collected, none is counted as waiting; a local store has their starts back."""
    store = MemoryStore() if kind == "memory" else RedisStore(request.getfixturevalue("valkey").url, prefix="closed loop")
    limiter = AsyncLimiter("1/h", store=store)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(limiter.hit("a"))
    tasks = [loop.create_task(limiter.acquire("a")) for _ in range(3)]
    while limiter.waiting() < 3:
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    del tasks, loop
    gc.collect()
    assert limiter.waiting() == 0
    if kind == "memory":
        assert Limiter("1/h", store=store).peek("a").retry_after <= 3600
    store.close()


@pytest.mark.parametrize("every", [1, 2], ids=["all", "every second one"])
def test_a_thousand_cancelled_at_once_leave_together(every):
    """1000 tasks wait and are cancelled in one iteration of the loop: all leave with far less work than quadratic."""

    async def main():
        limiter = AsyncLimiter("1/h")
        await limiter.acquire("a")
        tasks, _ = await start_waiters(limiter, range(1000))
        start = time.process_time()
        for name in range(0, 1000, every):
            tasks[name].cancel()
        await turns()
        spent = time.process_time() - start
        left = limiter.waiting()
        await gone(tasks)
        return left, spent

    left, spent = asyncio.run(main())
    assert left == 1000 - 1000 // every
    assert spent < 5


@pytest.mark.parametrize("begun", [0, 200])
def test_a_thousand_that_wait_for_reservations_leave_together(begun):
    """1000 reservations of several costs whose tasks are cancelled in one iteration of the loop, some of them after their start,
    are given back with the work of a few."""

    async def main(number):
        limiter = AsyncLimiter("400/h")
        if not begun:
            await limiter.acquire("a", 400)

        async def one(cost):
            async with limiter.reserve("a", cost):
                await asyncio.sleep(1000)

        tasks = [asyncio.create_task(one(2)) for _ in range(begun)]
        tasks += [asyncio.create_task(one(1 + name % 3)) for name in range(number)]
        await turns()
        assert limiter.waiting("a") == number
        start = time.process_time()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        spent = time.process_time() - start
        assert limiter.waiting("a") == 0
        assert (await limiter.peek("a", 400)).retry_after <= 3600 * (not begun)
        return spent

    assert asyncio.run(main(1000)) < 2


def test_a_reservation_that_is_cancelled_with_its_task_is_given_back_when_its_block_has_ended():
    """Code behind a block that was cancelled (by a timeout) finds the units of its reservation given back."""

    async def main():
        limiter = AsyncLimiter("5/h")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001), limiter.reserve("a", 5):
                await asyncio.sleep(1000)
        return await limiter.hit("a", 5)

    assert asyncio.run(main())


def test_tasks_and_threads_share_a_line(held):
    """A thread's limiter and a task's limiter of one name and store share one queue."""
    store = MemoryStore(clock=held)
    limiter = Limiter("1/s", store=store)
    limiter.acquire("a")

    async def main():
        tasks, _ = await start_waiters(AsyncLimiter("1/s", store=store), ["task"])
        behind = limiter.reserve("a")
        assert behind.wait == 2.0
        tasks["task"].cancel()
        await turns()
        assert behind.wait == 1.0

    asyncio.run(main())


# The sliding counter can't reserve: its waiters wait in a queue and ask again.


def test_counter_tasks_are_served_in_order_of_arrival(held):
    """Tasks on a sliding counter are served first come, first served."""

    async def main():
        limiter = AsyncLimiter(SlidingWindowCounter("1/s"), store=MemoryStore(clock=held))
        await limiter.acquire("a")
        tasks, served = await start_waiters(limiter, ["first", "second", "third"])
        assert limiter.waiting("a") == 3
        for count in (1, 2, 3):
            held.advance(2)
            await turns()
            assert served == ["first", "second", "third"][:count]
        assert limiter.waiting() == 0
        await gone(tasks)

    asyncio.run(main())


@pytest.mark.parametrize("leaving", ["first", "second"])
def test_a_cancelled_counter_task_lets_the_others_move_up(leaving, held):
    """Whichever waiter is cancelled, the others are served in order, one window earlier."""

    async def main():
        limiter = AsyncLimiter(SlidingWindowCounter("1/s"), store=MemoryStore(clock=held))
        await limiter.acquire("a")
        names = ["first", "second", "third"]
        tasks, served = await start_waiters(limiter, names)
        tasks[leaving].cancel()
        await turns()
        left = [name for name in names if name != leaving]
        for count in (1, 2):
            held.advance(2)
            await turns()
            assert served == left[:count]
        assert tasks[leaving].cancelled()

    asyncio.run(main())


def test_a_counter_deadline_before_the_promise_refuses_a_task_at_once(held):
    """A task on a sliding counter whose deadline is before the promised moment is refused at once."""

    async def main():
        limiter = AsyncLimiter(SlidingWindowCounter("1/s"), store=MemoryStore(clock=held))
        await limiter.acquire("a")
        tasks, _ = await start_waiters(limiter, ["first"])
        with pytest.raises(RateLimited):
            await limiter.acquire("a", timeout=1.9)
        await gone(tasks)

    asyncio.run(main())


def test_a_task_in_line_is_refused_when_its_deadline_can_not_be_met_any_more(held):
    """A task that becomes first too late to be served in time is refused, and took nothing."""

    async def main():
        limiter = AsyncLimiter(SlidingWindowCounter("1/s"), store=MemoryStore(clock=held))
        await limiter.acquire("a")
        _, served = await start_waiters(limiter, ["first"])
        late, _ = await start_waiters(limiter, ["late"], timeout=3)
        held.advance(2)
        await turns()
        assert served == ["first"]
        assert isinstance(late["late"].exception(), RateLimited)
        assert (await limiter.peek("a")).retry_after == 2.0

    asyncio.run(main())


def test_counter_waiters_in_two_loops_one_after_the_other(held):
    """A queue on a sliding counter that ends with its loop does not exist for the next loop."""
    limiter = AsyncLimiter(SlidingWindowCounter("1/s"), store=MemoryStore(clock=held))

    async def wait():
        tasks, served = await start_waiters(limiter, ["first"])
        held.advance(2)
        await turns()
        await gone(tasks)
        return served

    asyncio.run(limiter.acquire("a"))
    assert asyncio.run(wait()) == ["first"]
    assert asyncio.run(wait()) == ["first"]
    assert limiter.waiting() == 0


def test_the_end_of_a_wait_costs_the_same_whatever_the_number_behind() -> None:
    """The first of many waiters leaves the queue without a look at all the others."""
    took = []
    for many in (200, 4000):
        limiter = Limiter("1000/s burst 1", store=MemoryStore(clock=ManualClock()))
        waiters = [limiter.reserve("a")._waiter for _ in range(many)][1:]
        for waiter in waiters:
            waiter.wake = lambda: None
        took.append(operations(limiter._queue.done, waiters[0]))
    assert took[1] <= took[0] + 10


class Far(WrappedStore):
    """A remote store: each async call takes a few iterations of the loop."""

    async def adecide(self, claims, max_wait_us=0, **options):
        await turns(3)
        return self.decide(claims, max_wait_us, **options)

    async def agive_back(self, claims, charged_at=-1, source="store"):
        await turns(3)
        return self.give_back(claims, charged_at, source)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_call_that_waits_for_a_departure_is_overtaken_by_none(at_once):
    """Calls come in every iteration of the loop, while a reservation is given back: their starts have their order."""

    async def main():
        limiter = AsyncLimiter("1/s burst 1", store=Far(MemoryStore(clock=ManualClock())))
        await limiter.hit("a")
        leaving = await limiter.reserve("a")
        calls = []
        for number in range(30):
            if number == 10:
                leave = asyncio.create_task(leaving.cancel())
            calls += [asyncio.ensure_future(make_reservation(limiter)) for _ in range(at_once)]
            await asyncio.sleep(0)
        starts = [one.decision.start_us for one in await asyncio.gather(*calls)]
        assert starts == sorted(starts)
        assert await leave

    async def make_reservation(limiter):
        return await limiter.reserve("a")

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("limit", ["1/s", "sliding window counter 1/s"])
def test_event_loops_that_were_closed_are_not_kept(limit):
    """A limiter that outlives many event loops keeps only the last few, though tasks waited in all of them."""
    limiter = AsyncLimiter(limit, store=Far(MemoryStore()))
    loops = weakref.WeakSet()

    async def work():
        if limit == "1/s":  # a decision waits for the call that gives back
            await asyncio.gather((await limiter.reserve("a")).cancel(), limiter.reserve("a", max_wait=0.1))
        else:  # the second task waits for the first
            await limiter.hit("a")
            await asyncio.wait([asyncio.create_task(limiter.acquire("a")) for _ in range(2)], timeout=0)
            await turns()

    for _ in range(10):
        loop = asyncio.new_event_loop()
        loops.add(loop)
        loop.run_until_complete(work())
        loop.close()
    del loop
    gc.collect()
    assert len(loops) <= 3


@each
@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "leaves"])
def test_a_store_is_collected_although_calls_have_waited(limit, leaves):
    """Of limiters with stores of their own nothing stays, whatever was reserved, cancelled or waited for."""
    stores = weakref.WeakSet()

    async def use():
        limiter = AsyncLimiter(limit, store=MemoryStore(clock=ManualClock()))
        stores.add(limiter.store)
        reserved = [await limiter.reserve("a") for _ in range(3)]
        if leaves:
            await reserved[1].cancel()
        await limiter.acquire("a")

    for _ in range(3):
        asyncio.run(use())
    gc.collect()
    assert not stores
