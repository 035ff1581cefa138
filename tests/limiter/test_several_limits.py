"""Several limits at once: all or nothing, and which of them decides."""

from __future__ import annotations

import math

import pytest

from limitkeeper import (
    ConfigurationError,
    FixedWindow,
    InvalidCost,
    LeakyBucketQueue,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)


@pytest.fixture
def limiter(make):
    """A user's bucket and a tenant's window."""
    return make({"user": TokenBucket("5/s burst 10"), "tenant": FixedWindow("20/min")})


def test_a_plain_key_goes_to_every_limit(limiter):
    """One key without names is the key of every limit."""
    limiter.hit("a", cost=3)
    parts = limiter.peek("a").decisions
    assert [part.remaining for part in parts] == [7, 17]


def test_a_mapping_gives_each_limit_its_key(limiter):
    """A mapping names a key for each limit; users of one tenant share the tenant's limit only."""
    limiter.hit({"user": "u1", "tenant": "acme"}, cost=10)
    found = limiter.hit({"user": "u2", "tenant": "acme"}, cost=10)
    assert [part.remaining for part in found.decisions] == [0, 0]
    assert not limiter.hit({"user": "u3", "tenant": "acme"})


def test_all_are_charged_or_none(limiter):
    """When one of the limits refuses, the other keeps what it has."""
    limiter.hit({"user": "u1", "tenant": "acme"}, cost=10)
    assert not limiter.hit({"user": "u1", "tenant": "acme"})
    assert [part.remaining for part in limiter.peek({"user": "u1", "tenant": "acme"}).decisions] == [0, 10]


def test_none_skips_a_limit(limiter):
    """A limit whose key is None is neither checked nor charged, and has no decision."""
    found = limiter.hit({"user": "u1", "tenant": None}, cost=10)
    assert [part.name for part in found.decisions] == ["user"]
    assert limiter.peek({"user": None, "tenant": "u1"}).remaining == 20


def test_all_skipped_is_allowed(limiter, store):
    """When every limit is skipped nothing is limited, and nothing is stored."""
    assert limiter.hit({"user": None, "tenant": None}, cost=10**30)
    assert limiter.acquire({"user": None, "tenant": None}).wait == 0.0
    assert len(store) == 0


def test_costs_by_name(limiter):
    """`cost=` may name limits; a limit that is not named costs 1."""
    limiter.hit("a", cost={"tenant": 3})
    assert [part.remaining for part in limiter.peek("a").decisions] == [9, 17]


def test_a_cost_of_zero_for_one_limit_takes_nothing_there(limiter):
    """A limit at its end does not refuse a call that costs it nothing."""
    limiter.hit("a", cost={"user": 10})
    assert not limiter.hit("a", cost={"tenant": 5})
    assert limiter.hit("a", cost={"user": 0, "tenant": 5})


@pytest.mark.parametrize(
    "key", [{"user": "a"}, {"user": "a", "tenant": "b", "other": "c"}, {}, {"users": "a", "tenant": "b"}], ids=repr
)
def test_a_mapping_must_name_every_limit(limiter, key):
    """Keys that leave a limit out, or name one that is not there, are a ConfigurationError that names them all."""
    with pytest.raises(ConfigurationError, match="user, tenant") as caught:
        limiter.hit(key)
    assert "None skips one" in str(caught.value)


def test_a_cost_for_an_unknown_limit_is_an_error(limiter):
    """A cost that names no limit is a ConfigurationError, even when it is right otherwise."""
    with pytest.raises(ConfigurationError, match="'tenants'"):
        limiter.hit("a", cost={"user": 1, "tenants": 3})


def test_a_key_in_a_mapping_must_be_a_text(limiter):
    """A key in a mapping is a str as any other."""
    with pytest.raises(TypeError, match="got int"):
        limiter.hit({"user": 42, "tenant": "acme"})


def test_a_cost_in_a_mapping_must_be_a_whole_number(limiter):
    """A cost in a mapping is checked as any other."""
    with pytest.raises(InvalidCost):
        limiter.hit("a", cost={"user": 1.5})


def test_refused_the_longest_wait_decides(limiter, clock):
    """When both refuse, the limit with the largest retry_after decides."""
    clock.advance(15)
    limiter.hit("a", cost=10)
    limiter.hit({"user": "b", "tenant": "a"}, cost=10)
    found = limiter.hit("a")
    assert (found.name, found.retry_after, found.limit, found.remaining) == ("tenant", 45.0, 20, 0)
    assert [part.retry_after for part in found.decisions] == [0.2, 45.0]


def test_refused_by_one_only_that_one_decides(limiter):
    """When one refuses and the other would not, the refusing one decides, and the other's part is allowed."""
    limiter.hit({"user": "a", "tenant": "b"}, cost=10)
    found = limiter.hit("a")
    assert (found.name, found.retry_after) == ("user", 0.2)
    assert [bool(part) for part in found.decisions] == [False, True]
    assert [part.remaining for part in found.decisions] == [0, 20]


def test_never_decides_before_not_yet(make):
    """A limit that can never admit the cost decides, whatever the others would have to wait."""
    limiter = make({"slow": FixedWindow("10/d"), "small": TokenBucket("5/s")})
    limiter.hit({"slow": "a", "small": "b"}, cost={"slow": 10})
    found = limiter.hit("a", cost=6)
    assert (found.name, found.retry_after) == ("small", math.inf)


def test_refused_ties_go_to_the_first(make):
    """Of limits with the same retry_after the one named first decides."""
    limiter = make({"one": TokenBucket("5/s"), "two": TokenBucket("5/s burst 5")})
    limiter.hit("a", cost=5)
    assert limiter.hit("a").name == "one"
    assert limiter.hit("a", cost=6).name == "one"


def test_allowed_the_smallest_share_left_decides(limiter):
    """When allowed, the limit with the smallest remaining/limit decides: 4 of 10 before 14 of 20."""
    found = limiter.hit("a", cost=6)
    assert (found.name, found.remaining, found.limit) == ("user", 4, 10)


def test_it_is_the_share_that_counts_not_the_number(make):
    """9 of 1000 left is less than 5 of 10."""
    limiter = make({"small": TokenBucket("10/s"), "large": FixedWindow("1000/min")})
    found = limiter.hit("a", cost={"small": 5, "large": 991})
    assert (found.name, found.remaining) == ("large", 9)


def test_allowed_ties_go_to_the_first(make):
    """Of limits with the same share left the one named first decides: 5 of 10 and 10 of 20."""
    limiter = make({"one": TokenBucket("10/s"), "two": FixedWindow("20/min")})
    assert limiter.hit("a", cost={"one": 5, "two": 10}).name == "one"


def test_in_a_peek_the_smallest_share_decides(limiter, store):
    """A peek that would be allowed is decided like an allowed hit, shows what is left now, and stores nothing."""
    limiter.hit({"user": None, "tenant": "a"}, cost=15)
    held = len(store)
    found = limiter.peek("a", cost=3)
    assert (found.name, found.remaining) == ("tenant", 5)
    assert [part.remaining for part in found.decisions] == [10, 5]
    assert len(store) == held


def test_retry_after_and_wait_are_the_largest(make):
    """A wait is until the last of the limits admits, and all are charged at that instant."""
    limiter = make({"fast": TokenBucket("10/s burst 1"), "slow": TokenBucket("1/s burst 1")})
    limiter.hit("a")
    found = limiter.reserve("a").decision
    assert found.wait == 1.0
    assert limiter.peek("a").retry_after == 2.0


def test_charged_at_the_common_start(make, clock):
    """The fast limit is charged at the common start too: it is not free for others in between."""
    limiter = make({"fast": TokenBucket("10/s burst 1"), "slow": TokenBucket("1/s burst 1")})
    limiter.hit("a")
    limiter.reserve("a")
    fast = limiter.peek({"fast": "a", "slow": None})
    assert fast.retry_after == 1.1


def test_five_limits_decide_in_one_step(make):
    """Any number of limits of any kind are one decision."""
    limiter = make(
        {
            "bucket": TokenBucket("10/s"),
            "window": FixedWindow("9/min"),
            "log": SlidingWindowLog("8/min"),
            "counter": SlidingWindowCounter("7/min"),
            "queue": LeakyBucketQueue("1/s", 6),
        }
    )
    assert [part.remaining for part in limiter.hit("a", cost=5).decisions] == [5, 4, 3, 2, 0]
    assert limiter.hit("a", cost=3).name == "counter"


def test_a_limiter_with_a_counter_does_not_reserve(make):
    """A limiter with a sliding counter decides for now only: a reservation that would wait is refused."""
    limiter = make({"bucket": TokenBucket("1/s"), "counter": SlidingWindowCounter("10/min")})
    assert limiter.reserve("a")
    refused = limiter.reserve("a", max_wait=5)
    assert not refused
    assert refused.decision.retry_after == 1.0


def test_the_same_limit_twice_is_an_error(make):
    """Two equal limits without names would be one state charged twice: a ConfigurationError."""
    with pytest.raises(ConfigurationError, match="duplicate"):
        make([TokenBucket("5/s"), TokenBucket("5/s")])


def test_equal_limits_under_two_names_are_two(make):
    """Under names of their own, equal limits have states of their own."""
    limiter = make({"read": TokenBucket("5/s"), "write": TokenBucket("5/s")})
    limiter.hit({"read": "a", "write": None}, cost=5)
    assert limiter.hit({"read": None, "write": "a"}, cost=5)


def test_limits_in_a_text_are_named_by_their_text(make):
    """Several limits in one text have their canonical text as name."""
    limiter = make("5/s burst 10; fixed window 20/min")
    assert limiter.hit({"token bucket 5/s burst 10": "a", "fixed window 20/min": None}, cost=10)
    assert limiter.names == ("token bucket 5/s burst 10", "fixed window 20/min")
