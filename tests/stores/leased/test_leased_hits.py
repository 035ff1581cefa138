"""Hits on a leased store: decisions from RAM, calls of the parent, and refunds, on a manual clock."""

from __future__ import annotations

import asyncio
import math

import pytest
from leased_fleet import Tally

from limitkeeper import (
    AsyncLimiter,
    ConfigurationError,
    FixedWindow,
    LeakyBucketQueue,
    LeasedStore,
    Limiter,
    MemoryStore,
    SlidingWindowLog,
    StoreUnavailable,
    TokenBucket,
)
from limitkeeper.stores import NamedLimit


@pytest.fixture
def tally(clock):
    return Tally(MemoryStore(clock=clock))


def test_fifty_hits_cost_one_operation_of_fifty(tally):
    """With lease=50 the first hit takes 50 from the parent, and hits 2 to 50 do not call it."""
    limiter = Limiter("1000/s", store=LeasedStore(tally, lease=50))
    for number in range(50):
        assert limiter.hit("a")
        assert tally.calls == [("decide", 50)], number


def test_the_next_batch_is_there_before_the_first_runs_out(tally):
    """The background fetches while there are tokens in hand, so hit 51 does not call the parent either."""
    store = LeasedStore(tally, lease=50)
    limiter = Limiter("1000/s", store=store)
    for _ in range(49):
        limiter.hit("a")
    assert store.cache.due
    store.tend()
    assert tally.calls == [("decide", 50)] * 2
    for _ in range(50):
        assert limiter.hit("a")
    assert len(tally.calls) == 2


def test_a_key_that_comes_once_costs_one_operation_and_leaves_nothing(tally, clock):
    """A flood of keys that come once costs one operation each, nothing in hand, and is forgotten after a lease life."""
    store = LeasedStore(tally, max_keys=1000)
    limiter = Limiter("10/s", store=store)
    for number in range(5000):
        limiter.hit(f"key {number}")
        if number % 100 == 99:
            clock.advance(0.1)
    assert tally.calls == [("decide", 1)] * 5000
    assert len(store) <= 300
    store.tend()
    assert len(tally.calls) == 5000


def test_fixed_leases_of_many_keys_go_back_together(tally, clock):
    """Even with fixed leases a flood of keys costs little more than an operation each: they go back in calls of 256."""
    store = LeasedStore(tally, lease=5)
    limiter = Limiter("10/h", store=store)
    for number in range(1000):
        limiter.hit(f"key {number}")
    clock.advance(0.2)
    store.tend()
    assert [call for call in tally.calls if call[0] == "give_back"] == [("give_back", 1024)] * 3 + [("give_back", 928)]
    assert len(store) == 0
    assert limiter.peek("key 1").remaining == 9


def test_the_number_of_leased_keys_is_bounded(tally):
    """Beyond `max_keys` a key is decided by the parent, and no key with a lease loses it."""
    store = LeasedStore(tally, lease=5, max_keys=3)
    limiter = Limiter("10/h", store=store)
    for key in "abcdef":
        assert limiter.hit(key)
    assert len(store) == 3
    assert [cost for _, cost in tally.calls] == [5, 5, 5, 1, 1, 1]


def test_an_idle_lease_goes_back_when_it_ends(tally, clock):
    """Tokens unused within the lease life go back to where they were charged, and may not be spent any more."""
    store = LeasedStore(tally, lease=50, life="100ms")
    limiter = Limiter("100/h", store=store)
    limiter.hit("a")
    clock.advance(0.1)
    store.tend()
    assert tally.calls == [("decide", 50), ("give_back", 49)]
    assert tally.inner.decide([*limiter.claims("a")], 0, commit=False).remaining == 99


def test_an_expired_batch_is_not_spent(tally, clock):
    """A batch without maintenance is not spent after its end; it goes back before the next is fetched."""
    store = LeasedStore(tally, lease=50, life="100ms")
    limiter = Limiter("100/h", store=store)
    limiter.hit("a")
    clock.advance(0.1)
    limiter.hit("a")
    assert tally.calls == [("decide", 50), ("give_back", 49), ("decide", 50)]


def test_closing_gives_everything_back(clock):
    """close() gives back the tokens in hand, and closes the parent."""
    parent = Tally(MemoryStore(clock=clock))
    with LeasedStore(parent, lease=20) as store:
        limiter = Limiter("100/h", store=store)
        limiter.hit("a")
        limiter.hit("b")
    assert parent.calls[2:] == [("give_back", 19), ("give_back", 19)]


def test_a_refusal_is_answered_here_until_its_moment(tally, clock):
    """The parent refused until t: until one life before t it is not called again; at t the same call passes."""
    store = LeasedStore(tally)
    limiter = Limiter("1/s", store=store)
    limiter.hit("a")
    received = limiter.hit("a")
    asked = len(tally.calls)
    for _ in range(8):
        clock.advance(0.1)
        again = limiter.hit("a")
        assert not again
        assert again.retry_us == received.retry_us - (clock.now_us() - received.start_us)
    assert len(tally.calls) == asked
    clock.advance(0.2)
    assert limiter.hit("a")


def test_the_background_repeats_a_refused_call(tally, clock):
    """Others may give back: the background calls again after ¾ of a life, then after twice as long each time, up to a second."""
    store = LeasedStore(tally, life="100ms")
    limiter, other = Limiter("1/h", store=store), Limiter("1/h", store=tally.inner)
    limiter.hit("a")
    assert not limiter.hit("a")
    asked = []
    for _ in range(1000):
        clock.advance(0.01)
        before = len(tally.calls)
        assert not limiter.hit("a")
        assert len(tally.calls) == before
        store.tend()
        asked += [clock.now_us()] * (len(tally.calls) - before)
    assert len(asked) <= 2 * 13
    other.reset("a")
    for _ in range(101):
        clock.advance(0.01)
        limiter.hit("a")
        store.tend()
    assert limiter.peek("a").remaining == 0
    assert sum(store.leased(limiter.named[0], key) for key in "a") == 0


def test_part_of_a_batch_is_taken_when_the_whole_is_not_there(tally):
    """When the parent has 30 of 50, the lease takes 30."""
    store = LeasedStore(tally, lease=50)
    limiter = Limiter("80/h", store=store)
    assert sum(bool(limiter.hit("a")) for _ in range(100)) == 80
    assert tally.calls[:3] == [("decide", 50), ("decide", 50), ("decide", 30)]


def test_a_cost_above_what_is_in_hand_takes_the_rest_from_the_parent(tally):
    """With 3 in hand a cost of 10 requests 7 from the parent: both together can be spent."""
    store = LeasedStore(tally, lease=5)
    limiter = Limiter("12/h", store=store)
    assert limiter.hit("a", cost=2)
    assert limiter.hit("a", cost=10)
    assert [cost for _, cost in tally.calls] == [5, 7]
    assert not limiter.hit("a")


def test_a_cost_above_the_limit_is_never(tally):
    """A cost above the limit's capacity is refused for ever, whatever is in hand."""
    limiter = Limiter("10/h", store=LeasedStore(tally, lease=5))
    limiter.hit("a")
    assert limiter.hit("a", cost=11).retry_after == math.inf
    assert limiter.hit("a")


def test_several_limits_come_from_their_hands_or_from_the_parent_together(tally):
    """All limits from RAM when all are in hand; otherwise one call for all of them, and none is charged alone."""
    store = LeasedStore(tally)
    limiter = Limiter({"user": TokenBucket("100/s"), "tenant": FixedWindow("3/h")}, store=store)
    received = [limiter.hit({"user": "u", "tenant": "t"}) for _ in range(5)]
    assert [bool(one) for one in received] == [True, True, True, False, False]
    assert received[-1].name == "tenant"
    assert len(tally.calls) == 4
    store.return_all()
    assert [part.remaining for part in limiter.peek({"user": "u", "tenant": "t"}).decisions] == [97, 0]


def test_one_known_refusal_does_not_answer_for_the_other_limits(tally, clock):
    """One of two limits is known to refuse, the other only to the parent: the retry is the longer one, or never."""
    limits = {"minute": TokenBucket("1/min", burst=1), "second": TokenBucket("5/s", burst=1)}
    limiter = Limiter(limits, store=LeasedStore(tally))
    assert limiter.hit("a")
    costs = [{"minute": 2, "second": 1}, {"minute": 3, "second": 1}, {"minute": 1, "second": 1}]
    assert [limiter.hit("a", cost=cost).retry_after for cost in costs] == [math.inf, math.inf, 60.0]
    asked = len(tally.calls)
    assert limiter.hit("a").retry_after == 60.0
    assert len(tally.calls) == asked
    clock.advance(60)
    assert limiter.hit("a")


def test_a_known_refusal_answers_beside_a_limit_that_the_parent_would_allow(tally, clock):
    """A flood of refused calls is answered here although the other limit holds no batch, and none above its capacity is."""
    limiter = Limiter({"day": FixedWindow("3/d"), "second": TokenBucket("2/s", burst=4)}, store=LeasedStore(tally))
    assert [bool(limiter.hit("a")) for _ in range(4)] == [True, True, True, False]
    asked, retry = len(tally.calls), limiter.peek("a", cost=1).retry_after
    for _ in range(100):
        assert limiter.hit("a").retry_after == retry
    assert len(tally.calls) <= asked + 2
    assert limiter.hit("a", cost={"day": 1, "second": 5}).retry_after == math.inf


def test_several_limits_in_hand_cost_nothing(tally, clock):
    """Two hot limits with batches in hand are decided in RAM, all or nothing."""
    store = LeasedStore(tally)
    limiter = Limiter({"user": TokenBucket("1000/s"), "tenant": TokenBucket("2000/s")}, store=store)
    asked = []
    for _ in range(2000):
        clock.advance(0.002)
        assert limiter.hit({"user": "u", "tenant": "t"})
        store.tend()
        asked.append(len(tally.calls))
    assert asked[-1] - asked[1000] <= 1000 / 15


def test_what_may_wait_goes_to_the_parent_with_nothing_ahead_of_it(tally):
    """A reservation that waits is in the parent's queue; the tokens in hand went back first, so no later hit overtakes it."""
    store = LeasedStore(tally, lease=50)
    limiter = Limiter("1/s burst 10", store=store)
    assert limiter.hit("a")
    assert limiter.reserve("a", cost=10).wait == 1.0
    assert not limiter.hit("a")
    assert [verb for verb, _ in tally.calls][:3] == ["decide", "give_back", "decide"]


def test_a_cancelled_hit_goes_back_into_the_hand_it_came_from(tally):
    """Cancelling a charge of a batch in hand costs no operation; the token is available again."""
    store = LeasedStore(tally, lease=5)
    limiter = Limiter("5/h", store=store)
    reservation = limiter.reserve("a", cost=2, max_wait=0)
    assert reservation.cancel()
    assert [bool(limiter.hit("a")) for _ in range(6)] == [True] * 5 + [False]
    assert [verb for verb, _ in tally.calls].count("give_back") == 0


class FarStore(MemoryStore):
    """A MemoryStore whose answer arrives an iteration of the loop after it has charged."""

    local = False

    async def adecide(self, *args, **options):
        await asyncio.sleep(0)
        decision = self.decide(*args, **options)
        await asyncio.sleep(0)
        return decision


@pytest.mark.parametrize("limits", [["500/h"], ["500/h", "fixed window 500/h"]], ids=["one", "two"])
@pytest.mark.parametrize("method", ["hit", "acquire", "reserve"])
def test_a_task_that_is_cancelled_at_any_time_loses_no_token(clock, method, limits):
    """The parent's charge for a cancelled task, a batch included, is kept in the lease or goes back."""

    async def charged_after(iterations):
        parent = FarStore(clock=clock)
        store = LeasedStore(parent, lease=20)
        limiter, admitted = AsyncLimiter(limits, store=store), 0

        async def call():
            return await getattr(limiter, method)("a")

        for _ in range(3):
            task = asyncio.ensure_future(call())
            for _ in range(iterations):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            admitted += not task.cancelled()
        await store.areturn_all()
        left = Limiter(limits, store=parent).peek("a")
        return {part.limit - part.remaining for part in left.decisions} == {admitted}

    assert [asyncio.run(charged_after(iterations)) for iterations in range(12)] == [True] * 12


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_cancelled_charge_of_several_limits_goes_back_to_the_time_of_each(clock, waiting):
    """A log's part goes back to the time at which its batch was charged, also when that has ended, and beside waiting calls."""
    store = LeasedStore(MemoryStore(clock=clock), lease=10)
    limiter = Limiter({"bucket": "token bucket 50/h burst 50", "log": "sliding window log 50/h"}, store=store)
    for limit in limiter.named:  # a batch of 10 for each
        store.decide_one(limit, "a", 1, 0, True)
    clock.advance(0.01)
    reservation = limiter.reserve("a", cost=3, max_wait=0)
    assert reservation.decision.source == "lease"
    later = [limiter.reserve("a", cost=40) for _ in range(waiting)]
    clock.advance(0.2)
    assert reservation.cancel()
    for one in later:
        one.cancel()
    store.return_all()
    assert [part.remaining for part in limiter.peek("a").decisions] == [49, 49]


def test_a_wait_is_served_from_a_batch_that_begins_later(clock):
    """It starts with the batch. A larger cost queues at the parent behind it, and gives nothing to the batch when it leaves."""
    store = LeasedStore(MemoryStore(clock=clock), lease=4, life=1)
    limiter = Limiter("100/s burst 10", store=store)
    for _ in range(30):
        refused = limiter.hit("a")
        clock.advance(0.001)
    assert (refused.allowed, refused.retry_after) == (False, 0.011)
    soon, late = limiter.reserve("a", 2), limiter.reserve("a", 9)
    assert (soon.decision.source, soon.wait, late.decision.source, late.wait) == ("lease", 0.01, "store", 0.1)
    assert limiter.reserve("a", 1, max_wait=0.004).decision.retry_after == 0.006
    clock.advance(0.01)
    assert limiter.hit("a")
    assert late.cancel()
    assert store.leased(limiter.named[0], "a") == 1


def test_callers_that_may_wait_are_served_from_a_lease_as_well(tally, clock):
    """A key in demand is leased for acquire too; only a caller that has to wait is in the parent's queue."""
    store = LeasedStore(tally)
    limiter = Limiter("1000/s", store=store)
    for _ in range(1000):
        clock.advance(0.002)
        assert limiter.acquire("a", timeout=1).wait == 0
        store.tend()
    assert len(tally.calls) < 100


def test_a_refund_goes_to_the_parent(tally):
    """A refund has no time of its charge: the parent's rule decides, and a refusal is forgotten."""
    limiter = Limiter("5/h", store=LeasedStore(tally, lease=5))
    for _ in range(6):
        limiter.hit("a")
    limiter.refund("a", 2)
    assert [bool(limiter.hit("a")) for _ in range(3)] == [True, True, False]


def test_settling_above_the_estimate_is_paid_from_the_hand_first(tally):
    """The charge beyond the estimate comes out of the batch in hand, then out of the parent."""
    limiter = Limiter("10/h", store=LeasedStore(tally, lease=5))
    reservation = limiter.reserve("a")
    assert reservation.settle(8)
    assert [bool(limiter.hit("a")) for _ in range(3)] == [True, True, False]


def test_a_reset_key_is_as_new_and_has_nothing_in_hand(tally):
    """The tokens in hand were charged to a forgotten state: they are dropped with it."""
    store = LeasedStore(tally, lease=5)
    limiter = Limiter("10/h", store=store)
    limiter.hit("a")
    limiter.reset("a")
    assert sum(bool(limiter.hit("a")) for _ in range(40)) == 10


def test_a_queue_is_passed_through(tally):
    """A queue paces every start; there is nothing to lease, and the parent decides each call."""
    limiter = Limiter(LeakyBucketQueue("5/s", capacity=10), store=LeasedStore(tally, lease=50))
    assert limiter.hit("a")
    assert limiter.reserve("a").wait == pytest.approx(0.2)
    assert tally.calls == [("decide", 1), ("decide", 1)]


def test_a_fixed_window_is_never_left_with_a_batch_of_the_last(tally, clock):
    """A batch of a fixed window ends with it, even when its life is longer: the next window has its own."""
    limiter = Limiter(FixedWindow("100/s"), store=LeasedStore(tally, lease=50, life="10s"))
    clock.advance(0.999)
    assert limiter.hit("a")
    clock.advance(0.002)
    assert sum(bool(limiter.hit("a")) for _ in range(200)) == 100


@pytest.mark.parametrize("beside", [{}, {"other": TokenBucket("1000/s")}], ids=["alone", "beside a bucket"])
def test_no_part_of_a_call_in_a_new_window_comes_from_a_batch_of_the_last(clock, beside):
    """A call for more than is in hand that reaches the parent after the end of the window is charged there as a whole."""

    class Far(MemoryStore):
        delay = 0.001

        def decide(self, *args, **options):
            clock.advance(self.delay)
            return super().decide(*args, **options)

    far = Far(clock=clock)
    store = LeasedStore(far, lease=20, life="10s")
    limiter = Limiter({"window": FixedWindow("100/s"), **beside}, store=store)
    assert limiter.hit("a")
    store.tend()
    clock.advance(0.99 - clock.now_us() % 1_000_000 / 1e6)
    assert store.leased(limiter.named[0], "a") >= 19
    far.delay = 0.02
    assert limiter.hit("a", cost={"window": 90})
    assert clock.now_us() % 1_000_000 < 100_000
    far.delay = 0
    assert sum(bool(limiter.hit("a")) for _ in range(40)) == 10


def test_remaining_is_never_more_than_hand_and_parent_have(tally):
    """`remaining` of an answer from RAM is the tokens in hand, whatever other nodes took from the parent meanwhile."""
    here, there = Limiter("100/h", store=LeasedStore(tally, lease=20)), Limiter("100/h", store=tally.inner)
    assert here.hit("a").remaining == 99
    there.hit("a", cost=80)
    assert here.hit("a").remaining == 18
    assert here.hit("a").limit == 100


def test_a_failing_parent_is_an_error_only_without_tokens_in_hand(tally):
    """With tokens in hand callers are not affected; without, the caller gets the StoreError."""
    store = LeasedStore(tally, lease=5)
    limiter = Limiter("10/h", store=store)
    limiter.hit("a")
    tally.failing["decide"] = StoreUnavailable("nobody answers")
    assert [bool(limiter.hit("a")) for _ in range(4)] == [True] * 4
    with pytest.raises(StoreUnavailable):
        limiter.hit("a")
    tally.failing.clear()
    assert limiter.hit("a")


def test_strict_logs_its_lower_rate(tally, caplog):
    """Strict mode lowers the rate by life / (period + life), logs it and keeps it as an attribute."""
    store = LeasedStore(tally, life="100ms", strict=True)
    with caplog.at_level("INFO", logger="limitkeeper"):
        Limiter(SlidingWindowLog("1000/s"), store=store)
        Limiter(FixedWindow("1000/s"), store=store)
    assert store.prices == {"sliding window log 1000/s": pytest.approx(0.1 / 1.1)}
    assert "9.09 %" in caplog.text
    assert store.over_admission(TokenBucket("1000/s"), nodes=16) == 0


def test_the_bound_is_stated(tally):
    """over_admission is min(nodes × held, rate × life); nodes × held with a fixed size; 0 for windows, lease=1, queues."""
    store = LeasedStore(tally, lease=20)
    assert store.over_admission(TokenBucket("1000/s"), nodes=1) == 40
    assert store.over_admission(TokenBucket("1000/s"), nodes=16) == 640
    assert LeasedStore(tally).over_admission(TokenBucket("1000/s"), nodes=16) == 100
    assert store.over_admission(FixedWindow("1000/s"), nodes=16) == 0
    assert LeasedStore(tally, lease=1).over_admission(TokenBucket("1000/s"), nodes=16) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lease": 0}, "lease must be None"),
        ({"lease": True}, "lease must be None"),
        ({"life": 0}, "life must be longer"),
        ({"max_keys": 0}, "max_keys must be"),
    ],
)
def test_what_makes_no_sense_is_refused(tally, options, says):
    """Invalid options are errors with the remedy."""
    with pytest.raises(ConfigurationError, match=says):
        LeasedStore(tally, **options)


def test_it_wraps_a_store():
    """Anything else is an error that names the right type."""
    with pytest.raises(ConfigurationError, match="RedisStore"):
        LeasedStore("redis://localhost")


def test_rates_that_are_used_no_more_go_with_their_last_lease(clock):
    """A store keeps nothing of a rate without users, once its leases have gone back; the rates in use keep theirs."""
    store = LeasedStore(MemoryStore(clock=clock), lease=5, life="100ms")
    rates = [NamedLimit("api", "user", TokenBucket(f"{count}/s")) for count in range(10, 110)]
    for one in rates:
        store.register(one)
        assert store.decide_one(one, str(one.limit), 1, 0, True)
    for one in rates[1:]:
        store.unregister(one)
    assert store.leased(rates[1], str(rates[1].limit)) == 4
    for _ in range(4):
        clock.advance(0.06)
        assert store.decide_one(rates[0], str(rates[0].limit), 1, 0, True)
        store.tend()
    assert list(store.cache.terms) == [rates[0]]
    assert len(store) == 1
    assert store.decide_one(rates[1], str(rates[1].limit), 1, 0, True).remaining == 10


def test_rates_of_one_name_are_found_by_their_hash():
    """A lookup does not compare a rate with all others of its name."""
    assert len({hash(NamedLimit("api", "user", TokenBucket(f"{count}/s"))) for count in range(1, 1001)}) == 1000
    assert hash(NamedLimit("api", "user", TokenBucket("5/s"))) == hash(NamedLimit("api", "user", TokenBucket("5/s burst 5")))
