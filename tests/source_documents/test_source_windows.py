"""Fixed windows, the sliding log and the sliding counter, with the numbers of the texts that the project started from."""

from __future__ import annotations

import pytest

from limitkeeper import FixedWindow, Limiter, SlidingWindowCounter, SlidingWindowLog


class Day:
    """Sets the clock to a time of day, written as people do: 12:00:05."""

    def __init__(self, clock):
        self.clock = clock
        self.noon = clock.now_us()

    def at(self, text):
        hours, minutes, seconds = text.split(":")
        target = self.noon + round(((int(hours) - 12) * 3600 + int(minutes) * 60 + float(seconds)) * 1e6)
        self.clock.advance((target - self.clock.now_us()) / 1e6)


@pytest.fixture
def day(clock):
    return Day(clock)


# Fixed window


def test_the_double_dip_passes_20_within_2_ms(day, store):
    """10/s on the clock: 10 at 12:00:00.999 and 10 at 12:00:01.001 all pass, twice the limit in 2 ms."""
    limiter = Limiter(FixedWindow("10/s"), store=store)
    day.at("12:00:00.999")
    before = [limiter.hit("user") for _ in range(10)]
    day.at("12:00:01.001")
    after = [limiter.hit("user") for _ in range(10)]
    assert sum(map(bool, before + after)) == 20


def test_the_double_dip_is_all_there_is(day, store):
    """Each window still holds its own limit: an eleventh call is refused on both sides of the edge."""
    limiter = Limiter(FixedWindow("10/s"), store=store)
    for moment in ("12:00:00.999", "12:00:01.001"):
        day.at(moment)
        assert [bool(limiter.hit("user")) for _ in range(11)] == [True] * 10 + [False]


def test_three_a_minute_admits_six_around_the_round_minute(day, store):
    """3/min: 3 late in one minute and 3 early in the next are 6 in the minute between 12:00:29 and 12:01:29."""
    limiter = Limiter(FixedWindow("3/min"), store=store)
    admitted = 0
    for moment in ("12:00:29", "12:00:45", "12:00:59", "12:01:00", "12:01:10", "12:01:28"):
        day.at(moment)
        admitted += bool(limiter.hit("user"))
    assert admitted == 6


def test_the_fourth_of_a_minute_is_dropped_until_the_next_begins(day, store):
    """3/min: the fourth request is refused until the end of the minute, and the round minute admits it."""
    limiter = Limiter(FixedWindow("3/min"), store=store)
    day.at("12:00:30")
    assert [bool(limiter.hit("user")) for _ in range(4)] == [True, True, True, False]
    assert limiter.hit("user").retry_after == 30.0
    day.at("12:00:59.999999")
    assert not limiter.hit("user")
    day.at("12:01:00")
    assert limiter.hit("user").remaining == 2


def test_a_window_that_opens_with_its_first_request_lasts_60_seconds_from_there(day, store):
    """When now − windowStart ≥ 60 s the window starts anew at now with this request counted."""
    limiter = Limiter(FixedWindow("3/min", align="first"), store=store)
    day.at("12:00:30")
    assert limiter.hit("user", cost=3).reset_after == 60.0
    day.at("12:01:29.999999")
    assert not limiter.hit("user")
    day.at("12:01:30")
    assert limiter.hit("user").remaining == 2


def test_the_headers_of_a_used_up_quota_are_100_0_and_900(store):
    """100 per 15 minutes, used up at the quarter: limit 100, remaining 0, retry after 900 seconds."""
    limiter = Limiter(FixedWindow("100 per 15 minutes"), store=store)
    limiter.hit("client", cost=100)
    refused = limiter.hit("client")
    assert (refused.limit, refused.remaining, refused.retry_after) == (100, 0, 900.0)


@pytest.mark.parametrize(("service", "a_minute"), [("catalog", 1000), ("orders", 10), ("payments", 5), ("search", 100)])
def test_every_service_of_the_shop_has_its_own_limit_per_user(service, a_minute, store):
    """Catalog 1000, orders 10, payments 5 and search 100 a minute: each admits its number and no more."""
    limiter = Limiter(FixedWindow(a_minute, per="minute"), store=store, name=service)
    assert sum(map(bool, limiter.hit_many(["user"] * (a_minute + 5)))) == a_minute


# Sliding window log


def test_the_log_admits_five_in_the_first_minute_and_refuses_the_sixth(day, store):
    """5 per 60 s: 12:00:05, :10, :20, :40 and :50 are allowed, 12:00:55 is refused."""
    limiter = Limiter(SlidingWindowLog("5/min"), store=store)
    found = []
    for second in ("05", "10", "20", "40", "50", "55"):
        day.at(f"12:00:{second}")
        found.append(bool(limiter.hit("user")))
    assert found == [True] * 5 + [False]


@pytest.fixture
def refused_at_55(day, store):
    """The log of the example, after 12:00:55 was refused."""
    limiter = Limiter(SlidingWindowLog("5/min"), store=store)
    for second in ("05", "10", "20", "40", "50", "55"):
        day.at(f"12:00:{second}")
        limiter.hit("user")
    return limiter


def test_the_refused_caller_gets_the_first_expiry(refused_at_55):
    """At 12:00:55 the oldest entry has 10 seconds left in the window, and that is the retry time."""
    assert refused_at_55.hit("user").retry_after == 10.0


def test_an_entry_exactly_one_window_old_no_longer_counts(refused_at_55, day):
    """12:00:05 + 60 s: at 12:01:05 a call is allowed, a microsecond earlier it is not."""
    day.at("12:01:04.999999")
    assert not refused_at_55.hit("user")
    day.at("12:01:05")
    assert refused_at_55.hit("user")


def test_at_12_01_06_the_first_entry_is_gone_and_a_call_is_allowed(refused_at_55, day):
    """At 12:01:06 the entry of 12:00:05 is removed, 4 are left, and the call is allowed as the fifth."""
    day.at("12:01:06")
    assert refused_at_55.peek("user").remaining == 1
    assert refused_at_55.hit("user").remaining == 0


def test_the_log_keeps_one_timestamp_for_each_admitted_call(refused_at_55, store, clock):
    """The log is [05, 10, 20, 40, 50]: the refused call of 12:00:55 left nothing."""
    noon = clock.now_us() - 55_000_000
    [(key, (entries, _, _))] = store.items(refused_at_55.named[0])
    assert key == "user"
    assert [((moment - noon) / 1e6, cost) for moment, cost in entries] == [(5, 1), (10, 1), (20, 1), (40, 1), (50, 1)]


def test_the_log_solves_the_double_dip(day, store):
    """10/s: of 10 at 12:00:00.999 and 10 at 12:00:01.001 the log admits 10."""
    limiter = Limiter(SlidingWindowLog("10/s"), store=store)
    day.at("12:00:00.999")
    before = [limiter.hit("user") for _ in range(10)]
    day.at("12:00:01.001")
    after = [limiter.hit("user") for _ in range(10)]
    assert (sum(map(bool, before)), sum(map(bool, after))) == (10, 0)


# Sliding window counter


@pytest.fixture
def half_way(day, store):
    """8 calls in minute one, 5 until half way through minute two."""
    limiter = Limiter(SlidingWindowCounter("10/min"), store=store)
    day.at("12:00:30")
    limiter.hit("user", cost=8)
    day.at("12:01:30")
    assert limiter.hit("user", cost=5)
    return limiter


def test_eight_and_five_half_way_are_an_estimate_of_nine_so_one_more_is_allowed(half_way):
    """5 + 8 · ½ = 9 of 10: under the limit, so allowed."""
    assert half_way.peek("user").remaining == 1
    assert half_way.hit("user")


def test_after_that_the_estimate_is_ten_and_the_next_is_refused(half_way):
    """6 + 8 · ½ = 10 of 10: the next call is refused, until 8 calls weigh one less, 7.5 s later."""
    half_way.hit("user")
    assert half_way.hit("user").retry_after == 7.5


def test_a_jump_over_a_whole_window_forgets_the_previous_count(day, store):
    """When more than one window was jumped, the previous count is zero and the limit is free again."""
    limiter = Limiter(SlidingWindowCounter("10/min"), store=store)
    limiter.hit("user", cost=10)
    day.at("12:02:00")
    assert limiter.peek("user").remaining == 10


def test_at_the_start_of_a_window_the_previous_one_weighs_all(day, store):
    """At the very start of a window all of the previous count weighs; a tenth of the window later a tenth has faded."""
    limiter = Limiter(SlidingWindowCounter("10/min"), store=store)
    limiter.hit("user", cost=10)
    day.at("12:01:00")
    assert not limiter.hit("user")
    day.at("12:01:06")
    assert [bool(limiter.hit("user")) for _ in range(2)] == [True, False]
