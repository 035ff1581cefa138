"""Shaper: calls start at a steady pace and in order, on a pool of threads, from a bounded queue."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import threading
import weakref
from concurrent.futures import CancelledError, wait

import pytest

from limitkeeper import GuardedStore, InvalidLimit, LeakyBucketQueue, Limiter, MemoryStore, RateLimited, StoreUnavailable
from limitkeeper.concurrency import Shaper
from limitkeeper.testing import ManualClock
from stand_ins import NOON, HeldClock, WrappedStore, no_room_for_threads

NOON_US = round(NOON * 1e6)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def begun() -> list[object]:
    return []


def starts_of(shaper: Shaper) -> list[int]:
    """The published starts, in milliseconds since noon."""
    starts: list[int] = []
    shaper.events.on("allowed", lambda event: starts.append((event.decision.start_us - NOON_US) // 1000))
    return starts


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"limitkeeper {name}")]


def test_calls_start_every_interval_in_order(begun):
    """A thousand calls start in the order of submission, exactly an interval apart."""
    clock = ManualClock(NOON)
    with Shaper("100/s", store=MemoryStore(clock=clock)) as shaper:
        starts = starts_of(shaper)
        calls = [shaper.submit(begun.append, number) for number in range(1000)]
    assert begun == list(range(1000))
    assert starts == [number * 10 for number in range(1000)]
    assert all(call.done() for call in calls)


def test_of_twenty_at_once_ten_are_taken(held, eventually, begun):
    """At 5/s with a capacity of 10, of 20 calls at once 10 are taken and 10 refused, with 0.2 s to the next place."""
    shaper = Shaper("5/s", capacity=10, store=MemoryStore(clock=held))
    refused = []
    for number in range(20):
        try:
            shaper.submit(begun.append, number)
        except RateLimited as error:
            refused.append(error.decision)
    assert len(refused) == 10
    assert {(one.limit, one.retry_after) for one in refused} == {(10, 0.2)}
    for taken in range(1, 11):
        eventually(lambda taken=taken: len(begun) == taken)
        held.advance(0.2)
    shaper.shutdown()
    assert begun == list(range(10))


def test_a_refused_call_is_taken_at_its_time_to_retry(held, eventually, begun):
    """With a full queue a call is refused one microsecond before `retry_after`, and taken then."""
    shaper = Shaper("5/s", capacity=3, store=MemoryStore(clock=held))
    for number in range(3):
        shaper.submit(begun.append, number)
    eventually(lambda: len(begun) == 1)
    held.advance(0.05)
    with pytest.raises(RateLimited) as refused:
        shaper.submit(begun.append, 3)
    held.advance(refused.value.retry_after - 0.000001)
    with pytest.raises(RateLimited):
        shaper.submit(begun.append, 3)
    held.advance(0.000001)
    shaper.submit(begun.append, 3)
    shaper.shutdown(cancel_futures=True)


def test_calls_that_were_late_do_not_come_together(held, eventually):
    """After a call that kept the only worker busy for 10 intervals, the next ones are an interval apart all the same."""
    ended = threading.Event()
    shaper = Shaper("10/s", store=MemoryStore(clock=held))
    starts = starts_of(shaper)
    shaper.submit(ended.wait, 30)
    calls = [shaper.submit(int) for _ in range(3)]
    eventually(lambda: shaper.queued == 3)
    held.advance(1)
    ended.set()
    eventually(lambda: held.advance(0.01) or all(call.done() for call in calls))
    shaper.shutdown()
    assert starts[0] == 0
    assert starts[1] >= 1000
    assert all(after - before >= 100 for before, after in itertools.pairwise(starts))


def test_workers_run_at_the_same_time(held, eventually):
    """With three workers three calls run at a time, the fourth starts when one of them ends."""
    ended = threading.Event()
    running = []

    def call() -> None:
        running.append(1)
        ended.wait(30)

    shaper = Shaper("1000/s", workers=3, store=MemoryStore(clock=held))
    for _ in range(4):
        shaper.submit(call)
    for taken in (1, 2, 3):
        eventually(lambda taken=taken: len(running) == taken)
        held.advance(0.001)
    held.advance(1)
    assert (len(running), shaper.queued) == (3, 1)
    ended.set()
    eventually(lambda: len(running) == 4)
    shaper.shutdown()


def test_a_cancelled_call_leaves_the_queue_and_the_others_move_up(held, eventually, begun):
    """Cancelling the second of four calls gives its place to the third: three calls start at 0, 1 and 2 s."""
    shaper = Shaper("1/s", capacity=4, store=MemoryStore(clock=held))
    starts = starts_of(shaper)
    calls = [shaper.submit(begun.append, number) for number in range(4)]
    eventually(lambda: len(begun) == 1)
    assert calls[1].cancel()
    assert shaper.queued == 2
    for taken in (2, 3):
        eventually(lambda taken=taken: len(held.sleeps) >= taken - 1)
        held.advance(1)
        eventually(lambda taken=taken: len(begun) == taken)
    shaper.shutdown()
    assert begun == [0, 2, 3]
    assert starts[-1] == 2000
    with pytest.raises(CancelledError):
        calls[1].result(0)


def test_cancelling_the_only_call_gives_its_start_back(held, eventually, begun):
    """A call that is cancelled while a worker waits for its start leaves the pace as if it had never been submitted."""
    store = MemoryStore(clock=held)
    shaper = Shaper("1/h", store=store)
    shaper.submit(begun.append, 0)
    call = shaper.submit(begun.append, 1)
    eventually(lambda: len(held.sleeps) == 1)
    limiter = Limiter(LeakyBucketQueue("1/h"), store, "shaper")
    assert limiter.peek("shaper").retry_after == 7200
    assert call.cancel()
    eventually(lambda: limiter.peek("shaper").retry_after == 3600)
    assert limiter.waiting() == 0
    shaper.shutdown()


def test_leaving_the_block_drains_the_queue(begun):
    """`with` ends when every call has run; afterwards the shaper takes none."""
    with Shaper("100/s", capacity=50, store=MemoryStore(clock=ManualClock(NOON))) as shaper:
        for number in range(50):
            shaper.submit_wait(begun.append, number)
    assert begun == list(range(50))
    assert threads_of("shaper") == []
    with pytest.raises(RuntimeError, match="is closed: it takes no more calls"):
        shaper.submit(begun.append, 51)


def test_closing_without_draining_is_prompt(held, eventually, begun):
    """`shutdown(cancel_futures=True)` ends although the next start is an hour away, cancels what waits, and gives the start
    back."""
    store = MemoryStore(clock=held)
    shaper = Shaper("1/h", store=store)
    calls = [shaper.submit(begun.append, number) for number in range(5)]
    eventually(lambda: len(held.sleeps) == 1)
    shaper.shutdown(cancel_futures=True)
    assert begun == [0]
    assert [call.cancelled() for call in calls] == [False, True, True, True, True]
    assert Limiter(LeakyBucketQueue("1/h"), store, "shaper").peek("shaper").retry_after == 3600


def test_an_exception_belongs_to_its_call(begun):
    """A call that raises has the exception as its result; those behind it start at their usual time."""
    with Shaper("100/s", store=MemoryStore(clock=ManualClock(NOON))) as shaper:
        failing = shaper.submit(lambda: 1 / 0)
        shaper.submit(begun.append, 1)
    assert isinstance(failing.exception(0), ZeroDivisionError)
    assert begun == [1]


def test_submit_wait_waits_for_room(held, eventually, begun):
    """With a full queue `submit_wait` returns when the first call has left it."""
    shaper = Shaper("1/s", capacity=2, store=MemoryStore(clock=held))
    submitted = []

    def submit_all() -> None:
        for number in range(5):
            shaper.submit_wait(begun.append, number)
            submitted.append(number)

    thread = threading.Thread(target=submit_all)
    thread.start()
    eventually(lambda: len(submitted) == 3)
    assert shaper.queued == 2
    for taken in (4, 5):
        eventually(lambda taken=taken: len(held.sleeps) >= taken - 3)
        held.advance(1)
        eventually(lambda taken=taken: len(submitted) == taken)
    thread.join(30)
    shaper.shutdown(cancel_futures=True)


def test_map_waits_for_room_and_keeps_the_order():
    """`map` over more values than the capacity returns all results in order."""
    with Shaper("100/s", capacity=5, workers=2, store=MemoryStore(clock=ManualClock(NOON))) as shaper:
        assert list(shaper.map(lambda a, b: a + b, range(40), range(40))) == [2 * number for number in range(40)]


def test_an_event_loop_can_run_its_blocking_calls_in_it():
    """`loop.run_in_executor(shaper, …)` awaits a call of the pool."""

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(shaper, abs, -number) for number in range(10)))

    with Shaper("100/s", store=MemoryStore(clock=ManualClock(NOON))) as shaper:
        assert asyncio.run(main()) == list(range(10))


def test_a_call_can_cost_more(begun):
    """With `cost=` a function of the arguments, a call keeps the next one waiting for as many intervals."""
    with Shaper("10/s", cost=len, store=MemoryStore(clock=ManualClock(NOON))) as shaper:
        starts = starts_of(shaper)
        for text in ("abc", "d", "ef", "g"):
            shaper.submit(begun.append, text)  # type: ignore[arg-type]
    assert begun == ["abc", "d", "ef", "g"]
    assert starts == [0, 300, 400, 600]


def test_a_call_that_can_never_fit_is_refused_at_once():
    """A cost above the capacity is refused for ever."""
    shaper = Shaper("10/s", capacity=5, cost=len)
    with pytest.raises(RateLimited, match="can never admit this cost: its limit is 5"):
        shaper.submit(str.upper, "abcdef")
    assert threads_of("shaper") == []


def test_a_store_that_fails_fails_the_call():
    """A call for which the store can't decide a start has the store's error as its result; the next one starts."""
    store = WrappedStore(MemoryStore(clock=ManualClock(NOON)), local=True)
    store.failing.add("decide")
    with Shaper("10/s", store=store) as shaper:
        failed = shaper.submit(int)
        assert isinstance(failed.exception(30), StoreUnavailable)
        store.failing.clear()
        assert shaper.submit(int).result(30) == 0


def test_a_store_that_refuses_fails_the_call():
    """A guarded store that fails closed refuses: the call has the refusal as its result, and the worker continues."""
    inner = WrappedStore(MemoryStore(clock=ManualClock(NOON)), local=True)
    inner.failing.add("decide")
    store = GuardedStore(inner, on_failure="closed")
    with Shaper("10/s", store=store) as shaper:
        assert [type(shaper.submit(int).exception(30)) for _ in range(3)] == [RateLimited] * 3


def test_a_shaper_without_a_reference_drains_and_ends_its_threads(held, eventually, begun):
    """A shaper that is garbage collected still runs what was submitted, and then its threads end."""
    shaper = Shaper("1/s", store=MemoryStore(clock=held), name="forgotten")
    shaper.submit(begun.append, 0)
    shaper.submit(begun.append, 1)
    gone = weakref.ref(shaper)
    del shaper
    gc.collect()
    assert gone() is None
    eventually(lambda: len(held.sleeps) == 1)
    held.advance(1)
    eventually(lambda: threads_of("forgotten") == [])
    assert begun == [0, 1]


def test_a_worker_that_could_not_be_started_is_started_by_the_next_call(begun):
    """Where the system has no room for a thread `submit` raises its error; once it has, all calls run, and the shaper ends."""
    shaper = Shaper("1000/s", store=MemoryStore(clock=ManualClock()))
    with no_room_for_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        shaper.submit(begun.append, 1)
    shaper.submit(begun.append, 2).result(30)
    shaper.shutdown()
    assert begun == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_starts_with_an_empty_queue(python):
    """After a fork the child has none of the parent's calls, and can submit its own."""
    done = python("""
        import os, warnings
        warnings.simplefilter("ignore")
        from limitkeeper.concurrency import Shaper
        shaper = Shaper("1/h")
        shaper.submit(int)
        waiting = shaper.submit(print, "parent")
        child = os.fork()
        if child == 0:
            empty = shaper.queued == 0
            other = Shaper("1000/s")
            os._exit(0 if empty and other.submit(int).result(30) == 0 else 1)
        _, status = os.waitpid(child, 0)
        shaper.shutdown(cancel_futures=True)
        print(os.waitstatus_to_exitcode(status), waiting.cancelled())
    """)
    assert done.stdout.split() == ["0", "True"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("100/s",), {"workers": 0}, "workers must be between 1 and"),
        (("100/s",), {"workers": -1}, "workers must be between 1 and"),
        (("100/s", 0), {}, "capacity must be between 1 and"),
        (("100/s", True), {}, "capacity must be a whole number, got True"),
        ((5,), {}, "expected a rate or a limit, got 5"),
    ],
)
def test_bad_sizes_are_refused(arguments, options, message):
    """Zero, negative and other invalid sizes raise InvalidLimit."""
    with pytest.raises(InvalidLimit, match=message):
        Shaper(*arguments, **options)


def test_its_text_shows_what_waits():
    """`repr` shows the limit and how much of the capacity is in use."""
    assert repr(Shaper("100/s", 500)) == "<Shaper 'shaper': leaky bucket queue 100/s, 0 of 500 queued>"
    assert repr(Shaper("100/s", name="mail")) == "<Shaper 'mail': leaky bucket queue 100/s, 0 queued>"


def test_held_clock_is_the_clock_of_the_store(held):
    """The worker sleeps on the clock of the store, and on no other."""
    assert isinstance(held, HeldClock)
    shaper = Shaper("1/h", store=MemoryStore(clock=held))
    shaper.submit(int)
    call = shaper.submit(int)
    with pytest.raises(TimeoutError):
        call.result(0.05)
    held.advance(3600)
    assert call.result(30) == 0
    shaper.shutdown()


def test_every_call_that_was_taken_and_not_cancelled_runs_once():
    """Six threads submit, wait and cancel at random: each call either ran once, was refused or was cancelled, and none waits."""
    shaper = Shaper("100000/s", capacity=20, workers=4)
    ran: list[tuple[int, int]] = []
    taken: list[tuple[int, int]] = []

    def caller(who: int) -> None:
        choice = random.Random(who)
        for number in range(100):
            try:
                submit = shaper.submit_wait if choice.random() < 0.5 else shaper.submit
                call = submit(ran.append, (who, number))
            except RateLimited:
                continue
            if not (choice.random() < 0.3 and call.cancel()):
                taken.append((who, number))

    threads = [threading.Thread(target=caller, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    shaper.shutdown()
    assert sorted(ran) == sorted(taken)
    assert shaper.queued == 0


def test_a_cancelled_call_is_done_for_those_that_wait_for_it():
    """`concurrent.futures.wait` returns for a call that was cancelled in the queue, by its caller or by a shutdown."""
    shaper = Shaper("1/h")
    first, second, third = (shaper.submit(int) for _ in range(3))
    assert first.result(30) == 0
    assert second.cancel()
    assert wait([second], timeout=30).not_done == set()
    shaper.shutdown(cancel_futures=True)
    assert wait([third], timeout=30).not_done == set()
