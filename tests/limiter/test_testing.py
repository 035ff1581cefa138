"""Test tools for users: limits turned off, and a manual clock."""

from __future__ import annotations

import asyncio

import pytest

from limitkeeper import ConfigurationError, LeakyBucketQueue, Limiter, SlidingWindowCounter
from limitkeeper.testing import ManualClock, unlimited, use_clock


@pytest.mark.parametrize(
    "limits", ["1/s", "1/s; fixed window 1/s", LeakyBucketQueue("1/s", 1), SlidingWindowCounter("1/s")], ids=str
)
def test_unlimited_allows_everything_and_stores_nothing(make, limits, store, clock):
    """Inside unlimited() every verb is allowed at once, whatever the cost, and nothing is stored."""
    limiter = make(limits)
    before = clock.now_us()
    with unlimited():
        assert all(limiter.hit("a") for _ in range(5))
        assert limiter.hit("a", cost=10**9)
        assert limiter.peek("a", cost=99)
        assert limiter.acquire("a", cost=5).wait == 0.0
        assert all(limiter.hit_many(["a"] * 3))
        with limiter.reserve("a", cost=7) as reservation:
            reservation.settle(3)
        assert limiter.limit(key="a")(lambda: 5)() == 5
    assert clock.now_us() == before
    assert len(store) == 0


def test_unlimited_ends(make):
    """After the block limits hold again, with the state they had before."""
    limiter = make("2/s")
    limiter.hit("a", cost=2)
    with unlimited():
        limiter.hit("a")
    assert not limiter.hit("a")


def test_unlimited_ends_with_an_exception(make):
    """An exception in the block turns limits on again."""
    limiter = make("1/s")
    with pytest.raises(RuntimeError), unlimited():
        raise RuntimeError
    limiter.hit("a")
    assert not limiter.hit("a")


def test_unlimited_nests(make):
    """An inner block does not turn limits on again for the outer one."""
    limiter = make("1/s")
    with unlimited():
        with unlimited():
            pass
        assert all(limiter.hit("a") for _ in range(3))
    limiter.hit("a")
    assert not limiter.hit("a")


def test_unlimited_reservations_that_end_later_are_no_debt(make):
    """A reservation made while limits were off took nothing, so settling it later takes and gives nothing."""
    limiter = make("5/s burst 10")
    with unlimited():
        high, low, gone = limiter.reserve("a", cost=5), limiter.reserve("a", cost=5), limiter.reserve("a", cost=5)
    limiter.hit("a", cost=4)
    high.settle(9)
    low.settle(1)
    gone.cancel()
    assert limiter.peek("a").remaining == 6


def test_unlimited_still_checks_its_arguments(make):
    """Keys and costs are checked as usual, so that tests find wrong ones."""
    limiter = make({"user": "1/s", "tenant": "1/s"})
    with unlimited():
        with pytest.raises(ConfigurationError):
            limiter.hit({"user": "a"})
        with pytest.raises(ValueError, match="cost must be"):
            limiter.hit("a", cost=-1)
        with pytest.raises(TypeError):
            limiter.hit(5)


# The manual clock


def test_a_manual_clock_moves_only_on_demand():
    """It stands still until it is advanced."""
    clock = ManualClock(1.5)
    assert [clock.now_us(), clock.now_us()] == [1_500_000, 1_500_000]
    clock.advance(0.25)
    assert clock.now_us() == 1_750_000


def test_a_manual_clock_keeps_integers():
    """Ten thousand advances of 0.1 s are exactly 1000 s."""
    clock = ManualClock()
    for _ in range(10_000):
        clock.advance(0.1)
    assert clock.now_us() == 1_000_000_000


def test_a_manual_clock_goes_back():
    """A negative advance moves it back."""
    clock = ManualClock(10)
    clock.advance(-4)
    assert clock.now_us() == 6_000_000


def test_sleeping_on_a_manual_clock_moves_it():
    """Its sleeps, sync and async, advance it and take no time."""
    clock = ManualClock()
    clock.sleep(2.5)
    asyncio.run(clock.asleep(1.5))
    assert clock.now_us() == 4_000_000


def test_a_clock_that_goes_back_gives_nothing_and_blocks_no_caller(make, clock):
    """An hour back: what is left may be used, nothing is added, and time continues from the last moment seen."""
    limiter = make("5/s burst 10")
    limiter.hit("a", cost=7)
    clock.advance(-3600)
    assert limiter.hit("a", cost=3)
    assert limiter.hit("a").retry_after == 0.2
    clock.advance(0.2)
    assert limiter.hit("a")


def test_a_clock_that_jumps_ahead_grants_one_burst(make, clock):
    """A year ahead is one full bucket, not a year of tokens."""
    limiter = make("5/s burst 10")
    limiter.hit("a", cost=10)
    clock.advance(365 * 86400)
    assert sum(bool(limiter.hit("a")) for _ in range(50)) == 10


def test_use_clock_moves_declared_limits_and_ends(clock):
    """Inside use_clock() limits without a store follow the clock, earlier ones too; they begin and end empty."""
    before = Limiter("1/h", name="before")
    assert before.hit("a")
    for _ in range(2):
        with use_clock(clock):
            within = Limiter("1/h", store="memory://", name="within")
            for limiter in (before, within):
                assert [bool(limiter.hit("a")) for _ in range(2)] == [True, False]
            clock.advance(3600)
            assert all([before.hit("a"), within.hit("a")])
    assert all([before.hit("a"), within.hit("a")])
    assert not before.hit("a")


def test_use_clock_leaves_stores_of_the_application_alone(clock, store):
    """A store that was passed as an object keeps its clock and its state."""
    limiter = Limiter("1/h", store=store)
    limiter.hit("a")
    with use_clock(ManualClock(5)):
        assert limiter.store.clock is clock
        assert not limiter.hit("a")


def test_fixed_windows_follow_the_start_of_a_clock():
    """Each use_clock() starts at its clock's own time, also when the clock before it was ahead."""
    limiter = Limiter("fixed window 2/min", name="windows")
    for start in (90.0, 30.0, 45.0):
        with use_clock(ManualClock(start)):
            assert limiter.hit("a").reset_after == 60.0 - start % 60


def test_advance_takes_numbers_only():
    """A text is an error that says what to write, and the clock stays where it is."""
    clock = ManualClock()
    with pytest.raises(TypeError, match=r"expected seconds as a number, got '20s'; write advance\(1.5\)"):
        clock.advance("20s")
    assert clock.now_us() == 0
    with pytest.raises(TypeError, match=r"seconds since 1970 as a number, got '2030-01-01'; a datetime has timestamp\(\)"):
        ManualClock(start="2030-01-01")
