"""ShardedStore as a store: its construction, its properties, and every verb at the right shard."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from shards import FarShard, key_on

from limitkeeper import AsyncLimiter, ConfigurationError, Limiter, MemoryStore, RedisStore, StoreTimeout, TokenBucket
from limitkeeper.stores import Claim, NamedLimit
from limitkeeper.stores.sharded import ShardedStore

KEYS = [f"user:{i}" for i in range(200)]


@pytest.fixture
def sharded(clock):
    return ShardedStore({name: MemoryStore(clock=clock) for name in "abc"})


def test_a_list_names_shards_by_position(clock):
    """Shards of a list are called "0", "1", …"""
    assert list(ShardedStore([MemoryStore(clock=clock) for _ in range(3)]).shards) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([], "at least one"),
        ({}, "at least one"),
        ("memory://", "a list of stores or a mapping"),
        (["memory://"], "store_from_url"),
        ({1: MemoryStore()}, "name must be a string"),
        ([MemoryStore()] * 2, "named as two shards"),
        (MemoryStore(), "a list of stores"),
    ],
)
def test_shards_that_are_no_stores_are_errors(shards, words):
    """Errors about the list of shards name the right form."""
    with pytest.raises(ConfigurationError, match=words):
        ShardedStore(shards)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": {"z": 2}}, "weights name z"),
        ({"weights": {"0": 0}}, "above 0"),
        ({"weights": {"0": True}}, "above 0"),
        ({"weights": {"0": float("nan")}}, "above 0"),
        ({"hot": -1}, "hot=-1"),
        ({"hot": "often"}, "hot='often'"),
    ],
)
def test_options_that_make_no_sense_are_errors(options, words):
    """Errors about the options name the right form."""
    with pytest.raises(ConfigurationError, match=words):
        ShardedStore([MemoryStore()], **options)


def test_it_is_local_when_all_shards_are(clock):
    """`local` holds exactly when no shard is remote."""
    near, far = MemoryStore(clock=clock), FarShard(clock)
    assert ShardedStore([near]).local is True
    assert ShardedStore([near, far]).local is False


def test_a_heavier_shard_has_more_keys(clock):
    """A weight of 3 beside a 1 is three quarters of the keys."""
    sharded = ShardedStore([MemoryStore(clock=clock) for _ in range(2)], weights={"1": 3})
    share = sum(sharded.home_of(str(i)) == "1" for i in range(10_000)) / 10_000
    assert share == pytest.approx(0.75, abs=0.02)


def test_a_key_is_kept_by_its_home_alone(make, sharded):
    """Every shard holds just the keys that live on it, for every limit."""
    limiter = make({"x": "5/h", "y": "fixed window 5/h"}, store=sharded)
    limiter.hit_many(KEYS)
    for name, store in sharded.shards.items():
        assert len(store) == 2 * sum(sharded.home_of(key) == name for key in KEYS)
    assert sorted(key for key, _ in sharded.items(limiter.named[0])) == sorted(KEYS)


def test_state_goes_to_the_homes_of_its_keys(make, sharded, clock):
    """The items of another store can be loaded into a sharded one: `load` brings every key home."""
    model = Limiter("5/h", store=MemoryStore(clock=clock))
    model.hit_many(KEYS, cost=3)
    limiter = make("5/h", store=sharded)
    sharded.load(limiter.named[0], model.store.items(model.named[0]))
    assert {limiter.peek(key).remaining for key in KEYS} == {2}
    with pytest.raises(TypeError, match="key must be a str"):
        sharded.load(limiter.named[0], [(1, (0, 0, 0))])


def test_limits_of_one_name_share_their_state(make, sharded):
    """Two limiters of one name, with a NamedLimit each, meet on the same shards."""
    one, other = make("5/h", store=sharded, name="api"), make("5/h", store=sharded, name="api")
    one.hit("user:1", cost=3)
    assert other.hit("user:1").remaining == 1


def test_two_sharded_stores_may_share_their_shards(make, clock):
    """The state is in the shards: a second ShardedStore of the same names, as in another process, has the same counters."""
    shards = {name: MemoryStore(clock=clock) for name in "abc"}
    one, other = (make("5/h", store=ShardedStore(shards)) for _ in range(2))
    for key in KEYS:
        one.hit(key, cost=2)
    assert {other.hit(key).remaining for key in KEYS} == {2}
    assert {one.hit(key).remaining for key in KEYS} == {1}


def test_a_limit_with_a_start_level_is_known_by_every_shard(make, sharded, clock):
    """`register` reaches all shards: a bucket that starts empty fills from the limiter's birth, wherever its keys live."""
    limiter = make(TokenBucket("1/s", burst=10, initial=0), store=sharded)
    clock.advance(4)
    assert {limiter.peek(key).remaining for key in KEYS} == {4}


def test_local_shards_answer_async_callers_without_waiting(clock):
    """A hit on a local shard beside remote ones is answered without awaiting anything."""
    far = FarShard(clock)
    sharded = ShardedStore({"near": MemoryStore(clock=clock), "far": far}, hot=False)
    limiter = AsyncLimiter("5/h", store=sharded)
    named = limiter.named[0]
    assert sharded.hit_nowait(named, key_on(sharded, "near"), 1).remaining == 4
    assert sharded.hit_nowait(named, key_on(sharded, "far"), 1) is None
    assert far.calls == []
    assert asyncio.run(limiter.hit(key_on(sharded, "far"))).remaining == 4


def test_overflow_of_all_shards_is_added_up(make, clock):
    """Decisions of full shards on overflow cells are added up."""
    sharded = ShardedStore([MemoryStore(max_keys=10, clock=clock) for _ in range(2)])
    limiter = make("5/h", store=sharded)
    limiter.hit_many(KEYS)
    assert sharded.overflow == sum(store.overflow for store in sharded.shards.values()) > 0
    assert limiter.stats().overflow == sharded.overflow


@pytest.mark.parametrize("hot", [True, False])
def test_a_budget_is_passed_on_to_every_shard(clock, hot):
    """`answers_within` requests a quarter from each shard, whose hot keys may be leased, and holds when all can promise it."""

    class Promising(FarShard):
        asked = 0

        def answers_within(self, budget_us):
            self.asked = budget_us
            return True

    first, second = Promising(clock), Promising(clock)
    sharded = ShardedStore([first, second], hot=hot)
    assert sharded.answers_within(20_000) is True
    later = Promising(clock)
    sharded.add("later", later)
    assert (first.asked, second.asked, later.asked) == (5000, 5000, 5000)
    assert ShardedStore([Promising(clock), FarShard(clock)]).answers_within(20_000) is False
    assert ShardedStore([MemoryStore(clock=clock)]).answers_within(20_000) is True


def test_two_steps_end_within_the_budget(clock):
    """Once a budget is promised, a decision on several shards that takes too long makes no further call."""

    class Slow(FarShard):
        def answers_within(self, budget_us):
            return True

    shards = {name: Slow(clock) for name in "ab"}
    sharded = ShardedStore(shards, hot=False)
    sharded.answers_within(1)
    limiter = Limiter({"user": "1/h", "tenant": "1/h"}, store=sharded)
    keys = {"user": key_on(sharded, "a"), "tenant": key_on(sharded, "b")}
    shards["a"].meanwhile = lambda verb: time.sleep(0.001)
    with pytest.raises(StoreTimeout, match="within the budget"):
        limiter.hit(keys)


def test_closing_closes_every_shard(clock):
    """`close` and `aclose` close all shards."""

    class Closing(FarShard):
        closed = 0

        def close(self):
            self.closed += 1

    shards = [Closing(clock) for _ in range(3)]
    with ShardedStore(shards):
        pass
    asyncio.run(ShardedStore(shards).aclose())
    assert [shard.closed for shard in shards] == [2, 2, 2]


def test_nothing_but_claims_goes_below(sharded):
    """An invalid claim, no claims at all, and a limit named twice for a key are errors, as on every store."""
    named = NamedLimit("api", "one", TokenBucket("5/h"))
    with pytest.raises(ConfigurationError, match="at least one claim"):
        sharded.decide([])
    with pytest.raises(ConfigurationError, match="twice"):
        sharded.decide([Claim(named, "a"), Claim(named, "a")])
    with pytest.raises(ConfigurationError, match="twice"):
        sharded.decide([Claim(named, "a"), Claim(named, "b"), Claim(named, "a")])
    with pytest.raises(TypeError):
        sharded.give_back(["a"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_starts_without_callers(python):
    """After a fork during a decision the child can hand keys over: it does not wait for callers of the parent."""
    done = python(
        """
        import os
        from limitkeeper import Limiter, MemoryStore
        from limitkeeper.stores.sharded import ShardedStore

        sharded = ShardedStore({"a": MemoryStore(), "b": MemoryStore()})
        limiter = Limiter("5/h", store=sharded)
        limiter.hit_many([str(i) for i in range(50)])
        caller = sharded.router.enter()
        if os.fork() == 0:
            sharded.add("c", MemoryStore())
            os._exit(0 if {limiter.peek(str(i)).remaining for i in range(50)} == {4} else 1)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        """
    )
    assert done.stdout.strip() == "0", done.stderr


def test_rates_that_are_used_no_more_are_forgotten_but_for_the_last(clock):
    """Of a name whose rates change (those of callers, of reloads) only those in use are kept, here and in each shard and its
    leases; and the last one, with which the states of the name move."""
    shards = {name: RedisStore("redis://127.0.0.1:1", clock=clock) for name in "ab"}
    sharded = ShardedStore(shards)
    rates = [NamedLimit("api", "user", TokenBucket(f"{count}/s")) for count in range(1, 101)]
    for one in (*rates, rates[-1]):
        sharded.register(one)
    for one in rates:
        sharded.unregister(one)
    assert sharded.membership._registered() == [rates[-1]]
    assert [list(store.names.entries) for store in shards.values()] == [[rates[-1]]] * 2
    sharded.unregister(rates[-1])
    assert sharded.membership._registered() == [rates[-1]]
    assert [len(store.names.entries) for store in shards.values()] == [0, 0]
    sharded.close()
