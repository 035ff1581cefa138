"""MemoryStore: listing and handing over, closing, and errors."""

from __future__ import annotations

import pytest

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
from limitkeeper.testing import ManualClock

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


@each
def test_items_and_load_carry_a_limit_to_another_store(limit, clock):
    """The output of `items` can be loaded by `load`: every key answers there as it did here, now and later."""
    here, there = MemoryStore(clock=clock), MemoryStore(clock=clock)
    limiter, other = Limiter(limit, store=here), Limiter(limit, store=there)
    for number in range(50):
        limiter.hit(f"key {number}", cost=1 + number % 10)
        clock.advance(7)
    limiter.reserve("key 9", cost=3)
    there.load(other.named[0], here.items(limiter.named[0]))
    assert len(there) == len(here)
    for _ in range(3):
        for number in range(50):
            key = f"key {number}"
            assert other.peek(key) == limiter.peek(key)
            assert other.hit(key, cost=2) == limiter.hit(key, cost=2)
        clock.advance(1000)


@each
def test_loading_twice_is_loading_once(limit, clock):
    """A repeated hand-over does not charge any key twice."""
    here, there = MemoryStore(clock=clock), MemoryStore(clock=clock)
    limiter, other = Limiter(limit, store=here), Limiter(limit, store=there)
    limiter.hit("a", cost=4)
    items = list(here.items(limiter.named[0]))
    there.load(other.named[0], items)
    there.load(other.named[0], items)
    assert other.peek("a") == limiter.peek("a")


@each
def test_items_of_an_unknown_limit_are_none(limit, store):
    """An unused limit has no items."""
    assert list(store.items(Limiter(limit, store=store).named[0])) == []


def test_items_list_the_keys_of_their_limit_only(store):
    """Limits on one store have keys of their own."""
    one, two = Limiter("5/s", store=store), Limiter("6/s", store=store)
    one.hit("a")
    two.hit("b")
    assert [key for key, _ in store.items(one.named[0])] == ["a"]
    assert [key for key, _ in store.items(two.named[0])] == ["b"]


def test_items_are_plain_data(store):
    """States are tuples of integers, good for JSON and other processes."""
    limiter = Limiter("5/s", store=store)
    limiter.hit("a")
    [(key, state)] = store.items(limiter.named[0])
    assert key == "a"
    assert [type(part) for part in state] == [int, int, int]


# Errors


@pytest.mark.parametrize("max_keys", [0, -1, 1.5, True, "10", None], ids=repr)
def test_max_keys_must_be_a_number_of_keys(max_keys):
    """max_keys is a whole number, at least 1; anything else is a ConfigurationError that shows it."""
    with pytest.raises(ConfigurationError, match="max_keys") as caught:
        MemoryStore(max_keys=max_keys)
    assert repr(max_keys) in str(caught.value)


def test_a_clock_is_checked():
    """An invalid clock is a ConfigurationError when the store is made, not at its first decision."""
    with pytest.raises(ConfigurationError, match=r"clock must have the methods of limitkeeper\.testing\.ManualClock, got 3"):
        MemoryStore(clock=3)


def test_one_decision_may_not_name_a_limit_and_key_twice(store):
    """Claims that name one limit and key twice are a ConfigurationError with the remedy: one claim with the whole cost."""
    limiter = Limiter("5/s", store=store)
    with pytest.raises(ConfigurationError, match="twice"):
        store.decide([*limiter.claims("a"), *limiter.claims("a")])


NAMED = "from limitkeeper.stores import NamedLimit; named = NamedLimit('a', 'b', TokenBucket('5/s'))"
WRONG = {
    "no claims": "MemoryStore().decide([])",
    "no claims among many": "MemoryStore().decide_many([[]])",
    "a claim that is none": "MemoryStore().decide([None])",
    "giving back none": "MemoryStore().give_back([None])",
    "resetting none": "MemoryStore().reset([None])",
    "a key that is none": f"{NAMED}; MemoryStore().load(named, [(None, (0, 1, 0))])",
    "a state too short": f"{NAMED}; MemoryStore().load(named, [('key', (0,))])",
    "a limit that was never finished": "Limiter(TokenBucket.__new__(TokenBucket), name='x').hit('a')",
}


@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG)
def test_what_is_wrong_never_kills_the_process(code, python):
    """A wrong call to the store ends in an exception or an answer, never in a dead interpreter."""
    done = python(f"from limitkeeper import *\ntry:\n    {code}\nexcept Exception as error:\n    print(type(error).__name__)")
    assert done.returncode == 0, f"died of signal {-done.returncode}" if done.returncode < 0 else done.stderr


def test_a_key_to_load_must_be_a_text(store):
    """A key that is no string is a TypeError, and nothing is stored."""
    limiter = Limiter("5/s", store=store)
    for key in (None, 5, b"a"):
        with pytest.raises(TypeError):
            store.load(limiter.named[0], [(key, (0, 1, 0))])
    assert len(store) == 0


# Closing


def test_a_closed_store_has_let_go_of_its_keys(store):
    """close() deletes all state, and may be called twice."""
    limiter = Limiter("5/s; sliding window log 5/s", store=store)
    limiter.hit("a")
    store.close()
    store.close()
    assert len(store) == 0


def test_a_cleared_store_has_forgotten_what_newcomers_to_a_full_one_used(clock):
    """clear() also forgets the keys that shared overflow cells."""
    store = MemoryStore(max_keys=2, clock=clock)
    limiter = Limiter("fixed window 1/h", store=store)
    for key in "abc":
        limiter.hit(key)
    store.clear()
    assert [bool(limiter.hit(key)) for key in "abc"] == [True] * 3


def test_a_limit_whose_keys_were_listed_is_dropped_like_any_other(clock):
    """Each registered limit counts once, however often it is listed or loaded: unregistered and used again, it begins anew."""
    store, empty_at_first = MemoryStore(clock=clock), TokenBucket("1/s burst 10", initial=0)
    (named,) = Limiter(empty_at_first, store=store).named
    store.load(named, store.items(named))
    clock.advance(100)
    store.unregister(named)
    assert not Limiter(empty_at_first, store=store).hit("a")


def test_the_clock_of_a_store_is_the_one_it_was_given():
    """`store.clock` is the clock given, or the system's, which is in UTC."""
    clock = ManualClock(5.0)
    assert MemoryStore(clock=clock).clock is clock
    assert MemoryStore().clock is MemoryStore().clock
