"""Decision: its fields, its truth, and that it is a plain value."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle

import pytest

import limitkeeper
from limitkeeper import (
    Decision,
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.decision import Decisions


@pytest.fixture
def limiter(store):
    return Limiter(TokenBucket("5/s burst 10"), store=store)


@pytest.fixture
def both(store):
    return Limiter({"user": TokenBucket("5/s burst 10"), "tenant": FixedWindow("100/min")}, store=store)


def test_the_fields_of_an_allowed_hit(limiter):
    """An allowed hit: limit, remaining after it, time to full, and nothing to wait for."""
    found = limiter.hit("a", cost=4)
    assert found.to_dict() == {
        "allowed": True,
        "limit": 10,
        "remaining": 6,
        "retry_after": 0.0,
        "reset_after": 0.8,
        "wait": 0.0,
        "name": "token bucket 5/s burst 10",
        "source": "store",
    }


def test_a_refused_hit_has_a_retry_time(limiter):
    """A refused hit: what remains, and the wait for this same call."""
    limiter.hit("a", cost=8)
    found = limiter.hit("a", cost=5)
    assert (found.allowed, found.remaining, found.retry_after, found.wait) == (False, 2, 0.6, 0.0)


def test_a_decision_is_true_when_allowed(limiter):
    """The truth of a decision is whether it is allowed."""
    assert limiter.hit("a", cost=10)
    assert not limiter.hit("a")


def test_never_is_an_infinite_wait(limiter):
    """What can never fit is refused with an infinite retry_after: not yet and never are different answers."""
    assert limiter.hit("a", cost=11).retry_after == math.inf


def test_one_limit_has_one_decision(limiter):
    """Where one limit decides, `decisions` has one element."""
    found = limiter.hit("a")
    assert found.decisions == (found,)


def test_several_limits_have_a_decision_each(both):
    """Where several decide, `decisions` has one for each limit, in their order."""
    assert [part.name for part in both.hit("a").decisions] == ["user", "tenant"]


def test_to_dict_of_several_holds_the_parts(both):
    """`to_dict()` of several limits carries the parts as plain data."""
    found = both.hit("a").to_dict()
    assert [part["name"] for part in found["decisions"]] == ["user", "tenant"]
    assert json.loads(json.dumps(found)) == found


def test_equal_answers_are_equal_and_hash_alike(limiter):
    """Two keys in the same state get equal decisions."""
    assert limiter.hit("a") == limiter.hit("b")
    assert len({limiter.hit("a"), limiter.hit("b")}) == 1


def test_different_answers_are_unequal(limiter):
    """A decision differs from the next one of its key, and from other things."""
    first = limiter.hit("a")
    assert first != limiter.hit("a")
    assert first != True  # noqa: E712
    assert first != first.to_dict()


def test_several_are_equal_when_their_parts_are(both):
    """Decisions of several limits compare their parts too."""
    assert both.hit("a") == both.hit("b")
    both.hit({"user": "c", "tenant": None})
    assert both.hit("b") != both.hit({"user": "b", "tenant": "c"})


def test_the_answer_of_several_is_unequal_to_one_that_looks_alike(both, store):
    """A decision of several limits is not equal to one of a single limit with the same fields."""
    found = both.hit("a")
    alone = Decision(
        True, found.limit, found.remaining, found.retry_us, found.reset_us, found.wait_us, found.start_us, found.name
    )
    assert alone.to_dict().items() <= found.to_dict().items()
    assert found != alone
    assert alone != found


def test_the_repr_shows_every_field(limiter):
    """The repr names every field and its value."""
    assert repr(limiter.hit("a")) == (
        "Decision(allowed=True, limit=10, remaining=9, retry_after=0.0, reset_after=0.2, wait=0.0, "
        "name='token bucket 5/s burst 10', source='store')"
    )


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_decision_can_be_pickled(limiter, both, protocol):
    """Decisions of one and of several limits survive a pickle, and a copy."""
    for found in (limiter.hit("a"), both.hit("a"), limiter.hit("a", cost=99)):
        again = pickle.loads(pickle.dumps(found, protocol))
        assert again == found
        assert again.to_dict() == found.to_dict()
        assert again.decisions == found.decisions
        assert copy.deepcopy(found) == found


def test_a_decision_can_not_be_changed(limiter):
    """A decision is immutable."""
    found = limiter.hit("a")
    for name in ("allowed", "remaining", "retry_after", "name", "note"):
        with pytest.raises(AttributeError):
            setattr(found, name, 1)


def test_a_decision_never_changes_after_it_was_given(limiter, clock):
    """A decision that is kept does not change when others are made after it, however it is kept."""
    kept, shown = [], []
    for number in range(200):
        found = limiter.hit("a" if number % 3 else "b", cost=number % 4)
        kept.append(found)
        shown.append(found.to_dict())
        limiter.hit("c")
        limiter.peek("a")
        clock.advance(0.05)
    assert [found.to_dict() for found in kept] == shown
    assert len({id(found) for found in kept}) == 200


@pytest.mark.skipif(not limitkeeper.compiled, reason="objects with slots are tracked where they are not compiled")
def test_a_decision_is_nothing_to_the_garbage_collector(limiter):
    """A decision of one limit has no references, so the garbage collector does not track it."""
    limiter.hit("a", cost=9)
    for found in (limiter.hit("a"), limiter.hit("a"), limiter.peek("a"), limiter.reserve("a").decision):
        assert not gc.is_tracked(found)


ONE_TAKEN = {
    "token bucket": (TokenBucket("5/s burst 10"), (10, 9, 0.2)),
    "meter": (LeakyBucket("5/s", 10), (10, 9, 0.2)),
    "queue": (LeakyBucketQueue("5/s", 10), (10, 0, 0.2)),
    "fixed window": (FixedWindow("10/min"), (10, 9, 45.0)),
    "first window": (FixedWindow("10/min", align="first"), (10, 9, 60.0)),
    "log": (SlidingWindowLog("10/min"), (10, 9, 60.0)),
    "counter": (SlidingWindowCounter("10/min"), (10, 9, 105.0)),
}


@pytest.mark.parametrize(("limit", "expected"), ONE_TAKEN.values(), ids=ONE_TAKEN)
def test_limit_remaining_and_reset_of_every_kind(limit, expected, clock, store):
    """15 s after the minute, one of ten taken: each kind reports its limit, what is left, and when the key is as new."""
    clock.advance(15)
    found = Limiter(limit, store=store).hit("a")
    assert (found.limit, found.remaining, found.reset_after) == expected


@pytest.mark.parametrize("limit", [limit for limit, _ in ONE_TAKEN.values()], ids=ONE_TAKEN)
def test_a_key_is_as_new_when_its_reset_is_over(limit, clock, store):
    """After `reset_after` a key answers as a new one, and not a microsecond before."""
    limiter = Limiter(limit, store=store)
    limiter.acquire("a", cost=7)
    left = limiter.peek("a").reset_after
    clock.advance(left - 0.000001)
    assert limiter.peek("a", cost=0).reset_after > 0
    clock.advance(0.000001)
    assert limiter.peek("a").reset_after == 0.0
    assert limiter.peek("a").remaining == limit.capacity


@pytest.mark.parametrize("limit", [limit for limit, _ in ONE_TAKEN.values()], ids=ONE_TAKEN)
def test_a_new_key_has_all_and_resets_at_once(limit, store):
    """A new key has everything remaining, and a reset_after of 0."""
    found = Limiter(limit, store=store).peek("unseen")
    assert (found.remaining, found.reset_after, found.retry_after) == (limit.capacity, 0.0, 0.0)


# Joining -----------------------------------------------------------------------------------------------------------


def test_a_single_part_is_joined_into_itself():
    """Joining one decision returns that decision."""
    part = Decision(True, 10, 4)
    assert Decisions.join([part]) is part


def test_of_allowed_parts_the_smallest_remaining_share_decides_and_the_longest_wait_holds():
    """Allowed: the limit with the smallest remaining share decides, and the longest wait holds."""
    parts = [
        Decision(True, 10, 5, 0, 7, 3, 1003, "first"),
        Decision(True, 100, 20, 0, 9, 8, 1008, "second"),
        Decision(True, 5, 1, 0, 2, 0, 1000, "third"),
    ]
    assert Decisions.join(parts) == Decisions(parts, True, 100, 20, 0, 9, 8, 1008, "second")
    assert Decisions.join(parts).start_us == 1008
    assert Decisions.join(parts, wait_us=50).start_us == 1050


def test_of_refused_parts_the_longest_retry_decides_and_never_is_the_longest():
    """Refused: the longest retry decides, and never is longer than any."""
    allowed, soon = Decision(True, 5, 1, 0, 2, 8, 1008, "allowed"), Decision(False, 10, 0, 30, 7, 0, 1000, "soon")
    late, never = Decision(False, 10, 0, 40, 9, 0, 1000, "late"), Decision(False, 1, 1, -1, 0, 0, 1000, "never")
    assert Decisions.join([allowed, soon, late]) == Decisions([allowed, soon, late], False, 10, 0, 40, 9, 0, 1000, "late")
    assert Decisions.join([never, late]).name == "never"
    assert Decisions.join([late, never]).retry_after == math.inf
    assert Decisions.join([allowed, soon]).start_us == 1000


def test_ties_are_decided_by_the_first():
    """Among equals the first limit decides."""
    same = [Decision(True, 10, 5, name="a"), Decision(True, 20, 10, name="b")]
    assert Decisions.join(same).name == "a"
    refused = [Decision(False, 10, 0, 5, name="a"), Decision(False, 20, 0, 5, name="b")]
    assert Decisions.join(refused).name == "a"


def test_the_source_is_that_of_the_deciding_part_and_does_not_count_for_equality():
    """The source is that of the deciding limit, and equality ignores it."""
    local, store = Decision(False, 10, 0, 9, name="a", source="local_share"), Decision(False, 10, 0, 5, name="b")
    assert Decisions.join([store, local]).source == "local_share"
    assert local == Decision(False, 10, 0, 9, name="a")
    assert pickle.loads(pickle.dumps(Decisions.join([store, local]))).source == "local_share"
