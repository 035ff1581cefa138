"""The leaky bucket, meter and queue, with the numbers of the five texts that the project started from."""

from __future__ import annotations

import threading

import pytest

from limitkeeper import LeakyBucket, LeakyBucketQueue, Limiter, MemoryStore, RateLimited
from limitkeeper.concurrency import shape


def waits(limiter, count):
    """How long each of `count` callers at once would wait; None for the refused."""
    found = [limiter.reserve("work") for _ in range(count)]
    return [each.wait if each else None for each in found]


def test_three_a_second_never_wait(clock, store):
    """Leak rate 5/s, size 10: 3 requests a second are processed immediately, without delay."""
    limiter = Limiter(LeakyBucketQueue("5/s", capacity=10), store=store)
    for _ in range(30):
        assert limiter.acquire("work").wait == 0.0
        clock.advance(1 / 3)


def test_ten_at_once_are_all_taken_and_leave_every_200_ms(store):
    """10 requests at once fit into a bucket of 10 and wait 0, 0.2 … 1.8 s."""
    limiter = Limiter(LeakyBucketQueue("5/s", capacity=10), store=store)
    assert waits(limiter, 10) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8]


def test_five_are_processed_in_the_first_second_and_five_in_the_second(store):
    """Of 10 at once, second 1 processes 5 while 5 wait, and second 2 processes the rest."""
    limiter = Limiter(LeakyBucketQueue("5/s", capacity=10), store=store)
    found = waits(limiter, 10)
    assert [sum(int(wait) == second for wait in found) for second in (0, 1)] == [5, 5]


def test_of_twenty_at_once_ten_fit_and_ten_are_refused(store):
    """20 requests instantly: only 10 fit, the remaining 10 are refused, and the last taken waits 1.8 s."""
    limiter = Limiter(LeakyBucketQueue("5/s", capacity=10), store=store)
    found = waits(limiter, 20)
    assert found[9] == 1.8
    assert found[10:] == [None] * 10


def test_the_meter_takes_ten_of_twenty_at_once(store):
    """The meter admits while water + 1 ≤ capacity: 10 of 20, at once and without any wait."""
    limiter = Limiter(LeakyBucket("5/s", capacity=10), store=store)
    assert [bool(limiter.hit("work")) for _ in range(20)] == [True] * 10 + [False] * 10


def test_the_meter_drains_one_unit_every_200_ms(clock, store):
    """water = max(0, water − leaked): a full meter takes the next one after 200 ms."""
    limiter = Limiter(LeakyBucket("5/s", capacity=10), store=store)
    limiter.hit("work", cost=10)
    clock.advance(0.2)
    assert [bool(limiter.hit("work")) for _ in range(2)] == [True, False]


def test_one_drop_every_10_ms(store):
    """A leak of one drop every 10 ms lets a thousand at once out over 9.99 s, evenly."""
    limiter = Limiter(LeakyBucketQueue("1/10ms"), store=store)
    found = waits(limiter, 1000)
    assert found == [number / 100 for number in range(1000)]


def test_no_burst_gets_through_faster_than_the_leak(clock, store):
    """However long it was idle, a queue lets only one out now: the next comes 10 ms later."""
    limiter = Limiter(LeakyBucketQueue("1/10ms", capacity=100), store=store)
    clock.advance(3600)
    assert waits(limiter, 3) == [0.0, 0.01, 0.02]


def test_an_unlimited_bucket_refuses_no_call(store):
    """LeakyBucketLimiter has unlimited capacity: the ten-thousandth caller at once is taken, and waits 1999.8 s."""
    limiter = Limiter(LeakyBucketQueue("5/s"), store=store)
    assert waits(limiter, 10_000)[-1] == 1999.8


def test_a_cost_of_n_takes_n_intervals(store):
    """A leaky bucket's outflow is always one: a cost of 3 keeps the next caller waiting for 3 intervals."""
    limiter = Limiter(LeakyBucketQueue("5/s", capacity=10), store=store)
    assert limiter.reserve("work", cost=3).wait == 0.0
    assert limiter.reserve("work").wait == 0.6


def test_a_kafka_consumer_hands_over_all_of_1000_messages_at_100_a_second(clock, store, eventually):
    """1000 messages at once, leak 100/s, size 500: 500 are read ahead, the others wait in the topic, and all leave, one every
    10 ms. (`test_source_kafka.py` does the same with a broker and a database.)"""
    begun = clock.now_us()
    topic = iter(range(1000))
    starts = []
    with shape(topic, "100/s", capacity=500, store=store) as messages:
        for number, message in enumerate(messages):
            assert message == number
            starts.append(clock.now_us() - begun)
            if number < 500:
                eventually(lambda left=999 - number: messages.queued == min(500, left))
            assert messages.queued <= 500
    assert starts == [number * 10_000 for number in range(1000)]


def test_the_database_sees_at_most_100_writes_in_every_second(store):
    """In every half-open second at most 100 of the 1000 messages start: a steady flow without a spike."""
    starts = []
    messages = shape(range(1000), "100/s", capacity=500, store=store)
    messages.events.on("allowed", lambda event: starts.append(event.decision.start_us))
    assert len(list(messages)) == 1000
    assert all(later - earlier >= 1_000_000 for earlier, later in zip(starts, starts[100:], strict=False))


def test_a_source_that_can_not_wait_is_refused_beyond_500(store):
    """Calls that can't wait are refused: of 1000 at once 500 are taken, and the last starts after 4.99 s."""
    limiter = Limiter(LeakyBucketQueue("100/s", capacity=500), store=store)
    found = waits(limiter, 1000)
    assert found[:500] == [number / 100 for number in range(500)]
    assert found[500:] == [None] * 500


# The synchronous leaky bucket: callers block for their interval, and above a maximum they are refused at once.


def test_callers_at_0_0_and_30_ms_wait_0_100_and_170_ms(clock, store):
    """Interval 100 ms: callers at 0, 0 and 30 ms wait 0, 100 and 170 ms."""
    limiter = Limiter(LeakyBucketQueue("1/100ms"), store=store)
    first, second = limiter.reserve("work"), limiter.reserve("work")
    clock.advance(0.03)
    third = limiter.reserve("work")
    assert [first.wait, second.wait, third.wait] == [0.0, 0.1, 0.17]


@pytest.fixture
def blocked(held, eventually):
    """A synchronous leaky bucket of 100 ms with room for 3, and two threads that wait in it."""
    limiter = Limiter(LeakyBucketQueue("1/100ms", capacity=3), store=MemoryStore(clock=held))
    limiter.acquire("work")
    done = []

    def caller(name):
        done.append((name, limiter.acquire("work").wait))

    threads = []
    for name, pause in (("second", 0.0), ("third", 0.03)):
        held.advance(pause)
        threads.append(threading.Thread(target=caller, args=(name,)))
        threads[-1].start()
        eventually(lambda: limiter.waiting() == len(threads))
    yield limiter, done
    held.advance(60)
    for thread in threads:
        thread.join(5)


def test_blocked_callers_are_counted_in_public(blocked):
    """`limiter.waiting()` is the number of blocked callers, for all keys and for one."""
    limiter, _ = blocked
    assert (limiter.waiting(), limiter.waiting("work"), limiter.waiting("other")) == (2, 2, 0)


def test_beyond_the_maximum_a_caller_is_refused_at_once(blocked, held):
    """With one leaving and two blocked the bucket of 3 is full: the next caller is refused without sleeping."""
    limiter, _ = blocked
    slept = len(held.sleeps)
    with pytest.raises(RateLimited):
        limiter.acquire("work")
    assert len(held.sleeps) == slept
    assert limiter.waiting() == 2


def test_blocked_threads_leave_one_per_interval_in_order(blocked, held, eventually):
    """The blocked callers leave at 100 and 200 ms, in order of arrival."""
    limiter, done = blocked
    held.advance(0.069999)
    assert done == []
    held.advance(0.000001)
    eventually(lambda: done == [("second", 0.1)])
    assert limiter.waiting() == 1
    held.advance(0.1)
    eventually(lambda: done == [("second", 0.1), ("third", 0.17)])
    eventually(lambda: limiter.waiting() == 0)
