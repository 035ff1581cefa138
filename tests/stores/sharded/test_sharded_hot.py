"""A key with most of the traffic is leased from its shard, within the bound of its leases, and other keys are not affected."""

from __future__ import annotations

import asyncio

import pytest
from shards import FarShard, key_on

from limitkeeper import AsyncLimiter, FixedWindow, Limiter, MemoryStore, StoreUnavailable, TokenBucket
from limitkeeper.stores.sharded import ShardedStore

KEY = "viral"


@pytest.fixture
def shards(clock):
    return {name: FarShard(clock) for name in "abcd"}


def storm(limiter, clock, hits, rate=10_000, keys=KEY):
    """Hits at this rate; returns how many were admitted."""
    admitted = 0
    for _ in range(hits):
        admitted += bool(limiter.hit(keys))
        clock.advance(1 / rate)
    return admitted


@pytest.mark.parametrize("allowed", [1000, 100_000], ids=["overload", "all admitted"])
def test_one_key_with_all_the_traffic_costs_its_home_a_tenth_of_an_operation(shards, clock, allowed):
    """Over four shards, a decision costs the hot key's home at most 0.1 operations, and the other homes none."""
    sharded = ShardedStore(shards)
    limiter = Limiter(TokenBucket(f"{allowed}/s"), store=sharded)
    hits = 15_000
    storm(limiter, clock, hits)
    asked = {name: len(shard.calls) for name, shard in shards.items()}
    home = sharded.home_of(KEY)
    assert 0 < asked.pop(home) <= 0.1 * hits
    assert set(asked.values()) == {0}


def test_the_same_awaited(shards, clock):
    """An async storm of one key costs its home at most 0.1 operations a decision, too."""
    sharded = ShardedStore(shards)
    hits = 15_000

    async def main():
        limiter = AsyncLimiter(TokenBucket("1000/s"), store=sharded)
        for _ in range(hits):
            await limiter.hit(KEY)
            clock.advance(1 / 10_000)

    asyncio.run(main())
    assert len(shards[sharded.home_of(KEY)].calls) <= 0.1 * hits


@pytest.mark.parametrize("rule", [TokenBucket("1000/s"), FixedWindow("1000/s")], ids=str)
def test_what_a_hot_key_is_admitted_stays_within_the_bound_of_its_leases(shards, clock, rule):
    """While a key is hot: the limit, and at most the leases' own bound more; and not much less than the limit."""
    sharded = ShardedStore(shards)
    limiter = Limiter(rule, store=sharded)
    seconds = 2
    admitted = storm(limiter, clock, seconds * 10_000)
    leases = sharded.membership.shards[sharded.home_of(KEY)].leased.store
    most = limiter.peek(KEY).limit + 1000 * seconds + leases.over_admission(rule, nodes=1)
    assert 0.9 * 1000 * seconds <= admitted <= most


def test_decisions_of_several_limits_find_hot_keys_too(shards, clock):
    """A limiter of several limits counts its keys as one of a single limit does."""
    sharded = ShardedStore(shards)
    limiter = Limiter({"second": TokenBucket("1000/s"), "minute": FixedWindow("90000/min")}, store=sharded)
    storm(limiter, clock, 5000)
    assert list(sharded.hot_keys()) == [KEY]


def test_hot_keys_are_shown_and_cool_down(shards, clock):
    """hot_keys() names them with their hits a second; a key that calms down is decided by its home again."""
    sharded = ShardedStore(shards)
    limiter = Limiter("100000/s", store=sharded)
    storm(limiter, clock, 15_000)
    assert list(sharded.hot_keys()) == [KEY]
    assert 8000 < sharded.hot_keys()[KEY] < 12_000
    storm(limiter, clock, 300, rate=100)
    assert sharded.hot_keys() == {}
    home = shards[sharded.home_of(KEY)]
    home.calls.clear()
    storm(limiter, clock, 50, rate=100)
    assert home.calls == ["decide"] * 50


def test_hot_is_a_number_or_off(shards, clock):
    """hot=False pins every key to its home; hot=100 finds a key with a hundred hits a second."""
    pinned = ShardedStore(shards, hot=False)
    assert storm(Limiter("1000/s", store=pinned), clock, 3000) > 0
    assert (len(shards[pinned.home_of(KEY)].calls), pinned.hot_keys()) == (3000, {})
    eager = ShardedStore({name: FarShard(clock) for name in "abcd"}, hot=100)
    storm(Limiter("1000/s", store=eager), clock, 600, rate=200)
    assert list(eager.hot_keys()) == [KEY]


def test_keys_of_local_shards_are_never_leased(clock):
    """A MemoryStore is quicker than a lease of it: keys of local shards are never leased."""
    sharded = ShardedStore([MemoryStore(clock=clock) for _ in range(4)])
    storm(Limiter("1000/s", store=sharded), clock, 5000)
    assert sharded.hot_keys() == {}


def test_neighbours_of_a_hot_key_are_answered_exactly(shards, clock):
    """While one key is leased, every other key on its shard gets the decision that a store of its own would make."""
    sharded = ShardedStore(shards)
    limiter, model = Limiter("50/s burst 5", store=sharded), Limiter("50/s burst 5", store=MemoryStore(clock=clock))
    home = sharded.home_of(KEY)
    others = [key_on(sharded, home, i) for i in range(5)]
    for i in range(12_000):
        limiter.hit(KEY)
        if i % 10 == 0:
            other = others[i // 10 % 5]
            assert limiter.hit(other) == model.hit(other)
        clock.advance(1 / 10_000)
    assert list(sharded.hot_keys()) == [KEY]


def test_a_hot_key_can_be_given_back_and_reset(shards, clock):
    """Refunds and resets of a hot key reach its leases: refunded tokens can be taken, and a reset key is as new."""
    sharded = ShardedStore(shards, life="10s")
    limiter = Limiter("fixed window 5000/400d", store=sharded)
    admitted = storm(limiter, clock, 6000)
    assert admitted == 5000
    limiter.refund(KEY, cost=10)
    assert sum(bool(limiter.hit(KEY)) for _ in range(20)) == 10
    limiter.reset(KEY)
    assert limiter.peek(KEY).remaining == 5000


def test_a_hot_key_moves_with_what_it_has_used(shards, clock):
    """When a hot key's home changes, its leases go back first: its remaining tokens stay the same, and never grow."""
    sharded = ShardedStore(shards, life="1h")
    final = ShardedStore({name: MemoryStore(clock=clock) for name in "abcde"})
    key = next(f"user:{i}" for i in range(1000) if final.home_of(f"user:{i}") == "e")
    limiter = Limiter("fixed window 20000/400d", store=sharded)
    admitted = storm(limiter, clock, 15_000, keys=key)
    assert key in sharded.hot_keys()
    sharded.add("e", FarShard(clock))
    assert sharded.home_of(key) == "e"
    admitted += storm(limiter, clock, 15_000, keys=key)
    assert admitted == 20_000


def test_a_lost_home_of_a_hot_key_is_a_lost_shard(shards, clock):
    """When the home of a hot key is lost the error names the shard; with rehash the key continues elsewhere."""
    sharded = ShardedStore(shards, on_loss="rehash")
    limiter = Limiter("100000/s", store=sharded)
    storm(limiter, clock, 5000)
    home = sharded.home_of(KEY)
    shards[home].down = True
    storm(limiter, clock, 20_000)
    assert (sharded.lost, sharded.home_of(KEY) != home) == ([home], True)
    failing = ShardedStore({name: FarShard(clock) for name in "abcd"})
    limiter = Limiter("100000/s", store=failing)
    storm(limiter, clock, 5000)
    failing.shards[home].down = True
    with pytest.raises(StoreUnavailable, match=f"shard '{home}'"):
        storm(limiter, clock, 20_000)


def test_closing_gives_leases_back(shards, clock):
    """The lease of a hot key goes back to its home on close."""
    sharded = ShardedStore(shards, life="1h")
    limiter = Limiter("fixed window 20000/400d", store=sharded)
    admitted = storm(limiter, clock, 5000)
    home = shards[sharded.home_of(KEY)]
    home.close = lambda: None
    named = sharded.router.limit_at(limiter.named[0], sharded.membership.shards[sharded.home_of(KEY)])
    sharded.close()
    assert home.decide_one(named, KEY, 1, 0, False).remaining == 20_000 - admitted


class OtherClock:
    """A clock that is neither the system's nor a manual one."""

    def now_us(self):
        return 7_000_000

    def sleep(self, seconds, wake=None):
        raise AssertionError("nobody sleeps here")

    async def asleep(self, seconds, wake=None):
        raise AssertionError("nobody sleeps here")


def test_the_leases_of_hot_keys_are_timed_by_the_clock_that_was_given(shards):
    """No store reads a clock of its own: a simulator's clock reaches the leases too."""
    given = OtherClock()
    sharded = ShardedStore(shards, clock=given)
    leases = sharded.membership.shards["a"].leased.store
    assert leases.sleeper is given
    assert leases.cache.now_us() == 7_000_000


def test_changes_of_membership_run_in_the_thread_that_was_given(clock):
    """Async changes run through `run_in_thread`, so that a simulator can take turns with them."""
    ran = []

    async def run_in_thread(function, *args):
        ran.append(function.__name__)
        return function(*args)

    sharded = ShardedStore({"a": MemoryStore(clock=clock)}, run_in_thread=run_in_thread)
    asyncio.run(sharded.aadd("b", MemoryStore(clock=clock)))
    asyncio.run(sharded.aremove("a"))
    assert ran == ["add", "remove"]
