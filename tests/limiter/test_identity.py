"""Names, and the identity of state: (limiter name, limit name, algorithm, key)."""

from __future__ import annotations

import pytest

from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)


def test_a_limiter_is_named_by_its_rule(make):
    """Without a name a limiter has the canonical text of its rule as its name, and so do its decisions."""
    limiter = make("5 per second BURST 10")
    assert limiter.name == "token bucket 5/s burst 10"
    assert limiter.hit("a").name == "token bucket 5/s burst 10"


def test_equal_rules_share_one_store(make):
    """Two limiters with equal rules on one store are one limit."""
    make("5/s burst 10").hit("a", cost=7)
    assert make(TokenBucket(5, per=1, burst=10)).hit("a").remaining == 2


def test_different_rules_never_meet(make):
    """Another rate, another option or another algorithm is another state."""
    make("5/s burst 10").hit("a", cost=10)
    for other in ("5/s burst 11", "6/s burst 10", "leaky bucket 5/s capacity 10", "fixed window 10/s"):
        assert make(other).peek("a").reset_after == 0.0


def test_different_stores_never_meet(make, clock):
    """The same rule on another store is another state."""
    make("5/s").hit("a", cost=5)
    assert make("5/s", store=MemoryStore(clock=clock)).hit("a", cost=5)


def test_different_names_never_meet(make):
    """Equal rules under different names have states of their own."""
    make("5/s", name="read").hit("a", cost=5)
    assert make("5/s", name="write").hit("a", cost=5)


def test_an_explicit_name_is_the_decisions_name(make):
    """A named limiter with one limit gives that limit its name."""
    assert make("5/s", name="search").hit("a").name == "search"


def test_limits_of_a_mapping_go_by_their_names(make):
    """In a mapping each limit has its own name."""
    limiter = make({"user": "5/s", "tenant": "9/s"}, name="api")
    assert (limiter.name, [part.name for part in limiter.hit("a").decisions]) == ("api", ["user", "tenant"])


def test_one_name_with_another_algorithm_is_another_state(make):
    """Under one name, another algorithm never reads the state of the first."""
    make(TokenBucket("5/s burst 10"), name="api").hit("a", cost=10)
    for other in (LeakyBucket("5/s", 10), FixedWindow("10/s"), SlidingWindowLog("10/s"), SlidingWindowCounter("10/s")):
        assert make(other, name="api").peek("a").remaining == 10


def test_a_bucket_keeps_its_state_under_a_changed_rate(make):
    """Under an explicit name a changed rate keeps what was taken."""
    make("5/s burst 10", name="api").hit("a", cost=4)
    assert make("7/s burst 10", name="api").peek("a").remaining == 6
    assert make("7/s burst 20", name="api").peek("a").remaining == 16


def test_a_bucket_is_clamped_to_a_smaller_burst(make, clock):
    """A deficit of a larger bucket is clamped to the smaller one: empty, never in debt."""
    make("5/s burst 100", name="api").hit("a", cost=60)
    small = make("5/s burst 10", name="api")
    assert small.peek("a").remaining == 0
    assert small.hit("a").retry_after == 0.2


def test_a_reservation_ahead_is_clamped_to_the_size_of_a_new_rate(make):
    """A new rate starts empty at worst, never in debt; the reservation stays where it was made."""
    limiter = make("5/s burst 10", name="api")
    limiter.hit("a", cost=10)
    limiter.reserve("a", cost=5)
    assert make("10/s burst 10", name="api").hit("a").retry_after == 0.1
    assert limiter.hit("a").retry_after == 1.2


def test_a_changed_rate_counts_from_the_change(make, clock):
    """Time before the first use under the new rate refills at the old one, time after it at the new one, each on its own."""
    slow = make("1/s burst 10", name="api")
    slow.hit("a", cost=10)
    clock.advance(2)
    fast = make("4/s burst 10", name="api")
    assert fast.peek("a").remaining == 2
    fast.hit("a", cost=0)
    fast.hit("a", cost=1)
    clock.advance(1)
    assert (fast.peek("a").remaining, slow.peek("a").remaining) == (5, 2)


def test_a_queue_keeps_its_backlog_under_a_changed_rate(make):
    """4 turns taken at 1/s are 4 turns at 2/s: the next one comes after 2 s."""
    make(LeakyBucketQueue("1/s", 10), name="api").reserve("a", cost=4)
    assert make(LeakyBucketQueue("2/s", 10), name="api").hit("a").retry_after == 2.0


def test_a_window_keeps_what_is_used_under_a_changed_count(make):
    """7 used of 10 are 7 used of 20, and more than all of 5."""
    make(FixedWindow("10/min"), name="api").hit("a", cost=7)
    assert make(FixedWindow("20/min"), name="api").peek("a").remaining == 13
    assert make(FixedWindow("5/min"), name="api").peek("a").remaining == 0


def test_a_window_of_another_length_starts_with_what_is_used(make, clock):
    """What is used in the old window counts in the window of the new length that runs now."""
    clock.advance(10)
    make(FixedWindow("10/min"), name="api").hit("a", cost=7)
    found = make(FixedWindow("10/h"), name="api").peek("a")
    assert (found.remaining, found.reset_after) == (3, 3590.0)


def test_an_ended_window_is_not_taken_over(make, clock):
    """A window that has ended under the old length counts nothing under the new one."""
    make(FixedWindow("10/min"), name="api").hit("a", cost=7)
    clock.advance(60)
    assert make(FixedWindow("10/h"), name="api").peek("a").remaining == 10


def test_a_log_means_the_same_under_any_rate(make, clock):
    """Entries are moments: under a longer window those that still lie in it count."""
    make(SlidingWindowLog("10/min"), name="api").hit("a", cost=7)
    clock.advance(30)
    found = make(SlidingWindowLog("8/40s"), name="api")
    assert found.peek("a").remaining == 1
    clock.advance(10)
    assert found.peek("a").remaining == 8


def test_a_counter_keeps_both_counts_under_a_changed_count(make, clock):
    """With windows of the same length both counters stay."""
    limiter = make(SlidingWindowCounter("10/min"), name="api")
    limiter.hit("a", cost=8)
    clock.advance(90)
    limiter.hit("a", cost=2)
    assert make(SlidingWindowCounter("20/min"), name="api").peek("a").remaining == 14


def test_a_look_under_another_rate_changes_nothing(make):
    """Refused is free: a peek or a refused hit under a smaller burst leaves the larger one as empty as it was."""
    large, small = make("5/s burst 10", name="api"), make("5/s burst 9", name="api")
    large.hit("a", cost=10)
    before = large.peek("a")
    small.peek("a")
    small.hit("a")
    assert large.peek("a") == before


def test_changing_there_and_back_gives_nothing_away(make):
    """Switching between two rates of one name, with a hit each time, admits no more than the larger burst."""
    one, two = make("5/s burst 10", name="api"), make("3/s burst 9", name="api")
    assert sum(bool(limiter.hit("a")) for _ in range(20) for limiter in (one, two)) <= 10


def test_initial_is_what_every_key_holds_at_the_limiters_birth(make, clock):
    """A new key holds min(burst, initial + rate × age), whenever it is first used."""
    limiter = make("5/s burst 100 initial 10")
    assert limiter.peek("a").remaining == 10
    clock.advance(2)
    assert limiter.peek("b").remaining == 20
    clock.advance(3600)
    assert limiter.peek("c").remaining == 100


def test_initial_with_several_limits_counts_from_the_limiters_birth(make, clock):
    """Among several limits too the ramp starts when the limiter is made, not at its first call."""
    limiter = make({"slow start": "5/s burst 100 initial 10", "window": "fixed window 1000/min"})
    clock.advance(2)
    assert limiter.peek({"slow start": "a", "window": None}).remaining == 20


def test_an_idle_key_of_a_ramping_bucket_is_not_better_off(make, clock, store):
    """A key that used its initial tokens and waited holds what a new key minus its use would."""
    limiter = make("5/s burst 100 initial 10")
    limiter.hit("a", cost=10)
    clock.advance(2)
    store.sweep()
    assert (limiter.peek("a").remaining, limiter.peek("unseen").remaining) == (10, 20)


def test_a_new_limiter_on_an_old_store_has_its_keys(store):
    """A limiter made again on its store continues with the same state."""
    Limiter("5/s", store=store).hit("a", cost=5)
    assert not Limiter("5/s", store=store).hit("a")


@pytest.mark.parametrize("limits", ["5/s", {"user": "5/s"}, ["5/s"]])
def test_one_limit_in_any_shape_answers_alike(make, limits):
    """One limit alone, in a mapping or in a list gives the same answers."""
    limiter = make(limits)
    assert [limiter.hit("a").remaining for _ in range(6)] == [4, 3, 2, 1, 0, 0]
