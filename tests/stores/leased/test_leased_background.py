"""Leases in real time: the fetch of the next batch, the cost of a far parent, and failures and forks."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
from leased_fleet import Tally

from limitkeeper import (
    AsyncLimiter,
    FixedWindow,
    LeasedStore,
    Limiter,
    MemoryStore,
    SlidingWindowLog,
    StoreUnavailable,
    TokenBucket,
)
from limitkeeper.clock import SystemClock
from limitkeeper.stores.leased.lease_maintenance import Background
from limitkeeper.stores.sans_io import run
from stand_ins import no_room_for_threads

PLENTY = "100000/s burst 100000"


class FarStore(Tally):
    """A parent that is 40 ms away, each way, for threads and for tasks."""

    trip = 0.08

    def __init__(self) -> None:
        super().__init__(MemoryStore(), local=False)

    def decide(self, claims, max_wait_us=0, **options):
        time.sleep(self.trip)
        return super().decide(claims, max_wait_us, **options)

    async def adecide(self, claims, max_wait_us=0, **options):
        await asyncio.sleep(self.trip / 2)
        decision = super().decide(claims, max_wait_us, **options)
        await asyncio.sleep(self.trip / 2)
        return decision


class NearStore(FarStore):
    """The same, 2 ms away."""

    trip = 0.004


def threads_of_leases() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "limitkeeper leases"]


def steady(took: list[float]) -> None:
    """Of so many calls in a row 99 of 100 did not wait: a trip is 80 ms."""
    assert statistics.quantiles(took, n=100)[98] < FarStore.trip / 4


def test_a_far_parent_is_never_waited_for_in_steady_state():
    """With the parent 40 ms away each way, a sync hit of a hot key does not wait: 99 of 100 of them."""
    with LeasedStore(FarStore(), life="1s") as store:
        limiter = Limiter(PLENTY, store=store)
        took, known = [], time.monotonic() + 1.0
        while time.monotonic() < known or len(took) < 1200:
            begin = time.perf_counter()
            assert limiter.hit("a")
            took.append(time.perf_counter() - begin)
            time.sleep(0.001)
        steady(took[-800:])


def test_tasks_never_wait_for_a_far_parent_in_steady_state():
    """The same for tasks: the next batch is fetched by a task of their own loop, and no thread is started."""

    async def main() -> list[float]:
        before = len(threads_of_leases())
        async with LeasedStore(FarStore(), life="1s") as store:
            limiter = AsyncLimiter(PLENTY, store=store)
            took, known = [], time.monotonic() + 1.0
            while time.monotonic() < known or len(took) < 1200:
                begin = time.perf_counter()
                assert await limiter.hit("a")
                took.append(time.perf_counter() - begin)
                await asyncio.sleep(0.001)
            assert len(threads_of_leases()) == before
            return took

    steady(asyncio.run(main())[-800:])


def test_overload_of_a_far_parent_is_refused_at_once(watch):
    """Ten times the limit against a far parent: refusals are decided in RAM, and the limit is used up."""
    parent = FarStore()
    with LeasedStore(parent, life="500ms") as store:
        Limiter("100/s burst 50", store=parent.inner).hit("a", cost=50)  # the burst is gone
        limiter = Limiter("100/s burst 50", store=store)
        received, begun = [], time.monotonic()
        while time.monotonic() < begun + 2.5:
            while len(received) < 1000 * (time.monotonic() - begun):  # also where a sleep is late
                begin = time.monotonic()
                allowed = bool(limiter.hit("a"))
                received.append((begin, time.monotonic() - begin, allowed))
            time.sleep(0.001)
        seconds = time.monotonic() - begun - 1  # the first second is for measuring demand
        late = [one for one in received if one[0] >= begun + 1]
        admitted = sum(allowed for _, _, allowed in late)
        assert 100 * (0.7 * seconds - 3 * watch.late) <= admitted <= seconds * 100 + 50 + 50
        assert parent.operations < 0.1 * len(received)
        assert sum(took > FarStore.trip / 4 for _, took, _ in late) <= len(late) / 100


def test_one_loop_after_the_other_is_served():
    """Two successive asyncio.run on one store work, and leave no task behind."""
    store = LeasedStore(Tally(MemoryStore(), local=False))
    limiter = AsyncLimiter(PLENTY, store=store)

    async def some() -> bool:
        received = []
        for _ in range(200):
            received.append(bool(await limiter.hit("a")))
            await asyncio.sleep(0)
        return all(received)

    assert asyncio.run(some())
    assert asyncio.run(some())


def test_event_loops_that_have_ended_are_not_kept():
    """A store that outlives many event loops keeps none that is closed, though a round was planned on each."""
    store = LeasedStore(Tally(MemoryStore(), local=False), lease=10, life="600s")
    limiter = AsyncLimiter(PLENTY, store=store)
    loops = weakref.WeakSet[asyncio.AbstractEventLoop]()

    async def work() -> None:
        loops.add(asyncio.get_running_loop())
        for _ in range(10):
            await limiter.hit("a")
            await asyncio.sleep(0)

    for _ in range(20):
        asyncio.run(work())
    gc.collect()
    assert len(loops) <= 2


def test_a_loop_that_is_closed_with_a_round_planned_logs_nothing(caplog):
    """asyncio logs pending tasks of a closed loop as errors; the caller knows nothing of this one."""
    store = LeasedStore(Tally(MemoryStore(), local=False), lease=10, life="600s")
    limiter = AsyncLimiter(PLENTY, store=store)
    loop = asyncio.new_event_loop()
    for _ in range(30):
        assert loop.run_until_complete(limiter.hit("a"))
    assert asyncio.all_tasks(loop)
    loop.close()
    del loop, store, limiter
    gc.collect()
    assert not caplog.records


def test_no_task_waits_for_a_batch_of_an_event_loop_that_has_stopped():
    """The tasks of one loop are answered, and the store is closed, while a fetch of another loop, which does not run, is open."""
    store = LeasedStore(FarStore(), lease=10, life="600s")
    limiter = AsyncLimiter(PLENTY, store=store)
    (named,), loop = limiter.named, asyncio.new_event_loop()

    async def fetching() -> None:
        """Until the background fetches the next batch."""
        while (lease := store.cache.find(named, "a")) is None or lease.fetching() is None:
            if lease is None or not lease.queued:
                await limiter.hit("a")
            await asyncio.sleep(0)

    async def others() -> None:
        async with asyncio.timeout(60):
            for _ in range(30):
                assert await limiter.hit("a")
            await store.aclose()

    loop.run_until_complete(fetching())
    asyncio.run(others())
    loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop)))
    loop.close()


def test_aclose_waits_for_what_the_background_is_just_giving_back():
    """A store that is closed while a task of its loop gives expired batches back loses none of them."""

    class Closing(FarStore):
        """A store whose calls fail once it is closed, those under way as well."""

        closed = False

        async def agive_back(self, *call):
            first = not giving.is_set()
            giving.set()
            await asyncio.sleep(self.trip * first)
            if self.closed:
                raise StoreUnavailable("closed")
            return self.inner.give_back(*call)

        async def aclose(self):
            self.closed = True

    async def main():
        limiter = AsyncLimiter("fixed window 1000/d", store=store)
        for key in keys:
            assert await limiter.hit(key)
        await giving.wait()
        await store.aclose()

    parent, giving, keys = Closing(), asyncio.Event(), [f"k{i}" for i in range(20)]
    store = LeasedStore(parent, lease=10)
    asyncio.run(main())
    bare = Limiter("fixed window 1000/d", store=parent.inner)
    assert {bare.peek(key).remaining for key in keys} == {999}


def test_a_blocking_call_does_not_wait_for_a_batch_that_its_own_event_loop_fetches():
    """A Limiter that is used on an event loop asks the parent, while a task of the loop fetches a batch of the same key."""
    store = LeasedStore(FarStore(), lease=10, life="600s")
    tasks, blocking = AsyncLimiter(PLENTY, store=store), Limiter(PLENTY, store=store)
    decisions = []

    async def both() -> None:
        fetching = asyncio.create_task(tasks.hit("a"))
        while (lease := store.cache.find(tasks.named[0], "a")) is None or lease.fetching() is None:
            await asyncio.sleep(0)
        decisions.append(blocking.hit("a"))
        decisions.append(await fetching)

    thread = threading.Thread(target=lambda: asyncio.run(both()), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert all(decisions)
    assert len(decisions) == 2
    store.close()


def test_waking_the_background_of_a_loop_again_and_again_makes_one_task():
    """One task of a loop makes the rounds, however often one is asked for."""

    async def work(background):
        for _ in range(100):
            background.wake()
        return len(asyncio.all_tasks()) - 1

    with LeasedStore(FarStore()) as store:
        assert asyncio.run(work(store.background)) == 1


class PlannedRounds:
    """A Maintenance that makes as many rounds as are planned."""

    refill = SimpleNamespace(parent=SimpleNamespace(local=False))
    planned, made = 0, 0

    def pause_s(self) -> float | None:
        return 0 if self.planned else None

    def attempt_round(self) -> Iterator[None]:
        self.planned, self.made = self.planned - 1, self.made + 1
        yield from ()


def test_a_background_that_is_woken_while_it_ends_goes_on():
    """A batch that arrives in the iteration of the loop in which the task has found nothing to do."""
    rounds = PlannedRounds()
    background = Background(rounds, threading.Thread, SystemClock())

    async def main() -> None:
        background.wake()
        await asyncio.sleep(0)  # the task has run to its end, which its loop has not announced yet
        rounds.planned = 1
        background.wake()
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert rounds.made == 1
    assert background.thread is None


@pytest.mark.parametrize("rule", [FixedWindow("1000/d"), SlidingWindowLog("1000/d")], ids=str)
def test_leases_go_back_after_the_event_loop_of_their_calls_has_ended(rule, eventually):
    """Law 13: a node whose event loop has ended returns what it holds within a life, though it calls no more."""
    parent = NearStore()
    store = LeasedStore(parent, lease=50)
    limiter = AsyncLimiter(rule, store=store)
    (named,) = limiter.named

    async def calls() -> bool:
        allowed = [bool(await limiter.hit("a")) for _ in range(180)]
        while store.cache.due or store.cache.find(named, "a").fetching():
            await asyncio.sleep(0.001)
        return all(allowed) and store.leased(named, "a") > 0

    assert asyncio.run(calls())
    eventually(lambda: parent.inner.decide_one(named, "a", 1, 0, False).remaining == 820)
    store.close()


def test_a_refusal_is_asked_about_again_where_every_call_has_an_event_loop_of_its_own(eventually):
    """What another node has given back is found in about a life, though no loop lasts until the parent is asked."""
    parent = NearStore()
    store, other = LeasedStore(parent), LeasedStore(parent)
    limiter = AsyncLimiter("fixed window 1000/d", store=store)
    taken = Limiter("fixed window 1000/d", store=other).reserve("a", cost=990)

    async def hit() -> bool:
        return bool(await limiter.hit("a"))

    assert sum(asyncio.run(hit()) for _ in range(40)) == 10
    assert taken.cancel()
    eventually(lambda: asyncio.run(hit()))
    store.close()
    other.close()


def test_many_tasks_that_come_at_once_share_one_batch():
    """Tasks without tokens in hand wait for the batch that is on its way instead of calling as well."""

    async def main() -> int:
        parent = FarStore()
        async with LeasedStore(parent, lease=100, life="10s") as store:
            limiter = AsyncLimiter(PLENTY, store=store)
            assert all(await asyncio.gather(*(limiter.hit("a") for _ in range(64))))
            return parent.operations

    assert asyncio.run(main()) == 1


def test_many_threads_that_come_at_once_share_one_batch():
    """The same for threads."""
    parent = FarStore()
    with LeasedStore(parent, lease=100, life="10s") as store:
        limiter = Limiter(PLENTY, store=store)
        received = []
        threads = [threading.Thread(target=lambda: received.append(bool(limiter.hit("a")))) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert received == [True] * 32
        assert [cost for verb, cost in parent.calls if verb == "decide"] == [100]


def test_keys_that_come_once_start_no_thread():
    """A flood of keys leaves nothing to maintain."""
    store = LeasedStore(Tally(MemoryStore()))
    limiter = Limiter(PLENTY, store=store)
    for number in range(500):
        limiter.hit(f"key {number}")
    assert store.background.thread is None


def test_an_idle_lease_goes_back_by_itself(eventually):
    """The thread gives back unused tokens, and close() joins it."""
    parent = Tally(MemoryStore())
    store = LeasedStore(parent, lease=50, life="50ms")
    Limiter("100/h", store=store).hit("a")
    eventually(lambda: "give_back" in dict(parent.calls))  # 49, or after a long pause of the process the whole batch
    thread = store.background.thread
    assert thread.daemon
    store.close()
    assert not thread.is_alive()


def test_a_store_that_is_gone_takes_its_thread_with_it(eventually):
    """A store need not be closed: when it is collected, its thread ends."""
    store = LeasedStore(Tally(MemoryStore()), lease=50)
    Limiter(PLENTY, store=store).hit("a")
    thread, gone = store.background.thread, weakref.ref(store)
    del store

    def collected() -> bool:
        gc.collect()  # again: the thread may have held the store during the first collection
        return gone() is None

    eventually(collected)
    eventually(lambda: not thread.is_alive())


def test_a_failing_parent_does_not_end_the_background(eventually, caplog, capsys):
    """A failure in the background is counted and retried later, with growing delays; no traceback, and it recovers."""
    parent = Tally(MemoryStore())
    with LeasedStore(parent, lease=20, life="500ms") as store, caplog.at_level(logging.WARNING, logger="limitkeeper"):
        limiter = Limiter(TokenBucket(PLENTY), store=store)
        limiter.hit("a")
        parent.failing["decide"] = StoreUnavailable("nobody answers")
        for _ in range(18):
            with suppress(StoreUnavailable):  # where the machine stalls, its lease ends meanwhile
                limiter.hit("a")
        eventually(lambda: store.failures > 0)
        assert store.background.thread.is_alive()
        assert store.maintenance.backoff_us >= 500_000
        parent.failing.clear()
        assert all(limiter.hit("a") for _ in range(100))
    assert "Traceback" not in caplog.text + capsys.readouterr().err
    assert "nobody answers" in caplog.text


class Taken:
    """A queue that is not empty at the check; a moment later another thread has taken all."""

    asked = 0

    def __bool__(self):
        self.asked += 1
        return self.asked == 1


class TakenDeque(Taken, deque):
    pass


class TakenList(Taken, list):
    pass


def test_what_another_thread_has_taken_does_not_end_the_background(clock):
    """The last lease that runs low, and the last that is to be checked, are taken by another thread after they were seen."""
    store = LeasedStore(MemoryStore(clock=clock), lease=5)
    store.cache.due = TakenDeque()
    run(store.maintenance.attempt_round())
    assert store.failures == 0
    store.cache.due, store.cache.checks = deque(), TakenList()
    assert store.maintenance.pause_s() is None


def test_a_failure_reaches_all_waiters_of_the_batch(eventually):
    """Threads that waited for a batch that never came get the error, and do not try one after the other."""
    gone, asked, failed = threading.Event(), [], []

    class Slow(Tally):
        def decide(self, claims, max_wait_us=0, **options):
            asked.append(claims)
            assert gone.wait(60)
            raise StoreUnavailable("nobody answers")

    store = LeasedStore(Slow(MemoryStore(), local=False), lease=100)
    limiter = Limiter(PLENTY, store=store)

    def ask() -> None:
        try:
            limiter.hit("a")
        except StoreUnavailable:
            failed.append(1)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    eventually(lambda: asked)
    fetch = store.cache.find(limiter.named[0], "a").pending
    eventually(lambda: len(fetch._wakers) == 19)
    gone.set()
    for thread in threads:
        thread.join()
    assert len(failed) == 20
    assert len(asked) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_does_not_share_its_parents_leases(python):
    """After a fork the child has nothing in hand, a thread of its own, and can fetch; the parent's lease is untouched."""
    done = python(
        """
        import os, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from limitkeeper import LeasedStore, Limiter, MemoryStore
        store = LeasedStore(MemoryStore(), lease=50, life="10s")
        limiter = Limiter("1000/h", store=store)
        limiter.hit("a")
        child = os.fork()
        if child == 0:
            fresh = store.leased(limiter.named[0], "a") == 0 and store.background.thread is None and bool(limiter.hit("a"))
            os._exit(0 if fresh else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.leased(limiter.named[0], "a"))
        store.close()
        """
    )
    assert (done.stdout.split(), done.stderr) == (["0", "49"], "")


def test_a_thread_that_could_not_be_started_is_started_by_a_later_call():
    """Where the system has no room for the background thread calls are answered; once it has, it is started, and it ends."""
    store = LeasedStore(MemoryStore())
    limiter = Limiter("100/s burst 100", store=store)
    with no_room_for_threads():
        assert all(limiter.hit("a") for _ in range(5))
    assert store.background.thread is None
    while store.background.thread is None:
        limiter.hit("b")
    store.close()
    assert not store.background.thread.is_alive()
