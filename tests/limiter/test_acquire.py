"""acquire: one decision, one sleep; a deadline shorter than the wait refuses at once."""

from __future__ import annotations

import asyncio
import math

import pytest

from limitkeeper import (
    AsyncLimiter,
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
from stand_ins import HeldClock

RESERVING = [
    TokenBucket("5/s burst 10"),
    LeakyBucket("5/s", 10),
    LeakyBucketQueue("5/s", 20),
    FixedWindow("10/min"),
    FixedWindow("10/min", align="first"),
    SlidingWindowLog("10/min"),
]
KINDS = [*RESERVING, SlidingWindowCounter("10/min")]
every_kind = pytest.mark.parametrize("limit", KINDS, ids=str)


@every_kind
def test_what_is_free_is_taken_without_a_sleep(make, limit, clock):
    """An acquire that fits now returns at once."""
    before = clock.now_us()
    found = make(limit).acquire("a", cost=10)
    assert (found.allowed, found.wait) == (True, 0.0)
    assert clock.now_us() == before


@every_kind
def test_an_acquire_waits_for_the_retry_after_of_a_hit(make, limit, clock):
    """Without other callers, acquire sleeps for the retry_after of the same hit, to the microsecond."""
    limiter = make(limit)
    limiter.hit("a", cost=10)
    retry_after = limiter.hit("a", cost=3).retry_after
    before = clock.now_us()
    assert limiter.acquire("a", cost=3)
    assert (clock.now_us() - before) / 1e6 == retry_after


@pytest.mark.parametrize("limit", RESERVING, ids=str)
def test_the_decision_has_the_time_waited(make, limit):
    """The decision of an acquire that slept carries its wait."""
    limiter = make(limit)
    limiter.hit("a", cost=10)
    retry_after = limiter.hit("a", cost=2).retry_after
    assert limiter.acquire("a", cost=2).wait == retry_after


class Recording(ManualClock):
    """Records every sleep."""

    def __init__(self, start):
        super().__init__(start)
        self.sleeps = []

    def sleep(self, seconds, wake=None):
        self.sleeps.append(seconds)
        super().sleep(seconds, wake)

    async def asleep(self, seconds, wake=None):
        self.sleeps.append(seconds)
        await super().asleep(seconds, wake)


@pytest.mark.parametrize("limit", RESERVING, ids=str)
def test_one_sleep(make, limit):
    """However long the wait, there is one sleep and no polling."""
    clock = Recording(1000.0)
    limiter = make(limit, store=MemoryStore(clock=clock))
    limiter.acquire("a", cost=10)
    found = limiter.acquire("a", cost=10)
    assert clock.sleeps == [found.wait]


@every_kind
def test_a_deadline_shorter_than_the_wait_refuses_at_once(make, limit, clock):
    """When the wait is a microsecond longer than the timeout, acquire raises without sleeping."""
    limiter = make(limit)
    limiter.hit("a", cost=10)
    retry_after = limiter.hit("a", cost=3).retry_after
    before = clock.now_us()
    with pytest.raises(RateLimited):
        limiter.acquire("a", cost=3, timeout=retry_after - 0.000001)
    assert clock.now_us() == before


@every_kind
def test_a_deadline_as_long_as_the_wait_is_met(make, limit):
    """A timeout of exactly the wait is long enough."""
    limiter = make(limit)
    limiter.hit("a", cost=10)
    retry_after = limiter.hit("a", cost=3).retry_after
    assert limiter.acquire("a", cost=3, timeout=retry_after)


@every_kind
def test_a_refused_acquire_took_nothing(make, limit):
    """After any number of refused acquires the key is as it was."""
    limiter = make(limit)
    limiter.hit("a", cost=10)
    before = limiter.peek("a")
    for _ in range(5):
        with pytest.raises(RateLimited):
            limiter.acquire("a", timeout=0.1)
    assert limiter.peek("a") == before


@every_kind
def test_a_timeout_of_zero_is_a_hit_that_raises(make, limit):
    """With timeout 0 acquire takes what is free and raises otherwise."""
    limiter = make(limit)
    assert limiter.acquire("a", cost=10, timeout=0)
    with pytest.raises(RateLimited):
        limiter.acquire("a", timeout=0)


@every_kind
def test_what_can_never_fit_is_refused_at_once(make, limit, clock):
    """A cost above the capacity raises at once, without any timeout."""
    limiter = make(limit)
    before = clock.now_us()
    for cost in (limit.capacity + 1, 10**30):
        with pytest.raises(RateLimited) as caught:
            limiter.acquire("a", cost=cost)
        assert caught.value.retry_after == math.inf
    assert clock.now_us() == before


def test_a_full_queue_refuses_at_once(make, clock):
    """A queue without room raises at once, however long the timeout."""
    limiter = make(LeakyBucketQueue("5/s", 10))
    limiter.acquire("a", cost=10)
    before = clock.now_us()
    with pytest.raises(RateLimited) as caught:
        limiter.acquire("a")
    assert clock.now_us() == before
    assert caught.value.retry_after == 0.2


def test_the_refusal_carries_the_decision(make):
    """RateLimited names the limit and the retry time, in its message and as a decision."""
    limiter = make(TokenBucket("5/s burst 10"), name="search")
    limiter.hit("a", cost=10)
    with pytest.raises(RateLimited, match=r"'search' refused: try again in 0\.200 s") as caught:
        limiter.acquire("a", timeout=0)
    assert caught.value.decision == limiter.hit("a")
    assert caught.value.retry_after == 0.2


def test_the_refusal_of_what_can_never_fit_has_the_size(make):
    """A cost that can never fit is refused with the limit's size."""
    with pytest.raises(RateLimited, match="can never admit this cost: its limit is 10"):
        make(TokenBucket("5/s burst 10")).acquire("a", cost=11)


def test_a_patient_refusal_counts_the_patience(make, clock):
    """retry_after is until this same call would be accepted: one that may wait 0.3 of 1 s is accepted in 0.7 s."""
    limiter = make("1/s")
    limiter.hit("a")
    with pytest.raises(RateLimited) as caught:
        limiter.acquire("a", timeout=0.3)
    assert caught.value.retry_after == 0.7
    clock.advance(0.7)
    assert limiter.acquire("a", timeout=0.3).wait == 0.3


def test_waiters_at_one_instant_get_starts_in_order(held):
    """Reservations of one key are in a queue, in the order in which they were made."""
    limiter = Limiter("5/s burst 1", store=MemoryStore(clock=held))
    assert [limiter.reserve("a").wait for _ in range(4)] == [0.0, 0.2, 0.4, 0.6]


def test_a_reserved_start_is_not_overtaken(make):
    """A hit behind a reservation is refused until the reserved start is over, in a fixed window too."""
    limiter = make(FixedWindow("10/min"))
    limiter.hit("a", cost=8)
    assert limiter.reserve("a", cost=5).wait == 60.0
    assert limiter.hit("a", cost=1).retry_after == 60.0


@every_kind
def test_numbers_count_acquires(make, limit):
    """An acquire counts once, as allowed or refused, however long it waited."""
    limiter = make(limit)
    limiter.acquire("a", cost=10)
    limiter.acquire("a")
    with pytest.raises(RateLimited):
        limiter.acquire("a", cost=21, timeout=1)
    assert limiter.stats()[:3] == (2, 1, 0)


@pytest.mark.parametrize(
    "limits", [SlidingWindowCounter("10/min"), {"a": SlidingWindowCounter("10/min"), "b": TokenBucket("20/min")}]
)
def test_a_call_whose_time_is_over_before_it_is_first_is_refused(limits):
    """A small call waits behind a large one: it can't take what the limit has left, and its decision is a refusal."""
    clock = HeldClock()
    limiter = AsyncLimiter(limits, store=MemoryStore(clock=clock))

    async def main():
        await limiter.hit("a", cost=8)
        ahead = asyncio.ensure_future(limiter.acquire("a", cost=5))
        while not clock.sleeps:
            await asyncio.sleep(0)
        behind = asyncio.ensure_future(limiter.acquire("a", timeout=1))
        while len(clock.sleeps) < 2:
            await asyncio.sleep(0)
        clock.advance(1)
        with pytest.raises(RateLimited) as refused:
            await behind
        ahead.cancel()
        return refused.value.decision

    decision = asyncio.run(main())
    assert not decision.allowed
    assert decision.retry_after > 0
    assert limiter.stats().allowed == 1
