"""Refund and reset: giving back after the fact, and forgetting."""

from __future__ import annotations

import pytest

from limitkeeper import (
    ConfigurationError,
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)

REFUNDABLE = [
    TokenBucket("5/s burst 10"),
    LeakyBucket("5/s", 10),
    FixedWindow("10/min"),
    FixedWindow("10/min", align="first"),
    SlidingWindowLog("10/min"),
    SlidingWindowCounter("10/min"),
]
each = pytest.mark.parametrize("limit", REFUNDABLE, ids=str)


@each
def test_a_refund_gives_back_its_cost(make, limit):
    """What was taken and refunded can be taken again."""
    limiter = make(limit)
    limiter.hit("a", cost=10)
    limiter.refund("a", cost=4)
    assert limiter.peek("a").remaining == 4
    assert limiter.hit("a", cost=4)


@each
def test_a_refund_never_gives_more_than_was_taken(make, limit):
    """A refund above what is taken stops at full, however large it is."""
    limiter = make(limit)
    limiter.hit("a", cost=3)
    limiter.refund("a", cost=10**30)
    assert limiter.peek("a").remaining == 10
    assert not limiter.hit("a", cost=11)


@each
def test_a_refund_to_an_unseen_key_changes_nothing(make, limit, store):
    """A key that took nothing gets nothing, and none is made."""
    limiter = make(limit)
    limiter.refund("unseen", cost=5)
    assert limiter.peek("unseen").remaining == 10
    assert len(store) == 0


@each
def test_a_refund_of_zero_changes_nothing(make, limit):
    """A refund of 0 is allowed and does nothing."""
    limiter = make(limit)
    limiter.hit("a", cost=3)
    limiter.refund("a", cost=0)
    assert limiter.peek("a").remaining == 7


def test_a_window_gives_back_to_the_current_window_only(make, clock):
    """A charge whose window has ended gives nothing to the one that runs now."""
    limiter = make(FixedWindow("10/min"))
    limiter.hit("a", cost=10)
    clock.advance(60)
    limiter.hit("a", cost=2)
    limiter.refund("a", cost=5)
    assert limiter.peek("a").remaining == 10


def test_a_counter_gives_back_to_the_current_window_only(make, clock):
    """The previous window keeps its weight: a refund can only take from the counter of the current one."""
    limiter = make(SlidingWindowCounter("10/min"))
    limiter.hit("a", cost=10)
    clock.advance(60 + 30)
    limiter.hit("a", cost=3)
    limiter.refund("a", cost=8)
    assert limiter.peek("a").remaining == 5


def test_the_log_gives_back_from_its_newest_entries(make, clock):
    """A refund takes from the newest entries: the oldest one still expires when it did."""
    limiter = make(SlidingWindowLog("10/min"))
    limiter.hit("a", cost=4)
    clock.advance(10)
    limiter.hit("a", cost=3)
    clock.advance(10)
    limiter.hit("a", cost=3)
    limiter.refund("a", cost=5)
    assert limiter.peek("a", cost=6).retry_after == 40.0  # the 4 of the first entry, then 1 of the second
    assert limiter.peek("a", cost=10).retry_after == 50.0


def test_a_bucket_gives_back_what_time_has_not(make, clock):
    """A refund beside the refill does not fill a bucket above its burst."""
    limiter = make(TokenBucket("5/s burst 10"))
    limiter.hit("a", cost=10)
    clock.advance(1.9)
    limiter.refund("a", cost=10)
    assert limiter.peek("a").remaining == 10
    clock.advance(0.1)
    assert not limiter.hit("a", cost=11)


@pytest.mark.parametrize("limit", [LeakyBucketQueue("5/s"), LeakyBucketQueue("5/s", 10)], ids=str)
def test_a_queue_wants_cancel(make, limit):
    """A queue can't take a refund, its turn is over: a ConfigurationError that names cancelling the reservation as the remedy."""
    limiter = make(limit)
    limiter.hit("a")
    with pytest.raises(ConfigurationError, match="cancel the reservation"):
        limiter.refund("a")


def test_several_limits_are_refunded_by_name(make):
    """A refund takes keys and costs by name as a hit does."""
    limiter = make({"user": TokenBucket("5/s burst 10"), "tenant": FixedWindow("20/min")})
    limiter.hit("a", cost=10)
    limiter.refund({"user": None, "tenant": "a"}, cost={"tenant": 7})
    assert [part.remaining for part in limiter.peek("a").decisions] == [0, 17]


ALL = [*REFUNDABLE, LeakyBucketQueue("5/s"), LeakyBucketQueue("5/s", 10)]


@pytest.mark.parametrize("limit", ALL, ids=str)
def test_reset_forgets_a_key(make, limit, store):
    """A key that was reset is as new, and no longer kept."""
    limiter = make(limit)
    limiter.acquire("a", cost=7)
    limiter.acquire("b", cost=7)
    before = limiter.peek("b")
    limiter.reset("a")
    assert limiter.peek("a").reset_after == 0.0
    assert [key for key, _ in store.items(limiter.named[0])] == ["b"]
    assert limiter.peek("b") == before


def test_resetting_an_unseen_key_gives_it_no_state(make, store, clock):
    """A new key can be reset: it stays full, and is dropped when the reset is no longer remembered."""
    limiter = make("5/s")
    limiter.reset("unseen")
    assert limiter.peek("unseen").remaining == 5
    assert list(store.items(limiter.named[0])) == []
    clock.advance(3601)
    store.sweep()
    assert len(store) == 0


def test_reset_by_name_leaves_the_skipped_limit_alone(make):
    """A limit whose key is None keeps its state."""
    limiter = make({"user": TokenBucket("5/s burst 10"), "tenant": FixedWindow("20/min")})
    limiter.hit("a", cost=10)
    limiter.reset({"user": "a", "tenant": None})
    assert [part.remaining for part in limiter.peek("a").decisions] == [10, 10]


def test_reset_gives_a_ramping_bucket_what_an_unseen_key_has(make, clock):
    """With `initial`, a key reset 1 s after the limiter's birth holds initial + rate × 1 s."""
    limiter = make(TokenBucket("5/s burst 100 initial 10"))
    limiter.hit("a", cost=10)
    clock.advance(1)
    limiter.reset("a")
    assert limiter.peek("a").remaining == 15
    assert limiter.peek("unseen").remaining == 15


def test_those_that_wait_move_up_after_a_refund_of_a_log_without_entries(make):
    """A refund of a bucket's key and of a log's key that has no entry: the reservation behind it on the bucket moves up."""
    limiter = make({"bucket": TokenBucket("1/s burst 2"), "log": SlidingWindowLog("10/min")})
    limiter.hit({"bucket": "a", "log": "b"}, cost=2)
    reservation = limiter.reserve({"bucket": "a", "log": "b"})
    assert reservation.wait == 1.0
    limiter.refund({"bucket": "a", "log": "unseen"})
    assert reservation.wait == 0.0
