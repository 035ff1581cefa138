"""Pending: a value that one thread gets and others wait for, whatever a signal handler interrupts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from limitkeeper import StoreTimeout
from limitkeeper.stores.sans_io import Pending, WakeEvent


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
