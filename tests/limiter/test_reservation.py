"""Reservations: charge an estimate, settle the real cost."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from itertools import count

import pytest

from limitkeeper import (
    AsyncLimiter,
    ConfigurationError,
    FixedWindow,
    InvalidCost,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    RateLimited,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper import reservation as reservation_module
from virtual_time import VirtualClock

KINDS = [
    TokenBucket("5/s burst 10"),
    LeakyBucket("5/s", 10),
    LeakyBucketQueue("5/s", 10),
    FixedWindow("10/min"),
    FixedWindow("10/min", align="first"),
    SlidingWindowLog("10/min"),
    SlidingWindowCounter("10/min"),
]
each = pytest.mark.parametrize("limit", KINDS, ids=str)
#: A queue's remaining is all or nothing, so its wait shows what is left.
counting = pytest.mark.parametrize("limit", [limit for limit in KINDS if not isinstance(limit, LeakyBucketQueue)], ids=str)
ONE_A_SECOND = [
    TokenBucket("1/s"),
    LeakyBucket("1/s", 1),
    LeakyBucketQueue("1/s"),
    FixedWindow("1/s"),
    FixedWindow("1/s", align="first"),
    SlidingWindowLog("1/s"),
]


@counting
def test_a_reservation_charges_its_estimate_at_once(make, limit):
    """Reserved units are gone for others before anything is settled."""
    limiter = make(limit)
    reservation = limiter.reserve("a", cost=7)
    assert reservation
    assert reservation.wait == 0.0
    assert limiter.peek("a").remaining == 3


@pytest.mark.parametrize("second", ["cancel", "settle"])
@pytest.mark.parametrize("first", ["cancel", "settle"])
def test_of_two_threads_one_settles_or_cancels(make, first, second):
    """Wherever another thread goes on in the middle of `cancel` or `settle`, one of the two takes effect."""
    calls = {"cancel": lambda one: one.cancel(), "settle": lambda one: one.settle(4)}
    used = {"cancel": 0, "settle": 4}

    def one_round(reservation, step):
        answers, lines = {}, count(1)

        def call(which):
            answers[which] = calls[which[1]](reservation)

        def trace(frame, event, _):
            if frame.f_code.co_filename == reservation_module.__file__ and event == "line" and next(lines) == step:
                thread = threading.Thread(target=call, args=[(2, second)])
                thread.start()
                thread.join()
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call((1, first))
        finally:
            sys.settrace(before)
        return [used[name] for (_, name), effective in answers.items() if effective]

    limiter = make(TokenBucket("5/s burst 10"))
    for step in range(1, 16):
        effective = one_round(limiter.reserve(f"key {step}", cost=7), step)
        assert [10 - limiter.peek(f"key {step}").remaining] == effective


@counting
def test_settling_below_gives_the_rest_back(make, limit):
    """Reserve 7, use 4: 3 are given back."""
    limiter = make(limit)
    reservation = limiter.reserve("a", cost=7)
    assert reservation.settle(4) is True
    assert limiter.peek("a").remaining == 6


def test_settling_below_shortens_a_queue(make):
    """Reserve 7 turns of a queue, use 4: the next turn comes 3 intervals earlier."""
    limiter = make(LeakyBucketQueue("5/s", 10))
    limiter.reserve("a", cost=7).settle(4)
    assert limiter.hit("a").retry_after == 0.8


@counting
def test_settling_the_estimate_changes_nothing(make, limit):
    """When the estimate was right, settling leaves the charge as it is."""
    limiter = make(limit)
    assert limiter.reserve("a", cost=7).settle(7) is True
    assert limiter.peek("a").remaining == 3


@counting
def test_settling_zero_gives_all_back(make, limit):
    """When nothing was used, all is given back."""
    limiter = make(limit)
    before = limiter.peek("a")
    limiter.reserve("a", cost=7).settle(0)
    assert (limiter.peek("a").remaining, limiter.peek("a").retry_after) == (before.remaining, 0.0)


@each
def test_settling_above_always_succeeds_and_is_repaid(make, limit, clock):
    """Reserve 5, use 25: it is charged whatever the level, and nothing is admitted before it is repaid."""
    limiter = make(limit)
    assert limiter.reserve("a", cost=5).settle(25) is True
    assert limiter.peek("a").remaining == 0
    wait = limiter.hit("a", cost=1).retry_after
    assert wait > 0
    clock.advance(wait)
    assert limiter.hit("a", cost=1)


def test_a_bucket_goes_into_debt(make):
    """A bucket of 10 that was charged 25 owes 15: one token is available after 16 intervals."""
    limiter = make(TokenBucket("5/s burst 10"))
    limiter.reserve("a", cost=5).settle(25)
    assert limiter.hit("a").retry_after == 3.2


def test_a_window_goes_over_its_count(make, clock):
    """A window that was charged 25 of 10 is over; the next window is free."""
    limiter = make(FixedWindow("10/min"))
    limiter.reserve("a", cost=5).settle(25)
    assert limiter.hit("a").retry_after == 60.0
    clock.advance(60)
    assert limiter.hit("a", cost=10)


def test_the_log_gets_an_entry_now(make, clock):
    """What goes beyond the estimate is dated now, not when the reservation was made."""
    limiter = make(SlidingWindowLog("10/min"))
    reservation = limiter.reserve("a", cost=5)
    clock.advance(30)
    reservation.settle(10)
    assert limiter.hit("a").retry_after == 30.0
    clock.advance(30)
    assert limiter.peek("a").remaining == 5


@each
@pytest.mark.parametrize("used", [10**9, 10**18, 10**30])
def test_a_huge_truth_is_charged_and_stays_charged(make, limit, used, clock):
    """Settling at any number, several times over, never frees anything."""
    limiter = make(limit)
    limiter.reserve("a", cost=5).settle(used)
    for _ in range(8):
        clock.advance(0.001)
        assert limiter.reserve("a", cost=0).settle(used) is True
        assert not limiter.hit("a")
        assert limiter.peek("a").remaining == 0


@counting
def test_the_first_settle_decides(make, limit):
    """A second settle does nothing and returns False."""
    limiter = make(limit)
    reservation = limiter.reserve("a", cost=7)
    assert [reservation.settle(4), reservation.settle(1), reservation.settle(9)] == [True, False, False]
    assert limiter.peek("a").remaining == 6


@counting
def test_a_settle_after_a_cancel_does_nothing(make, limit):
    """Cancel gives all back; a settle behind it does nothing."""
    limiter = make(limit)
    reservation = limiter.reserve("a", cost=7)
    assert [reservation.cancel(), reservation.settle(7), reservation.cancel()] == [True, False, False]
    assert limiter.peek("a").remaining == 10


@counting
def test_a_cancel_after_a_settle_does_nothing(make, limit):
    """A cancel behind a settle does nothing."""
    limiter = make(limit)
    reservation = limiter.reserve("a", cost=7)
    assert [reservation.settle(7), reservation.cancel()] == [True, False]
    assert limiter.peek("a").remaining == 3


@counting
def test_never_settled_keeps_the_charge(make, limit):
    """Leaving the block without settling keeps the whole charge, and later calls do not change that."""
    limiter = make(limit)
    with limiter.reserve("a", cost=7) as reservation:
        pass
    assert limiter.peek("a").remaining == 3
    assert reservation.settle(1) is False
    assert limiter.peek("a").remaining == 3


@counting
def test_a_settle_inside_the_block_stands(make, limit):
    """Leaving the block does not change what was settled inside it."""
    limiter = make(limit)
    with limiter.reserve("a", cost=7) as reservation:
        reservation.settle(4)
    assert limiter.peek("a").remaining == 6


@counting
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_gives_all_back(limit, error, store):
    """Any exception in the block, KeyboardInterrupt too, gives the whole charge back and propagates."""
    limiter = Limiter(limit, store=store)
    with pytest.raises(error), limiter.reserve("a", cost=7):
        raise error
    assert limiter.peek("a").remaining == 10


@counting
@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError, GeneratorExit])
def test_an_exception_gives_all_back_to_async_code(limit, error, store):
    """Any exception in an async block, cancellation too, gives the whole charge back and propagates."""
    limiter = AsyncLimiter(limit, store=store)

    async def main():
        with pytest.raises(error):
            async with limiter.reserve("a", cost=7):
                raise error
        return await limiter.peek("a")

    assert asyncio.run(main()).remaining == 10


@counting
def test_an_exception_after_a_settle_leaves_it(store, limit):
    """The first of settle and exception decides: an exception after a settle gives nothing more back."""
    limiter = Limiter(limit, store=store)

    def settle_and_fail():
        with limiter.reserve("a", cost=7) as reservation:
            reservation.settle(4)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        settle_and_fail()
    assert limiter.peek("a").remaining == 6


def test_entering_waits_its_turn(make, clock):
    """Entering a reservation sleeps until its start."""
    limiter = make("5/s burst 10")
    limiter.hit("a", cost=10)
    before = clock.now_us()
    reservation = limiter.reserve("a", cost=3, max_wait=5)
    assert reservation.wait == 0.6
    assert clock.now_us() == before
    with reservation:
        assert clock.now_us() == before + 600_000


def test_entering_later_waits_for_the_rest(make, clock):
    """Entered 3 s after it was made, a reservation whose wait is 5 s waits 2 s; entered after its start, not at all."""
    limiter = make(TokenBucket("1/s burst 1"))
    reservations = [limiter.reserve("a") for _ in range(6)]
    begin_us = clock.now_us()
    clock.advance(3)
    for reservation in reversed(reservations):
        with reservation:
            assert clock.now_us() - begin_us == 5_000_000


@pytest.mark.parametrize("cost", [3, 2], ids=["exchanged", "rebooked"])
def test_entering_later_waits_for_the_start_that_it_has_moved_up_to(make, clock, cost):
    """Moved up at 1 s to a start at `cost` seconds and entered at 1.5 s, a reservation waits for the rest."""
    limiter = make(TokenBucket("1/s burst 3"))
    begin_us = clock.now_us()
    limiter.hit("a", 3)
    first, second = limiter.reserve("a", 3), limiter.reserve("a", cost)
    clock.advance(1)
    first.cancel()
    clock.advance(0.5)
    with second:
        assert clock.now_us() - begin_us == cost * 1_000_000


def test_a_reservation_further_away_than_max_wait_is_refused(make):
    """Refused is falsy, carries its decision, and took nothing."""
    limiter = make("5/s burst 10")
    limiter.hit("a", cost=10)
    before = limiter.peek("a")
    reservation = limiter.reserve("a", cost=3, max_wait=0.5)
    assert not reservation
    assert reservation.decision.retry_after == pytest.approx(0.1)
    assert limiter.peek("a") == before


def test_entering_a_refused_reservation_raises(make):
    """Entering a refused reservation raises RateLimited with the decision."""
    limiter = make("5/s burst 10")
    limiter.hit("a", cost=10)
    with pytest.raises(RateLimited) as caught, limiter.reserve("a", max_wait=0):
        pytest.fail("the block of a refused reservation ran")
    assert caught.value.retry_after == 0.2


def test_settling_a_refused_reservation_does_nothing(make):
    """There is nothing to settle or cancel when nothing was charged."""
    limiter = make("5/s burst 10")
    limiter.hit("a", cost=10)
    reservation = limiter.reserve("a", max_wait=0)
    assert [reservation.settle(0), reservation.cancel()] == [False, False]
    assert limiter.peek("a").remaining == 0


def test_what_can_never_fit_is_refused(make):
    """A reservation above the capacity is refused, without any max_wait."""
    reservation = make("5/s burst 10").reserve("a", cost=11)
    assert not reservation
    assert reservation.decision.retry_after == float("inf")


@pytest.mark.parametrize("limit", ONE_A_SECOND, ids=str)
@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_cancelling_lets_those_behind_move_up(make, limit, leaving, clock):
    """Of three reservations at 1, 2 and 3 s any is cancelled: the others are at 1 and 2 s, and a newcomer at 3 s."""
    limiter = make(limit)
    limiter.hit("a")
    found = [limiter.reserve("a") for _ in range(3)]
    assert [one.wait for one in found] == [1.0, 2.0, 3.0]
    assert found.pop(leaving).cancel() is True
    assert [one.wait for one in found] == [1.0, 2.0]
    assert limiter.reserve("a").wait == 3.0


def test_two_of_one_window_move_up_into_the_place_of_one(make):
    """Of five reservations in windows of two, the first is cancelled: each behind it takes the place before its own."""
    limiter = make(FixedWindow("2/s"))
    limiter.hit("a", cost=2)
    found = [limiter.reserve("a") for _ in range(5)]
    assert [one.wait for one in found] == [1.0, 1.0, 2.0, 2.0, 3.0]
    found.pop(0).cancel()
    assert [one.wait for one in found] == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("limit", ONE_A_SECOND, ids=str)
def test_cancelling_all_leaves_the_key_as_it_was(make, limit):
    """Whatever the order of cancelling, in the end nothing is reserved."""
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]):
        limiter = make(limit, name=f"order {order}")
        limiter.hit("a")
        before = limiter.peek("a")
        found = [limiter.reserve("a") for _ in range(3)]
        for number in order:
            found[number].cancel()
        assert limiter.peek("a") == before


def test_cancelling_after_the_start_gives_back_what_is_left(make, clock):
    """A charge that time has already paid back can't be given back again."""
    limiter = make("5/s burst 10")
    reservation = limiter.reserve("a", cost=10)
    clock.advance(1)
    reservation.cancel()
    assert limiter.peek("a").remaining == 10
    assert not limiter.hit("a", cost=11)


@pytest.mark.parametrize("used", [True, 1.5, -1, "3", None], ids=repr)
def test_a_wrong_truth_is_an_error_and_decides_nothing(make, used):
    """What was used must be a whole number ≥ 0; after the error the reservation is still open."""
    limiter = make("5/s burst 10")
    reservation = limiter.reserve("a", cost=7)
    with pytest.raises(InvalidCost):
        reservation.settle(used)
    assert reservation.settle(4) is True
    assert limiter.peek("a").remaining == 6


@pytest.fixture
def both(make):
    return make({"requests": FixedWindow("10/min"), "tokens": TokenBucket("100/s burst 1000")})


def left(limiter):
    return [part.remaining for part in limiter.peek("a").decisions]


def test_each_limit_is_settled_by_name(both):
    """A mapping settles the limits that it names; the others keep their estimate."""
    reservation = both.reserve("a", cost={"tokens": 500})
    assert reservation.settle({"tokens": 425}) is True
    assert left(both) == [9, 575]


@pytest.mark.parametrize("used", [{"tokens": 300}, {"requests": 1, "tokens": 300}, {"requests": 2, "tokens": 300}], ids=str)
def test_what_is_given_back_of_one_limit_lets_those_behind_move_up(both, used):
    """Those behind move up when one limit is settled below its estimate, whatever the others are settled with."""
    first, second = (both.reserve("a", cost={"tokens": 1000}) for _ in range(2))
    assert second.wait == 10.0
    assert first.settle(used) is True
    assert second.wait == 3.0


def test_cancelling_lets_those_behind_move_up_where_a_limit_cost_nothing(both):
    """Those behind a cancelled reservation move up also when it cost nothing of one of the limits."""
    first, second = (both.reserve("a", cost={"requests": 0, "tokens": 1000}) for _ in range(2))
    first.cancel()
    assert second.wait == 0.0
    second.cancel()
    assert left(both) == [10, 1000]


def test_settling_zero_before_the_start_leaves_the_limits_as_they_were(make):
    """A reservation that waits for one limit and is settled with 0 leaves the other limit as it was before."""
    limiter = make({"requests": SlidingWindowLog("2/min"), "tokens": TokenBucket("9/min")})
    limiter.hit("a", cost=2)
    before = limiter.peek("a").decisions
    assert limiter.reserve("a", cost=2).settle(0) is True
    assert limiter.peek("a").decisions == before


def test_one_number_settles_all_that_were_charged_alike(both):
    """Where every limit was charged the same, one number settles all."""
    both.reserve("a", cost=6).settle(2)
    assert left(both) == [8, 998]


def test_one_number_for_different_charges_is_an_error(both):
    """Where the limits were charged differently, a single number is ambiguous: the error names the limits."""
    reservation = both.reserve("a", cost={"tokens": 500})
    with pytest.raises(ConfigurationError, match="requests, tokens"):
        reservation.settle(425)
    assert reservation.settle({"tokens": 0, "requests": 0}) is True
    assert left(both) == [10, 1000]


def test_a_truth_for_an_unknown_limit_is_an_error(both):
    """A settle that names no limit is an error, and the reservation is still open."""
    reservation = both.reserve("a", cost=5)
    with pytest.raises(ConfigurationError, match="'token'"):
        reservation.settle({"token": 3})
    assert reservation.cancel() is True


def test_an_exception_gives_all_limits_back(both):
    """An exception in the block gives back what was charged to every limit."""
    with pytest.raises(RuntimeError), both.reserve("a", cost={"tokens": 500}):
        raise RuntimeError
    assert left(both) == [10, 1000]


def test_a_skipped_limit_is_not_settled(both):
    """A limit that was skipped is left alone when the others are settled or cancelled."""
    both.reserve({"requests": None, "tokens": "a"}, cost=500).settle(425)
    assert left(both) == [10, 575]


def test_reservations_nest(store):
    """An inner reservation settles by itself; an exception that leaves both gives both back."""
    limiter = Limiter("5/s burst 10", store=store)
    with limiter.reserve("a", cost=4) as outer:
        with limiter.reserve("a", cost=3) as inner:
            assert limiter.peek("a").remaining == 3
            inner.settle(1)
        outer.settle(2)
    assert limiter.peek("a").remaining == 7
    with pytest.raises(RuntimeError), limiter.reserve("a", cost=4), limiter.reserve("a", cost=3):
        raise RuntimeError
    assert limiter.peek("a").remaining == 7


def test_an_interrupted_entering_gives_all_back(held, eventually):
    """KeyboardInterrupt while entering waits gives the charge back, and the reservation is decided."""
    limiter = Limiter("1/s", store=MemoryStore(clock=held))
    limiter.hit("a")
    before = limiter.peek("a")
    reservation = limiter.reserve("a")
    ends = []

    def enter():
        try:
            with reservation:
                ends.append("entered")
        except KeyboardInterrupt:
            ends.append("interrupted")

    thread = threading.Thread(target=enter)
    thread.start()
    eventually(lambda: limiter.waiting() == 1)
    held.interrupt(thread)
    thread.join(60)
    assert ends == ["interrupted"]
    assert limiter.peek("a") == before
    assert reservation.cancel() is False


def test_a_cancelled_entering_gives_all_back(held):
    """Cancelling a task that waits to enter gives the charge back."""

    async def main():
        limiter = AsyncLimiter("1/s", store=MemoryStore(clock=held))
        await limiter.hit("a")
        before = await limiter.peek("a")

        async def enter():
            async with limiter.reserve("a"):
                pytest.fail("entered before its turn")

        task = asyncio.create_task(enter())
        for _ in range(10):
            await asyncio.sleep(0)
        assert limiter.waiting() == 1
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert task.cancelled()
        assert await limiter.peek("a") == before

    asyncio.run(main())


def test_an_async_reservation_can_be_awaited_or_entered(store):
    """`await limiter.reserve(…)` is the reservation; `async with limiter.reserve(…)` enters it."""

    async def main():
        limiter = AsyncLimiter("5/s burst 10", store=store)
        reservation = await limiter.reserve("a", cost=4)
        assert await reservation.settle(1) is True
        async with limiter.reserve("a", cost=4) as entered:
            assert await entered.settle(1) is True
        async with await limiter.reserve("a", cost=4) as again:
            assert await again.cancel() is True
        return (await limiter.peek("a")).remaining

    assert asyncio.run(main()) == 8


def test_the_repr_shows_the_state(make):
    """The repr of a reservation shows open, settled or refused."""
    limiter = make("5/s burst 10")
    reservation = limiter.reserve("a", cost=10)
    assert "open: 10 for 'a'" in repr(reservation)
    reservation.settle(10)
    assert "settled" in repr(reservation)
    assert "refused" in repr(limiter.reserve("a", max_wait=0))


def test_an_interrupted_wait_gives_its_start_back(held, eventually):
    """`interrupt` ends the wait of another thread for a start: its `with` raises CancelledError, and those behind move up."""
    limiter = Limiter(LeakyBucketQueue("1/h"), MemoryStore(clock=held))
    limiter.acquire("a")
    waited, behind = limiter.reserve("a"), limiter.reserve("a")
    raised = []

    def wait() -> None:
        try:
            with waited:
                raised.append(None)
        except CancelledError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: limiter.waiting() == 1)
    waited.interrupt()
    thread.join(30)
    assert [type(error) for error in raised] == [CancelledError]
    assert behind.wait == 3600
    assert waited.cancel() is False


def test_an_interrupted_task_gives_its_start_back():
    """As for a thread: a task that waits for its start raises CancelledError when its reservation is interrupted."""

    async def main() -> None:
        limiter = AsyncLimiter(LeakyBucketQueue("1/h"), MemoryStore(clock=VirtualClock()))
        await limiter.acquire("a")
        reservation = await limiter.reserve("a")
        waiting = asyncio.ensure_future(reservation.__aenter__())
        await asyncio.sleep(0)
        reservation.interrupt()
        with pytest.raises(CancelledError):
            await waiting
        assert (await limiter.peek("a")).retry_after == 3600

    asyncio.run(main())


def test_a_wait_that_another_thread_cancels_runs_no_block(held, eventually):
    """`cancel` by another thread gives the start back and ends the wait: nothing runs that is not charged."""
    limiter = Limiter("1/h", MemoryStore(clock=held))
    limiter.hit("a")
    waited, behind = limiter.reserve("a"), limiter.reserve("a")
    ends = []

    def wait() -> None:
        try:
            with waited:
                ends.append("ran")
        except CancelledError:
            ends.append("cancelled")

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: limiter.waiting() == 1)
    assert waited.cancel()
    thread.join(30)
    assert ends == ["cancelled"]
    assert behind.wait == 3600


def test_a_wait_that_another_task_cancels_runs_no_block():
    """As for a thread; and a reservation that was cancelled before can't be entered."""

    async def main() -> None:
        limiter = AsyncLimiter("1/h", MemoryStore(clock=VirtualClock()))
        reservations = [await limiter.reserve("a"), await limiter.reserve("a")]
        waiting = asyncio.ensure_future(reservations[1].__aenter__())
        await asyncio.sleep(0)
        for one in reservations:
            assert await one.cancel()
        with pytest.raises(CancelledError):
            await waiting
        with pytest.raises(CancelledError):
            await reservations[0].__aenter__()
        assert (await limiter.peek("a")).remaining == 1

    asyncio.run(main())


class LateClock(MemoryStore):
    """A store whose estimate of the time is behind its decisions, as that of a server is."""

    def now_us(self) -> int:
        return super().now_us() - 10_000


def test_a_past_reservation_leaves_the_queues_of_all_its_keys(clock):
    """A waiter on one of its keys forgets a reservation that has begun: cancelling that is no error, and gives it back."""
    limiter = Limiter({"a": "1/s burst 1", "b": "1/s burst 1"}, store=LateClock(clock=clock))
    both, one = {"a": "x", "b": "y"}, {"a": "x", "b": None}
    assert limiter.hit(both)
    begun = limiter.reserve(both)
    clock.advance(1.005)
    assert limiter.reserve(one).cancel()
    assert begun.cancel()
    assert limiter.hit(both)


def test_reservations_that_are_never_settled_take_no_memory_after_their_start(make, clock):
    """Keys come and go, each with a reservation for later that is neither entered nor settled."""
    limiter = make(TokenBucket("1/s burst 1"))
    for n in range(1000):
        limiter.hit(f"user:{n}")
        assert limiter.reserve(f"user:{n}").wait > 0
        clock.advance(0.1)
    assert len(limiter._queue._waiters) < 30


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_store_with_reservations_is_collected(clock, cancelled):
    """Its queue, which refers to it through their charges, goes with it."""
    store = MemoryStore(clock=clock)
    limiter = Limiter("1/s burst 1", store=store)
    limiter.hit("a")
    reservation = limiter.reserve("a", max_wait=10)
    assert not cancelled or reservation.cancel()
    gone = weakref.ref(store)
    del store, limiter, reservation
    gc.collect()
    assert gone() is None


def test_a_forgotten_await_is_an_error():
    """A reservation of an AsyncLimiter that is used before it is made: the error says how to make it."""
    pending = AsyncLimiter("5/s").reserve("a")
    with pytest.raises(AttributeError, match="'settle' of a reservation that is not made yet; write await"):
        _ = pending.settle
    with pytest.raises(TypeError, match="neither allowed nor refused; write await"):
        bool(pending)
