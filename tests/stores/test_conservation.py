"""Law 13: no wrapper destroys or creates tokens.

The charges of a wrapper, net of cancels and settlements, are replayed on a bare store. With no lease and no reservation open,
`peek` through the wrapper then equals the replay if no bucket was full meanwhile, and never exceeds it by more than the bound
that the wrapper prints. Histories contain failures, exceptions as signals raise them, cancels, settles, refunds, resets, closes
and crashes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import (
    Decision,
    FixedWindow,
    GuardedStore,
    LeakyBucket,
    LeasedStore,
    Limiter,
    MemoryStore,
    RedisStore,
    ShardedStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    StoreUnavailable,
    TokenBucket,
)
from limitkeeper.algorithms import Limit
from limitkeeper.algorithms.claim import Claim
from limitkeeper.stores import Store
from limitkeeper.stores.leased import key_lease
from limitkeeper.stores.leased.key_lease import Unspent
from limitkeeper.stores.leased.lease_refill import Want
from limitkeeper.stores.sans_io import run
from limitkeeper.testing import ManualClock
from stand_ins import NOON, WrappedStore

SIZE = 1000
RULES = [TokenBucket(f"{SIZE}/1000 s"), LeakyBucket(f"{SIZE}/1000 s", capacity=SIZE), FixedWindow(f"{SIZE}/h")]
RULES += [SlidingWindowLog(f"{SIZE}/h"), SlidingWindowCounter(f"{SIZE}/h")]
#: Another rate of each window that forgets nothing meanwhile. (Of a bucket, a start that is given up may stay charged in part.)
OTHERS = {rule: type(rule)(f"{SIZE}/2h") for rule in RULES[2:]}


class Faulty(WrappedStore):
    """A store of which calls fail on request: before they are executed, or after."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, local=True)
        self.before: BaseException | None = None
        self.after: BaseException | None = None

    def register(self, limit: Any) -> None:
        self.inner.register(limit)

    def decide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Any:
        return self.failing_around(super().decide, claims, max_wait_us, **options)

    def decide_many(self, asks: Any, max_wait_us: int | None = 0) -> Any:
        return self.failing_around(super().decide_many, asks, max_wait_us)

    def failing_around(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        fault, self.before = self.before, None
        if fault is not None:
            raise fault
        answer = method(*args, **options)
        fault, self.after = self.after, None
        if fault is not None:
            raise fault
        return answer


Made = tuple[Store, list[Faulty]]


def leased(clock: ManualClock, lease: int | None, url: str | None = None, life: str = "100ms") -> Made:
    parent = Faulty(MemoryStore(clock=clock) if url is None else RedisStore(url, timeout="60s", clock=clock))
    return LeasedStore(parent, lease=lease, life=life), [parent]


def sharded(clock: ManualClock) -> Made:
    shards = [Faulty(MemoryStore(clock=clock)) for _ in range(3)]
    return ShardedStore(shards), shards


def sharded_leases(clock: ManualClock) -> Made:
    shards = [Faulty(MemoryStore(clock=clock)) for _ in range(2)]
    return ShardedStore([LeasedStore(shard) for shard in shards], hot=False), shards


def leases_of_shards(clock: ManualClock) -> Made:
    store, shards = sharded(clock)
    return LeasedStore(store, lease=6), shards


def guarded(clock: ManualClock, lease: int | None, url: str | None = None) -> Made:
    inner, parents = leased(clock, lease, url)
    return GuardedStore(inner, on_failure="closed", clock=clock), parents


#: Wrappers by name, made of a clock and the URL of a server.
WRAPPERS: dict[str, Callable[[ManualClock, str], Made]] = {
    "leased by demand": lambda clock, url: leased(clock, None),
    "leases of 7": lambda clock, url: leased(clock, 7),
    "leases that live long": lambda clock, url: leased(clock, None, life="2s"),
    "sharded": lambda clock, url: sharded(clock),
    "sharded leases": lambda clock, url: sharded_leases(clock),
    "leases of shards": lambda clock, url: leases_of_shards(clock),
    "guarded leases": lambda clock, url: guarded(clock, 20),
    "leases over redis": lambda clock, url: leased(clock, 7, url),
    "guarded leases over redis": lambda clock, url: guarded(clock, None, url),
}
NAMES = itertools.count()
COSTS = st.integers(1, 12)
STEPS = st.one_of(
    st.tuples(st.just("charge"), COSTS),
    st.tuples(st.just("hits"), st.integers(1, 30)),
    st.tuples(st.just("many"), COSTS),
    st.tuples(st.just("reserve"), COSTS),
    st.tuples(st.just("settle"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 3)),
    st.tuples(st.just("settle_old"), st.integers(0, 20)),
    st.tuples(st.just("refund"), COSTS),
    st.tuples(st.just("advance"), st.integers(0, 120_000)),
    st.tuples(st.just("tend"), st.just(0)),
    st.tuples(st.just("reset"), st.just(0)),
    st.tuples(st.just("fault"), st.integers(0, 8)),
)


class History:
    """Plays steps on several limits over a wrapper, and records the charges net of returns. `used` of SIZE is used at once at the
    beginning and after a reset, so that no bucket is full from there on. With `others` every limit has two rates, in turn."""

    def __init__(
        self, rules: list[Limit], used: int, make: Callable[[ManualClock], Made], others: dict[Limit, Limit] | None = None
    ) -> None:
        self.clock = ManualClock(NOON + 100)
        self.store, self.parents = make(self.clock)
        rates = [rules] if others is None else [rules, [others[rule] for rule in rules]]
        name, limits = f"n{next(NAMES)}", [{f"limit {i}": rule for i, rule in enumerate(some)} for some in rates]
        self.limiters = [Limiter(some, store=self.store, name=name) for some in limits]
        self.limiter = self.limiters[0]
        self.used = used
        self.lost = False
        self.open: list[tuple[list[Claim], Decision]] = []
        self.old: list[tuple[list[Claim], Decision]] = []
        self.begin()

    def claims(self, cost: int, of: str = "key") -> list[Claim]:
        return [Claim(named, f"{of} of {named.name}", cost) for named in self.limiter.named]

    def begin(self) -> None:
        self.charged = 0
        self.old, self.open = self.open, []
        for limiter, cost in zip(self.limiters, (self.used, 1), strict=False):  # from here on every rate is in use
            self.limiter = limiter
            assert self.store.decide(self.claims(cost))
            self.charged += cost

    def play(self, step: str, number: int) -> None:
        self.limiter = self.limiters[number % len(self.limiters)]
        try:
            getattr(self, step)(number)
        except (StoreUnavailable, KeyboardInterrupt):
            pass

    def charge(self, cost: int, max_wait_us: int = 0, **options: bool) -> None:
        """A charge that may be settled or cancelled later, as a policy makes it."""
        claims = self.claims(cost)
        decision = self.store.decide(claims, max_wait_us, **options)
        if decision:
            self.charged += cost
            self.open.append((claims, decision))

    def hits(self, number: int) -> None:
        for _ in range(number):
            self.charged += bool(self.store.decide(self.claims(1)))
            self.clock.advance(0.001)

    def many(self, cost: int) -> None:
        decisions = self.store.decide_many([self.claims(cost), self.claims(1, of="other"), self.claims(1)])
        self.charged += cost * bool(decisions[0]) + bool(decisions[2])

    def reserve(self, cost: int) -> None:
        self.charge(cost, 1_000_000, remember=True)

    def settle(self, used: int, which: int = -1) -> None:
        if self.open:
            claims, decision = self.open.pop(which % len(self.open))
            assert all(self.settled(claims, decision, used))
            self.charged += used - claims[0].cost

    def settle_old(self, used: int) -> None:
        """Of a charge from before the last reset."""
        if self.old:
            assert not any(self.settled(*self.old.pop(), used))

    def refund(self, cost: int) -> None:
        """Of calls whose charge is not kept. (From a log it takes the newest entries: those of an open charge as well.)"""
        if not self.open and self.charged >= cost:
            assert self.store.give_back(self.claims(cost))
            self.charged -= cost

    def settled(self, claims: list[Claim], decision: Decision, used: int) -> list[bool]:
        changes = [Claim(claim.limit, claim.key, claim.cost - used, claim.cost, claim.reset_id) for claim in claims]
        parts = zip(changes, decision.decisions, strict=True)
        return [self.store.give_back([change], part.start_us, part.source) for change, part in parts if change.cost]

    def cancel(self, which: int) -> None:
        self.settle(0, which)

    def advance(self, by_us: int) -> None:
        self.clock.advance(by_us / 1e6)

    def leases(self) -> list[LeasedStore]:
        shards = self.store.shards.values() if isinstance(self.store, ShardedStore) else ()
        return [store for store in (self.store, getattr(self.store, "inner", None), *shards) if isinstance(store, LeasedStore)]

    def tend(self, _: int) -> None:
        for store in self.leases():
            store.tend()

    def reset(self, _: int) -> None:
        self.without_faults()
        self.store.reset(self.claims(0))
        self.begin()

    def fault(self, kind: int) -> None:
        """The next call of one parent fails before or after it is executed."""
        error = KeyboardInterrupt() if kind % 3 == 1 else StoreUnavailable("down")
        parent = self.parents[kind // 3 % len(self.parents)]
        if kind % 3 == 2:
            parent.after = error
            self.lost = True
        else:
            parent.before = error

    def without_faults(self) -> None:
        for parent in self.parents:
            parent.before = parent.after = None

    def remaining(self) -> list[int]:
        """The remaining part of each limit, through the wrapper."""
        return [part.remaining for part in self.store.decide(self.claims(1), commit=False).decisions]

    def end(self, how: str) -> list[int]:
        """The remaining part of each limit when every lease was returned or the store was closed; after a crash its leases are
        added."""
        self.without_faults()
        if how == "return" or not self.leases() or len(self.parents) > 1:
            for store in self.leases():
                store.return_all()
            return self.remaining()
        (store,) = self.leases()
        held = store.cache.take_everything() if how == "crash" else []
        self.store.close() if how == "close" else None
        parts = self.parents[0].inner.decide(self.claims(1), commit=False).decisions
        return [part.remaining + sum(one.amount for one in held if one.lease.key == f"key of {part.name}") for part in parts]

    def replayed(self) -> list[int]:
        """The remaining part on a bare store with the same charges."""
        clock = ManualClock(NOON + 100)
        bare = MemoryStore(clock=clock)
        bare.give_back(self.claims(-self.charged))  # charges even above the limit
        clock.advance((self.clock.now_us() - clock.now_us()) / 1e6)
        return [part.remaining for part in bare.decide(self.claims(1), commit=False).decisions]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_left_is_what_was_not_charged(wrapper, valkey):
    """Law 13: no bucket was full meanwhile, so the wrapper and the replay have the same left, after a crash together with its
    leases; after a lost reply not more."""

    @effort(20 if "redis" in wrapper else 100)
    @given(
        rules=st.lists(st.sampled_from(RULES), min_size=1, max_size=3),
        used=st.sampled_from([SIZE // 4, SIZE - 200, SIZE - 40]),
        steps=st.lists(STEPS, min_size=20, max_size=50),
        how=st.sampled_from(["return", "close", "crash"]),
    )
    def law(rules: list[Limit], used: int, steps: list[tuple[str, int]], how: str) -> None:
        history = History(rules, used, lambda clock: WRAPPERS[wrapper](clock, valkey.url))
        for step, number in steps:
            history.play(step, number)
        left, replayed = history.end(how), history.replayed()
        history.parents[0].inner.close()
        if history.lost:
            assert all(one <= two for one, two in zip(left, replayed, strict=True)), (left, replayed)
        else:
            assert left == replayed

    law()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_under_two_rates_what_is_left_is_what_was_not_charged(wrapper, valkey):
    """Law 13 where every limit has two rates that are used in turn: each of them has left what neither was charged."""

    @effort(20 if "redis" in wrapper else 100)
    @given(
        rules=st.lists(st.sampled_from(list(OTHERS)), min_size=1, max_size=3),
        steps=st.lists(STEPS, min_size=20, max_size=50),
    )
    def law(rules: list[Limit], steps: list[tuple[str, int]]) -> None:
        history = History(rules, SIZE // 4, lambda clock: WRAPPERS[wrapper](clock, valkey.url), OTHERS)
        for step, number in steps:
            history.play(step, number)
        left, replayed = [], []
        for limiter in history.limiters:
            history.limiter = limiter
            left += history.end("return")
            replayed += history.replayed()
        history.parents[0].inner.close()
        assert left == replayed or (history.lost and all(one <= two for one, two in zip(left, replayed, strict=True)))

    law()


def test_a_refund_takes_no_entries_of_a_batch_of_another_rate():
    """Law 13: two rates of one name have one log. A refund under one of them takes the newest entries of calls, not those of a
    batch that is held under the other."""
    clock = ManualClock(NOON)
    store = LeasedStore(MemoryStore(clock=clock), lease=5)
    one, other = (Limiter({"limit": SlidingWindowLog(rate)}, store=store, name="n") for rate in ("100/h", "100/2h"))
    assert one.hit("key", 10)
    clock.advance(0.001)
    assert other.hit("key")
    assert store.leased(other.named[0], "key") == 4
    one.refund("key", 3)
    store.return_all()
    assert [limiter.peek("key").remaining for limiter in (one, other)] == [92, 92]


def test_an_interrupted_reservation_of_which_leases_hold_a_part_is_given_back_once():
    """Law 13: 20 of one of two limits are leased, and a reservation of 7 of both is interrupted after the parent has charged
    the rest: no more is left than before."""
    clock = ManualClock(NOON)
    store, (parent,) = leased(clock, 20)
    one = Limiter({"one": TokenBucket("100/d")}, store=store, name="n")
    both = Limiter({"one": TokenBucket("100/d"), "two": TokenBucket("100/d")}, store=store, name="n")
    assert one.hit("key")
    parent.after = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        both.reserve("key", 7, 0)
    assert store.leased(one.named[0], "key") == 19
    store.return_all()
    assert [part.remaining for part in both.peek("key").decisions] == [99, 93]


@pytest.mark.parametrize("rule", [FixedWindow("100/d"), SlidingWindowLog("100/d")], ids=str)
def test_a_batch_that_is_fetched_twice_is_not_lost(rule):
    """Law 13: the background of threads and that of an event loop both fetch for a lease that runs low: tokens without room in it
    go back."""
    store = LeasedStore(MemoryStore(clock=ManualClock(NOON)), lease=5)
    limiter = Limiter(rule, store=store)
    assert all(limiter.hit("key") for _ in range(4))
    lease = store.cache.find(limiter.named[0], "key")
    for _ in range(2):
        run(store.refill.fetch([Want(lease, 1, 5)]))
    assert store.leased(limiter.named[0], "key") == 6
    store.return_all()
    assert limiter.peek("key").remaining == 96


def test_what_is_spent_while_a_batch_is_taken_out_is_not_given_back(monkeypatch):
    """Law 13: making the object for a part of a batch may let another thread run, which hits meanwhile: it does not spend that
    part."""
    store = LeasedStore(MemoryStore(clock=ManualClock(NOON)), lease=5)
    limiter = Limiter("fixed window 100/d", store=store)
    assert limiter.hit("key")
    allowed = []

    def make(lease: Any, amount: int, *fields: Any) -> Unspent:
        if amount and not allowed:
            allowed.append(limiter.hit("key").allowed)
        return Unspent(lease, amount, *fields)

    monkeypatch.setattr(key_lease, "Unspent", make)
    store.return_all()
    assert allowed == [True]
    store.return_all()  # what that hit has fetched
    assert limiter.peek("key").remaining == 98


@pytest.mark.parametrize("nodes", [1, 3])
@given(
    rule=st.sampled_from([TokenBucket("50/s burst 20"), LeakyBucket("50/s", capacity=20), TokenBucket("200/s burst 100")]),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 80_000)), min_size=20, max_size=50),
)
def test_a_full_bucket_grants_no_more_than_the_printed_bound(nodes, rule, steps):
    """Law 13: a bucket that filled up while tokens of it were leased has at most `over_admission` more left than the replay."""
    clock = ManualClock(NOON)
    parent, replay = MemoryStore(clock=clock), MemoryStore(clock=clock)
    stores = [LeasedStore(parent) for _ in range(nodes)]
    limiter = Limiter(rule, store=parent, name="n")
    for who, number, pause_us in steps:
        store = stores[who % nodes]
        for _ in range(number):
            if store.decide_one(limiter.named[0], "k", 1, 0, True):
                replay.give_back([Claim(limiter.named[0], "k", -1)])
            clock.advance(0.001)
        clock.advance(pause_us / 1e6)
        for one in stores:
            one.tend()
    for store in stores:
        store.return_all()
    left, replayed = (store.decide_one(limiter.named[0], "k", 1, 0, False).remaining for store in (parent, replay))
    assert left <= replayed + stores[0].over_admission(rule, nodes)


@pytest.mark.parametrize("lease", [None, 5, 20])
@given(
    rule=st.sampled_from([TokenBucket("100/s burst 1000"), TokenBucket("1000/s burst 5000"), LeakyBucket("200/s", 2000)]),
    life=st.sampled_from(["20ms", "100ms", "1s"]),
    steps=st.lists(st.tuples(st.integers(0, 4_000), COSTS | st.just(1), st.booleans()), min_size=20, max_size=80),
)
def test_batches_of_an_exhausted_bucket_are_not_lost(lease, rule, life, steps):
    """Law 13: calls of mixed costs on an exhausted bucket, whose batches begin later, leave exactly what was not charged."""
    clock = ManualClock(NOON)
    parent, replay = MemoryStore(clock=clock), MemoryStore(clock=clock)
    store = LeasedStore(parent, lease=lease, life=life)
    (named,) = Limiter(rule, store=store, name="n").named
    for pause_us, cost, tends in [(0, rule.capacity, False), *steps]:
        clock.advance(pause_us / 1e6)
        if store.decide([Claim(named, "k", cost)]):
            replay.give_back([Claim(named, "k", -cost)])
        if store.cache.due or tends:
            store.tend()
    store.return_all()
    left, replayed = (one.decide_one(named, "k", 1, 0, False) for one in (parent, replay))
    assert left == replayed


@pytest.mark.parametrize("seed", range(12))
def test_calls_that_waited_behind_batches_give_all_back_after_their_start(seed):
    """Law 13: waiting calls, of which some are cancelled once they have begun, leave what was not charged, although a call
    served by a batch begins before those that came earlier."""
    chance, clock = random.Random(seed), ManualClock(NOON)
    parent, replay = MemoryStore(clock=clock), MemoryStore(clock=clock)
    store = LeasedStore(parent, lease=chance.choice([None, 5]))
    limiter = Limiter(LeakyBucket("200/s", 2000), store=store, name="n")
    begun: list[tuple[Any, int]] = []
    assert limiter.hit("k", 2000)
    replay.give_back([Claim(limiter.named[0], "k", -2000)])
    for _ in range(600):
        cost = chance.choice([1, 1, 1, 2, 5, 12])
        reservation = limiter.reserve("k", cost, max_wait=chance.choice([0, 0.3]))
        if reservation:
            replay.give_back([Claim(limiter.named[0], "k", -cost)])
            begun.append((reservation, cost))
        clock.advance(chance.choice([0.0, 0.001, 0.002, 0.01]))
        leaving = [one for one in begun if one[0].decision.start_us <= clock.now_us()]
        if leaving and chance.random() < 0.2:
            begun.remove(one := chance.choice(leaving))
            assert one[0].cancel()
            replay.give_back([Claim(limiter.named[0], "k", one[1])])
        store.tend()
    clock.advance(1)  # every batch has begun
    store.return_all()
    left, replayed = (one.decide_one(limiter.named[0], "k", 1, 0, False) for one in (parent, replay))
    assert left == replayed


class Far(Faulty):
    """A store whose async calls take several iterations of the event loop, before and after they are executed."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.local = False

    async def adecide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Decision:
        return await self.far_away(self.decide, claims, max_wait_us, **options)

    async def adecide_many(self, asks: Any, max_wait_us: int | None = 0) -> list[Decision]:
        return await self.far_away(self.decide_many, asks, max_wait_us)

    async def agive_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        return await self.far_away(self.give_back, claims, charged_at, source)

    async def far_away(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for _ in range(2):
            await asyncio.sleep(0)
        answer = method(*args, **options)
        await asyncio.sleep(0)
        return answer


CONCURRENT = ["hit", "hit", "hit", "tend", "undone", "refund"]


@pytest.mark.parametrize("lease", [None, 7])
@given(
    rules=st.lists(st.sampled_from(RULES), min_size=1, max_size=3),
    rounds=st.lists(st.lists(st.sampled_from(CONCURRENT), max_size=8), min_size=10, max_size=30),
)
@example(rules=[RULES[0]] * 2, rounds=[["tend"], *[[]] * 23, ["hit"] * 3])  # the close comes while a round gives back
def test_calls_that_meet_lose_nothing(lease, rules, rounds):
    """Law 13: a key may be charged, given back and fetched for at the same time; a close returns the batch being fetched."""
    clock = ManualClock(NOON + 100)
    parent = Far(MemoryStore(clock=clock))
    store = LeasedStore(parent, lease=lease)
    limiter = Limiter({f"limit {i}": rule for i, rule in enumerate(rules)}, store=store, name="n")
    charged = SIZE // 2

    def claims(cost: int) -> list[Claim]:
        return [Claim(named, "k", cost) for named in limiter.named]

    async def step(name: str) -> None:
        nonlocal charged
        if name == "tend":
            await store.atend()
            return
        decision = await store.adecide(claims(2), 1000 if name == "undone" else 0)
        charged += 2 * bool(decision)
        if decision and name != "hit":
            for claim, part in zip(claims(1), decision.decisions, strict=True):
                await store.agive_back([claim], -1 if name == "refund" else part.start_us, part.source)
            charged -= 1

    async def play() -> None:
        assert await store.adecide(claims(charged))
        for names in rounds:
            await asyncio.gather(*(step(name) for name in names))
            clock.advance(0.004)
        fetching = asyncio.ensure_future(store.atend())
        await asyncio.sleep(0)
        await store.aclose()
        await fetching

    asyncio.run(play())
    bare = MemoryStore(clock=ManualClock(NOON + 100))
    bare.give_back(claims(-charged))
    bare.clock.advance((clock.now_us() - bare.now_us()) / 1e6)  # type: ignore[attr-defined]
    left, replayed = (one.decide(claims(1), commit=False).decisions for one in (parent.inner, bare))
    for rule, one, other in zip(rules, left, replayed, strict=True):
        if isinstance(rule, SlidingWindowLog) and any("refund" in names for names in rounds):
            assert one.remaining <= other.remaining  # a refund takes the newest entry, of a batch that is just being fetched
        else:
            assert one.remaining == other.remaining


def test_a_lone_node_over_redis_spends_all_of_two_limits(valkey):
    """Two limits in a tight loop, and hits beside reservations: admissions and the rest after close() are the limit."""
    limits = {"a": TokenBucket("2000/400d"), "b": FixedWindow("2000/400d")}  # real time: what the bucket gains is less than one
    store = LeasedStore(RedisStore(valkey.url, timeout="60s"))
    limiter, net = Limiter(limits, store=store, name="two"), 0
    for _ in range(300):
        net += bool(limiter.hit("k"))
        reservation = limiter.reserve("k", cost=5, max_wait=0)
        net += 2 if reservation and reservation.settle(2) else 0
    store.close()
    with RedisStore(valkey.url, timeout="60s") as bare:
        left = [part.remaining for part in Limiter(limits, store=bare, name="two").peek("k").decisions]
    assert net == 900
    assert left == [2000 - net] * 2


@pytest.mark.parametrize("rule", [SlidingWindowLog("100/h"), SlidingWindowCounter("100/h")], ids=lambda rule: rule.kind)
@pytest.mark.parametrize("cost", [3, 8])
def test_a_cancelled_charge_of_a_lease_with_two_batches_goes_back_whole(rule, cost):
    """Law 13: a charge of a log or a counter has one time, so it is not taken from two batches."""
    clock = ManualClock(NOON + 100)
    parent = MemoryStore(clock=clock)
    store = LeasedStore(parent, lease=7)
    limiter = Limiter(rule, store=store, name="n")
    for _ in range(6):
        limiter.hit("k")
        clock.advance(0.001)
    store.tend()
    clock.advance(0.001)
    claims = [Claim(limiter.named[0], "k", cost)]
    decision = store.decide(claims)
    assert store.give_back([Claim(limiter.named[0], "k", cost, cost, claims[0].reset_id)], decision.start_us, decision.source)
    store.return_all()
    assert parent.decide_one(limiter.named[0], "k", 1, 0, False).remaining == 94
