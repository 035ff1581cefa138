"""The edges at which a rule once broke a law: one small case each, so that they are tried in every run."""

from __future__ import annotations

from typing import Any

import pytest

from limitkeeper import FixedWindow, LeakyBucketQueue, Limiter, MemoryStore, SlidingWindowLog, TokenBucket
from limitkeeper.testing import ManualClock

NOW = 1_700_000_123.456789


def made(limits: Any, name: str | None = None) -> tuple[Limiter, ManualClock]:
    clock = ManualClock(NOW)
    return Limiter(limits, store=MemoryStore(clock=clock), name=name), clock


def test_a_common_start_beyond_what_a_limit_can_count_is_refused_by_all() -> None:
    """Allowed means charged in every limit: a start at which one of the limits can't be charged is refused."""
    limiter, _ = made({"bucket": TokenBucket("999999999/s"), "window": FixedWindow("1/400d")})
    limiter.hit("a")
    before = [list(limiter.store.items(one)) for one in limiter.named]
    reservation = limiter.reserve("a")
    after = [list(limiter.store.items(one)) for one in limiter.named]
    if reservation:
        assert all(part.allowed for part in reservation.decision.decisions)
        assert all(then != now for then, now in zip(before, after, strict=True))
    else:
        assert after == before


def test_a_start_that_one_of_several_limits_can_count_only_later_has_an_exact_retry() -> None:
    """A window opens in four hours, the caller waits three; the bucket beside it counts two and a half hours ahead."""
    bucket = TokenBucket("1000003/min")
    limiter, clock = made({"bucket": bucket, "window": FixedWindow("1/4h", align="first")})
    limiter.hit("a")
    refused = limiter.reserve("a", max_wait="3h").decision
    assert refused.retry_us == 4 * 3_600_000_000 - bucket.horizon
    clock.advance(refused.retry_after - 0.000001)
    assert not limiter.reserve("a", max_wait="3h")
    clock.advance(0.000001)
    assert limiter.reserve("a", max_wait="3h")


@pytest.mark.parametrize("limit", [LeakyBucketQueue("10007/30d"), TokenBucket("1234567/d", initial=0)], ids=str)
def test_patience_is_honest_between_two_coarse_ticks(limit: Any) -> None:
    """A limit that counts in coarser ticks keeps its promise to a caller whose timeout is no whole number of them."""
    limiter, clock = made(limit)
    limiter.hit("a")
    for patience in (0.000001, 0.000015, 0.00015, 0.001):
        refused = limiter.reserve("a", 1, patience).decision
        assert not refused
        clock.advance(refused.retry_after - limit.tick / 1e6)
        assert not limiter.reserve("a", 1, patience)
        clock.advance(limit.tick / 1e6)
        assert limiter.reserve("a", 1, patience)
        limiter.reserve("a", 1)


def test_a_charge_settled_ahead_of_its_start_stays_paid_for() -> None:
    """A reservation that began is cancelled: the one behind it, already settled, is not given away with it."""
    limiter, clock = made(TokenBucket("5/s", burst=1))
    begun, ahead = limiter.reserve("a"), limiter.reserve("a")
    ahead.settle(1)
    clock.advance(0.199999)
    begun.cancel()
    clock.advance(0.000002)
    assert not limiter.hit("a")


def test_a_charge_behind_a_gap_stays_paid_for() -> None:
    """A charge at a later, common start is not given away by an earlier one that is cancelled."""
    limiter, clock = made({"bucket": TokenBucket("1/s", burst=20), "slow": LeakyBucketQueue("1/10s")})
    early, late = limiter.reserve("a"), limiter.reserve("a")
    late.settle({"bucket": 1, "slow": 1})
    early.cancel()
    clock.advance(10.0)
    assert not limiter.hit({"bucket": "a", "slow": None}, 20)


@pytest.mark.parametrize("used", [0, 1])
def test_a_window_charged_far_ahead_and_cancelled_is_as_before(used: int) -> None:
    """Reserved several windows ahead and cancelled: what is left of the running window can be used."""
    limiter, _ = made({"window": FixedWindow("5/s"), "slow": LeakyBucketQueue("1/10s")})
    limiter.hit({"window": "a", "slow": None}, used)
    limiter.hit({"window": None, "slow": "x"})
    limiter.reserve({"window": "a", "slow": "x"}).cancel()
    assert limiter.peek({"window": "a", "slow": None}).remaining == 5 - used
    assert limiter.hit({"window": "a", "slow": None}, 5 - used)


def test_a_window_reserved_ahead_has_nothing_left_now() -> None:
    """`remaining` is what a hit could take now: behind a reservation ahead, nothing, however windows are aligned."""
    for align in ("clock", "first"):
        limiter, _ = made(FixedWindow("5/s", align=align))
        limiter.hit("a", 5)
        limiter.reserve("a")
        refused = limiter.hit("a")
        assert (refused.allowed, refused.remaining) == (False, 0)


def test_a_refund_leaves_what_is_still_to_start() -> None:
    """A hit is refunded in a store that can't rebook: the one reserved ahead still counts when it starts."""
    limiter, clock = made(SlidingWindowLog("1/s"))
    limiter.hit("a")
    assert limiter.reserve("a").wait == 1.0
    limiter.store.give_back(limiter.claims("a"))
    clock.advance(1.0)
    assert not limiter.hit("a")


def test_a_limit_with_a_cost_of_zero_shows_its_remaining() -> None:
    """With a cost of 0 a limit of several shows its current remaining, also when the others start later."""
    limiter, _ = made({"log": SlidingWindowLog("1/5s"), "bucket": TokenBucket("1/s", burst=10)})
    limiter.hit("a")
    part = limiter.reserve("a", {"log": 1, "bucket": 0}).decision.decisions[1]
    assert (part.remaining, part.reset_after) == (9, 1.0)


def test_a_waiter_that_moves_up_is_not_delayed_by_a_rounded_start() -> None:
    """Starts are rounded up to a tick for the caller; when the queue moves up, the rounding leaves no gap."""
    for limit, costs, waits in (
        (TokenBucket("54/min", burst=2), (1, 2, 1), [0.0, 0.0]),
        (FixedWindow("2/s"), (1, 2, 1), [0.0, 0.0]),
        (LeakyBucketQueue("3 per 7us", capacity=10), (1, 1, 1, 1), [0.0, 0.000003, 0.000005]),
    ):
        limiter, _ = made(limit)
        line = [limiter.reserve("a", cost) for cost in costs]
        line.pop(1).cancel()
        assert [one.wait for one in line] == waits


@pytest.mark.parametrize("late", [2, 200_000, 600_000, 1_000_000])
@pytest.mark.parametrize("first", [1, 2, 4, 5])
@pytest.mark.parametrize("passed", [0, 1])
def test_a_later_start_stays_paid_for_when_a_larger_charge_is_given_back(late: int, first: int, passed: int) -> None:
    """A charge that began at once is no future start, however long the bucket takes to refill."""
    limit, now = TokenBucket("5/s burst 5"), 1_700_000_123_456_789
    *state, _, _, _, _ = limit.decide(limit.new(now), now, first, 0)
    *state, start, _, _, _ = limit.decide(tuple(state), now, 1, 1_000_000, now + late)
    assert start >= now + late
    state = limit.give_back(tuple(state), now + passed, first, now, first)
    for moment in (start, start + 199_999):
        assert limit.decide(tuple(state), moment, 5, 0)[3] == -1
    assert limit.decide(tuple(state), start + 200_000, 5, 0)[3] == start + 200_000


def test_what_is_settled_ahead_of_a_later_start_stays_paid_for() -> None:
    """Settled below its estimate before it starts: what remains is not given away by an earlier charge."""
    limit, now = TokenBucket("5/s burst 5"), 1_700_000_123_456_789
    *state, _, _, _, _ = limit.decide(limit.new(now), now, 2, 0)
    *state, late, _, _, _ = limit.decide(tuple(state), now, 3, 1_000_000, now + 1_000_000)
    state = limit.give_back(tuple(state), now, 2, late, 3)
    state = limit.give_back(tuple(state), now, 2, now, 2)
    assert limit.decide(tuple(state), late, 5, 0)[3] == -1
    assert limit.decide(tuple(state), late, 4, 0)[3] == late


@pytest.mark.parametrize("late", [0, 1_000_000])
@pytest.mark.parametrize("cost", [1, 2, 5])
def test_a_start_that_has_come_gives_back_all_that_it_took(cost: int, late: int) -> None:
    """The last charge had to wait, began and is given back: the bucket is as full as if it had never been charged."""
    limit, now = TokenBucket("5/s burst 5"), 1_700_000_123_456_789
    *state, _, _, _, _ = limit.decide(limit.new(now), now, 5, 0)
    *state, start, _, _, _ = limit.decide(tuple(state), now, cost, 10**9, now + late)
    assert start > now
    state = limit.give_back(tuple(state), start, cost, start, cost)
    before = limit.decide(limit.new(now), now, 5, 0)[:3]
    assert limit.decide(tuple(state), start, 0, 0)[5] == limit.decide(before, start, 0, 0)[5]
