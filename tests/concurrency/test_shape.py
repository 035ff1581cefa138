"""`shape`: messages of any iterator at a steady pace, with back-pressure, and what happens when the iteration is interrupted."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import queue
import random
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from limitkeeper import (
    ConfigurationError,
    InvalidLimit,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    RateLimited,
    RedisStore,
    SlidingWindowCounter,
    TokenBucket,
)
from limitkeeper.concurrency import shape
from limitkeeper.testing import ManualClock
from stand_ins import NOON, Loop, no_room_for_threads
from virtual_time import VirtualClock

NOON_US = round(NOON * 1e6)
pytestmark = pytest.mark.timeout(60)


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


def moments(clock: ManualClock, shaped: object, mode: str) -> list[tuple[int, int]]:
    """(message, microseconds since noon) of a whole iteration."""

    async def collect() -> list[tuple[int, int]]:
        return [(message, clock.now_us() - NOON_US) async for message in shaped]  # type: ignore[attr-defined]

    if mode == "async":
        return asyncio.run(collect())
    return [(message, clock.now_us() - NOON_US) for message in shaped]  # type: ignore[attr-defined]


async def turns(count: int = 20) -> None:
    """Lets every task of the loop run until it waits."""
    for _ in range(count):
        await asyncio.sleep(0)


# Pace


@pytest.mark.parametrize("capacity", [None, 1, 500])
@pytest.mark.parametrize(("mode", "kind"), [("sync", "sync"), ("async", "sync"), ("async", "async")])
def test_messages_come_in_order_one_every_interval(clock, store, capacity, mode, kind):
    """All messages of any source come in order, the n-th exactly n intervals after the first."""
    source = range(700) if kind == "sync" else numbers(700)
    found = moments(clock, shape(source, "100/s", capacity, store=store), mode)
    assert found == [(number, number * 10_000) for number in range(700)]


def test_an_awkward_rate_does_not_drift(clock, store):
    """At 3/s the n-th message comes at n/3 s, rounded up to a microsecond: no fraction is lost in 3000 messages."""
    found = moments(clock, shape(range(3000), "3/s", store=store), "sync")
    assert [at for _, at in found] == [-(-number * 1_000_000 // 3) for number in range(3000)]


def test_a_stall_is_not_made_up(clock, store):
    """After a stall of one second in the loop the messages are still exactly an interval apart, never closer."""
    found = []
    for message in shape(range(20), "100/s", 5, store=store):
        found.append(clock.now_us())
        if message == 9:
            clock.advance(1)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert gaps == [10_000] * 9 + [1_000_000] + [10_000] * 9


def test_a_limit_with_a_burst_makes_up_for_a_stall(clock, store):
    """With a token bucket of burst 4, four missed messages come at once after a stall, and then one every interval."""
    found = []
    for message in shape(range(20), TokenBucket("100/s burst 4 initial 1"), store=store):
        found.append(clock.now_us())
        if message == 9:
            clock.advance(1)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert gaps[9:] == [1_000_000, 0, 0, 0] + [10_000] * 6


class LateClock(ManualClock):
    """A clock on which every sleep lasts between `least` and `most` seconds too long."""

    def __init__(self, least: float, most: float) -> None:
        super().__init__(NOON)
        self.random, self.least, self.most = random.Random(7), least, most

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        self.advance(seconds + self.random.uniform(self.least, self.most))


def late_moments(least: float, most: float) -> list[int]:
    """The times of 3001 messages at 100/s, in microseconds, where every sleep is late."""
    clock = LateClock(least, most)
    return [at for _, at in moments(clock, shape(range(3001), "100/s", store=MemoryStore(clock=clock)), "sync")]


@pytest.mark.parametrize(("least", "most"), [(0, 0.001), (0.008, 0.009)])
def test_late_wake_ups_do_not_add_up(least, most):
    """Where sleeps end up to a tenth of an interval late, or all equally late, 3000 intervals of 10 ms take 30 s."""
    found = late_moments(least, most)
    assert 30_000_000 <= found[-1] < 30_010_000
    assert min(after - before for before, after in itertools.pairwise(found)) >= 9_000


def test_no_gap_is_short_however_late_the_wake_ups_are():
    """Where sleeps end between 0 and 5 intervals late, no gap is below 0.9 of the interval; the rate is lower then."""
    found = late_moments(0, 0.05)
    assert min(after - before for before, after in itertools.pairwise(found)) >= 9_000
    assert found[-1] > 30_010_000


def test_bytes_are_paced_by_their_number(clock, store):
    """With `cost=len` a chunk keeps the next one waiting for as many intervals as it has bytes."""
    chunks = [b"x" * 500, b"x" * 1000, b"x", b"x"]
    found = moments(clock, shape(chunks, "1000/s", cost=len, store=store), "sync")
    assert [at for _, at in found] == [0, 500_000, 1_500_000, 1_501_000]


def test_iterators_of_one_store_and_name_share_a_rate(clock, store):
    """Two iterators on one store and name get the starts of one rate between them."""
    one, other = (shape(range(5), "100/s", store=store, name="writes") for _ in range(2))
    found = []
    for _ in range(5):
        for each in (one, other):
            next(each)
            found.append(clock.now_us() - NOON_US)
    assert found == [number * 10_000 for number in range(10)]


def test_consumers_on_one_server_share_a_rate(valkey):
    """Two tasks and a thread with a store on one server: their 90 starts, on its clock, are an interval or more apart."""
    valkey.client().flushall()
    starts: list[int] = []

    def consumer(source: object) -> object:
        shaped = shape(source, "1000/s", 10, store=RedisStore(valkey.url, timeout=30), name="writes")  # type: ignore[type-var]
        shaped.events.on("allowed", lambda event: starts.append(event.decision.start_us))
        return shaped

    async def read() -> None:
        async with consumer(numbers(30)) as shaped:  # type: ignore[attr-defined]
            assert [message async for message in shaped] == list(range(30))

    async def main() -> None:
        thread = asyncio.to_thread(list, consumer(range(30)))  # type: ignore[call-overload]
        await asyncio.gather(read(), read(), thread)

    asyncio.run(main())
    assert len(starts) == 90
    assert all(after - before >= 1000 for before, after in itertools.pairwise(sorted(starts)))


def test_the_decided_starts_are_published(clock, store):
    """A listener of "allowed" gets the start of every message."""
    shaped = shape(range(5), "100/s", store=store)
    starts = []
    shaped.events.on("allowed", lambda event: starts.append(event.decision.start_us - NOON_US))
    assert list(shaped) == list(range(5))
    assert starts == [0, 10_000, 20_000, 30_000, 40_000]


# Back-pressure


class Counted:
    """A source that counts its reads; `limit` None is endless."""

    def __init__(self) -> None:
        self.read = 0
        self.closed = threading.Event()

    def messages(self) -> Iterator[int]:
        try:
            while True:
                self.read += 1
                yield self.read
        finally:
            self.closed.set()

    async def amessages(self) -> AsyncIterator[int]:
        try:
            while True:
                self.read += 1
                yield self.read
        finally:
            self.closed.set()


def test_a_source_is_read_ahead_by_at_most_the_capacity(clock, store, eventually):
    """A thread reads 50 messages ahead and no more; one is read for each that is handed over."""
    source = Counted()
    with shape(source.messages(), "100/s", 50, store=store) as shaped:
        for taken in range(1, 200):
            assert next(shaped) == taken
            eventually(lambda: shaped.queued == 50)
            assert source.read == taken + 50


def test_an_async_source_is_read_ahead_by_at_most_the_capacity(clock, store):
    """A task reads 50 messages ahead and no more; one is read for each that is handed over."""

    async def main() -> None:
        source = Counted()
        async with shape(source.amessages(), "100/s", 50, store=store) as shaped:
            for taken in range(1, 200):
                assert await anext(shaped) == taken
                await turns()
                assert (shaped.queued, source.read) == (50, taken + 50)

    asyncio.run(main())


def test_without_a_capacity_nothing_is_read_ahead(store):
    """A message is read when the loop requests it: after three, three have been read."""
    source = Counted()
    shaped = shape(source.messages(), "100/s", store=store)
    assert [next(shaped) for _ in range(3)] == [1, 2, 3]
    assert (source.read, shaped.queued) == (3, 0)


def test_the_capacity_counts_costs(clock, store, eventually):
    """With `cost=len` the capacity is in bytes: of chunks of 40 bytes two fit into 100."""
    read = []

    def chunks() -> Iterator[bytes]:
        for number in range(10):
            read.append(number)
            yield b"x" * 40

    with shape(chunks(), "1000/s", 100, cost=len, store=store) as shaped:
        next(shaped)
        eventually(lambda: shaped.queued == 80 and len(read) == 4)  # the fourth is read and waits for room
        assert len(list(shaped)) == 9


def test_a_full_queue_pauses_the_source_and_a_half_empty_one_resumes_it(clock, store, eventually):
    """The consumer is paused before the queue is full, polled on meanwhile, and resumed when half of the queue is free."""
    calls = []
    paused, over = threading.Event(), threading.Event()
    polls = itertools.count()

    def poll() -> Iterator[int]:
        for number in range(60):
            while paused.is_set():
                next(polls)  # a paused Kafka consumer is polled, and has no message
                over.wait(0.001)
            yield number
        over.set()

    def pause() -> None:
        calls.append("pause")
        paused.set()

    def resume() -> None:
        calls.append(f"resume at {shaped.queued}")
        paused.clear()

    shaped = shape(poll(), "100/s", 10, pause=pause, resume=resume, store=store)
    found = [next(shaped)]
    while len(found) < 60:
        eventually(lambda: paused.is_set() or over.is_set())
        assert shaped.queued <= 10
        found.append(next(shaped))
    assert found == list(range(60))
    assert calls[:4] == ["pause", "resume at 5", "pause", "resume at 5"]
    assert next(polls) > 0


# Interruptions: each has a defined result, and no start is lost


def next_start(store: MemoryStore, name: str = "shape") -> float:
    """Seconds until the pace would let the next message start."""
    return Limiter(LeakyBucketQueue("100/s"), store, name).peek(name).retry_after


def test_a_loop_that_is_left_stops_its_thread(clock, store, eventually):
    """After `break` the thread stops reading, the source is closed, and the next start is one interval away, not more."""
    source = Counted()
    for message in shape(source.messages(), "100/s", 50, store=store):
        if message == 10:
            break
    gc.collect()
    eventually(source.closed.is_set)
    assert source.read <= 10 + 50 + 1
    assert next_start(store) == 0.01


def test_an_async_loop_that_is_left_stops_its_task(clock, store):
    """After an exception in the body the task that reads ends, and the next start is one interval away."""

    async def main() -> None:
        source = Counted()

        async def read() -> None:
            async for message in shape(source.amessages(), "100/s", 50, store=store):
                1 / (message - 10)

        with pytest.raises(ZeroDivisionError):
            await read()
        gc.collect()
        await turns()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert next_start(store) == 0.01

    asyncio.run(main())


def test_closing_returns_what_was_read_in_vain(clock, store, eventually):
    """`close` returns the messages that were read and not handed over, in order; the iteration is over."""
    shaped = shape(range(100), "100/s", 20, store=store)
    assert [next(shaped) for _ in range(5)] == [0, 1, 2, 3, 4]
    eventually(lambda: shaped.queued == 20)
    assert shaped.close()[:20] == list(range(5, 25))
    assert list(shaped) == []


@pytest.mark.parametrize("capacity", [None, 5])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_error_of_the_source_comes_after_the_messages_before_it(clock, store, mode, capacity):
    """A source that fails after three messages hands over three, then its error, and then the iteration is over."""

    def failing() -> Iterator[int]:
        yield from range(3)
        raise OSError("the connection is lost")

    async def afailing() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        raise OSError("the connection is lost")

    shaped = shape(failing() if mode == "sync" else afailing(), "100/s", capacity, store=store)
    with Loop() as loop:
        step = shaped.__next__ if mode == "sync" else lambda: loop.call(shaped.__anext__())
        assert [step() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="the connection is lost"):
            step()
        with pytest.raises((StopIteration, StopAsyncIteration)):
            step()


@pytest.mark.parametrize("capacity", [None, 10])
def test_a_cancelled_wait_loses_neither_message_nor_start(capacity):
    """A task that is cancelled while it waits for a start gives it back, and the next one gets the same message at that start."""

    async def main() -> None:
        clock = VirtualClock()
        shaped = shape(numbers(10), "1/s", capacity, store=MemoryStore(clock=clock))
        assert await anext(shaped) == 0
        waiting = asyncio.ensure_future(anext(shaped))
        await clock.run_until(NOON_US + 300_000, turns)
        waiting.cancel()
        await asyncio.wait({waiting})
        again = asyncio.ensure_future(anext(shaped))
        await clock.run_until(NOON_US + 999_999, turns)
        assert not again.done()
        await clock.run_until(NOON_US + 1_000_000, turns)
        assert again.done()
        assert await again == 1
        shaped.close()
        await turns()

    asyncio.run(main())


def test_closing_ends_a_task_that_waits_for_its_start():
    """A task that waits for a start an hour away ends at once when the iterator is closed, and the start is free again."""

    async def main() -> None:
        clock = VirtualClock()
        store = MemoryStore(clock=clock)
        shaped = shape(numbers(10), "1/h", 5, store=store)
        await anext(shaped)
        waiting = asyncio.ensure_future(anext(shaped))
        await turns()
        assert shaped.close()[:2] == [1, 2]
        with pytest.raises(StopAsyncIteration):
            await waiting
        assert Limiter(LeakyBucketQueue("1/h"), store, "shape").peek("shape").retry_after == 3600

    asyncio.run(main())


def test_a_thread_that_is_interrupted_loses_neither_message_nor_start(held, eventually):
    """Ctrl-C while a thread waits for a start gives it back; the iteration can continue with the same message."""
    store = MemoryStore(clock=held)
    shaped = shape(range(10), "1/s", store=store)
    assert next(shaped) == 0
    raised = []

    def wait() -> None:
        try:
            next(shaped)
        except KeyboardInterrupt as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: len(held.sleeps) == 1)
    held.interrupt(thread)
    thread.join(30)
    assert len(raised) == 1
    assert Limiter(LeakyBucketQueue("1/s"), store, "shape").peek("shape").retry_after == 1
    held.advance(1)
    assert next(shaped) == 1


def test_an_event_loop_that_is_closed_gives_the_start_back():
    """A loop that is closed while a task waits for its start leaves nothing charged but what was handed over."""
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    loop = asyncio.new_event_loop()
    shaped = shape(numbers(10), "1/s", store=store)

    async def begin() -> None:
        await anext(shaped)
        tasks.append(asyncio.ensure_future(anext(shaped)))
        await turns()

    tasks: list[asyncio.Future[int]] = []
    loop.run_until_complete(begin())
    loop.set_exception_handler(lambda loop, context: None)
    tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    tasks.clear()
    clock._events.clear()
    gc.collect()
    assert Limiter(LeakyBucketQueue("1/s"), store, "shape").peek("shape").retry_after == 1
    assert shaped.queued == 1


def test_an_event_loop_that_is_closed_while_a_task_waits_for_a_message(store):
    """A loop that is closed while a task waits for the source leaves the next message to the next loop."""
    messages: queue.Queue[int] = queue.Queue()
    shaped = shape(iter(messages.get, None), "1000/s", capacity=5, store=store)
    loop = asyncio.new_event_loop()
    task = loop.create_task(anext(shaped))
    loop.run_until_complete(turns())
    loop.close()
    task._log_destroy_pending = False
    del task, loop
    gc.collect()
    messages.put(7)
    assert asyncio.run(asyncio.wait_for(anext(shaped), 30)) == 7
    messages.put(None)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_does_not_read_what_its_parent_reads(python):
    """An iterator that reads ahead belongs to the process that began it: in a child it raises an error with the remedy."""
    done = python("""
        import os, warnings
        warnings.simplefilter("ignore")
        from limitkeeper.concurrency import shape
        shaped, unused = (shape(iter(range(100)), "1000/s", capacity=5) for _ in range(2))
        next(shaped)
        child = os.fork()
        if child == 0:
            try:
                next(shaped)
            except RuntimeError as error:
                os._exit(0 if "shape() in the child" in str(error) and next(unused) == 0 else 1)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), next(shaped))
    """)
    assert done.stdout.split() == ["0", "1"], done.stderr


def test_a_message_that_can_never_fit_is_an_error_at_its_place(clock, store):
    """A message of a cost above the capacity raises RateLimited when its turn comes."""
    shaped = shape([b"x", b"x" * 11, b"x"], "1000/s", 10, cost=len, store=store)
    assert next(shaped) == b"x"
    with pytest.raises(RateLimited, match="can never admit"):
        next(shaped)


# Bad input


def test_a_thread_that_could_not_be_started_is_started_by_the_next_call(store):
    """Where the system has no room for the thread that reads the loop raises its error; once it has, it gets all messages."""
    messages = shape(range(3), "100/s", capacity=2, store=store)
    with no_room_for_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        next(messages)
    assert list(messages) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, "100/s"), {}, TypeError, "expects an iterable or an async iterable, got int: 3"),
        (([], 100), {}, InvalidLimit, "expected a rate or a limit, got 100; write it like '100/s'"),
        (([], "100/parsec"), {}, InvalidLimit, "parsec"),
        (([], "100/s", 0), {}, InvalidLimit, "capacity must be between 1 and"),
        (([], "100/s", -5), {}, InvalidLimit, "capacity must be between 1 and"),
        (([], "100/s", 2.5), {}, InvalidLimit, "capacity must be a whole number, got 2.5"),
        (([], "100/s capacity 500", 400), {}, ConfigurationError, "capacity=400 is given beside .* give it once"),
        (([], SlidingWindowCounter("100/s")), {}, ConfigurationError, "can't decide a start ahead; use a leaky bucket queue"),
        (([], "100/s", 5), {"pause": print}, ConfigurationError, "pause= and resume= belong together"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(arguments, options, error, message):
    """Wrong arguments raise an error with the expected and the actual value."""
    with pytest.raises(error, match=message):
        shape(*arguments, **options)


def test_an_async_source_needs_async_for(store):
    """`for` over an async source raises a TypeError with the reason."""
    with pytest.raises(TypeError, match="can only be iterated with `async for`"):
        next(shape(numbers(3), "100/s", store=store))


def test_the_capacity_of_the_limit_is_the_capacity_of_the_queue(clock, store, eventually):
    """ "100/s capacity 5" reads five messages ahead."""
    with shape(range(100), LeakyBucketQueue("100/s", capacity=5), store=store) as shaped:
        next(shaped)
        eventually(lambda: shaped.queued == 5)
        assert repr(shaped) == "<ShapedIterator 'shape': leaky bucket queue 100/s, 5 of 5 queued>"
