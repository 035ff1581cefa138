"""RedisStore with several rates under one name, and with keys that are reset: batches, clusters, waiters, hand-over."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_redis_cluster import apart

from effort import effort
from laws.test_law_1_several_rates import bucket_beside_a_full_window, keeps_every_promise, pairs_and_histories
from laws.test_law_12_stores import Played, Step, rates_and_histories
from limitkeeper import (
    AsyncLimiter,
    FixedWindow,
    LeakyBucketQueue,
    Limit,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.stores.contract import Booking
from limitkeeper.stores.redis import RedisStore
from limitkeeper.testing import ManualClock
from limitkeeper.testing.strategies import LIMITS
from models.limiter_model import Ask
from models.rates import RatesWorld
from servers.cluster import Cluster
from servers.valkey import Valkey
from stand_ins import NOON, Driven

_fresh = itertools.count()
PLANS = (TokenBucket("1/s burst 5"), TokenBucket("1/min burst 20"), TokenBucket("10/s burst 3"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


def fresh(server: Any, clock: ManualClock | None) -> RedisStore:
    return RedisStore(server.url, prefix=f"rates-{next(_fresh)}", timeout="60s", clock=clock)


def plans(name: str = "plan", limits: tuple[Limit, ...] = PLANS) -> list[NamedLimit]:
    return [NamedLimit("app", name, limit) for limit in limits]


def scripts(server: Valkey) -> int:
    with server.client() as client:
        result: Any = client.info("commandstats")
    return sum(result.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


@effort(30)
@given(st.lists(st.tuples(st.sampled_from((0, 0.1, 1, 7)), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=8))
def test_a_batch_of_several_rates_is_decided_in_order(valkey: Valkey, turns: list[tuple[float, list[int]]]) -> None:
    """Tasks of one iteration with different rates on one key: once the rates have met, each is answered as one after the
    other."""

    async def work() -> None:
        clock = ManualClock(NOON)
        async with fresh(valkey, clock) as store:
            rates, world = plans(), RatesWorld({"plan": PLANS[0]}, clock.now_us())
            for one in [*rates, *rates]:  # every rate meets every other
                await expect(store, world, one, clock)
            for after, some in turns:
                clock.advance(after)
                found = await asyncio.gather(*[store.adecide([Claim(rates[one], "k", 1)]) for one in some])
                for one, decision in zip(some, found, strict=True):
                    world.use("plan", PLANS[one])
                    expected, _ = world.decide([Ask("plan", "k", 1)], clock.now_us())
                    assert decision.to_dict() == {**decision.to_dict(), **expected}

    asyncio.run(work())


def test_giving_back_is_the_same_as_in_memory(valkey: Valkey) -> None:
    """Hits, peeks, reservations, cancels, settlements, refunds and resets under several rates: every answer is MemoryStore's."""

    @effort(150)
    @given(st.sampled_from(list(LIMITS)).flatmap(lambda rule: rates_and_histories(rule, 5, True)))
    def law(drawn: Any) -> None:
        some, history = drawn
        one = Played(lambda clock, path: MemoryStore(clock=clock), "", some)
        two = Played(lambda clock, path: fresh(valkey, clock), "", some)
        with two.store:
            looks = [Step(0, rate, "peek", 1) for rate in range(len(some))]
            for step in [*history, *looks]:
                assert one.step(step) == two.step(step), step

    law()


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("busy", [False, True])
def test_a_sliding_counter_gives_back_to_the_window_before(valkey: Valkey, used: int, busy: bool) -> None:
    """A charge of the window before still counts with its weight: cancelled or settled, it no longer does; in memory as here."""
    limit, answers = SlidingWindowCounter("7/10s"), []
    for make in (lambda clock: MemoryStore(clock=clock), lambda clock: fresh(valkey, clock)):
        clock = ManualClock(NOON)
        with make(clock) as store:
            limiter = Limiter(limit, store=store, name="counter")
            reservation = limiter.reserve("k", 3)
            clock.advance(10)
            decision = limiter.hit("k") if busy else limiter.peek("k")
            assert decision.remaining == 4 - busy
            assert reservation.settle(used)
            assert limiter.peek("k").remaining == 7 - busy - used
            clock.advance(2.5)
            answers.append(limiter.peek("k"))
    assert answers[0] == answers[1]


def test_a_retry_time_holds_whatever_rates_were_used_before(valkey: Valkey) -> None:
    """Up to six rates of one or two names in random order: a refused call is accepted at its retry time, and not before."""

    @effort(60)
    @given(st.sampled_from(list(LIMITS)).flatmap(lambda rule: pairs_and_histories(rule, 6)))
    def law(drawn: Any) -> None:
        keeps_every_promise(lambda clock, path: fresh(valkey, clock), *drawn)

    law()


def test_a_short_window_beside_a_full_long_one_opens_at_its_retry(valkey: Valkey) -> None:
    """1000/h is used up; the first 10/min call is refused for the rest of this minute, not for the rest of the hour."""
    bucket_beside_a_full_window(lambda clock, path: fresh(valkey, clock), "")


async def expect(store: RedisStore, world: RatesWorld, one: NamedLimit, clock: ManualClock) -> None:
    world.use("plan", one.limit)
    expected, _ = world.decide([Ask("plan", "k", 1)], clock.now_us())
    decision = await store.adecide_one(one, "k", 1, 0, True)
    assert decision.to_dict() == {**decision.to_dict(), **expected}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_after_the_first_meeting_a_decision_is_one_script_call(valkey: Valkey, kind: str) -> None:
    """Two rates used in turn on any number of keys: no call more than there are decisions; a batch is one call."""

    async def work() -> None:
        async with fresh(valkey, None) as store:
            rates = plans()

            async def hit(one: NamedLimit, key: str) -> None:
                if kind == "sync":
                    store.decide_one(one, key, 1, 0, True)
                else:
                    await store.adecide_one(one, key, 1, 0, True)

            for one in (*rates, *rates):
                await hit(one, "first")
            before = scripts(valkey)
            for number in range(20):
                for one in rates:
                    await hit(one, f"k{number % 4}")
            assert scripts(valkey) - before == 60
            await asyncio.gather(*[store.adecide_one(one, "k", 1, 0, True) for one in (*rates, *rates)])
            assert scripts(valkey) - before == 61

    asyncio.run(work())


def test_a_rate_of_another_process_is_learnt_from_the_registry(valkey: Valkey) -> None:
    """A rolling deploy: processes that know only their own rate charge both, sync and async, and admit what the model admits."""
    clock = ManualClock(NOON)
    old_limit, new_limit = FixedWindow("10/min"), FixedWindow("15/h")
    stores = [fresh(valkey, clock)]
    stores.append(RedisStore(valkey.url, prefix=stores[0].names.prefix, timeout="60s", clock=clock))
    world = RatesWorld({"plan": old_limit}, clock.now_us())
    for step in range(40):
        store, limit = ((stores[0], old_limit), (stores[1], new_limit))[step % 2]
        world.use("plan", limit)
        expected, _ = world.decide([Ask("plan", "k", 1)], clock.now_us())
        assert store.decide([Claim(NamedLimit("app", "plan", limit), "k", 1)]).allowed == expected["allowed"]
        clock.advance(7)
    for store in stores:
        store.close()


def test_a_rate_of_this_process_is_known_when_the_registry_is_gone(valkey: Valkey) -> None:
    """After a server has lost its data, a key that changes to a larger rate of the same process has what that leaves, not
    nothing.
    """
    with fresh(valkey, ManualClock(NOON)) as store, valkey.client() as client:
        small, large = [Limiter(f"1/h burst {size}", store=store, name="plans") for size in (10, 100)]
        small.hit("ann")
        large.hit("bob")
        client.flushall()
        small.hit("ann", 3)
        assert large.hit("ann").remaining == 96


def test_no_key_is_lost_when_a_name_is_handed_over(valkey: Valkey) -> None:
    """`items` has every key of the name under any of its rates, also those that only another rate has used."""
    for small, large in (
        (FixedWindow("60/min"), FixedWindow("5000/h")),
        (SlidingWindowLog("60/min"), SlidingWindowLog("5000/h")),
    ):
        clock = ManualClock(NOON)
        with fresh(valkey, clock) as store:
            one, other = plans(limits=(small, large))
            store.decide([Claim(one, "a", 60)])
            store.decide([Claim(other, "b", 10)])
            store.decide([Claim(one, "both", 5)])
            store.decide([Claim(other, "both", 5)])
            store.decide([Claim(one, "gone", 5)])
            store.reset([Claim(other, "gone")])
            own = [{key for key, _ in store.rate_items(rate)} for rate in (one, other)]
            assert own == [{"a"} if small.logs else {"a", "both"}, {"b", "both"}], "a log belongs to its longest window"
            memory = MemoryStore(clock=clock)
            memory.load(other, store.items(other))
            again = fresh(valkey, clock)
            again.load(other, store.items(other))
            for target in (memory, again):
                left = {key: target.decide([Claim(other, key, 1)], commit=False).remaining for key in ("a", "b", "both", "gone")}
                assert left == {"a": 4940, "b": 4990, "both": 4990, "gone": 5000}
            again.close()


@pytest.mark.parametrize("leaving", [1, 2])
def test_waiters_move_up_on_a_key_with_several_rates(valkey: Valkey, leaving: int) -> None:
    """A waiter that leaves lets those behind it move up, of its rate and of others; none starts later than it was answered."""
    clock = ManualClock(NOON)
    with fresh(valkey, clock) as store:
        slow, fast = plans(limits=(LeakyBucketQueue("1/s"), LeakyBucketQueue("2/s")))
        for order in ((slow, slow, slow, slow), (slow, slow, fast, slow, fast)):
            store.decide([Claim(fast, str(order), 1)], None)
            waiting = [([claim], store.decide([claim], None)) for claim in [Claim(one, str(order), 1) for one in order]]
            bookings = [
                Booking(claims, found.start_us, None, number != leaving) for number, (claims, found) in enumerate(waiting)
            ]
            moved = store.rebook(bookings)
            assert moved[leaving] is None
            earlier = [booking.charged_at - one.start_us for booking, one in zip(bookings, moved, strict=True) if one is not None]
            assert all(each >= 0 for each in earlier)
            assert any(earlier)


@pytest.mark.parametrize("other", ["1/min burst 2", "5/s burst 5"])
def test_the_last_waiter_is_undone_exactly_where_the_others_keep_their_starts(valkey: Valkey, other: str) -> None:
    """The waiter before it can't move up before its deadline: the states are those before the last charge."""
    with fresh(valkey, ManualClock(NOON)) as store:
        one, two = plans(limits=(TokenBucket("1/s burst 1"), TokenBucket(other)))
        for rate in (two, one):
            store.decide([Claim(rate, "key", 1)], None)
        staying, leaving = [Claim(one, "key", 1)], [Claim(one, "key", 1)]
        first_us = store.decide(staying, None, remember=True).start_us
        before = [store.decide([Claim(rate, "key", 1)], commit=False) for rate in (one, two)]
        last_us = store.decide(leaving, None, remember=True).start_us
        bookings = [Booking(staying, first_us, store.now_us(), True), Booking(leaving, last_us, None, False)]
        assert store.rebook(bookings) == [None, None]
        assert [store.decide([Claim(rate, "key", 1)], commit=False) for rate in (one, two)] == before


# Reset -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_wait", [0, None])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_reservation_from_before_a_reset_is_gone(valkey: Valkey, kind: str, max_wait: float | None) -> None:
    """Reserve 5 of 10, reset, hit 9, cancel: one is left, and the cancel returns False; settling does nothing either."""
    clock = ManualClock(NOON)
    with fresh(valkey, clock) as store:
        limiter: Any = Limiter(TokenBucket("1/h burst 10"), store=store)
        if kind == "async":
            limiter = Driven(AsyncLimiter(TokenBucket("1/h burst 10"), store=store))
        for verb, used in (("cancel", 0), ("settle below", 1), ("settle", 5), ("settle above", 6)):
            key = f"{verb} key"
            reserved = limiter.reserve(key, 5, max_wait=max_wait)
            limiter.reset(key)
            assert limiter.hit(key, 9).remaining == 1
            assert not (reserved.cancel() if verb == "cancel" else reserved.settle(used))
            assert limiter.peek(key).remaining == 1
            again = limiter.reserve(key, 1, max_wait=max_wait)
            assert again.cancel()
            assert limiter.peek(key).remaining == 1


def test_a_waiter_from_before_a_reset_leaves_nothing(valkey: Valkey) -> None:
    """Cancelled with others behind it, in one call: every cancel returns False, and those behind start no later."""
    clock = ManualClock(NOON)
    with fresh(valkey, clock) as store:
        limiter = Limiter(LeakyBucketQueue("1/s"), store=store)
        reserved = [limiter.reserve("k") for _ in range(4)]
        assert [one.wait for one in reserved] == [0, 1, 2, 3]
        limiter.reset("k")
        assert not reserved[1].cancel()
        assert all(one.decision.start_us <= before for one, before in zip(reserved[2:], starts_of(clock, 2, 3), strict=True))
        assert not reserved[3].cancel()


def starts_of(clock: ManualClock, *waits: int) -> list[int]:
    return [clock.now_us() + wait * 1_000_000 for wait in waits]


def test_keys_that_are_handed_over_are_forgotten_without_a_marker(valkey: Valkey) -> None:
    """`forget` deletes the key: open charges go with the state to the other store."""
    with fresh(valkey, None) as store, valkey.client() as client:
        (one, *_) = plans()
        store.decide([Claim(one, "k", 1)])
        store.forget([Claim(one, "k", 0)])
        assert not client.exists(store.names.key(one, "k"))


# Over several slots ------------------------------------------------------------------------------------------------------


@effort(15)
@given(st.data())
def test_several_rates_over_several_slots_answer_as_the_model(cluster: Cluster, data: st.DataObject) -> None:
    """User and tenant in different slots, each name with several rates: admitted and refused as by the model."""
    clock = ManualClock(NOON)
    tenants = (FixedWindow("6/min"), FixedWindow("30/h"))
    keys = apart(cluster, 2)
    with fresh(cluster, clock) as store:
        users, offices = plans("user"), plans("tenant", tenants)
        for one in (*users, *users, *offices, *offices):  # every rate meets every other
            store.decide([Claim(one, "elsewhere", 1)])
        world = RatesWorld({"user": PLANS[0], "tenant": tenants[0]}, clock.now_us())
        for _ in range(data.draw(st.integers(1, 12), "steps")):
            clock.advance(data.draw(st.sampled_from((0, 0, 1, 30)), "pass"))
            user, office = data.draw(st.sampled_from(users), "user"), data.draw(st.sampled_from(offices), "tenant")
            cost = data.draw(st.integers(1, 3), "cost")
            world.use("user", user.limit)
            world.use("tenant", office.limit)
            expected, _ = world.decide([Ask("user", keys[0], cost), Ask("tenant", keys[1], 1)], clock.now_us())
            decision = store.decide([Claim(user, keys[0], cost), Claim(office, keys[1], 1)])
            assert decision.allowed == expected["allowed"]
            assert [part.remaining for part in decision.decisions] == [part["remaining"] for part in expected["decisions"]]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_reset_over_several_slots(cluster: Cluster, kind: str) -> None:
    """A charge over two slots: when one of its keys was reset, the other is given back; when both were, nothing is."""
    clock = ManualClock(NOON)
    keys = apart(cluster, 2)
    with fresh(cluster, clock) as store:
        (user, *_), (tenant, *_) = plans("user"), plans("tenant", (TokenBucket("1/h burst 10"),))

        def call(verb: str, *arguments: Any) -> Any:
            return getattr(store, verb)(*arguments) if kind == "sync" else asyncio.run(getattr(store, "a" + verb)(*arguments))

        def left() -> list[int]:
            return [store.decide([Claim(*pair, 1)], commit=False).remaining for pair in ((user, keys[0]), (tenant, keys[1]))]

        for gone in (1, 2):
            claims = [Claim(user, keys[0], 2), Claim(tenant, keys[1], 3)]
            decision = call("decide", claims)
            assert decision
            call("reset", claims[:gone])
            new = [Claim(user, keys[0], 1), Claim(tenant, keys[1], 1)]
            at = call("decide", new)
            assert left() == ([4, 6] if gone == 1 else [4, 9])
            assert call("give_back", claims, decision.start_us) == (gone == 1)
            assert left() == [4, 9]
            assert call("give_back", new, at.start_us)
            assert left() == [5, 10]


def test_a_waiter_over_several_slots_from_before_a_reset_leaves_nothing(cluster: Cluster) -> None:
    """Cancelled with another behind it, where bookings span slots: the cancel returns False."""
    keys = apart(cluster, 2)
    with fresh(cluster, ManualClock(NOON)) as store:
        limiter = Limiter({"user": LeakyBucketQueue("1/s"), "tenant": LeakyBucketQueue("1/s")}, store=store)
        key = {"user": keys[0], "tenant": keys[1]}
        reserved = [limiter.reserve(key) for _ in range(3)]
        limiter.reset(key)
        assert not reserved[1].cancel()
        assert limiter.peek(key).remaining == limiter.peek("unseen").remaining


def test_a_refund_that_is_the_first_call_of_a_rate_moves_waiters_up(valkey: Valkey) -> None:
    """The rate starts with `initial`, so it is registered before the waiters of another rate of its name are rebooked."""
    clock = ManualClock(NOON)
    with RedisStore(valkey.url, prefix=f"refund {next(_fresh)}", clock=clock, timeout="60s") as store:
        buckets = (TokenBucket(rate, burst=9, initial=3) for rate in ("1/s", "2/s"))
        one, other = (Limiter({"limit": bucket}, store=store, name="api") for bucket in buckets)
        assert one.hit("k", 3)
        waiting = one.reserve("k", 2)
        assert waiting.wait == 2
        other.refund("k")
        assert waiting.wait == 1


@pytest.mark.parametrize("rule", [TokenBucket, LeakyBucketQueue, FixedWindow], ids=lambda rule: rule.kind)
def test_waiters_of_two_rates_that_leave_in_any_order_leave_nothing(valkey: Valkey, rule: type[Limit]) -> None:
    """Twenty waiters of two rates leave in random order: the others move up meanwhile, and in the end every rate is as before."""
    clock = ManualClock(NOON)
    with fresh(valkey, clock) as store:
        limiters = [Limiter({"limit": rule(text)}, store=store, name="api") for text in ("10/s", "20/s")]  # type: ignore[call-arg]
        for limiter in limiters:
            while limiter.hit("key"):
                pass
        before = [limiter.peek("key") for limiter in limiters]
        draw = random.Random(7)
        made = [draw.choice(limiters).reserve("key", max_wait=None) for _ in range(20)]
        assert all(made)
        for reservation in draw.sample(made, len(made)):
            assert reservation.cancel()
        assert [limiter.peek("key") for limiter in limiters] == before
