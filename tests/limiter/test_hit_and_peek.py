"""hit and peek, costs and keys, sync and async."""

from __future__ import annotations

import math

import pytest

from limitkeeper import (
    FixedWindow,
    InvalidCost,
    LeakyBucket,
    LeakyBucketQueue,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)

KINDS = [
    TokenBucket("5/s burst 10"),
    LeakyBucket("5/s", 10),
    LeakyBucketQueue("5/s", 10),
    FixedWindow("10/min"),
    FixedWindow("10/min", align="first"),
    SlidingWindowLog("10/min"),
    SlidingWindowCounter("10/min"),
]
every_kind = pytest.mark.parametrize("limit", KINDS, ids=str)


@every_kind
def test_a_hit_takes_its_cost(make, limit):
    """A hit of the whole capacity is allowed, and the next hit is refused."""
    limiter = make(limit)
    assert limiter.hit("a", cost=10)
    assert not limiter.hit("a")


@every_kind
def test_a_refused_hit_takes_nothing(make, limit):
    """However often a hit is refused, the promise to it stays the same."""
    limiter = make(limit)
    limiter.hit("a", cost=8)
    first = limiter.hit("a", cost=5)
    assert not first
    assert all(limiter.hit("a", cost=5) == first for _ in range(20))


@every_kind
def test_a_peek_answers_as_a_hit_would(make, limit):
    """Peek and hit agree on whether and when, without other calls in between."""
    limiter = make(limit)
    for cost in (3, 9, 5, 11, 2, 1):
        peeked = limiter.peek("a", cost=cost)
        hit = limiter.hit("a", cost=cost)
        assert (peeked.allowed, peeked.retry_after) == (hit.allowed, hit.retry_after)


@every_kind
def test_a_peek_stores_nothing(make, limit, store):
    """A peek leaves no key behind, and shows what remains now, not after the hit."""
    limiter = make(limit)
    assert limiter.peek("a", cost=4).remaining == 10
    assert limiter.peek("a", cost=4).remaining == 10
    assert len(store) == 0


@every_kind
def test_keys_are_independent(make, limit):
    """Using up one key leaves others unchanged."""
    limiter = make(limit)
    limiter.hit("a", cost=10)
    assert limiter.hit("b", cost=10)


@every_kind
def test_a_cost_of_zero_is_always_allowed_and_stores_nothing(make, limit, store):
    """A cost of 0 is allowed even when nothing is left, and leaves no key behind."""
    limiter = make(limit)
    assert limiter.hit("new", cost=0)
    assert len(store) == 0
    limiter.hit("a", cost=10)
    assert limiter.hit("a", cost=0).retry_after == 0.0
    assert limiter.acquire("a", cost=0).wait == 0.0
    assert not limiter.hit("a")


@every_kind
@pytest.mark.parametrize("cost", [11, 10**9, 2**53, 2**63, 2**64 + 1, 10**30])
def test_a_cost_above_the_capacity_is_never(make, limit, cost):
    """A cost above the capacity is never admitted, however large, and takes nothing."""
    limiter = make(limit)
    found = limiter.hit("a", cost=cost)
    assert (found.allowed, found.retry_after, found.remaining) == (False, math.inf, 10)
    assert limiter.peek("a", cost=cost).retry_after == math.inf


@pytest.mark.parametrize("cost", [True, False, 1.0, 0.5, -1, -(10**30), "1", None, [1]], ids=repr)
def test_a_cost_that_is_no_whole_number_is_an_error(make, cost):
    """A bool, a float, a negative number or anything else is an InvalidCost that shows it, and takes nothing."""
    limiter = make(TokenBucket("5/s burst 10"))
    for verb in (limiter.hit, limiter.peek, limiter.acquire, limiter.refund, limiter.reserve):
        with pytest.raises(InvalidCost, match="cost must be") as caught:
            verb("a", cost=cost)
        assert repr(cost) in str(caught.value)
    assert limiter.peek("a").remaining == 10


def test_an_invalid_cost_is_a_value_error(make):
    """InvalidCost is a ValueError, and a negative one mentions refund()."""
    with pytest.raises(ValueError, match=r"use refund\(\)"):
        make("5/s").hit("a", cost=-1)


KEYS = {
    "empty": "",
    "ascii": "user:42",
    "NUL": "a\0b",
    "only NUL": "\0",
    "latin": "über",
    "greek": "κλειδί",
    "emoji": "🔑",
    "lone surrogate": "\ud800",
    "another surrogate": "\udfff",
    "right to left": "مفتاح",
    "combining": "e\u0301",
    "21 bytes": "x" * 21,
    "22 bytes": "x" * 22,
    "10 kB": "k" * 10_000,
    "10 kB of emoji": "🔑" * 2500,
    "newline": "a\nb",
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_any_text_is_a_key(make, key, store):
    """Any str is a key: it is remembered, distinct from the others, and listed as it was given."""
    limiter = make(TokenBucket("5/s burst 10"))
    for other in KEYS.values():
        limiter.hit(other)
    assert limiter.hit(key, cost=9).remaining == 0
    assert limiter.peek(key + "?").remaining == 10
    assert sorted(name for name, _ in store.items(limiter.named[0])) == sorted(KEYS.values())


def test_texts_that_look_alike_are_different_keys(make):
    """A key is its characters: composed and decomposed, narrow and wide, with and without NUL are different keys."""
    limiter = make(TokenBucket("1/s"))
    for key in ("é", "e\u0301", "a", "a\0", "\0a", "ab", "a\u0300b", "\ud83d\udd11", "🔑"):
        assert limiter.hit(key)


class Name(str):
    """A text of a user's own type."""

    def __str__(self) -> str:
        return "something else"

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return False


def test_a_subclass_of_str_is_the_text_in_it(make):
    """A key of a type that derives from str is the same key as the plain text."""
    limiter = make(TokenBucket("5/s burst 10"))
    limiter.hit(Name("a"), cost=4)
    assert limiter.hit("a").remaining == 5
    assert limiter.peek(Name("a")).remaining == 5


@pytest.mark.parametrize("key", [42, None, b"a", 1.5, ("a",), ["a"], True], ids=repr)
def test_a_key_of_another_type_is_a_type_error(make, key):
    """A key that is no str is a TypeError with its type and the right one."""
    limiter = make(TokenBucket("5/s burst 10"))
    for verb in (limiter.hit, limiter.peek, limiter.acquire, limiter.reserve, limiter.refund, limiter.reset):
        with pytest.raises(TypeError, match=f"got {type(key).__name__}"):
            verb(key)
    with pytest.raises(TypeError, match="callers without a key need one" if key is None else r"pass str\(…\)"):
        limiter.hit_many(["a", key])


def test_time_brings_back_what_was_taken(make, clock):
    """At its retry time the same hit is allowed, and one microsecond before it is not."""
    for limit in KINDS:
        limiter = make(limit)
        limiter.hit("a", cost=10)
        wait = limiter.hit("a", cost=3).retry_after
        clock.advance(wait - 0.000001)
        assert not limiter.hit("a", cost=3)
        clock.advance(0.000001)
        assert limiter.hit("a", cost=3)
