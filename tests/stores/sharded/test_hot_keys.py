"""HotKeys: keys with most hits are found in bounded memory, cool down again, and no other key is found."""

from __future__ import annotations

import random
import sys

from limitkeeper.stores.sharded.hot_key_detector import EVERY, HotKeys

SECOND = 1_000_000


def feed(hot_keys, keys, seconds, begin=0):
    """These hits, evenly over so many seconds."""
    for i, key in enumerate(keys):
        hot_keys.hit(key, begin + i * int(seconds * SECOND) // len(keys))


def test_one_key_with_all_the_traffic_is_hot_within_a_second():
    """Ten thousand hits of one key in a second: it is hot when about the rate has been reached, long before the end."""
    hot_keys = HotKeys(rate=1000)
    hits = 0
    while "viral" not in hot_keys.hot:
        hot_keys.hit("viral", hits * 100)
        hits += 1
    assert 700 < hits < 1400


def test_a_hot_key_is_found_among_many_others():
    """A key with a tenth of the traffic is found among 50 000 others with 64 counters."""
    rng = random.Random(1)
    keys = ["viral" if rng.random() < 0.1 else f"user:{rng.randrange(50_000)}" for _ in range(100_000)]
    hot_keys = HotKeys(rate=1000)
    feed(hot_keys, keys, 2)
    assert list(hot_keys.hot) == ["viral"]


def test_evenly_spread_traffic_makes_no_key_hot():
    """A hundred thousand hits a second, spread over a thousand keys, are a hundred each: no key is hot."""
    rng = random.Random(2)
    hot_keys = HotKeys(rate=1000)
    feed(hot_keys, [f"user:{rng.randrange(1000)}" for _ in range(200_000)], 2)
    assert hot_keys.hot == {}


def test_few_hits_are_never_hot():
    """A key with all the traffic of a quiet process is not hot: hits a second count, not its share."""
    hot_keys = HotKeys(rate=1000)
    feed(hot_keys, ["only"] * 4000, 10)
    assert hot_keys.hot == {}


def test_keys_that_take_turns_are_counted_alike():
    """Hits are sampled at uneven distances: eight keys that take turns are all found, though one in eight is sampled."""
    hot_keys = HotKeys(rate=1000)
    feed(hot_keys, [f"user:{i % EVERY}" for i in range(16 * 2000)], 1)
    assert len(hot_keys.hot) == EVERY


def test_what_is_hot_cools_down():
    """A key is hot until a window brings less than half of the rate; one that stops altogether is not hot at the next sample."""
    hot_keys = HotKeys(rate=1000)
    feed(hot_keys, ["viral"] * 5000, 1)
    feed(hot_keys, ["viral"] * 1600, 2, begin=1 * SECOND)
    assert "viral" in hot_keys.hot
    feed(hot_keys, ["viral"] * 600, 2.5, begin=3 * SECOND)
    assert hot_keys.hot == {}
    feed(hot_keys, ["viral"] * 5000, 1, begin=10 * SECOND)
    assert "viral" in hot_keys.hot
    feed(hot_keys, ["other"] * 50, 0.1, begin=20 * SECOND)
    assert hot_keys.hot == {}


def test_memory_is_bounded_whatever_comes():
    """A million different keys leave at most `counters` of them behind."""
    hot_keys = HotKeys(rate=10, counters=16)
    for i in range(100_000):
        hot_keys.hit(f"user:{i}", i)
        assert len(hot_keys.counts) <= 16
    assert len(hot_keys.hot) <= 16
    assert sys.getsizeof(hot_keys.counts) < 2000


def test_a_clock_that_goes_back_locks_nothing():
    """After a step back the next window begins there."""
    hot_keys = HotKeys(rate=1000)
    feed(hot_keys, ["viral"] * 2000, 1, begin=100 * SECOND)
    feed(hot_keys, ["viral"] * 5000, 1, begin=0)
    assert "viral" in hot_keys.hot
