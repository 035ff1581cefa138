"""hit_many: many keys at one moment, in order, each on its own."""

from __future__ import annotations

import pytest

from limitkeeper import FixedWindow, InvalidCost, Limiter, MemoryStore, SlidingWindowCounter, SlidingWindowLog, TokenBucket
from limitkeeper.testing import ManualClock


def test_one_decision_for_each_key_in_order(make):
    """The answers come in the order of the keys."""
    limiter = make("5/s burst 10")
    limiter.hit("b", cost=10)
    assert [bool(found) for found in limiter.hit_many(["a", "b", "c"])] == [True, False, True]


@pytest.mark.parametrize(
    "limit", [TokenBucket("3/s"), FixedWindow("3/s"), SlidingWindowLog("3/s"), SlidingWindowCounter("3/s")], ids=str
)
def test_a_key_that_comes_twice_sees_its_first_hit(make, limit):
    """Duplicates see each other: the fourth of one key is refused."""
    found = make(limit).hit_many(["a", "b", "a", "a", "a"])
    assert [one.remaining for one in found] == [2, 2, 1, 0, 0]
    assert [bool(one) for one in found] == [True, True, True, True, False]


def test_it_is_the_same_as_single_hits(make):
    """hit_many answers as the same hits one by one would."""
    keys = ["a", "b", "a", "c", "b", "a"]
    many = make("2/s", name="many").hit_many(keys)
    single = make("2/s", name="single")
    assert [(one.allowed, one.remaining, one.retry_after) for one in many] == [
        (one.allowed, one.remaining, one.retry_after) for one in map(single.hit, keys)
    ]


def test_one_cost_for_all(make):
    """One cost is the cost of every key."""
    assert [found.remaining for found in make("5/s burst 10").hit_many(["a", "b"], cost=4)] == [6, 6]


def test_a_cost_for_each(make):
    """A list gives each key its own cost."""
    assert [found.remaining for found in make("5/s burst 10").hit_many(["a", "b", "a"], cost=[4, 0, 6])] == [6, 10, 0]


def test_keys_and_costs_may_be_any_iterables(make):
    """Generators of keys and costs are read once."""
    found = make("5/s burst 10").hit_many((key for key in "ab"), cost=(cost for cost in (1, 2)))
    assert [one.remaining for one in found] == [9, 8]


@pytest.mark.parametrize("costs", [[1], [1, 2, 3], []], ids=repr)
def test_costs_must_be_as_many_as_keys(make, costs):
    """Too few or too many costs are an InvalidCost with both numbers, and nothing is taken."""
    limiter = make("5/s")
    with pytest.raises(InvalidCost, match=f"each of 2 keys, got {len(costs)}"):
        limiter.hit_many(["a", "b"], cost=costs)
    assert limiter.peek("a").remaining == 5


@pytest.mark.parametrize("cost", [True, 1.5, -1, [1, -1], [1, True], [1, 1.0]], ids=repr)
def test_a_wrong_cost_charges_no_key(make, cost):
    """A cost that is no whole number is an InvalidCost before any key is charged."""
    limiter = make("5/s")
    with pytest.raises(InvalidCost):
        limiter.hit_many(["a", "b"], cost=cost)
    assert limiter.peek("a").remaining == 5


def test_no_keys_no_decisions(make):
    """An empty list is answered with an empty list."""
    assert make("5/s").hit_many([]) == []


def test_several_limits(make):
    """With several limits each key is all or nothing on its own; mappings and skips work too."""
    limiter = make({"user": TokenBucket("5/s"), "tenant": FixedWindow("8/min")})
    found = limiter.hit_many(
        [{"user": "u1", "tenant": "acme"}, {"user": "u1", "tenant": "acme"}, {"user": "u2", "tenant": None}, "u3"], cost=5
    )
    assert [bool(one) for one in found] == [True, False, True, True]
    assert found[1].name == "tenant"


def test_a_key_with_every_limit_skipped_is_allowed(make):
    """Among others, a key whose limits are all skipped is allowed."""
    limiter = make({"user": TokenBucket("1/s"), "tenant": FixedWindow("8/min")})
    skipped = {"user": None, "tenant": None}
    assert [bool(one) for one in limiter.hit_many(["a", skipped, "a"])] == [True, True, False]


class Counting(ManualClock):
    """A clock that counts its reads, and is later every time."""

    reads = 0

    def now_us(self) -> int:
        self.reads += 1
        self.advance(0.001)
        return super().now_us()


@pytest.mark.parametrize("limits", ["5/s", "5/s; fixed window 8/s"])
def test_all_are_decided_at_one_moment(limits):
    """The clock is read once, for however many keys."""
    clock = Counting(1000.0)
    limiter = Limiter(limits, store=MemoryStore(clock=clock))
    clock.reads = 0
    limiter.hit_many([f"key {number}" for number in range(50)])
    assert clock.reads == 1


def test_one_moment_holds_for_keys_with_every_limit_skipped_too():
    """A skipped key among the others does not make the clock be read again."""
    clock = Counting(1000.0)
    limiter = Limiter({"user": TokenBucket("1/s"), "tenant": FixedWindow("8/min")}, store=MemoryStore(clock=clock))
    clock.reads = 0
    limiter.hit_many(["a", {"user": None, "tenant": None}, "b", "c"])
    assert clock.reads == 1


def test_they_are_counted_as_single_hits(make):
    """The limiter's numbers count every key of a list."""
    limiter = make("2/s")
    limiter.hit_many(["a", "a", "a", "b"])
    assert limiter.stats()[:2] == (3, 1)


@pytest.mark.parametrize("keys", ["abc", {"a": "k"}])
@pytest.mark.parametrize("cost", [1, 2])
def test_one_key_is_no_list_of_keys(make, keys, cost):
    """A str is not taken for its characters, nor a mapping for its names."""
    with pytest.raises(TypeError, match="expected a list of keys, got one key"):
        make({"a": "5/s", "b": "9/s"} if isinstance(keys, dict) else "5/s").hit_many(keys, cost)
