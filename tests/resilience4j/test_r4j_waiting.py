"""Callers that wait, leave, and come back: threads and tasks."""

import asyncio
import os
import threading
import time

import pytest

from limitkeeper import MemoryStore
from limitkeeper.resilience4j import AcquirePermissionCancelled, RateLimiter, RateLimiterConfig, RequestNotPermitted
from limitkeeper.testing import ManualClock


def manual(timeout="10s", initial=0, limit=10):
    clock = ManualClock()
    config = RateLimiterConfig(limit, "1s", timeout, initial_permits=initial)
    return RateLimiter("backend", config, store=MemoryStore(clock=clock)), clock


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_hundred_threads_get_exactly_what_is_there():
    """Never one permission more, however many callers at once."""
    limiter, _ = manual(timeout=0, initial=50, limit=50)
    got, ready = [], threading.Barrier(100)

    def ask():
        ready.wait(60)
        got.append(limiter.acquire_permission())

    threads = [threading.Thread(target=ask) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got.count(True) == 50
    assert len(got) == 100


def test_draining_while_others_take_counts_every_permission_once():
    """Drained and taken permissions add up to the available ones."""
    limiter, _ = manual(timeout=0, initial=1000, limit=1000)
    taken, drained = [], []

    def take():
        while limiter.acquire_permission():
            taken.append(1)

    takers = [threading.Thread(target=take) for _ in range(4)]
    for thread in takers:
        thread.start()
    drained.append(limiter.drain_permissions())
    for thread in takers:
        thread.join(60)
    assert len(taken) + sum(drained) == 1000


def test_waiting_callers_are_counted_in_real_time():
    """number_of_waiting_threads counts sleeping callers, those with a cancellation event too."""
    limiter = RateLimiter("backend", RateLimiterConfig(10, "1s", "10s", initial_permits=0))
    cancel = threading.Event()
    limiter.reserve_permission(10)
    threads = [
        threading.Thread(target=limiter.acquire_permission),
        threading.Thread(target=limiter.acquire_permission, args=(1, cancel)),
    ]
    for thread in threads:
        thread.start()
    until(lambda: limiter.metrics.number_of_waiting_threads == 2)
    cancel.set()
    for thread in threads:
        thread.join(60)
    assert limiter.metrics.number_of_waiting_threads == 0


def test_a_cancelled_wait_ends_at_once_and_gives_back_in_real_time():
    """Setting the event ends a wait of an hour; the reserved permissions are available again."""
    limiter = RateLimiter("backend", RateLimiterConfig(1, "1h", "2h", initial_permits=0))
    cancel, ended = threading.Event(), []

    def wait():
        with pytest.raises(AcquirePermissionCancelled, match="cancelled while waiting; nothing was taken"):
            limiter.wait_for_permission(cancel=cancel)
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: limiter.metrics.number_of_waiting_threads == 1)
    assert limiter.metrics.available_permissions == -1
    cancel.set()
    thread.join(60)
    assert ended == [True]
    assert limiter.metrics.available_permissions == 0


def test_a_leaving_waiter_lets_the_others_move_up_in_real_time():
    """A waiter behind a cancelled one gets its place: a fifth of a second instead of forty."""
    limiter = RateLimiter("backend", RateLimiterConfig(200, "40s", "1min", initial_permits=0))
    cancel, took = threading.Event(), []

    def behind():
        started = time.monotonic()
        assert limiter.acquire_permission()
        took.append(time.monotonic() - started)

    first = threading.Thread(target=limiter.acquire_permission, args=(200, cancel))
    first.start()
    until(lambda: limiter.metrics.number_of_waiting_threads == 1)
    second = threading.Thread(target=behind)
    second.start()
    until(lambda: limiter.metrics.number_of_waiting_threads == 2)
    cancel.set()
    first.join(60)
    second.join(60)
    assert took[0] < 20


def test_reservations_of_others_stay_when_a_waiter_leaves():
    """A reservation can't be notified of an earlier start, so its place stays, and the one before it is not given away."""

    class Leaving(ManualClock):
        def sleep(self, seconds, wake=None):
            promised.append(limiter.reserve_permission())
            wake.set()

    promised = []
    limiter = RateLimiter("backend", RateLimiterConfig(10, "1s", "1s", initial_permits=0), store=MemoryStore(clock=Leaving()))
    assert not limiter.acquire_permission(1, threading.Event())
    assert promised == [200_000_000]
    assert limiter.reserve_permission() == 300_000_000


def test_cancelled_before_the_call_nothing_is_taken():
    """An event that is set already is a refusal; acquire_permission returns False, as Resilience4j does for an interrupt."""
    limiter, clock = manual(initial=5)
    cancel = threading.Event()
    assert limiter.acquire_permission(2, cancel)
    cancel.set()
    assert not limiter.acquire_permission(2, cancel)
    with pytest.raises(AcquirePermissionCancelled, match="cancelled before the call"):
        limiter.wait_for_permission(2, cancel)
    assert limiter.metrics.available_permissions == 3
    assert clock.now_us() == 0


def test_an_event_that_is_never_set_changes_nothing():
    """With an event waits, refusals and errors are the same as without."""
    limiter, clock = manual(timeout="500ms")
    never = threading.Event()
    assert limiter.acquire_permission(3, never)
    assert clock.now_us() == 300_000
    assert not limiter.acquire_permission(6, never)
    with pytest.raises(RequestNotPermitted):
        limiter.acquire_permission(11, never)
    assert clock.now_us() == 300_000


def test_an_interrupted_sleep_gives_back():
    """Ctrl-C while waiting: the permissions are available again, the interrupt propagates, and a failure event is published."""

    class Interrupting(ManualClock):
        def sleep(self, seconds, wake=None):
            raise KeyboardInterrupt

    for cancel in (None, threading.Event()):
        limiter = RateLimiter("b", RateLimiterConfig(1, "1s", "9s"), store=MemoryStore(clock=Interrupting()))
        received = []
        limiter.event_publisher.on_event(lambda event: received.append(str(event.event_type)))  # noqa: B023
        limiter.acquire_permission()
        with pytest.raises(KeyboardInterrupt):
            limiter.acquire_permission(1, cancel)
        assert limiter.metrics.available_permissions == 0
        assert limiter.metrics.nanos_to_wait == 1_000_000_000
        assert limiter.metrics.number_of_waiting_threads == 0
        assert received == ["SUCCESSFUL_ACQUIRE", "FAILED_ACQUIRE"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_no_waiters():
    """Waiters of the parent do not wait in the child."""
    limiter = RateLimiter("backend", RateLimiterConfig(1, "1h", "2h", initial_permits=0))
    cancel = threading.Event()
    thread = threading.Thread(target=limiter.acquire_permission, args=(1, cancel))
    thread.start()
    until(lambda: limiter.metrics.number_of_waiting_threads == 1)
    child = os.fork()
    if child == 0:
        os._exit(limiter.metrics.number_of_waiting_threads)
    status = os.waitpid(child, 0)[1]
    cancel.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_changed_timeout_leaves_waiters_alone(held):
    """A caller that already waits keeps its place."""
    limiter = RateLimiter("backend", RateLimiterConfig(10, "1s", "10s", initial_permits=0), store=MemoryStore(clock=held))
    got = []
    thread = threading.Thread(target=lambda: got.append(limiter.acquire_permission(2)))
    thread.start()
    until(lambda: limiter.metrics.number_of_waiting_threads == 1)
    limiter.change_timeout_duration(0)
    limiter.change_limit_for_period(9)
    assert limiter.metrics.number_of_waiting_threads == 1
    held.advance(0.2)
    thread.join(60)
    assert got == [True]


def test_the_async_face_takes_from_the_same_permissions():
    """Tasks and threads share one bucket; waiting and refusing are the same."""
    limiter, clock = manual(timeout="300ms", initial=2)

    async def main():
        assert await limiter.acquire_permission_async()
        assert limiter.acquire_permission()
        assert await limiter.acquire_permission_async(3)
        assert clock.now_us() == 300_000
        assert not await limiter.acquire_permission_async(4)
        assert await limiter.reserve_permission_async(2) == 200_000_000
        assert await limiter.reserve_permission_async(2) == -1
        with pytest.raises(RequestNotPermitted):
            await limiter.wait_for_permission_async(4)
        for verb in (limiter.acquire_permission_async, limiter.reserve_permission_async):
            with pytest.raises(RequestNotPermitted, match="never"):
                await verb(11)

    asyncio.run(main())
    assert limiter.metrics.available_permissions == -2


def test_the_async_face_drains():
    """As drain_permissions does."""
    limiter, _ = manual(initial=4)
    assert asyncio.run(limiter.drain_permissions_async()) == 4
    assert limiter.metrics.available_permissions == 0


def test_a_cancelled_task_gives_back_and_stays_cancelled():
    """CancelledError propagates unchanged, and the permissions are available again."""
    limiter = RateLimiter("backend", RateLimiterConfig(1, "1h", "2h", initial_permits=0))
    received = []
    limiter.event_publisher.on_event(lambda event: received.append(str(event.event_type)))

    async def main():
        task = asyncio.create_task(limiter.acquire_permission_async())
        await asyncio.sleep(0.01)
        assert limiter.metrics.number_of_waiting_threads == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await limiter.wait_for_permission_async()

    asyncio.run(main())
    assert limiter.metrics.available_permissions == 0
    assert received == ["FAILED_ACQUIRE", "FAILED_ACQUIRE"]


def test_it_works_in_one_event_loop_after_another():
    """Nothing is bound to the first loop."""
    limiter, clock = manual(timeout="1s")
    for _ in range(2):
        assert asyncio.run(limiter.acquire_permission_async())
    assert clock.now_us() == 200_000
