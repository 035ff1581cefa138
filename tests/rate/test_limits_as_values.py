"""Limits are values: frozen, comparable, hashable, picklable, copyable."""

from __future__ import annotations

import copy
import pickle

import pytest

from limitkeeper import FixedWindow, LeakyBucket, LeakyBucketQueue, SlidingWindowCounter, SlidingWindowLog, TokenBucket
from limitkeeper.algorithms import ALGORITHMS

LIMITS = [
    TokenBucket("5/s burst 10"),
    TokenBucket("5/s burst 10 initial 2"),
    LeakyBucket("5/s", 10),
    LeakyBucketQueue("5/s"),
    LeakyBucketQueue("5/s", 10),
    FixedWindow("10/s"),
    FixedWindow("10/s", align="first"),
    SlidingWindowLog("10/s"),
    SlidingWindowCounter("10/s"),
]
each = pytest.mark.parametrize("limit", LIMITS, ids=str)


def test_all_kinds_are_here():
    """The cases of these tests include every kind of limit."""
    assert {type(limit) for limit in LIMITS} == set(ALGORITHMS.values())


@each
def test_a_limit_can_not_be_changed(limit):
    """No attribute of a limit can be set, nor a new one added."""
    for name in ("count", "period", "capacity", "text", "colour"):
        with pytest.raises(AttributeError):
            setattr(limit, name, 3)


@each
def test_nothing_can_be_taken_from_a_limit(limit):
    """No attribute of a limit can be deleted."""
    copied = pickle.loads(pickle.dumps(limit))
    with pytest.raises(AttributeError):
        del copied.count


@each
def test_equal_limits_hash_alike(limit):
    """An equal limit made again compares equal, and is found in a set."""
    again = type(limit)(limit.text)
    assert again == limit
    assert again in {limit}


def test_different_limits_are_different():
    """Limits of another kind, rate or option are not equal."""
    assert len({*LIMITS}) == len(LIMITS)
    assert LeakyBucket("5/s", 10) != LeakyBucketQueue("5/s", 10)


@each
def test_a_limit_is_unequal_to_other_things(limit):
    """A limit is not equal to its own text, nor to None."""
    assert limit != str(limit)
    assert limit != None  # noqa: E711


@each
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_limit_can_be_pickled(limit, protocol):
    """A limit survives a pickle, in every protocol."""
    again = pickle.loads(pickle.dumps(limit, protocol))
    assert again == limit
    assert again.capacity == limit.capacity


@each
def test_a_limit_can_be_copied(limit):
    """A copy of a limit, shallow or deep, is an equal limit."""
    assert copy.copy(limit) == limit
    assert copy.deepcopy([limit]) == [limit]


@each
def test_the_repr_of_a_limit_is_python(limit):
    """`repr(limit)` evaluates to an equal limit."""
    assert eval(repr(limit)) == limit


@pytest.mark.parametrize(
    ("limit", "capacity"),
    [
        (TokenBucket("5/s burst 10"), 10),
        (LeakyBucket("5/s", 10), 10),
        (LeakyBucketQueue("5/s", 10), 10),
        (FixedWindow("7/s"), 7),
        (SlidingWindowLog("7/s"), 7),
        (SlidingWindowCounter("7/s"), 7),
    ],
    ids=str,
)
def test_capacity_is_the_largest_cost_that_could_ever_pass_at_once(limit, capacity):
    """`capacity` is the burst of a bucket, the count of a window, the size of a meter or a queue."""
    assert limit.capacity == capacity
