"""DistributedBulkhead: places in a store, shared by all processes of one name, healed after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from random import Random

import pytest

from interrupts import interrupted_at
from limitkeeper import (
    BulkheadFull,
    ConfigurationError,
    GuardedStore,
    InvalidLimit,
    MemoryStore,
    RedisStore,
    SharedStore,
    StoreUnavailable,
)
from limitkeeper.concurrency import DistributedBulkhead
from servers.faketime import FaketimeValkey
from stand_ins import WrappedStore, no_room_for_threads


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.005)


@pytest.fixture(params=["memory", "shared"])
def shared_store(request, clock, tmp_path):
    """A store on a manual clock."""
    store = MemoryStore(clock=clock) if request.param == "memory" else SharedStore(tmp_path / "limits", clock=clock)
    yield store
    store.close()


def bulkhead(size: int, store: object, name: str = "db", **options: object) -> DistributedBulkhead:
    return DistributedBulkhead(size, store, name=name, **options)  # type: ignore[arg-type]


def test_two_processes_share_the_places(shared_store):
    """Places that one process holds are not given to another; a release frees them for both."""
    one, other = bulkhead(2, shared_store), bulkhead(2, shared_store)
    assert one.try_acquire()
    assert other.try_acquire()
    assert not one.try_acquire()
    assert (one.in_use, other.in_use, one.taken()) == (1, 1, 2)
    other.release()
    assert one.try_acquire()
    assert one.taken() == 2
    one.release()
    one.release()
    assert one.taken() == 0


def test_places_heal_after_the_ttl(clock, shared_store):
    """Places of a process that died are free after the ttl, and not a microsecond earlier."""
    dead, alive = bulkhead(1, shared_store, ttl="10s"), bulkhead(1, shared_store, ttl="10s")
    assert dead.try_acquire()
    clock.advance(9.999_999)
    assert not alive.try_acquire()
    clock.advance(0.000_001)
    assert alive.try_acquire()


def test_places_are_renewed_after_the_clock_went_back(clock, store, monkeypatch):
    """A server whose clock goes back dates the places of running calls in the future; they are renewed all the same."""
    holder = bulkhead(2, store, ttl="30s")
    holder.acquire()
    monkeypatch.setattr(WrappedStore, "now_us", lambda wrapped: clock.now_us() - 3_600_000_000)
    holder.store = WrappedStore(store)
    assert holder.renew() == 1


class Draws(Random):
    """A generator of these numbers."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


def test_a_guard_that_refuses_a_renewal_costs_no_place(clock, store):
    """While a guard lets only some calls through, a place that it refuses to renew is not given back: the call still runs."""
    wrapped = WrappedStore(store)
    guard = GuardedStore(wrapped, on_failure="closed", failures=1, clock=clock, rng=Draws(0, 1, 0, 1))
    holder = bulkhead(1, guard, ttl="30s")
    holder.acquire()
    clock.advance(10)
    wrapped.failing = {"decide"}
    assert not bulkhead(1, guard).try_acquire()
    wrapped.failing = set()
    assert guard.probe()
    clock.advance(0.5)
    assert holder.renew() == 0
    assert not bulkhead(1, store, ttl="30s").try_acquire()


def test_held_places_are_renewed(clock, shared_store):
    """A place that is renewed every third of the ttl never expires; once released it is free at once."""
    holder, other = bulkhead(1, shared_store, ttl="30s"), bulkhead(1, shared_store, ttl="30s")
    holder.acquire()
    for _ in range(20):
        clock.advance(9)
        assert holder.renew() == 0
        clock.advance(1)
        assert holder.renew() == 1
        assert other.taken() == 1
        assert not other.try_acquire()
    holder.release()
    assert other.taken() == 0
    assert other.try_acquire()


def test_a_renewal_never_frees_a_place(clock):
    """While a place is renewed it counts once or twice, never not at all."""
    store = MemoryStore(clock=clock)
    other = bulkhead(1, store)
    seen = []

    class Watched(WrappedStore):
        def _noted(self, verb):
            if holder.in_use:
                seen.append((verb, other.try_acquire()))
            return self.inner

    holder = bulkhead(1, Watched(store))
    holder.acquire()
    clock.advance(10)
    assert holder.renew() == 1
    assert seen == [("decide", False), ("give_back", False)]


def test_resizing_counts_what_is_held(shared_store):
    """Another size sees the places that are taken; it can change any number of times."""
    holder = bulkhead(3, shared_store)
    for _ in range(3):
        holder.acquire()
    for size in (1, 2, 5, 7, 4, 6, 3):
        holder.resize(size)
        assert holder.try_acquire() == (size > 3)
        if size > 3:
            holder.release()
    holder.resize(4)
    assert holder.try_acquire()
    assert not holder.try_acquire()


def test_a_smaller_size_renews_what_is_held(clock, shared_store):
    """A process with a smaller size than others renews all its places: they stay taken for the others."""
    one, other = bulkhead(100, shared_store, ttl="30s"), bulkhead(100, shared_store, ttl="30s")
    for _ in range(50):
        one.acquire()
        other.acquire()
    other.resize(2)
    for _ in range(4):
        clock.advance(10)
        assert (one.renew(), other.renew()) == (50, 50)
        assert not one.try_acquire()


@pytest.mark.parametrize("size", [4, 6])
def test_renewal_in_a_full_log(clock, tmp_path, size):
    """A shared file that has room for no further entry renews the places all the same."""
    with SharedStore(tmp_path / "limits", clock=clock, log_entries=4) as store:
        holder, other = bulkhead(size, store, ttl="30s"), bulkhead(size, store, ttl="30s")
        for _ in range(4):
            assert holder.try_acquire()
            clock.advance(0.001)
        assert not other.try_acquire()
        for _ in range(4):
            clock.advance(10)
            assert holder.renew() == 4
        assert other.taken() == 4


def test_full_without_waiting(shared_store):
    """With no queue or no time a full bulkhead refuses at once."""
    for options in ({"max_waiting": 0}, {"timeout": 0}):
        full = bulkhead(1, shared_store, **options)
        with full, pytest.raises(BulkheadFull, match="bulkhead 'db' of 1 is full"):
            full.acquire()
        assert full.in_use == 0


def test_a_timeout(clock, shared_store):
    """A waiter polls every `poll` and gives up after its timeout."""
    one, other = bulkhead(1, shared_store), bulkhead(1, shared_store, timeout="2s", poll="300ms")
    began_us = clock.now_us()
    with one, pytest.raises(BulkheadFull):
        other.acquire()
    assert clock.now_us() - began_us == 2_000_000
    assert other.waiting == 0


def test_waiting_tasks_are_served_in_order():
    """Tasks of one process wait in order of arrival; a cancelled one takes nothing with it."""

    async def main():
        places, order = bulkhead(1, MemoryStore(), poll="1ms"), []

        async def call(number):
            async with places:
                order.append(number)
                await asyncio.sleep(0)

        await places.aacquire()
        tasks = [asyncio.create_task(call(number)) for number in range(6)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[3].cancel()
        await places.arelease()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [1, 2, 4, 5]
        assert (places.in_use, places.waiting, places.taken()) == (0, 0, 0)

    asyncio.run(main())


def test_threads_wait_for_another_process():
    """A thread that waits gets the place that another process releases."""
    store = MemoryStore()
    one, other = bulkhead(1, store), bulkhead(1, store, poll="1ms")
    one.acquire()
    thread = threading.Thread(target=other.acquire)
    thread.start()
    until(lambda: other.waiting == 1)
    one.release()
    thread.join(60)
    assert (one.in_use, other.in_use) == (0, 1)


def test_a_closed_loop_with_the_polling_waiter():
    """A waiter of a loop that never runs again does not stop the polling of the others, though this process releases no place."""
    store = MemoryStore()
    one, other = bulkhead(1, store), bulkhead(1, store, poll="1ms")
    one.acquire()
    loop = asyncio.new_event_loop()
    task = loop.create_task(other.aacquire())
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    task._log_destroy_pending = False
    del task, loop
    gc.collect()
    assert other.waiting == 0
    one.release()
    assert other.try_acquire()


def test_the_queue_is_bounded():
    """`max_waiting` callers of this process wait; the next is refused."""
    places = bulkhead(1, MemoryStore(), max_waiting=2, poll="1ms")

    async def main():
        await places.aacquire()
        tasks = [asyncio.create_task(places.aacquire()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(BulkheadFull, match="2 more wait here"):
            await places.aacquire()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert places.waiting == 0

    asyncio.run(main())


def test_the_decorator_and_counters(shared_store):
    """Decorated calls hold a place; an exception gives it back; counters and events record it."""
    places, heard = bulkhead(1, shared_store), []
    places.events.on("*", lambda event: heard.append(event.kind))

    @places.limit
    def call():
        assert places.in_use == 1
        raise KeyError

    with pytest.raises(KeyError):
        call()
    assert heard == ["allowed", "finished"]
    assert (places.taken(), places.stats().permitted, places.snapshot().bulkheads[0].name) == (0, 1, "db")


def test_release_without_acquire(shared_store):
    """A release too many is an error, and frees no place of another caller."""
    one, other = bulkhead(1, shared_store), bulkhead(1, shared_store)
    one.acquire()
    with pytest.raises(RuntimeError, match="this process holds no place"):
        other.release()
    assert one.taken() == 1


def test_a_release_during_a_renewal(clock):
    """A place that is released while it is renewed is given back when the renewal ends."""
    store = MemoryStore(clock=clock)

    class Releasing(WrappedStore):
        def _noted(self, verb):
            if verb == "give_back" and holder._renewing and not self.calls:
                self.calls.append(verb)
                holder.release()
            return self.inner

    holder = bulkhead(1, Releasing(store))
    holder.acquire()
    clock.advance(10)
    assert holder.renew() == 1
    assert (holder.in_use, holder.taken()) == (0, 0)


def test_a_store_that_fails(clock):
    """Taking raises the store's error; releasing does not, and the place heals."""
    wrapped = WrappedStore(MemoryStore(clock=clock), local=True)
    places, heard = bulkhead(1, wrapped, ttl="10s"), []
    places.events.on("give back failed", lambda event: heard.append(event.kind))
    with places:
        wrapped.failing = {"give_back", "decide"}
        clock.advance(5)
        assert places.renew() == 0
    assert heard == ["give back failed"]
    with pytest.raises(StoreUnavailable):
        places.acquire()
    wrapped.failing = set()
    assert not places.try_acquire()
    clock.advance(5)
    assert places.try_acquire()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_with_held_places(tmp_path):
    """A forked child holds nothing: leaving a block that its parent entered gives nothing back."""
    places = bulkhead(2, SharedStore(tmp_path / "limits"))
    with places:
        child = os.fork()
        if child == 0:
            places.release()
            os._exit(0 if places.in_use == 0 and places.taken() == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert places.taken() == 1
    assert places.taken() == 0
    places.close()


@pytest.mark.parametrize("options", [{"ttl": 0}, {"ttl": -1}, {"poll": 0}, {"max_waiting": -1}, {"timeout": -2}])
def test_invalid_options(options, store):
    """Durations and sizes are checked."""
    with pytest.raises(InvalidLimit):
        bulkhead(1, store, **options)
    with pytest.raises(InvalidLimit):
        bulkhead(0, store)
    with pytest.raises(ConfigurationError, match="name must be a non-empty string"):
        bulkhead(1, store, name="")


def test_on_redis(valkey):
    """On Redis all clients share the places, whatever size each of them sees, and a place heals after its ttl."""
    stores = [RedisStore(valkey.url, timeout="60s") for _ in range(2)]
    one, other = (bulkhead(2, store, name="redis-db", ttl="60s", poll="5ms") for store in stores)

    async def main():
        async with one, other:
            assert not await one.atry_acquire()
            waiter = asyncio.create_task(other.aacquire())
            async with asyncio.timeout(60):
                while other.waiting != 1:
                    await asyncio.sleep(0.005)
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
        assert await one.atry_acquire()
        await one.arelease()

    asyncio.run(main())
    assert one.taken() == 0
    for size in (1, 3, 4, 2, 5):  # other sizes count the same entries
        one.resize(size)
        assert one.try_acquire()
        assert one.taken() == 1
        one.release()
    short = bulkhead(1, stores[0], name="redis-short", ttl="100ms")
    assert short.try_acquire()
    assert short._renewal is not None
    short._renewal.stop()
    until(bulkhead(1, stores[1], name="redis-short", ttl="100ms").try_acquire)
    for store in stores:
        store.close()


def test_places_are_free_at_once_when_the_servers_clock_went_back_meanwhile():
    """Calls that end after a step of the server's clock, or a failover to a server that is behind, leave no place taken."""
    with FaketimeValkey() as server, RedisStore(server.url, timeout="60s") as store:
        bulkhead = DistributedBulkhead(3, store, name="steps", ttl="1h")
        for _ in range(3):
            assert bulkhead.try_acquire()
            server.step(-1)
            bulkhead.release()
            assert bulkhead.try_acquire()
        server.step(-1)
        for _ in range(3):
            bulkhead.release()
        assert bulkhead.taken() == 0
        bulkhead.close()


def test_cancelled_tasks_leave_no_place_on_redis(valkey):
    """Cancelled while it takes a place, or while it releases one, a task leaves none behind."""

    async def cancelled(work, turns):
        task = asyncio.create_task(work)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def check() -> None:
        for turns in range(1, 6):
            one = bulkhead(40, store, f"cancelled {turns}", ttl="1h")
            for _ in range(5):
                await cancelled(one.aacquire(), turns)
                while one.in_use:
                    await one.arelease()
                await one.aacquire()
                await cancelled(one.arelease(), turns)
            await one.aacquire()
            await one.arelease()
            assert one.taken() == one.in_use == 0
            one.close()

    with RedisStore(f"redis://127.0.0.1:{valkey.port}", timeout="60s") as store:
        asyncio.run(check())


def test_renewal_on_redis(valkey):
    """A place on Redis is renewed by the background thread for as long as it is held."""
    store = RedisStore(valkey.url, timeout="60s")
    places = bulkhead(1, store, name="redis-renewed", ttl="3s")
    with places:
        first = places._held[0].dated_us
        until(lambda: places._held and places._held[0].dated_us >= first + 3_000_000)  # the ttl
        assert places.taken() == 1
    assert places.taken() == 0
    places.close()
    store.close()


HOLD = """
import sys, time
from limitkeeper.concurrency import DistributedBulkhead
places = DistributedBulkhead(2, sys.argv[1], name="crash", ttl="6s")
places.acquire()
places.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize("kind", ["redis", "shared"])
def test_a_killed_process_leaves_its_places(kind, valkey, tmp_path):
    """After kill -9 the places of a process are held until their ttl, and then free for others."""
    url = valkey.url if kind == "redis" else f"shared://{tmp_path}/limits"
    process = subprocess.Popen([sys.executable, "-c", HOLD, url], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    places = DistributedBulkhead(2, url, name="crash", ttl="6s", poll="10ms")
    assert places.taken() == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    with places:
        assert places.taken() <= 2
    places.close()


@pytest.mark.parametrize("store", [None, 5])
def test_what_is_no_store_is_an_error(store):
    """The message names the expected form."""
    with pytest.raises(ConfigurationError, match="needs a store or its URL, got"):
        DistributedBulkhead(1, store, name="places")


def test_an_interrupted_acquire_lets_the_next_caller_have_its_turn(shared_store):
    """A signal handler that raises at any moment of a wait for a place leaves no caller before the others of its process."""
    one, other = bulkhead(1, shared_store, timeout="120ms"), bulkhead(1, shared_store)
    assert other.try_acquire()
    number = 0

    def acquire():
        with contextlib.suppress(BulkheadFull):
            one.acquire()

    while interrupted_at(number := number + 1, acquire):
        assert one.waiting == 0, number
    assert number > 20


def test_a_place_is_taken_when_it_can_be_renewed(shared_store):
    """Where the system has no room for the thread that renews places none is taken, and the error is raised."""
    places = bulkhead(1, shared_store)
    with no_room_for_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        places.acquire()
    assert (places.in_use, places.taken()) == (0, 0)
    assert places.try_acquire()
    places.release()
    places.close()
