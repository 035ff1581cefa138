"""Law 12 on stores: several rates under one name answer as the model does, and all stores alike; and the bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import (
    FixedWindow,
    GuardedStore,
    LeakyBucket,
    LeakyBucketQueue,
    LeasedStore,
    Limit,
    Limiter,
    MemoryStore,
    ShardedStore,
    SharedStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.algorithms.claim import Claim
from limitkeeper.stores.contract import Booking, Store
from limitkeeper.testing import ManualClock
from limitkeeper.testing.admission_bounds import between, intervals
from limitkeeper.testing.strategies import LIMITS, costs, limits, moments
from models.limiter_model import Ask
from models.rates import RatesWorld

BEGIN = 1_700_000_123.456789
NOON = 1_700_049_600.0
every_rule = pytest.mark.parametrize("rule", list(LIMITS), ids=lambda rule: rule.kind)

MakeStore = Callable[[ManualClock, str], Store]
STORES: dict[str, MakeStore] = {
    "memory": lambda clock, path: MemoryStore(clock=clock),
    "shared": lambda clock, path: SharedStore(path, max_keys=64, log_entries=64, clock=clock),
    "leased": lambda clock, path: LeasedStore(MemoryStore(clock=clock), lease=1),
    "sharded": lambda clock, path: ShardedStore([MemoryStore(clock=clock), MemoryStore(clock=clock)], hot=False, clock=clock),
    "guarded": lambda clock, path: GuardedStore(MemoryStore(clock=clock), clock=clock),
}
every_store = pytest.mark.parametrize("kind", list(STORES))


class Step(NamedTuple):
    """Time passes, then something happens under one of the rates. `what` is hit, peek or reserve; or, for what was reserved or
    hit before (`back` of them ago), cancel, settle or refund; or reset."""

    after_us: int
    rate: int
    what: str
    cost: int
    max_wait_us: int = 0
    back: int = 0


@cache
def histories(some: tuple[Limit, ...], gives: bool = False, max_size: int = 20) -> st.SearchStrategy[list[Step]]:
    kinds = ["hit", "hit", "hit", "peek", "reserve", *(["cancel", "settle", "refund", "reset"] if gives else [])]
    kinds = kinds if some[0].refunds else [kind for kind in kinds if kind != "refund"]
    cost = costs(some).filter(lambda cost: cost < 10**18)
    step = st.builds(
        Step,
        st.just(0) | moments(some),
        st.integers(0, len(some) - 1),
        st.sampled_from(kinds),
        cost,
        st.just(0) | moments(some),
        st.integers(0, 2),
    )
    return st.lists(step, max_size=max_size)


def rates_and_histories(rule: type[Limit], most: int, gives: bool = False) -> st.SearchStrategy[Any]:
    some = st.lists(limits(rule), min_size=1, max_size=most, unique_by=str).map(tuple)
    return some.flatmap(lambda some: st.tuples(st.just(some), histories(some, gives)))


class Played:
    """Limiters of one name, one for each rate, on one store."""

    def __init__(self, make: MakeStore, path: str, some: tuple[Limit, ...]) -> None:
        self.clock = ManualClock(BEGIN)
        self.store = make(self.clock, path)
        self.limiters = [Limiter({"limit": limit}, store=self.store, name="name") for limit in some]
        self.reserved: list[Any] = []
        self.hits: list[tuple[Limiter, int]] = []

    def step(self, step: Step) -> Any:
        self.clock.advance(step.after_us / 1e6)
        limiter = self.limiters[step.rate]
        if step.what == "hit":
            decision = limiter.hit("key", step.cost)
            self.hits += [(limiter, step.cost)] if decision else []
            return answer(decision)
        if step.what == "peek":
            return answer(limiter.peek("key", step.cost))
        if step.what == "reserve":
            reservation = limiter.reserve("key", step.cost, step.max_wait_us / 1e6)
            self.reserved.append(reservation)
            return answer(reservation.decision)
        if step.what == "reset":
            return limiter.reset("key")
        if step.what == "refund" and step.back < len(self.hits):
            limiter, cost = self.hits.pop(-1 - step.back)
            return limiter.refund("key", cost)
        if step.what in ("cancel", "settle") and step.back < len(self.reserved):
            reservation = self.reserved[-1 - step.back]
            return reservation.cancel() if step.what == "cancel" else reservation.settle(min(step.cost, 10**6))
        return None


def answer(decision: Any) -> dict[str, Any]:
    found: dict[str, Any] = decision.to_dict()
    del found["source"]
    return found


def compare_with_the_model(make: MakeStore, some: tuple[Limit, ...], history: list[Step], sweeping: bool) -> None:
    with TemporaryDirectory() as folder:
        played = Played(make, f"{folder}/limits", some)
        with played.store:
            world = RatesWorld({"limit": some[0]}, played.clock.now_us())
            for step in history:
                world.use("limit", some[step.rate])
                if not world.is_exact("limit", "key", played.clock.now_us() + step.after_us):
                    return
                found = played.step(step)
                now_us = played.clock.now_us()
                wait_us = step.max_wait_us if step.what == "reserve" else 0
                expected, _ = world.decide([Ask("limit", "key", step.cost)], now_us, wait_us, step.what != "peek")
                assert found == expected, (step, str(some[step.rate]))
                if sweeping:
                    played.store.sweep()  # type: ignore[attr-defined]
                    world.forget(now_us)


@every_rule
@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_each_call_is_answered_as_its_own_rate_charged_with_all(kind: str, rule: type[Limit]) -> None:
    """Up to six rates in any order, hits, peeks and reservations: each answer is the model's; also when idle keys are swept."""

    @effort(50)
    @given(rates_and_histories(rule, 6), st.booleans())
    def law(drawn: Any, sweeping: bool) -> None:
        compare_with_the_model(STORES[kind], *drawn, sweeping)

    law()


@pytest.mark.parametrize("kind", ["leased", "sharded", "guarded"])
def test_wrappers_answer_as_the_model(kind: str) -> None:
    """The same through wrappers, for every rule."""

    @effort(60)
    @given(st.sampled_from(list(LIMITS)).flatmap(lambda rule: rates_and_histories(rule, 4)))
    def law(drawn: Any) -> None:
        compare_with_the_model(STORES[kind], *drawn, False)

    law()


@every_rule
@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_cancelled_from_the_last_on_reservations_leave_nothing(kind: str, rule: type[Limit]) -> None:
    """Reservations of several rates, cancelled from the last to the first: every rate answers as if they had never been made."""

    @effort(150)
    @given(rates_and_histories(rule, 4).filter(lambda drawn: len(drawn[0]) > 1), st.data())
    def law(drawn: Any, data: st.DataObject) -> None:
        some, history = drawn
        with TemporaryDirectory() as folder:
            played, without = (Played(STORES[kind], f"{folder}/{name}", some) for name in ("played", "without"))
            with played.store, without.store:
                grown_us = max(limit.ramp * limit.tick for limit in some)
                for rate in range(len(some)):  # every rate is in use: a first use changes what is charged
                    history.insert(0, Step(grown_us, rate, "hit", 1))
                for step in history:
                    if step.what != "reserve":
                        played.step(step)
                        without.step(step)
                made = [played.step(step._replace(after_us=0)) for step in history if step.what == "reserve"]
                after = data.draw(st.just(0) | moments(some))
                for one in (played, without):
                    one.clock.advance(after / 1e6)
                if after and any(part["allowed"] and part["wait"] * 1e6 <= after for part in made):
                    return  # it has begun
                for reservation in reversed(played.reserved):
                    reservation.cancel()
                for limiter, other in zip(played.limiters, without.limiters, strict=True):
                    assert answer(limiter.peek("key")) == answer(other.peek("key")), made

    law()


@every_store
def test_a_reservation_that_starts_at_once_is_cancelled_exactly_before_earlier_ones(kind: str, tmp_path: Any) -> None:
    """The waiters of the other rate were charged before it: they don't move, and nothing is left of it."""
    _, store, (small, large) = two_rates(kind, tmp_path, "7/s burst 2", "5/s burst 10")
    with store:
        large.hit("key")
        small.hit("key")
        before = [answer(limiter.peek("key")) for limiter in (small, large)]
        made = [small.reserve("key", max_wait=5), small.reserve("key", max_wait=5), large.reserve("key", 2)]
        assert [one.wait > 0 for one in made] == [True, True, False]
        for one in reversed(made):
            assert one.cancel()
        assert [answer(limiter.peek("key")) for limiter in (small, large)] == before


@every_store
@pytest.mark.parametrize("rule", [TokenBucket, LeakyBucketQueue, FixedWindow], ids=lambda rule: rule.kind)
def test_cancelled_in_any_order_reservations_leave_nothing(kind: str, rule: type[Limit], tmp_path: Any) -> None:
    """Forty waiters of two rates that leave in random order: the others move up meanwhile, and in the end nothing is left."""
    _, store, limiters = two_rates(kind, tmp_path, rule("10/s"), rule("20/s"))  # type: ignore[call-arg]
    with store:
        for number in range(10):
            draw = random.Random(number)
            key = f"key {number}"
            for limiter in limiters:
                while limiter.hit(key):
                    pass
            before = [answer(limiter.peek(key)) for limiter in limiters]
            made = [draw.choice(limiters).reserve(key, max_wait=None) for _ in range(40)]
            assert all(made)
            for reservation in draw.sample(made, len(made)):
                assert reservation.cancel()
            assert [answer(limiter.peek(key)) for limiter in limiters] == before


@pytest.mark.parametrize("kind", ["shared", "leased", "sharded", "guarded"])
def test_giving_back_is_the_same_in_every_store(kind: str) -> None:
    """Cancels, settlements, refunds and resets among hits of several rates: every answer is MemoryStore's."""

    @effort(80)
    @given(st.sampled_from(list(LIMITS)).flatmap(lambda rule: rates_and_histories(rule, 4, True)))
    def law(drawn: Any) -> None:
        some, history = drawn
        with TemporaryDirectory() as folder, ExitStack() as stack:
            one, two = (Played(STORES[name], f"{folder}/limits", some) for name in ("memory", kind))
            stack.enter_context(two.store)
            for step in history:
                assert one.step(step) == two.step(step), step
            for rate in range(len(some)):
                look = Step(0, rate, "peek", 1)
                assert one.step(look) == two.step(look)

    law()


@every_rule
@every_store
def test_after_a_reset_older_charges_give_nothing_back(kind: str, rule: type[Limit]) -> None:
    """Reserve, reset, use, then cancel or settle the reservation: False, and no more is left than before."""

    @effort(12)
    @given(limits(rule).filter(lambda limit: limit.capacity > 3), st.sampled_from(["cancel", 0, 1, 9]))
    def law(limit: Limit, how: str | int) -> None:
        with TemporaryDirectory() as folder:
            played = Played(STORES[kind], f"{folder}/limits", (limit,))
            with played.store:
                limiter = played.limiters[0]
                reservation = limiter.reserve("key", 1)
                if not reservation:
                    return
                limiter.reset("key")
                limiter.hit("key", 1)
                before = limiter.peek("key")
                assert not (reservation.cancel() if how == "cancel" else reservation.settle(int(how)))
                assert limiter.peek("key") == before

    law()


@every_rule
@every_store
def test_a_reset_of_a_dropped_key_is_remembered(kind: str, rule: type[Limit]) -> None:
    """Reserve, wait until the key is as new and dropped, reset, use, cancel the reservation: False, and nothing changes."""
    with TemporaryDirectory() as folder:
        limit = LeakyBucket("9/min", 9) if rule is LeakyBucket else rule("9/min")  # type: ignore[call-arg]
        played = Played(STORES[kind], f"{folder}/limits", (limit,))
        with played.store:
            limiter = played.limiters[0]
            old = [limiter.reserve("key"), limiter.reserve("key", max_wait=60)]
            played.clock.advance(200)
            for store in (played.store, getattr(played.store, "inner", None)):
                if hasattr(store, "sweep"):
                    store.sweep()
            limiter.reset("key")
            limiter.hit("key")
            before = limiter.peek("key")
            assert [old[0].cancel(), old[1].settle(0)] == [False, False]
            assert limiter.peek("key") == before


@pytest.mark.parametrize("kind", ["memory", "shared"])
@pytest.mark.parametrize("room", [True, False])
def test_a_reset_in_a_full_store_makes_older_charges_final(kind: str, room: bool, tmp_path: Any) -> None:
    """Without room for a marker all older charges of the store give nothing back; those made later do."""
    clock = ManualClock(NOON)
    store = MemoryStore(8, clock) if kind == "memory" else SharedStore(str(tmp_path / "limits"), max_keys=8, clock=clock)
    with store:
        limiter = Limiter(TokenBucket("10/h"), store=store, name="api")
        others = [limiter.reserve(f"key {i}") for i in range(1 if room else 7)]
        reservation = limiter.reserve("key")
        clock.advance(1)
        limiter.reset("gone")
        limiter.hit("gone", 5)
        assert reservation.cancel() is room
        assert others[0].cancel() is room
        later = limiter.reserve("gone", 2)
        assert later.cancel() is True
        assert limiter.peek("gone").remaining == 5


# The bound ---------------------------------------------------------------------------------------------------------------


#: Algorithms whose state counts what was charged above the limit until it is paid; the others forget it with its window.
KEEP_DEBT = (TokenBucket, LeakyBucket, LeakyBucketQueue)


def most_in(limit: Limit, first_us: int, last_us: int) -> int:
    """At most so much can this rate on its own admit by hits of one unit in a closed interval: the bound that its page prints."""
    span = last_us - first_us
    if isinstance(limit, KEEP_DEBT):
        return int((1 if isinstance(limit, LeakyBucketQueue) else limit.capacity) + span * limit.count // limit.period)
    if isinstance(limit, FixedWindow | SlidingWindowCounter):
        return int(limit.count * (last_us // limit.period - first_us // limit.period + 1))
    return int(limit.count * (span // limit.period + 1))


@pytest.mark.parametrize(
    "rates",
    [
        (FixedWindow("10/min"), FixedWindow("1000/h")),
        (FixedWindow("60/min"), FixedWindow("5000/h"), FixedWindow("7/s")),
        (TokenBucket("1/s burst 10"), TokenBucket("10/min burst 50"), TokenBucket("3/s burst 3")),
        (LeakyBucket("1/s capacity 10"), LeakyBucket("10/min capacity 50"), LeakyBucket("3/s capacity 3")),
        (LeakyBucketQueue("1/s capacity 3"), LeakyBucketQueue("10/min"), LeakyBucketQueue("3/s")),
        (SlidingWindowCounter("10/min"), SlidingWindowCounter("60/h")),
        (SlidingWindowLog("10/min"), SlidingWindowLog("30/h")),
    ],
    ids=lambda rates: rates[0].kind,
)
@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_the_bound_of_several_rates(kind: str, rates: tuple[Limit, ...]) -> None:
    """Buckets and queues keep their debt: an interval admits at most the largest bound of the rates, with the first call of one
    in it the two largest together. Windows and logs forget expired charges: a shorter one admits again while a longer one is
    exhausted: the sum."""

    @effort(6)
    @given(st.lists(st.tuples(st.integers(0, 20_000_000), st.integers(0, len(rates) - 1)), min_size=40, max_size=120))
    def law(calls: list[tuple[int, int]]) -> None:
        with TemporaryDirectory() as folder:
            played = Played(STORES[kind], f"{folder}/limits", rates)
            with played.store:
                admitted: list[tuple[int, int]] = []
                first_uses: dict[int, int] = {}
                for after_us, rate in calls:
                    if played.step(Step(after_us, rate, "hit", 1))["allowed"]:
                        admitted.append((played.clock.now_us(), 1))
                    first_uses.setdefault(rate, played.clock.now_us())
                for first, last in intervals(admitted):
                    bounds = sorted((most_in(rate, first, last) for rate in rates), reverse=True)
                    several = any(first <= moment <= last for moment in first_uses.values())
                    counted = len(bounds) if not isinstance(rates[0], KEEP_DEBT) else 2 if several else 1
                    assert between(admitted, first, last) <= sum(bounds[:counted])

    law()


def test_windows_reach_the_sum_and_buckets_do_not(tmp_path: Any) -> None:
    """What the page of limits and rates prints: 10/min beside an exhausted 1000/h admits 1590 in the hour (10 in each of the
    59 minutes that follow); as buckets, 1000 at once, and 10/min nothing more in this hour."""
    for rule, expected in ((FixedWindow, 1590), (SlidingWindowLog, 1590), (TokenBucket, 1000)):
        clock, store, (small, large) = two_rates("memory", tmp_path, rule("10/min"), rule("1000/h"))
        with store:
            clock.advance(0.5)
            admitted = sum(bool(small.hit("key")) for _ in range(20))
            admitted += sum(bool(large.hit("key")) for _ in range(1000))
            assert admitted == 1000
            for _ in range(59):
                clock.advance(60)
                admitted += sum(bool(small.hit("key")) for _ in range(20))
            assert admitted == expected


# Named cases -------------------------------------------------------------------------------------------------------------


def two_rates(kind: str, folder: Any, *some: Limit | str) -> tuple[ManualClock, Store, list[Limiter]]:
    clock = ManualClock(NOON)
    store = STORES[kind](clock, str(folder / "limits"))
    return clock, store, [Limiter({"limit": limit}, store=store, name="api") for limit in some]


@every_store
def test_two_windows_used_in_turn(kind: str, tmp_path: Any) -> None:
    """10/min and 1000/h used in turn on one key for 600 s, ten times a second: 1000, and when they are used up 10 in each of the
    six minutes that begin then; not 5905."""
    clock, store, limiters = two_rates(kind, tmp_path, FixedWindow("10/min"), FixedWindow("1000/h"))
    admitted = 0
    with store:
        for i in range(6000):
            admitted += bool(limiters[i % 2].hit("key"))
            clock.advance(0.1)
    assert admitted == 1060


@every_store
def test_an_upgrade_leaves_the_rest_and_a_way_back(kind: str, tmp_path: Any) -> None:
    """From an exhausted 60/min to 5000/h: 4940 left. Back under 60/min, the minute after is 60 again."""
    clock, store, (small, large) = two_rates(kind, tmp_path, FixedWindow("60/min"), FixedWindow("5000/h"))
    with store:
        assert sum(bool(small.hit("key")) for _ in range(70)) == 60
        assert large.peek("key").remaining == 4940
        assert large.hit("key", 40).remaining == 4900
        assert not small.hit("key")
        clock.advance(60)
        if kind in ("memory", "shared"):
            store.sweep()  # type: ignore[attr-defined]
        assert small.hit("key").remaining == 59
        assert large.peek("key").remaining == 4899


@every_store
@pytest.mark.parametrize("rule", [FixedWindow, SlidingWindowCounter, SlidingWindowLog, TokenBucket, LeakyBucketQueue])
def test_many_rates_used_in_turn_admit_no_more_than_the_largest(kind: str, rule: type[Limit], tmp_path: Any) -> None:
    """Eight rates from 1/h to 8/h, each in turn: what a fifth rate replaces does not forget what was admitted."""
    _, store, limiters = two_rates(kind, tmp_path, *[rule(f"{count}/h") for count in range(1, 9)])  # type: ignore[call-arg]
    with store:
        assert sum(bool(limiter.hit("key")) for _ in range(100) for limiter in limiters) <= 8


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_fifth_rate_takes_the_place_of_the_one_nearest_to_as_new(kind: str, tmp_path: Any) -> None:
    """Four rates per key: the fifth replaces the one that is as new the soonest, which then starts with what the others hold."""
    rates = [FixedWindow(f"100/{unit}") for unit in ("min", "h", "2h", "3h", "4h")]
    clock, store, limiters = two_rates(kind, tmp_path, *rates)
    with store:
        for limiter in limiters[:4]:
            limiter.hit("key", 10)
        clock.advance(60)
        assert limiters[0].peek("key").remaining == 100
        limiters[4].hit("key", 10)
        assert limiters[0].peek("key").remaining == 50
        assert limiters[1].peek("key").remaining == 50


@every_store
def test_a_fifth_rate_replaces_one_whose_amount_another_holds(kind: str, tmp_path: Any) -> None:
    """Not the one that is as new the soonest, if it alone holds the largest amount: its window would begin again, half empty."""
    some = [FixedWindow(f"{count}/min", align="first") for count in (9, 1, 2, 3, 4)]
    clock, store, (largest, *others, fifth) = two_rates(kind, tmp_path, *some)
    with store:
        assert largest.hit("key", 9)
        clock.advance(10)
        assert not any(limiter.hit("key") for limiter in others)
        clock.advance(10)
        assert not fifth.hit("key")
        assert not largest.hit("key")


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_shorter_log_does_not_forget_for_a_longer_one(kind: str, tmp_path: Any) -> None:
    """Entries are kept for the longest window in use on the key, whichever rate adds the next one."""
    clock, store, (long, short) = two_rates(kind, tmp_path, SlidingWindowLog("10/h"), SlidingWindowLog("5/min"))
    with store:
        assert long.hit("key", 6)
        clock.advance(120)
        assert short.hit("key", 3).remaining == 2
        assert long.peek("key").remaining == 1
        store.sweep()  # type: ignore[attr-defined]
        clock.advance(120)
        store.sweep()  # type: ignore[attr-defined]
        assert short.hit("key").remaining == 4
        assert long.peek("key").remaining == 0


@every_store
def test_a_cancelled_charge_goes_back_to_every_rate(kind: str, tmp_path: Any) -> None:
    """Cancelled right away, a reservation leaves every rate where it was."""
    _, store, (one, two) = two_rates(kind, tmp_path, TokenBucket("1/s burst 10"), TokenBucket("1/min burst 20"))
    with store:
        one.hit("key")
        two.hit("key")
        before = [limiter.peek("key") for limiter in (one, two)]
        reservation = one.reserve("key", 4)
        assert [limiter.peek("key").remaining for limiter in (one, two)] == [4, 14]
        assert reservation.cancel()
        assert [limiter.peek("key") for limiter in (one, two)] == before


@every_store
def test_a_charge_under_one_rate_shows_in_a_refusal_of_the_other(kind: str, tmp_path: Any) -> None:
    """Refused under one rate, charged under another: the first rate's retry time is then the current one, not the earlier one."""
    _, store, (one, two) = two_rates(kind, tmp_path, TokenBucket("1/s burst 2"), TokenBucket("1/s burst 5"))
    with store:
        assert one.hit("key", 2)
        assert one.hit("key").retry_after == 1
        assert two.hit("key")
        assert one.hit("key").retry_after == 2


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_no_key_is_lost_on_hand_over(kind: str, tmp_path: Any) -> None:
    """`items` has every key of the name: with the state of that rate, or with the one that it would start with."""
    clock, store, (one, two) = two_rates(kind, tmp_path, FixedWindow("10/min"), FixedWindow("100/h"))
    with store:
        one.hit("a", 4)
        two.hit("b", 7)
        one.hit("c", 1)
        two.hit("c", 1)
        target = MemoryStore(clock=clock)
        copies = [Limiter({"limit": limiter.limits["limit"]}, store=target, name="api") for limiter in (one, two)]
        for limiter, copy in zip((one, two), copies, strict=True):
            target.load(copy.named[0], store.items(limiter.named[0]))
        for limiter, copy in zip((one, two), copies, strict=True):
            assert [copy.peek(key) for key in "abc"] == [limiter.peek(key) for key in "abc"]


def test_cancel_after_a_reset_leaves_the_new_charges(tmp_path: Any) -> None:
    """Reserve 5 of 10, reset, hit 9, cancel: one is left, not six; the next reservation can be cancelled as usual."""
    for kind in STORES:
        _, store, (limiter,) = two_rates(kind, tmp_path, TokenBucket("10/h"))
        with store:
            old = limiter.reserve("key", 5)
            limiter.reset("key")
            assert limiter.hit("key", 9).remaining == 1
            assert old.cancel() is False
            assert limiter.peek("key").remaining == 1
            new = limiter.reserve("key", 1)
            assert new.cancel() is True
            assert limiter.peek("key").remaining == 1


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_reset_is_forgotten_after_an_hour(kind: str, tmp_path: Any) -> None:
    """The key remembers it for an hour, or as long as the limit takes to fill; then nothing is left of it."""
    clock, store, (limiter,) = two_rates(kind, tmp_path, TokenBucket("10/min"))
    with store:
        limiter.hit("key", 9)
        limiter.reset("key")
        assert len(store) == 1  # type: ignore[arg-type]
        clock.advance(3600)
        store.sweep()  # type: ignore[attr-defined]
        assert len(store) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_waiters_that_keep_their_starts_leave_the_log_of_a_longer_window_whole(kind: str, tmp_path: Any) -> None:
    """One of two waiters leaves, the other can't move up before its deadline: what the longer window admitted still counts."""
    clock, store, (long, short) = two_rates(kind, tmp_path, SlidingWindowLog("10/min"), SlidingWindowLog("1/s"))
    with store:
        long.hit("key", 7)
        clock.advance(2)
        short.hit("key")
        waiting = [[Claim(short.named[0], "key", 1)] for _ in range(2)]
        starts = [store.decide(claims, None).start_us for claims in waiting]
        bookings = [Booking(waiting[i], starts[i], store.now_us(), stays=i == 1) for i in range(2)]
        assert store.rebook(bookings) == [None, None]
        assert long.peek("key").remaining == 1


@every_store
@pytest.mark.parametrize("rule", [TokenBucket, LeakyBucket], ids=lambda rule: rule.kind)
def test_a_cancelled_charge_never_raises_what_another_rate_holds(kind: str, rule: type[Limit], tmp_path: Any) -> None:
    """A start of the slow rate 50 minutes ahead is debt in the fast one, which has paid it: cancelled, it blocks no caller."""
    clock, store, (slow, fast) = two_rates(kind, tmp_path, rule("1/min", 100), rule("10/s", 10))  # type: ignore[call-arg]
    with store:
        slow.hit("key", 100)
        fast.hit("key")
        clock.advance(5)
        reservation = slow.reserve("key", 50)
        clock.advance(6)
        assert fast.hit("key").remaining == 9
        assert reservation.cancel()
        assert fast.hit("key").remaining >= 8


BUCKETS = (
    st.sampled_from([TokenBucket, LeakyBucket, LeakyBucketQueue])
    .flatmap(lambda rule: rates_and_histories(rule, most=3, gives=True))
    .filter(lambda drawn: not any(limit.ramp for limit in drawn[0]))
)  # what is missing at first counts as used for a new rate


@effort(200, least=20)
@given(BUCKETS, st.integers(0, 2), st.integers(1, 500), st.integers(0, 10**8), st.integers(0, 2))
def test_the_latest_charge_is_cancelled_exactly_whatever_has_waited_before(
    drawn: Any, rate: int, cost: int, after_us: int, days: int
) -> None:
    """Law 13: calls of several rates wait, settle and leave; then a reservation is made and cancelled: all are as before."""
    some, history = drawn
    played = Played(STORES["memory"], "", some)
    for limiter in played.limiters:
        limiter.hit("key")
    for step in history:
        played.step(step)
    played.clock.advance(after_us / 1e6 + 86400 * days)
    before = [answer(limiter.peek("key")) for limiter in played.limiters]
    reservation = played.limiters[rate % len(some)].reserve("key", cost)
    if reservation:
        assert reservation.cancel()
    assert [answer(limiter.peek("key")) for limiter in played.limiters] == before
    played.store.close()


@every_store
@pytest.mark.parametrize("rule", [TokenBucket, LeakyBucket])
def test_an_exception_after_an_earlier_wait_leaves_the_other_rate_as_it_was(kind: str, rule: Any, tmp_path: Any) -> None:
    """A call of 1000/s has waited; an hour later one of 500 fails: the other rate, 60/min, has the nine that it had."""
    clock, store, (small, large) = two_rates(kind, tmp_path, rule("60/min", 10), rule("1000/s", 1000))
    with store:
        small.hit("key")
        while large.hit("key"):
            pass
        with large.reserve("key") as waited:
            assert waited.wait > 0
        clock.advance(3600)
        small.hit("key")
        with pytest.raises(ConnectionError), large.reserve("key", 500):
            raise ConnectionError
        assert small.peek("key").remaining == 9
