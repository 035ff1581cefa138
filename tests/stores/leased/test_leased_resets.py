"""Resets and leases: a lease or charge from before a reset gives nothing back after it, through this node or another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from limitkeeper import (
    AsyncLimiter,
    Decision,
    FixedWindow,
    LeakyBucket,
    LeasedStore,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.testing import ManualClock
from stand_ins import NOON, WrappedStore

RULES = [TokenBucket("100/h"), LeakyBucket("100/h", capacity=100), FixedWindow("100/h"), SlidingWindowLog("100/h")]
RULES += [SlidingWindowCounter("100/h")]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
every_lease = pytest.mark.parametrize("lease", [None, 1, 7, 20])


def nodes(rule, lease=20, number=2):
    """A parent, and limiters on nodes that lease from it."""
    parent = MemoryStore(clock=ManualClock(NOON + 100))
    return parent, [Limiter({"a": rule, "b": rule}, LeasedStore(parent, lease=lease), "n") for _ in range(number)]


def remaining(limiter) -> list[int]:
    """The remaining part of each limit, once nothing is leased."""
    if isinstance(limiter.store, LeasedStore):
        limiter.store.return_all()
    return [part.remaining for part in limiter.peek("key").decisions]


@every_lease
@every_rule
@pytest.mark.parametrize("used", [0, 1, 30], ids=["cancelled", "settled below", "settled above"])
def test_a_charge_from_before_a_reset_is_not_settled(rule, lease, used):
    """A charge that a lease or the parent made, then a reset: settle returns False and changes nothing. The next one settles."""
    _, (limiter,) = nodes(rule, lease, 1)
    for _ in range(9):
        limiter.hit("key")
        limiter.store.tend()
    old = limiter.reserve("key", 5, max_wait=0)
    limiter.reset("key")
    for _ in range(9):
        assert limiter.hit("key")
        limiter.store.tend()
    assert not (old.settle(used) if used else old.cancel())
    assert remaining(limiter) == [91, 91]
    new = limiter.reserve("key", 5, max_wait=0)
    assert new.settle(used) if used else new.cancel()
    assert remaining(limiter) == [91 - used, 91 - used]


@every_rule
def test_what_was_leased_before_a_reset_does_not_go_back(rule):
    """Another node resets the key: the batch that this node holds is in no state any more, so it gives nothing back."""
    parent, (one, two) = nodes(rule)
    bare = Limiter({"a": rule, "b": rule}, parent, "n")
    for _ in range(3):
        assert one.hit("key")
        one.store.tend()
    two.reset("key")
    assert bare.hit("key", 50)
    assert one.store.leased(one.named[0], "key") > 0
    one.store.return_all()
    assert remaining(bare) == [50, 50]


@every_rule
def test_a_batch_from_after_a_reset_voids_the_one_before(rule):
    """The reply with the next batch shows that the key was reset since the first was charged: only its tokens are held then."""
    parent, (one, two) = nodes(rule)
    named, store = one.named[0], one.store
    for _ in range(19):
        assert store.decide_one(named, "key", 1, 0, True)
    held = store.leased(named, "key")
    two.reset("key")
    assert parent.decide_one(named, "key", 1, 0, True)
    store.tend()
    assert held == 1
    assert store.leased(named, "key") == 20
    assert parent.decide_one(named, "key", 1, 0, False).remaining == 79


def two_rates(rule):
    """The limiters of two rates under one name, on one node that holds a batch of each."""
    store = LeasedStore(MemoryStore(clock=ManualClock(NOON + 100)), lease=50)
    higher = LeakyBucket("200/h", capacity=200) if isinstance(rule, LeakyBucket) else type(rule)("200/h")
    limiters = [Limiter({"a": one}, store, "n") for one in (rule, higher)]
    for limiter in limiters:
        assert limiter.hit("key")
        assert store.leased(limiter.named[0], "key") == 49
    return limiters


@pytest.mark.parametrize("aside", [False, True], ids=["held", "put aside"])
@every_rule
def test_a_reset_drops_what_every_rate_of_the_name_holds(rule, aside):
    """A reset is for the whole key: after it no rate has a batch from before, held or put aside."""
    one, two = two_rates(rule)
    store = one.store
    if aside:
        store.cache.put_aside(store.cache.find(one.named[0], "key"), store.cache.now_us(), all_of_it=True)
    assert two.hit("other")
    two.reset("key")
    assert [store.leased(limiter.named[0], "key") for limiter in (one, two)] == [0, 0]
    assert store.leased(two.named[0], "other") == 49
    assert not store.cache.unspent
    assert sum(bool(one.hit("key")) for _ in range(300)) == 100


@every_rule
def test_a_load_drops_what_every_rate_of_the_name_holds(rule):
    """A batch of one rate is charged to the others too: it does not go back into a state that was loaded since."""
    one, _ = two_rates(rule)
    bare = MemoryStore(clock=one.store.clock)
    assert bare.decide_one(one.named[0], "key", 70, 0, True)
    one.store.load(one.named[0], list(bare.items(one.named[0])))
    assert remaining(one) == [30]


class Far(WrappedStore):
    """A parent whose async decisions are executed, and answered, when the test allows it."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.asked, self.executed, self.answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.charged = asyncio.Event()

    async def adecide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Decision:
        self.asked.set()
        await self.executed.wait()
        decision = self.inner.decide(claims, max_wait_us, **options)
        self.charged.set()
        await self.answered.wait()
        return decision


@every_rule
@pytest.mark.parametrize("first", ["fetch", "reset"])
def test_a_reset_during_a_fetch_loses_nothing(rule, first):
    """A batch on its way while the key is reset goes back to the parent, which can tell whether the charge came before."""

    async def play() -> tuple[bool, int]:
        parent = Far(MemoryStore(clock=ManualClock(NOON + 100)))
        store = LeasedStore(parent, lease=20)
        limiter = AsyncLimiter({"a": rule}, store, "n")
        parent.inner.decide(limiter.claims("key", 30))
        if first == "fetch":
            parent.executed.set()
        fetching = asyncio.ensure_future(limiter.hit("key"))
        await (parent.charged if first == "fetch" else parent.asked).wait()
        await limiter.reset("key")
        parent.executed.set()
        await parent.charged.wait()
        parent.answered.set()
        admitted = bool(await fetching)
        await store.areturn_all()
        return admitted, parent.inner.decide(limiter.claims("key"), commit=False).remaining

    assert asyncio.run(play()) == (True, 99)
