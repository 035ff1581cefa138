"""Planned changes: state moves along, a key is decided in one home at any moment, and callers wait at a gate meanwhile."""

from __future__ import annotations

import asyncio
import random
import sys
import threading

import pytest
from shards import FarShard, key_on

from effort import scaled
from limitkeeper import (
    AsyncLimiter,
    ConfigurationError,
    FixedWindow,
    GuardedStore,
    LeasedStore,
    Limiter,
    MemoryStore,
    SlidingWindowLog,
    StoreTimeout,
    StoreUnavailable,
    TokenBucket,
)
from limitkeeper.stores.sharded import ShardedStore
from limitkeeper.testing import ManualClock
from limitkeeper.testing.admission_bounds import check_bound
from stand_ins import NOON

KEYS = [f"user:{i}" for i in range(600)]
RULES = {
    "bucket": TokenBucket("5/h"),
    "window": FixedWindow("5/h"),
    "log": SlidingWindowLog("5/h"),
}


@pytest.fixture(params=["local", "remote"])
def new(request, clock):
    """Makes a shard, local or remote."""
    return lambda: MemoryStore(clock=clock) if request.param == "local" else FarShard(clock)


@pytest.fixture
def sharded(new):
    return ShardedStore({"a": new(), "b": new(), "c": new()}, hot=False)


def used(limiter):
    return [limiter.peek(key).to_dict() for key in KEYS]


def spend(limiter):
    for i, key in enumerate(KEYS):
        for _ in range(i % 6):
            limiter.hit(key)


def test_a_new_shard_gets_its_keys_with_their_counters(sharded, new):
    """After a shard is added every key answers as before; a quarter of them live on the new shard, and nowhere else."""
    limiter = Limiter(RULES, store=sharded)
    spend(limiter)
    before, homes = used(limiter), {key: sharded.home_of(key) for key in KEYS}
    added = new()
    sharded.add("d", added)
    assert used(limiter) == before
    moved = [key for key in KEYS if sharded.home_of(key) != homes[key]]
    assert {sharded.home_of(key) for key in moved} == {"d"}
    assert 0.15 < len(moved) / len(KEYS) < 0.35
    kept = {key for key in moved if KEYS.index(key) % 6}
    for named in limiter.named:
        shards = sharded.membership.shards.items()
        at = {name: {key for key, _ in shard.store.items(sharded.router.limit_at(named, shard))} for name, shard in shards}
        assert at["d"] == kept
        assert not any(at[name] & kept for name in "abc")


@pytest.mark.parametrize("rule", [TokenBucket, FixedWindow, SlidingWindowLog])
def test_every_rate_of_a_key_moves_and_no_other_comes(rule, sharded, new):
    """Three rates under one name, each on some of the keys: after a shard is added every key answers as before under every rate,
    and holds the same rates."""
    some = [Limiter({"limit": rule(rate)}, store=sharded, name="plans") for rate in ("5/min", "9/h", "20/d")]
    for i, key in enumerate(KEYS):
        for number in range(3):
            if (i >> number) & 1:
                some[number].hit(key, i % 4 + 1)
    before = [used(limiter) for limiter in some]
    rates = states(sharded, some)
    assert len(rates) > len(KEYS) or rule is SlidingWindowLog
    sharded.add("d", new())
    assert [used(limiter) for limiter in some] == before
    assert states(sharded, some) == rates


def states(sharded, limiters):
    """The rates that have a state of their own on a key, over all shards: (rate, key) -> state."""
    found = {}
    for named in [limiter.named[0] for limiter in limiters]:
        for shard in sharded.membership.shards.values():
            at_home = shard.store.rate_items(sharded.router.limit_at(named, shard))
            found |= {(str(named.limit), key): state for key, state in at_home}
    return found


def test_a_shard_that_goes_leaves_its_counters_to_the_others(sharded):
    """After a shard is removed every key answers as before, and its store is returned to the caller, empty."""
    limiter = Limiter(RULES, store=sharded)
    spend(limiter)
    before = used(limiter)
    b = sharded.shards["b"]
    assert sharded.remove("b") is b
    assert used(limiter) == before
    assert sorted(sharded.shards) == ["a", "c"]
    assert len(b) == 0


@pytest.mark.parametrize("wrapper", [LeasedStore, GuardedStore])
def test_shards_behind_other_wrappers_keep_nothing_of_keys_that_have_moved(clock, wrapper):
    """A shard that is a LeasedStore or a GuardedStore forgets them, without a mark of a reset."""
    old = MemoryStore(clock=clock)
    sharded = ShardedStore({"a": wrapper(old)}, hot=False)
    Limiter("5/h", store=sharded).hit_many(KEYS)
    sharded.add("b", MemoryStore(clock=clock))
    assert len(old) == sum(sharded.home_of(key) == "a" for key in KEYS)


def test_there_and_back_again(sharded, new):
    """A shard that is added and removed again leaves everything as it was."""
    limiter = Limiter(RULES, store=sharded)
    spend(limiter)
    before, homes = used(limiter), [sharded.home_of(key) for key in KEYS]
    sharded.add("d", new(), weight=2)
    sharded.remove("d")
    assert used(limiter) == before
    assert [sharded.home_of(key) for key in KEYS] == homes


def test_without_handoff_what_moves_starts_again(sharded, new):
    """handoff=False is quick and forgets: keys that move are as new, all others are not."""
    limiter = Limiter("fixed window 5/h", store=sharded)
    for key in KEYS:
        limiter.hit(key, cost=5)
    homes = {key: sharded.home_of(key) for key in KEYS}
    sharded.add("d", new(), handoff=False)
    for key in KEYS:
        assert limiter.peek(key).remaining == (0 if sharded.home_of(key) == homes[key] else 5)


def test_lists_that_differ_admit_one_more_rate_each(clock):
    """While two processes have different lists, a key whose homes differ gets burst + rate × T from each; all others once."""
    shards = {name: MemoryStore(clock=clock) for name in "abc"}
    stores = [ShardedStore(shards, hot=False), ShardedStore({name: shards[name] for name in "ab"}, hot=False)]
    limiters = [Limiter("10/s burst 5", store=store, name="n") for store in stores]
    keys = KEYS[:30]
    admitted = dict.fromkeys(keys, 0)

    def overload(seconds):
        for _ in range(20 * seconds):
            for key in keys:
                admitted[key] += sum(bool(limiter.hit(key)) for limiter in limiters for _ in range(2))
            clock.advance(0.05)

    def bound(key, seconds):
        homes = {store.home_of(key) for store in stores}
        return len(homes) * (5 + 10 * seconds)

    overload(10)
    assert {bound(key, 10) for key in keys} == {105, 210}
    assert all(bound(key, 10) - 5 <= admitted[key] <= bound(key, 10) for key in keys)
    stores[1].add("c", shards["c"], handoff=False)
    admitted = dict.fromkeys(keys, 0)
    overload(10)  # the lists agree again: one rate, and no burst, since all was used
    assert all(admitted[key] <= 105 for key in keys)


ANY_RULE = ["token bucket {}/min", "leaky bucket {0}/min capacity {0}", "leaky bucket queue {}/min", "fixed window {}/min"]
ANY_RULE += ["sliding window log {}/min", "sliding window counter {}/min"]


@pytest.mark.parametrize("rule", ANY_RULE)
def test_any_lists_admit_the_bound_once_for_each_home(rule, clock):
    """Two to four processes with lists of any shards: a key gets in any interval the bound of the rule times its homes."""
    for seed in range(scaled(20)):
        rng, shards = random.Random(seed), {name: MemoryStore(clock=clock) for name in "abcdef"}
        lists = [rng.sample("abcdef", rng.randint(1, 5)) for _ in range(rng.randint(2, 4))]
        stores = [ShardedStore({name: shards[name] for name in some}, hot=False) for some in lists]
        limiters = [Limiter(rule.format(5), store=store, name="n") for store in stores]
        starts = []
        for _ in range(200):
            clock.advance(rng.choice((0, 0, 0.1, 1, 20)))
            if one := rng.choice(limiters).reserve("user", max_wait=rng.choice((0, 0, 30))):
                starts.append(one.decision.start_us)
        homes = len({store.home_of("user") for store in stores})
        (limit,) = Limiter(rule.format(5 * homes)).limits.values()
        check_bound(limit, [(start // limit.tick, 1) for start in starts], extra=homes if "queue" in rule else 0)


def test_each_further_process_that_hands_over_adds_one_more_burst(clock):
    """Six processes hand one change over, one after the other: what the new home holds is replaced five times."""
    shards = {name: MemoryStore(clock=clock) for name in "abcd"}
    key = key_on(ShardedStore(shards, hot=False), "d")
    stores = [ShardedStore({name: shards[name] for name in "abc"}, hot=False) for _ in range(6)]
    limiters = [Limiter("fixed window 10/400d", store=store, name="n") for store in stores]
    admitted = sum(bool(limiters[0].hit(key)) for _ in range(20))
    for limiter, store in zip(limiters, stores, strict=True):
        admitted += sum(bool(limiter.hit(key)) for _ in range(5))
        store.add("d", shards["d"])
        admitted += sum(bool(limiter.hit(key)) for _ in range(20))
    assert 20 < admitted <= 10 * (1 + len(stores))


def test_progress_is_reported(sharded, new):
    """A long move reports its progress: keys of each shard that hands over, and slots in all."""
    limiter = Limiter("5/h", store=sharded)
    spend(limiter)
    reports = []
    sharded.add("d", new(), progress=reports.append)
    assert {report.shard for report in reports} == {"a", "b", "c"}
    assert reports[-1].slots == reports[-1].of > 3000
    assert sum(max(report.keys for report in reports if report.shard == name) for name in "abc") == len(
        [key for i, key in enumerate(KEYS) if i % 6 and sharded.home_of(key) == "d"]
    )


@pytest.mark.parametrize("driver", ["threads", "tasks"])
def test_no_more_is_admitted_while_shards_come_and_go(new, driver):
    """Callers that never stop are admitted exactly the limit of every key, while keys move under them."""
    sharded = ShardedStore({"a": new(), "b": new()}, hot=False)
    keys = KEYS[:40]
    admitted = dict.fromkeys(keys, 0)
    count = threading.Lock()
    done = threading.Event()

    def note(key, decision):
        with count:
            admitted[key] += bool(decision)

    def work(limiter):
        while not done.is_set():
            for key in keys:
                note(key, limiter.hit(key))

    def change():
        for i in range(4):
            sharded.add(f"new {i}", new())
            if i % 2:
                sharded.remove(f"new {i - 1}")

    async def ask(limiter):
        while not done.is_set():
            for key in keys:
                note(key, await limiter.hit(key))
                await asyncio.sleep(0)

    async def tasks():
        limiter = AsyncLimiter("fixed window 500/400d", store=sharded)
        asking = [asyncio.create_task(ask(limiter)) for _ in range(4)]
        for i in range(4):
            await sharded.aadd(f"new {i}", new())
            if i % 2:
                await sharded.aremove(f"new {i - 1}")
        done.set()
        await asyncio.gather(*asking)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        if driver == "tasks":
            asyncio.run(tasks())
        else:
            limiter = Limiter("fixed window 500/400d", store=sharded)
            threads = [threading.Thread(target=work, args=(limiter,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            change()
            done.set()
            for thread in threads:
                thread.join()
    finally:
        done.set()
        sys.setswitchinterval(interval)
    limiter = Limiter("fixed window 500/400d", store=sharded)
    left = {key: limiter.peek(key).remaining for key in keys}
    assert {key: admitted[key] + left[key] for key in keys} == dict.fromkeys(keys, 500)


@pytest.mark.parametrize("failing", ["items", "load"])
def test_a_move_that_fails_leaves_keys_where_they_were(clock, failing):
    """When a shard fails half-way, nothing is lost or decided twice; rebalance() carries on when it is back."""
    shards = {name: FarShard(clock) for name in "abc"}
    sharded = ShardedStore(shards, hot=False)
    limiter = Limiter("5/h", store=sharded)
    spend(limiter)
    before = used(limiter)
    added = FarShard(clock)
    broken = shards["b"] if failing == "items" else added
    reports = []

    def progress(one):
        reports.append(one)
        if one.slots and failing == "load":
            broken.failing.add("load")

    if failing == "items":
        broken.failing.add("items")
    with pytest.raises(StoreUnavailable):
        sharded.add("d", added, progress=progress)
    assert used(limiter) == before
    broken.failing.clear()
    sharded.rebalance()
    assert used(limiter) == before
    assert {sharded.home_of(key) for key in KEYS} == set("abcd")
    assert sum(sharded.home_of(key) == "d" for key in KEYS) > 60


def test_a_removal_that_fails_can_be_done_again(clock):
    """A shard that could not hand everything over stays; removing it again completes the change."""
    shards = {name: FarShard(clock) for name in "abc"}
    sharded = ShardedStore(shards, hot=False)
    limiter = Limiter("5/h", store=sharded)
    spend(limiter)
    before = used(limiter)
    shards["a"].failing.add("load")
    with pytest.raises(StoreUnavailable):
        sharded.remove("b")
    assert used(limiter) == before
    assert "b" in sharded.shards
    shards["a"].failing.clear()
    sharded.remove("b")
    assert used(limiter) == before


@pytest.fixture
def moving(clock):
    """A move that has closed its gates and is held there; keys that move, and one that does not."""
    shards = {name: FarShard(clock) for name in "abc"}
    sharded = ShardedStore(shards, hot=False, pause="50ms")
    limiter = Limiter("5/h", store=sharded)
    limiter.hit_many(KEYS)
    old = {key: sharded.home_of(key) for key in KEYS}
    closed, go_on = threading.Event(), threading.Event()

    def hold(verb):
        if verb == "items":
            closed.set()
            assert go_on.wait(60)

    shards["a"].meanwhile = hold
    thread = threading.Thread(target=sharded.add, args=("d", FarShard(clock)))
    thread.start()
    assert closed.wait(60)
    final = ShardedStore({name: MemoryStore(clock=clock) for name in "abcd"})
    going = next(key for key in KEYS if old[key] == "a" and final.home_of(key) == "d")
    staying = next(key for key in KEYS if old[key] == "a" and final.home_of(key) == "a")
    yield sharded, limiter, going, staying, go_on
    go_on.set()
    thread.join(60)


def test_a_key_on_its_way_is_waited_for_and_no_longer_than_the_pause(moving):
    """A caller of a key that is being moved gets StoreTimeout after the pause; every other key is answered at once."""
    _, limiter, going, staying, _ = moving
    assert limiter.hit(staying)
    with pytest.raises(StoreTimeout, match="handing keys over"):
        limiter.hit(going)
    with pytest.raises(StoreTimeout, match="pause="):
        limiter.hit_many([staying, going])


def test_an_awaited_key_on_its_way_is_waited_for_too(moving):
    """In async code the wait at the gate is awaited: the loop continues, and the answer comes when the key has arrived."""
    sharded, _, going, staying, go_on = moving
    sharded.membership.pause_us = 60_000_000

    async def main():
        limiter = AsyncLimiter("5/h", store=sharded)
        waiting = asyncio.create_task(limiter.hit(going))
        assert (await limiter.hit(staying)).remaining == 3
        assert not waiting.done()
        go_on.set()
        return await waiting

    assert asyncio.run(main()).remaining == 3
    assert sharded.home_of(going) == "d"


def test_threads_at_the_gate_are_answered_by_the_new_home(moving):
    """A thread that waits at the gate is answered, with the counter that moved, as soon as the gate opens."""
    sharded, limiter, going, _, go_on = moving
    sharded.membership.pause_us = 60_000_000
    found = []
    threads = [threading.Thread(target=lambda: found.append(limiter.hit(going).remaining)) for _ in range(3)]
    for thread in threads:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [1, 2, 3]


def test_a_decision_under_way_is_waited_for_before_its_key_moves(clock):
    """A hit that began at the old home is part of the moved state: it is neither lost nor made twice."""
    shards = {name: FarShard(clock) for name in "ab"}
    sharded = ShardedStore(shards, hot=False)
    final = ShardedStore({name: MemoryStore(clock=clock) for name in "abc"})
    going = next(key for key in KEYS if sharded.home_of(key) == "a" and final.home_of(key) == "c")
    limiter = Limiter("5/h", store=sharded)
    begun, go_on = threading.Event(), threading.Event()

    def hold(verb):
        if verb == "decide" and not begun.is_set():
            begun.set()
            assert go_on.wait(60)

    shards["a"].meanwhile = hold
    hit = threading.Thread(target=limiter.hit, args=(going,))
    hit.start()
    assert begun.wait(60)
    move = threading.Thread(target=sharded.add, args=("c", FarShard(clock)))
    move.start()
    move.join(0.05)
    assert move.is_alive()
    assert "items" not in shards["a"].calls
    go_on.set()
    hit.join(60)
    move.join(60)
    assert sharded.home_of(going) == "c"
    assert limiter.peek(going).remaining == 4


def test_invalid_changes_are_errors(sharded, new, clock):
    """Names that are taken or unknown, the last shard, a remote shard among local ones: each error names the remedy."""
    with pytest.raises(ConfigurationError, match="already"):
        sharded.add("a", new())
    with pytest.raises(ConfigurationError, match="there are a, b, c"):
        sharded.remove("z")
    with pytest.raises(ConfigurationError, match="weight"):
        sharded.add("d", new(), weight=0)
    with pytest.raises(ConfigurationError, match="not lost"):
        sharded.restore("a")
    sharded.remove("a")
    sharded.remove("b")
    with pytest.raises(ConfigurationError, match="last shard"):
        sharded.remove("c")
    if sharded.local:
        with pytest.raises(ConfigurationError, match="remote"):
            sharded.add("far", FarShard(clock))
    assert key_on(sharded, "c") == "user:0"


@pytest.mark.parametrize("guarded", [False, True], ids=["leased", "guarded leases"])
def test_what_leased_shards_hold_is_handed_over(clock, guarded):
    """Shards that are leases themselves: when a shard is added and removed again, each key has used one of a hundred, and no key
    has lost the rest of its batch, neither one that moved nor one on a shard that got others."""
    leases = [LeasedStore(FarShard(clock), lease=20) for _ in range(3)]
    a, b, c = [GuardedStore(one, clock=clock) if guarded else one for one in leases]
    sharded = ShardedStore({"a": a, "b": b}, hot=False)
    limiter = Limiter(FixedWindow("100/d"), store=sharded)
    for key in KEYS[:50]:
        assert limiter.hit(key)
    sharded.add("c", c)
    sharded.remove("c")
    for one in leases:
        one.return_all()
    assert {limiter.peek(key).remaining for key in KEYS[:50]} == {99}


def test_no_batch_of_a_hot_key_is_fetched_where_it_has_left(clock):
    """The lease of a hot key runs low while the key moves: its old home is not asked for more."""
    home = FarShard(clock)
    sharded = ShardedStore({"home": home}, hot=20, lease=20)
    limiter, number = Limiter(FixedWindow("1000/d"), store=sharded), 0
    leased = sharded.membership.shards["home"].leased.store
    while not leased.cache.due:
        limiter.hit("viral")
        clock.advance(0.001)
    while sharded.home_of("viral") == "home":
        number += 1
        sharded.add(f"other {number}", FarShard(clock))
    home.calls.clear()
    leased.tend()
    assert home.calls == []


def test_a_batch_that_is_being_given_back_moves_with_its_key():
    """A shard that hands over waits for the background of its leases, which has taken a batch out to give it back."""
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(FarShard):
        def give_back(self, *args):
            begun.set()
            goes_on.wait(60)
            return super().give_back(*args)

    class Waiting(ManualClock):
        """A clock on which a waiter's sleep lets the background go on."""

        def sleep(self, seconds, wake=None):
            goes_on.set()
            tending.join()

    clock = Waiting(NOON)
    parent = Slow(clock)
    leases = LeasedStore(parent, lease=20, clock=clock, make_thread=lambda **_: threading.Thread(target=int))
    limiter = Limiter(FixedWindow("100/d"), store=leases, name="n")
    assert limiter.hit("key")
    tending = threading.Thread(target=leases.tend)
    clock.advance(1)
    tending.start()
    begun.wait(60)
    leases.release(lambda key: True)
    assert Limiter(FixedWindow("100/d"), store=parent, name="n").peek("key").remaining == 99
