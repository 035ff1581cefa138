"""Limiters on a third-party store: all methods, local and remote, and what happens when giving back fails."""

from __future__ import annotations

import asyncio
import threading

import pytest

from limitkeeper import AsyncLimiter, InvalidCost, Limiter, MemoryStore, SharedStore, StoreUnavailable


def test_a_failing_store_does_not_hide_the_callers_exception(make, wrapped):
    """When giving back fails, the caller's own exception propagates, and the failure is published as an event."""
    limiter = make("5/s burst 10", store=wrapped)
    published = []
    limiter.events.on("give back failed", published.append)
    wrapped.failing.add("give_back")
    with pytest.raises(ZeroDivisionError), limiter.reserve("a", cost=4):
        1 / 0
    assert [(event.kind, event.key, event.cost, type(event.error)) for event in published] == [
        ("give back failed", "a", 4, StoreUnavailable)
    ]


@pytest.mark.parametrize("verb", ["settle", "cancel"])
def test_a_failing_store_is_an_event_for_settle_and_cancel(make, wrapped, verb):
    """settle and cancel do not raise when the store fails: they have decided, and the failure is an event."""
    limiter = make("5/s burst 10", store=wrapped)
    published = []
    limiter.events.on("give back failed", published.append)
    reservation = limiter.reserve("a", cost=4)
    wrapped.failing.add("give_back")
    assert reservation.settle(1) is True if verb == "settle" else reservation.cancel() is True
    assert len(published) == 1
    assert reservation.settle(0) is False


def test_a_failing_store_does_not_hide_an_interrupt(held, eventually, wrapped):
    """KeyboardInterrupt during an acquire's sleep propagates unchanged when the place can't be given back."""
    wrapped.inner = MemoryStore(clock=held)
    limiter = Limiter("1/s", store=wrapped)
    limiter.hit("a")
    published, ends = [], []
    limiter.events.on("give back failed", published.append)
    wrapped.failing.add("give_back")

    def run():
        try:
            limiter.acquire("a")
        except BaseException as error:
            ends.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: limiter.waiting() == 1)
    held.interrupt(thread)
    thread.join(60)
    assert ends == [KeyboardInterrupt]
    assert [type(event.error) for event in published] == [StoreUnavailable]


def test_a_failing_store_does_not_hide_a_cancellation(held, wrapped):
    """A cancelled acquire ends cancelled when the place can't be given back, and the failure is an event."""
    wrapped.inner = MemoryStore(clock=held)

    async def main():
        limiter = AsyncLimiter("1/s", store=wrapped)
        await limiter.hit("a")
        published = []
        limiter.events.on("give back failed", published.append)
        wrapped.failing.add("give_back")
        task = asyncio.create_task(limiter.acquire("a"))
        for _ in range(10):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert task.cancelled()
        return [type(event.error) for event in published]

    assert asyncio.run(main()) == [StoreUnavailable]


def test_a_failing_refund_raises(make, wrapped):
    """A refund is a call of its own: when the store fails, it raises."""
    limiter = make("5/s", store=wrapped)
    wrapped.failing.add("give_back")
    with pytest.raises(StoreUnavailable):
        limiter.refund("a")


# A third-party store


def test_another_store_serves_all_verbs(make, wrapped):
    """A store with only the contract's methods serves every verb, near and far."""
    limiter = make("5/s burst 10", store=wrapped)
    assert limiter.hit("a", cost=4).remaining == 6
    assert limiter.peek("a").remaining == 6
    assert [found.remaining for found in limiter.hit_many(["a", "a"], cost=[1, 2])] == [5, 3]
    limiter.refund("a", cost=1)
    assert limiter.acquire("a", cost=5).wait == pytest.approx(0.2)
    limiter.reset("a")
    limiter.reserve("a", cost=9).settle(2)
    assert limiter.peek("a").remaining == 8


def test_an_acquire_is_one_decision(make, wrapped):
    """An acquire calls the store once, whether it waits or not."""
    limiter = make("5/s burst 10", store=wrapped)
    limiter.acquire("a", cost=10)
    limiter.acquire("a", cost=3)
    assert wrapped.calls == ["decide", "decide"]


def test_hit_many_is_one_call_whatever_the_keys(make, wrapped):
    """hit_many calls the store once; costs and keys are checked before, sync and async."""
    limiter = make("5/s burst 10", store=wrapped)
    limiter.hit_many(["a", "b", "a"], cost=2)
    assert wrapped.calls == ["decide_many"]
    with pytest.raises(InvalidCost, match="each of 2 keys, got 1"):
        limiter.hit_many(["a", "b"], cost=[1])
    assert wrapped.calls == ["decide_many"]


def test_skipped_keys_are_allowed_by_another_store_too(make, wrapped):
    """Where every limit is skipped nothing is limited, whatever the store and the verb."""
    limiter = make({"user": "1/s", "tenant": "1/s"}, store=wrapped)
    skipped = {"user": None, "tenant": None}
    assert limiter.hit(skipped)
    assert limiter.peek(skipped)
    assert limiter.acquire(skipped)
    assert limiter.reserve(skipped)
    assert [bool(found) for found in limiter.hit_many(["a", skipped, "a"])] == [True, True, False]


def test_those_behind_a_cancelled_reservation_are_not_hurt_by_a_bare_store(make, wrapped):
    """On a store with only the contract's methods, cancelling with others behind works; they keep valid starts."""
    limiter = make("1/s", store=wrapped)
    limiter.hit("a")
    first, second = limiter.reserve("a"), limiter.reserve("a")
    assert first.cancel() is True
    assert second.wait in (1.0, 2.0)


def test_a_failing_store_is_an_event_for_cancelled_tasks(tmp_path):
    """Tasks that leave a local store which fails: an event for each of them, and no exception in the event loop."""

    async def leave():
        store, published, raised = SharedStore(tmp_path / "limits"), [], []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
        limiter = AsyncLimiter("1/h", store=store)
        limiter.events.on("give back failed", published.append)
        await limiter.hit("a")
        tasks = [asyncio.create_task(limiter.acquire("a", cost=1)) for _ in range(3)]
        while limiter.waiting() < 3:
            await asyncio.sleep(0)
        store.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [event.key for event in published], raised

    assert asyncio.run(leave()) == (["a", "a", "a"], [])
