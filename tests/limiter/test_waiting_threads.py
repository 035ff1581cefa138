"""Threads that wait: in order, each key on its own, and an interrupted thread gives its place back."""

from __future__ import annotations

import threading

import pytest

from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    RateLimited,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.testing import ManualClock


class Waiters:
    """Threads that call acquire one after the other and record how it ended."""

    def __init__(self, limiter, eventually):
        self.limiter = limiter
        self.eventually = eventually
        self.ends = []
        self.threads = {}

    def call(self, name, key="a", **options):
        def run():
            try:
                self.ends.append((name, bool(self.limiter.acquire(key, **options))))
            except BaseException as error:
                self.ends.append((name, type(error)))

        waiting = self.limiter.waiting() + 1
        ended = len(self.ends)
        thread = self.threads[name] = threading.Thread(target=run)
        thread.start()
        self.eventually(lambda: self.limiter.waiting() >= waiting or len(self.ends) > ended)

    def asleep(self, sleeps):
        """Waits until so many sleeps have begun in all, those restarted by moving up included."""
        self.eventually(lambda: len(self.limiter.store.clock.sleeps) == sleeps)

    def ended(self, *expected):
        self.eventually(lambda: len(self.ends) >= len(expected))
        assert self.ends == list(expected)


@pytest.fixture
def start_waiters(held, eventually):
    """Starts threads that wait for a limiter, and ends them after the test."""
    made = []

    def build(limits, store=None):
        found = Waiters(Limiter(limits, store=MemoryStore(clock=held) if store is None else store), eventually)
        made.append(found)
        return found

    yield build
    for found in made:
        for _ in range(50):
            if any(thread.is_alive() for thread in found.threads.values()):
                held.advance(86400)
                threading.Event().wait(0.01)
        for thread in found.threads.values():
            thread.join(60)


ONE_A_SECOND = [
    TokenBucket("1/s"),
    LeakyBucket("1/s", 1),
    LeakyBucketQueue("1/s"),
    FixedWindow("1/s"),
    FixedWindow("1/s", align="first"),
    SlidingWindowLog("1/s"),
]
each = pytest.mark.parametrize("limit", ONE_A_SECOND, ids=str)


@each
def test_threads_are_served_in_order_of_arrival(limit, start_waiters, held):
    """Three waiting threads get one start each second, first come, first served."""
    found = start_waiters(limit)
    found.limiter.acquire("a")
    for name in ("first", "second", "third"):
        found.call(name)
    assert found.limiter.waiting("a") == 3
    for count in (1, 2, 3):
        held.advance(1)
        found.ended(*[("first", True), ("second", True), ("third", True)][:count])


@each
def test_an_interrupted_thread_gives_its_place_back(limit, start_waiters, held):
    """KeyboardInterrupt during the sleep propagates, and the key is as if the thread had never called."""
    found = start_waiters(limit)
    found.limiter.acquire("a")
    before = found.limiter.peek("a")
    found.call("first")
    held.interrupt(found.threads["first"])
    found.ended(("first", KeyboardInterrupt))
    assert found.limiter.peek("a") == before
    assert found.limiter.waiting() == 0


@each
def test_those_behind_an_interrupted_thread_move_up(limit, start_waiters, held):
    """When the first of three leaves, the others start a second earlier, still in order."""
    found = start_waiters(limit)
    found.limiter.acquire("a")
    for name in ("first", "second", "third"):
        found.call(name)
    held.interrupt(found.threads["first"])
    found.ended(("first", KeyboardInterrupt))
    found.asleep(3 + 1)
    assert held.sleeps[3:] == [1.0]
    held.advance(1)
    found.ended(("first", KeyboardInterrupt), ("second", True))
    found.asleep(3 + 2)
    assert held.sleeps[4:] == [1.0]
    held.advance(1)
    found.ended(("first", KeyboardInterrupt), ("second", True), ("third", True))


@each
def test_an_interrupted_one_in_the_middle_does_not_hurt_those_ahead(limit, start_waiters, held):
    """When the second of three leaves, the first keeps its start and the third takes the second's."""
    found = start_waiters(limit)
    found.limiter.acquire("a")
    for name in ("first", "second", "third"):
        found.call(name)
    held.interrupt(found.threads["second"])
    found.ended(("second", KeyboardInterrupt))
    held.advance(1)
    found.ended(("second", KeyboardInterrupt), ("first", True))
    found.asleep(3 + 1)
    assert held.sleeps[3:] == [1.0]
    held.advance(1)
    found.ended(("second", KeyboardInterrupt), ("first", True), ("third", True))


def test_a_waiting_thread_is_in_the_numbers(start_waiters, held):
    """`stats().waiting` and `waiting()` count sleeping callers, and none when all are gone."""
    found = start_waiters("1/s")
    found.limiter.acquire("a")
    found.call("first")
    found.call("second", key="b", cost=1)
    found.ended(("second", True))
    assert (found.limiter.stats().waiting, found.limiter.waiting("a"), found.limiter.waiting("b")) == (1, 1, 0)
    held.advance(1)
    found.ended(("second", True), ("first", True))
    assert found.limiter.stats().waiting == 0


def test_one_key_never_waits_for_another(start_waiters):
    """While ten threads wait on one key, another key is served at once."""
    found = start_waiters("1/h")
    found.limiter.acquire("a")
    for number in range(10):
        found.call(number)
    assert found.limiter.waiting() == 10
    assert found.limiter.acquire("b", timeout=0).wait == 0.0


def test_a_deadline_holds_while_the_line_moves_up(start_waiters, held):
    """A thread that could not be served in time is refused at once, though the queue might have moved up later."""
    found = start_waiters("1/s")
    found.limiter.acquire("a")
    found.call("first")
    found.call("second", timeout=1.5)
    found.ended(("second", RateLimited))


def test_limiters_of_one_name_on_one_store_share_the_line(start_waiters, held):
    """A caller that leaves a limiter lets waiters of another limiter of the same name and store move up."""
    store = MemoryStore(clock=held)
    one, two = start_waiters("1/s", store=store), start_waiters("1/s", store=store)
    one.limiter.acquire("a")
    one.call("first")
    two.call("second")
    held.interrupt(one.threads["first"])
    one.ended(("first", KeyboardInterrupt))
    one.asleep(2 + 1)
    held.advance(1)
    two.ended(("second", True))


def test_a_sleep_that_raises_gives_the_place_back(store, clock):
    """Whatever exception ends the sleep, the place is given back and the exception propagates."""

    class Failing(ManualClock):
        def sleep(self, seconds, wake=None):
            raise KeyboardInterrupt

    limiter = Limiter(TokenBucket("1/s"), store=MemoryStore(clock=Failing(1000.0)))
    limiter.hit("a")
    before = limiter.peek("a")
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            limiter.acquire("a")
    assert limiter.peek("a") == before


# The sliding counter can't reserve: its waiters wait in a queue and ask again.


def test_counter_threads_are_served_in_order_of_arrival(start_waiters, held):
    """Threads on a sliding counter are served first come, first served, each as soon as the weight allows."""
    found = start_waiters(SlidingWindowCounter("1/s"))
    found.limiter.acquire("a")
    for name in ("first", "second", "third"):
        found.call(name)
    assert found.limiter.waiting("a") == 3
    for count in (1, 2, 3):
        held.advance(2)
        found.ended(*[("first", True), ("second", True), ("third", True)][:count])
    assert found.limiter.waiting() == 0


def test_a_counter_thread_that_is_interrupted_lets_the_next_one_ask(start_waiters, held):
    """When the first in the queue is interrupted, the second is first and is served at the same moment."""
    found = start_waiters(SlidingWindowCounter("1/s"))
    found.limiter.acquire("a")
    for name in ("first", "second"):
        found.call(name)
    held.interrupt(found.threads["first"])
    found.ended(("first", KeyboardInterrupt))
    found.asleep(1 + 1)
    held.advance(2)
    found.ended(("first", KeyboardInterrupt), ("second", True))


@pytest.mark.parametrize("method", ["enter", "leave"])
@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
def test_a_counter_call_that_is_interrupted_keeps_no_other_from_its_turn(method, after, store, monkeypatch):
    """A signal handler raises where a call enters or leaves the queue of its key: the queue is empty then."""
    limiter = Limiter(SlidingWindowCounter("10/min"), store=store)
    with monkeypatch.context() as patch:
        inner = getattr(limiter._gate, method)

        def interrupted(*args):
            patch.undo()
            if after:
                inner(*args)
            raise KeyboardInterrupt

        patch.setattr(limiter._gate, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            limiter.acquire("a")
    assert limiter.waiting("a") == 0
    assert limiter.acquire("a", timeout=0)


def test_a_counter_deadline_before_the_promise_refuses_at_once(start_waiters):
    """On a sliding counter too, a deadline before the promised moment refuses at once, also behind others."""
    found = start_waiters(SlidingWindowCounter("1/s"))
    found.limiter.acquire("a")
    found.call("first")
    found.call("second", timeout=1.9)
    found.ended(("second", RateLimited))
    assert found.limiter.waiting() == 1


def test_a_counter_deadline_that_passes_in_line_refuses(start_waiters, held):
    """A caller whose deadline can't be met any more when it is first is refused, and took nothing."""
    found = start_waiters(SlidingWindowCounter("1/s"))
    found.limiter.acquire("a")
    found.call("first")
    found.call("second", timeout=3)
    held.advance(2)
    found.ended(("first", True), ("second", RateLimited))
    assert found.limiter.peek("a").retry_after == 2.0


def test_a_deadline_in_line_is_measured_by_the_stores_clock(start_waiters, held):
    """When the store's clock passes a waiting caller's deadline, it is refused, though it is not first in the queue."""
    found = start_waiters(SlidingWindowCounter("2/s"))
    found.limiter.acquire("a", cost=2)
    found.call("first", cost=2)
    found.call("second", timeout=40)
    for _ in range(41):  # a hit outside the queue takes what becomes free, so the first waiter is never served
        held.advance(1)
        found.limiter.hit("a")
    found.ended(("second", RateLimited))


def test_one_counter_key_never_waits_for_another(start_waiters):
    """A queue on one key of a counter does not delay another key."""
    found = start_waiters(SlidingWindowCounter("1/h"))
    found.limiter.acquire("a")
    found.call("first")
    assert found.limiter.acquire("b", timeout=0).wait == 0.0
