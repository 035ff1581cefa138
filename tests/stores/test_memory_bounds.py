"""MemoryStore is bounded without forgiving: idle keys vanish, new keys of a full store share, no known key is forgotten."""

from __future__ import annotations

import os
import threading

import pytest

import limitkeeper
from limitkeeper import (
    ConfigurationError,
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)

#: The number of keys for "a million": all of them where it is quick.
MANY = 1_000_000 if limitkeeper.compiled else 40_000
KINDS = [
    TokenBucket("10/h"),
    LeakyBucket("10/h", 10),
    LeakyBucketQueue("10/h"),
    LeakyBucketQueue("10/h", 10),
    FixedWindow("10/h"),
    FixedWindow("10/h", align="first"),
    SlidingWindowLog("10/h"),
    SlidingWindowCounter("10/h"),
]
each = pytest.mark.parametrize("limit", KINDS, ids=str)


@pytest.mark.untraced
def test_a_million_fresh_keys_pass_by_an_exhausted_one(clock):
    """A flood of fresh keys neither grows the store beyond max_keys nor makes it forget the exhausted key."""
    store = MemoryStore(max_keys=10_000, clock=clock)
    limiter = Limiter("1/h burst 5", store=store)
    limiter.hit("exhausted", cost=5)
    before = limiter.peek("exhausted")
    for start in range(0, MANY, 10_000):
        limiter.hit_many([f"fresh {number}" for number in range(start, start + 10_000)])
        assert len(store) <= 10_000
    assert limiter.peek("exhausted") == before
    assert not limiter.hit("exhausted")


@each
def test_a_flood_does_not_reset_an_exhausted_key_of_any_kind(limit, clock):
    """For every kind of limit, fresh keys in a small store leave the exhausted key as it is."""
    store = MemoryStore(max_keys=100, clock=clock)
    limiter = Limiter(limit, store=store)
    limiter.hit("exhausted", cost=10)
    before = limiter.peek("exhausted")
    for number in range(3000):
        limiter.hit(f"fresh {number}")
    assert limiter.peek("exhausted") == before
    assert len(store) <= 100


def test_several_limits_share_the_room(clock):
    """max_keys bounds the store over all its limits together."""
    store = MemoryStore(max_keys=100, clock=clock)
    limiter = Limiter({"user": "1/h", "tenant": "fixed window 1000/h"}, store=store)
    for number in range(1000):
        limiter.hit(f"key {number}")
        assert len(store) <= 100


def test_strangers_share_cells_and_are_limited_there(clock):
    """In a full store new keys are decided on overflow cells: neither all refused nor forgiven."""
    store = MemoryStore(max_keys=10, clock=clock)
    limiter = Limiter("1/h burst 2", store=store)
    for number in range(10):
        limiter.hit(f"known {number}")
    found = [limiter.hit(f"stranger {number}") for number in range(500)]
    assert sum(map(bool, found)) > 250
    assert sum(bool(limiter.hit("stranger 0")) for _ in range(5)) <= 1
    assert not limiter.hit("stranger 0")
    assert len(store) == 10
    assert limiter.stats().overflow >= 500


def test_a_stranger_stays_on_its_shared_cell_until_that_is_as_new(clock):
    """Free room does not forgive a new key: its overflow cell counts on until it is as new."""
    store = MemoryStore(max_keys=1, clock=clock)
    limiter = Limiter("1/s burst 2", store=store)
    limiter.hit("known")
    limiter.hit("stranger", cost=2)
    clock.advance(1)
    limiter.reset("known")
    assert limiter.peek("stranger").remaining == 1
    clock.advance(1)
    assert limiter.hit("stranger").remaining == 1
    assert [key for key, _ in store.items(limiter.named[0])] == ["stranger"]


def test_known_keys_go_on_in_a_full_store(clock):
    """A known key keeps its own cell while new ones share."""
    store = MemoryStore(max_keys=3, clock=clock)
    limiter = Limiter("1/h burst 3", store=store)
    for key in "abc":
        limiter.hit(key)
    for number in range(100):
        limiter.hit(f"stranger {number}")
    assert [limiter.hit(key).remaining for key in "abc"] == [1, 1, 1]


def test_idle_keys_make_room_without_a_sweep(clock):
    """Keys that are as new again are forgotten a few per call: new keys get cells of their own."""
    store = MemoryStore(max_keys=1000, clock=clock)
    limiter = Limiter("10/s", store=store)
    for number in range(1000):
        limiter.hit(f"old {number}")
    clock.advance(10)
    for number in range(1000):
        limiter.hit(f"new {number}")
    assert limiter.stats().overflow == 0
    assert len(store) <= 1000
    assert limiter.peek("new 999").remaining == 9


def test_traffic_on_one_key_sweeps_the_others_out(clock):
    """Hits on a single key are enough for idle keys to vanish, without a thread of the store's own."""
    store = MemoryStore(clock=clock)
    limiter = Limiter("10/s", store=store)
    limiter.hit_many([f"old {number}" for number in range(2000)])
    clock.advance(10)
    threads = threading.active_count()
    for _ in range(20_000):
        limiter.hit("busy")
    assert len(store) == 1
    assert threading.active_count() == threads


@each
def test_idle_keys_vanish(limit, clock):
    """Once reset_after is over for all of them, a sweep leaves nothing."""
    store = MemoryStore(clock=clock)
    limiter = Limiter(limit, store=store)
    for number in range(500):
        limiter.acquire(f"key {number}", cost=1 + number % 10)
    store.sweep()
    assert len(store) == 500
    clock.advance(2 * 3600)
    store.sweep()
    assert len(store) == 0
    assert list(store.items(limiter.named[0])) == []


@each
def test_a_sweep_forgives_no_key(limit, clock):
    """A sweep forgets only keys that are as new: a key in debt keeps its state."""
    store = MemoryStore(clock=clock)
    limiter = Limiter(limit, store=store)
    limiter.hit("a", cost=10)
    clock.advance(600)
    before = limiter.peek("a")
    store.sweep()
    assert limiter.peek("a") == before
    assert before.reset_after > 0


@pytest.mark.skipif(not limitkeeper.compiled, reason="in plain Python the allocator decides when memory goes back")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident size from /proc")
@pytest.mark.parametrize(
    ("prefix", "share"), [("user:", 1 / 4), ("a key too long to lie in its cell, " * 3, 1 / 2)], ids=["short", "long"]
)
def test_memory_is_given_back_when_keys_are_idle(prefix, share, python):
    """300 000 keys take memory; when they are idle most of it goes back to the system, that of long keys too."""
    done = python(
        f"""
        from limitkeeper import Limiter, MemoryStore
        from limitkeeper.testing import ManualClock

        def rss():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        clock = ManualClock(1000.0)
        store = MemoryStore(clock=clock)
        limiter = Limiter("10/s", store=store)
        limiter.hit("warm")
        empty = rss()
        for number in range(300_000):
            limiter.hit({prefix!r} + str(number))
        full = rss()
        clock.advance(60)
        store.sweep()
        print(len(store), full - empty, rss() - empty)
        """
    )
    assert done.returncode == 0, done.stderr
    keys, taken, kept = map(int, done.stdout.split())
    assert keys == 0
    assert taken > 300_000 * 60
    assert kept < taken * share


@pytest.mark.untraced
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident size from /proc")
def test_a_store_that_is_dropped_frees_its_memory(python):
    """Making, filling and dropping stores over and over does not grow the process."""
    done = python(
        """
        from limitkeeper import Limiter, MemoryStore, SlidingWindowLog, compiled

        def rss():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        def round():
            store = MemoryStore()
            log, bucket = Limiter(SlidingWindowLog("100/h"), store=store), Limiter("10/h", store=store)
            for number in range(20_000 if compiled else 2000):
                log.hit(f"a key too long for its cell {number}")
                bucket.hit(f"a key too long for its cell {number}")

        for _ in range(3):
            round()
        before = rss()
        for _ in range(10):
            round()
        print(rss() - before)
        """
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4_000_000


def test_a_log_grows_with_calls_not_with_cost(clock):
    """One entry per admitted call whatever its cost, calls of one tick share it, and expired entries are dropped."""
    store = MemoryStore(clock=clock)
    limiter = Limiter(SlidingWindowLog("1000000/min"), store=store)
    limiter.hit("a", cost=999_000)
    limiter.hit("a")
    clock.advance(1)
    limiter.hit("a")
    [(_, (entries, _, _))] = store.items(limiter.named[0])
    assert [cost for _, cost in entries] == [999_001, 1]
    clock.advance(59.5)
    limiter.hit("a")
    [(_, (entries, _, _))] = store.items(limiter.named[0])
    assert [cost for _, cost in entries] == [1, 1]


def test_a_name_has_so_many_limits_and_a_warning_at_the_last(monkeypatch):
    """A limiter with a limit for every key causes a warning at the last one that can be kept apart; earlier ones continue."""
    from limitkeeper.stores import cell_table

    assert cell_table.MOST_UNITS == 65_534
    monkeypatch.setattr(cell_table, "MOST_UNITS", 3)
    store = MemoryStore()
    limiters = [Limiter(TokenBucket(f"{n}/h burst {n}"), store=store, name="one") for n in (1, 2, 3)]
    assert all(limiter.hit("ann") for limiter in limiters)
    with pytest.raises(ConfigurationError, match="different limits under one name; round them to fewer"):
        Limiter(TokenBucket("4/h burst 4"), store=store, name="one").hit("ann")
    assert limiters[2].hit("bob")
