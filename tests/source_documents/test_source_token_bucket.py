"""The token bucket, with the numbers of the five texts that the project started from."""

from __future__ import annotations

from math import ceil

from limitkeeper import Limiter, TokenBucket


def test_steady_traffic_below_the_rate_all_succeeds(clock, store):
    """5 tokens/s, size 10: at 3 requests a second the bucket never empties and all succeed."""
    limiter = Limiter(TokenBucket("5/s burst 10"), store=store)
    found = []
    for _ in range(60):
        found += [limiter.hit("user") for _ in range(3)]
        clock.advance(1)
    assert all(found)
    assert min(decision.remaining for decision in found) == 7


def test_ten_at_once_are_all_allowed_and_leave_the_bucket_empty(store):
    """A spike of 10 on a full bucket of 10 is allowed, and the bucket is now empty."""
    limiter = Limiter(TokenBucket("5/s burst 10"), store=store)
    assert [limiter.hit("user").remaining for _ in range(10)] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_what_comes_after_the_spike_is_refused_until_tokens_refill(clock, store):
    """After the spike there is no token; the next one comes after 200 ms, not a microsecond earlier."""
    limiter = Limiter(TokenBucket("5/s burst 10"), store=store)
    limiter.hit("user", cost=10)
    assert limiter.hit("user").retry_after == 0.2
    clock.advance(0.199999)
    assert not limiter.hit("user")
    clock.advance(0.000001)
    assert limiter.hit("user")
    assert not limiter.hit("user")


def test_an_empty_bucket_is_full_again_after_two_seconds(clock, store):
    """10 tokens at 5 a second take 2 s, and more time saves up nothing more."""
    limiter = Limiter(TokenBucket("5/s burst 10"), store=store)
    assert limiter.hit("user", cost=10).reset_after == 2.0
    clock.advance(3600)
    assert limiter.peek("user").remaining == 10


def test_a_spike_of_50_is_served_from_100_saved_up_tokens(store):
    """Capacity 100 at 5 tokens/s: a sudden spike of 50 is served at once."""
    limiter = Limiter(TokenBucket("5/s burst 100"), store=store)
    assert all(limiter.hit("user") for _ in range(50))
    assert limiter.peek("user").remaining == 50


def test_sustained_overload_is_throttled_to_the_refill_rate(clock, store):
    """Capacity 100 at 5 tokens/s under 20 requests/s: 100 saved up, then 5 for every second."""
    limiter = Limiter(TokenBucket("5/s burst 100"), store=store)
    allowed = 0
    for _ in range(60 * 20):
        allowed += bool(limiter.hit("user"))
        clock.advance(0.05)
    assert allowed == 100 + 5 * 60 - 1  # the last token of minute one is due when the minute is over


def test_the_bucket_never_exceeds_its_capacity(clock, store):
    """If the bucket is already full, extra tokens are discarded."""
    limiter = Limiter(TokenBucket("5/s burst 100"), store=store)
    limiter.hit("user")
    clock.advance(86400)
    assert sum(bool(limiter.hit("user")) for _ in range(200)) == 100


def test_a_rate_per_second_is_a_rate_per_millisecond(clock, store):
    """5 tokens a second are 0.005 tokens a millisecond: the thousandth millisecond brings the fifth token."""
    limiter = Limiter(TokenBucket("5/s burst 10"), store=store)
    limiter.hit("user", cost=10)
    found = []
    for _ in range(1000):
        clock.advance(0.001)
        found.append(limiter.peek("user").remaining)
    assert [found.index(level) + 1 for level in (1, 2, 3, 4, 5)] == [200, 400, 600, 800, 1000]


def test_three_and_then_four_tokens_at_a_time(store):
    """A token bucket supports three tokens and four tokens at a time."""
    limiter = Limiter(TokenBucket("5/s burst 10"), store=store)
    assert [bool(limiter.hit("user", cost=cost)) for cost in (3, 4, 4, 3)] == [True, True, False, True]


def test_a_bucket_that_starts_with_no_token_makes_one_every_100_ms(clock, store):
    """Starting level zero, one token per 100 ms: the first call has to wait 100 ms and is then admitted."""
    limiter = Limiter(TokenBucket("1/100ms burst 5 initial 0"), store=store)
    assert limiter.hit("user").retry_after == 0.1
    clock.advance(0.1)
    assert limiter.hit("user")
    assert not limiter.hit("user")


def test_permissions_are_preassigned_and_refilled_gradually(clock, store):
    """10 per second, capacity 10, initially 2: at 0 take 1 and 1 is left; at 50 ms 2 have to wait 50 ms more."""
    limiter = Limiter(TokenBucket("10/s burst 10 initial 2"), store=store)
    assert limiter.hit("user").remaining == 1
    clock.advance(0.05)
    assert not limiter.reserve("user", cost=2, max_wait=0)
    assert limiter.peek("user").remaining == 1
    assert limiter.reserve("user", cost=2, max_wait=0.1).wait == 0.05


def test_after_a_long_pause_capacity_minus_the_permits_is_left(clock, store):
    """10 per second, capacity 10: after 5 s of pause 4 are taken from a full bucket, and 6 are left."""
    limiter = Limiter(TokenBucket("10/s burst 10 initial 2"), store=store)
    limiter.hit("user", cost=2)
    clock.advance(5)
    assert limiter.hit("user", cost=4).remaining == 6


def test_idling_does_not_admit_twice_the_capacity(clock, store):
    """Refill first, then take: after idling a bucket of 10 admits 10 at once, not 20."""
    limiter = Limiter(TokenBucket("1/100ms burst 10"), store=store)
    clock.advance(60)
    assert sum(bool(limiter.hit("user")) for _ in range(40)) == 10


def test_no_fraction_of_a_token_is_lost(clock, store):
    """Called every 70 ms for a minute, one token per 100 ms admits 600, not the 428 of an integer recompute."""
    limiter = Limiter(TokenBucket("1/100ms burst 10 initial 0"), store=store)
    allowed = 0
    for _ in range(857):  # 59.99 s
        clock.advance(0.07)
        allowed += bool(limiter.hit("user"))
    clock.advance(0.01)
    assert allowed + bool(limiter.hit("user")) == 600


def test_the_flash_sale_lets_200_a_second_through(clock, store):
    """A partner key at 200/s burst 400 that calls 20 000 times a second gets 400 at once, then 200 a second."""
    limiter = Limiter(TokenBucket("200/s burst 400"), store=store)
    seconds = []
    for _ in range(3):
        allowed = 0
        for _ in range(200):
            allowed += sum(bool(decision) for decision in limiter.hit_many(["partner"] * 100))
            clock.advance(0.005)
        seconds.append(allowed)
    assert seconds == [400 + 199, 200, 200]


def test_the_checkout_limit_of_5_a_second_has_a_retry_after_of_one(store):
    """5/s burst 10 per user: the eleventh attempt at once is refused, and in whole seconds its Retry-After is 1."""
    limiter = Limiter(TokenBucket("5/s burst 10"), store=store)
    found = [limiter.hit("user") for _ in range(11)]
    assert [bool(decision) for decision in found] == [True] * 10 + [False]
    assert ceil(found[-1].retry_after) == 1


def test_users_do_not_share_a_bucket(store):
    """Public users have 20/s burst 40 each: one who used it all up does not stop another."""
    limiter = Limiter(TokenBucket("20/s burst 40"), store=store)
    assert sum(bool(limiter.hit("greedy")) for _ in range(100)) == 40
    assert limiter.hit("modest").remaining == 39


def test_the_capacity_of_350_is_split_into_200_for_partners_and_150_for_the_public(store):
    """400 concurrent checkouts at 0.8 s are 500/s, 70 % of that is 350/s: partners get 200 of it, the public 150."""
    limiter = Limiter({"all": "350/s", "partner": "200/s", "public": "150/s"}, store=store)
    partners = [limiter.hit({"all": "checkout", "partner": "acme", "public": None}) for _ in range(1000)]
    public = [limiter.hit({"all": "checkout", "partner": None, "public": "everybody"}) for _ in range(1000)]
    assert (sum(map(bool, partners)), sum(map(bool, public))) == (200, 150)
    assert limiter.peek({"all": "checkout", "partner": None, "public": None}).remaining == 0
