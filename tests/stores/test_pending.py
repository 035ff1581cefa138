"""Pending: a value that one thread gets and others wait for, whatever a signal handler interrupts."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from limitkeeper import StoreTimeout
from limitkeeper.clock import SYSTEM
from limitkeeper.stores.sans_io import LeftOnLoop, Pending, WakeEvent, arun, left_of


class Interrupted(Exception):
    pass


def test_every_waiter_gets_the_value() -> None:
    """Threads that wait for one value all get it."""
    pending, found = Pending(), []
    threads = [threading.Thread(target=lambda: found.append(pending.result(60))) for _ in range(5)]
    for thread in threads:
        thread.start()
    pending.finish("value")
    for thread in threads:
        thread.join()
    assert found == ["value"] * 5


def test_tasks_of_any_loop_get_the_value() -> None:
    """Tasks that wait for a value from a thread all get it."""
    pending = Pending()

    async def main() -> list[object]:
        waiters = [asyncio.create_task(pending.aresult(60)) for _ in range(5)]
        await asyncio.sleep(0)
        threading.Thread(target=pending.finish, args=("value",)).start()
        return await asyncio.gather(*waiters)

    assert asyncio.run(main()) == ["value"] * 5


def test_a_waiter_whose_time_is_over_gets_a_timeout() -> None:
    """After its timeout a waiter gets StoreTimeout as the value."""
    assert isinstance(Pending().result(0.0), StoreTimeout)
    assert isinstance(asyncio.run(Pending().aresult(0.0)), StoreTimeout)


def test_waiters_see_the_value_though_nothing_woke_them() -> None:
    """A signal handler raised in `finish` before the waiters were woken."""
    pending = Pending()

    def interrupt() -> None:
        raise Interrupted

    pending._wakers.append(interrupt)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(pending.result(60)), daemon=True)
    thread.start()
    while len(pending._wakers) < 2:
        pass
    pending._wakers.reverse()
    with pytest.raises(Interrupted):
        pending.finish("value")
    thread.join(30)
    assert found == ["value"]


def test_a_wait_that_is_over_before_it_begins_ends() -> None:
    """Events that are never set, and values that never come, with timeouts that may be over before their thread waits: threads
    that switch all the time wait thousands of times, and none for ever."""
    done = []

    def work() -> None:
        for _ in range(3000):
            WakeEvent().wait(1e-6)
            Pending().result(1e-6)
        done.append(1)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 3


def test_one_set_wakes_every_waiter_of_a_wake_event() -> None:
    """A waiter passes the wake on, and none sees the event unset meanwhile."""
    event, found = WakeEvent(), []
    threads = [threading.Thread(target=lambda: found.append((event.wait(60), event.is_set()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join(60)
    assert found == [(True, True)] * 8
    event.clear()
    assert not event.wait(0)


class Counted(Pending):
    """Fails where it is looked at again and again in one iteration of the event loop."""

    looks = 0

    async def aresult(self, timeout: float | None = None) -> object:
        self.looks += 1
        assert self.looks < 100
        return await super().aresult(timeout)

    await_ = aresult


@pytest.mark.parametrize("failed", [True, False], ids=["its value", "no value"])
@pytest.mark.parametrize("left_s", [0.0, 0.05])
def test_a_late_event_loop_does_not_spin_on_a_timeout(failed: bool, left_s: float) -> None:
    """Callbacks have kept the loop busy when a wait with a budget ends in StoreTimeout, as the error of a failed batch or because
    its time is over: the task yields until the overdue timers have run, and is answered."""
    pending = Counted()

    async def main() -> object:
        now = asyncio.get_running_loop().time
        end = now() + left_s
        left = LeftOnLoop(lambda: end - now())
        if failed:
            pending.finish(StoreTimeout("the batch failed"))
        time.sleep(0.02)
        try:
            return await left.wait_for(pending)
        finally:
            left.stop()

    assert isinstance(asyncio.run(main()), StoreTimeout)


def test_tasks_with_work_of_their_own_are_answered_when_a_batch_fails() -> None:
    """Ten tasks wait for one batch within a budget, each is busy for a millisecond after it: all get the error of the batch."""
    pending = Counted()

    async def waiter() -> object:
        answer = await arun(wait_for_it(), left=left_of(1, 30_000, SYSTEM))
        time.sleep(0.001)
        return answer

    def wait_for_it() -> object:
        return (yield pending)

    async def main() -> list[object]:
        tasks = [asyncio.ensure_future(waiter()) for _ in range(10)]
        await asyncio.sleep(0.001)
        pending.looks = -1000
        pending.finish(StoreTimeout("the batch failed"))
        return await asyncio.gather(*tasks)

    assert [type(answer) for answer in asyncio.run(main())] == [StoreTimeout] * 10
