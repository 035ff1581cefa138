"""A store that really hangs: the budget, late answers, and the background prober."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from random import Random

import pytest
from failing import FailingStore, HangingStore, HangingTasks

from limitkeeper import AsyncLimiter, FixedWindow, LeasedStore, Limiter, ShardedStore, SlidingWindowLog, StoreTimeout
from limitkeeper.stores.guarded import GuardedStore
from limitkeeper.stores.guarded.deadline_store import DeadlineStore, give_back_late, start_daemon
from limitkeeper.stores.sans_io import Call, perform_call, run

#: What scheduling of threads and loops may take on top of a budget; how late the machine is comes on top of that.
NOISE = 0.5
#: A breaker that has opened stays open for as long as a test lasts.
NEVER = {"backoff": 600, "max_backoff": 600}
#: A breaker that stays closed through many failed calls: on a busy machine many of them are not begun in time.
LATE = {"failures": 2000, "ratio": 1}


@pytest.fixture(params=[HangingStore, HangingTasks], ids=["sync", "async"])
def hanging(request, store):
    made = request.param(store)
    yield made
    made.gate.set()


def took(call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def hangs(guard, call) -> None:
    """Makes a call until it hangs: one that no worker has begun at its deadline, on a busy machine, leaves nothing behind."""
    before = guard.stats().abandoned
    while guard.stats().abandoned == before:
        call()


async def soon(so) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(30):
        while not so():
            await asyncio.sleep(0.002)


# Threads


def test_a_hung_store_costs_the_budget_and_then_nothing(store, watch, eventually):
    """Each decision takes the budget until the breaker opens; after that a hundred take far less than their budgets."""
    hanging = HangingStore(store)
    with GuardedStore(hanging, budget="30ms", failures=3, background=False, **NEVER) as guard:
        limiter = Limiter("5/s", store=guard)
        for _ in range(3):
            assert 0.03 <= took(lambda: limiter.hit("a")) < watch.allows(0.03 + NOISE)
        assert guard.state == "open"
        eventually(lambda: len(hanging.calls) == guard.stats().abandoned <= 3)  # a worker that began its call makes it
        asked = len(hanging.calls)
        assert took(lambda: [limiter.hit("a") for _ in range(100)]) < watch.allows(1)  # a budget each would be three seconds
        assert guard.stats()[2:4] == (3, 3)
        assert guard.stats().abandoned == len(hanging.calls) == asked
        hanging.gate.set()


def test_a_late_charge_is_given_back(store, eventually):
    """A charge by an abandoned call that succeeds late goes back to the store."""
    hanging = HangingStore(store)
    guard = GuardedStore(hanging, budget="5ms", background=False, **LATE)
    limiter = Limiter(FixedWindow("10/400d"), store=guard)
    hangs(guard, lambda: limiter.hit("a", cost=3))
    hangs(guard, lambda: limiter.reserve("a", cost=2))
    hangs(guard, lambda: guard.decide_many([limiter.claims("a", 1), limiter.claims("b", 4)]))
    assert guard.answered_here(limiter.peek("a", cost=5))
    hanging.gate.set()
    eventually(lambda: len(hanging.returned) >= 4)
    eventually(lambda: guard.stats().abandoned == 0)
    assert set(hanging.returned) == {("a", 1), ("a", 2), ("a", 3), ("b", 4)}  # on a busy machine a call may hang twice
    hanging.hangs = False
    eventually(lambda: limiter.peek("a").remaining == 10)


def test_a_refused_late_answer_gives_nothing_back(store, eventually):
    """A call that was refused too late charged nothing."""
    hanging = HangingStore(store)
    guard = GuardedStore(hanging, budget="5ms", background=False, **LATE)
    limiter = Limiter(FixedWindow("2/400d"), store=guard)
    hangs(guard, lambda: limiter.hit("a", cost=3))
    hanging.gate.set()
    eventually(lambda: guard.stats().abandoned == 0)
    assert hanging.returned == []


def test_abandoned_calls_are_bounded(store, eventually):
    """However many callers there are, no more than so many calls hang; the others fail at once."""
    hanging = HangingStore(store)
    deadline_store = DeadlineStore(hanging, 100_000)
    limiter = Limiter("1000/s", store=deadline_store)
    before = threading.active_count()

    def call(i):
        calls = 0
        while calls < 4 or deadline_store.pool.abandoned < 32:  # one that no worker has begun in time leaves nothing behind
            calls += 1
            with pytest.raises(StoreTimeout):
                limiter.hit(f"key {i}")

    threads = [threading.Thread(target=call, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert deadline_store.pool.abandoned == deadline_store.pool.max_calls == 32
    assert threading.active_count() - before <= 32
    eventually(lambda: len(hanging.calls) == 32)
    with pytest.raises(StoreTimeout, match="no worker is left"):
        limiter.hit("a")
    hanging.gate.set()


def test_a_probe_gets_through_although_all_others_hang_for_ever(store, eventually):
    """Calls that never return do not keep a guard from noticing that the store is back."""
    hanging = HangingStore(store)
    guard = GuardedStore(hanging, budget="5ms", background=False, clock=store.clock, **LATE)
    guard._store.pool.max_calls = 4
    limiter = Limiter("1000/s", store=guard)
    while guard.state != "open":  # when four hang, the others fail at once
        limiter.hit("a")
    eventually(lambda: (guard.stats().abandoned, len(hanging.calls)) == (4, 4))
    while guard.stats().abandoned < 5:  # a probe that no worker has begun in time leaves nothing behind
        assert guard.probe() is False
    hanging.hangs = False  # the server is back; earlier calls stay unanswered
    guard._store.budget_us = 60_000_000
    assert guard.probe() is True
    assert guard.stats().abandoned == 5
    hanging.gate.set()
    eventually(lambda: guard.stats().abandoned == 0)


def test_a_probe_registers_limits_although_all_others_hang_for_ever(store, eventually):
    """A limit that was made during the failure does not keep the guard from recovering."""
    hanging = HangingStore(store)
    guard = GuardedStore(hanging, budget="5ms", background=False, clock=store.clock, **LATE)
    guard._store.pool.max_calls = 4
    limiter = Limiter("1000/s", store=guard)
    while guard.state != "open":
        limiter.hit("a")
    eventually(lambda: guard.stats().abandoned == 4)
    Limiter("5/s", store=guard)
    hanging.hangs = False
    guard._store.budget_us = 60_000_000
    assert guard.probe() is True
    hanging.gate.set()


def test_a_call_that_no_worker_has_begun_is_not_made(store, eventually):
    """When all workers are busy, a caller whose deadline passes leaves nothing behind."""
    hanging = HangingStore(store)
    deadline_store = DeadlineStore(hanging, 50_000)
    deadline_store.pool.max_calls = 1
    limiter = Limiter(FixedWindow("10/400d"), store=deadline_store)

    def in_vain(key):
        with pytest.raises(StoreTimeout):
            limiter.hit(key)

    def until_it_is_made():
        while not hanging.calls:
            in_vain("a")

    first = threading.Thread(target=until_it_is_made)
    first.start()
    eventually(lambda: hanging.calls == ["decide"])
    in_vain("b")
    first.join()
    hanging.gate.set()
    eventually(lambda: deadline_store.pool.abandoned == 0)
    hanging.hangs = False
    deadline_store.budget_us = 60_000_000
    assert limiter.hit("a")
    assert ("b", 1) not in hanging.returned
    assert [key for key, _ in store.items(limiter.named[0])] == ["a"]


def test_threads_in_their_budget_are_all_answered(store):
    """More callers than threads: each is served in order, and none is lost."""
    deadline_store = DeadlineStore(FailingStore(store), 60_000_000)
    deadline_store.pool.max_calls = 3
    limiter = Limiter(FixedWindow("1000/400d"), store=deadline_store)
    threads = [threading.Thread(target=lambda: [limiter.hit("a") for _ in range(25)]) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert limiter.peek("a").remaining == 1000 - 300
    assert deadline_store.pool.threads <= 3


def test_idle_threads_end_when_the_guard_is_closed(store, eventually):
    """close() releases the waiting threads."""
    before = set(threading.enumerate())
    guard = GuardedStore(FailingStore(store), budget=60)
    Limiter("5/s", store=guard).hit("a")
    (asking,) = set(threading.enumerate()) - before
    eventually(lambda: guard._store.pool.free == 1)
    guard.close()
    asking.join(30)
    assert not asking.is_alive()


# Tasks


def test_a_hung_store_costs_a_task_the_budget_and_then_nothing(hanging, watch):
    """The same for asyncio, and the loop continues meanwhile."""

    async def main():
        guard = GuardedStore(hanging, budget="30ms", failures=3, background=False, **NEVER)
        limiter = AsyncLimiter("5/s", store=guard)
        ticks = []

        async def tick():
            while True:
                ticks.append(1)
                await asyncio.sleep(0.002)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        for _ in range(3):
            begun = time.perf_counter()
            assert guard.answered_here(await limiter.hit("a"))
            assert 0.029 <= time.perf_counter() - begun < watch.allows(0.03 + NOISE)
        assert guard.state == "open"
        assert len(ticks) >= 3
        await soon(lambda: len(hanging.calls) == guard.stats().abandoned <= 3)
        asked, begun = len(hanging.calls), time.perf_counter()
        for _ in range(100):
            await limiter.hit("a")
        assert time.perf_counter() - begun < watch.allows(1)  # a budget each would be three seconds
        assert guard.stats().abandoned == len(hanging.calls) == asked
        ticking.cancel()
        hanging.gate.set()
        await soon(lambda: guard.stats().abandoned == 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "wrap",
    [LeasedStore, lambda one: ShardedStore([one]), lambda one: LeasedStore(ShardedStore([one]))],
    ids=["leased", "sharded", "leased shards"],
)
def test_a_store_that_hangs_behind_a_wrapper_does_not_block_the_event_loop(wrap, store, watch):
    """A store with only sync methods hangs inside another wrapper: a task still has its answer after the budget."""
    hanging = HangingStore(store)

    async def main() -> None:
        async with GuardedStore(wrap(hanging), budget="100ms", background=False, **NEVER) as guard:
            begun = time.perf_counter()
            assert guard.answered_here(await AsyncLimiter("5/s", store=guard).hit("a"))
            assert time.perf_counter() - begun < watch.allows(0.1 + NOISE)
            hanging.gate.set()

    asyncio.run(main())


def test_a_late_charge_of_a_task_is_given_back(hanging):
    """An abandoned task continues by itself, and its charge goes back."""

    async def main():
        guard = GuardedStore(hanging, budget="5ms", background=False, **LATE)
        limiter = AsyncLimiter(FixedWindow("10/400d"), store=guard)
        for call in (
            lambda: limiter.hit("a", cost=3),
            lambda: limiter.reserve("b", cost=2),
            lambda: limiter.hit_many(["c", "d"]),
        ):
            before = guard.stats().abandoned
            while guard.stats().abandoned == before:  # as in `hangs`
                await call()
        hanging.gate.set()
        await soon(lambda: len(hanging.returned) >= 4)
        await soon(lambda: guard.stats().abandoned == 0)
        left = [Limiter(FixedWindow("10/400d"), store=hanging.inner).peek(key).remaining for key in "abcd"]
        return set(hanging.returned), left

    # On a busy machine a call may be abandoned twice before the first is counted: each of them goes back.
    assert asyncio.run(main()) == ({("a", 3), ("b", 2), ("c", 1), ("d", 1)}, [10, 10, 10, 10])


def test_a_cancelled_caller_leaves_no_charge_behind(hanging):
    """A caller that is cancelled during its call gives back a charge made after that."""

    async def main():
        guard = GuardedStore(hanging, budget="60s", background=False)
        limiter = AsyncLimiter(FixedWindow("10/400d"), store=guard)
        task = asyncio.create_task(limiter.hit("a", cost=3))
        await soon(lambda: hanging.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        hanging.gate.set()
        await soon(lambda: hanging.returned)
        return hanging.returned, guard.stats().failures

    assert asyncio.run(main()) == ([("a", 3)], 0)


def test_a_caller_that_is_cancelled_in_any_iteration_leaves_no_charge_behind(hanging):
    """Also in the iteration in which the store has answered."""
    hanging.hangs = False

    async def main():
        limiter = AsyncLimiter(FixedWindow("10/400d"), store=GuardedStore(hanging, budget="60s", background=False))
        for iterations in range(8):
            task = asyncio.create_task(limiter.hit("a"))
            for _ in range(iterations):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():  # its answer came first
                await limiter.refund("a")
            await soon(lambda: hanging.inner.decide(limiter.claims("a"), commit=False).remaining == 10)

    asyncio.run(main())


class ManySteps(HangingTasks):
    """A remote store whose answer takes several iterations of the event loop, as that of a client library does."""

    async def adecide(self, claims, max_wait_us=0, **options):
        for _ in range(5):
            await asyncio.sleep(0)
        return self.inner.decide(claims, max_wait_us, **options)


def test_a_busy_loop_is_no_slow_store(store):
    """Where each iteration of the loop takes longer than the budget, the store's answers count all the same: an iteration takes a
    millisecond of the budget."""

    async def main():
        guard = GuardedStore(ManySteps(store), budget="16ms", background=False, **LATE)
        hit = asyncio.create_task(AsyncLimiter("1/h burst 2", store=guard).hit("a"))
        while not hit.done():
            time.sleep(0.02)
            await asyncio.sleep(0)
        return guard.answered_here(hit.result()), guard.stats().failures

    assert asyncio.run(main()) == (False, 0)


def test_a_loop_may_end_while_calls_hang(hanging):
    """asyncio.run ends although a call hangs, and a second one works on the same guard."""
    guard = GuardedStore(hanging, budget="5ms", failures=2)

    async def main():
        limiter = AsyncLimiter("5/s", store=guard)
        return [guard.answered_here(await limiter.hit("a")) for _ in range(4)]

    assert asyncio.run(main()) == [True] * 4
    assert asyncio.run(main()) == [True] * 4
    guard.close()


# The prober


def test_on_a_clock_of_its_own_nothing_probes(store, clock):
    """With a manual clock nothing happens in the background, except with `background=True`."""
    behind = FailingStore(store, local=True)
    behind.failing.add("decide")
    guard = GuardedStore(behind, failures=1, clock=clock)
    Limiter("5/s", store=guard).hit("a")
    assert guard.state == "open"
    assert guard._health.prober is None


def test_a_thread_probes_in_the_background(store, eventually):
    """The guard probes by itself, and its thread ends when the store has recovered."""
    behind = FailingStore(store, local=True)
    guard = GuardedStore(behind, failures=1, backoff="2ms", max_backoff="10ms", ramp="10ms")
    limiter = Limiter("1000/s", store=guard)
    behind.failing.add("decide")
    limiter.hit("a")
    assert guard.state == "open"
    eventually(lambda: guard.stats().probes >= 3)
    assert guard.state == "open"
    behind.failing.clear()
    eventually(lambda: guard.state == "closed")
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "limitkeeper prober"])
    assert not guard.answered_here(limiter.hit("a"))


def test_closing_ends_the_prober(store, eventually):
    """close() ends the thread at once, however far the next probe is."""
    behind = FailingStore(store, local=True)
    guard = GuardedStore(behind, failures=1, backoff=600, max_backoff=600, rng=Random(3))
    behind.failing.add("decide")
    Limiter("5/s", store=guard).hit("a")
    assert guard._health.prober.alive
    guard.close()
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "limitkeeper prober"])


def test_a_forgotten_guard_ends_its_prober(store, eventually):
    """A guard without references is not kept alive by its own thread."""
    behind = FailingStore(store, local=True)
    guard = GuardedStore(behind, failures=1, backoff="20ms", max_backoff="20ms")
    behind.failing.add("decide")
    Limiter("5/s", store=guard).hit("a")
    del guard

    def ended() -> bool:
        gc.collect()  # again: the thread may have held the guard during the first collection
        return not [one for one in threading.enumerate() if one.name == "limitkeeper prober"]

    eventually(ended)


def test_a_task_probes_in_the_background(store):
    """In an event loop the prober is a task that calls the store's async methods."""
    behind = HangingTasks(store)
    behind.hangs = False

    async def main():
        guard = GuardedStore(behind, budget=60, failures=1, backoff="2ms", max_backoff="10ms", ramp="10ms")
        limiter = AsyncLimiter("1000/s", store=guard)
        behind.failing.add("decide")
        await limiter.hit("a")
        assert guard.state == "open"
        assert guard._health.prober.task is not None
        await soon(lambda: guard.stats().probes >= 3)
        behind.failing.clear()
        await soon(lambda: guard.state == "closed")
        assert not guard.answered_here(await limiter.hit("a"))
        assert set(behind.calls) == {"adecide"}
        await guard.aclose()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_when_a_loop_ends_the_next_caller_starts_a_new_prober(store, eventually):
    """A guard that opened in one event loop recovers although that loop is gone."""
    behind = HangingTasks(store)
    behind.hangs = False
    guard = GuardedStore(behind, budget=60, failures=1, backoff="2ms", max_backoff="10ms", ramp="10ms")
    behind.failing.add("decide")

    async def main():
        return await AsyncLimiter("1000/s", store=guard).hit("a")

    assert guard.answered_here(asyncio.run(main()))
    behind.failing.clear()
    assert guard.answered_here(asyncio.run(main()))
    Limiter("1000/s", store=guard).hit("a")
    eventually(lambda: guard.state == "closed")
    guard.close()


@pytest.mark.parametrize("backoff", ["1ms", 600])
def test_a_guard_recovers_where_every_call_has_an_event_loop_of_its_own(store, eventually, backoff):
    """Loops that end with their call leave no time for a probe: so a thread probes."""
    behind = HangingTasks(store)
    behind.hangs = False
    guard = GuardedStore(behind, budget=60, failures=1, backoff=backoff, max_backoff=backoff, ramp="10ms")
    limiter = AsyncLimiter("1000/s", store=guard)

    async def hit():
        return await limiter.hit("a")

    behind.failing.add("decide")
    assert guard.answered_here(asyncio.run(hit()))
    behind.failing.clear()
    guard._health.breaker.probe_at_us = 0
    eventually(lambda: asyncio.run(hit()) and guard.state != "open")
    eventually(lambda: guard.state == "closed")
    guard.close()


@pytest.mark.filterwarnings("ignore")  # of tasks that are collected in progress
def test_calls_abandoned_on_closed_loops_hold_no_worker(store):
    """After 40 calls that hang on loops which are then closed around their tasks, a call on another loop is made."""
    behind = HangingTasks(store)
    guard = GuardedStore(behind, budget="2ms", failures=10**6, ratio=1, background=False)
    limiter = AsyncLimiter("1000/s", store=guard)

    async def hit():
        return await limiter.hit("a")

    for _ in range(40):
        loop = asyncio.new_event_loop()
        assert guard.answered_here(loop.run_until_complete(hit()))
        loop.close()
    behind.hangs = False
    guard._store.budget_us = 60_000_000
    assert not guard.answered_here(asyncio.run(hit()))
    assert guard.stats().abandoned == 0


@pytest.mark.parametrize("when", ["between probes", "during a probe"])
def test_while_a_loop_does_not_run_another_caller_starts_a_new_prober(store, eventually, when):
    """A guard that opened in an event loop which is stopped and not closed recovers for the callers of other threads."""
    behind = HangingTasks(store)
    behind.hangs = False
    backoff = 600 if when == "between probes" else "1ms"
    guard = GuardedStore(behind, budget=600, failures=1, backoff=backoff, max_backoff=backoff, ramp="10ms")
    behind.failing.add("decide")
    loop = asyncio.new_event_loop()
    assert guard.answered_here(loop.run_until_complete(AsyncLimiter("1000/s", store=guard).hit("a")))
    behind.failing.clear()
    if when == "during a probe":
        behind.hangs = True
        loop.run_until_complete(soon(lambda: guard._health.breaker.probing))
        behind.hangs = False
    else:
        guard._health.breaker.probe_at_us = 0
    limiter = Limiter("1000/s", store=guard)
    eventually(lambda: limiter.hit("a") and guard.state == "closed")
    guard.close()
    behind.gate.set()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
    loop.close()


def test_a_guard_survives_a_fork(python):
    """A child process has no prober of its parent: it probes by itself, with a random generator of its own."""
    done = python(
        """
        import os, sys, time
        sys.path.insert(0, "tests")
        from limitkeeper import Limiter, MemoryStore, StoreUnavailable
        from limitkeeper.stores.guarded import GuardedStore

        class Failing(MemoryStore):
            fails = True
            def decide(self, claims, max_wait_us=0, **options):
                if self.fails:
                    raise StoreUnavailable("gone")
                return MemoryStore.decide(self, claims, max_wait_us, **options)

        store = Failing()
        guard = GuardedStore(store, failures=1, backoff="1ms", max_backoff="2ms", ramp="1ms")
        limiter = Limiter("1000/s", store=guard)
        limiter.hit("a")
        assert guard.state == "open"
        read, write = os.pipe()
        pids = []
        for _ in range(2):
            pid = os.fork()
            if not pid:
                store.fails = False
                os.write(write, b"%.12f\\n" % guard._breaker.rng.random())
                end = time.monotonic() + 40
                while guard.state != "closed" and time.monotonic() < end:
                    limiter.hit("a")
                    time.sleep(0.001)
                os._exit(0 if guard.state == "closed" else 1)
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        drawn = os.read(read, 100).split()
        print(codes, len(set(drawn)))
        """
    )
    assert done.stdout.strip() == "[0, 0] 2", done.stderr


def test_without_a_thread_for_a_call_the_fallback_answers_at_once(store):
    """A process that may not start another thread gets no exception of the interpreter; later calls have their worker again."""
    refused = ["the registration of the limit", "the first hit"]

    def start(target, name):
        if refused:
            raise RuntimeError(f"can't start new thread for {refused.pop()}")
        return start_daemon(target, name)

    hanging = HangingStore(store)
    hanging.hangs = False
    with GuardedStore(hanging, budget=60, on_failure="closed", background=False, start_thread=start) as guard:
        limiter = Limiter("5/s", store=guard)
        assert not limiter.hit("a")
        assert guard.stats().failures == 2
        assert limiter.hit("a")


def test_a_late_answer_of_leases_gives_a_log_and_a_window_back(store, clock):
    """A charge of leases of several limits for a caller that has left goes back to the batch of each."""
    leased = LeasedStore(store, lease=20, life="1s")
    limiter = Limiter({"window": FixedWindow("100/h"), "log": SlidingWindowLog("100/h")}, store=leased)
    for _ in range(25):
        assert limiter.hit("a")
        clock.advance(0.001)
        leased.tend()
    call = Call(leased, "decide", (limiter.claims("a"), 0), {"commit": True})
    decision = perform_call(call)
    assert decision.source == "lease"
    run(give_back_late(call, decision))
    leased.return_all()
    assert [part.remaining for part in limiter.peek("a").decisions] == [75, 75]
